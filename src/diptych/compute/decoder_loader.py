"""A model's tensors as weight handles for the walk in `decoder`: found by the family's names, in the forms that ops take."""

from __future__ import annotations

import math
from typing import Any, Generic

import torch

from diptych.compute.balance import HEAD_SHARE, NORM_SHARE, balance_gated, balance_norm, balance_values
from diptych.compute.decoder import (
    LATENT_EPS,
    ApartNorms,
    DecoderWeights,
    LatentWeights,
    LayerWeights,
    SharedExperts,
)
from diptych.compute.naming import family_named, final_norm, head_name, norm_parts, prefix_of, table_name
from diptych.compute.ops.contract import (
    AttentionSpec,
    ExpertParts,
    Experts,
    Heads,
    Linear,
    LinearParts,
    Loader,
    NormParts,
    Role,
    Split,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.rope import frequencies
from diptych.compute.streams_loader import (
    load_branch,
    load_embedding,
    load_ends,
    load_inputs,
    load_mixing,
    own_gate,
)
from diptych.compute.views import (
    MXFP4_BLOCK,
    JoinedTensor,
    Mxfp4Tensor,
    OnesTensor,
    ReorderedTensor,
    RowsTensor,
    ScaledTensor,
    TransposedTensor,
    by_head_order,
    halves_order,
)
from diptych.compute.weights import SlicedTensor, Source
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.spec import (
    XIELU_LEAST,
    XIELU_SLOPE,
    Activation,
    MlaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    Norms,
    QkNorm,
)


def load_decoder(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec
) -> DecoderWeights[Table, Vector, Linear, Heads, Experts]:
    """Every weight of the model as handles, piece by piece, so that a loader may report progress and free as it goes."""
    prefix, names = prefix_of(source, spec), family_named(spec).names
    table = source.tensor(table_name(source, spec), spec.vocab_size, spec.hidden)
    role = Role(sites=(("head", spec.vocab_size),), split=Split.OUTPUTS)
    norm = final_norm(source, spec)
    output = table if spec.is_tied else source.tensor(head_name(source, spec), spec.vocab_size, spec.hidden)
    bias = source.tensor(f"{names.head}.bias", spec.vocab_size) if spec.has_head_bias and spec.has_head else None
    if loader.is_balancing and norm.weight.stored:
        norm, (parts,) = balance_norm(
            norm, (LinearParts(weights=(output,)),), offset=spec.norm_offset, share=HEAD_SHARE
        )
        (output,) = parts.weights
    # the largest tensor comes first, while little else is held beside its pages in the file
    head = loader.head(output, bias=bias, role=role)
    embedding = loader.table(table, head=head if spec.is_tied else None)
    positions = None
    if spec.n_position_embeddings:
        rows = source.tensor(f"{prefix}{names.positions}.weight", spec.n_position_embeddings, spec.hidden)
        positions = loader.table(rows, head=None)
    inputs, (begin, end) = load_inputs(source, loader, spec, prefix), load_ends(source, loader, spec, prefix)
    layers = tuple(LayerLoader(source, loader, spec, i, prefix).load() for i in range(spec.n_layers))
    return DecoderWeights(
        embedding=embedding,
        positions=positions,
        layers=layers,
        norm=loader.norm(norm, offset=spec.norm_offset),
        head=head,
        inputs=inputs,
        begin=begin,
        end=end,
    )


class LayerLoader(Generic[Table, Vector, Linear, Heads, Experts]):
    """Loads the tensors of one layer."""

    def __init__(
        self,
        source: Source,
        loader: Loader[Table, Vector, Linear, Heads, Experts],
        spec: ModelSpec,
        layer: int,
        prefix: str,
    ) -> None:
        self.names = family_named(spec).names
        self.source = source
        self.loader = loader
        self.spec = spec
        self.layer = layer
        self.parts = spec.layers[layer]
        self.prefix = f"{prefix}{self.names.layers}.{layer}."

    def load(self) -> LayerWeights[Vector, Linear, Heads, Experts]:
        """All of them: a dense MLP first, a mixture last."""
        mlp = self.parts.mlp
        before, after, before_mlp, after_mlp = (self.norm_tensor(name) for name in self.names.norms[self.parts.norms])
        dense = experts = shared = apart = None
        is_parallel = self.parts.norms.are_side_by_side
        if is_parallel and not isinstance(mlp, MlpSpec):
            raise UnsupportedModel(
                f"layer {self.layer} has a mixture of experts beside its attention, which is not run"
            )
        if isinstance(mlp, MlpSpec):  # where it reads the norm that attention reads, that stays as it is
            before_mlp, dense = self.mlp(mlp, before_mlp)
        # what a branch adds is the norm as it is
        is_shared = self.parts.norms is Norms.PARALLEL or self.spec.low_rank > 0
        before, attention, qkv, o = self.heads(before, is_shared=is_shared)
        input_norm = self.norm(before)
        post_attention_norm, post_mlp_norm = (self.norm(norm, is_read=False) for norm in (after, after_mlp))
        if isinstance(mlp, MoeSpec):
            before_mlp, experts, shared, apart = self._experts(mlp, before_mlp)
        return LayerWeights(
            attention=attention,
            qkv=qkv,
            o=o,
            input_norm=input_norm,
            post_attention_norm=post_attention_norm,
            pre_mlp_norm=self.norm(before_mlp),
            post_mlp_norm=post_mlp_norm,
            dense=dense,
            experts=experts,
            shared=shared,
            apart=apart,
            is_parallel=is_parallel,
            is_gated=mlp.is_gated if isinstance(mlp, MlpSpec) else True,
            cutoff=mlp.cutoff if isinstance(mlp, MlpSpec) else None,
            curve=self._curve(mlp),
            clip=self.parts.attention.clip,
            branch=load_branch(self.source, self.loader, self.spec, self.prefix),
            scale=self.loader.number(self.source.tensor(f"{self.prefix}layer_scalar", 1))
            if self.spec.scales_layers
            else 1.0,
            **self._streams(),
        )

    def _curve(self, mlp: MlpSpec | MoeSpec) -> tuple[float, ...]:
        """The numbers of an activation that has its own, as `Activation` has them."""
        if mlp.activation is not Activation.XIELU:
            return ()
        names = (f"{self.prefix}{self.names.mlp[0]}act_fn.{name}" for name in ("alpha_p", "alpha_n"))
        above, below = (math.log1p(math.exp(self.loader.number(self.source.tensor(name, 1)))) for name in names)
        return above, XIELU_SLOPE + below, XIELU_SLOPE, XIELU_LEAST

    def _streams(self) -> dict[str, Any]:
        """How it mixes streams, and its own embedding."""
        spec, mlp = self.spec, self.parts.mlp
        if spec.layer_inputs is None:
            return {}
        source, loader = self.source, self.loader
        output, gate = own_gate(source, spec, spec.layer_inputs, self.prefix, is_balancing=loader.is_balancing)
        mixing = None
        if spec.streams is not None:
            mixing = load_mixing(source, loader, spec, spec.streams, output, self.prefix)
        role = self._role(Split.INPUTS, embedding=spec.hidden)
        embedding = load_embedding(source, loader, spec, spec.layer_inputs, gate, mlp, self.prefix, role)
        return {"mixing": mixing, "embedding": embedding}

    def heads(
        self, norm: NormParts | None, *, is_shared: bool = False
    ) -> tuple[NormParts | None, Heads, Linear | LatentWeights[Vector, Linear], Linear]:
        """The norm that they read, attention, and its projections: q, k and v, and o. is_shared: others read the norm too."""
        attention, root = self.parts.attention, f"{self.prefix}{self.names.attention}."
        if attention.mla is not None:
            return self._latent_heads(norm, attention.mla, root)
        q, kv = attention.n_heads * attention.head_dim, attention.own_kv_heads * attention.head_dim
        sites = ("k", "v")[: 1 + attention.has_v] if kv else ()
        widths = {"q": q, **dict.fromkeys(sites, kv)}
        # stacked projections have one name
        names = self.names.qkv if len(self.names.qkv) == 1 else self.names.qkv[: 1 + len(sites)]
        qkv = self.linear(root, names, tuple(widths.values()), self.spec.hidden, has_bias=attention.has_qkv_bias)
        if self.names.qkv_by_head and not self.source.is_plain:
            order = by_head_order(attention.n_heads, attention.n_kv_heads, attention.head_dim)
            qkv = _reordered(qkv, order)
        qkv = self._in_halves(qkv, len(widths))
        o = self.linear(root, (self.names.o,), (self.spec.hidden,), q, has_bias=attention.has_o_bias)
        if self.loader.is_balancing:
            if not is_shared:
                norm, (qkv,) = self._balance_norm(norm, (qkv,))
            if self._are_values_its_own:
                qkv, o = balance_values(qkv, o, attention)
        return (
            norm,
            self.attention(root),
            self.loader.linear(qkv, role=self._role(Split.OUTPUTS, **widths)),
            self.loader.linear(o, role=self._role(Split.INPUTS, o=self.spec.hidden)),
        )

    @property
    def _are_values_its_own(self) -> bool:
        """Whether v and o may share factors: not where a norm stands between them, or keys or other layers read the values."""
        attention = self.parts.attention
        return attention.has_v and not attention.has_v_norm and len(self.spec.kv_layers) == self.spec.n_layers

    def _latent_heads(
        self, norm: NormParts | None, mla: MlaSpec, root: str
    ) -> tuple[NormParts | None, Heads, LatentWeights[Vector, Linear], Linear]:
        """As `heads`, of latent attention. What expands a latent is cut by heads: its key part is read the other way round."""
        attention, hidden = self.parts.attention, self.spec.hidden
        n_heads, has_bias = attention.n_heads, attention.has_o_bias
        q_width = n_heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            down = None
            q = first = self.linear(root, ("q_proj",), (q_width,), hidden)
        else:
            down = first = self.linear(root, ("q_a_proj",), (mla.q_rank,), hidden, has_bias=has_bias)
            q = self.linear(root, ("q_b_proj",), (q_width,), mla.q_rank)
        kv = self.linear(root, ("kv_a_proj_with_mqa",), (mla.kv_rank + mla.rope_dim,), hidden, has_bias=has_bias)
        if self.loader.is_balancing:
            norm, (first, kv) = self._balance_norm(norm, (first, kv))
            down, q = (None, first) if down is None else (first, q)
        role, handle = self._role(Split.OUTPUTS, q=q_width), self._latent_attention(mla, root)
        weights = LatentWeights(
            q_down=None if down is None else self.loader.linear(down),
            q_norm=None
            if mla.q_rank is None
            else self.loader.norm(self._norm_over(f"{root}q_a_layernorm", mla.q_rank)),
            q=self.loader.linear(self._rope_last(q, mla.nope_dim), role=role),
            kv=self.loader.linear(self._rope_last(kv, mla.kv_rank)),
        )
        o = self.linear(root, (self.names.o,), (hidden,), n_heads * mla.v_dim, has_bias=has_bias)
        return norm, handle, weights, self.loader.linear(o, role=self._role(Split.INPUTS, o=hidden))

    def _norm_over(self, name: str, width: int) -> NormParts:
        return NormParts(weight=self.source.tensor(f"{name}.weight", width))

    def _rope_last(self, parts: LinearParts, before: int) -> LinearParts:
        """Each head's rotary dimensions, which follow `before` others, in halves."""
        rope = self.parts.attention.rope
        if rope is None or not rope.is_interleaved:
            return parts
        order = torch.cat([torch.arange(before), before + halves_order(rope.rotary_dim, rope.rotary_dim)])
        return _reordered(parts, order)

    def _latent_attention(self, mla: MlaSpec, root: str) -> Heads:
        attention = self.parts.attention
        keys, values = self._latent_matrices(mla, root)
        spec = AttentionSpec(
            layer=self.layer,
            n_heads=attention.n_heads,
            n_kv_heads=1,
            head_dim=attention.cache.head_dim,
            scale=attention.scale,
            window=attention.window,
            rope=None if attention.rope is None else frequencies(attention.rope),
            norm_eps=LATENT_EPS,
            mla=mla,
        )
        return self.loader.latent_attention(
            spec,
            norm=self._norm_over(f"{root}kv_a_layernorm", mla.kv_rank),
            keys=tuple(LinearParts(weights=(one,)) for one in keys),
            values=tuple(LinearParts(weights=(one,)) for one in values),
        )

    def _latent_matrices(self, mla: MlaSpec, root: str) -> tuple[list[WeightTensor], list[WeightTensor]]:
        """Each head's [kv_rank, nope_dim] and [v_dim, kv_rank]: rows of what expands latents, or by themselves (GGUF)."""
        heads, size = range(self.parts.attention.n_heads), mla.nope_dim + mla.v_dim
        if self.source.has(f"{root}k_b_proj.0.weight"):
            return (
                [self.source.tensor(f"{root}k_b_proj.{head}.weight", mla.kv_rank, mla.nope_dim) for head in heads],
                [self.source.tensor(f"{root}v_b_proj.{head}.weight", mla.v_dim, mla.kv_rank) for head in heads],
            )
        up = self.source.tensor(f"{root}kv_b_proj.weight", len(heads) * size, mla.kv_rank)
        begins = [head * size for head in heads]
        return (
            [TransposedTensor(RowsTensor(up, at, at + mla.nope_dim)) for at in begins],
            [RowsTensor(up, at + mla.nope_dim, at + size) for at in begins],
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

        def reordered(tensors: tuple[WeightTensor, ...]) -> tuple[WeightTensor, ...]:
            return (*(ReorderedTensor(tensor, order) for tensor in tensors[:2]), *tensors[2:])

        return LinearParts(weights=reordered(qkv.weights), biases=reordered(qkv.biases))

    def _balance_norm(
        self, norm: NormParts | None, readers: tuple[LinearParts, ...]
    ) -> tuple[NormParts | None, tuple[LinearParts, ...]]:
        """Nothing to share where the projections read the residual stream itself, or a norm without a weight."""
        return (
            (norm, readers)
            if norm is None or not norm.weight.stored
            else balance_norm(norm, readers, offset=self.spec.norm_offset, share=NORM_SHARE)
        )

    def _role(self, split: Split, **outputs: int) -> Role:
        return Role(sites=tuple(outputs.items()), split=split, layer=self.layer)

    def linear(
        self, root: str, names: tuple[str, ...], rows: tuple[int, ...], n_inputs: int, *, has_bias: bool = False
    ) -> LinearParts:
        """Projections stacked along their outputs; one name for all of them: stacked in the file already."""
        rows = rows if len(names) == len(rows) else (sum(rows),)
        named = list(zip(names, rows, strict=True))
        weights: tuple[WeightTensor, ...]
        if self.names.transposes and not self.source.is_plain:
            weights = tuple(
                TransposedTensor(self.source.tensor(f"{root}{name}.weight", n_inputs, n)) for name, n in named
            )
        else:
            weights = tuple(self.source.tensor(f"{root}{name}.weight", n, n_inputs) for name, n in named)
        biases = tuple(self.source.tensor(f"{root}{name}.bias", n) for name, n in named) if has_bias else ()
        return LinearParts(weights=weights, biases=biases)

    def attention(self, root: str) -> Heads:
        """The layer's attention handle, with q_norm and k_norm where it has them."""
        spec = self.parts.attention
        sinks = self.source.tensor(f"{root}sinks", spec.n_heads) if spec.has_sinks else None
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
        )
        if spec.qk_norm is QkNorm.NONE:
            return self.loader.attention(heads, q_norm=None, k_norm=None, sinks=sinks)
        q_norm = self._heads_norm(f"{root}{self.names.q_norm}", spec.n_heads)
        k_norm = self._heads_norm(f"{root}{self.names.k_norm}", spec.n_kv_heads) if heads.owns_kv else None
        return self.loader.attention(
            heads, q_norm=q_norm, k_norm=k_norm, norm_offset=self.spec.norm_offset, sinks=sinks
        )

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
        else:
            weight = self.source.tensor(f"{name}.weight", d * (n_heads if kind is QkNorm.FULL else 1))
        if rope is None or not rope.is_interleaved:
            return weight
        return ReorderedTensor(weight, halves_order(d, rope.rotary_dim))

    def norm_tensor(self, name: str | None) -> NormParts | None:
        """A norm over the residual width."""
        return None if name is None else norm_parts(self.source, f"{self.prefix}{name}", self.spec)

    def norm(self, parts: NormParts | None, *, is_read: bool = True) -> Vector | None:
        """A norm's handle; None where there is none."""
        return None if parts is None else self.loader.norm(parts, offset=self.spec.norm_offset, is_read=is_read)

    def mlp(
        self, mlp: MlpSpec, norm: NormParts | None, root: str | None = None
    ) -> tuple[NormParts | None, tuple[Linear, Linear]]:
        """The norm that a dense MLP reads, and its gate_up and down. root: where its tensors lie, unless in the usual place."""
        root, hidden = root or f"{self.prefix}{self.names.mlp[0]}", self.spec.hidden
        widths = (mlp.ffn,) * (2 if mlp.is_gated else 1)
        gate_up = self.linear(root, self.names.gate_up, widths, hidden, has_bias=mlp.has_bias)
        down = self.linear(root, (self.names.down,), (hidden,), mlp.ffn, has_bias=mlp.has_bias)
        if self.loader.is_balancing:
            norm, (gate_up,) = self._balance_norm(norm, (gate_up,))
            if mlp.is_gated:  # else up goes through a curve, which knows no factors
                gate_up, down = balance_gated(gate_up, down)
        if mlp.is_gated:
            role = self._role(Split.OUTPUTS, gate=mlp.ffn, up=mlp.ffn)
            first = self.loader.gated(gate_up, mlp.activation, role=role, is_apart=mlp.cutoff is not None)
        else:
            first = self.loader.gate(gate_up, mlp.activation, role=self._role(Split.OUTPUTS, up=mlp.ffn))
        return norm, (first, self.loader.linear(down, role=self._role(Split.INPUTS, down=hidden)))

    def _experts(
        self, moe: MoeSpec, norm: NormParts | None
    ) -> tuple[NormParts | None, Experts, SharedExperts[Linear] | None, ApartNorms[Vector] | None]:
        """The norm that a router and its experts read, the mixture of them, what every token meets beside it, and norms of
        each of them where they have their own.
        """
        roots = [f"{self.prefix}{root}" for root in self.names.mlp]
        root = next((root for root in roots if self.source.has(f"{root}{self.names.router}.weight")), roots[0])
        ffn, hidden = moe.expert_ffn, self.spec.hidden
        router = self.linear(root, (self.names.router,), (moe.n_experts,), hidden, has_bias=moe.has_router_bias)
        experts = self._expert_parts(moe, root)
        shared = self._shared_parts(moe, roots, root)
        own = self.norm_tensor(self.names.apart[0]) if moe.is_apart else None
        if self.loader.is_balancing:
            gate_ups = tuple(expert.gate_up for expert in experts)
            if own is None:
                norm, scaled = self._balance_norm(norm, (router, *gate_ups, *shared[::2]))
            else:
                own, gate_ups = self._balance_norm(own, gate_ups)
                norm, beside = self._balance_norm(norm, shared[:1])
                scaled = (router, *gate_ups, *beside)
            router, gate_ups, ends = scaled[0], scaled[1 : len(experts) + 1], scaled[len(experts) + 1 :]
            pairs = [(gate_up, expert.down) for gate_up, expert in zip(gate_ups, experts, strict=True)]
            if moe.activation is not Activation.CLAMPED:  # which is not linear in up
                pairs = [balance_gated(*pair) for pair in pairs]
            experts = tuple(ExpertParts(gate_up=gate_up, down=down) for gate_up, down in pairs)
            if shared:
                shared = (*balance_gated(ends[0], shared[1]), *ends[1:])
        choice_bias = (
            self.source.tensor(f"{root}{self.names.choice_bias}", *self.names.choice_axes, moe.n_experts)
            if moe.has_choice_bias
            else None
        )
        role = self._role(Split.OUTPUTS, gate=ffn, up=ffn, down=hidden)
        scales = self.source.tensor(f"{root}{self.names.expert_scales}", moe.n_experts) if moe.is_apart else None
        mixture = self.loader.experts(
            moe, router=router, choice_bias=choice_bias, scales=scales, experts=experts, role=role
        )
        return norm, mixture, self._shared(moe, shared), self._apart(own, root)

    def _apart(self, own: NormParts | None, root: str) -> ApartNorms[Vector] | None:
        """Norms of mixture, shared experts and router; `own` is the one before the mixture."""
        if own is None:
            return None
        hidden = self.spec.hidden
        of_router = ScaledTensor(self.source.tensor(f"{root}{self.names.router_scale}", hidden), hidden**-0.5)
        behind = [self.norm_tensor(name) for name in self.names.apart[1:]]
        assert behind[0] is not None
        assert behind[1] is not None
        offset = self.spec.norm_offset
        return ApartNorms(
            router=self.loader.norm(NormParts(weight=of_router), is_read=False),
            mixture=self.loader.norm(own, offset=offset),
            behind_shared=self.loader.norm(behind[0], offset=offset, is_read=False),
            behind_mixture=self.loader.norm(behind[1], offset=offset, is_read=False),
        )

    def _expert_parts(self, moe: MoeSpec, root: str) -> tuple[ExpertParts, ...]:
        """One tensor per expert and projection, or all experts stacked in one tensor each."""
        n, ffn, hidden = moe.n_experts, moe.expert_ffn, self.spec.hidden
        first, second = (f"{root}{name}" for name in self.names.stacked)
        if self.names.is_transposed and (self.source.has(first) or self.source.has(f"{first}_blocks")):
            return self._transposed_parts(moe, first, second)
        if self.source.has(first):
            gate_up = self.source.tensor(first, n, 2 * ffn, hidden)
            down = self.source.tensor(second, n, hidden, ffn)
            return tuple(
                ExpertParts(
                    gate_up=LinearParts(weights=(SlicedTensor(gate_up, e),)),
                    down=LinearParts(weights=(SlicedTensor(down, e),)),
                )
                for e in range(n)
            )
        *gate_up_names, down_name = self.names.expert
        return tuple(
            ExpertParts(
                gate_up=self.linear(
                    f"{root}experts.{e}.", tuple(gate_up_names), (ffn, ffn), hidden, has_bias=moe.has_expert_bias
                ),
                down=self.linear(f"{root}experts.{e}.", (down_name,), (hidden,), ffn, has_bias=moe.has_expert_bias),
            )
            for e in range(n)
        )

    def _transposed_parts(self, moe: MoeSpec, first: str, second: str) -> tuple[ExpertParts, ...]:
        """All experts stacked, as [inputs, outputs] or in MXFP4, rows of gate and up in turn or one behind the other."""
        n, ffn, hidden = moe.n_experts, moe.expert_ffn, self.spec.hidden
        order = halves_order(2 * ffn, 2 * ffn)

        def parts(name: str, rows: int, columns: int, *, takes_turns: bool) -> list[LinearParts]:
            weights: tuple[WeightTensor, ...] = self._stacked(name, n, rows, columns)
            bias = self.source.tensor(f"{name}_bias", n, rows) if moe.has_expert_bias else None
            biases: tuple[WeightTensor, ...] = () if bias is None else tuple(SlicedTensor(bias, e) for e in range(n))
            if takes_turns:
                weights, biases = (tuple(ReorderedTensor(one, order) for one in some) for some in (weights, biases))
            return [LinearParts(weights=(weights[e],), biases=biases[e : e + 1]) for e in range(n)]

        gate_ups = parts(first, 2 * ffn, hidden, takes_turns=self.names.takes_turns)
        downs = parts(second, hidden, ffn, takes_turns=False)
        return tuple(ExpertParts(gate_up=gate_ups[e], down=downs[e]) for e in range(n))

    def _stacked(self, name: str, n: int, rows: int, columns: int) -> tuple[WeightTensor, ...]:
        """n matrices [rows, columns] that lie transposed in one tensor, or as blocks of MXFP4."""
        if not self.source.has(f"{name}_blocks"):
            stacked = self.source.tensor(name, n, columns, rows)
            return tuple(TransposedTensor(SlicedTensor(stacked, e)) for e in range(n))
        if columns % MXFP4_BLOCK:
            raise LoadError(f"{name}_blocks holds rows of {columns}; MXFP4 has blocks of {MXFP4_BLOCK}")
        groups = columns // MXFP4_BLOCK
        blocks = self.source.raw(f"{name}_blocks", n, rows, groups, MXFP4_BLOCK // 2, n_values=n * rows * columns)
        scales = self.source.raw(f"{name}_scales", n, rows, groups, n_values=0)
        return tuple(Mxfp4Tensor(name, blocks, scales, e) for e in range(n))

    def _shared_parts(self, moe: MoeSpec, roots: list[str], root: str) -> tuple[LinearParts, ...]:
        """gate_up and down of the shared experts, and their gate where they have one; nothing where there are none."""
        if not moe.shared_ffn:
            return ()
        names = self.names
        root = next(
            (one for one in (root, *roots) if self.source.has(f"{one}{names.shared}.{names.down}.weight")), root
        )
        ffn, hidden = moe.shared_ffn, self.spec.hidden
        gate_up = self.linear(f"{root}{names.shared}.", names.gate_up, (ffn, ffn), hidden)
        down = self.linear(f"{root}{names.shared}.", (names.down,), (hidden,), ffn)
        gate = (self.linear(root, (names.shared_gate,), (1,), hidden),) if moe.has_shared_gate else ()
        return (gate_up, down, *gate)

    def _shared(self, moe: MoeSpec, parts: tuple[LinearParts, ...]) -> SharedExperts[Linear] | None:
        if not parts:
            return None
        role = self._role(Split.OUTPUTS, gate=moe.shared_ffn, up=moe.shared_ffn)
        return SharedExperts(
            gate_up=self.loader.gated(parts[0], moe.activation, role=role),
            down=self.loader.linear(parts[1], role=self._role(Split.INPUTS, down=self.spec.hidden)),
            gate=self.loader.router(parts[2]) if moe.has_shared_gate else None,
        )


def _reordered(parts: LinearParts, order: torch.Tensor) -> LinearParts:
    """Each tensor's rows in that order, within each head."""
    weights, biases = (tuple(ReorderedTensor(one, order) for one in some) for some in (parts.weights, parts.biases))
    return LinearParts(weights=weights, biases=biases)
