"""A layer's latent attention as weight handles, with its index: of latents that heads expand, or of rows that all meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.compute.loading.entries import entry_index, entry_parts, group_parts, read_anew, readers_of
from diptych.compute.loading.heads import HeadTensors, LayerHeads, picked, reordered
from diptych.compute.loading.views import JoinedTensor, ReorderedTensor, RowsTensor, TransposedTensor, halves_order
from diptych.compute.ops.contract import (
    AttentionSpec,
    Experts,
    Heads,
    IndexParts,
    Linear,
    LinearParts,
    NormParts,
    RopeSpec,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.ops.contract_parts import Split
from diptych.compute.rope import frequencies, standstill
from diptych.compute.walk.part_weights import LatentWeights
from diptych.models.gates import Activation
from diptych.models.latent import IndexSpec, MlaSpec
from diptych.models.positions import Rope


class LatentLoader(HeadTensors[Table, Vector, Linear, Heads, Experts]):
    """Loads latent attention of one layer."""

    def latent_heads(
        self, norm: NormParts | None, mla: MlaSpec, root: str
    ) -> tuple[NormParts | None, LayerHeads[Vector, Linear, Heads]]:
        """As `HeadsLoader.load`. What expands a latent is cut by heads: its key part is read the other way round."""
        if mla.n_groups:
            return self._row_heads(norm, mla, root)
        attention, hidden = self.parts.attention, self.spec.hidden
        n_heads, has_bias = attention.n_heads, attention.has_o_bias
        q_width = n_heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            down = gate = None
            q = first = self.linear(root, ("q_proj",), (q_width,), hidden)
        else:
            down = first = self.linear(root, ("q_a_proj",), (mla.q_rank,), hidden, has_bias=has_bias)
            q, gate = self._from_latents(mla, root)
        kv = None
        if attention.kv_layer is None:
            width = mla.kv_rank + mla.rope_dim
            kv = self.linear(root, ("kv_a_proj_with_mqa",), (width,), hidden, has_bias=has_bias)
        own = attention.own_index
        index = None if own is None else self._index_parts(mla, own, f"{root}indexer.")
        of_heads = self._latent_gate(mla, root)
        if self.loader.is_balancing and not (own is not None and own.is_apart):  # whose norm reads the input as it is
            of_index = () if index is None else index.of_input
            of_gate = () if of_heads is None else (of_heads,)
            of_kv = () if kv is None else (kv,)
            norm, (first, *rest) = self.balance_norm(norm, (first, *of_kv, *of_gate, *of_index))
            down, q = (None, first) if down is None else (first, q)
            kv, rest = (rest[0], rest[1:]) if of_kv else (None, rest)
            of_heads, rest = (rest[0], rest[1:]) if of_gate else (None, rest)
            index = index and replace(index, key=rest[0], weights=rest[1], gates=tuple(rest[2:]))
        role, handle = self.role(Split.OUTPUTS, q=q_width), self._latent_attention(mla, root, index)
        weights = LatentWeights(
            q_down=None if down is None else self.loader.linear(down),
            q_norm=None
            if mla.q_rank is None
            else self.loader.norm(self.norm_over(f"{root}q_a_layernorm", mla.q_rank, mla.q_scale)),
            q=self.loader.linear(self._rope_last(q, mla.nope_dim), role=role),
            kv=None if kv is None else self.loader.linear(self._rope_last(kv, mla.kv_rank)),
            has_index=index is not None,
            index_norm=self._index_norm(root) if own is not None and own.is_apart else None,
            norm_eps=mla.norm_eps,
            gate=None if gate is None else self.gate(gate, Activation.SIGMOID),
        )
        o = self.linear(root, (self.names.o,), (hidden,), n_heads * mla.v_dim, has_bias=has_bias)
        return norm, LayerHeads(
            handle=handle,
            qkv=weights,
            o=self.loader.linear(o, role=self.role(Split.INPUTS, o=hidden)),
            gate=None if of_heads is None else self.gate(of_heads, attention.gate_by),
        )

    def _row_heads(
        self, norm: NormParts | None, mla: MlaSpec, root: str
    ) -> tuple[NormParts | None, LayerHeads[Vector, Linear, Heads]]:
        """Likewise, of rows that all heads meet as they are."""
        attention, hidden, own = self.parts.attention, self.spec.hidden, self.parts.attention.own_index
        assert mla.q_rank is not None
        assert attention.rope is not None
        n_heads, q_width = attention.n_heads, attention.n_heads * mla.row
        down = self.linear(root, ("wq_a",), (mla.q_rank,), hidden)
        kv = self.linear(root, ("wkv",), (mla.row,), hidden)
        entries = None
        if attention.entries is not None:
            entries = entry_parts(self, attention.entries, mla.row, f"{root}compressor.")
        index = None if own is None else entry_index(self, mla, own, f"{root}indexer.")
        if self.loader.is_balancing:
            norm, (down, kv, *rest) = self.balance_norm(norm, (down, kv, *readers_of(entries, index)))
            entries, index = read_anew(entries, index, tuple(rest))
        handle = self.loader.latent_attention(
            AttentionSpec(
                layer=self.layer,
                n_heads=n_heads,
                n_kv_heads=1,
                head_dim=mla.row,
                scale=attention.scale,
                window=attention.window,
                rope=frequencies(attention.rope),
                norm_eps=mla.norm_eps,
                mla=mla,
                index=attention.index,
                place=self.spec.kv_place(self.layer),
                has_sinks=attention.has_sinks,
                entries=attention.entries,
                entry_places=self.spec.entry_places(self.layer),
            ),
            norm=self.norm_over(f"{root}{self.spelt(root, 'kv_norm', '.weight')}", mla.row),
            keys=(),
            values=group_parts(self, mla, n_heads, root),
            sinks=self.sinks(root),
            index=index,
            entries=entries,
        )
        q = self.linear(root, ("wq_b",), (q_width,), mla.q_rank)
        weights = LatentWeights(
            q_down=self.loader.linear(down),
            q_norm=self.loader.norm(self.norm_over(f"{root}q_norm", mla.q_rank)),
            q=self.loader.linear(q, role=self.role(Split.OUTPUTS, q=q_width)),
            kv=self.loader.linear(kv),
            has_index=index is not None,
            has_entries=entries is not None,
            norm_eps=mla.norm_eps,
        )
        o = self.linear(root, (self.names.o,), (hidden,), n_heads * mla.v_dim)
        return norm, LayerHeads(
            handle=handle, qkv=weights, o=self.loader.linear(o, role=self.role(Split.INPUTS, o=hidden))
        )

    def _latent_gate(self, mla: MlaSpec, root: str) -> LinearParts | None:
        """What gates the heads, where it reads the layer's input and not what queries are made of."""
        if mla.is_mixed or not self.parts.attention.has_gate:
            return None
        assert self.names.gate is not None
        return self.linear(root, (self.names.gate,), (self.parts.attention.gate_width,), self.spec.hidden)

    def _from_latents(self, mla: MlaSpec, root: str) -> tuple[LinearParts, LinearParts | None]:
        """What reads their rank: queries, and a gate of the heads where each head's rows lie behind those of its queries."""
        assert mla.q_rank is not None
        n_heads, width = self.parts.attention.n_heads, mla.nope_dim + mla.rope_dim
        if not mla.is_mixed:
            return self.linear(root, ("q_b_proj",), (n_heads * width,), mla.q_rank), None
        both = self.linear(root, ("q_b_proj",), (n_heads * (width + mla.v_dim),), mla.q_inputs)
        queries, gate = torch.arange(both.n_outputs).view(n_heads, -1).split([width, mla.v_dim], dim=1)
        return picked(both, queries.reshape(-1)), picked(both, gate.reshape(-1))

    def _rope_last(self, parts: LinearParts, before: int) -> LinearParts:
        """Each head's rotary dimensions, which follow `before` others, in halves."""
        rope = self.parts.attention.rope
        if rope is None or not rope.is_interleaved:
            return parts
        order = torch.cat([torch.arange(before), before + halves_order(rope.rotary_dim, rope.rotary_dim)])
        return reordered(parts, order)

    def _index_norm(self, root: str) -> Vector:
        weight, bias = (
            self.source.tensor(f"{root}indexer.q_input_norm.{one}", self.spec.hidden) for one in ("weight", "bias")
        )
        return self.loader.norm(NormParts(weight=weight, bias=bias, is_centred=True))

    def _head_scales(self, root: str, n_heads: int) -> WeightTensor | None:
        """Of the heads that are projected there."""
        if not self.parts.attention.scales_heads:
            return None
        names = (self.spelt(root, f"softmax_scaling.{one}") for one in ("scale", "bias"))
        return JoinedTensor(tuple(self.source.tensor(f"{root}{name}", n_heads) for name in names))

    def _turns(self, rope: Rope) -> RopeSpec:
        """As the config says them, and the checkpoint."""
        made = frequencies(rope)
        if not rope.is_learned:
            return made
        name = self.spelt(self.of_model, "rotary_emb.alpha")
        alpha = self.loader.numbers(self.source.tensor(f"{self.of_model}{name}", len(made.inv_freq)))
        learned = torch.tensor(made.inv_freq) * torch.tensor(alpha).exp()
        return replace(made, inv_freq=tuple(learned.tolist()))

    def _index_parts(self, mla: MlaSpec, index: IndexSpec, root: str) -> IndexParts:
        """Heads of queries and the key turn first, in halves: scores are the same in any order."""
        d, hidden = index.head_dim, self.spec.hidden
        n_inputs = hidden if index.is_apart else mla.q_rank
        assert n_inputs is not None
        queries = self.linear(root, ("wq_b",), (index.n_heads * d,), n_inputs)
        key = self.linear(root, ("wk",), (d,), hidden)
        weight, bias = (self.source.tensor(f"{root}k_norm.{one}", d) for one in ("weight", "bias"))
        if index.is_interleaved or index.turns_last:
            order = torch.arange(d).roll(mla.rope_dim if index.turns_last else 0)
            order = order[halves_order(d, mla.rope_dim)] if index.is_interleaved else order
            queries, key = reordered(queries, order), reordered(key, order)
            weight, bias = ReorderedTensor(weight, order), ReorderedTensor(bias, order)
        return IndexParts(
            queries=queries,
            key=key,
            norm=NormParts(weight=weight, bias=bias, is_centred=True),
            weights=self.linear(root, ("weights_proj",), (index.n_heads,), hidden),
            scales=self._head_scales(root, index.n_heads) if index.is_apart else None,
            **({} if index.pool == 1 else self._pool_parts(index, root)),
        )

    def _pool_parts(self, index: IndexSpec, root: str) -> dict[str, Any]:
        """What weighs keys in a pool, whose tensors have no ending."""
        gate = self.source.tensor(f"{root}index_kpool_compress_gate", index.head_dim, self.spec.hidden)
        offsets = self.source.tensor(f"{root}index_kpool_compress_ape", index.pool, index.head_dim)
        return {"gates": (LinearParts(weights=(gate,)),), "offsets": offsets}

    def _latent_attention(self, mla: MlaSpec, root: str, index: IndexParts | None) -> Heads:
        attention = self.parts.attention
        keys, values = self._latent_matrices(mla, root)
        spec = AttentionSpec(
            layer=self.layer,
            n_heads=attention.n_heads,
            n_kv_heads=1,
            head_dim=mla.row,
            scale=attention.scale,
            window=attention.window,
            rope=standstill(mla.rope_dim) if attention.rope is None else self._turns(attention.rope),
            query_scale=attention.query_scale,
            norm_eps=mla.norm_eps,
            mla=mla,
            index=attention.index,
            place=self.spec.kv_place(self.layer),
            owns_kv=attention.kv_layer is None,
            index_place=self.spec.index_place(self.layer),
            has_sinks=attention.has_sinks,
        )
        norm = None
        if spec.owns_kv:
            name = self.spelt(root, "kv_a_layernorm", ".weight")
            norm = self.norm_over(f"{root}{name}", mla.kv_rank, mla.kv_scale)
        return self.loader.latent_attention(
            spec,
            sinks=self.sinks(root),
            scales=self._head_scales(root, attention.n_heads),
            norm=norm,
            keys=tuple(LinearParts(weights=(one,)) for one in keys),
            values=tuple(LinearParts(weights=(one,)) for one in values),
            index=index,
        )

    def _latent_matrices(self, mla: MlaSpec, root: str) -> tuple[list[WeightTensor], list[WeightTensor]]:
        """Each head's [kv_rank, nope_dim] and [v_dim, kv_rank]: rows of what expands latents, or by themselves (GGUF)."""
        heads, size = range(self.parts.attention.n_heads), mla.nope_dim + mla.v_dim
        if self.source.has(f"{root}k_b_proj.0.weight"):
            return (
                [self.source.tensor(f"{root}k_b_proj.{head}.weight", mla.kv_rank, mla.nope_dim) for head in heads],
                [self.source.tensor(f"{root}v_b_proj.{head}.weight", mla.v_dim, mla.kv_rank) for head in heads],
            )
        (up,) = self.linear(root, ("kv_b_proj",), (len(heads) * size,), mla.kv_rank).weights
        begins = [head * size for head in heads]
        return (
            [TransposedTensor(RowsTensor(up, at, at + mla.nope_dim)) for at in begins],
            [RowsTensor(up, at + mla.nope_dim, at + size) for at in begins],
        )
