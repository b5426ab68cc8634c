"""Gemma's families: 1 to 4 and 3n, and VaultGemma."""

from __future__ import annotations

from typing import Any

from diptych.models.families.family import Family, TensorNames
from diptych.models.families.shared import BESIDE_VISION, BY_ATTENTION_BIAS, USUAL
from diptych.models.spec import Norms, QkNorm

GEMMA = {**USUAL, "head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}
GEMMA_2 = {**GEMMA, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
           "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
           "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None}  # fmt: skip
GEMMA_4 = {**GEMMA, "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
           "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
           "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
           "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                                  "rope_theta": 1_000_000.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
           "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None, "global_head_dim": 512,
           "num_global_key_value_heads": None, "per_layer_config": None, "attention_k_eq_v": False,
           "num_kv_shared_layers": 0, "use_double_wide_mlp": False}  # fmt: skip
# beside pictures and sound, whose towers are left alone
GEMMA_TEXT: dict[str, Any] = {
    "prefixes": BESIDE_VISION["prefixes"],
    "ignored": (*BESIDE_VISION["ignored"], "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio."),
}
GEMMA_4_FIXED = {"use_bidirectional_attention": (None, False, "vision")}
GEMMA_4_LAYERS: dict[str, Any] = {
    "norms": Norms.AROUND, "has_scaled_embedding": True, "qk_norm": QkNorm.HEAD, "has_v_norm": True, "attention_scale": 1.0,
    "full_every": 6, "full_last": True, "has_full_heads": True, "scales_layers": True, "local_theta": "rope_local_base_freq",
    **GEMMA_TEXT, **BY_ATTENTION_BIAS}  # fmt: skip
CAUSAL = {"use_bidirectional_attention": (None, False)}

GEMMAS: tuple[Family, ...] = (
    # its configs say gelu and mean the form with tanh; what they say of hidden_activation beside it is not looked at
    Family(
        name="gemma", architectures=("GemmaForCausalLM",),
        keys={**GEMMA, "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192,
              "hidden_act": "gelu_pytorch_tanh"},
        fixed=CAUSAL,
        norm_offset=1.0, has_scaled_embedding=True,
        gelu_means_tanh=True,
        **BY_ATTENTION_BIAS,
    ),
    # norm weights are stored as w - 1; the old field hidden_act is not looked at where hidden_activation is there
    Family(
        name="gemma2", architectures=("Gemma2ForCausalLM",),
        keys={**GEMMA_2, "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
              "final_logit_softcapping": 30.0},
        fixed=CAUSAL,
        norms=Norms.AROUND,
        norm_offset=1.0, has_scaled_embedding=True,
        unread=("sliding_window_size",),  # published files repeat sliding_window so
        full_every=2,
        **BY_ATTENTION_BIAS,
    ),
    # Gemma 2 without norms behind attention and MLP
    Family(
        name="vaultgemma", architectures=("VaultGemmaForCausalLM",),
        keys={**GEMMA_2, "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
              "final_logit_softcapping": 30.0},
        norm_offset=1.0, has_scaled_embedding=True,
        full_every=2,
        names=TensorNames(norms={Norms.BEFORE: ("input_layernorm", None, "pre_feedforward_layernorm", None)}),
        **BY_ATTENTION_BIAS,
    ),
    # the text part; of Gemma3ForConditionalGeneration too, whose vision tensors are left alone
    Family(
        name="gemma3_text", architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        more_model_types=("gemma3",),
        keys={**GEMMA_2, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
              "sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0, "use_bidirectional_attention": None},
        renamed={"_sliding_window_pattern": "sliding_window_pattern"},
        fixed={"attn_logit_softcapping": (None,)},
        norms=Norms.AROUND,
        norm_offset=1.0, has_scaled_embedding=True,
        qk_norm=QkNorm.HEAD,
        local_theta="rope_local_base_freq",
        **BESIDE_VISION,
        **BY_ATTENTION_BIAS,
    ),
    # AltUp, LAuReL, embeddings for each layer; the last layers attend to others' keys and values; scores are not scaled,
    # whatever older configs say of query_pre_attn_scalar
    Family(
        name="gemma3n_text", architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        more_model_types=("gemma3n",),
        keys={**GEMMA, "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35,
              "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_activation": "gelu_pytorch_tanh",
              "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
              "sliding_window": 512, "layer_types": None, "final_logit_softcapping": 30.0,
              "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256, "altup_active_idx": 0,
              "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
              "activation_sparsity_pattern": None},
        fixed={"query_pre_attn_scalar": (None, 256)},
        norms=Norms.AROUND,
        has_scaled_embedding=True,
        qk_norm=QkNorm.HEAD, has_v_norm=True,
        attention_scale=1.0,
        full_every=5,
        local_theta="rope_local_base_freq",
        **GEMMA_TEXT,
        **BY_ATTENTION_BIAS,
    ),
    # layers that attend to everything have heads of their own width and number, turn a part of them, and may have keys for
    # values; embeddings for each layer in the small sizes, the last of which attend to others' keys and values
    Family(
        name="gemma4_text", architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        more_model_types=("gemma4",),
        keys={**GEMMA_4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "num_experts": None,
              "num_experts_per_tok": None, "moe_intermediate_size": None, "enable_moe_block": False},
        renamed={"top_k_experts": "num_experts_per_tok"},
        fixed=GEMMA_4_FIXED,
        mixes_apart=True, renormalises=True,
        names=TensorNames(mlp=("mlp.", ""), router="router.proj", shared="mlp"),
        **GEMMA_4_LAYERS,
    ),
    Family(
        name="gemma4_unified_text", architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        more_model_types=("gemma4_unified",),
        keys={**GEMMA_4, "max_position_embeddings": 262_144, "sliding_window": 1024},
        fixed=GEMMA_4_FIXED,
        **GEMMA_4_LAYERS,
    ),
)  # fmt: skip
