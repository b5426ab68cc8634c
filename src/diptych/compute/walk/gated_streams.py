"""What the walk does with residual streams in one row: how they are read, what n-grams add to them (Qwen4-Exp)."""

from __future__ import annotations

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.compute.walk.stream_weights import GatedConnection, NgramWeights
from diptych.models.ngrams import NgramSpec


def gated_streams(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Hidden,
    connection: GatedConnection[Vector, Linear],
    n: int,
) -> Hidden:
    """The mean [T, D] of n streams whose norms are h [T, n D], each number gated."""
    return ops.fold(ops.gate_given(ops.curve(h, connection.down), connection.up, h, 0), (1 / n,) * n)


def add_ngrams(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    before: Hidden,
    weights: NgramWeights[Table, Vector, Linear, Heads],
    spec: NgramSpec,
    n: int,
    *,
    eps: float,
) -> Stream:
    """x [T, n D] plus what its own n-grams say, and what those of tokens before say. before: as `StreamOps.ngrams` has it."""
    rows = ops.ngrams(before, weights.tables, spec, weights.place)
    value = ops.linear(rows, weights.value)
    keys = ops.norm(ops.linear(rows, weights.key), weights.key_norm, eps=eps, parts=n)
    met = ops.meet_keys(keys, ops.norm(x, weights.query_norm, eps=eps, parts=n), value)
    tapped = ops.move_states(ops.norm(met, weights.taps_norm, eps=eps, parts=n), None, weights.taps)
    return ops.add(ops.add(x, met), tapped)
