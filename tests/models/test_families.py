"""The table of families against the configuration classes and models of transformers, with full and with empty configs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from diptych.compute.decoder_loader import load_decoder
from diptych.compute.weights import RandomSource
from diptych.cost.parameters import active_parameter_count, parameter_count
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families import BY_MODEL_TYPE, FAMILIES
from diptych.models.family import Family
from diptych.models.keys import HARMLESS, HARMLESS_ENDINGS
from diptych.models.read import read_model
from diptych.models.rope import ROPE_KEYS
from diptych.models.spec import ModelSpec

CLASSES = [
    family for family in FAMILIES if family.name in transformers.CONFIG_MAPPING
]  # of others stand republished.py
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 256, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, **EXPERTS,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
QWEN4 = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "hc_count": 3, "hc_lowrank": 8, "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24, "heads_per_ngram": 2, "ngram_vocab_size_base": 20, "split_ngram_parts": 2, "eos_token_id": 2,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_conv": 3, "mamba_expand": 2}
CONVOLUTIONS = ["conv", "full_attention"] * 2
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2}
# what a small config of the family has beside SMALL
MORE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, **EXPERTS, "decoder_sparse_step": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **EXPERTS},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
    },
    "cohere": {"use_qk_norm": True},
    "minicpm3": {key: value for key, value in LATENT.items() if "rank" in key or "head_dim" in key},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "gpt_oss": {"num_local_experts": 4},
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2, 2, 2]},
    "olmo": {"clip_qkv": 8.0},
    "deepseek_v2": {"n_shared_experts": 2, **LATENT},
    "deepseek_v3": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, **LATENT},
    "deepseek_v32": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, **LATENT},
    "glm_moe_dsa": {"n_shared_experts": 1, **LATENT},
    "mistral4": {"n_shared_experts": 1, **LATENT, "qk_nope_head_dim": 8, "head_dim": 16},
    "mistral_large4_text": {
        **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
        "head_dim": 8,
        "kv_source_layers": [0, 1, 0, 3],
        "indexer_types": ["full", "full", "full", "shared"],
    },
    "hy_v3": {"num_experts": 4, **EXPERTS},
    "cohere2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 80,
    },
    "longcat_flash": {
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        "head_dim": 8,
        "zero_expert_num": 2,
        "num_experts_per_tok": 3,
    },
    "kolibri1": {"num_experts": 4, "shared_expert_intermediate_size": 48, **EXPERTS},
    "axk1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, **LATENT},
    "axk2": {"n_shared_experts": 1, **LATENT},
    "hy_v4": {
        "hc_mult": 3,
        "indexer_types": ["full", "shared", "full", "shared"],
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    },
    "glm5_next_text": {
        **{key: value for key, value in LATENT.items() if key not in ("first_k_dense_replace", "qk_rope_head_dim")},
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "linear_num_heads": 3,
        "linear_head_dim": 20,
        "hc_mult": 3,
        "index_topk": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "o_groups": 2,
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 3,
    },
    "phimoe": {"num_local_experts": 4, "lm_head_bias": True},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS},
    "glm4v_moe_text": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS},
    "glm4v_text": {"head_dim": 16},  # of its hidden size, whatever the config says
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "intermediate_size": [96, 80, 96, 96],
        "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 250,
        "altup_num_inputs": 3,
    },
    "gemma4_text": {
        "num_hidden_layers": 5,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 250,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "internlm3": {"attention_bias": True, "mlp_bias": True},
    "solar_open": {"n_routed_experts": 4, **EXPERTS},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, **EXPERTS},
    "glm4_moe_lite": {"head_dim": 8} | {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
    "qwen3_next": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        "full_attention_interval": 2,
        "attention_bias": True,
        **DELTA,
        **EXPERTS,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **DELTA},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        **MAMBA,
    },
    "bamba": {"attn_layer_indices": [1, 3], **MAMBA},
    "jamba": {
        "num_experts": 4,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 20,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "recurrent_gemma": {"lru_width": 80, "conv1d_width": 3, "attention_window_size": 9, "attention_bias": True},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 10,
        "head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "hybrid", "hybrid"] * 2,
        "num_mem_blocks": 3,
        "n_mamba_heads": 8,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
        "adapter_rank": 10,
        "num_key_value_heads": 4,
        "use_shared_attention_adapter": True,
        "head_dim": 32,
    },
    "qwen3_vl_moe_text": {"num_experts": 4, "tie_word_embeddings": False, **EXPERTS},
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "kimi_linear": {
        **{key: value for key, value in LATENT.items() if "rank" in key or "head_dim" in key},
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 4,
        "linear_num_heads": 3,
        "linear_head_dim": 20,
        **EXPERTS,
    },
    "bailing_hybrid": {
        **{key: value for key, value in LATENT.items() if ("rank" in key and key[0] == "k") or "head_dim" in key},
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "moe",
            "full_attention",
            "mlp",
            "linear_attention",
            "linear_attention",
        ],
        "num_hidden_layers": 6,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 12,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 24,
        **EXPERTS,
    },
    "granite_swa": {"layer_rope_theta": [0, 1e4, 1e4, 1e4]},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "exaone_moe": {"num_experts": 4, "num_shared_experts": 2, **EXPERTS},
    "mellum": {"num_experts": 4, **WINDOWS, **EXPERTS},
    "flint": {"num_experts": 4, "shared_expert_intermediate_size": 48, **WINDOWS, **EXPERTS},
    "afmoe": {"num_experts": 4, "num_shared_experts": 1, **EXPERTS},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "conv_L_cache": 4},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        **WINDOWS,
        **EXPERTS,
    },
    "minimax_m3_vl_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_head_dim": 80,
    },
    "step3p5": {
        "n_routed_experts": 4,
        "share_expert_dim": 48,
        "num_sliding_attention_heads": 6,
        "sliding_window": 9,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        **WINDOWS,
        **EXPERTS,
    },
    "laguna": {
        "num_attention_heads_per_layer": [4, 6, 2, 8],
        "shared_expert_intermediate_size": 48,
        "num_experts": 4,
        "sliding_window": 9,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        **WINDOWS,
        **EXPERTS,
    },
    "cohere_compass_text": {"sliding_window": 9, "attention_bias": True, **WINDOWS},
    "aria_text": {"moe_num_experts": 4, "moe_num_shared_experts": 1, "attention_bias": True},
    "lfm2": {"layer_types": CONVOLUTIONS, "conv_L_cache": 4, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": CONVOLUTIONS, "num_experts": 4, "num_dense_layers": 1, **EXPERTS},
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention"] * 2, **DELTA},
    "qwen3_5_moe_text": {"num_experts": 4, "shared_expert_intermediate_size": 48, **DELTA, **EXPERTS},
    "qwen4_exp_text": {"num_experts": 4, "shared_expert_intermediate_size": 48, **DELTA, **EXPERTS, **QWEN4},
    "qwen3_omni_moe_text": {"num_experts": 4, **EXPERTS},
    "cosmos3_edge_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}},
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [32, 24],
        "moe_num_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 2, 4]},
    },
    "deepseek_ocr2_text": {
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        **EXPERTS,
    },
    "muse_spark_text": {
        "num_local_experts": 4,
        "moe_hidden_size": 48,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        **EXPERTS,
    },
    "youtu": {key: value for key, value in LATENT.items() if "rank" in key or "head_dim" in key},
}
ALONE = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256, "state_size": 12, "conv_kernel": 3}
OF_ENCODERS = {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
SMALL_GPT: dict[str, dict[str, Any]] = {
    "mamba": {**ALONE, "intermediate_size": 96},
    "falcon_mamba": {**ALONE, "time_step_rank": 20, "tie_word_embeddings": False},
    "mamba2": {**ALONE, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "vocab_size": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "opt": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "vocab_size": 256,
    },
    "gpt_bigcode": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256, "multi_query": False},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 256,
        "window_size": 9,
        "attention_types": [[["global", "local"], 2]],
    },
    "nanochat": {key: value for key, value in SMALL.items() if key != "head_dim"} | {"attention_bias": True},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256, "rotary_dim": 8},
    "codegen": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256, "rotary_dim": 8},
    "gpt_neox": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 256,
        "rotary_pct": 0.5,
    },
    "phi": {key: value for key, value in SMALL.items() if key != "head_dim"},
    "persimmon": {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")},
    "falcon": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "new_decoder_architecture": True,
        "num_kv_heads": 4,
        "bias": True,
    },
    "openai-gpt": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256},
    "biogpt": {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")},
    "xglm": {"d_model": 64, "num_layers": 4, "attention_heads": 4, "ffn_dim": 96, "vocab_size": 256},
    "gpt_neox_japanese": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256},
    "modernbert-decoder": {
        **{key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")},
        "local_attention": 18,
        "mlp_bias": True,
    },
    **dict.fromkeys(("bert", "nomic_bert"), OF_ENCODERS),
    **{
        name: {**OF_ENCODERS, "pad_token_id": 1, "type_vocab_size": 1}
        for name in ("roberta", "xlm-roberta", "camembert")
    },
    "electra": {**OF_ENCODERS, "embedding_size": 64},
    "distilbert": {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 96, "vocab_size": 256},
    "modernbert": {**OF_ENCODERS, "local_attention": 18, "mlp_bias": True},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1},
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 4, "vocab_size": 256},
}
KINDS = {kind: {"rope_type": "default", "rope_theta": theta}
         for kind, theta in (("full_attention", 1e4), ("sliding_attention", 1e3))}  # fmt: skip
# no default in the class, and one that gives a rotary dimension of 21
CLASS_NEEDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": [*["linear_attention"] * 31, "full_attention"]},
    "bamba": {"attn_layer_indices": [9]}, "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "kimi_linear": {"layer_types": ["linear_attention"] * 26 + ["full_attention"]},
    "mellum": {"layer_types": ["full_attention"] * 28}, "flint": {"layer_types": ["full_attention"] * 49},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 12},
    "cohere_compass_text": {"rope_parameters": KINDS},
    "qwen4_exp_text": {**{name: value for name, value in QWEN4.items() if name.startswith("indexer")}, "indexer_head_dim": 256},
    "dbrx": {"attn_config": {"rope_theta": 1e4}}, "electra": {"embedding_size": 256},
    "nemotron": {"num_key_value_heads": 48}, "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128}, "glm4v_moe_text": {"head_dim": 128}, "ministral": {"head_dim": 128},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "qwen3_omni_moe_text": {"head_dim": 128}, "hunyuan_vl_text": {"head_dim": 128},
    "deepseek_ocr2_text": {"num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 31},
}  # fmt: skip
# decoders of which transformers has no class with a head around them alone
TEXT_MODELS = {
    "step3p5": "Step3p7TextModel", "glm5_next_text": "Glm5NextTextModel", "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel", "glm_ocr_text": "GlmOcrTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel", "hunyuan_vl_text": "HunYuanVLTextModel",
    "granite_docling_text": "GraniteDoclingTextModel", "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "muse_glimmer_text": "MuseGlimmerTextModel", "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "molmo2_text": "Molmo2TextModel", "muse_spark_text": "MuseSparkTextModel", "mistral_large4_text": "MistralLarge4TextModel",
    "emu3_text_model": "Emu3TextModel", "cosmos3_edge_text": "Cosmos3EdgeTextModel",
}  # fmt: skip


def config_of(family: Family, **fields: Any) -> Any:
    config = transformers.AutoConfig.for_model(family.name, **{**CLASS_NEEDS.get(family.name, {}), **fields})
    if family.name.startswith(("gemma4", "step")):  # layers differ: what most of them have
        config.allow_global_per_layer_attribute_access = True
    return config


def read(family: Family, config: dict[str, Any]) -> ModelSpec:
    config = {key: value for key, value in config.items() if key != "architectures"}  # None where no file was written
    return read_model(HfConfig({"model_type": family.name, **CLASS_NEEDS.get(family.name, {}), **config}), name="it")


def small(family: Family) -> dict[str, Any]:
    return SMALL_GPT[family.name] if family.name in SMALL_GPT else {**SMALL, **MORE.get(family.name, {})}


def counted(config: Any) -> int:
    """Parameters of the model that transformers builds, with buffers: the router's correction bias, layers' scales."""
    with torch.device("meta"):
        text_model = TEXT_MODELS.get(config.model_type)
        if text_model or config.model_type.endswith(("vl_text", "vl_moe_text", "4v_text", "4v_moe_text")):
            # a head is around them
            made = getattr(transformers, text_model) if text_model else transformers.AutoModel.from_config
            model = made(config)
            if not getattr(config, "tie_word_embeddings", False):
                model.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        elif config.model_type == "mllama_text_model":
            model = transformers.MllamaForCausalLM(config)
            layers = model.model.layers  # those that attend to pictures are not run
            model.model.layers = torch.nn.ModuleList(
                one for i, one in enumerate(layers) if i not in config.cross_attention_layers
            )
        elif config.model_type == "phi4_multimodal":
            model = transformers.Phi4MultimodalForCausalLM(config)
            del model.model.embed_tokens_extend  # of pictures and sound
        elif BY_MODEL_TYPE[config.model_type].is_encoder:
            bare = {} if config.model_type in ("distilbert", "electra", "modernbert") else {"add_pooling_layer": False}
            model = transformers.AutoModel.from_config(config, **bare)
        elif config.model_type == "mistral4":  # on no list of those that write text
            model = transformers.Mistral4ForCausalLM(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = sum(
        b.numel()
        for name, b in model.named_buffers()
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar", "rotary_emb.alpha"))
    )
    # of experts without weights its class has gates all the same, which nobody reads
    unread = [
        getattr(config, "zero_expert_num", 0) * one.gate_up_proj[0].numel()
        for one in model.modules()
        if hasattr(one, "identity_expert")
    ]
    of_pictures = [
        one.numel()
        for name, one in model.named_parameters()
        if ".vision_moe." in name and not name.endswith("correction_bias")
    ]
    of_pictures.append(getattr(config, "additional_vocab_size", 0) * config.hidden_size)
    return sum(one.numel() for one in model.parameters()) + buffers - sum(unread) - sum(of_pictures)


class NothingLoader:
    """Takes every tensor and reads none."""

    is_balancing = False

    def numbers(self, tensor: Any) -> tuple[float, ...]:
        return (0.0,) * math.prod(tensor.shape)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def loaded(spec: ModelSpec) -> int:
    """Elements of the tensors that the engine's loader asks for."""
    source = RandomSource(0)
    load_decoder(source, NothingLoader(), spec)
    return source.n_parameters


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.name)
def test_an_empty_config_is_the_class_with_its_defaults(family: Family) -> None:
    """Files leave out what equals the class default. Seven of ten families were read otherwise by engine or planner:
    Gemma 2 had heads of 64 x 16 and no window in place of 256 x 4 and 4096, Qwen3-MoE no experts in place of 128.
    """
    assert read(family, {}) == read(family, config_of(family).to_dict())


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.name)
@pytest.mark.parametrize("fields", ["all left out", "small"])
def test_every_number_is_that_of_transformers(family: Family, fields: str) -> None:
    """Oracle: the config object of the same JSON, and the model built of it on the meta device."""
    given = {} if fields == "all left out" else small(family)
    config = config_of(family, **given)
    spec = read(family, given)
    assert parameter_count(spec) == counted(config)
    assert (spec.hidden, spec.vocab_size, spec.n_blocks) == (
        config.hidden_size, config.vocab_size, getattr(config, "num_layers", config.num_hidden_layers))  # fmt: skip
    assert spec.is_tied == getattr(config, "tie_word_embeddings", False)
    if spec.kv_layers:
        assert spec.n_heads == config.num_attention_heads
    if spec.kv_layers and spec.attention.mla is None:
        n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        is_multi_query = getattr(config, "multi_query", False) and not getattr(
            config, "new_decoder_architecture", False
        )
        assert spec.n_kv_heads == (1 if is_multi_query else n_kv_heads)
        assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    # a layer for each of a pair
    assert (*spec.windows, *(None for _ in spec.left_out)) == windows_of(config) * (2 if family.has_pairs else 1)
    if "rms_norm_eps" in family.keys and hasattr(config, "rms_norm_eps"):
        assert spec.norm_eps == (config.rms_norm_eps or config.layer_norm_eps)
    elif "rms_norm_eps" in {*family.keys} - {*family.renamed.values()}:  # the class has no such key
        assert family.fixed["rms_norm_eps"] == (spec.norm_eps,) == (1e-5,)
        with pytest.raises(LoadError, match=r"rms_norm_eps .* is 0\.001; of .*, only 1e-05"):
            read(family, {**given, "rms_norm_eps": 1e-3})
    if hasattr(config, "max_position_embeddings"):
        before = (family.positions_offset or 0) if family.counts_offset else 0
        assert spec.max_context_tokens == config.max_position_embeddings - before
    rope = getattr(config, "rope_parameters", None)
    if rope:
        for layer in spec.layers:
            kind = "sliding_attention" if layer.attention.window else "full_attention"
            if "compress" in rope:
                kind = "main" if layer.attention.entries is None else "compress"
            theirs, ours = rope.get(kind, rope), layer.attention.rope
            assert ours is None or (ours.theta, ours.kind) == (theirs["rope_theta"], theirs["rope_type"])


