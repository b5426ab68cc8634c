"""Gemma 3, the text part: Gemma 2 with normed q and k heads, five windowed layers to one full, a rotary base for each.

Reads Gemma3ForCausalLM, and the language model inside Gemma3ForConditionalGeneration (images are out of scope; its vision
tensors are left alone).
"""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.models import gemma2
from diptych.compute.models.decoder import DecoderSpec, Family, common_spec, read_heads, read_rope
from diptych.compute.models.hf_config import HfConfig
from diptych.compute.ops.contract import AttentionSpec, QkNorm

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0


def spec(config: HfConfig, max_context_tokens: int | None) -> DecoderSpec:
    """Config fields of Gemma3TextConfig, from text_config where the model is multimodal."""
    if "text_config" in config.raw:
        config = config.section("text_config")
    config = config.merged(DEFAULTS)
    heads = read_heads(config)
    n_layers = config.integer("num_hidden_layers")
    types = config.layer_types(n_layers)
    if types is None:
        types = gemma2.alternating(n_layers, every=config.integer("sliding_window_pattern"))
    full_rope, max_positions = read_rope(config, heads, max_context_tokens, default_theta=GLOBAL_THETA)
    local_rope, _ = read_rope(
        local_config(config), heads, max_context_tokens, default_theta=LOCAL_THETA, layer_type="sliding_attention"
    )
    attention = tuple(
        AttentionSpec(
            layer=i,
            n_heads=heads.n_heads,
            n_kv_heads=heads.n_kv_heads,
            head_dim=heads.head_dim,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            window=config.optional_integer("sliding_window") if kind == "sliding_attention" else None,
            rope=local_rope if kind == "sliding_attention" else full_rope,
            qk_norm=QkNorm.HEAD,
            norm_eps=config.number("rms_norm_eps"),
        )
        for i, kind in enumerate(types)
    )
    has_attention_bias = config.flag("attention_bias", False)
    common = common_spec(config, heads, attention, architecture="Gemma3ForCausalLM", max_positions=max_positions)
    return replace(
        common,
        embed_scale=common.hidden**0.5,
        norm_offset=1.0,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        has_qkv_bias=has_attention_bias,
        has_o_bias=has_attention_bias,
    )


def local_config(config: HfConfig) -> HfConfig:
    """The config as the windowed layers see it: in the older layout they have their own base and no scaling."""
    if isinstance(config.section("rope_parameters").raw.get("sliding_attention"), dict):
        return config
    kept = {k: v for k, v in config.raw.items() if k not in ("rope_theta", "rope_scaling", "rope_parameters")}
    return HfConfig({**kept, "rope_theta": config.number("rope_local_base_freq", LOCAL_THETA)}, path=config.path)


FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec=spec,
    layer_weights=gemma2.layer_weights,
    layer=gemma2.layer,
    prefixes=("model.", "language_model.model.", "model.language_model."),
    ignored=("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector."),
)
