"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 attention; mixtures on most layers, a dense MLP where the config asks for one."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models import llama, mixtral
from diptych.compute.models.decoder import (
    DecoderSpec,
    Family,
    LayerWeights,
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
from diptych.compute.ops.contract import Handle, Loader, Ops, QkNorm
from diptych.compute.weights import Source

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Qwen3MoeForCausalLM. The window, where it is switched on, holds for every layer."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    attention = same_attention(
        n_layers,
        heads,
        rope,
        windows=[window] * n_layers,
        qk_norm=QkNorm.HEAD,
        norm_eps=config.number("rms_norm_eps"),
    )
    common = common_spec(config, heads, attention, architecture="Qwen3MoeForCausalLM", max_positions=max_positions)
    n_experts = config.integer("num_local_experts", config.integer("num_experts"))
    experts = mixtral.read_experts(
        config, common, n_experts=n_experts, renormalises=config.flag("norm_topk_prob", False)
    )
    dense = config.integers("mlp_only_layers") or []
    step = config.integer("decoder_sparse_step")
    has_attention_bias = config.flag("attention_bias", False)
    return replace(
        common,
        experts=replace(experts, ffn=config.integer("moe_intermediate_size")),
        moe_layers=frozenset(i for i in range(n_layers) if i not in dense and (i + 1) % step == 0),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
    )


def layer_weights(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    """As Qwen3, with a router and its experts on the layers of spec.moe_layers."""
    if layer not in spec.moe_layers:
        return llama.layer_weights(source, loader, spec, layer, prefix)
    return LayerWeights(
        attention=load_attention(source, loader, spec, layer, f"{prefix}self_attn."),
        qkv=load_qkv(source, loader, spec, f"{prefix}self_attn."),
        o=load_o(source, loader, spec, f"{prefix}self_attn."),
        input_norm=load_norm(source, loader, spec, f"{prefix}input_layernorm"),
        pre_mlp_norm=load_norm(source, loader, spec, f"{prefix}post_attention_layernorm"),
        experts=load_experts(source, loader, spec, f"{prefix}mlp.", names=("gate_proj", "up_proj", "down_proj")),
    )


def layer(ops: Ops, x: Handle, spec: DecoderSpec, weights: LayerWeights) -> Handle:
    """Mixtral's layer where there are experts, Llama's where there are none."""
    if weights.experts is None:
        return llama.layer(ops, x, spec, weights)
    return mixtral.layer(ops, x, spec, weights)


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    spec=spec,
    layer_weights=layer_weights,
    layer=layer,
)
