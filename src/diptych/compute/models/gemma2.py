"""Gemma 2: norms before and after both halves of a layer, soft caps, windows on every other layer, scaled embeddings.

Norm weights are stored as w - 1; the output projection is the embedding.
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

DEFAULTS = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Gemma2ForCausalLM. The old field hidden_act is not looked at: the models never used it."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    types = config.layer_types(n_layers) or alternating(n_layers, every=2)
    window = config.optional_integer("sliding_window")
    windows = [window if kind == "sliding_attention" else None for kind in types]
    scale = config.number("query_pre_attn_scalar") ** -0.5
    softcap = config.optional_number("attn_logit_softcapping")
    attention = tuple(
        replace(layer, scale=scale, softcap=softcap) for layer in same_attention(n_layers, heads, rope, windows=windows)
    )
    has_attention_bias = config.flag("attention_bias", False)
    common = common_spec(config, heads, attention, architecture="Gemma2ForCausalLM", max_positions=max_positions)
    return replace(
        common,
        embed_scale=common.hidden**0.5,
        norm_offset=1.0,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
    )


def alternating(n_layers: int, *, every: int) -> list[str]:
    """Sliding layers with a full one at every `every`-th place."""
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(n_layers)]


def layer_weights(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    """Separate projections and four norms."""
    gate_up, down = load_mlp(source, loader, spec, f"{prefix}mlp.")
    return LayerWeights(
        attention=load_attention(source, loader, spec, layer, f"{prefix}self_attn."),
        qkv=load_qkv(source, loader, spec, f"{prefix}self_attn."),
        o=load_o(source, loader, spec, f"{prefix}self_attn."),
        input_norm=load_norm(source, loader, spec, f"{prefix}input_layernorm"),
        post_attention_norm=load_norm(source, loader, spec, f"{prefix}post_attention_layernorm"),
        pre_mlp_norm=load_norm(source, loader, spec, f"{prefix}pre_feedforward_layernorm"),
        post_mlp_norm=load_norm(source, loader, spec, f"{prefix}post_feedforward_layernorm"),
        gate_up=gate_up,
        down=down,
    )


def layer(ops: Ops, x: Handle, spec: DecoderSpec, weights: LayerWeights) -> Handle:
    """x + norm(attention(norm(x))), then + norm(mlp(norm(x)))."""
    h = ops.rms_norm(x, weights.input_norm, eps=spec.norm_eps)
    y = ops.linear(attend(ops, h, weights), weights.o)
    x = ops.add(x, ops.rms_norm(y, weights.post_attention_norm, eps=spec.norm_eps))
    h = ops.rms_norm(x, weights.pre_mlp_norm, eps=spec.norm_eps)
    y = ops.linear(ops.linear_gate(h, weights.gate_up), weights.down)
    return ops.add(x, ops.rms_norm(y, weights.post_mlp_norm, eps=spec.norm_eps))


FAMILY = Family(
    name="gemma2", architectures=("Gemma2ForCausalLM",), spec=spec, layer_weights=layer_weights, layer=layer
)
