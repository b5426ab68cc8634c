"""A model's forward in the op vocabulary: one walk for every family, over the handles that `decoder_loader` made.

What differs between families is data (`models.families`): which norms a layer has, how its tensors are called, whether its
MLP is a mixture. No look into a handle: the same code runs eagerly on the torch backend and is recorded into a program on
the cpu backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.models.spec import ModelSpec

LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the config says of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts(Generic[Linear]):
    """The handles of what every token meets beside a mixture: an MLP, and the projection [1, D] that gates it, if any."""

    gate_up: Linear
    down: Linear
    gate: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights(Generic[Vector, Linear]):
    """The projections of latent attention: queries directly (q alone) or over a rank of their own, and the latents."""

    q_down: Linear | None
    q_norm: Vector | None
    q: Linear
    kv: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[Vector, Linear, Heads, Experts]):
    """The handles of one layer: either dense or experts; a norm that the family lacks is None.

    is_parallel: attention and the dense MLP both read the input norm.
    """

    attention: Heads
    qkv: Linear | LatentWeights[Vector, Linear]
    o: Linear
    input_norm: Vector | None
    post_attention_norm: Vector | None
    pre_mlp_norm: Vector | None
    post_mlp_norm: Vector | None
    dense: tuple[Linear, Linear] | None  # gate_up, down
    experts: Experts | None
    shared: SharedExperts[Linear] | None = None
    is_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights(Generic[Table, Vector, Linear, Heads, Experts]):
    """The handles of a model."""

    embedding: Table
    layers: tuple[LayerWeights[Vector, Linear, Heads, Experts], ...]
    norm: Vector
    head: Linear


def run_decoder(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
) -> Hidden:
    """Logits [R, V] of the step that `ops` stands for.

    Where what a layer adds is scaled, x is the residual stream over that scale: norms of x see the same but for their eps.
    """
    scale = spec.residual_scale
    eps = spec.norm_eps / scale**2
    x = ops.embed(weights.embedding, scale=spec.embed_scale / scale)
    for number, layer in enumerate(weights.layers):
        x = run_layer(ops, x, layer, eps=eps, added_eps=spec.norm_eps)
        ops.tap(x, number)
    return ops.head(x, weights.norm, weights.head, eps=eps, softcap=spec.logit_softcap, scale=spec.logit_scale)


def run_layer(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Vector, Linear, Heads, Experts],
    *,
    eps: float,
    added_eps: float,
) -> Stream:
    """x + attention(x), then + mlp(x), each with the norms the layer has before and after it. added_eps: of those after."""
    h = x if weights.input_norm is None else ops.norm(x, weights.input_norm, eps=eps)
    if weights.is_parallel:
        assert weights.dense is not None
        gate_up, down = weights.dense
        beside = ops.linear_gate(h, gate_up)  # before anything is added to x, which h is made of
        return ops.linear_add(beside, down, ops.linear_add(run_attention(ops, h, weights), weights.o, x))
    x = add_normed(ops, x, run_attention(ops, h, weights), weights.o, weights.post_attention_norm, eps=added_eps)
    h = x if weights.pre_mlp_norm is None else ops.norm(x, weights.pre_mlp_norm, eps=eps)
    if weights.dense is None:
        assert weights.experts is not None
        return run_experts(ops, h, weights.experts, weights.shared, x)
    gate_up, down = weights.dense
    return add_normed(ops, x, ops.linear_gate(h, gate_up), down, weights.post_mlp_norm, eps=added_eps)


def add_normed(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    y: Hidden,
    projection: Linear,
    norm: Vector | None,
    *,
    eps: float,
) -> Stream:
    """x + norm(y W^T), or x + y W^T."""
    if norm is None:
        return ops.linear_add(y, projection, x)
    return ops.add(x, ops.norm(ops.linear(y, projection), norm, eps=eps))


def run_attention(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    weights: LayerWeights[Vector, Linear, Heads, Experts],
) -> Hidden:
    """The heads' outputs [T, H d], or [T, H v] of latent attention.

    Latents are attended to as they lie in the cache, in prefill as in decode: one form, so that both have the same bits.
    """
    heads, qkv = weights.attention, weights.qkv
    if not isinstance(qkv, LatentWeights):
        return ops.attention(ops.rotate_and_cache(ops.linear(h, qkv), heads), heads)
    ops.cache_latents(ops.linear(h, qkv.kv), heads)
    if qkv.q_down is None:
        q = ops.linear(h, qkv.q)
    else:
        assert qkv.q_norm is not None
        q = ops.linear(ops.norm(ops.linear(h, qkv.q_down), qkv.q_norm, eps=LATENT_EPS), qkv.q)
    return ops.expand(ops.attention(ops.absorb(q, heads), heads), heads)


def run_experts(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    experts: Experts,
    shared: SharedExperts[Linear] | None,
    x: Stream,
) -> Stream:
    """x + mixture(h) + the shared experts of h, gated or not. All that reads h comes before x is written."""
    if shared is None:
        return ops.experts_add(h, experts, x)
    gate = None if shared.gate is None else ops.linear(h, shared.gate)
    beside = ops.linear_gate(h, shared.gate_up)
    x = ops.experts_add(h, experts, x)
    if gate is None:
        return ops.linear_add(beside, shared.down, x)
    return ops.add_gated(x, ops.linear(beside, shared.down), gate)
