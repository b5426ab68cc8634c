"""Mistral 7B and its kin: Llama with a sliding window on every layer where the config names one."""

from __future__ import annotations

from diptych.compute.models import llama
from diptych.compute.models.decoder import DecoderSpec, Family, common_spec, read_heads, read_rope, same_attention
from diptych.compute.models.hf_config import HfConfig

DEFAULTS = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of MistralForCausalLM. sliding_window null: full attention (v0.2 on); absent: 4096."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    windows = [config.optional_integer("sliding_window")] * n_layers
    attention = same_attention(n_layers, heads, rope, windows=windows)
    return common_spec(config, heads, attention, architecture="MistralForCausalLM", max_positions=max_positions)


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    spec=spec,
    layer_weights=llama.layer_weights,
    layer=llama.layer,
)
