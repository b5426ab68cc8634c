"""What the walk does with states by channel (Mamba-1's, recurrent units): what they read is tapped first, and moves them on."""

from __future__ import annotations

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.compute.walk.part_weights import SelectiveWeights, UnitWeights


def run_selective(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    weights: SelectiveWeights[Vector, Linear, Heads],
    heads: Heads,
) -> Hidden:
    """What its channels give [T, H v], before it is gated."""
    v = ops.move_states(ops.linear(h, weights.values), None, weights.taps)
    # keys and queries last, as what lies between the steps' projections may be as wide, and is done with then
    if weights.is_by_head:
        steps = ops.by_head(ops.by_head(v, weights.first_steps), weights.steps)
        return ops.move_states(v, ops.by_head(v, weights.keys), heads, decays=steps)
    low = ops.linear(v, weights.first_steps)
    normed = low if weights.steps_norm is None else ops.norm(low, weights.steps_norm, eps=weights.norm_eps)
    steps = ops.linear(normed, weights.steps)
    keys = ops.linear(v, weights.keys)
    if weights.keys_norm is not None:
        keys = ops.norm(keys, weights.keys_norm, eps=weights.norm_eps, parts=2)
    return ops.move_states(v, keys, heads, decays=steps)


def run_units(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    weights: UnitWeights[Linear, Heads],
    heads: Heads,
) -> Hidden:
    """What its units give [T, H v], before it is gated."""
    v = ops.move_states(ops.linear(h, weights.values), None, weights.taps)
    return ops.move_states(v, ops.by_head(v, weights.gates), heads)
