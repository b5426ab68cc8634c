"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window on the later layers when switched on."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models import llama
from diptych.compute.models.decoder import DecoderSpec, Family, common_spec, read_heads, read_rope, same_attention
from diptych.compute.models.hf_config import HfConfig

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def layer_windows(config: HfConfig, n_layers: int) -> list[int | None]:
    """The window of each layer: by layer_types, else on layers from max_window_layers; none without use_sliding_window."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    if window is None:
        return [None] * n_layers
    types = config.layer_types(n_layers)
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    first = config.integer("max_window_layers", low=0)
    return [window if i >= first else None for i in range(n_layers)]


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Qwen2ForCausalLM."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    attention = same_attention(n_layers, heads, rope, windows=layer_windows(config, n_layers))
    return replace(
        common_spec(config, heads, attention, architecture="Qwen2ForCausalLM", max_positions=max_positions),
        has_qkv_bias=True,
    )


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    spec=spec,
    layer_weights=llama.layer_weights,
    layer=llama.layer,
)
