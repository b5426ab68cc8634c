"""What the walk does with a layer that stands aside (Zamba, Zamba2): attention and an MLP that only the next layer reads."""

from __future__ import annotations

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.compute.walk.layer_weights import LayerWeights
from diptych.compute.walk.part_weights import AsideWeights


def run_aside(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    wide: Stream,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    aside: AsideWeights[Linear],
    *,
    eps: float,
) -> tuple[Stream, Stream]:
    """(x beside the embedding, x + what the layer gives): mlp(norm(attention(norm(x beside the embedding)))), projected.

    wide: the embedding, behind what the stream was when it was read last. x stays as it is.
    """
    assert weights.attention is not None
    assert weights.input_norm is not None
    assert weights.pre_mlp_norm is not None
    assert weights.o is not None
    assert weights.dense is not None
    assert weights.form is not None
    wide = ops.renew(wide, x)
    h = ops.norm(wide, weights.input_norm, eps=eps)
    qkv = ops.linear(h, aside.qkv)
    if aside.heads is not None:
        low, up = aside.heads
        qkv = ops.sum(qkv, ops.by_head(ops.linear(h, low), up))
    a = ops.attention(ops.rotate_and_cache(qkv, weights.attention), weights.attention)
    h = ops.norm(ops.linear(a, weights.o), weights.pre_mlp_norm, eps=eps)
    first, down = weights.dense
    added = None if aside.inner is None else (ops.linear(h, aside.inner[0]), aside.inner[1])
    inner = ops.bent_gate(h, first, form=weights.form, added=added)
    return wide, ops.linear_add(ops.linear(inner, down), aside.behind, ops.branch(x, 1))
