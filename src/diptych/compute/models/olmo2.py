"""OLMo 2: no norm before attention and MLP but one after each, and queries and keys normed over their whole width."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models.decoder import (
    DecoderSpec,
    Family,
    LayerWeights,
    attend,
    common_spec,
    load_attention,
    load_mlp,
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

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Olmo2ForCausalLM."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    attention = same_attention(
        config.integer("num_hidden_layers"),
        heads,
        rope,
        qk_norm=QkNorm.FULL,
        norm_eps=config.number("rms_norm_eps"),
    )
    has_attention_bias = config.flag("attention_bias", False)
    return replace(
        common_spec(config, heads, attention, architecture="Olmo2ForCausalLM", max_positions=max_positions),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
    )


def layer_weights(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    """Separate projections and two norms, both of outputs."""
    gate_up, down = load_mlp(source, loader, spec, f"{prefix}mlp.")
    return LayerWeights(
        attention=load_attention(source, loader, spec, layer, f"{prefix}self_attn."),
        qkv=load_qkv(source, loader, spec, f"{prefix}self_attn."),
        o=load_o(source, loader, spec, f"{prefix}self_attn."),
        post_attention_norm=load_norm(source, loader, spec, f"{prefix}post_attention_layernorm"),
        post_mlp_norm=load_norm(source, loader, spec, f"{prefix}post_feedforward_layernorm"),
        gate_up=gate_up,
        down=down,
    )


def layer(ops: Ops, x: Handle, spec: DecoderSpec, weights: LayerWeights) -> Handle:
    """x + norm(attention(x)), then + norm(mlp(x))."""
    y = ops.linear(attend(ops, x, weights), weights.o)
    x = ops.add(x, ops.rms_norm(y, weights.post_attention_norm, eps=spec.norm_eps))
    y = ops.linear(ops.linear_gate(x, weights.gate_up), weights.down)
    return ops.add(x, ops.rms_norm(y, weights.post_mlp_norm, eps=spec.norm_eps))


FAMILY = Family(name="olmo2", architectures=("Olmo2ForCausalLM",), spec=spec, layer_weights=layer_weights, layer=layer)
