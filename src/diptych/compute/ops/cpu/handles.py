"""What the cpu backend's loader hands out in place of tensors: numbers in a native program, and the kernels' shapes of them.

A handle is opaque to the walk (`compute.walk.decoder`); the recorder beside the loader opens it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    EntryParts,
    IndexParts,
    LinearParts,
    NormParts,
    RelatedParts,
    Role,
    RuleParts,
    WeightTensor,
)
from diptych.compute.ops.cpu.kernels import _cpu, state_shape
from diptych.compute.ops.cpu.parts import Rows
from diptych.compute.ops.shares import OwnHeads, head_rows
from diptych.ground.formats import ENGINE_WEIGHTS, KV_IN_BYTES, KeptFormat, rows_dtype
from diptych.models.latent import MlaSpec
from diptych.models.mlp import MoeSpec
from diptych.models.spec import QkNorm

# inputs that share 16 levels of the int8 grid: 4.25 bits a weight, quality in LAB.md
INT4_GROUP = ENGINE_WEIGHTS["int4"][0].group
LANES = 16  # of a vector, in which a state's columns lie (csrc/sets/kernels.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHandle:
    """A packed weight: its number in the program, its key there, the name of its format (a `KeptFormat`'s too), its shape.

    Where ranks divide a model, the weight is the rank's outputs of n_outputs: is_gathered says that they go to `column` and the
    following of a row that all ranks write. pieces: several weights that write one row, or gate and up. index
    None: others have all of it.
    rows: which of n_outputs the packed weight has, in its order; None: all. begin: the first output of the tensors in `key`.
    order: the name of the order in which it has its inputs, in `Packer.input_orders`; empty: as they come.
    is_balanced: it may be multiplied by powers of two, which the loader's `exponents` say.
    """

    index: int | None
    key: str
    format: str
    n_inputs: int
    n_outputs: int
    activation: Activation | None = None
    role: Role | None = None
    column: int = 0
    is_gathered: bool = False
    pieces: tuple[LinearHandle, ...] = ()
    rows: Rows | None = None
    begin: int = 0
    order: str = ""
    is_balanced: bool = False

    def own_rows(self, begin: int, end: int) -> tuple[int, list[slice]]:
        """Where in the packed weight its part of outputs [begin, end) begins, and which of them that is, counted from begin."""
        first, at = 0, 0
        found: list[slice] = []
        for low, high in ((0, end),) if self.rows is None else self.rows:
            own = slice(max(low, begin) - begin, min(high, end) - begin)
            if own.start < own.stop:
                first = first if found else at + own.start + begin - low
                found.append(own)
            at += high - low
        return first, found

    @property
    def rows_format(self) -> str:
        """The form of the rows it multiplies: int8 and int4 weights share one."""
        if self.format in ENGINE_WEIGHTS:
            return rows_dtype(ENGINE_WEIGHTS[self.format][1])
        return KeptFormat.named(self.format).rows


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorHandle:
    """The numbers of a norm's weight and bias (-1: none), and whether it takes the mean away."""

    index: int
    bias: int = -1
    is_centred: bool = False

    @property
    def kind(self) -> dict[str, Any]:
        """What distinguishes it from an RMSNorm, as the program's operations take it."""
        return {"bias": self.bias, "is_centred": self.is_centred}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHandle:
    """An embedding table's number and shape."""

    index: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesHandle:
    """`EntryParts`: a packed weight, and vectors by number. place: which of the states has their sums."""

    series: LinearHandle
    offsets: int
    norm: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHandle:
    """A norm's number, and packed weights by head: what takes queries to the latent, and latents to outputs. Of rows that are
    met as they are there are no keys, values are of groups of heads, and ones is what queries are normed by. scales: of the
    rank's heads; -1: none, and no norm where latents are another layer's.
    """

    norm: int
    keys: tuple[LinearHandle, ...]
    values: tuple[LinearHandle, ...]
    ones: int = -1
    scales: int = -1
    entries: EntriesHandle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHandle:
    """`IndexParts`: packed weights, norms' weights and bias by number (-1: none), and the native shape of the heads."""

    queries: LinearHandle
    shape: Any
    key: LinearHandle | None = None
    norm: int = -1
    bias: int = -1
    weights: LinearHandle | None = None
    q_norm: int = -1
    gates: LinearHandle | None = None
    offsets: int = -1
    scales: int = -1
    entries: EntriesHandle | None = None


class Packer(Protocol):
    """What an index is packed by: the loader."""

    def linear(self, parts: LinearParts) -> LinearHandle:
        """A projection."""
        ...

    def router(self, parts: LinearParts) -> LinearHandle:
        """A small one that decides."""
        ...

    def rates(self, parts: LinearParts) -> LinearHandle:
        """Another, which an adapter may change."""
        ...

    def norm(self, parts: NormParts, *, offset: float = 0.0, is_read: bool = True) -> VectorHandle:
        """A norm."""
        ...

    def vector(self, tensor: WeightTensor) -> VectorHandle:
        """Numbers as they are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleHandle:
    """What moves states on, of a rank's heads: their native shape (None: it has none), and `RuleParts` by number."""

    shape: Any
    taps: int = -1
    tap_bias: int = -1
    decay: int = -1
    shift: int = -1
    skip: int = -1
    norm: int = -1

    @property
    def numbers(self) -> dict[str, int]:
        """Of all but the shape."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "shape"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedHandle:
    """`RelatedParts` of a rank's heads; places: a vector."""

    keys: tuple[LinearHandle, ...]
    queries: tuple[LinearHandle, ...]
    places: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHandle:
    """A layer's attention: the rank's heads (None: it has none) and their native shape, rotary table and norms by number."""

    spec: AttentionSpec
    own: OwnHeads | None
    shape: Any = None
    rope: int | None = None
    q_norm: int | None = None
    k_norm: int | None = None
    sinks: int = -1
    slopes: int = -1
    distances: int = -1
    related: RelatedHandle | None = None
    latent: LatentHandle | None = None
    index: IndexHandle | None = None
    rule: RuleHandle | None = None

    @property
    def latents(self) -> tuple[MlaSpec, LatentHandle]:
        """Of latent attention: its widths and its weights."""
        assert self.spec.mla is not None
        assert self.latent is not None
        return self.spec.mla, self.latent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsHandle:
    """A mixture's packed weights."""

    spec: MoeSpec
    router: LinearHandle
    choice_bias: int
    scales: int
    table: int
    behind: int
    gate_up: tuple[LinearHandle, ...]
    down: tuple[LinearHandle, ...]


def native_shape(weights: KeptFormat | str, n: int, k: int, *, is_gated: bool = False, has_bias: bool = False) -> Any:
    """The kernels' description of a packed weight [n, k] in that format."""
    common = {"n": n, "k": k, "is_gated": is_gated, "has_bias": has_bias}
    if isinstance(weights, str):
        return _cpu.LinearShape(format=weights, group=INT4_GROUP, **common)
    return _cpu.LinearShape(
        format=weights.kind,
        group=weights.group if weights.is_grouped or weights.kind == "fp8" else INT4_GROUP,
        scale=weights.scale,
        grid=weights.grid,
        is_wide=weights.is_wide,
        **common,
    )


def attention_shape(spec: AttentionSpec, own: OwnHeads, kv_format: str) -> Any:
    """The kernels' description of a rank's heads, beside a cache of that format."""
    return _cpu.AttentionShape(
        n_heads=own.n_heads,
        n_kv_heads=own.n_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.value_dim,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        is_chunked=spec.is_chunked,
        most=None if spec.index is None else spec.index.most,
        block=1 if spec.index is None else spec.index.block,
        pool=1 if spec.index is None else spec.index.pool,
        by_means=spec.index is not None and spec.index.by_means,
        is_listed=spec.mla is not None and spec.mla.n_groups > 0,
        entry_tokens=0 if spec.entries is None else spec.entries.tokens,
        in_bytes=kv_format == KV_IN_BYTES,
    )


def norm_rows(spec: AttentionSpec, own: OwnHeads | None) -> tuple[slice, slice]:
    """Which numbers of the norms of q and k are those of a rank's heads."""
    if spec.qk_norm not in (QkNorm.HEADS, QkNorm.CENTRED) or own is None:
        return slice(None), slice(None)
    width = spec.head_dim * (2 if spec.qk_norm is QkNorm.CENTRED else 1)
    q, k = (own.first_head, own.n_heads), (own.first_kv_head, own.n_kv_heads)
    return slice(q[0] * width, sum(q) * width), slice(k[0] * width, sum(k) * width)


def distance_rows(values: torch.Tensor, spec: AttentionSpec, heads: slice) -> torch.Tensor:
    """Numbers of distances [H (2 reach + 1)] of some heads, their ends as often as `AttentionShape::distances` has them."""
    return F.pad(values.view(spec.n_heads, -1)[heads], (16, 15), mode="replicate").flatten()


def related_handle(parts: RelatedParts, heads: slice, loader: Packer) -> RelatedHandle:
    """Of some heads, in the finest format."""
    keys, queries = (tuple(loader.router(one) for one in some[heads]) for some in (parts.keys, parts.queries))
    return RelatedHandle(keys=keys, queries=queries, places=loader.vector(parts.places).index)


def entries_handle(parts: EntryParts, place: int, loader: Packer) -> EntriesHandle:
    """Every rank's, whole. What they are made of is in the finest format, as it decides what many tokens are together."""
    return EntriesHandle(
        series=loader.rates(parts.series),
        offsets=loader.vector(parts.offsets).index,
        norm=loader.norm(parts.norm, is_read=False).index,
        place=place,
    )


def entry_index_handle(spec: AttentionSpec, index: IndexParts, loader: Packer) -> IndexHandle:
    """Of an index whose keys are entries, every rank's, whole."""
    own = spec.own_index
    assert index.entries is not None
    assert index.weights is not None
    assert own.entries is not None
    sizes = {"n_heads": own.n_heads, "n_kv_heads": 1, "head_dim": own.head_dim, "scale": 1.0, "most": own.most}
    return IndexHandle(
        queries=loader.linear(index.queries),
        weights=loader.router(index.weights),
        entries=entries_handle(index.entries, spec.entry_places[1], loader),
        shape=_cpu.AttentionShape(**sizes, window=spec.window, is_listed=True, entry_tokens=own.entries.tokens),
    )


def index_handle(spec: AttentionSpec, index: IndexParts, loader: Packer, own_heads: OwnHeads | None) -> IndexHandle:
    """Every rank's, whole, but that of blocks each head chooses for a KV head of its own. Key and weights are in the finest
    format, as they are small and decide.
    """
    own, offset = spec.own_index, index.norm_offset
    if index.entries is not None:
        return entry_index_handle(spec, index, loader)
    assert index.key is not None
    assert index.norm is not None
    norm = loader.norm(index.norm, offset=offset, is_read=False)
    n_heads = own.n_heads if own.block == 1 or own.by_means or own_heads is None else own_heads.n_kv_heads
    sizes = {"n_heads": n_heads, "n_kv_heads": 1, "head_dim": own.key_width, "scale": 1.0}
    return IndexHandle(
        queries=loader.linear(index.queries),
        key=loader.router(index.key),
        norm=norm.index,
        bias=norm.bias,
        weights=None if index.weights is None else loader.router(index.weights),
        q_norm=-1 if index.q_norm is None else loader.norm(index.q_norm, offset=offset, is_read=False).index,
        shape=_cpu.AttentionShape(**sizes, most=own.most, block=own.block, pool=own.pool, by_means=own.by_means),
        gates=loader.router(index.gates[0]) if index.gates else None,
        offsets=-1 if index.offsets is None else loader.vector(index.offsets).index,
        scales=-1 if index.scales is None else loader.vector(index.scales).index,
    )


def rule_handle(
    spec: AttentionSpec,
    rule: RuleParts,
    own: OwnHeads | None,
    read: Callable[[WeightTensor], torch.Tensor],
    add: Callable[[torch.Tensor], int],
) -> RuleHandle:
    """The rule of a rank's heads. read: a tensor's values in a row; add: a vector to the program, whose number it gives."""
    state = spec.state
    assert state is not None
    keys = state.n_key_heads * state.key_dim
    widths = (keys, keys, state.width)
    rows = () if own is None else head_rows(widths, own, spec.n_heads, spec.n_kv_heads, has_states=True)
    mine = slice(0, 0) if own is None else slice(own.first_head, own.first_head + own.n_heads)

    def of_channels(tensor: WeightTensor) -> int:
        by_channel = read(tensor).view(state.n_channels, -1)
        parts = [by_channel[begin:end] for begin, end in rows]
        return add(torch.cat([by_channel[:0], *parts]).T.reshape(-1))

    def of_heads(tensor: WeightTensor | None) -> int:
        return -1 if tensor is None else add(read(tensor).view(state.n_value_heads, -1)[mine].reshape(-1))

    def of_decays(tensor: WeightTensor | None) -> int:
        if tensor is None or not state.is_selective:
            return of_heads(tensor)
        return add(by_lanes(read(tensor).view(state.n_value_heads, state.value_dim, -1)[mine]))

    return RuleHandle(
        shape=own and state_shape(state, own, scale=spec.scale, norm_eps=spec.norm_eps),
        taps=-1 if rule.taps is None else of_channels(rule.taps),
        tap_bias=-1 if rule.tap_bias is None else of_channels(rule.tap_bias),
        decay=of_decays(rule.decay),
        shift=of_heads(rule.shift),
        skip=of_heads(rule.skip),
        norm=-1 if rule.norm is None else add(read(rule.norm.weight)),
    )


def by_head_handle(
    parts: tuple[LinearParts, ...],
    own: OwnHeads | None,
    pack: Callable[[LinearParts], LinearHandle],
    *,
    of_keys: bool,
) -> LinearHandle:
    """A projection for each of a rank's heads, or key heads: pieces that read neighbouring inputs from the first one's on."""
    first, n_own = (0, 0) if own is None else (own.first_head, own.n_heads)
    if own is not None and of_keys:
        first, n_own = own.first_kv_head, own.n_kv_heads
    mine, n = slice(first, first + n_own), parts[0].n_outputs
    return LinearHandle(
        index=None,
        key="",
        format="bf16",
        n_inputs=parts[0].n_inputs * len(parts),
        n_outputs=n * len(parts),
        column=n * mine.start,
        pieces=tuple(pack(one) for one in parts[mine]),
    )


def by_part_handle(
    parts: tuple[LinearParts, ...],
    own: OwnHeads | None,
    width: int,
    weights_format: str,
    pack: Callable[..., LinearHandle],
) -> LinearHandle:
    """Likewise for each of q, k and v, of which a rank has the outputs of its heads, each so wide."""
    rows = () if own is None else ((own.first_head * width, (own.first_head + own.n_heads) * width),)
    pieces = tuple(
        pack(one, weights_format, rows=None if rows == ((0, one.n_outputs),) else rows)
        for one in (parts if rows else ())
    )
    n_inputs, n_outputs = (sum(getattr(one, size) for one in pieces) for size in ("n_inputs", "n_outputs"))
    return LinearHandle(index=None, key="", format="bf16", n_inputs=n_inputs, n_outputs=n_outputs, pieces=pieces)


def by_lanes(decays: torch.Tensor) -> torch.Tensor:
    """Decays [H, v, d] as the kernels have a state's heads: for each 16 columns a row of each key, zeros behind the last."""
    padded = torch.nn.functional.pad(decays, (0, 0, 0, -decays.shape[1] % LANES))
    return padded.unflatten(1, (-1, LANES)).mT.reshape(-1)


def is_table_too(head: LinearHandle, tensor: WeightTensor) -> bool:
    """Whether a packed head has the very numbers of the embedding that it is tied to, at least as fine."""
    is_kept = head.format.startswith("group") and not head.order  # codes and scales of the file, inputs where they were
    return is_kept or (head.format == "bf16" and tensor.dtype == torch.bfloat16)
