"""Named shapes for `bench --shape`: the config.json fields of public models that decide what a step costs.

Facts of the published configs; `random_model` makes weights for them, so no checkpoint is needed.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _config(architecture: str, **fields: Any) -> Config:
    return {"architectures": [architecture], "torch_dtype": "bfloat16", **fields}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **fields: Any) -> Config:
    return _config(
        "LlamaForCausalLM",
        model_type="llama",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        **fields,
    )


def _qwen(version: int, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **fields: Any) -> Config:
    return _config(
        f"Qwen{version}ForCausalLM",
        model_type=f"qwen{version}",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        hidden_act="silu",
        **{"vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 32_768, **fields},
    )


def _llama3_rope(factor: float) -> Config:
    return {
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


_SMOLLM2: Config = {"tie_word_embeddings": True, "rope_theta": 100_000.0, "max_position_embeddings": 8192}
_GEMMA: Config = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256}

SHAPES: dict[str, Config] = {
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49_152, **_SMOLLM2),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49_152, **_SMOLLM2),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49_152, **{**_SMOLLM2, "rope_theta": 130_000.0}),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32_000, max_position_embeddings=2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, max_position_embeddings=4096),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14_336, 128_256, **_llama3_rope(8.0)),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128_256, head_dim=64, tie_word_embeddings=True, **_llama3_rope(32.0)),
    "llama-3.2-3b": _llama(
        28, 3072, 24, 8, 8192, 128_256, head_dim=128, tie_word_embeddings=True, **_llama3_rope(32.0)
    ),
    "mistral-7b": _config(
        "MistralForCausalLM",
        model_type="mistral",
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14_336,
        vocab_size=32_000,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        max_position_embeddings=32_768,
    ),
    "qwen2.5-0.5b": _qwen(2, 24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": _qwen(2, 28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _qwen(2, 36, 2048, 16, 2, 11_008),
    "qwen2.5-7b": _qwen(2, 28, 3584, 28, 4, 18_944, vocab_size=152_064, tie_word_embeddings=False),
    "qwen3-0.6b": _qwen(3, 28, 1024, 16, 8, 3072, head_dim=128, max_position_embeddings=40_960),
    "qwen3-1.7b": _qwen(3, 28, 2048, 16, 8, 6144, head_dim=128, max_position_embeddings=40_960),
    "qwen3-4b": _qwen(3, 36, 2560, 32, 8, 9728, head_dim=128, max_position_embeddings=40_960),
    "qwen3-8b": _qwen(
        3, 36, 4096, 32, 8, 12_288, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=False
    ),
    "phi-3-mini": _config(
        "Phi3ForCausalLM",
        model_type="phi3",
        num_hidden_layers=32,
        hidden_size=3072,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        vocab_size=32_064,
        rms_norm_eps=1e-5,
        sliding_window=2047,
        max_position_embeddings=4096,
    ),
    "gemma-2-2b": _config(
        "Gemma2ForCausalLM",
        model_type="gemma2",
        num_hidden_layers=26,
        hidden_size=2304,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=9216,
        vocab_size=256_000,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **_GEMMA,
    ),
    "gemma-3-1b": _config(
        "Gemma3ForCausalLM",
        model_type="gemma3_text",
        num_hidden_layers=26,
        hidden_size=1152,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=6912,
        vocab_size=262_144,
        sliding_window=512,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        **_GEMMA,
    ),
    "olmo-2-1b": _config(
        "Olmo2ForCausalLM",
        model_type="olmo2",
        num_hidden_layers=16,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=8192,
        vocab_size=100_352,
        rms_norm_eps=1e-6,
        rope_theta=500_000.0,
        max_position_embeddings=4096,
    ),
}
