"""Llama 2, 3, 3.1, 3.2 and everything that copies them (SmolLM2, TinyLlama, the bundled model).

Pre-norm, rotary positions (default, linear, dynamic, llama3, yarn), gated SiLU; optional attention and MLP biases.
"""

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
from diptych.compute.ops.contract import Handle, Loader, Ops
from diptych.compute.weights import Source

# of the configuration class in transformers: files leave out what equals them
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of LlamaForCausalLM, with that class's defaults."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    attention = same_attention(config.integer("num_hidden_layers"), heads, rope)
    has_attention_bias = config.flag("attention_bias", False)
    return replace(
        common_spec(config, heads, attention, architecture="LlamaForCausalLM", max_positions=max_positions),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
        has_mlp_bias=config.flag("mlp_bias", False),
    )


def layer_weights(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    """The separate projections of q, k, v, o, gate, up and down, and two norms."""
    gate_up, down = load_mlp(source, loader, spec, f"{prefix}mlp.")
    return LayerWeights(
        attention=load_attention(source, loader, spec, layer, f"{prefix}self_attn."),
        qkv=load_qkv(source, loader, spec, f"{prefix}self_attn."),
        o=load_o(source, loader, spec, f"{prefix}self_attn."),
        input_norm=load_norm(source, loader, spec, f"{prefix}input_layernorm"),
        pre_mlp_norm=load_norm(source, loader, spec, f"{prefix}post_attention_layernorm"),
        gate_up=gate_up,
        down=down,
    )


def layer(ops: Ops, x: Handle, spec: DecoderSpec, weights: LayerWeights) -> Handle:
    """x + attention(norm(x)), then + mlp(norm(x))."""
    h = ops.rms_norm(x, weights.input_norm, eps=spec.norm_eps)
    x = ops.linear_add(attend(ops, h, weights), weights.o, x)
    h = ops.rms_norm(x, weights.pre_mlp_norm, eps=spec.norm_eps)
    return ops.linear_add(ops.linear_gate(h, weights.gate_up), weights.down, x)


FAMILY = Family(name="llama", architectures=("LlamaForCausalLM",), spec=spec, layer_weights=layer_weights, layer=layer)
