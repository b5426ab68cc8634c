"""Tensors of layers with a state as weight handles, from the layouts that checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.compute.loading.views import (
    JoinedTensor,
    NumbersTensor,
    PickedTensor,
    PowerTensor,
    ScaledTensor,
    SoftplusTensor,
)
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import (
    AttentionSpec,
    Experts,
    Heads,
    Linear,
    LinearParts,
    Loader,
    NormParts,
    RuleParts,
    Table,
    Vector,
    WeightTensor,
)
from diptych.models.families.family import TensorNames
from diptych.models.spec import AttentionLayer, ModelSpec
from diptych.models.states import StateRule, StateSpec, steady_decays

APART = ("in_proj_qkv", "in_proj_z")  # what a converter makes of one matrix by key head
TOGETHER = "conv1d"  # taps of all channels
UNIT_DECAY = 8.0  # of recurrent units whose gates are open, over a softplus of their own number


@dataclass(frozen=True, slots=True)
class StateProjections:
    """q, k and v, or what a convolution is of; what gates the heads; rates; o; of gate and decays by key the first steps,
    of these the second, if there are two.
    """

    qkv: LinearParts
    gate: LinearParts | None
    rates: LinearParts | None
    o: LinearParts
    first_gate: LinearParts | None = None
    first_decays: LinearParts | None = None
    decays: LinearParts | None = None


def state_projections(source: Source, state: StateSpec, names: TensorNames, root: str, hidden: int) -> StateProjections:
    """Those of the layer whose tensors begin with root."""
    other = names.others.get(names.states_o)
    name = other if other is not None and source.has(f"{root}{other}.weight") else names.states_o
    o = _parts(source.tensor(f"{root}{name}.weight", hidden, state.width))
    if state.is_unit:
        return _of_units(source, state, names, root, o)
    if state.is_selective:  # what taps see, then what gates
        both = source.tensor(f"{root}{names.states_in[0]}.weight", state.n_projected, hidden)
        rows = torch.arange(state.n_projected)
        parts = (rows[0::2], rows[1::2]) if names.selects_by_head else rows.chunk(2)
        of_values, of_gate = (PickedTensor(both, part) for part in parts)
        return StateProjections(_parts(of_values), _parts(of_gate), None, o)
    if state.rank:
        return _in_two_steps(source, state, names.states_in, root, o)
    if state.fades_by_key:
        return _in_one_step(source, state, names.states_in, root, o)
    if state.is_steady:
        return _by_head(source, state, names.states_in, root, o)
    if len(names.states_in) > 1:
        return StateProjections(*_apart(source, state, names.states_in, root, hidden), o)
    all_of_them = source.tensor(f"{root}{names.states_in[0]}.weight", state.n_projected, hidden)
    if state.rule is StateRule.CONVOLUTION:
        return StateProjections(_parts(all_of_them), None, None, o)
    if state.rule is StateRule.DELTA:  # q, k and v, what gates, betas and decays
        rows = torch.arange(state.n_projected).split((state.n_channels, state.gate_width, state.n_rates))
        qkv, of_heads, of_rates = (PickedTensor(all_of_them, part) for part in rows)
        return StateProjections(_parts(qkv), _parts(of_heads), _parts(of_rates), o)
    # Mamba-2: what gates x, then x, B and C, which are v, k and q here, and the steps
    keys = state.n_key_heads * state.key_dim
    gate, v, k, q, rates = torch.arange(state.n_projected).split((state.width, state.width, keys, keys, state.n_rates))
    of_qkv, of_gate, of_rates = (PickedTensor(all_of_them, rows) for rows in (torch.cat([q, k, v]), gate, rates))
    return StateProjections(_parts(of_qkv), _parts(of_gate), _parts(of_rates), o)


def state_readers(parts: StateProjections) -> tuple[LinearParts, ...]:
    """What reads the layer's norm: q, k and v, the gate or its first step, the rates, the decays' first step, if any."""
    gate = parts.gate if parts.first_gate is None else parts.first_gate
    return tuple(one for one in (parts.qkv, gate, parts.rates, parts.first_decays) if one is not None)


def _parts(*weights: WeightTensor) -> LinearParts:
    return LinearParts(weights=weights)


def _in_two_steps(
    source: Source, state: StateSpec, names: tuple[str, ...], root: str, o: LinearParts
) -> StateProjections:
    """Of a delta rule that fades by key: q, k and v, the gate's two, beta, the decays' two."""
    hidden, rank = o.n_outputs, state.rank
    *of_qkv, first_gate, gate, beta, first_decays, decays = names

    def linear(name: str, n: int, k: int) -> LinearParts:
        return _parts(source.tensor(f"{root}{name}.weight", n, k))

    return StateProjections(
        qkv=_parts(
            *(source.tensor(f"{root}{name}.weight", n, hidden) for name, n in _of_channels(state, tuple(of_qkv)))
        ),
        gate=linear(gate, state.gate_width, rank),
        rates=linear(beta, state.n_rates, hidden),
        o=o,
        first_gate=linear(first_gate, rank, hidden),
        first_decays=linear(first_decays, rank, hidden),
        decays=linear(decays, state.n_decays, rank),
    )


def _in_one_step(
    source: Source, state: StateSpec, names: tuple[str, ...], root: str, o: LinearParts
) -> StateProjections:
    """Of a delta rule that fades by key: q, k and v, the gate, beta, the decays."""
    *of_qkv, gate, beta, decays = names
    rows = (
        *_of_channels(state, tuple(of_qkv)),
        (gate, state.gate_width),
        (beta, state.n_rates),
        (decays, state.n_decays),
    )
    *qkv, of_gate, rates, first_decays = (source.tensor(f"{root}{name}.weight", n, o.n_outputs) for name, n in rows)
    return StateProjections(_parts(*qkv), _parts(of_gate), _parts(rates), o, first_decays=_parts(first_decays))


def _by_head(source: Source, state: StateSpec, names: tuple[str, ...], root: str, o: LinearParts) -> StateProjections:
    """Of a steady state: q, k and v of each head behind one another, and the gate."""
    both = source.tensor(f"{root}{names[0]}.weight", state.n_channels, o.n_outputs)
    rows = torch.arange(state.n_channels).view(state.n_value_heads, 3, -1).transpose(0, 1).reshape(-1)
    gate = source.tensor(f"{root}{names[1]}.weight", state.width, o.n_outputs)
    return StateProjections(_parts(PickedTensor(both, rows)), _parts(gate), None, o)


def _of_units(source: Source, state: StateSpec, names: TensorNames, root: str, o: LinearParts) -> StateProjections:
    """Of recurrent units: what taps see, what gates, each with a bias, as the way back has one."""
    values, gate = (
        LinearParts(
            weights=(source.tensor(f"{root}{name}.weight", state.width, o.n_outputs),),
            biases=(source.tensor(f"{root}{name}.bias", state.width),),
        )
        for name in names.states_in
    )
    bias = source.tensor(f"{root}{names.states_o}.bias", o.n_outputs)
    return StateProjections(values, gate, None, LinearParts(weights=o.weights, biases=(bias,)))


def _apart(
    source: Source, state: StateSpec, names: tuple[str, ...], root: str, hidden: int
) -> tuple[LinearParts, LinearParts, LinearParts]:
    """q, k and v, gate and rates of a delta rule: each by itself, or by key head."""
    width, heads = state.width, state.n_value_heads
    by_key_head = len(names) == 2
    if by_key_head and not source.is_plain:
        both = source.tensor(f"{root}{names[0]}.weight", state.n_channels + width, hidden)
        qkv, gate = (_parts(PickedTensor(both, rows)) for rows in _by_key_head(state))
    else:
        of_qkv, of_gate = (APART[:1], APART[1]) if by_key_head else (names[:-3], names[-3])
        qkv = _parts(*(source.tensor(f"{root}{name}.weight", n, hidden) for name, n in _of_channels(state, of_qkv)))
        gate = _parts(source.tensor(f"{root}{of_gate}.weight", width, hidden))
    if by_key_head:
        both = source.tensor(f"{root}{names[1]}.weight", 2 * heads, hidden)
        return qkv, gate, _parts(PickedTensor(both, _rates_by_key_head(state)))
    return qkv, gate, _parts(*(source.tensor(f"{root}{name}.weight", heads, hidden) for name in names[-2:]))


def state_heads(
    source: Source,
    loader: Loader[Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    layer: int,
    attention: AttentionLayer,
    names: TensorNames,
    root: str,
) -> Heads:
    """What moves the states of a layer on."""
    state = attention.state
    assert state is not None
    return loader.state_rule(
        AttentionSpec(
            layer=layer,
            n_heads=state.n_value_heads,
            n_kv_heads=state.n_key_heads,
            head_dim=state.value_dim,
            scale=attention.scale,
            norm_eps=state.norm_eps or spec.norm_eps,
            state=state,
            place=spec.state_layers.index(layer),
        ),
        RuleParts(decay=NumbersTensor(steady_decays(state.n_value_heads, layer, spec.n_layers)))
        if state.is_steady
        else _rule(source, state, names, root),
    )


def _rule(source: Source, state: StateSpec, names: TensorNames, root: str) -> RuleParts:
    """Its numbers. Mamba-2's channels lie as x, B and C: v, k and q here."""
    if state.is_unit:
        units = source.tensor(f"{root}{names.units}recurrent_param", state.width)
        return RuleParts(decay=ScaledTensor(SoftplusTensor(units), UNIT_DECAY))
    if state.is_selective:
        return _selective_rule(source, state, names, root)
    channels, heads = state.n_channels, state.n_value_heads
    is_delta = state.rule is StateRule.DELTA
    taps = _taps(source, state, names, root)
    bias = source.tensor(f"{root}{names.taps[0]}.bias", channels) if state.has_tap_bias else None
    if state.rule is StateRule.CONVOLUTION:
        return RuleParts(taps=taps, tap_bias=bias)
    if not is_delta:
        keys = state.n_key_heads * state.key_dim
        v, k, q = torch.arange(channels).split((state.width, keys, keys))
        scales = (state.q_scale, state.k_scale, state.v_scale)
        picked = (ScaledTensor(PickedTensor(taps, rows), scale) for rows, scale in zip((q, k, v), scales, strict=True))
        taps, bias = JoinedTensor(tuple(picked)), bias and PickedTensor(bias, torch.cat([q, k, v]))
    decay: WeightTensor = (
        JoinedTensor((source.tensor(f"{root}A_log", 1, 1, heads, 1),))
        if names.wraps_decays and not source.is_plain
        else source.tensor(f"{root}A_log", heads)
    )
    return RuleParts(
        taps=taps,
        tap_bias=bias,
        decay=decay if source.is_plain else PowerTensor(decay),
        shift=source.tensor(f"{root}dt_bias", state.n_decays or heads),
        skip=None if is_delta else source.tensor(f"{root}D", heads),
        norm=NormParts(weight=source.tensor(f"{root}{names.states_norm}.weight", state.value_dim))
        if is_delta
        else None,
    )


