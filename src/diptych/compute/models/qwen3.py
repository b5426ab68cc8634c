"""Qwen3 (dense): Llama with each query and key head normed before the rotary embedding, and head_dim of its own."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models import llama
from diptych.compute.models.decoder import DecoderSpec, Family, common_spec, read_heads, read_rope, same_attention
from diptych.compute.models.hf_config import HfConfig
from diptych.compute.models.qwen2 import layer_windows
from diptych.compute.ops.contract import QkNorm

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Qwen3ForCausalLM."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    attention = same_attention(
        n_layers,
        heads,
        rope,
        windows=layer_windows(config, n_layers),
        qk_norm=QkNorm.HEAD,
        norm_eps=config.number("rms_norm_eps"),
    )
    has_attention_bias = config.flag("attention_bias", False)
    return replace(
        common_spec(config, heads, attention, architecture="Qwen3ForCausalLM", max_positions=max_positions),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
    )


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    spec=spec,
    layer_weights=llama.layer_weights,
    layer=llama.layer,
)
