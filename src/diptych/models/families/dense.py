"""Families whose layers have grouped queries and one MLP: Llama, Qwen, Phi, OLMo, GLM, Cohere and their kin."""

from __future__ import annotations

from typing import Any

from diptych.models.families.family import Family, TensorNames
from diptych.models.families.shared import (
    BESIDE_PICTURES,
    BESIDE_VISION,
    BY_ATTENTION_BIAS,
    BY_USE_BIAS,
    COHERE,
    COHERE_LAYERS,
    EXAONE,
    EXAONE_LAYERS,
    FIXED_EPS,
    GRANITE,
    GRANITE_WINDOWED,
    GRANITE_WINDOWS,
    QWEN,
    QWEN_WINDOWS,
    USUAL,
)
from diptych.models.spec import Norms, QkNorm

GLM = {**USUAL, "vocab_size": 151_552, "intermediate_size": 13_696, "num_hidden_layers": 40, "head_dim": 128,
       "num_key_value_heads": 2, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-07,
       "partial_rotary_factor": 0.5, "attention_bias": True}  # fmt: skip
GLM4_NAMES = TensorNames(gate_up=("gate_up_proj",), norms={Norms.AROUND: (
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")})  # fmt: skip
LAYER_NORM_EPS = {"layer_norm_eps": "rms_norm_eps"}
# what files of Phi-4-mini and Phi-4-multimodal say of what their classes have no key for
PHI_4 = {**dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False, None)),
         **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1, None))}  # fmt: skip

