"""A layer's attention as weight handles: grouped queries, latents, states, and the projections around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.compute.loading.balance import balance_norm, balance_values
from diptych.compute.loading.difference import load_difference, of_two_heads
from diptych.compute.loading.heads import LayerHeads, picked, reordered, stacked
from diptych.compute.loading.latents import LatentLoader
from diptych.compute.loading.related import by_distance, unadapted
from diptych.compute.loading.selective import load_selective, load_units
from diptych.compute.loading.state import state_heads, state_projections, state_readers
from diptych.compute.loading.views import (
    JoinedTensor,
    NumbersTensor,
    OnesTensor,
    ReorderedTensor,
    RowsTensor,
    by_head_order,
    halves_order,
    rows_in_parts,
)
from diptych.compute.ops.contract import (
    AttentionSpec,
    Experts,
    Heads,
    IndexParts,
    Linear,
    LinearParts,
    NormParts,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.ops.contract_parts import Split
from diptych.compute.rope import frequencies
from diptych.compute.walk.part_weights import StateWeights
from diptych.ground.errors import UnsupportedModel
from diptych.models.latent import IndexSpec
from diptych.models.spec import Norms, QkNorm
from diptych.models.states import StateRule, StateSpec

APART = ("q_proj", "k_proj", "v_proj")


class HeadsLoader(LatentLoader[Table, Vector, Linear, Heads, Experts]):
    """Loads the attention of one layer."""

    beside: tuple[LinearParts, ...] = ()  # of another layer, which read the norm too

    def load(
        self, norm: NormParts | None, *, is_shared: bool = False
    ) -> tuple[NormParts | None, LayerHeads[Vector, Linear, Heads]]:
        """The norm that they read, and the heads with their projections. is_shared: others read the norm as it is."""
        attention, root = self.parts.attention, f"{self.prefix}{self.names.attention}."
        if attention.mla is not None:
            return self.latent_heads(norm, attention.mla, root)
        if attention.state is not None:
            return self._state_heads(norm, attention.state, is_shared=is_shared)
        widths, readers = self._widths, self._readers(root)
        has_bias, named = attention.has_o_bias, self.names.o_bias
        o = self.linear(
            root, (self.names.o,), (self.spec.hidden,), attention.width, has_bias=has_bias and named is None
        )
        if has_bias and named is not None:
            o = replace(o, biases=(self.source.tensor(f"{root}{named}", self.spec.hidden),))
        o_norm = self.inner_norm(f"{root}{self.names.o_norm}", attention.width)
        difference = None
        if attention.differs:
            difference, o_norm = load_difference(self, root)
            widths["v"] = attention.n_kv_heads * attention.value_dim
        elif attention.norms_given:
            o_norm = NormParts(weight=OnesTensor(attention.width))
        index = None if attention.own_index is None else self._block_index(attention.own_index, root)
        if self.loader.is_balancing:
            if not is_shared:
                of_index = [] if index is None else [index.queries, *index.of_input]
                norm, scaled = self.balance_norm(norm, (*readers, *of_index))
                readers, of_index = scaled[: len(readers)], list(scaled[len(readers) :])
                index = index and replace(index, queries=of_index[0], key=of_index[1])
            if self._are_values_its_own:
                balanced, o = balance_values(readers[0], o, attention)
                readers = (balanced, *readers[1:])
            elif o_norm is not None and o_norm.weight.stored:
                o_norm, (o,) = balance_norm(o_norm, (o,), offset=0.0)
        return norm, LayerHeads(
            handle=self.attention(root, index),
            has_index=index is not None,
            qkv=self.loader.linear(unadapted(readers[0], attention), role=self.role(Split.OUTPUTS, **widths)),
            o=self.loader.linear(o, role=self.role(Split.INPUTS, o=self.spec.hidden)),
            gate=self.gate(readers[1], attention.gate_by) if attention.has_gate else None,
            difference=difference,
            o_norm=None if o_norm is None else self.loader.norm(o_norm),
            o_norms=attention.n_heads // 2 if attention.differs else attention.n_heads if attention.norms_given else 1,
            gates_normed=attention.norms_given,
        )

    def readers(self) -> tuple[LinearParts, ...]:
        """What reads its norm: of grouped queries, or of a state."""
        state = self.parts.attention.state
        if state is None:
            return self._readers(f"{self.prefix}{self.names.attention}.")
        root = f"{self.prefix}{self.names.states}."
        return state_readers(state_projections(self.source, state, self.names, root, self.spec.hidden))

    def balance_norm(
        self, norm: NormParts | None, readers: tuple[LinearParts, ...]
    ) -> tuple[NormParts | None, tuple[LinearParts, ...]]:
        """Of a norm that two layers read, of which a checkpoint has one, both come to the same: the first one's come first."""
        if self.parts.norms is Norms.SHARED:
            norm, scaled = super().balance_norm(norm, (*readers, *self.beside))
            return norm, scaled[: len(readers)]
        norm, scaled = super().balance_norm(norm, (*self.beside, *readers))
        return norm, scaled[len(self.beside) :]

    @property
    def _widths(self) -> dict[str, int]:
        """Rows of q, k and v, of those that it has, as a checkpoint has them."""
        attention = self.parts.attention
        n_kv, widths = attention.own_kv_heads, {"q": attention.n_heads * attention.head_dim}
        if n_kv:
            widths |= {"k": n_kv * attention.head_dim}
        return widths | ({"v": attention.kv_width - n_kv * attention.head_dim} if n_kv and attention.has_v else {})

    def _readers(self, root: str) -> tuple[LinearParts, ...]:
        """q, k and v together, and the gate of the heads where they have one."""
        attention, rows = self.parts.attention, tuple(self._widths.values())
        # stacked projections have one name
        names = self.names.qkv if len(self.names.qkv) == 1 else self.names.qkv[: len(rows)]
        if names == ("qkv_proj",) and self.are_apart(root, names[0], APART[0]):
            names = APART[: len(rows)]
        has_bias = attention.has_qkv_bias and not self.names.qkv_biases
        readers: tuple[LinearParts, ...]
        if attention.has_gate and self.names.gate is not None:
            gate = self.linear(root, (self.names.gate,), (attention.gate_width,), self.spec.hidden)
            readers = self.linear(root, names, rows, self.spec.hidden, has_bias=has_bias), gate
        elif attention.has_gate:
            own, gate = self._queries_and_gate(root, names[0], has_bias=has_bias)
            others = self.linear(root, names[1:], rows[1:], self.spec.hidden, has_bias=has_bias)
            readers = stacked(own, others), gate
        else:
            readers = (self.linear(root, names, rows, self.spec.hidden, has_bias=has_bias),)
        if self.names.qkv_by_head and not self.source.is_plain:
            order = by_head_order(attention.n_heads, attention.n_kv_heads, attention.head_dim)
            readers = (reordered(readers[0], order),)
        if self.names.qkv_biases:
            readers = (replace(readers[0], biases=(self._joined_biases(root),)), *readers[1:])
        if self.names.qkv_parts:
            parts = rows_in_parts(self.names.qkv_parts, attention.width)
            readers = (stacked(*(picked(readers[0], rows) for rows in parts)),)
        if attention.differs:
            readers = (of_two_heads(readers[0], attention), *readers[1:])
        return (self._in_halves(readers[0], len(rows)), *readers[1:])

    def _joined_biases(self, root: str) -> WeightTensor:
        """Of q, k and v, which are stacked, where they stand apart; zeros for what has none."""
        named = zip(self.names.qkv_biases, self._widths.values(), strict=True)
        return JoinedTensor(
            tuple(
                NumbersTensor((0.0,) * n) if name is None else self.source.tensor(f"{root}{name}", n)
                for name, n in named
            )
        )

    def _queries_and_gate(self, root: str, name: str, *, has_bias: bool) -> tuple[LinearParts, LinearParts]:
        """Of what the heads give, the gate's rows lie behind those of its queries, head by head."""
        attention = self.parts.attention
        width = 2 * attention.n_heads * attention.head_dim
        both = self.linear(root, (name,), (width,), self.spec.hidden, has_bias=has_bias)
        rows = torch.arange(width).view(attention.n_heads, 2, attention.head_dim)
        own, gate = (picked(both, rows[:, i].reshape(-1)) for i in range(2))
        return own, gate

    def _state_heads(
        self, norm: NormParts | None, state: StateSpec, *, is_shared: bool
    ) -> tuple[NormParts | None, LayerHeads[Vector, Linear, Heads]]:
        """As `heads`, of a state. Its rates decide about what is kept, so they stay in the finest format."""
        root = f"{self.prefix}{self.names.states}."
        parts = state_projections(self.source, state, self.names, root, self.spec.hidden)
        readers, o = state_readers(parts), parts.o
        has_norm = state.rule is StateRule.SSD and state.n_norms > 0
        behind = self.norm_over(f"{root}norm", state.width) if has_norm else None
        if self.loader.is_balancing:
            if not is_shared:
                norm, readers = self.balance_norm(norm, readers)
            if behind is not None:
                behind, (o,) = balance_norm(behind, (o,), offset=0.0)
        keys = state.n_key_heads * state.key_dim if state.key_dim else state.width
        return norm, LayerHeads(
            handle=state_heads(self.source, self.loader, self.spec, self.layer, self.parts.attention, self.names, root),
            qkv=load_selective(self, state, root, readers[0])
            if state.is_selective
            else load_units(self, state, root, readers[0])
            if state.is_unit
            else StateWeights(
                qkv=self.loader.linear(readers[0], role=self.role(Split.OUTPUTS, q=keys, k=keys, v=state.width)),
                rates=None if parts.rates is None else self.loader.rates(readers[2]),
                decays=tuple(self.loader.rates(one) for one in (*readers[3:], parts.decays) if one is not None),
                first_gate=None if parts.first_gate is None else self.loader.linear(readers[1]),
                norm=None if behind is None else self.loader.norm(behind),
                n_norms=max(state.n_norms, 1),
                norm_eps=state.norm_eps or self.spec.norm_eps,
                norms_first=state.is_steady,
            ),
            o=self.loader.linear(o, role=self.role(Split.INPUTS, o=self.spec.hidden)),
            gate=None
            if parts.gate is None
            else self.gate(readers[1] if parts.first_gate is None else parts.gate, state.gate),
        )

    @property
    def _are_values_its_own(self) -> bool:
        """Whether v and o may share factors: not where a norm or a bound stands between them, or keys or other layers read the
        values.
        """
        attention = self.parts.attention
        is_shared = any(layer.attention.kv_layer is not None for layer in self.spec.layers)
        has_norm = attention.has_v_norm or self.spec.has_inner_norms or attention.differs or attention.norms_given
        return attention.has_v and not has_norm and not is_shared and attention.clip is None

    def _block_index(self, index: IndexSpec, root: str) -> IndexParts:
        """Norms as those of the model's queries and keys."""
        own, d, names = f"{root}{self.names.index}", index.head_dim, self.names
        if index.by_means:
            n = index.n_heads * d
            (both,) = self.linear(own, ("index_qk_proj",), (n + d,), self.spec.hidden).weights
            return IndexParts(
                queries=LinearParts(weights=(RowsTensor(both, 0, n),)),
                key=LinearParts(weights=(RowsTensor(both, n, n + d),)),
                norm=self.norm_over(f"{own}k_layernorm", d),
                q_norm=self.norm_over(f"{own}q_layernorm", d),
                norm_offset=self.spec.norm_offset,
            )
        if not self.source.has(f"{own}k_proj.weight") and names.index in names.others:
            own = f"{root}{names.others[names.index]}"
        return IndexParts(
            queries=self.linear(own, ("q_proj",), (index.n_heads * d,), self.spec.hidden),
            key=self.linear(own, ("k_proj",), (d,), self.spec.hidden),
            norm=self.norm_over(f"{own}k_norm", d),
            q_norm=self.norm_over(f"{own}q_norm", d),
            norm_offset=self.spec.norm_offset,
        )

    def _in_halves(self, qkv: LinearParts, n_parts: int) -> LinearParts:
        """q and k, if any, with dimensions that turn together half of rotary_dim apart: scores are the same in any order."""
        attention = self.parts.attention
        rope = attention.rope
        if rope is None or not rope.is_interleaved:
            return qkv
        if len(qkv.weights) != n_parts:
            raise UnsupportedModel("a stacked q, k and v whose neighbouring dimensions turn together is not run")
        order = halves_order(attention.head_dim, rope.rotary_dim)

        def in_halves(tensors: tuple[WeightTensor, ...]) -> tuple[WeightTensor, ...]:
            return (*(ReorderedTensor(tensor, order) for tensor in tensors[:2]), *tensors[2:])

        return LinearParts(weights=in_halves(qkv.weights), biases=in_halves(qkv.biases))

    def attention(self, root: str, index: IndexParts | None = None) -> Heads:
        """The layer's attention handle, with q_norm and k_norm where it has them."""
        spec = self.parts.attention
        heads = AttentionSpec(
            layer=self.layer,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            is_chunked=spec.is_chunked,
            softcap=spec.softcap,
            rope=None if spec.rope is None else frequencies(spec.rope),
            query_scale=spec.query_scale,
            qk_norm=QkNorm.HEAD if spec.qk_norm is QkNorm.UNIT else spec.qk_norm,
            norm_eps=self.spec.norm_eps,
            place=self.spec.kv_place(self.layer),
            owns_kv=spec.kv_layer is None,
            has_v_norm=spec.has_v_norm,
            has_v=spec.has_v,
            v_head_dim=spec.v_head_dim,
            v_scale=spec.v_scale,
            index=spec.index,
            index_place=self.spec.index_place(self.layer),
            has_sinks=spec.has_sinks,
            slopes=spec.slopes,
            distances=spec.distances,
            related=spec.related,
        )
        beside: dict[str, Any] = {"sinks": self.sinks(root), "index": index, **by_distance(self, root)}
        if spec.qk_norm is QkNorm.NONE:
            return self.loader.attention(heads, q_norm=None, k_norm=None, **beside)
        q_norm = self._heads_norm(f"{root}{self.names.q_norm}", spec.n_heads)
        k_norm = self._heads_norm(f"{root}{self.names.k_norm}", spec.n_kv_heads) if heads.owns_kv else None
        offset = 0.0 if spec.qk_norm is QkNorm.UNIT else self.spec.norm_offset
        return self.loader.attention(heads, q_norm=q_norm, k_norm=k_norm, norm_offset=offset, **beside)

    def _heads_norm(self, name: str, n_heads: int) -> WeightTensor:
        """The weight of the norm of q or of k, dimensions in the order that the projections are read in."""
        attention = self.parts.attention
        d, rope, kind = attention.head_dim, attention.rope, attention.qk_norm
        weight: WeightTensor
        if kind is QkNorm.UNIT:
            return OnesTensor(d)
        if kind is QkNorm.HEADS and "{}" in name:
            heads = range(n_heads)
            weight = JoinedTensor(tuple(self.source.tensor(f"{name.format(head)}.weight", d) for head in heads))
        elif kind is QkNorm.HEADS:
            weight = JoinedTensor((self.source.tensor(f"{name}.weight", n_heads, d),))
        elif kind is QkNorm.CENTRED:  # each head's in turn, as the ops take them
            weight = JoinedTensor(tuple(self.source.tensor(f"{name}.{one}", d) for one in ("weight", "bias")) * n_heads)
        else:
            weight = self.source.tensor(f"{name}.weight", d * (n_heads if kind is QkNorm.FULL else 1))
        if rope is None or not rope.is_interleaved:
            return weight
        return ReorderedTensor(weight, halves_order(d, rope.rotary_dim))
