"""The families as data: one entry each. A family that existing ops can run is one more entry here, and nothing else.

An entry names the architectures it serves, every key of config.json that it reads with the default of the configuration
class in transformers (files leave out what equals it), the keys it knows in one setting only, how its layers are made, and
how its tensors are called. `read` turns a config into a `ModelSpec` by these; `compute.decoder` loads and runs by them.
`is_run=False`: priced by `diptych plan`, not run, because an op is missing.
"""

from __future__ import annotations

from typing import Any

from diptych.models.family import Family, TensorNames
from diptych.models.spec import Activation, Norms, QkNorm, Scores

# The class defaults that most classes share; an entry overrides what differs.
USUAL: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
QWEN = {**USUAL, "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32,
        "max_position_embeddings": 32_768, "sliding_window": 4096, "use_sliding_window": False}  # fmt: skip
QWEN_WINDOWS = {"max_window_layers": 28, "layer_types": None}
QWEN_EXPERTS = {"hidden_size": 2048, "num_hidden_layers": 24, "decoder_sparse_step": 1, "mlp_only_layers": None,
                "norm_topk_prob": False}  # fmt: skip
GEMMA = {**USUAL, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "tie_word_embeddings": True,
         "attention_bias": False}  # fmt: skip
GEMMA_2 = {**GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
           "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
           "final_logit_softcapping": None}  # fmt: skip
LATENT = {**USUAL, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
          "v_head_dim": 128, "moe_layer_freq": 1, "attention_bias": False, "routed_scaling_factor": 1.0,
          "n_group": 1, "topk_group": 1}  # fmt: skip
NOT_IN_GPT = ("rope_theta", "num_key_value_heads", "head_dim")
GPT: dict[str, Any] = {**{key: USUAL[key] for key in USUAL if key not in NOT_IN_GPT}, "tie_word_embeddings": True}
GRANITE = {"attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
           "attention_multiplier": 1.0}  # fmt: skip
GLM = {**USUAL, "vocab_size": 151_552, "intermediate_size": 13_696, "num_hidden_layers": 40, "head_dim": 128,
       "num_key_value_heads": 2, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-07,
       "partial_rotary_factor": 0.5, "attention_bias": True}  # fmt: skip
