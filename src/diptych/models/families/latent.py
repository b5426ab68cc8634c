"""Families with latent attention (MLA), with experts by groups beside shared ones, or without."""

from __future__ import annotations

from typing import Any

from diptych.models.families.family import Family, TensorNames
from diptych.models.families.shared import BESIDE_VISION, CHOSEN_BY_SIGMOID, LOCAL_EXPERTS, SARVAM, USUAL
from diptych.models.mlp import Scores
from diptych.models.spec import Norms

LATENT = {**USUAL, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "attention_bias": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}  # fmt: skip
DEEPSEEK_V3 = {**LATENT, "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
               "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
               "num_key_value_heads": 128, "num_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
               "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
               "norm_topk_prob": True}  # fmt: skip
DEEPSEEK_V32 = {**DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
                "indexer_rope_interleave": False, "mlp_layer_types": None}  # fmt: skip
LIKE_DEEPSEEK_V32: dict[str, Any] = {
    "is_interleaved": True, "o_bias": "attention_bias", "unread": ("index_share_for_mtp_iteration",),
    "fixed": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "rope_interleave": (True,),
              "mlp_bias": (False,)}}  # fmt: skip
LIKE_DEEPSEEK: dict[str, Any] = {"is_interleaved": "rope_interleave", "o_bias": "attention_bias"}

HY_V4 = {**{key: value for key, value in LATENT.items() if key != "num_key_value_heads"}, "vocab_size": 120_832,
         "hidden_size": 2816, "intermediate_size": 6912, "moe_intermediate_size": 768, "num_hidden_layers": 34,
         "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "qk_nope_head_dim": 192, "v_head_dim": 256,
         "num_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.827, "num_experts_per_tok": 8,
         "norm_topk_prob": True, "mlp_layer_types": None, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
         "indexer_types": None, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6, "swiglu_limit": 10.0}  # fmt: skip
HY_V4_LAYERS: dict[str, Any] = {
    "unread": ("num_key_value_heads", "learnable_sink_init"),
    "o_bias": "attention_bias", "has_sinks": True, "has_attention_gate": True, "index_turns_last": True,
    "names": TensorNames(gate="gate_proj", others={"gate_proj": "linear_gate", "sinks": "learnable_sink_param"}),
    "ignored": ("rotary_emb.inv_freq", "mtp_layers.")}  # fmt: skip

