"""Phi-3, Phi-3.5, Phi-4: Llama with q, k, v in one tensor and gate, up in another; longrope; partial rotary positions."""

from __future__ import annotations

from diptych.compute.models import llama
from diptych.compute.models.decoder import (
    DecoderSpec,
    Family,
    LayerWeights,
    common_spec,
    linear_parts,
    load_attention,
    load_norm,
    load_o,
    read_heads,
    read_rope,
    same_attention,
)
from diptych.compute.models.hf_config import HfConfig
from diptych.compute.ops.contract import Loader
from diptych.compute.weights import Source

DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Phi3ForCausalLM. See `rope` for how longrope chooses between its two sets of factors."""
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    rope, max_positions = read_rope(config, heads, max_context_tokens)
    n_layers = config.integer("num_hidden_layers")
    windows = [config.optional_integer("sliding_window")] * n_layers
    attention = same_attention(n_layers, heads, rope, windows=windows)
    return common_spec(config, heads, attention, architecture="Phi3ForCausalLM", max_positions=max_positions)


def layer_weights(source: Source, loader: Loader, spec: DecoderSpec, layer: int, prefix: str) -> LayerWeights:
    """qkv_proj and gate_up_proj as the files have them: already stacked."""
    n_qkv = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    gate_up = linear_parts(source, [(f"{prefix}mlp.gate_up_proj", 2 * spec.ffn)], spec.hidden)
    return LayerWeights(
        input_norm=load_norm(source, loader, spec, f"{prefix}input_layernorm"),
        attention=load_attention(source, loader, spec, layer, f"{prefix}self_attn."),
        qkv=loader.linear(linear_parts(source, [(f"{prefix}self_attn.qkv_proj", n_qkv)], spec.hidden)),
        o=load_o(source, loader, spec, f"{prefix}self_attn."),
        pre_mlp_norm=load_norm(source, loader, spec, f"{prefix}post_attention_layernorm"),
        gate_up=loader.gated(gate_up, spec.activation),
        down=loader.linear(linear_parts(source, [(f"{prefix}mlp.down_proj", spec.hidden)], spec.ffn)),
    )


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    spec=spec,
    layer_weights=layer_weights,
    layer=llama.layer,
)
