"""Rows that all heads meet as they are, entries beside them, and their index (DeepSeek V4), found by its files' names."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.loading.layer_tensors import LayerTensors
from diptych.compute.loading.views import RowsTensor
from diptych.compute.ops.contract import Experts, Heads, IndexParts, Linear, LinearParts, NormParts, Table, Vector
from diptych.compute.ops.contract_parts import EntryParts
from diptych.models.latent import EntrySpec, IndexSpec, MlaSpec


def entry_parts(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], entries: EntrySpec, width: int, root: str
) -> EntryParts:
    """Of entries so wide, whose tensors begin with root."""
    rows = entries.n_series * width
    return EntryParts(
        series=layer.linear(root, ("wkv", "wgate"), (rows, rows), layer.spec.hidden),
        offsets=layer.source.tensor(f"{root}ape", entries.tokens, rows),
        norm=NormParts(weight=layer.source.tensor(f"{root}norm.weight", width)),
    )


def entry_index(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], mla: MlaSpec, index: IndexSpec, root: str
) -> IndexParts:
    """Of an index whose keys are entries, and whose tensors begin with root."""
    assert mla.q_rank is not None
    assert index.entries is not None
    return IndexParts(
        queries=layer.linear(root, ("wq_b",), (index.n_heads * index.head_dim,), mla.q_rank),
        weights=layer.linear(root, ("weights_proj",), (index.n_heads,), layer.spec.hidden),
        entries=entry_parts(layer, index.entries, index.head_dim, f"{root}compressor."),
    )


def group_parts(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], mla: MlaSpec, n_heads: int, root: str
) -> tuple[LinearParts, ...]:
    """What takes a group of heads to what the output projection reads of it: rows of one matrix."""
    n = n_heads * mla.v_dim // mla.n_groups
    stacked = layer.source.tensor(f"{root}wo_a.weight", mla.n_groups * n, n_heads // mla.n_groups * mla.row)
    return tuple(LinearParts(weights=(RowsTensor(stacked, at, at + n),)) for at in range(0, mla.n_groups * n, n))


def read_anew(
    entries: EntryParts | None, index: IndexParts | None, readers: tuple[LinearParts, ...]
) -> tuple[EntryParts | None, IndexParts | None]:
    """The same with other projections of what they read, which come in the order of `readers_of`."""
    left = list(readers)
    if entries is not None:
        entries = replace(entries, series=left.pop(0))
    if index is not None:
        assert index.entries is not None
        index = replace(index, entries=replace(index.entries, series=left.pop(0)), weights=left.pop(0))
    return entries, index


def readers_of(entries: EntryParts | None, index: IndexParts | None) -> tuple[LinearParts, ...]:
    """What of them reads the layer's input."""
    own = () if entries is None else (entries.series,)
    return own if index is None else (*own, *index.of_input)