LATENT_ATTENTION: tuple[Family, ...] = (
    Family(
        name="deepseek_v2", architectures=("DeepseekV2ForCausalLM",),
        keys={**LATENT, "vocab_size": 102_400, "moe_intermediate_size": 1407, "num_experts": 64, "n_shared_experts": 2,
              "num_experts_per_tok": None, "first_k_dense_replace": 0, "topk_method": "greedy"},
        fixed={"scoring_func": ("softmax",), "mlp_bias": (False,), "norm_topk_prob": (False, None)},
        renamed={"n_routed_experts": "num_experts"},
        is_interleaved=True,
        o_bias="attention_bias",
    ),
    Family(
        name="deepseek_v3", architectures=("DeepseekV3ForCausalLM",),
        more_model_types=("kimi_k2",),
        keys={**DEEPSEEK_V3, "max_position_embeddings": 4096, "rope_interleave": True},
        fixed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        **LIKE_DEEPSEEK,
        **CHOSEN_BY_SIGMOID,
    ),
    # Sarvam 105B: a DeepSeek V3 whose queries are projected at once
    Family(
        name="sarvam_mla", architectures=("SarvamMLAForCausalLM",), built_as="DeepseekV3ForCausalLM",
        keys={key: value for key, value in DEEPSEEK_V3.items() if key != "head_dim"}
        | {"vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
           "num_attention_heads": 64, "num_key_value_heads": None, "num_experts": 128, "q_lora_rank": None, "n_group": 1,
           "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 4096, "rope_interleave": True,
           "shared_expert_intermediate_size": None},
        unread=("head_dim", "q_head_dim"),  # which follow; the first is that of a cache in published files
        **LIKE_DEEPSEEK,
        **SARVAM,
    ),
    # A.X K1: its mixtures, and no dense MLP, are normed behind, too
    Family(
        name="axk1", architectures=("AXK1ForCausalLM",),
        keys={**DEEPSEEK_V3, "vocab_size": 163_840, "num_attention_heads": 64, "num_key_value_heads": 64, "num_experts": 192,
              "first_k_dense_replace": 1, "mlp_layer_types": None, "max_position_embeddings": 32_768,
              "rope_interleave": True},
        fixed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
        mixture_norms=Norms.AROUND_MLP,
        names=TensorNames(choice_bias_may_lack=True),
        ignored=("rotary_emb.inv_freq", ".post_mlp_layernorm."),  # of dense layers, too, in published files
        **LIKE_DEEPSEEK,
        **CHOSEN_BY_SIGMOID,
    ),
    # DeepSeek V3.2, GLM-5 to 5.2: an index chooses which tokens are attended to; layers of GLM-5.2 share a choice
    Family(
        name="deepseek_v32", architectures=("DeepseekV32ForCausalLM",),
        keys={**DEEPSEEK_V32, "max_position_embeddings": 163_840},
        **LIKE_DEEPSEEK_V32,
        **CHOSEN_BY_SIGMOID,
    ),
    Family(
        name="glm_moe_dsa", architectures=("GlmMoeDsaForCausalLM",),
        keys={**DEEPSEEK_V32, "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288,
              "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
              "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
              "index_n_heads": 32, "max_position_embeddings": 202_752, "indexer_types": None, "index_topk_pattern": None,
              "index_topk_freq": 1, "index_skip_topk_offset": 2, "indexer_rope_interleave": True},
        ignored=("rotary_emb.inv_freq", ".indexer."),  # of layers that take another's choice
        **LIKE_DEEPSEEK_V32,
        **CHOSEN_BY_SIGMOID,
    ),
    # A.X K2: norms before attention and before mixtures are gated, and so are heads, by what queries are made of
    Family(
        name="axk2", architectures=("AXK2ForCausalLM",),
        keys={**LATENT, "vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
              "num_hidden_layers": 48, "num_key_value_heads": 32, "kv_lora_rank": 128, "q_lora_rank": 384,
              "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "num_experts": 128, "n_shared_experts": 1,
              "routed_scaling_factor": 2.5, "n_group": None, "topk_group": None, "num_experts_per_tok": 8,
              "first_k_dense_replace": 1, "mlp_layer_types": None, "norm_topk_prob": True,
              "max_position_embeddings": 131_072, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
              "indexer_rope_interleave": False, "gated_norm_rank": 16},
        fixed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "rope_interleave": (True,), "moe_layer_freq": (1,),
               "indexer_rope_interleave": (False,)},
        is_interleaved=True, o_bias="attention_bias", has_attention_gate=True, mixes_queries=True,
        names=TensorNames(others={"input_layernorm": "input_layernorm.norm",
                                  "post_attention_layernorm": "post_attention_layernorm.norm"}),
        **CHOSEN_BY_SIGMOID,
    ),
    # HY V4: hyper-connections of four streams, sinks, gated heads, an index whose last dimensions turn
    Family(name="hy_v4", architectures=("HYV4ForCausalLM",), keys=HY_V4, **HY_V4_LAYERS, **CHOSEN_BY_SIGMOID),
    # the text of its like beside pictures: heads turn by pairs, the norms of latents have the eps of the others
    Family(
        name="hy_v4_vl_text", architectures=("HYV4VLForConditionalGeneration",), more_model_types=("hy_v4_vl",),
        keys={**HY_V4, "hidden_size": 6144, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
              "num_hidden_layers": 78, "num_attention_heads": 64, "q_lora_rank": 2048, "index_n_heads": 32,
              "indexer_rope_interleave": True},
        is_interleaved=True, norms_latents_alike=True,
        prefixes=("model.", "model.language_model."),
        **{**HY_V4_LAYERS, "ignored": (*HY_V4_LAYERS["ignored"], "vit.")},
        **CHOSEN_BY_SIGMOID,
    ),
    # DeepSeek V4: one row of a window's tokens for all heads, key and value, beside entries of many tokens, all or those that
    # an index chooses; streams that mix, a connection at their end; experts that a token's id chooses
    Family(
        name="deepseek_v4", architectures=("DeepseekV4ForCausalLM",),
        keys={"vocab_size": 129_280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
              "num_key_value_heads": 1, "head_dim": 512, "hidden_act": "silu", "max_position_embeddings": 1_048_576,
              "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0, "compress_rope_theta": 160_000.0,
              "q_lora_rank": 1024, "kv_lora_rank": None, "qk_nope_head_dim": None, "qk_rope_head_dim": None,
              "v_head_dim": None, "partial_rotary_factor": None, "compress_rates": None, "o_groups": 8, "o_lora_rank": 1024,
              "sliding_window": 128, "layer_types": None,
              "entry_layers": None, "token_layers": None, "index_topk": 512, "index_head_dim": 128, "index_n_heads": 64,
              "num_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
              "routed_scaling_factor": 1.5, "mlp_layer_types": None, "swiglu_limit": 10.0,
              "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20},
        fixed={"num_key_value_heads": (1,), "scoring_func": ("sqrtsoftplus",), "topk_method": ("noaux_tc",),
               "norm_topk_prob": (True,), "n_shared_experts": (1,), "attention_bias": (False,), "mlp_bias": (False,)},
        renamed={"n_routed_experts": "num_experts", **LOCAL_EXPERTS},
        unread=("num_nextn_predict_layers", "router_aux_loss_coef", "router_jitter_noise", "expert_dtype"),
        is_interleaved=True, turns_by_kind=True, has_sinks=True, norms_latents_alike=True, limits_all=True,
        scores=Scores.ROOT_SOFTPLUS, renormalises=True, has_choice_bias=True,
        names=TensorNames(
            head="head", attention="attn", o="wo_b", sinks="attn_sink", mlp=("ffn.",), expert=("w1", "w3", "w2"),
            gate_up=("w1", "w3"), down="w2", choice_bias="gate.bias",
            norms={Norms.BEFORE: ("attn_norm", None, "ffn_norm", None)}, others={"embed_tokens": "embed", "kv_norm": "norm"}),
        ignored=("rotary_emb.inv_freq", "mtp."),
    ),
    # GLM-4.7-Flash
    Family(
        name="glm4_moe_lite", architectures=("Glm4MoeLiteForCausalLM",),
        keys={**LATENT, "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
              "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
              "num_key_value_heads": 20, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
              "num_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
              "norm_topk_prob": True, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
              "rope_interleave": True, "first_k_dense_replace": 1, "mlp_layer_types": None},
        fixed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        **LIKE_DEEPSEEK,
        **CHOSEN_BY_SIGMOID,
    ),
    # Mistral Small 4: queries are scaled by their position
    Family(
        name="mistral4", architectures=("Mistral4ForCausalLM",),
        keys={**LATENT, "vocab_size": 131_072, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
              "num_hidden_layers": 36, "max_position_embeddings": 1_048_576, "kv_lora_rank": 256, "q_lora_rank": 1024,
              "qk_nope_head_dim": 64, "num_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4,
              "first_k_dense_replace": 0, "norm_topk_prob": True, "rope_interleave": True, "rope_parameters": {
                  "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "beta_fast": 32.0, "beta_slow": 1.0,
                  "original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "llama_4_scaling_beta": 0.1}},
        renamed={"n_routed_experts": "num_experts", **LOCAL_EXPERTS},
        group_best=2,
        **{**BESIDE_VISION, **LIKE_DEEPSEEK},
    ),
    # Mistral Large 4: latents that layers share, learned turns, queries that are scaled by numbers of their heads
    Family(
        name="mistral_large4_text", architectures=("MistralLarge4ForConditionalGeneration",),
        more_model_types=("mistral_large4",),
        keys={**{key: value for key, value in LATENT.items() if key != "q_lora_rank"}, "vocab_size": 204_800,
              "hidden_size": 6144, "intermediate_size": 24_576, "moe_intermediate_size": 6144, "num_hidden_layers": 72,
              "num_attention_heads": 64, "num_key_value_heads": 64, "qk_nope_head_dim": 64, "num_experts": 128,
              "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "mlp_layer_types": None,
              "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5, "final_logit_softcapping": 30.0,
              "no_rope_layers": None, "no_rope_layer_interval": 4, "kv_source_layers": None, "index_topk": 2048,
              "index_head_dim": 128, "index_n_heads": 32, "indexer_rope_interleave": True, "indexer_types": None,
              "index_topk_pattern": None, "index_topk_freq": 1, "index_skip_topk_offset": 2, "rope_parameters": {
                  "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2048.0, "original_max_position_embeddings": 512,
                  "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}},
        fixed={"indexer_rope_interleave": (True,), "q_lora_rank": (None,)},
        renamed={"n_routed_experts": "num_experts", **LOCAL_EXPERTS},
        shares_latents=True, learns_turns=True, norms_latents_alike=True,
        is_interleaved=True, o_bias="attention_bias",
        renormalises=True, group_best=2,
        names=TensorNames(
            embedding="tok_embeddings", head="output", attention="attention", o="wo", mlp=("feed_forward.", ""),
            expert=("w1", "w3", "w2"), gate_up=("w1", "w3"), down="w2",
            norms={Norms.BEFORE: ("attention_norm", None, "ffn_norm", None)},
            others={"q_proj": "wq", "kv_a_proj_with_mqa": "wkv_a_with_mqa", "kv_b_proj": "wkv_b", "kv_a_layernorm": "kv_a_norm",
                    "softmax_scaling.scale": "ssmax_scaling.s", "softmax_scaling.bias": "ssmax_scaling.b",
                    "rotary_emb.alpha": "lerope.alpha"}),
        prefixes=("",),
        ignored=("rotary_emb.inv_freq", "mtp_dspark.", "pre_mm_projector_norm.", "vision_language_adapter."),
    ),
    # LongCat-Flash: two attentions and MLPs a layer, a mixture beside the first, experts without weights, scaled latents
    Family(
        name="longcat_flash", architectures=("LongcatFlashForCausalLM",),
        keys={**{key: value for key, value in LATENT.items() if key not in ("n_group", "topk_group")}, "vocab_size": 131_072,
              "hidden_size": 6144, "intermediate_size": 12_288, "moe_intermediate_size": 2048, "num_layers": None,
              "num_hidden_layers": None, "num_attention_heads": 64, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
              "rope_theta": 10_000_000.0, "num_experts": 512, "zero_expert_num": 256, "num_experts_per_tok": 12,
              "routed_scaling_factor": 6.0, "mlp_layer_types": None},
        fixed={"zero_expert_type": ("identity", None), "mla_scale_q_lora": (True, None), "mla_scale_kv_lora": (True, None),
               "router_bias": (False, None), "norm_topk_prob": (False, None), "attention_method": ("MLA", None)},
        renamed={"n_routed_experts": "num_experts", **LOCAL_EXPERTS, "moe_topk": "num_experts_per_tok",
                 "ffn_hidden_size": "intermediate_size", "expert_ffn_hidden_size": "moe_intermediate_size"},
        has_halves=True, scales_latents=True,
        is_interleaved=True, o_bias="attention_bias",
        renormalises=False, has_choice_bias=True,
        names=TensorNames(attention="self_attn.{half}", mlp=("mlp.", ""), dense="mlps.1.", shared="mlps.0",
                          router="router.classifier", choice_bias="router.e_score_correction_bias", norms={Norms.BEFORE: (
                              "input_layernorm.{half}", None, "post_attention_layernorm.{half}", None)}),
        ignored=("rotary_emb.inv_freq", "mtp."),
    ),
    # MiniCPM3: embeddings, what layers add, and logits are scaled
    Family(
        name="minicpm3", architectures=("MiniCPM3ForCausalLM",),
        keys={**LATENT, "vocab_size": 73_448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
              "num_attention_heads": 40, "num_key_value_heads": 40, "max_position_embeddings": 32_768,
              "rms_norm_eps": 1e-5, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64,
              "qk_rope_head_dim": 32, "v_head_dim": None, "tie_word_embeddings": True, "embedding_multiplier": 12,
              "scale_depth": 1.4, "dim_model_base": 256},
        renamed={"scale_emb": "embedding_multiplier"},
        o_bias="attention_bias",
    ),
    # Youtu-LLM: latent attention without experts
    Family(
        name="youtu", architectures=("YoutuForCausalLM",),
        keys={**LATENT, "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
              "num_key_value_heads": 16, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
              "rope_interleave": True},
        **LIKE_DEEPSEEK,
    ),
)  # fmt: skip