def windows_of(config: Any) -> tuple[int | None, ...]:
    if config.model_type == "gpt_neo":
        return tuple(None if kind == "global" else config.window_size for kind in config.attention_layers)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or None
    types = getattr(config, "layer_types", None)
    if config.model_type.startswith("zamba"):  # a layer with a block before its state is two
        return (window,) * (len(types) + types.count("hybrid"))
    if hasattr(config, "layers_block_type"):  # blocks, of which MLPs are a part of the layer before them
        types = [kind for kind in types if kind not in ("mlp", "moe")]
    if types is None:
        return (window,) * config.num_hidden_layers
    return tuple(None if kind in ("full_attention", "conv", "linear_attention") else window for kind in types)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe", "dots1"])
def test_windows_without_layer_types_are_where_the_class_has_them(name: str) -> None:
    """Qwen2-MoE's lie before max_window_layers, on every other layer; they were put behind it, on all."""
    family = BY_MODEL_TYPE[name]
    fields = {**small(family), "num_hidden_layers": 5, "sliding_window": 9, "max_window_layers": 3}
    fields |= {} if name == "dots1" else {"use_sliding_window": True}
    config = config_of(family, **fields)
    assert set(windows_of(config)) == {None, 9}
    assert read(family, fields).windows == windows_of(config)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("fields", ["all left out", "small"])
