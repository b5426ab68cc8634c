"""Small configs of families whose layers keep states, beside attention or in its place."""

from __future__ import annotations

from typing import Any

from latent_configs import LATENT

STATES = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CONVOLUTIONS = ["conv", "full_attention", "conv", "conv"]
MAMBA = {"num_hidden_layers": 4, "layer_types": STATES, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 24,
         "mamba_d_conv": 4, "mamba_expand": 2, "shared_intermediate_size": 48}  # fmt: skip
JAMBA = {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 12, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_dt_rank": 24}  # fmt: skip
FALCON_H1 = {
    "num_hidden_layers": 2,
    "head_dim": 24,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.3,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 0.6, 1.5, 0.5, 0.7],
    "mlp_multipliers": [0.9, 0.6],
}
BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
NEMOTRON_H = {"head_dim": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 24,
              "layer_norm_epsilon": 1e-5}  # fmt: skip


def blocks(pattern: str) -> list[str]:
    """Nemotron-H's names of its blocks, from the letters that its older files have."""
    return [BLOCKS[letter] for letter in pattern]


NEMOTRON_3 = {**NEMOTRON_H, "layers_block_type": blocks("MEM*EME"), "n_routed_experts": 6, "num_experts_per_tok": 3,
              "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 48,
              "routed_scaling_factor": 2.5}  # fmt: skip
QWEN4 = {"num_hidden_layers": 4, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 32, "output_gate_type": "sigmoid", "layer_types": STATES,
         "hc_count": 3, "hc_lowrank": 24, "ple_layer_ids": [1, 4], "ple_embed_dim": 48, "ngram_size": 3, "heads_per_ngram": 2,
         "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3,
         "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 12,
         "indexer_compress_ratio": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                          "partial_rotary_factor": 0.25}}  # fmt: skip
# Lightning attention in three layers of four, four heads of which fade at different rates, and a factor of each kind of its own
LIGHTNING = {
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {
        "num_hidden_layers": 4, "layer_types": STATES, "head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3,
        "block_size": 7, "full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 0.7,
        "linear_attn_beta_factor": 1.3, "mlp_alpha_factor": 2.1, "mlp_beta_factor": 0.6}),
}  # fmt: skip
ZAMBA_2 = {"num_hidden_layers": 4, "n_mamba_heads": 8, "mamba_d_state": 24, "adapter_rank": 12}
# Mamba-1 in three layers of four, with experts in every second layer and without any; states alone, with bare norms and
# without, and Mamba-2's
MAMBA_1 = {
    "jamba": ("JambaConfig", "JambaForCausalLM", {
        **JAMBA, "num_experts": 6, "num_experts_per_tok": 3, "expert_layer_period": 2, "expert_layer_offset": 1}),
    # two blocks of attention and an MLP that layers use in turn, with low ranks of each use's own
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", {
        **ZAMBA_2, "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"], "num_key_value_heads": 4,
        "use_shared_attention_adapter": True, "use_mem_rope": True, "num_mem_blocks": 2}),
    # one block without ranks, Mamba-1 of two heads, which lie by themselves
    "zamba": ("ZambaConfig", "ZambaForCausalLM", {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 12,
        "mamba_dt_rank": 20}),
    # one that both use, without ranks in attention and without positions, of fewer KV heads; states in groups
    "zamba2-7b": ("Zamba2Config", "Zamba2ForCausalLM", {
        **ZAMBA_2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 2}),
    # windows on every third layer, recurrent units of another width than the model's, which is no square
    "recurrent_gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", {
        "num_hidden_layers": 4, "hidden_size": 80, "lru_width": 72, "conv1d_width": 3, "attention_window_size": 16,
        "num_key_value_heads": 1, "attention_bias": True, "logits_soft_cap": 8.0}),
    "jamba-dense": ("JambaConfig", "JambaForCausalLM", {**JAMBA, "num_experts": 1, "mamba_dt_rank": "auto"}),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", {"state_size": 12, "time_step_rank": 20}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 12, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", {
        "state_size": 24, "num_heads": 8, "head_dim": 16, "n_groups": 4, "conv_kernel": 3}),
}  # fmt: skip
# as `family_configs.MORE`
STATES_MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # three layers of four have a state, and those between them gates behind their heads
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 32, "attention_bias": True, "layer_types": STATES},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
         "linear_key_head_dim": 24, "linear_value_head_dim": 16, "tie_word_embeddings": True,
         "layer_types": STATES},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
         "linear_key_head_dim": 32, "linear_value_head_dim": 16, "layer_types": STATES},
    ),
    # the same beside windows, and layers without positions
    "lara_mini": (
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        {"num_hidden_layers": 5, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 48, "sliding_window": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    ),
    # streams in one row, n-grams in two layers, an index that chooses blocks by the means of their keys
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        QWEN4,
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
         "linear_value_head_dim": 16, "layer_types": STATES, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
    # Mamba-2 in three layers of four: with experts and without positions, without experts, and with partly turned heads
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**MAMBA, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "embedding_multiplier": 6.0,
         "logits_scaling": 0.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "tie_word_embeddings": True},
    ),
    "granite-h-dense": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**MAMBA, "num_local_experts": 0, "position_embedding_type": "rope",
         "mamba_conv_bias": False},
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**{key: value for key, value in MAMBA.items() if key not in ("layer_types", "shared_intermediate_size")},
         "attn_layer_indices": [1]},
    ),
    **MAMBA_1,
    **LIGHTNING,
}  # fmt: skip
HYBRIDS_MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # a delta rule that fades by key in three layers of four, latent attention without positions in the other, experts
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
         "num_hidden_layers": 4, "layer_types": STATES, "num_experts": 8, "mlp_layer_types": ["dense", *["sparse"] * 3],
         "linear_head_dim": 16, "linear_num_heads": 16, "linear_conv_kernel_dim": 4, "n_group": 2, "topk_group": 1},
    ),
    # the same with a bound, in one step; latent attention that turns and has a gate for each head
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {**{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
         "num_hidden_layers": 4, "layer_types": STATES, "num_local_experts": 8,
         "mlp_layer_types": ["dense", *["sparse"] * 3], "head_dim": 24, "n_group": 2, "topk_group": 1},
    ),
    # Mamba-2 beside attention in each layer, and multipliers; without them; normed by group
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1),
    "falcon-h1-plain": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {key: value for key, value in FALCON_H1.items() if "multiplier" not in key},
    ),
    "falcon-h1-normed": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 4, "mamba_conv_bias": False,
         "tie_word_embeddings": True},
    ),
    # Mamba-2 normed by group, attention and MLPs as blocks of their own, some of them without an MLP behind; with experts
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON_H, "layers_block_type": blocks("M-M*-MM-")},
    ),
    "nemotron-3": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON_3),
    # its experts read latents
    "nemotron-3-super": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON_3, "n_group": 2, "topk_group": 1, "moe_latent_size": 24, "routed_scaling_factor": 1.0},
    ),
    # short convolutions in three layers of four, dense and with experts behind the first
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 4, "layer_types": CONVOLUTIONS, "block_multiple_of": 16, "conv_L_cache": 3},
    ),
}  # fmt: skip