APERTUS = {**USUAL, "vocab_size": 131_072, "intermediate_size": 14_336, "hidden_act": "xielu",
           "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, "attention_bias": False,
           "rope_parameters": {"rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0,
                               "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0}}  # fmt: skip
APERTUS_LAYERS: dict[str, Any] = {
    "fixed": {"mlp_bias": (False,), "qk_norm": (True,), "post_norm": (False,)},
    "qk_norm": QkNorm.HEAD, "is_gated": False,
    "names": TensorNames(gate_up=("up_proj",), norms={
        Norms.BEFORE: ("attention_layernorm", None, "feedforward_layernorm", None)}),
    **BY_ATTENTION_BIAS}  # fmt: skip
IN_XIELU = ("rotary_emb.inv_freq", "act_fn.beta", "act_fn.eps")

DENSE: tuple[Family, ...] = (
    # Llama 2, 3, 3.1, 3.2 and what copies them: SmolLM2, TinyLlama, Falcon 3, the bundled model
    Family(
        name="llama", architectures=("LlamaForCausalLM",),
        keys={**USUAL, "attention_bias": False, "mlp_bias": False},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    # DiffLlama: attention of a difference
    Family(
        name="diffllama", architectures=("DiffLlamaForCausalLM",),
        keys={**USUAL, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "rms_norm_eps": 1e-5,
              "attention_bias": False},
        unread=("lambda_std_dev",),
        differs=True,
        **BY_ATTENTION_BIAS,
    ),
    # Llama 3.2 Vision, whose layers that attend to pictures are left out
    Family(
        name="mllama_text_model", architectures=("MllamaForCausalLM", "MllamaForConditionalGeneration"),
        more_model_types=("mllama",),
        keys={**{key: value for key, value in USUAL.items() if key != "tie_word_embeddings"}, "vocab_size": 128_256,
              "intermediate_size": 14_336, "num_hidden_layers": 40, "num_key_value_heads": 8,
              "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
              "cross_attention_layers": None},
        fixed={"tie_word_embeddings": (False,)},  # the table has rows that the head has not
        spare_embeddings=8,
    ),
    # Nemotron NAS (Super 49B, Ultra 253B, 51B): Llamas whose layers a search has taken apart; DeciLM 7B
    Family(
        name="nemotron-nas", architectures=("DeciLMForCausalLM",),
        more_model_types=("deci",),
        keys={**USUAL, "attention_bias": False, "mlp_bias": False, "block_configs": None,
              "num_key_value_heads_per_layer": None},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    # sliding_window null: full attention (v0.2 on); absent: 4096 on every layer
    Family(
        name="mistral", architectures=("MistralForCausalLM",),
        keys={**USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "sliding_window": 4096},
        **BESIDE_VISION,
    ),
    Family(
        name="ministral", architectures=("MinistralForCausalLM",),
        keys={**USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "sliding_window": 4096, "layer_types": None},
    ),
    # queries are scaled by their position, by steps of original_max_position_embeddings
    Family(
        name="ministral3", architectures=("Ministral3ForCausalLM",),
        keys={**USUAL, "vocab_size": 131_072, "intermediate_size": 14_336, "num_hidden_layers": 34,
              "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
              "sliding_window": None, "rope_parameters": {
                  "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                  "original_max_position_embeddings": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "llama_4_scaling_beta": 0.1}},
        **BESIDE_VISION,
    ),
    Family(
        name="internlm3", architectures=("InternLM3ForCausalLM",),
        built_as="LlamaForCausalLM",
        keys={**USUAL, "vocab_size": 128_512, "intermediate_size": 10_240, "num_hidden_layers": 48, "head_dim": 128,
              "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "attention_bias": False,
              "mlp_bias": False},
        renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        qkv_bias="attention_bias", o_bias="mlp_bias", mlp_bias="mlp_bias",
    ),
    Family(
        name="iquestcoder", architectures=("IQuestCoderForCausalLM",),
        built_as="LlamaForCausalLM",
        keys={**USUAL, "vocab_size": 76_800, "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 80,
              "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        fixed={"clip_qkv": (None,), "use_sliding_window": (False, None)},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    # InternLM 2 and 2.5: q, k and v in one projection, by KV head
    Family(
        name="internlm2", architectures=("InternLM2ForCausalLM",),
        more_model_types=("internlm",),  # as its first files say
        keys={**USUAL, "vocab_size": 103_168, "attention_bias": True},
        renamed={"bias": "attention_bias"},
        names=TensorNames(embedding="tok_embeddings", head="output", attention="attention", qkv=("wqkv",), qkv_by_head=True,
                          o="wo", mlp=("feed_forward.",), gate_up=("w1", "w3"), down="w2",
                          norms={Norms.BEFORE: ("attention_norm", None, "ffn_norm", None)}),
        **BY_ATTENTION_BIAS,
    ),
    # openPangu 1B and 7B: biases on all projections of attention
    Family(
        name="PanguEmbedded", architectures=("PanguEmbeddedForCausalLM",),
        keys={**USUAL, "vocab_size": 153_376, "intermediate_size": 12_800, "num_hidden_layers": 34, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 32_768, "rope_theta": 16_000_000.0, "attention_bias": True},
        renamed={"bias": "attention_bias"},
        **BY_ATTENTION_BIAS,
    ),
    # neighbouring dimensions turn together
    Family(
        name="helium", architectures=("HeliumForCausalLM",),
        keys={**USUAL, "vocab_size": 48_000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
              "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-8, "rope_theta": 100_000.0, "attention_bias": False, "mlp_bias": False},
        is_interleaved=True,
        qkv_bias="attention_bias", mlp_bias="mlp_bias",
    ),
    # MiniCPM 1 to 4: embeddings, what layers add, and logits are scaled
    Family(
        name="minicpm", architectures=("MiniCPMForCausalLM",),
        keys={**USUAL, "tie_word_embeddings": True, "attention_bias": False, "embedding_multiplier": 1.0, "scale_depth": 1.0,
              "dim_model_base": 1,
              # as GGUF files have what those two make
              "residual_multiplier": None, "logits_scaling": None},
        fixed={"sparse_config": (None,)},
        unread=("mup_denominator",),  # of its draft model
        renamed={"scale_emb": "embedding_multiplier"},
        **BY_ATTENTION_BIAS,
    ),
    # EXAONE 3, 3.5 and Deep: a Llama by other names
    Family(
        name="exaone", architectures=("ExaoneForCausalLM",), built_as="LlamaForCausalLM",
        keys={**USUAL, "vocab_size": 102_400, "rms_norm_eps": 1e-5, "intermediate_size": 14_336, "num_key_value_heads": 8,
              "max_position_embeddings": 4096, "rope_theta": 500_000.0},
        renamed={"num_layers": "num_hidden_layers", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"},
        names=TensorNames(embedding="wte", layers="h", final_norm="ln_f", attention="attn.attention", o="out_proj",
                          gate_up=("c_fc_0", "c_fc_1"), down="c_proj", norms={Norms.BEFORE: ("ln_1", None, "ln_2", None)}),
        prefixes=("transformer.",),
    ),
    # Qwen2, Qwen2.5: biases on q, k and v; a window on the later layers when switched on
    Family(name="qwen2", architectures=("Qwen2ForCausalLM",), keys={**QWEN, **QWEN_WINDOWS}, qkv_bias=True),
    # MiMo 7B, beside a layer that drafts
    Family(
        name="mimo", architectures=("MiMoForCausalLM",),
        keys={**QWEN, **QWEN_WINDOWS},
        qkv_bias=True,
        ignored=("rotary_emb.inv_freq", "mtp_layers."),
    ),
    Family(
        name="qwen3", architectures=("Qwen3ForCausalLM",),
        keys={**QWEN, **QWEN_WINDOWS, "head_dim": 128, "attention_bias": False},
        qk_norm=QkNorm.HEAD,
        **BY_ATTENTION_BIAS,
    ),
    # the text parts of Qwen2-VL, 2.5-VL and 3-VL; of a token of text the positions of pictures' three axes are one
    *(
        Family(
            name=f"{kind}_text", architectures=(f"{written}ForConditionalGeneration",),
            more_model_types=(kind,),
            keys={**QWEN, **QWEN_WINDOWS, "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
                  "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                  "max_window_layers": 80, "rope_theta": 1_000_000.0},
            qkv_bias=True,
            **BESIDE_PICTURES,
        )
        for kind, written in (("qwen2_vl", "Qwen2VL"), ("qwen2_5_vl", "Qwen2_5_VL"))
    ),
    Family(
        name="qwen3_vl_text", architectures=("Qwen3VLForConditionalGeneration",),
        more_model_types=("qwen3_vl",),
        keys={**USUAL, "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "head_dim": 128,
              "max_position_embeddings": 128_000, "rope_theta": 500_000.0, "attention_bias": False},
        qk_norm=QkNorm.HEAD,
        **BESIDE_PICTURES, **BY_ATTENTION_BIAS,
    ),
    # Phi-3, Phi-3.5, Phi-4; its old configs call longrope "su" or "yarn"
    Family(
        name="phi3", architectures=("Phi3ForCausalLM",),
        keys={**USUAL, "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
              "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
              "sliding_window": None, "partial_rotary_factor": 1.0},
        fixed=PHI_4,
        longrope_names=("su", "yarn"),
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    ),
    # beside towers in a flat config; published files hold adapters for pictures and for sound, which text does not pass
    Family(
        name="phi4_multimodal", architectures=("Phi4MultimodalForCausalLM", "Phi4MMForCausalLM"),
        more_model_types=("phi4mm",),
        keys={**USUAL, "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": 8,
              "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
              "sliding_window": None, "partial_rotary_factor": 1.0},
        fixed=PHI_4,
        unread=("audio_config", "embd_layer", "img_processor", "audio_processor", "vision_lora", "speech_lora"),
        longrope_names=("su", "yarn"),
        names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",), base="base_layer"),
        ignored=("rotary_emb.inv_freq", "embed_tokens_extend.", ".lora_A.", ".lora_B."),
    ),
    # norms have no weights; of some sizes q, k and v are clipped
    Family(
        name="olmo", architectures=("OlmoForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "rms_norm_eps": 1e-5, "attention_bias": False, "clip_qkv": None},
        fixed=FIXED_EPS,
        centres_norms=True, has_norm_weight=False,
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="olmo2", architectures=("Olmo2ForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "rms_norm_eps": 1e-5, "attention_bias": False},
        norms=Norms.AFTER,
        qk_norm=QkNorm.FULL,
        **BY_ATTENTION_BIAS,
    ),
    # windowed layers turn by the base alone
    Family(
        name="olmo3", architectures=("Olmo3ForCausalLM",),
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
        name="exaone4", architectures=("Exaone4ForCausalLM",),
        more_model_types=("exaone4_5_text",),  # as EXAONE 4.5 was published
        keys=EXAONE,
        norms=Norms.AFTER,
        ignored=("rotary_emb.inv_freq", "mtp."),
        **EXAONE_LAYERS,
    ),
    # windows but on every fourth layer from the first on
    Family(
        name="cwm", architectures=("CwmForCausalLM",),
        keys={**USUAL, "vocab_size": 128_256, "hidden_size": 6144, "intermediate_size": 21_504, "num_hidden_layers": 64,
              "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": 8192, "layer_types": None,
              "rope_parameters": {"rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0,
                                  "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                  "original_max_position_embeddings": 8192}},
        fixed={"mlp_bias": (False,), "attention_bias": (False, None)},
        full_every=4, full_first=True,
    ),
    # no rotary positions where no_rope_layers holds 0 (1 is for layers that do turn)
    Family(
        name="smollm3", architectures=("SmolLM3ForCausalLM",),
        keys={**USUAL, "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
              "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rope_theta": 2_000_000.0,
              "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
              "no_rope_layer_interval": 4, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    # Granite 3, dense and with experts: scaled at the embedding, the scores, each addition to the stream, the logits
    Family(
        name="granite", architectures=("GraniteForCausalLM",), more_model_types=("granite4_vision_text",),
        keys={**USUAL, **GRANITE, "mlp_bias": False},
        mlp_bias="mlp_bias",
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="granite_swa", architectures=("GraniteSWAForCausalLM",),
        keys={**USUAL, **GRANITE, **GRANITE_WINDOWS, "vocab_size": 100_352, "hidden_size": 2560, "intermediate_size": 8192,
              "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 4,
              "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "mlp_bias": False},
        mlp_bias="mlp_bias",
        **GRANITE_WINDOWED,
        **BY_ATTENTION_BIAS,
    ),
    # Granite's scales, logits multiplied, norms behind attention and MLP
    Family(
        name="hyperclovax", architectures=("HyperCLOVAXForCausalLM",),
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
        name="glm", architectures=("GlmForCausalLM",),
        keys=GLM,
        is_interleaved=True,
        qkv_bias="attention_bias",
        names=TensorNames(gate_up=("gate_up_proj",)),
    ),
    Family(
        name="glm4", architectures=("Glm4ForCausalLM",),
        keys=GLM,
        norms=Norms.AROUND,
        is_interleaved=True,
        qkv_bias="attention_bias",
        names=GLM4_NAMES,
    ),
    # the text of GLM-4.1V and 4.6V Flash; GGUF files have their rows of q and k in the other order
    Family(
        name="glm4v_text", architectures=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
        more_model_types=("glm4v", "glm46v"),
        keys={**USUAL, "vocab_size": 151_552, "intermediate_size": 13_696, "num_hidden_layers": 40,
              "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
              "partial_rotary_factor": 1.0, "rope_interleave": True},
        fixed={"attention_bias": (None, True)},
        norms=Norms.AROUND,
        is_interleaved="rope_interleave",
        qkv_bias=True,
        names=GLM4_NAMES,
        **BESIDE_PICTURES,
    ),
    # Command-R and Aya; R+ norms each head of q and k by weights of its own
    Family(
        name="cohere", architectures=("CohereForCausalLM",),
        keys={**COHERE, "rope_theta": 500_000.0, "use_qk_norm": False},
        renamed=LAYER_NORM_EPS,
        qk_norm=QkNorm.HEADS, qk_norm_key="use_qk_norm",
        **COHERE_LAYERS,
    ),
    # Command-R7B and A: layers that attend to everything have no positions
    Family(
        name="cohere2", architectures=("Cohere2ForCausalLM",),
        keys={**COHERE, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        renamed={"_sliding_window_pattern": "sliding_window_pattern", **LAYER_NORM_EPS},
        # what published files have from before the class was written
        fixed={"position_embedding_type": ("rope_gptj", None), "rotary_pct": (1.0, None), "use_qk_norm": (False, None),
               "order_of_interleaved_layers": ("local_attn_first", None), "use_gated_activation": (True, None),
               "use_parallel_block": (True, None), "use_embedding_sharing": (True, None)},
        unread=("layer_switch", "use_parallel_embedding"),
        turns_windowed_only=True,
        **COHERE_LAYERS,
    ),
    # the text of North Micro Vision: halves of a head turn together, by settings of each kind of layers, or not at all
    Family(
        name="cohere_compass_text", architectures=("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
        more_model_types=("cohere_compass",),
        keys={**COHERE, "logit_scale": None, "sliding_window": 4096, "layer_types": None},
        renamed=LAYER_NORM_EPS,
        fixed={"is_causal": (True, None), "norm_type": ("layer_norm", None), "transformer_block_type": ("parallel", None),
               "rope_style": ("split", None)},
        # what its class does not look at, or only a head of labels does (`pooling`)
        unread=("sliding_window_pattern", "_sliding_window_pattern", "rope_on_all_layers", "pooling"),
        full_every=1, turns_by_kind=True,
        norms=Norms.PARALLEL,
        centres_norms=True,
        **BESIDE_PICTURES, **BY_ATTENTION_BIAS,
    ),
    # StableLM 2 1.6B and 3B; the 12B norms each head of q and k by weights of its own
    Family(
        name="stablelm", architectures=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
        more_model_types=("stablelm_epoch",),  # with the keys of its first files
        keys={**USUAL, "vocab_size": 50_304, "intermediate_size": 6912, "hidden_size": 2560, "num_key_value_heads": 32,
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
              "use_qkv_bias": False, "use_parallel_residual": False, "qk_layernorm": False},
        qk_norm=QkNorm.HEADS, qk_norm_key="qk_layernorm",
        names=TensorNames(q_norm="q_layernorm.norms.{}", k_norm="k_layernorm.norms.{}"),
        fixed={"rotary_scaling_factor": (1.0,)},
        unread=("num_heads",),  # beside num_attention_heads
        renamed={**LAYER_NORM_EPS, "norm_eps": "rms_norm_eps", "rope_pct": "partial_rotary_factor"},
        parallel_key="use_parallel_residual",
        centres_norms=True,
        has_norm_bias=True,
        qkv_bias="use_qkv_bias",
    ),
    Family(
        name="seed_oss", architectures=("SeedOssForCausalLM",),
        keys={**USUAL, "vocab_size": 155_136, "intermediate_size": 27_648, "num_hidden_layers": 64, "head_dim": 128,
              "num_attention_heads": 80, "num_key_value_heads": 8, "max_position_embeddings": 524_288,
              "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        qkv_bias="attention_bias", o_bias="attention_out_bias", mlp_bias="mlp_bias",
    ),
    Family(
        name="ernie4_5", architectures=("Ernie4_5ForCausalLM",),
        keys={**USUAL, "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
              "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0, "use_bias": False},
        is_interleaved=True,
        **BY_USE_BIAS,
    ),
    # MLPs without a gate
    Family(
        name="starcoder2", architectures=("Starcoder2ForCausalLM",),
        keys={**USUAL, "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 30,
              "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None, "use_bias": True,
              "tie_word_embeddings": True},
        renamed={"norm_epsilon": "rms_norm_eps"},
        unread=("activation_function", "layer_norm_epsilon"),  # GPT-BigCode's, in published files of the 3B
        centres_norms=True, has_norm_bias=True,
        is_gated=False,
        names=TensorNames(gate_up=("c_fc",), down="c_proj"),
        **BY_USE_BIAS,
    ),
    # norm weights are stored as w - 1, half of each head turns
    Family(
        name="nemotron", architectures=("NemotronForCausalLM",),
        keys={**USUAL, "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576, "num_attention_heads": 48,
              "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
              "attention_bias": False, "mlp_bias": False},
        renamed={"norm_eps": "rms_norm_eps"},
        norm_offset=1.0, centres_norms=True, has_norm_bias=True,
        is_gated=False, mlp_bias="mlp_bias",
        names=TensorNames(gate_up=("up_proj",)),
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="arcee", architectures=("ArceeForCausalLM",),
        keys={**USUAL, "hidden_size": 2560, "intermediate_size": 18_432, "hidden_act": "relu2",
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        is_gated=False, mlp_bias="mlp_bias",
        names=TensorNames(gate_up=("up_proj",)),
        **BY_ATTENTION_BIAS,
    ),
    # an activation with two numbers for each layer (xIELU)
    Family(name="apertus", architectures=("ApertusForCausalLM",), keys=APERTUS, ignored=IN_XIELU, **APERTUS_LAYERS),
    # the text of Apertus 1.5, whose pictures and sounds are words that a head may be without
    Family(
        name="apertus1p5_text", more_model_types=("apertus1p5",),
        architectures=("Apertus1p5ForConditionalGeneration", "Apertus1p5TextForCausalLM"),
        keys={**APERTUS, "vocab_size": 266_752, "output_vocab_size": None},
        prefixes=("model.", "model.language_model."),
        ignored=(*IN_XIELU, "vision_tokenizer.", "audio_tokenizer."),
        **APERTUS_LAYERS,
    ),
    Family(
        name="jais2", architectures=("Jais2ForCausalLM",),
        keys={**USUAL, "vocab_size": 150_272, "hidden_size": 3328, "intermediate_size": 26_624, "num_attention_heads": 26,
              "hidden_act": "relu2", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
              "attention_bias": True, "mlp_bias": True},
        renamed=LAYER_NORM_EPS,
        centres_norms=True, has_norm_bias=True,
        is_gated=False, mlp_bias="mlp_bias",
        names=TensorNames(gate_up=("up_proj",)),
        **BY_ATTENTION_BIAS,
    ),
    # norms before o and down; its weights are ternary, by `quantization_config`
    Family(
        name="bitnet", architectures=("BitNetForCausalLM",),
        keys={**USUAL, "vocab_size": 128_256, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30,
              "num_attention_heads": 20, "num_key_value_heads": 5, "hidden_act": "relu2", "rms_norm_eps": 1e-5,
              "rope_theta": 500_000.0, "attention_bias": False},
        has_inner_norms=True,
        **BY_ATTENTION_BIAS,
    ),
    # queries and keys are normed behind their turn
    Family(
        name="hunyuan_v1_dense", architectures=("HunYuanDenseV1ForCausalLM",),
        keys={**USUAL, "vocab_size": 290_943, "rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"use_qk_norm": (True, None), "use_cla": (False, None), "mlp_bias": (False, None),
               **dict.fromkeys(("num_experts", "num_shared_expert", "moe_topk"), (1, 0, None))},
        unread=("attention_head_dim",),  # published files repeat the width of a head so
        qk_norm=QkNorm.TURNED,
        names=TensorNames(q_norm="query_layernorm", k_norm="key_layernorm"),
        **BY_ATTENTION_BIAS,
    ),
)  # fmt: skip