def _selective_rule(source: Source, state: StateSpec, names: TensorNames, root: str) -> RuleParts:
    """Of channels: decays of each of its rows, what shifts its step, what of it is given besides."""
    shape: tuple[int, ...] = (state.width,)
    ending = ".bias"
    if names.selects_by_head:
        shape, ending = (state.n_key_heads, state.width // state.n_key_heads), "_bias"
    decay = source.tensor(f"{root}A_log", *shape, state.key_dim)
    return RuleParts(
        decay=decay if source.is_plain else PowerTensor(decay),
        shift=source.tensor(f"{root}{names.steps}{ending}", *shape),
        skip=source.tensor(f"{root}D", *shape),
    )


def _taps(source: Source, state: StateSpec, names: TensorNames, root: str) -> WeightTensor:
    """Of q, k and v together, or of each: of OLMo Hybrid there are files of both kinds."""
    found = (TOGETHER,) if source.has(f"{root}{TOGETHER}.weight") else names.taps
    between = () if source.is_plain else (1,)
    parts = tuple(
        source.tensor(f"{root}{name}.weight", n, *between, state.n_taps) for name, n in _of_channels(state, found)
    )
    return parts[0] if len(parts) == 1 else JoinedTensor(parts)


def _of_channels(state: StateSpec, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """How many channels each tensor has: all of them, or those of q, of k and of v."""
    keys = state.n_key_heads * state.key_dim
    sizes = (state.n_channels,) if len(names) == 1 else (keys, keys, state.width)
    return list(zip(names, sizes, strict=True))


def _by_key_head(state: StateSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of q, k and v, and of the gate, where they lie by key head: its q, its k, the v and gates of its value heads."""
    own = state.n_value_heads // state.n_key_heads * state.value_dim
    rows = torch.arange(state.n_channels + state.width).view(state.n_key_heads, -1)
    q, k, v, gate = (part.reshape(-1) for part in rows.split((state.key_dim, state.key_dim, own, own), dim=1))
    return torch.cat([q, k, v]), gate


def _rates_by_key_head(state: StateSpec) -> torch.Tensor:
    """The same of the rates: the betas of its value heads, then their decays."""
    rows = torch.arange(2 * state.n_value_heads).view(state.n_key_heads, 2, -1)
    return torch.cat([rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)])
