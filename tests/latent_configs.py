"""Small configs of families of latent attention that choose what they attend to, or norm and gate in ways of their own."""

from __future__ import annotations

from typing import Any

LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
          "first_k_dense_replace": 1}  # fmt: skip
WITHOUT_FIRST = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
# as `family_configs.MORE`
LATENT_MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # an index that chooses some of the tokens there are; the second one's choice is shared
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "index_topk": 12, "index_n_heads": 8,
         "index_head_dim": 32},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**LATENT, "q_lora_rank": 24, "index_topk": 12, "index_n_heads": 8, "index_head_dim": 32,
         "indexer_types": ["full", "shared", "full"]},
    ),
    "axk1": (
        "AXK1Config",
        "AXK1ForCausalLM",
        {**WITHOUT_FIRST, "q_lora_rank": 24,
         "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    # gated norms, and queries and gates of heads that are made of a latent before and behind its norm
    "axk2": (
        "AXK2Config",
        "AXK2ForCausalLM",
        {**WITHOUT_FIRST, "q_lora_rank": 24,
         "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"], "gated_norm_rank": 8,
         "index_topk": 12, "index_n_heads": 8, "index_head_dim": 32},
    ),
    # queries at once, by older names of their turns
    "sarvam_mla": (
        "SarvamMLAConfig",
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": None, "head_dim": 40, "rope_scaling": {
            "type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
    ),
    # streams by hyper-connections, sinks and gates of latent heads, limits that are met, a choice that is shared
    "hy_v4": (
        "HYV4Config",
        "HYV4ForCausalLM",
        {**WITHOUT_FIRST, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk": 12,
         "index_n_heads": 8, "index_head_dim": 32, "indexer_types": ["full", "shared", "full"], "hc_mult": 3,
         "hc_magnitude": 1.5, "swiglu_limit": 0.6},
    ),
    # streams that mix, states in two steps of a bounded rule, latents without positions, an index of pools with a tail
    "glm5_next": (
        "Glm5NextTextConfig",
        "Glm5NextForConditionalGeneration",
        {**{key: value for key, value in WITHOUT_FIRST.items() if key != "qk_rope_head_dim"}, "q_lora_rank": 24,
         "num_hidden_layers": 5, "linear_head_dim": 16, "linear_num_heads": 4, "n_group": 2, "topk_group": 1,
         "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention", "indexed_attention"],
         "indexer_types": ["full", "full", "shared", "full", "full"],
         "mlp_layer_types": ["dense", *["sparse"] * 4], "index_topk": 12, "index_kpool": 4,
         "index_n_heads": 8, "index_head_dim": 32, "hc_mult": 3, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.6},
    ),
    # latents with positions and without, which a layer with an index of its own and one without share; learned turns
    "mistral_large4": (
        "MistralLarge4TextConfig",
        "MistralLarge4ForConditionalGeneration",
        {**LATENT, "num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 1], "kv_source_layers": [0, 1, 0, 1, 4],
         "indexer_types": ["full", "full", "shared", "full", "shared"], "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.3, "index_topk": 12, "index_n_heads": 8, "index_head_dim": 32,
         "final_logit_softcapping": 5.0, "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
             "attention_factor": 1.0}},
    ),
    # windows of rows that all heads meet, beside entries: all of 16 tokens, and some of 4 that overlap; experts by a token's id
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.25, "q_lora_rank": 24,
         "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8,
         "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention",
                         "compressed_sparse_attention"],
         "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
         "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"], "n_routed_experts": 8, "num_experts_per_tok": 3,
         "intermediate_size": 40, "moe_intermediate_size": 40, "index_topk": 3, "index_n_heads": 8, "index_head_dim": 16,
         "hc_mult": 3, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.6, "rope_parameters": {
             "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
}  # fmt: skip
