"""What all families share: the shape of a decoder, its weight handles, and the walk embed -> layers -> head.

A family is a `Family` value: config -> DecoderSpec, tensor names -> DecoderWeights, and one layer's forward.
No torch here and no look into a handle: the same code runs eagerly and is recorded into a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.compute.models.hf_config import HfConfig
from diptych.compute.models.rope import make_rope, position_limit, rope_section
from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    ExpertParts,
    ExpertsSpec,
    Handle,
    LinearParts,
    Loader,
    Ops,
    QkNorm,
    RopeSpec,
)
from diptych.compute.weights import SlicedTensor, Source
from diptych.ground.errors import LoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The shape of a model. max_positions: the longest sequence an engine may run (see `rope.position_limit`).

    attention: one entry per layer. experts: the mixture of every layer in moe_layers. norm_offset: added to every norm
    weight (1 where the family stores w - 1).
    """

    architecture: str
    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: Activation
    attention: tuple[AttentionSpec, ...]
    is_tied: bool
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    logit_softcap: float | None = None
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    experts: ExpertsSpec | None = None
    moe_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The handles of one layer; a family fills what it uses. Either gate_up and down, or experts."""

    attention: Handle
    qkv: Handle
    o: Handle
    input_norm: Handle | None = None
    post_attention_norm: Handle | None = None
    pre_mlp_norm: Handle | None = None
    post_mlp_norm: Handle | None = None
    gate_up: Handle | None = None
    down: Handle | None = None
    experts: Handle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The handles of a model."""

    embedding: Handle
    layers: tuple[LayerWeights, ...]
    norm: Handle
    head: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. prefixes: where its tensors may begin, tried in order; ignored: name parts nobody needs."""

    name: str
    architectures: tuple[str, ...]
    spec: Callable[[HfConfig, int | None], DecoderSpec]
    layer_weights: Callable[[Source, Loader, DecoderSpec, int, str], LayerWeights]
    layer: Callable[[Ops, Handle, DecoderSpec, LayerWeights], Handle]
    prefixes: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


def load_decoder(family: Family, source: Source, loader: Loader, spec: DecoderSpec) -> DecoderWeights:
    """Every weight of the model as handles, piece by piece, so that a loader may report progress and free as it goes."""
    prefix = next((p for p in family.prefixes if source.has(f"{p}embed_tokens.weight")), family.prefixes[0])
    table = source.tensor(f"{prefix}embed_tokens.weight", spec.vocab_size, spec.hidden)
    # the largest tensor comes first, while little else is held beside its pages in the file
    if spec.is_tied:
        head = loader.head(table)
    else:
        nested = prefix.removesuffix("model.") + "lm_head.weight"
        name = nested if source.has(nested) else "lm_head.weight"
        head = loader.head(source.tensor(name, spec.vocab_size, spec.hidden))
    embedding = loader.table(table, head=head if spec.is_tied else None)
    layers = tuple(family.layer_weights(source, loader, spec, i, f"{prefix}layers.{i}.") for i in range(spec.n_layers))
    norm = loader.vector(source.tensor(f"{prefix}norm.weight", spec.hidden), offset=spec.norm_offset)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def run_decoder(family: Family, ops: Ops, spec: DecoderSpec, weights: DecoderWeights) -> Handle:
    """Logits [R, V] of the step that `ops` stands for."""
    x = ops.embed(weights.embedding, scale=spec.embed_scale)
    for layer in weights.layers:
        x = family.layer(ops, x, spec, layer)
    return ops.head(x, weights.norm, weights.head, eps=spec.norm_eps, softcap=spec.logit_softcap)


# ---- pieces that most families are made of ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Head counts as the config gives them."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


def read_heads(config: HfConfig) -> Heads:
    """num_attention_heads, num_key_value_heads and head_dim, with the usual defaults, checked against each other."""
    n_heads = config.integer("num_attention_heads")
    n_kv_heads = config.integer("num_key_value_heads", n_heads)
    hidden = config.integer("hidden_size")
    if n_heads % n_kv_heads:
        raise LoadError(f"{n_heads} query heads cannot share {n_kv_heads} key-value heads ({config.path})")
    head_dim = config.integer("head_dim", max(1, hidden // n_heads))
    if head_dim % 2:
        raise LoadError(f"head_dim in {config.path} is {head_dim}; it must be even")
    return Heads(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)


def read_rope(
    config: HfConfig,
    heads: Heads,
    max_context_tokens: int | None,
    *,
    default_theta: float = 10_000.0,
    layer_type: str | None = None,
) -> tuple[RopeSpec, int]:
    """(frequencies, max_positions) of one kind of layer."""
    section = rope_section(config, default_theta=default_theta, layer_type=layer_type)
    limit = position_limit(config, section, max_context_tokens)
    context = limit if max_context_tokens is None else min(limit, max_context_tokens)
    return make_rope(config, section, head_dim=heads.head_dim, max_context_tokens=context), limit


def same_attention(
    n_layers: int,
    heads: Heads,
    rope: RopeSpec,
    *,
    windows: list[int | None] | None = None,
    qk_norm: QkNorm = QkNorm.NONE,
    norm_eps: float = 1e-6,
) -> tuple[AttentionSpec, ...]:
    """One AttentionSpec per layer, alike but for the window."""
    return tuple(
        AttentionSpec(
            layer=i,
            n_heads=heads.n_heads,
            n_kv_heads=heads.n_kv_heads,
            head_dim=heads.head_dim,
            scale=heads.head_dim**-0.5,
            window=windows[i] if windows else None,
            rope=rope,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
        )
        for i in range(n_layers)
    )


def common_spec(
    config: HfConfig,
    heads: Heads,
    attention: tuple[AttentionSpec, ...],
    *,
    architecture: str,
    max_positions: int,
) -> DecoderSpec:
    """The fields that every family's config names alike; a family replaces what it has besides."""
    return DecoderSpec(
        architecture=architecture,
        n_layers=len(attention),
        hidden=config.integer("hidden_size"),
        ffn=config.integer("intermediate_size"),
        n_heads=heads.n_heads,
        n_kv_heads=heads.n_kv_heads,
        head_dim=heads.head_dim,
        vocab_size=config.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=config.number("rms_norm_eps"),
        activation=config.activation("hidden_activation", "hidden_act"),
        attention=attention,
        is_tied=config.flag("tie_word_embeddings", False),
    )


