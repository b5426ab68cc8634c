"""Small configs of families whose layers have parts that few others have."""

from __future__ import annotations

from typing import Any

PERSIMMON = {
    "hidden_size": 80,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.4},
}
# as `family_configs.MORE`
PARTS_MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # values of two heads, and heads that are taken from others; two groups of them
    "diffllama": (
        "DiffLlamaConfig", "DiffLlamaForCausalLM",
        {"head_dim": 24, "num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True, "lambda_std_dev": 0.3}),
    # two layers of two parts each; a third of the experts have no weights
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {"num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 12, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4,
         "expert_ffn_hidden_size": 40, "ffn_hidden_size": 96, "routed_scaling_factor": 1.5},
    ),
    # q, k and v within a bound that is met; experts below each other
    "dbrx": (
        "DbrxConfig",
        "DbrxForCausalLM",
        {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.2, "rope_theta": 500.0},  # which rope_parameters repeat in its class
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
         "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 3}},
    ),
    # norms of heads with biases; the same around what reads pictures
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", PERSIMMON),
    "fuyu": ("PersimmonConfig", "FuyuForCausalLM", PERSIMMON),
    # norms of sums; positions that are learned, or made; a bias in the last layer alone; a head in two steps, exact gates
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", {}),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", {}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", {"ffn_dim": 96}),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}}),
    "modernbert-decoder": (
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        {"num_hidden_layers": 4, "local_attention": 32, "attention_bias": True, "mlp_bias": True, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}},
    ),
}  # fmt: skip
