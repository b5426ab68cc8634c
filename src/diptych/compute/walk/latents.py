"""Latent attention in the op vocabulary, as the walk in `decoder` takes it."""

from __future__ import annotations

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.compute.walk.part_weights import LatentWeights

INDEX_EPS = 1e-6  # of the norm by which an index reads a layer's input


def run_latents(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    qkv: LatentWeights[Vector, Linear],
    heads: Heads,
) -> Hidden:
    """The heads' outputs [T, H v] of latent attention."""
    if qkv.kv is not None:
        ops.cache_latents(ops.linear(h, qkv.kv), heads)
    if qkv.has_entries:
        ops.cache_entries(h, heads)
    if qkv.q_down is None:
        if qkv.has_index:
            assert qkv.index_norm is not None
            ops.choose(h, ops.norm(h, qkv.index_norm, eps=INDEX_EPS), heads)
        q = ops.linear(h, qkv.q)
        return ops.expand(ops.attention(ops.absorb(q, heads), heads), heads)
    assert qkv.q_norm is not None
    raw = ops.linear(h, qkv.q_down)
    low = ops.norm(raw, qkv.q_norm, eps=qkv.norm_eps)
    read = low if qkv.gate is None else ops.join(low, raw)
    if qkv.has_index:
        ops.choose(h, low, heads)
    a = ops.expand(ops.attention(ops.absorb(ops.linear(read, qkv.q), heads), heads), heads)
    return a if qkv.gate is None else ops.gate_heads(read, qkv.gate, a)
