"""Mixtral: Mistral whose MLP is a mixture of experts, the best two of eight, their weights renormalised."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models.decoder import (
    DecoderSpec,
    Family,
    LayerWeights,
    attend,
    common_spec,
    load_attention,
    load_experts,
    load_norm,
    load_o,
    load_qkv,
    read_heads,
    read_rope,
    same_attention,
)
from diptych.compute.models.hf_config import HfConfig
from diptych.compute.ops.contract import ExpertsSpec, Handle, Loader, Ops
from diptych.compute.weights import Source

DEFAULTS = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of MixtralForCausalLM."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    windows = [config.optional_integer("sliding_window")] * n_layers
    attention = same_attention(n_layers, heads, rope, windows=windows)
    common = common_spec(config, heads, attention, architecture="MixtralForCausalLM", max_positions=max_positions)
    experts = read_experts(config, common, n_experts=config.integer("num_local_experts"), renormalises=True)
    return replace(common, experts=experts, moe_layers=frozenset(range(n_layers)))


def read_experts(config: HfConfig, spec: DecoderSpec, *, n_experts: int, renormalises: bool) -> ExpertsSpec:
    """The mixture; LoadError when more experts are chosen than there are."""
    chosen = config.integer("num_experts_per_tok")
    config.at_most("num_experts_per_tok", chosen, n_experts)
    return ExpertsSpec(
        n_experts=n_experts,
        experts_per_token=chosen,
        ffn=spec.ffn,
        renormalises=renormalises,
        activation=spec.activation,
    )


def layer_weights(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    """Separate projections, two norms, a router and its experts (w1 gate, w3 up, w2 down)."""
    root = f"{prefix}block_sparse_moe." if source.has(f"{prefix}block_sparse_moe.gate.weight") else f"{prefix}mlp."
    return LayerWeights(
        attention=load_attention(source, loader, spec, layer, f"{prefix}self_attn."),
        qkv=load_qkv(source, loader, spec, f"{prefix}self_attn."),
        o=load_o(source, loader, spec, f"{prefix}self_attn."),
        input_norm=load_norm(source, loader, spec, f"{prefix}input_layernorm"),
        pre_mlp_norm=load_norm(source, loader, spec, f"{prefix}post_attention_layernorm"),
        experts=load_experts(source, loader, spec, root, names=("w1", "w3", "w2")),
    )


def layer(ops: Ops, x: Handle, spec: DecoderSpec, weights: LayerWeights) -> Handle:
    """x + attention(norm(x)), then + experts(norm(x))."""
    h = ops.rms_norm(x, weights.input_norm, eps=spec.norm_eps)
    x = ops.linear_add(attend(ops, h, weights), weights.o, x)
    h = ops.rms_norm(x, weights.pre_mlp_norm, eps=spec.norm_eps)
    return ops.experts_add(h, weights.experts, x)


FAMILY = Family(
    name="mixtral", architectures=("MixtralForCausalLM",), spec=spec, layer_weights=layer_weights, layer=layer
)