COHERE = {**USUAL, "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "logit_scale": 0.0625,
          "num_hidden_layers": 40, "num_attention_heads": 64, "max_position_embeddings": 8192,
          "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "attention_bias": False}  # fmt: skip
LAYER_NORM_EPS = {"layer_norm_eps": "rms_norm_eps"}
CAUSAL = {"use_bidirectional_attention": (None, False)}
BESIDE_VISION: dict[str, Any] = {
    "prefixes": ("model.", "language_model.model.", "model.language_model."),
    "ignored": ("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector."),
}
NOT_GATED: dict[str, Any] = {"is_run": False, "is_gated": False, "has_norm_bias": True}
ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
BY_ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
BY_USE_BIAS: dict[str, Any] = {"qkv_bias": "use_bias", "o_bias": "use_bias", "mlp_bias": "use_bias"}
CHOSEN_BY_SIGMOID: dict[str, Any] = {"scores": Scores.SIGMOID, "has_choice_bias": True, "group_best": 2}
COHERE_LAYERS: dict[str, Any] = {"norms": Norms.PARALLEL, "centres_norms": True, "is_interleaved": True,
                                 **BY_ATTENTION_BIAS}  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    # Llama 2, 3, 3.1, 3.2 and what copies them: SmolLM2, TinyLlama, Falcon 3, the bundled model
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        keys={**USUAL, "attention_bias": False, "mlp_bias": False},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    # sliding_window null: full attention (v0.2 on); absent: 4096 on every layer
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        keys={**USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "sliding_window": 4096},
        **BESIDE_VISION,
    ),
    Family(
        name="ministral",
        architectures=("MinistralForCausalLM",),
        keys={**USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "sliding_window": 4096, "layer_types": None},
    ),
    # queries are scaled by their position from original_max_position_embeddings on: run up to there
    Family(
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        keys={**USUAL, "vocab_size": 131_072, "intermediate_size": 14_336, "num_hidden_layers": 34,
              "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
              "sliding_window": None, "rope_parameters": {
                  "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                  "original_max_position_embeddings": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "llama_4_scaling_beta": 0.1}},
        **BESIDE_VISION,
    ),
    Family(
        name="internlm3",
        architectures=("InternLM3ForCausalLM",),
        built_as="LlamaForCausalLM",
        keys={**USUAL, "vocab_size": 128_512, "intermediate_size": 10_240, "num_hidden_layers": 48, "head_dim": 128,
              "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "attention_bias": False,
              "mlp_bias": False},
        renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        qkv_bias="attention_bias",
        o_bias="mlp_bias",
        mlp_bias="mlp_bias",
    ),
    # neighbouring dimensions turn together
    Family(
        name="helium",
        architectures=("HeliumForCausalLM",),
        keys={**USUAL, "vocab_size": 48_000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
              "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-8, "rope_theta": 100_000.0, "attention_bias": False, "mlp_bias": False},
        is_interleaved=True,
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    # Qwen2, Qwen2.5: biases on q, k and v; a window on the later layers when switched on
    Family(name="qwen2", architectures=("Qwen2ForCausalLM",), keys={**QWEN, **QWEN_WINDOWS}, qkv_bias=True),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        keys={**QWEN, **QWEN_WINDOWS, "head_dim": 128, "attention_bias": False},
        qk_norm=QkNorm.HEAD,
        **BY_ATTENTION_BIAS,
    ),
    # Phi-3, Phi-3.5, Phi-4; its old configs call longrope "su" or "yarn"
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        keys={**USUAL, "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
              "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
              "sliding_window": None, "partial_rotary_factor": 1.0},
        longrope_names=("su", "yarn"),
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    ),
    # norm weights are stored as w - 1; the old field hidden_act is not looked at where hidden_activation is there
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        keys={**GEMMA_2, "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
              "final_logit_softcapping": 30.0},
        fixed=CAUSAL,
        norms=Norms.AROUND,
        norm_offset=1.0,
        has_scaled_embedding=True,
        full_every=2,
        **BY_ATTENTION_BIAS,
    ),
    # Gemma 2 without norms behind attention and MLP
    Family(
        name="vaultgemma",
        architectures=("VaultGemmaForCausalLM",),
        keys={**GEMMA_2, "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
              "final_logit_softcapping": 30.0},
        norm_offset=1.0,
        has_scaled_embedding=True,
        full_every=2,
        names=TensorNames(norms={Norms.BEFORE: ("input_layernorm", None, "pre_feedforward_layernorm", None)}),
        **BY_ATTENTION_BIAS,
    ),
    # the text part; of Gemma3ForConditionalGeneration too, whose vision tensors are left alone
    Family(
        name="gemma3_text",
        architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        more_model_types=("gemma3",),
        keys={**GEMMA_2, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
              "sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0, "use_bidirectional_attention": None},
        renamed={"_sliding_window_pattern": "sliding_window_pattern"},
        fixed={"attn_logit_softcapping": (None,)},
        norms=Norms.AROUND,
        norm_offset=1.0,
        has_scaled_embedding=True,
        qk_norm=QkNorm.HEAD,
        local_theta="rope_local_base_freq",
        **BESIDE_VISION,
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "rms_norm_eps": 1e-5, "attention_bias": False},
        norms=Norms.AFTER,
        qk_norm=QkNorm.FULL,
        **BY_ATTENTION_BIAS,
    ),
    # windowed layers turn by the base alone
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 500_000.0,
              "sliding_window": 4096, "layer_types": None},
        norms=Norms.AFTER,
        qk_norm=QkNorm.FULL,
        full_every=4,
        local_theta="rope_theta",
        **BY_ATTENTION_BIAS,
    ),
    # where some layers are windowed, the others have no positions
    Family(
        name="exaone4",
        architectures=("Exaone4ForCausalLM",),
        keys={**USUAL, "vocab_size": 102_400, "intermediate_size": 16_384, "num_key_value_heads": 32,
              "rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None},
        fixed={"sliding_window_pattern": (None, 0, 4, "LLLG")},
        norms=Norms.AFTER,
        qk_norm=QkNorm.HEAD,
        full_every=4,
        turns_windowed_only=True,
        turns_full_alone=True,
    ),
    # no rotary positions where no_rope_layers holds 0 (1 is for layers that do turn)
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        keys={**USUAL, "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
              "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0,
              "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
              "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        keys={**USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": None, "num_experts_per_tok": 2,
              "num_experts": 8},
        renamed={"num_local_experts": "num_experts"},
        renormalises=True,
        names=TensorNames(mlp=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2")),
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        keys={**QWEN, **QWEN_EXPERTS, "intermediate_size": 6144, "num_key_value_heads": 4, "attention_bias": False,
              "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
        renamed={"num_local_experts": "num_experts"},
        qk_norm=QkNorm.HEAD,
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        keys={**QWEN, **QWEN_WINDOWS, **QWEN_EXPERTS, "intermediate_size": 5632, "num_attention_heads": 16,
              "num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
              "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True},
        qkv_bias="qkv_bias",
        has_shared_gate=True,
        names=TensorNames(shared="shared_expert"),
    ),
    # its configs say gelu and mean the form with tanh
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM",),
        keys={**GEMMA, "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
        fixed=CAUSAL,
        norm_offset=1.0,
        has_scaled_embedding=True,
        gelu_means_tanh=True,
        **BY_ATTENTION_BIAS,
    ),
    # Granite 3, dense and with experts: scaled at the embedding, the scores, each addition to the stream, the logits
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        keys={**USUAL, **GRANITE, "mlp_bias": False},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="granitemoe",
        architectures=("GraniteMoeForCausalLM",),
        keys={**USUAL, **GRANITE, "num_experts_per_tok": 2, "num_experts": 8},
        renamed={"num_local_experts": "num_experts"},
        renormalises=True,
        names=TensorNames(mlp=("block_sparse_moe.",), router="router.layer",
                          stacked=("input_linear.weight", "output_linear.weight")),
        **BY_ATTENTION_BIAS,
    ),
    # Granite's scales, logits multiplied, norms behind attention and MLP
    Family(
        name="hyperclovax",
        architectures=("HyperCLOVAXForCausalLM",),
        keys={**USUAL, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": None,
              "logit_scale": 1.0, "attention_bias": False, "mlp_bias": False},
        fixed={"use_post_norm": (True,)},
        renamed={"logits_scaling": "logit_scale"},
        norms=Norms.AROUND,
        mlp_bias="mlp_bias",
        names=TensorNames(norms={Norms.AROUND: ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")}),
        **BY_ATTENTION_BIAS,
    ),
    # GLM-4: neighbouring dimensions turn together, half of each head
    Family(
        name="glm",
        architectures=("GlmForCausalLM",),
        keys=GLM,
        is_interleaved=True,
        qkv_bias="attention_bias",
        names=TensorNames(gate_up=("gate_up_proj",)),
    ),
    Family(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        keys=GLM,
        norms=Norms.AROUND,
        is_interleaved=True,
        qkv_bias="attention_bias",
        names=TensorNames(gate_up=("gate_up_proj",), norms={Norms.AROUND: (
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")}),
    ),
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        keys={**USUAL, "vocab_size": 151_552, "intermediate_size": 10_944, "num_hidden_layers": 46,
              "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False,
              "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_experts": 128,
              "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
              "norm_topk_prob": True, "use_qk_norm": False},
        renamed={"n_routed_experts": "num_experts"},
        qkv_bias="attention_bias",
        qk_norm=QkNorm.HEAD,
        qk_norm_key="use_qk_norm",
        **CHOSEN_BY_SIGMOID,
    ),
    Family(
        name="solar_open",
        architectures=("SolarOpenForCausalLM",),
        keys={**USUAL, "vocab_size": 196_608, "intermediate_size": None, "num_hidden_layers": 48, "head_dim": 128,
              "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "attention_bias": False, "moe_intermediate_size": 1280,
              "num_experts_per_tok": 8, "n_shared_experts": 1, "num_experts": 128, "routed_scaling_factor": 1.0,
              "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        renamed={"n_routed_experts": "num_experts"},
        qkv_bias="attention_bias",
        **CHOSEN_BY_SIGMOID,
    ),
    Family(
        name="dots1",
        architectures=("Dots1ForCausalLM",),
        keys={**USUAL, "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62,
              "moe_intermediate_size": 1408, "num_key_value_heads": 32, "num_experts": None, "n_shared_experts": None,
              "num_experts_per_tok": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
              "norm_topk_prob": False, "routed_scaling_factor": 1.0, "attention_bias": False, "sliding_window": 4096,
              "max_window_layers": 62, "layer_types": None},
        renamed={"n_routed_experts": "num_experts"},
        qk_norm=QkNorm.HEAD,
        **CHOSEN_BY_SIGMOID,
        **BY_ATTENTION_BIAS,
    ),
    # Command-R and Aya; R+ norms each head of q and k by weights of its own, which no op here does
    Family(
        name="cohere",
        architectures=("CohereForCausalLM",),
        keys={**COHERE, "rope_theta": 500_000.0},
        fixed={"use_qk_norm": (False,)},
        renamed=LAYER_NORM_EPS,
        **COHERE_LAYERS,
    ),
    # Command-R7B and A: layers that attend to everything have no positions
    Family(
        name="cohere2",
        architectures=("Cohere2ForCausalLM",),
        keys={**COHERE, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        renamed={"_sliding_window_pattern": "sliding_window_pattern", **LAYER_NORM_EPS},
        turns_windowed_only=True,
        **COHERE_LAYERS,
    ),
    # StableLM 2 1.6B and 3B; the 12B norms each head of q and k by weights of its own, which no op here does
    Family(
        name="stablelm",
        architectures=("StableLmForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "intermediate_size": 6912, "hidden_size": 2560, "num_key_value_heads": 32,
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
              "use_qkv_bias": False, "use_parallel_residual": False},
        fixed={"qk_layernorm": (False,)},
        renamed=LAYER_NORM_EPS,
        parallel_key="use_parallel_residual",
        centres_norms=True,
        has_norm_bias=True,
        qkv_bias="use_qkv_bias",
    ),
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
              "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
              "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
        fixed={"clip_qkv": (None,)},
        renamed={"num_local_experts": "num_experts"},
        qk_norm=QkNorm.FULL,
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        keys={**USUAL, "vocab_size": 155_136, "intermediate_size": 27_648, "num_hidden_layers": 64, "head_dim": 128,
              "num_attention_heads": 80, "num_key_value_heads": 8, "max_position_embeddings": 524_288,
              "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    Family(
        name="ernie4_5",
        architectures=("Ernie4_5ForCausalLM",),
        keys={**USUAL, "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
              "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0, "use_bias": False},
        is_interleaved=True,
        **BY_USE_BIAS,
    ),
    Family(
        name="ernie4_5_moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        keys={**USUAL, "vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28,
              "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0, "use_bias": False,
              "moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64, "n_shared_experts": 2,
              "moe_layer_start_index": 1, "moe_layer_end_index": -1, "decoder_sparse_step": 1},
        fixed={"moe_norm_min": (1e-12,)},
        renamed={"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts",
                 "moe_num_shared_experts": "n_shared_experts", "moe_layer_interval": "decoder_sparse_step"},
        is_interleaved=True,
        renormalises=True,
        has_choice_bias=True,
        names=TensorNames(choice_bias="moe_statics.e_score_correction_bias", choice_axes=(1,)),
        ignored=("rotary_emb.inv_freq", "model.mtp_"),
        **BY_USE_BIAS,
    ),
    # sinks, windows on every other layer, biases everywhere, experts published in MXFP4
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        keys={**USUAL, "num_hidden_layers": 36, "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
              "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
              "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "num_experts": 128,
              "layer_types": None, "attention_bias": True, "rope_theta": 150_000.0,
              "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                  "truncate": False, "original_max_position_embeddings": 4096,
                                  "rope_theta": 150_000.0}},
        fixed={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        renamed={"num_local_experts": "num_experts", "experts_per_token": "num_experts_per_tok"},
        activation=Activation.CLAMPED,
        has_sinks=True,
        full_every=2,
        renormalises=True,
        has_router_bias=True,
        has_expert_bias=True,
        names=TensorNames(router="router", is_transposed=True),
        reads_mxfp4=True,
        **BY_ATTENTION_BIAS,
    ),
    # latent attention; experts by groups, beside shared ones
    Family(
        name="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        keys={**LATENT, "vocab_size": 102_400, "moe_intermediate_size": 1407, "num_experts": 64, "n_shared_experts": 2,
              "num_experts_per_tok": None, "first_k_dense_replace": 0, "topk_method": "greedy"},
        fixed={"scoring_func": ("softmax",), "mlp_bias": (False,), "norm_topk_prob": (False, None)},
        renamed={"n_routed_experts": "num_experts"},
        is_interleaved=True,
        o_bias="attention_bias",
    ),
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        more_model_types=("kimi_k2",),
        keys={**LATENT, "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
              "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
              "num_key_value_heads": 128, "num_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
              "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
              "norm_topk_prob": True, "max_position_embeddings": 4096, "rope_interleave": True},
        fixed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        renamed={"n_routed_experts": "num_experts", "num_local_experts": "num_experts"},
        is_interleaved="rope_interleave",
        o_bias="attention_bias",
        **CHOSEN_BY_SIGMOID,
    ),
    # GLM-4.7-Flash
    Family(
        name="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        keys={**LATENT, "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
              "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
              "num_key_value_heads": 20, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
              "num_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
              "norm_topk_prob": True, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
              "rope_interleave": True, "first_k_dense_replace": 1, "mlp_layer_types": None},
        fixed={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
        renamed={"n_routed_experts": "num_experts", "num_local_experts": "num_experts"},
        is_interleaved="rope_interleave",
        o_bias="attention_bias",
        **CHOSEN_BY_SIGMOID,
    ),
    # Youtu-LLM: latent attention without experts
    Family(
        name="youtu",
        architectures=("YoutuForCausalLM",),
        keys={**LATENT, "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
              "num_key_value_heads": 16, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
              "rope_interleave": True},
        is_interleaved="rope_interleave",
        o_bias="attention_bias",
    ),
    # ---- priced, not run -------------------------------------------------------------------------------------------
    Family(
        name="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        keys={**USUAL, "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
              "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
              "rope_theta": 5_000_000.0, "num_experts_per_tok": 8, "num_experts": 256},
        fixed={"scoring_func": ("sigmoid",), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",)},
        renamed={"num_local_experts": "num_experts"},
        is_run=False,
        qk_norm=QkNorm.FULL,
        renormalises=True,
        scores=Scores.SIGMOID,
        has_choice_bias=True,
    ),
    Family(
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        keys={**USUAL, "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 30,
              "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
              "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "sliding_window": None, "use_bias": True,
              "tie_word_embeddings": True},
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        **NOT_GATED,
    ),
    Family(
        name="opt",
        architectures=("OPTForCausalLM",),
        keys={**GPT, "vocab_size": 50_272, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072,
              "num_attention_heads": 12, "hidden_act": "relu", "word_embed_proj_dim": None},
        fixed={"do_layer_norm_before": (True,), "enable_bias": (True,), "layer_norm_elementwise_affine": (True,),
               "_remove_final_layer_norm": (False,)},
        renamed={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        positions_offset=2,
        **NOT_GATED,
        **ALL_BIASES,
    ),
    Family(
        name="gpt2",
        architectures=("GPT2LMHeadModel",),
        keys={**GPT, "vocab_size": 50_257, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": None,
              "num_attention_heads": 12, "hidden_act": "gelu_new", "max_position_embeddings": 1024},
        fixed={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
               "add_cross_attention": (False,)},
        renamed={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                 "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
                 "activation_function": "hidden_act"},
        positions_offset=0,
        ignored=(".attn.bias", ".attn.masked_bias"),
        **NOT_GATED,
        **ALL_BIASES,
    ),
    Family(
        name="bloom",
        architectures=("BloomForCausalLM",),
        keys={**GPT, "vocab_size": 250_880, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": None,
              "num_attention_heads": 8, "hidden_act": "gelu_new"},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        renamed={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                 "seq_length": "max_position_embeddings"},
        has_embedding_norm=True,
        **NOT_GATED,
        **ALL_BIASES,
    ),
)  # fmt: skip

BY_ARCHITECTURE: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
BY_MODEL_TYPE: dict[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
# wrappers around decoders of more than one family, which the text_config names
WRAPPERS: tuple[str, ...] = ("Mistral3ForConditionalGeneration",)
SUPPORTED: tuple[str, ...] = (*(name for name, family in BY_ARCHITECTURE.items() if family.is_run), *WRAPPERS)
PRICED: tuple[str, ...] = tuple(name for name, family in BY_ARCHITECTURE.items() if not family.is_run)
