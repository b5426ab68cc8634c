"""States by channel (Mamba-1's, recurrent units) as weight handles: the taps before them, and what is projected from what those
give.
"""

from __future__ import annotations

import torch

from diptych.compute.loading.layer_tensors import LayerTensors
from diptych.compute.loading.views import JoinedTensor, OnesTensor, PickedTensor, TransposedTensor
from diptych.compute.loading.weights import SlicedTensor, entry_of
from diptych.compute.ops.contract import (
    AttentionSpec,
    Experts,
    Heads,
    Linear,
    LinearParts,
    NormParts,
    RuleParts,
    Table,
    Vector,
)
from diptych.compute.ops.contract_parts import Split
from diptych.compute.walk.part_weights import SelectiveWeights, UnitWeights
from diptych.models.states import StateSpec, StepNorms


def load_selective(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], state: StateSpec, root: str, values: LinearParts
) -> SelectiveWeights[Vector, Linear, Heads]:
    """The layer's, whose tensors begin with root. Steps, keys and queries decide about what is kept: they stay in the finest
    format. values: what taps see.
    """
    source, loader, names, rank = layer.source, layer.loader, layer.names, state.rank
    if names.selects_by_head:
        return _by_head(layer, state, root, values)
    low_and_keys = source.tensor(f"{root}{names.reads_taps}.weight", rank + state.n_rates, state.width)
    low, keys = (
        PickedTensor(low_and_keys, rows) for rows in torch.arange(rank + state.n_rates).split((rank, state.n_rates))
    )
    steps = source.tensor(f"{root}{names.steps}.weight", state.width, rank)
    steps_norm, keys_norm = _norms(layer, state, root)
    return SelectiveWeights(
        values=loader.linear(values, role=layer.role(Split.OUTPUTS, q=0, k=0, v=state.width)),
        taps=_taps(layer, state, root),
        first_steps=loader.rates(LinearParts(weights=(low,))),
        steps_norm=None if steps_norm is None else loader.norm(steps_norm),
        steps=loader.rates(LinearParts(weights=(steps,))),
        keys=loader.rates(LinearParts(weights=(keys,))),
        keys_norm=None if keys_norm is None else loader.norm(keys_norm),
        norm_eps=state.norm_eps or layer.spec.norm_eps,
    )


def _by_head(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], state: StateSpec, root: str, values: LinearParts
) -> SelectiveWeights[Vector, Linear, Heads]:
    """The same where each key head has projections of its own v."""
    names, rank, n_heads = layer.names, state.rank, state.n_key_heads
    width, rows = state.width // n_heads, torch.arange(rank + 2 * state.key_dim)
    both = layer.source.tensor(f"{root}{names.reads_taps}_weight", n_heads, len(rows), width)
    steps = layer.source.tensor(f"{root}{names.steps}_weight", n_heads, width, rank)
    heads = [entry_of(both, head) for head in range(n_heads)]
    low, keys = (
        tuple(LinearParts(weights=(PickedTensor(head, own),)) for head in heads) for own in (rows[:rank], rows[rank:])
    )
    taps = _taps(layer, state, root)

    def by_head(parts: tuple[LinearParts, ...]) -> Linear:
        return layer.loader.by_head(parts, layer=layer.layer)

    return SelectiveWeights(
        values=layer.loader.linear(values, role=layer.role(Split.OUTPUTS, q=0, k=0, v=state.width)),
        taps=taps,
        first_steps=by_head(low),
        steps_norm=None,
        steps=by_head(tuple(LinearParts(weights=(entry_of(steps, head),)) for head in range(n_heads))),
        keys=by_head(keys),
        keys_norm=None,
        norm_eps=layer.spec.norm_eps,
        is_by_head=True,
    )


def load_units(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], state: StateSpec, root: str, values: LinearParts
) -> UnitWeights[Linear, Heads]:
    """The same of recurrent units. What gates a head's values and what gates their fading are rows of one product."""
    heads, width = state.n_value_heads, state.value_dim
    names = [f"{root}{layer.names.units}{one}" for one in ("input_gate", "recurrent_gate")]
    weights = [layer.source.tensor(f"{name}_weight", heads, width, width) for name in names]
    biases = [layer.source.tensor(f"{name}_bias", heads, width) for name in names]
    gates = tuple(
        LinearParts(
            weights=tuple(TransposedTensor(entry_of(one, head)) for one in weights),
            biases=tuple(SlicedTensor(one, head) for one in biases),
        )
        for head in range(heads)
    )
    return UnitWeights(
        values=layer.loader.linear(values, role=layer.role(Split.OUTPUTS, q=0, k=0, v=state.width)),
        taps=_taps(layer, state, root),
        gates=layer.loader.by_head(gates, layer=layer.layer),
    )


def _taps(layer: LayerTensors[Table, Vector, Linear, Heads, Experts], state: StateSpec, root: str) -> Heads:
    """What moves those on that the state reads."""
    source, before = layer.source, state.before
    assert before is not None
    (name,), between = layer.names.taps, () if source.is_plain else (1,)
    spec = AttentionSpec(
        layer=layer.layer,
        n_heads=before.n_value_heads,
        n_kv_heads=before.n_key_heads,
        head_dim=before.value_dim,
        scale=1.0,
        state=before,
        place=layer.spec.place_before(layer.layer),
    )
    return layer.loader.state_rule(
        spec,
        RuleParts(
            taps=source.tensor(f"{root}{name}.weight", state.width, *between, before.n_taps),
            tap_bias=source.tensor(f"{root}{name}.bias", state.width) if before.has_tap_bias else None,
        ),
    )


def _norms(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts], state: StateSpec, root: str
) -> tuple[NormParts | None, NormParts | None]:
    """Of steps before their second projection; of keys and of queries, one behind the other."""
    if state.step_norms is StepNorms.NONE:
        return None, None
    if state.step_norms is StepNorms.BARE:
        return NormParts(weight=OnesTensor(state.rank)), NormParts(weight=OnesTensor(state.n_rates))
    steps, keys, queries = (
        layer.source.tensor(f"{root}{name}.weight", n)
        for name, n in zip(layer.names.step_norms, (state.rank, state.key_dim, state.key_dim), strict=True)
    )
    return NormParts(weight=steps), NormParts(weight=JoinedTensor((keys, queries)))
