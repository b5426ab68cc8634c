"""Families whose decoders are published beside parts for pictures or sound alone: their text is read."""

from __future__ import annotations

from typing import Any

from diptych.models.families.dense import GLM4_NAMES
from diptych.models.families.family import Family, TensorNames
from diptych.models.families.shared import (
    BY_ATTENTION_BIAS,
    BY_USE_BIAS,
    GRANITE,
    LOCAL_EXPERTS,
    QWEN,
    QWEN_WINDOWS,
    USUAL,
)
from diptych.models.mlp import Scores
from diptych.models.spec import Norms, QkNorm

IN_PIPELINES: dict[str, Any] = {"qkv": ("to_q", "to_k", "to_v"), "o": "to_out"}
# what draws and acts lies in the same layers
BESIDE_DRAWING: dict[str, Any] = {
    "prefixes": ("", "model.language_model."),
    "ignored": ("rotary_emb.inv_freq", "_moe_gen.", ".add_", "to_add_out.", "norm_added_", "k_norm_und_for_gen", "action_",
                "time_embedder.", "proj_in.", "proj_out.", "blocks.", "patch_embed.", "pos_embed.", "deepstack_merger_list."),
}  # fmt: skip

WRAPPED: tuple[Family, ...] = (
    # the thinker of Qwen2.5-Omni and Qwen3-Omni, in its own files and in those of the whole model
    Family(
        name="qwen2_5_omni_text", more_model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
        architectures=("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration",
                       "Qwen2_5OmniModel"),
        keys={**QWEN, **QWEN_WINDOWS, "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
              "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "sliding_window": 32_768,
              "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
        qkv_bias=True,
    ),
    Family(
        name="qwen3_omni_moe_text", more_model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        architectures=("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        keys={**USUAL, "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18_944, "num_hidden_layers": 28,
              "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
              "rope_theta": 1_000_000.0, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
              "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": True},
        fixed={"sliding_window": (None,), "use_qk_norm": (True,), "use_sliding_window": (False,),
               "shared_expert_intermediate_size": (0,)},
        qk_norm=QkNorm.HEAD,
        **BY_ATTENTION_BIAS,
    ),
    # GLM-OCR: GLM-4.1V without biases
    Family(
        name="glm_ocr_text", architectures=("GlmOcrForConditionalGeneration",), more_model_types=("glm_ocr",),
        keys={**USUAL, "vocab_size": 59_392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
              "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
              "partial_rotary_factor": 1.0},
        fixed={"attention_bias": (None, False)},
        norms=Norms.AROUND,
        is_interleaved=True,
        names=GLM4_NAMES,
    ),
    # PaddleOCR-VL: an ERNIE 4.5 by its config, whose heads turn by halves
    Family(
        name="paddleocr_vl_text", architectures=("PaddleOCRVLForConditionalGeneration",), more_model_types=("paddleocr_vl",),
        keys={**USUAL, "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
              "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0, "use_bias": False},
        prefixes=("model.", "model.language_model."),
        ignored=("rotary_emb.inv_freq", "visual.", "mlp_AR.", "projector."),  # of its first files, whose config is flat
        **BY_USE_BIAS,
    ),
    # HunyuanOCR: HunYuan's dense models, a part of whose turns is of pictures
    Family(
        name="hunyuan_vl_text", architectures=("HunYuanVLForConditionalGeneration",), more_model_types=("hunyuan_vl",),
        keys={**USUAL, "vocab_size": 290_943, "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": True},
        fixed={"use_qk_norm": (True, None), "use_cla": (False, None), "mlp_bias": (False, None),
               **dict.fromkeys(("num_experts", "num_shared_expert", "moe_topk"), (1, 0, None))},
        unread=("attention_head_dim", "org_vocab_size"),
        qk_norm=QkNorm.TURNED,
        names=TensorNames(q_norm="query_layernorm", k_norm="key_layernorm"),
        ignored=("rotary_emb.inv_freq", "vit."),
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="granite_docling_text", architectures=("GraniteDoclingForConditionalGeneration",),
        more_model_types=("granite_docling",),
        keys={**USUAL, **GRANITE, "vocab_size": 133_800, "hidden_size": 1024, "intermediate_size": 2048,
              "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4,
              "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "mlp_bias": False,
              "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263,
              "attention_multiplier": 0.015625},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    # ERNIE 4.5 VL: experts of text beside those of pictures
    Family(
        name="ernie4_5_vl_moe_text", architectures=("Ernie4_5_VLMoeForConditionalGeneration",),
        more_model_types=("ernie4_5_vl_moe",),
        keys={**USUAL, "vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28,
              "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0, "use_bias": False,
              "moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64, "n_shared_experts": 2,
              "mlp_layer_types": None, "first_k_dense_replace": 1},
        fixed={"moe_norm_min": (1e-12,)},
        renamed={"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts",
                 "moe_num_shared_experts": "n_shared_experts"},
        is_interleaved=True,
        renormalises=True,
        has_choice_bias=True, has_other_experts=True,
        names=TensorNames(transposes_router=True, choice_bias="moe_statics.e_score_correction_bias", choice_axes=(2,)),
        ignored=("rotary_emb.inv_freq", ".gate.weight_1", "resampler_model."),
        **BY_USE_BIAS,
    ),
    # DeepSeek-OCR 2: heads as a Llama's, experts as DeepSeek V2's
    Family(
        name="deepseek_ocr2_text", architectures=("DeepseekOcr2ForConditionalGeneration",), more_model_types=("deepseek_ocr2",),
        keys={**USUAL, "vocab_size": 102_400, "hidden_size": 4096, "attention_bias": False, "mlp_layer_types": None,
              "first_k_dense_replace": 0, "moe_intermediate_size": 1407, "num_experts": 64, "n_shared_experts": 2,
              "num_experts_per_tok": None, "n_group": None, "topk_group": None, "routed_scaling_factor": 1.0,
              "topk_method": "greedy"},
        fixed={"mlp_bias": (False,), "norm_topk_prob": (False, None), "scoring_func": ("softmax",)},
        renamed={"n_routed_experts": "num_experts"},
        renormalises=False,
        ignored=("rotary_emb.inv_freq", "view_separator", "view_seperator", "sam_model.", "qwen2_model."),
        **BY_ATTENTION_BIAS,
    ),
    # Emu3, whose pictures are tokens of its vocabulary
    Family(
        name="emu3_text_model", architectures=("Emu3ForCausalLM", "Emu3ForConditionalGeneration"), more_model_types=("emu3",),
        keys={**USUAL, "vocab_size": 184_622, "intermediate_size": 14_336, "num_key_value_heads": 8,
              "max_position_embeddings": 9216, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
              "rope_theta": 1_000_000.0},
        mlp_bias="mlp_bias",
        prefixes=("model.", "model.text_model.", "text_model.model."),
        **BY_ATTENTION_BIAS,
    ),
    # Cosmos 3: what writes of a model that draws and acts, by the names of its pipeline
    Family(
        name="cosmos3_omni_text", architectures=("Cosmos3OmniForConditionalGeneration",), more_model_types=("cosmos3_omni",),
        keys={**USUAL, "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "head_dim": 128,
              "max_position_embeddings": 128_000, "rope_theta": 500_000.0, "attention_bias": False},
        qk_norm=QkNorm.HEAD,
        names=TensorNames(q_norm="norm_q", k_norm="norm_k", **IN_PIPELINES),
        **BESIDE_DRAWING, **BY_ATTENTION_BIAS,
    ),
    Family(
        name="cosmos3_edge_text", architectures=("Cosmos3EdgeForConditionalGeneration",), more_model_types=("cosmos3_edge",),
        keys={**USUAL, "vocab_size": 131_072, "hidden_size": 2048, "intermediate_size": 9216, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "relu2",
              "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 100_000_000.0,
              "attention_bias": False, "mlp_bias": False},
        is_gated=False, mlp_bias="mlp_bias",
        names=TensorNames(gate_up=("up_proj",), **IN_PIPELINES),
        **BESIDE_DRAWING, **BY_ATTENTION_BIAS,
    ),
    # Molmo 2 around Qwen3 or OLMo 3: its makers' names, and tokens of pictures in a table of their own
    Family(
        name="molmo2_text", architectures=("Molmo2ForConditionalGeneration",), more_model_types=("molmo2",),
        keys={**USUAL, "vocab_size": 151_936, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_key_value_heads": 8,
              "head_dim": 128, "max_position_embeddings": 36_864, "attention_bias": False, "rope_scaling_layers": None,
              "qk_norm_type": "qwen3", "norm_after": False},
        fixed={"qk_norm_type": ("qwen3", "olmo")},
        unread=("additional_vocab_size",),
        renamed={"qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"},
        parallel_key="norm_after", parallel_norms=Norms.AFTER,
        qk_norm=QkNorm.HEAD,
        qkv_bias="attention_bias",
        names=TensorNames(embedding="wte.embedding", embedding_ending="", layers="blocks", final_norm="ln_f",
                          qkv=("att_proj",), o="attn_out", gate_up=("ff_proj",), up_first=True, down="ff_out",
                          norms={Norms.BEFORE: ("attn_norm", None, "ff_norm", None),
                                 Norms.AFTER: (None, "attn_norm", None, "ff_norm")}),
        prefixes=("model.transformer.", "transformer."),
        ignored=("rotary_emb.inv_freq", "wte.new_embedding", "vision_backbone."),
    ),
    # Muse Glimmer: the embedding and heads are normed without weights, layers that attend to everything know no positions;
    # norms of what layers add have an eps of their own, and that behind the last layer a weight as it is
    Family(
        name="muse_glimmer_text", architectures=("MuseGlimmerForConditionalGeneration",), more_model_types=("muse_glimmer",),
        keys={**{key: value for key, value in USUAL.items() if key != "hidden_act"}, "vocab_size": 202_048,
              "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52, "num_key_value_heads": 2,
              "head_dim": 128, "hidden_activation": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
              "sliding_window": 2048, "layer_types": None, "no_rope_layers": None, "attention_bias": False,
              "final_logit_softcapping": 20.0, "key_multiplier": 3.87, "logit_scale": 0.19611613513818404,
              "post_norm_eps": 1e-8},
        unread=("layer_rope_theta",),  # what is read of it: `with_turns`
        renamed={"qk_scale_factor": "key_multiplier", "output_multiplier": "logit_scale"},
        norms=Norms.AROUND,
        norm_offset=1.0, final_norm_offset=0.0,
        has_embedding_norm=True, has_embedding_norm_weight=False,
        qk_norm=QkNorm.UNIT, norms_unturned=True,
        has_attention_gate=True,
        names=TensorNames(gate="gate_proj"),
        ignored=("rotary_emb.inv_freq", "vision_adapter."),
        **BY_ATTENTION_BIAS,
    ),
    # Muse Spark: beside that sums are weighed by channel, what heads and experts give is normed, experts are of latents
    Family(
        name="muse_spark_text", architectures=("MuseSparkForConditionalGeneration",), more_model_types=("muse_spark",),
        keys={**USUAL, "vocab_size": 202_048, "hidden_size": 8192, "intermediate_size": 16_384, "num_hidden_layers": 62,
              "num_attention_heads": 128, "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 1_048_576,
              "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 2048, "layer_types": None,
              "no_rope_layers": None, "attention_bias": False, "final_logit_softcapping": 20.0,
              "key_multiplier": 5.4730064863875, "logit_scale": 0.1767766952966369, "post_norm_eps": 1e-8,
              "moe_intermediate_size": 4096, "num_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 1.0,
              "moe_latent_size": 4096, "mlp_layer_types": None, "residual_gate_temperature": 0.3},
        unread=("layer_rope_theta",),
        renamed={"qk_scale_factor": "key_multiplier", "output_multiplier": "logit_scale", "moe_hidden_size": "moe_latent_size",
                 **LOCAL_EXPERTS},
        norms=Norms.AROUND,
        norm_offset=1.0, final_norm_offset=0.0,
        has_embedding_norm=True, has_embedding_norm_weight=False,
        qk_norm=QkNorm.UNIT, norms_unturned=True,
        has_attention_gate=True, norms_given=True, norms_experts=True,
        scores=Scores.SIGMOID, renormalises=True, has_choice_bias=True,
        names=TensorNames(gate="gate_proj", latent=("pre_expert_proj", "post_expert_proj"),
                          norms={Norms.AROUND: ("input_layernorm", None, "pre_feedforward_layernorm", None)}),
        ignored=("rotary_emb.inv_freq", "vision_adapter."),
        **BY_ATTENTION_BIAS,
    ),
)  # fmt: skip
