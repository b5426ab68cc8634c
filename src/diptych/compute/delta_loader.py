"""A gated delta rule's tensors as weight handles, from the layouts that checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.compute.ops.contract import (
    AttentionSpec,
    Experts,
    Heads,
    Linear,
    LinearParts,
    Loader,
    NormParts,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.views import PickedTensor, PowerTensor
from diptych.compute.weights import Source
from diptych.models.spec import AttentionLayer, DeltaSpec, ModelSpec

APART = ("in_proj_qkv", "in_proj_z")  # what a converter makes of one matrix by key head


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """Its projections: q, k and v; what gates the heads; rates (beta of each head, then its decay); o."""

    qkv: LinearParts
    gate: LinearParts
    rates: LinearParts
    o: LinearParts


def delta_parts(source: Source, delta: DeltaSpec, names: tuple[str, ...], root: str, hidden: int) -> DeltaParts:
    """The projections of the layer whose tensors begin with root; names: `TensorNames.delta_in`."""
    width, heads = delta.width, delta.n_value_heads
    by_key_head = len(names) == 2
    qkv: WeightTensor
    gate: WeightTensor
    if by_key_head and not source.is_plain:
        both = source.tensor(f"{root}{names[0]}.weight", delta.n_channels + width, hidden)
        of_qkv, of_gate = _by_key_head(delta)
        qkv, gate = PickedTensor(both, of_qkv), PickedTensor(both, of_gate)
    else:
        apart = APART if by_key_head else names[:2]
        sizes = (delta.n_channels, width)
        qkv, gate = (source.tensor(f"{root}{name}.weight", n, hidden) for name, n in zip(apart, sizes, strict=True))
    rates: tuple[WeightTensor, ...]
    if by_key_head:
        rates = (PickedTensor(source.tensor(f"{root}{names[1]}.weight", 2 * heads, hidden), _rates_by_key_head(delta)),)
    else:
        rates = tuple(source.tensor(f"{root}{name}.weight", heads, hidden) for name in names[2:])
    o = source.tensor(f"{root}out_proj.weight", hidden, width)
    return DeltaParts(*(LinearParts(weights=some) for some in ((qkv,), (gate,), rates, (o,))))


def delta_heads(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    layer: int,
    attention: AttentionLayer,
    root: str,
) -> Heads:
    """What moves the states of a layer on."""
    delta = attention.delta
    assert delta is not None
    decay = source.tensor(f"{root}A_log", delta.n_value_heads)
    taps = (delta.n_channels, delta.n_taps) if source.is_plain else (delta.n_channels, 1, delta.n_taps)
    return loader.delta_rule(
        AttentionSpec(
            layer=layer,
            n_heads=delta.n_value_heads,
            n_kv_heads=delta.n_key_heads,
            head_dim=delta.value_dim,
            scale=attention.scale,
            norm_eps=spec.norm_eps,
            delta=delta,
            place=spec.delta_layers.index(layer),
        ),
        taps=source.tensor(f"{root}conv1d.weight", *taps),
        decay=decay if source.is_plain else PowerTensor(decay),
        shift=source.tensor(f"{root}dt_bias", delta.n_value_heads),
        norm=NormParts(weight=source.tensor(f"{root}norm.weight", delta.value_dim)),
    )


def _by_key_head(delta: DeltaSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of q, k and v, and of the gate, where they lie by key head: its q, its k, the v and gates of its value heads."""
    own = delta.n_value_heads // delta.n_key_heads * delta.value_dim
    rows = torch.arange(delta.n_channels + delta.width).view(delta.n_key_heads, -1)
    q, k, v, gate = (part.reshape(-1) for part in rows.split((delta.key_dim, delta.key_dim, own, own), dim=1))
    return torch.cat([q, k, v]), gate


def _rates_by_key_head(delta: DeltaSpec) -> torch.Tensor:
    """The same of the rates: the betas of its value heads, then their decays."""
    rows = torch.arange(2 * delta.n_value_heads).view(delta.n_key_heads, 2, -1)
    return torch.cat([rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)])
