"""SmolLM3: Llama without rotary positions on every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models import llama
from diptych.compute.models.decoder import DecoderSpec, Family, common_spec, read_heads, read_rope, same_attention
from diptych.compute.models.hf_config import HfConfig
from diptych.ground.errors import LoadError

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of SmolLM3ForCausalLM. Its no_rope_layers holds 1 for layers that do turn."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens, default_theta=2_000_000.0)
    n_layers = config.integer("num_hidden_layers")
    turns = config.integers("no_rope_layers")
    if turns is None:
        interval = config.integer("no_rope_layer_interval")
        turns = [int((i + 1) % interval != 0) for i in range(n_layers)]
    if len(turns) < n_layers:
        raise LoadError(f"no_rope_layers in {config.path} has {len(turns)} entries; the model has {n_layers} layers")
    attention = tuple(
        replace(layer, rope=rope if turns[layer.layer] else None)
        for layer in same_attention(n_layers, heads, rope, windows=layer_windows(config, turns, n_layers))
    )
    has_attention_bias = config.flag("attention_bias", False)
    return replace(
        common_spec(config, heads, attention, architecture="SmolLM3ForCausalLM", max_positions=max_positions),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
        has_mlp_bias=config.flag("mlp_bias", False),
    )


def layer_windows(config: HfConfig, turns: list[int], n_layers: int) -> list[int | None]:
    """The window of each layer: by layer_types, else on the layers that do not turn; none without use_sliding_window."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    types = config.layer_types(n_layers)
    if types is None:
        return [None if turns[i] else window for i in range(n_layers)]
    return [window if kind == "sliding_attention" else None for kind in types]


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    spec=spec,
    layer_weights=llama.layer_weights,
    layer=llama.layer,
)
