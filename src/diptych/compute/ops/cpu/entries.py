"""Rows that all heads meet as they are, and entries beside them, recorded into a native program."""

from __future__ import annotations

from diptych.compute.ops.cpu.buffers import Buffers
from diptych.compute.ops.cpu.handles import AttentionHandle, EntriesHandle, LinearHandle
from diptych.compute.ops.cpu.values import Value
from diptych.models.latent import EntrySpec


class EntryRecorder(Buffers):
    """The part of `CpuOps` that is about them."""

    def cache_row(self, kv: Value, attention: AttentionHandle) -> None:
        """`cache_latents` of a row that is met as it is."""
        spec, (_, latent) = attention.spec, attention.latents
        normed = {"norm": latent.norm, "norm_eps": spec.norm_eps, "rope": attention.rope}
        self.program.cache_rows(x=self._materialised(kv), layer=spec.cache_layer, **normed)

    def cache_made(
        self,
        h: Value,
        entries: EntriesHandle,
        form: EntrySpec,
        attention: AttentionHandle,
        *,
        width: int,
        is_index: bool,
    ) -> None:
        """Entries that the step's tokens complete, or those that are keys of an index, in every rank for itself."""
        series, out = self._f32("entry series", 2 * form.n_series * width), self._f32("entries", width)
        self._linear_into(h, entries.series, "qkv", series)
        self.program.move_entries(
            x=series, out=out, offsets=entries.offsets, layer=entries.place, tokens=form.tokens, n_series=form.n_series
        )
        self.program.cache_rows(
            x=out,
            layer=attention.spec.cache_layer,
            norm=entries.norm,
            norm_eps=attention.spec.norm_eps,
            rope=attention.rope,
            tokens=form.tokens,
            is_index=is_index,
        )

    def choose_entries(self, h: Value, low: Value, attention: AttentionHandle) -> int:
        """`choose` of entries: the buffer of the choice."""
        spec, index, own = attention.spec, attention.index, attention.spec.own_index
        assert index is not None
        assert index.entries is not None
        assert index.weights is not None
        assert own.entries is not None
        self.cache_made(h, index.entries, own.entries, attention, width=own.head_dim, is_index=True)
        width = own.n_heads * own.head_dim
        queries, weights = self._f32("index queries", width), self._f32("index weights", own.n_heads)
        self._linear_into(low, index.queries, "qkv", queries)
        self._linear_into(h, index.weights, "qkv", weights)
        choice = self._f32("choice", own.most)
        self.program.choose(
            q=queries,
            queries=self._buffer("index turned", width, lambda width: self.program.add_bf16(width)),
            weights=weights,
            choice=choice,
            layer=spec.cache_layer,
            rope=attention.rope,
            shape=index.shape,
        )
        return choice

    def turn_queries(self, q: Value, attention: AttentionHandle) -> Value:
        """`absorb` of rows that are met as they are: normed by head, and turned."""
        spec, own, (_, latent) = attention.spec, attention.own, attention.latents
        assert own is not None
        width = own.n_heads * spec.head_dim
        out = self._buffer("q", width, lambda width: self.program.add_bf16(width))
        normed = {"norm": latent.ones, "norm_eps": spec.norm_eps, "rope": attention.rope}
        self.program.turn_queries(q=self._materialised(q), out=out, n_heads=own.n_heads, **normed)
        return Value("query", width, buffer=out)

    def expand_groups(self, a: Value, attention: AttentionHandle, out: int) -> None:
        """`expand` of rows that are met as they are: turned back in place, and a product for each group of heads."""
        spec, own, (mla, latent) = attention.spec, attention.own, attention.latents
        assert own is not None
        x, size = self._materialised(a), spec.n_heads // mla.n_groups
        self.program.turn_back(x=x, rope=attention.rope, n_heads=own.n_heads)
        self.program.heads(
            weights=[group.index for group in latent.values],
            x=x,
            head_stride=size * spec.head_dim,
            rows=self._rows_buffer("expand", size * spec.head_dim, latent.values[0], own.n_heads // size),
            out=out,
            out_head_stride=size * mla.v_dim,
            store="f32",
            column=own.first_head * mla.v_dim,
        )

    def _linear_into(self, h: Value, weight: LinearHandle, category: str, out: int, *, store: str = "f32") -> None:
        """The product, or those of the weight's pieces beside each other."""
        for one in weight.pieces or (weight,):
            rows = self._rows(h, one)
            self.program.linear(category=category, weight=one.index, rows=rows, out=out, store=store, column=one.column)
