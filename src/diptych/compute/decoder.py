"""A model's tensors as weight handles, and its forward in the op vocabulary: one walk for every family.

What differs between families is data (`models.families`): which norms a layer has, how its tensors are called, whether its
MLP is a mixture. No look into a handle: the same code runs eagerly on the torch backend and is recorded into a program on
the cpu backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diptych.compute.balance import HEAD_SHARE, NORM_SHARE, balance_gated, balance_norm, balance_values
from diptych.compute.ops.contract import (
    AttentionSpec,
    ExpertParts,
    Experts,
    Heads,
    Hidden,
    Linear,
    LinearParts,
    Loader,
    Ops,
    Role,
    Split,
    Stream,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.rope import frequencies
from diptych.compute.weights import SlicedTensor, Source
from diptych.models.families import BY_MODEL_TYPE, Family
from diptych.models.spec import MlpSpec, ModelSpec, MoeSpec, Norms, QkNorm

# before attention, after it, before the MLP, after it: the names that transformers gives the norms of a layer
NORM_NAMES: dict[Norms, tuple[str | None, str | None, str | None, str | None]] = {
    Norms.BEFORE: ("input_layernorm", None, "post_attention_layernorm", None),
    Norms.AFTER: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    Norms.AROUND: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
# all experts in one tensor each
STACKED = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[Vector, Linear, Heads, Experts]):
    """The handles of one layer: either dense or experts; a norm that the family lacks is None."""

    attention: Heads
    qkv: Linear
    o: Linear
    input_norm: Vector | None
    post_attention_norm: Vector | None
    pre_mlp_norm: Vector | None
    post_mlp_norm: Vector | None
    dense: tuple[Linear, Linear] | None  # gate_up, down
    experts: Experts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights(Generic[Table, Vector, Linear, Heads, Experts]):
    """The handles of a model."""

    embedding: Table
    layers: tuple[LayerWeights[Vector, Linear, Heads, Experts], ...]
    norm: Vector
    head: Linear


def load_decoder(
    source: Source, loader: Loader[Table, Vector, Linear, Heads, Experts], spec: ModelSpec
) -> DecoderWeights[Table, Vector, Linear, Heads, Experts]:
    """Every weight of the model as handles, piece by piece, so that a loader may report progress and free as it goes."""
    prefix = prefix_of(source, spec)
    table = source.tensor(f"{prefix}embed_tokens.weight", spec.vocab_size, spec.hidden)
    role = Role(sites=(("head", spec.vocab_size),), split=Split.OUTPUTS)
    norm: WeightTensor = source.tensor(f"{prefix}norm.weight", spec.hidden)
    output = table if spec.is_tied else source.tensor(head_name(source, prefix), spec.vocab_size, spec.hidden)
    if loader.is_balancing:
        norm, (parts,) = balance_norm(
            norm, (LinearParts(weights=(output,)),), offset=spec.norm_offset, share=HEAD_SHARE
        )
        (output,) = parts.weights
    # the largest tensor comes first, while little else is held beside its pages in the file
    head = loader.head(output, role=role)
    embedding = loader.table(table, head=head if spec.is_tied else None)
    layers = tuple(LayerLoader(source, loader, spec, i, prefix).load() for i in range(spec.n_layers))
    return DecoderWeights(
        embedding=embedding, layers=layers, norm=loader.vector(norm, offset=spec.norm_offset), head=head
    )


def prefix_of(source: Source, spec: ModelSpec) -> str:
    """Where the tensors of the language model begin."""
    prefixes = family_named(spec).prefixes
    known = (*prefixes, "")  # "": a decoder that was saved without the model around it
    return next((p for p in known if source.has(f"{p}embed_tokens.weight")), prefixes[0])


def head_name(source: Source, prefix: str) -> str:
    """Where the output projection lies: beside the language model of a multimodal checkpoint, or at the top."""
    nested = prefix.removesuffix("model.") + "lm_head.weight"
    return nested if source.has(nested) else "lm_head.weight"


def family_named(spec: ModelSpec) -> Family:
    """The entry of the table that the spec was read by."""
    return BY_MODEL_TYPE[spec.family]


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
        self.prefix = f"{prefix}layers.{layer}."

    def load(self) -> LayerWeights[Vector, Linear, Heads, Experts]:
        """All of them: a dense MLP first, a mixture last."""
        mlp = self.parts.mlp
        before, after, before_mlp, after_mlp = (self.norm_tensor(name) for name in NORM_NAMES[self.parts.norms])
        dense = experts = None
        if isinstance(mlp, MlpSpec):
            before_mlp, dense = self.mlp(mlp, before_mlp)
        before, attention, qkv, o = self.heads(before)
        input_norm, post_attention_norm, post_mlp_norm = (self.norm(norm) for norm in (before, after, after_mlp))
        if isinstance(mlp, MoeSpec):
            before_mlp, experts = self._experts(mlp, before_mlp)
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
        )

    def heads(self, norm: WeightTensor | None) -> tuple[WeightTensor | None, Heads, Linear, Linear]:
        """The norm that they read, attention, and its projections: q, k and v, and o."""
        attention, root = self.parts.attention, f"{self.prefix}self_attn."
        q, kv = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim
        qkv = self.linear(root, self.names.qkv, (q, kv, kv), self.spec.hidden, has_bias=attention.has_qkv_bias)
        o = self.linear(root, (self.names.o,), (self.spec.hidden,), q, has_bias=attention.has_o_bias)
        if self.loader.is_balancing:
            norm, (qkv,) = self._balance_norm(norm, (qkv,))
            qkv, o = balance_values(qkv, o, attention)
        return (
            norm,
            self.attention(root),
            self.loader.linear(qkv, role=self._role(Split.OUTPUTS, q=q, k=kv, v=kv)),
            self.loader.linear(o, role=self._role(Split.INPUTS, o=self.spec.hidden)),
        )

    def _balance_norm(
        self, norm: WeightTensor | None, readers: tuple[LinearParts, ...]
    ) -> tuple[WeightTensor | None, tuple[LinearParts, ...]]:
        """Nothing to share where the projections read the residual stream itself."""
        return (
            (norm, readers)
            if norm is None
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
        weights = tuple(self.source.tensor(f"{root}{name}.weight", n, n_inputs) for name, n in named)
        biases = tuple(self.source.tensor(f"{root}{name}.bias", n) for name, n in named) if has_bias else ()
        return LinearParts(weights=weights, biases=biases)

    def attention(self, root: str) -> Heads:
        """The layer's attention handle, with q_norm and k_norm where it has them."""
        spec = self.parts.attention
        heads = AttentionSpec(
            layer=self.layer,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            rope=None if spec.rope is None else frequencies(spec.rope),
            qk_norm=spec.qk_norm,
            norm_eps=self.spec.norm_eps,
        )
        if spec.qk_norm is QkNorm.NONE:
            return self.loader.attention(heads, q_norm=None, k_norm=None)
        is_full = spec.qk_norm is QkNorm.FULL
        return self.loader.attention(
            heads,
            q_norm=self.source.tensor(f"{root}q_norm.weight", spec.head_dim * (spec.n_heads if is_full else 1)),
            k_norm=self.source.tensor(f"{root}k_norm.weight", spec.head_dim * (spec.n_kv_heads if is_full else 1)),
            norm_offset=self.spec.norm_offset,
        )

    def norm_tensor(self, name: str | None) -> WeightTensor | None:
        """A norm over the residual width."""
        return None if name is None else self.source.tensor(f"{self.prefix}{name}.weight", self.spec.hidden)

    def norm(self, tensor: WeightTensor | None) -> Vector | None:
        """A norm's handle; None where there is none."""
        return None if tensor is None else self.loader.vector(tensor, offset=self.spec.norm_offset)

    def mlp(self, mlp: MlpSpec, norm: WeightTensor | None) -> tuple[WeightTensor | None, tuple[Linear, Linear]]:
        """The norm that a dense MLP reads, and its gate_up and down."""
        root, hidden = f"{self.prefix}{self.names.mlp[0]}", self.spec.hidden
        gate_up = self.linear(root, self.names.gate_up, (mlp.ffn, mlp.ffn), hidden, has_bias=mlp.has_bias)
        down = self.linear(root, (self.names.down,), (hidden,), mlp.ffn, has_bias=mlp.has_bias)
        if self.loader.is_balancing:
            norm, (gate_up,) = self._balance_norm(norm, (gate_up,))
            gate_up, down = balance_gated(gate_up, down)
        role = self._role(Split.OUTPUTS, gate=mlp.ffn, up=mlp.ffn)
        return norm, (
            self.loader.gated(gate_up, mlp.activation, role=role),
            self.loader.linear(down, role=self._role(Split.INPUTS, down=hidden)),
        )

    def _experts(self, moe: MoeSpec, norm: WeightTensor | None) -> tuple[WeightTensor | None, Experts]:
        """The norm that a router and its experts read, and the mixture of them.

        One tensor per expert and projection, or all experts stacked in one tensor each.
        """
        roots = [f"{self.prefix}{root}" for root in self.names.mlp]
        root = next((root for root in roots if self.source.has(f"{root}gate.weight")), roots[0])
        n, ffn, hidden = moe.n_experts, moe.expert_ffn, self.spec.hidden
        router: WeightTensor = self.source.tensor(f"{root}gate.weight", n, hidden)
        if self.source.has(f"{root}{STACKED[0]}"):
            gate_up = self.source.tensor(f"{root}{STACKED[0]}", n, 2 * ffn, hidden)
            down = self.source.tensor(f"{root}{STACKED[1]}", n, hidden, ffn)
            experts = tuple(
                ExpertParts(
                    gate_up=LinearParts(weights=(SlicedTensor(gate_up, e),)),
                    down=LinearParts(weights=(SlicedTensor(down, e),)),
                )
                for e in range(n)
            )
        else:
            *gate_up_names, down_name = self.names.expert
            experts = tuple(
                ExpertParts(
                    gate_up=self.linear(f"{root}experts.{e}.", tuple(gate_up_names), (ffn, ffn), hidden),
                    down=self.linear(f"{root}experts.{e}.", (down_name,), (hidden,), ffn),
                )
                for e in range(n)
            )
        if self.loader.is_balancing:
            readers = (LinearParts(weights=(router,)), *(expert.gate_up for expert in experts))
            norm, (picking, *scaled) = self._balance_norm(norm, readers)
            (router,) = picking.weights
            pairs = (balance_gated(gate_up, expert.down) for gate_up, expert in zip(scaled, experts, strict=True))
            experts = tuple(ExpertParts(gate_up=gate_up, down=down) for gate_up, down in pairs)
        role = self._role(Split.OUTPUTS, gate=ffn, up=ffn, down=hidden)
        return norm, self.loader.experts(moe, router=router, experts=experts, role=role)


