"""MLPs and mixtures of experts in the op vocabulary, as the walk in `decoder` takes them."""

from __future__ import annotations

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.compute.walk.layer_weights import LayerWeights
from diptych.compute.walk.part_weights import ApartNorms


def run_inner(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    first: Linear,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
) -> Hidden:
    """The inner values [T, F] of an MLP, by gate and up, or by up alone."""
    if not weights.is_gated:
        return ops.curve(h, first, numbers=weights.curve)
    if weights.form is not None:
        return ops.bent_gate(h, first, form=weights.form)
    return ops.linear_gate(h, first) if weights.cutoff is None else ops.sparse_gate(h, first, cutoff=weights.cutoff)


def run_dense(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    first: Linear,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
) -> Hidden:
    """What down reads of a dense MLP."""
    inner = run_inner(ops, h, first, weights)
    return inner if weights.down_norm is None else ops.norm(inner, weights.down_norm, eps=weights.inner_eps)


def mlp_alone(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream | Hidden,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    *,
    eps: float,
) -> Hidden:
    """mlp(norm(x)), or mixture(norm(x)) + the shared experts of norm(x), gated or not; of x where it has no norm."""
    h = x if weights.pre_mlp_norm is None else ops.norm(x, weights.pre_mlp_norm, eps=eps)
    if weights.dense is not None:
        gate_up, down = weights.dense
        return ops.linear(run_dense(ops, h, gate_up, weights), down)
    shared, latent = weights.shared, weights.latent
    assert weights.experts is not None
    if latent is not None:
        assert shared is None, "no family has these beside experts of latents that stand alone"
        given = ops.linear(h, latent.down)
        given = given if latent.norm is None else ops.norm(given, latent.norm, eps=eps)
        return ops.linear(ops.experts(given, weights.experts, routed=h), latent.up)
    gate = None if shared is None or shared.gate is None else ops.linear(h, shared.gate)
    beside = None if shared is None else run_inner(ops, h, shared.gate_up, weights)
    mixture = ops.experts(h, weights.experts)
    if shared is None or beside is None:
        return mixture
    return ops.sum(mixture, ops.linear(beside, shared.down), gate=gate)


def run_experts(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    experts: Experts,
    x: Stream,
    *,
    eps: float,
    attended: Hidden | None = None,
) -> Stream:
    """x + mixture(h), normed or not, + the shared experts of h, gated or not. All that reads h comes before x is written.

    attended: what the heads give where attention runs beside it, whose projection is added, too.
    """
    shared, norm, latent, scale = weights.shared, weights.post_mlp_norm, weights.latent, weights.mlp_scale
    assert attended is None or (norm is None and latent is None), "no family has these beside its attention"
    is_scaled_whole = latent is None and (shared is None or (shared.gate is None and norm is None))
    assert scale == 1.0 or is_scaled_whole, "no family scales a mixture that has these"
    gate = None if shared is None or shared.gate is None else ops.linear(h, shared.gate)
    beside = None if shared is None else run_inner(ops, h, shared.gate_up, weights)
    if shared is not None and beside is not None and norm is not None:  # of both together
        y = ops.sum(ops.experts(h, experts), ops.linear(beside, shared.down))
        return ops.add(x, ops.norm(y, norm, eps=eps))
    if latent is not None:
        x = ops.linear_add(ops.experts(ops.linear(h, latent.down), experts, routed=h), latent.up, x)
    else:
        mixture = ops.experts(h, experts)
        if attended is not None:
            assert weights.o is not None
            x = ops.linear_add(attended, weights.o, x)
        x = ops.add(x, mixture if norm is None else ops.norm(mixture, norm, eps=eps), scale=scale)
    if shared is None or beside is None:
        return x
    if scale != 1.0:
        return ops.add(x, ops.linear(beside, shared.down), scale=scale)
    if gate is None:
        return ops.linear_add(beside, shared.down, x)
    return ops.add_gated(x, ops.linear(beside, shared.down), gate)


def run_apart(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    h: Stream | Hidden,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    experts: Experts,
    norms: ApartNorms[Vector],
    *,
    eps: float,
) -> Stream:
    """x + norm(norm(shared experts of h) + norm(mixture(norm(x)))), where the router reads a norm of x of its own."""
    shared, behind = weights.shared, weights.post_mlp_norm
    assert shared is not None
    assert behind is not None
    beside = ops.linear(run_inner(ops, h, shared.gate_up, weights), shared.down)
    y = ops.stream(ops.norm(beside, norms.behind_shared, eps=eps), 0)
    routed = ops.norm(x, norms.router, eps=eps)
    mixture = ops.experts(ops.norm(x, norms.mixture, eps=eps), experts, routed=routed)
    y = ops.add(y, ops.norm(mixture, norms.behind_mixture, eps=eps))
    return ops.add(x, ops.norm(y, behind, eps=eps))