def test_the_count_is_what_the_loader_loads(family: Family, fields: str) -> None:
    """The planner's number of parameters and the tensors the engine asks for are one thing."""
    spec = read(family, {} if fields == "all left out" else small(family))
    assert parameter_count(spec) == loaded(spec)


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.name)
def test_every_field_of_the_class_is_read_fixed_or_harmless(family: Family) -> None:
    """A field that a new version of transformers adds, or that was forgotten here, must be decided about by someone."""
    config = transformers.AutoConfig.for_model(family.name, **CLASS_NEEDS.get(family.name, {}))
    fields = set(config.to_dict()) - set(transformers.PreTrainedConfig().to_dict())
    known = {"layer_types", *family.keys, *family.fixed, *family.unread, *family.renamed, *HARMLESS, *ROPE_KEYS}
    assert not sorted(name for name in fields - known if not name.endswith(HARMLESS_ENDINGS))


def test_a_token_meets_only_its_experts() -> None:
    """A mixture's token was priced with all its experts by the server's account of segments."""
    family = BY_MODEL_TYPE["qwen3_moe"]
    few = read(family, {**SMALL, "num_experts": 8, **EXPERTS})
    all_of_them = read(family, {**SMALL, "num_experts": 8, **EXPERTS, "num_experts_per_tok": 8})
    assert active_parameter_count(few) < 0.6 * active_parameter_count(all_of_them)
