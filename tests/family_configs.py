"""Small configs of every family, by the classes of transformers."""

from __future__ import annotations

from typing import Any

from family_fields import LAGUNA, MUSE, MUSE_ADAPTER, SMALL_TOWER, SPARK, SPARK_EAR, WINDOWS
from latent_configs import LATENT, LATENT_MORE
from part_configs import PARTS_MORE
from searched import block
from state_configs import CONVOLUTIONS, HYBRIDS_MORE, STATES_MORE

VOCAB = 160
# family -> (config class, model class, fields beside COMMON)
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 16, "head_dim": 16}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 5.0, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3,
         "num_hidden_layers": 4},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
}  # fmt: skip
# families whose decoder transformers has in a model for pictures alone: config class, its smallest tower, what else is there
WRAPPED: dict[str, tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], dict[str, Any]]] = {
    "minimax_m3": (
        "MiniMaxM3VLConfig",
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    ),
    "fuyu": ("FuyuConfig", {}),
    "muse_glimmer": (*MUSE[1], MUSE_ADAPTER),
    "muse_spark": ("MuseSparkConfig", MUSE[1][1], {"audio_config": SPARK_EAR, **MUSE_ADAPTER}),
    "step3p7": (
        "Step3p7Config",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    ),
    "mistral_large4": ("MistralLarge4Config", {"model_type": "pixtral", "head_dim": 8, **SMALL_TOWER}),
    "glm5_next": (
        "Glm5NextConfig",
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16,
         "projection_intermediate_size": 16, "image_size": 28},
    ),
}  # fmt: skip
# what other families have beside that: their tests look at one cut of the work, as the walk is the same
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 24}),
    # layers that attend to pictures, among them the last, are left out
    "mllama": (
        "MllamaTextConfig", "MllamaForCausalLM", {"num_hidden_layers": 5, "cross_attention_layers": [1, 4]}),
    # two kinds of layers attend to what others keep, of three the gate is sparse, and a token has no embedding of layers
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {"head_dim": 24, "sliding_window": 16, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "laurel_rank": 12,
         "layer_types": ["full_attention", "sliding_attention"] * 3, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCAB - 1, "activation_sparsity_pattern": [0.6, 0.9, 0.6, 0.0, 0.0, 0.0],
         "final_logit_softcapping": 5.0},
    ),
    # layers that see everything have one wide head whose keys are its values
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "sliding_window": 16, "num_hidden_layers": 4, "hidden_size_per_layer_input": 0, "rope_parameters": {
             "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
         "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 5.0},
    ),
    # of the small sizes: embeddings for each layer, and the last layers attend to others' and are twice as wide
    "gemma4-e2b": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"head_dim": 16, "global_head_dim": 24, "sliding_window": 16, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
         "layer_types": ["sliding_attention", "full_attention"] * 3, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCAB - 1, "use_double_wide_mlp": True},
    ),
    # a mixture beside the dense MLP
    "gemma4-a4b": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "sliding_window": 16, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
         "top_k_experts": 3, "moe_intermediate_size": 40},
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        "Gemma4UnifiedForCausalLM",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_hidden_layers": 3},
    ),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5},
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", {"head_dim": 24}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 24}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.5}),
    "command-r-plus": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 16, "sliding_window_pattern": 3, "logit_scale": 0.5}),
    # beside towers that text does not pass
    "phi4_multimodal": (
        "Phi4MultimodalConfig",
        "Phi4MultimodalForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
         "vision_config": {**SMALL_TOWER, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14, "crop_size": 28},
         "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
                          "nemo_conv_channels": 8, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16,
                          "input_size": 16}},
    ),
    # windowed layers turn, by halves; those that see everything do not
    "cohere_compass": (
        "CohereCompassTextConfig",
        "CohereCompassForCausalLM",
        {**WINDOWS, "logit_scale": 0.5, "attention_bias": True, "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3, "mrope_section": [4, 2, 2],
                                  "mrope_interleaved": True}}},
    ),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"use_qkv_bias": True}),
    "stablelm-2-12b": (
        "StableLmConfig", "StableLmForCausalLM", {"qk_layernorm": True, "use_parallel_residual": True, "hidden_size": 96}),
    "cwm": ("CwmConfig", "CwmForCausalLM", {"head_dim": 24, "sliding_window": 16, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64}}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"head_dim": 24, "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40,
         "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "floor_scale": 8,
         "attention_chunk_size": 16, "rope_parameters": {
             "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
             "original_max_position_embeddings": 64}},
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"head_dim": 24, "use_bias": True}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72,
         "mlp_only_layers": [1]},
    ),
    "olmoe": (
        "OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "flex_olmo": (
        "FlexOlmoConfig", "FlexOlmoForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40}),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "embedding_multiplier": 3.0,
         "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "shared_intermediate_size": 72,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
         "v_head_dim": 12, "scale_emb": 3.0, "dim_model_base": 32},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.5, "head_dim": 24, "use_qk_norm": True, "rope_parameters": {
             "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "sarvam_moe": (
        "SarvamMoEConfig",
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24,
         "attention_bias": True},
    ),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        {"head_dim": 16, "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    # queries are scaled by position from 24 on
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {"head_dim": 24, "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 24, "rope_theta": 1e4,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "internlm3": ("InternLM3Config", "LlamaForCausalLM", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {"head_dim": 16}),
    "vaultgemma": (
        "VaultGemmaConfig",
        "VaultGemmaForCausalLM",
        {"head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 5.0},
    ),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"sliding_window": 16, "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.2,
                               "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": 16, "num_hidden_layers": 4}),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        "HyperCLOVAXForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.7},
    ),
    "solar_open": (
        "SolarOpenConfig",
        "SolarOpenForCausalLM",
        {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24,
         "attention_bias": True},
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "max_window_layers": 2,
         "sliding_window": 16},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}, "q_lora_rank": 24,
         "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "youtu": (
        "YoutuConfig",
        "YoutuForCausalLM",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 8, "v_head_dim": 12},
    ),
    # the shape of V2-Lite: queries directly, greedy choice; V2's groups are a variant
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4, "mscale": 0.7,
            "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"sliding_window": 16}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {"mlp_bias": True, "head_dim": 24}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {"head_dim": 24}),
    "jais2": ("Jais2Config", "Jais2ForCausalLM", {"head_dim": 24}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {"head_dim": 24}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_inner": 96}),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {"activation_function": "gelu"}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {"rotary_dim": 8, "n_inner": 96}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {"n_head": 8, "rotary_dim": 4, "n_inner": 96}),
    # windows on every other layer, scores that nothing divides
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", {"num_hidden_layers": 4, "window_size": 16, "attention_types": [
        [["global"], 1], [["local"], 1], [["local"], 1], [["global"], 1]]}),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", {"attention_bias": True, "final_logit_softcapping": 3.0}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "falcon-40b": ("FalconConfig", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {"clip_qkv": 0.8}),
    "iquestcoder": ("IQuestCoderConfig", "LlamaForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {}),
    "apertus1p5": ("Apertus1p5TextConfig", "Apertus1p5TextForCausalLM", {"output_vocab_size": 140}),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 24, "rotary_dim": 12},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {"num_experts": 6, "moe_topk": [3, 3, 3], "intermediate_size": 40, "head_dim": 24},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 96}),
    # scores that fall with the distance; heads whose number is no power of two, too
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "mpt": ("MptConfig", "MptForCausalLM", {
        "num_attention_heads": 3, "hidden_size": 72, "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3}}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 64, "head_dim": 16,
         "sliding_window": 16, "rope_parameters": {
             "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
             "original_max_position_embeddings": 32, "rope_theta": 1e4}},
    ),
    **STATES_MORE,
    # newer ones that attend to windows: with sinks and bases of their own, with gated heads, with other experts
    "granite_swa": (
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        {**WINDOWS, "layer_rope_theta": [0, 1e4, 5e3, 1e4], "embedding_multiplier": 6.0, "logits_scaling": 0.5,
         "residual_multiplier": 0.4, "attention_multiplier": 0.2, "attention_bias": True},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        "GraniteMoeSWAForCausalLM",
        {**WINDOWS, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "shared_intermediate_size": 48,
         "layer_rope_theta": [0, 1e4, 1e4, 1e4], "embedding_multiplier": 6.0, "logits_scaling": 0.5,
         "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {**WINDOWS, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_shared_experts": 1,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "mellum": (
        "MellumConfig",
        "MellumForCausalLM",
        {**WINDOWS, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
         "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5,
                                                "original_max_position_embeddings": 32},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "flint": (
        "FlintConfig",
        "FlintForCausalLM",
        {**WINDOWS, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {**WINDOWS, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 2.0, "mup_enabled": True},
    ),
    "lfm3": (
        "Lfm3Config",
        "Lfm3ForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 16, "conv_L_cache": 5,
         "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    ),
    **HYBRIDS_MORE,
    # norms before o and down, squared gates
    "bitnet": ("BitNetConfig", "BitNetForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    # by the names of classes that transformers does not have
    "nemotron-nas": (
        "LlamaConfig",
        "SearchedForCausalLM",
        {"num_hidden_layers": 6, "head_dim": 16,
         "block_configs": [block(2, 96), block(None, 40), block(4, None), block(None, None), block(1, 56), block(None, 72)]},
    ),
    "minicpm": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.25},
    ),
    "exaone": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 24, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "internlm2": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "pangu": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "mimo": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    # experts chosen one by one, of which some are too far from the best to weigh against it
    "phimoe": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
    ),
    "hy_v3": (
        "HYV3Config",
        "HYV3ForCausalLM",
        {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "num_shared_experts": 2, "router_scaling_factor": 1.7},
    ),
    # latent queries that are scaled by their position
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    # a mixture beside attention, whose mean with the shared experts is added; dense layers that attend to everything turn
    "cohere2_moe": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {**WINDOWS, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "logit_scale": 0.5,
         "prefix_dense_intermediate_size": 80, "mlp_layer_types": ["dense", *["sparse"] * 3],
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "cohere2_moe-sums": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {**WINDOWS, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1, "logit_scale": 0.5,
         "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
         "rms_norm_eps": 1e-5},
    ),
    "kolibri1": (
        "Kolibri1Config",
        "Kolibri1ForCausalLM",
        {**WINDOWS, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    ),
    # clamped gates in the dense layer, in shared experts and in experts; an index that chooses two of the blocks there are
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3SparseForConditionalGeneration",
        {"head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40,
         "routed_scaling_factor": 1.5, "dense_intermediate_size": 96, "shared_intermediate_size": 48,
         "mlp_layer_types": ["dense", "sparse", "sparse"],
         "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "index_n_heads": 2,
         "index_head_dim": 24, "index_block_size": 16, "index_topk_blocks": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    # windowed layers of more query heads and positions of their own, each head gated; limits that are met
    "muse_glimmer": MUSE[0],
    "muse_spark": SPARK,
    "step3p7": (
        "Step3p7TextConfig",
        "Step3p7ForConditionalGeneration",
        {"num_hidden_layers": 4, "head_dim": 24, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "share_expert_dim": 48, "sliding_window": 16, "num_sliding_attention_heads": 6, "moe_router_scaling_factor": 1.5,
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "layer_types": WINDOWS["layer_types"],
         "swiglu_limits": [None, None, 0.6, None], "swiglu_limits_shared": [0.5, None, 0.7, None], "rope_parameters": {
             "full_attention": {"rope_type": "llama3", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0,
                                "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}},
    ),
    # query heads by layer, each gated by softplus; products of the router held within a cap
    "laguna": ("LagunaConfig", "LagunaForCausalLM", {**LAGUNA, "moe_router_logit_softcapping": 0.8}),
    # each channel gated
    "laguna-m": ("LagunaConfig", "LagunaForCausalLM", {**LAGUNA, "gating": "per-element"}),
    # experts as [inputs, outputs], weighed among the chosen
    "aria": (
        "AriaTextConfig",
        "AriaTextForCausalLM",
        {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2, "intermediate_size": 40, "head_dim": 24,
         "attention_bias": True},
    ),
    # values narrower than keys, in windowed layers of twice the KV heads, with sinks and a base of their own
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {**WINDOWS, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 10, "n_routed_experts": 8, "n_group": 4,
         "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5,
         "attention_bias": True, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {"num_hidden_layers": 4, "layer_types": CONVOLUTIONS, "num_experts": 6, "num_experts_per_tok": 3,
         "moe_intermediate_size": 40, "num_dense_layers": 1, "conv_L_cache": 4},
    ),
    **LATENT_MORE,
    **PARTS_MORE,
}  # fmt: skip

# Of these a third layer is of a kind that the first two are not, or layers are made of blocks of which more are asked for.
OF_THREE_LAYERS = (
    "mllama", "gemma3n", "gemma4-e2b", "cohere2", "llama4", "minicpm3", "dots1", "zamba2", "zamba", "zamba2-7b",
    "recurrent_gemma", "falcon_mamba", "mamba", "mamba2", "granite_swa", "lfm3", "kimi_linear", "bailing_hybrid",
    "falcon_h1", "falcon-h1-plain", "falcon-h1-normed", "nemotron_h", "nemotron-3", "nemotron-3-super",
    "nemotron-nas", "muse_spark", "step3p7", "laguna", "laguna-m", "lfm2_moe", "glm_moe_dsa", "hy_v4", "glm5_next",
    "mistral_large4", "deepseek_v4",
)  # fmt: skip


def fewest_layers(family: str) -> int:
    """Layers of one of `MORE_FAMILIES` that show all kinds it has (`test_a_third_layer_is_as_one_of_the_two`)."""
    return 3 if family in OF_THREE_LAYERS else 2