def run_decoder(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
) -> Hidden:
    """Logits [R, V] of the step that `ops` stands for."""
    x = ops.embed(weights.embedding, scale=spec.embed_scale)
    for number, layer in enumerate(weights.layers):
        x = run_layer(ops, x, layer, eps=spec.norm_eps)
        ops.tap(x, number)
    return ops.head(x, weights.norm, weights.head, eps=spec.norm_eps, softcap=spec.logit_softcap)


def run_layer(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Vector, Linear, Heads, Experts],
    *,
    eps: float,
) -> Stream:
    """x + attention(x), then + mlp(x), each with the norms the layer has before and after it."""

    def normed(y: Stream, norm: Vector | None) -> Stream | Hidden:
        return y if norm is None else ops.rms_norm(y, norm, eps=eps)

    def added(y: Hidden, projection: Linear, norm: Vector | None, x: Stream) -> Stream:
        if norm is None:
            return ops.linear_add(y, projection, x)
        return ops.add(x, ops.rms_norm(ops.linear(y, projection), norm, eps=eps))

    qkv = ops.linear(normed(x, weights.input_norm), weights.qkv)
    heads = ops.attention(ops.rotate_and_cache(qkv, weights.attention), weights.attention)
    x = added(heads, weights.o, weights.post_attention_norm, x)
    h = normed(x, weights.pre_mlp_norm)
    if weights.dense is None:
        assert weights.experts is not None
        return ops.experts_add(h, weights.experts, x)
    gate_up, down = weights.dense
    return added(ops.linear_gate(h, gate_up), down, weights.post_mlp_norm, x)
