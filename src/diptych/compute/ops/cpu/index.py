"""Layers whose index chooses what is attended to, recorded into a native program: its keys, and the lists of the chosen."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.ops.cpu.buffers import Given
from diptych.compute.ops.cpu.entries import EntryRecorder
from diptych.compute.ops.cpu.handles import AttentionHandle


class IndexRecorder(EntryRecorder):
    """The part of `CpuOps` that is about them."""

    _choice = -1  # the buffer of the last one

    def choose(self, h: Given, low: Given, attention: AttentionHandle) -> None:
        """Every rank for itself, over the keys that it has cached; of blocks, for its own KV heads."""
        spec, index, heads, own = attention.spec, attention.index, attention.own, attention.spec.own_index
        assert index is not None
        if heads is None:
            return
        h, low = self._as_value(h), self._as_value(low)
        if own.entries is not None:
            self._choice = self.choose_entries(h, low, attention)
            return
        assert index.key is not None
        place = spec.cache_layer if spec.index_place is None else spec.index_place
        width, where = own.n_heads * own.head_dim, {"layer": place, "rope": attention.rope}
        key = self._f32("index key", own.key_width)
        self._linear_into(h, index.key, "qkv", key)
        if index.gates is not None:
            self._linear_into(h, replace(index.gates, column=own.head_dim), "qkv", key)
        normed = {"norm": index.norm, "norm_eps": spec.index_eps}
        if own.by_means:  # of what lies in the cache then, whoever has written it
            self.program.cache_index(x=key, **where)
            self.program.cache_index(x=key, pooled=own.block, **normed, **where)
        else:
            n_gates = own.key_width - own.head_dim
            self.program.cache_index(x=key, n_gates=n_gates, bias=index.bias, **normed, **where)
        if own.pool != 1:
            self.program.pool_index(layer=place, offsets=index.offsets, pool=own.pool, width=own.key_width)
        queries = self._f32("index queries", width)
        self._linear_into(low, index.queries, "qkv", queries)
        if index.scales != -1:
            self.program.scale_heads(q=queries, by_head=index.scales)
        turned, n_choices = own.n_heads * own.key_width, own.n_choices
        if index.weights is None and not own.by_means:
            turned, n_choices = heads.n_kv_heads * own.head_dim, heads.n_kv_heads * own.n_blocks
        self._choice = self._f32("choice", n_choices)
        buffer = self._buffer("index turned", turned, lambda width: self.program.add_bf16(width))
        given = {"q": queries, "queries": buffer, "choice": self._choice, "shape": index.shape, **where}
        normed = {"norm": index.q_norm, "norm_eps": spec.norm_eps}
        if index.weights is not None:
            weights = self._f32("index weights", own.n_heads)
            self._linear_into(h, index.weights, "qkv", weights)
            self.program.choose(width=own.head_dim, weights=weights, **given)
        elif own.by_means:
            self.program.choose_pooled(**normed, **given)
        else:
            self.program.choose_blocks(local=own.local, first_head=heads.first_kv_head, **normed, **given)