def linear_parts(source: Source, names: list[tuple[str, int]], n_inputs: int, *, has_bias: bool = False) -> LinearParts:
    """Projections stacked along their outputs: (name without '.weight', outputs) in order."""
    weights = tuple(source.tensor(f"{name}.weight", rows, n_inputs) for name, rows in names)
    biases = tuple(source.tensor(f"{name}.bias", rows) for name, rows in names) if has_bias else ()
    return LinearParts(weights=weights, biases=biases)


def load_qkv(source: Source, loader: Loader, spec: DecoderSpec, prefix: str) -> Handle:
    """q_proj, k_proj and v_proj as one projection."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    names = [(f"{prefix}q_proj", q), (f"{prefix}k_proj", kv), (f"{prefix}v_proj", kv)]
    return loader.linear(linear_parts(source, names, spec.hidden, has_bias=spec.has_qkv_bias))


def load_o(source: Source, loader: Loader, spec: DecoderSpec, prefix: str) -> Handle:
    """o_proj."""
    names = [(f"{prefix}o_proj", spec.hidden)]
    return loader.linear(linear_parts(source, names, spec.n_heads * spec.head_dim, has_bias=spec.has_o_bias))


def load_attention(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> Handle:
    """The layer's attention handle, with q_norm and k_norm where the spec has them."""
    attention = spec.attention[layer]
    if attention.qk_norm is QkNorm.NONE:
        return loader.attention(attention, q_norm=None, k_norm=None)
    is_full = attention.qk_norm is QkNorm.FULL
    q_width = attention.head_dim * (attention.n_heads if is_full else 1)
    k_width = attention.head_dim * (attention.n_kv_heads if is_full else 1)
    return loader.attention(
        attention,
        q_norm=source.tensor(f"{prefix}q_norm.weight", q_width),
        k_norm=source.tensor(f"{prefix}k_norm.weight", k_width),
        norm_offset=spec.norm_offset,
    )


def load_mlp(source: Source, loader: Loader, spec: DecoderSpec, prefix: str) -> tuple[Handle, Handle]:
    """(gate_up, down) of gate_proj, up_proj, down_proj."""
    gate_up = [(f"{prefix}gate_proj", spec.ffn), (f"{prefix}up_proj", spec.ffn)]
    down = [(f"{prefix}down_proj", spec.hidden)]
    return (
        loader.gated(linear_parts(source, gate_up, spec.hidden, has_bias=spec.has_mlp_bias), spec.activation),
        loader.linear(linear_parts(source, down, spec.ffn, has_bias=spec.has_mlp_bias)),
    )


def load_experts(
    source: Source, loader: Loader, spec: DecoderSpec, prefix: str, *, names: tuple[str, str, str]
) -> Handle:
    """A router and its experts, one tensor per expert and projection, or all experts stacked in one tensor each.

    names: gate, up and down as the separate tensors are called.
    """
    mixture = spec.experts
    assert mixture is not None
    n, ffn, hidden = mixture.n_experts, mixture.ffn, spec.hidden
    router = source.tensor(f"{prefix}gate.weight", n, hidden)
    if source.has(f"{prefix}experts.gate_up_proj"):
        gate_up = source.tensor(f"{prefix}experts.gate_up_proj", n, 2 * ffn, hidden)
        down = source.tensor(f"{prefix}experts.down_proj", n, hidden, ffn)
        experts = tuple(
            ExpertParts(
                gate_up=LinearParts(weights=(SlicedTensor(gate_up, e),)),
                down=LinearParts(weights=(SlicedTensor(down, e),)),
            )
            for e in range(n)
        )
        return loader.experts(mixture, router=router, experts=experts)
    gate_name, up_name, down_name = names
    experts = tuple(
        ExpertParts(
            gate_up=linear_parts(source, [(f"{root}.{gate_name}", ffn), (f"{root}.{up_name}", ffn)], hidden),
            down=linear_parts(source, [(f"{root}.{down_name}", hidden)], ffn),
        )
        for root in (f"{prefix}experts.{e}" for e in range(n))
    )
    return loader.experts(mixture, router=router, experts=experts)


def load_norm(source: Source, loader: Loader, spec: DecoderSpec, name: str) -> Handle:
    """A norm over the residual width."""
    return loader.vector(source.tensor(f"{name}.weight", spec.hidden), offset=spec.norm_offset)


def attend(ops: Ops, h: Handle, layer: LayerWeights) -> Handle:
    """From the normed input to the heads' outputs [T, H*d]."""
    qkv = ops.linear(h, layer.qkv)
    q = ops.rotate_and_cache(qkv, layer.attention)
    return ops.attention(q, layer.attention)
