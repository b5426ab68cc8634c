"""Bytes of keys, values and states: of a token, of a sequence, and those that a chunk reads."""

from __future__ import annotations

from diptych.cost.attended import reach_of, read_tokens
from diptych.ground.shape import ChunkShape
from diptych.ground.specs import KVSpec
from diptych.models.spec import AttentionLayer, ModelSpec

STATE_BYTES = 4  # of a number of a state


def layer_kv_bytes(attention: AttentionLayer, kv: KVSpec, tp: int) -> float:
    """KV bytes per token that one layer attends to on one device, its own or another layer's.

    KV heads are replicated when tp > n_kv_heads; MLA is not split. Nothing where it has a state instead, or no attention.
    """
    if attention.state is not None or attention.is_absent:
        return 0.0
    if attention.mla is not None:
        return attention.mla.row * kv.bytes_per_element + kv.scale_bytes
    widths = attention.head_dim, attention.value_dim
    return max(attention.n_kv_heads / tp, 1.0) * sum(vector_bytes(width, kv) for width in widths)


def vector_bytes(width: int, kv: KVSpec) -> float:
    """Of one token's key or value in a head."""
    return width * kv.bytes_per_element + kv.scale_bytes


def kept_kv_bytes(attention: AttentionLayer, kv: KVSpec, tp: int) -> float:
    """The same that it keeps: nothing where it attends to another layer's; with the key of an index that it has. Each head has
    room for two scales of a token, of key and value, also where there is no value.
    """
    caches = (attention.cache if attention.keeps_kv else None, attention.index_cache)
    return sum(
        max(one.n_heads / tp, 1.0)
        * ((one.head_dim + one.value_dim) * kv.bytes_per_element + (2.0 + one.entries_each) * kv.scale_bytes)
        for one in caches
        if one is not None
    )


def index_kv_bytes(attention: AttentionLayer, kv: KVSpec) -> float:
    """Bytes of the key that a layer's own index finds a token by, on every device."""
    own = attention.own_index
    return 0.0 if own is None else own.key_width * kv.bytes_per_element + kv.scale_bytes


def kv_bytes_read(attention: AttentionLayer, shape: ChunkShape, kv: KVSpec, tp: int) -> float:
    """KV bytes that one sequence of a chunk reads in one layer to attend; each of its tokens may have a choice of its own."""
    return read_tokens(reach_of(attention), shape) * layer_kv_bytes(attention, kv, tp)


def state_bytes(model: ModelSpec, *, tp: int = 1) -> float:
    """Bytes of the states of one sequence on one device, however long it is; key heads are split among devices."""
    return model.state_elements * STATE_BYTES / tp


def kv_bytes_per_token(model: ModelSpec, kv: KVSpec, *, tp: int = 1) -> float:
    """KV bytes of one token over all layers on one device (windowed layers hold at most their window)."""
    return sum(n * kept_kv_bytes(layer.attention, kv, tp) for layer, n in model.layer_groups)


def kv_bytes_of_context(
    model: ModelSpec, kv: KVSpec, context_tokens: int, *, tp: int = 1, is_ours: bool = False
) -> float:
    """KV bytes one sequence holds at a context, rounded up to blocks, and its states; see `kv_bytes_of_tokens`."""
    blocks = -(-context_tokens // kv.block_tokens) * kv.block_tokens
    return kv_bytes_of_tokens(model, kv, blocks, tp, is_ours=is_ours) + state_bytes(model, tp=tp)


def kv_bytes_of_tokens(model: ModelSpec, kv: KVSpec, tokens: int, tp: int, *, is_ours: bool = False) -> float:
    """KV bytes of one sequence over all layers on one device; windowed layers keep only their window.

    is_ours: a block of Diptych's engine holds all layers' keys and values of its tokens, so all of them keep all.
    """
    return sum(n * _kv_bytes_of(layer.attention, kv, tokens, tp, is_ours=is_ours) for layer, n in model.layer_groups)


def _kv_bytes_of(attention: AttentionLayer, kv: KVSpec, tokens: int, tp: int, *, is_ours: bool) -> float:
    """Of one layer; of one with entries these, and keys of an index, stay when tokens have left the window."""
    near = tokens if is_ours else min(tokens, attention.window or tokens)
    each = kept_kv_bytes(attention, kv, tp)
    if attention.entries is None:
        return near * each
    of_row = layer_kv_bytes(attention, kv, tp)
    return near * of_row + tokens * (each - of_row)
