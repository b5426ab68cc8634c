"""GGUF architectures as data: what `general.architecture` names, each an entry in the words of `architecture`.

Sources: `conversion/*.py` and `src/models/*.cpp` of llama.cpp, release of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.models.gguf.architecture import (
    AFTER,
    AROUND,
    AROUND_AFMOE,
    AROUND_GLM,
    BEHIND,
    BESIDE_MAMBA,
    BLOCKS,
    BY_KEY,
    CAPPED,
    CONVOLUTIONS,
    EXPERT_WIDTH,
    EXPERTS,
    GROUPED,
    LATENT,
    LAYER_NORM,
    MAMBA,
    NO_HEADS,
    OPERATORS,
    PICTURES,
    SCALED,
    SELECTIVE,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX,
    STATES,
    UNGROUPED,
    WINDOWED,
    GgufArchitecture,
)
from diptych.models.gguf.file import GgufArray, GgufFile
from diptych.models.refused import LISTED, not_supported, reason_for

Q_BIAS, O_BIAS, UP_BIAS, Q_NORM = "attn_q.bias", "attn_output.bias", "ffn_up.bias", "attn_q_norm.weight"
WITH_STATES: dict[str, Any] = {"norms": BEHIND, "norm_added": 1.0, "present": {"attention_bias": Q_BIAS}}
LLAMA = GgufArchitecture(
    architecture="LlamaForCausalLM", is_permuted=True, present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS}
)
LLAMA_UNMOVED = replace(LLAMA, is_permuted=False)
MIXTRAL = GgufArchitecture(architecture="MixtralForCausalLM", keys=EXPERTS, is_permuted=True)
GEMMA: dict[str, Any] = {"keys": {**WINDOWED, **CAPPED}, "norms": AROUND, "norm_added": 1.0}
GEMMA3 = GgufArchitecture(architecture="Gemma3ForCausalLM", wide_layers=62, window_every=6, **GEMMA)
# what bends its gates, and how windowed layers turn, `gguf` reads itself
MODERN_BERT = GgufArchitecture(
    architecture="ModernBertModel",
    keys={"attention.sliding_window": "local_attention", "attention.sliding_window_pattern": "sliding_window_pattern",
          **dict.fromkeys(("hidden_activation", "attention.layer_norm_rms_epsilon", "classifier.pooling_type"), "")},
    eps=LAYER_NORM,
    values={"attention.causal": (False,)},
    norms={"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"},
)  # fmt: skip
# which values of gates are cut, how wide its own embeddings and branches are, `gguf` reads itself
GEMMA3N = GgufArchitecture(
    architecture="Gemma3nForCausalLM",
    keys={**WINDOWED, **CAPPED, "attn_logit_softcapping": "", "activation_sparsity_scale": "",
          "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs",
          "embedding_length_per_layer_input": "hidden_size_per_layer_input",
          "attention.shared_kv_layers": "num_kv_shared_layers"},
    norms=AROUND,
    by_layer=("feed_forward_length",),
    window_every=5,
)  # fmt: skip
# usual widths are those of layers that attend to everything; how they turn, and whether keys are values, `gguf` reads itself
GEMMA4 = GgufArchitecture(
    architecture="Gemma4ForCausalLM",
    keys={**WINDOWED, "final_logit_softcapping": "final_logit_softcapping", "attention.key_length": "global_head_dim",
          "attention.key_length_swa": "head_dim", "attention.value_length_swa": "", "rope.dimension_count_swa": "",
          "embedding_length_per_layer_input": "hidden_size_per_layer_input",
          "attention.shared_kv_layers": "num_kv_shared_layers", **EXPERTS, **EXPERT_WIDTH},
    norms={**AROUND, "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
           "post_feedforward_layernorm_2": "post_ffw_norm_2"},
    by_layer=("feed_forward_length", "attention.head_count_kv"),
    window_every=6,
)  # fmt: skip
GEMMA_EMBEDDING = replace(
    GEMMA3,
    keys={**GEMMA3.keys, **{f"dense_{i}_feat_{side}": "" for i in (2, 3) for side in ("in", "out")}},
    fixed={"use_bidirectional_attention": True},
    values={"attention.causal": (False, True)},
    dense=("dense_2.weight", "dense_3.weight"),
)
# a Granite without positions says so where others say how they were trained
GRANITE: dict[str, Any] = {"is_permuted": True, "values": {"rope.scaling.finetuned": (True,)}}
DEEPSEEK_V2 = GgufArchitecture(
    architecture="DeepseekV2ForCausalLM",
    keys={**GROUPED, **LATENT},
    fixed={**UNGROUPED, "q_lora_rank": None},
    values={"expert_gating_func": (0, SOFTMAX)},
    present={"attention_bias": "attn_kv_a_mqa.bias"},
)
MISTRAL4 = replace(
    DEEPSEEK_V2,
    architecture="Mistral4ForCausalLM",
    keys={**DEEPSEEK_V2.keys, "attention.temperature_scale": ""},
)
YOUTU = GgufArchitecture(
    architecture="YoutuForCausalLM",
    keys={**LATENT, **dict.fromkeys(("expert_feed_forward_length", "leading_dense_block_count"), "")},
    fixed={"q_lora_rank": None},
    present={"attention_bias": "attn_kv_a_mqa.bias"},
)
# what it scales stands in no file: in llama.cpp as in the class
MINICPM3 = GgufArchitecture(architecture="MiniCPM3ForCausalLM", keys=LATENT, fixed={"q_lora_rank": None})
# the norm of attention is called so where the MLP has one of its own
FALCON = GgufArchitecture(
    architecture="FalconForCausalLM",
    eps=LAYER_NORM,
    norms={"input_layernorm": "attn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"},
)
AS_GPT2: dict[str, Any] = {"eps": LAYER_NORM, "norms": {"ln_1": "attn_norm", "ln_2": "ffn_norm"}}
OLMO2 = GgufArchitecture(architecture="Olmo2ForCausalLM", norms=AFTER)
OLMO3 = GgufArchitecture(architecture="Olmo3ForCausalLM", norms=AFTER, keys=WINDOWED, window_every=4)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, architecture="DeepseekV3ForCausalLM", values={"expert_gating_func": (0, SIGMOID)})
# chunks, layers without positions and how their queries are scaled stand in no file: in llama.cpp as in the class
LLAMA4 = GgufArchitecture(
    architecture="Llama4ForCausalLM",
    keys={**EXPERTS, "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
          "interleave_moe_layer_step": "interleave_moe_layer_step"},
    values={"attention.sliding_window": (8192,), "attention.sliding_window_pattern": (4,), "expert_gating_func": (0, SIGMOID)},
)  # fmt: skip
# llama.cpp knows by the number of experts that its queries and keys have no norms
MAVERICK, MAVERICK_EXPERTS = replace(LLAMA4, fixed={"use_qk_norm": False}), 128
GLM4 = GgufArchitecture(architecture="Glm4ForCausalLM", norms=AROUND_GLM, present={"attention_bias": Q_BIAS})
# whose rows of q and k lie as llama.cpp turns three axes: those half of the rotated ones apart together
GLM4V = GgufArchitecture(
    architecture="Glm4vForConditionalGeneration", keys=PICTURES, norms=AROUND_GLM, fixed={"rope_interleave": False}
)
NEMOTRON_H = GgufArchitecture(
    architecture="NemotronHForCausalLM",
    keys=BLOCKS,
    values={"rope.scaling.finetuned": (False,), "expert_gating_func": (0, SIGMOID)},
    norms={"norm": "attn_norm"},
    eps=LAYER_NORM,  # beside which a file may have it by the usual name, too
    present={"mamba_conv_bias": "ssm_conv1d.bias"},
    is_permuted=True,
)
# the same architecture with norms that have no weights, of the epsilon of all others
MAMBA_1 = GgufArchitecture(
    architecture="MambaForCausalLM",
    keys={**SELECTIVE, **NO_HEADS, "ssm.inner_size": "mamba_d_ssm", "ssm.dt_b_c_rms": ""},
    fixed={"num_attention_heads": 1},
    norms={"norm": "attn_norm"},
    present={"mamba_conv_bias": "ssm_conv1d.bias"},
)
FALCON_MAMBA = replace(MAMBA_1, architecture="FalconMambaForCausalLM")
# of these `layers` reads what differs from layer to layer
GLM_DSA = replace(
    DEEPSEEK_V3,
    architecture="GlmMoeDsaForCausalLM",
    keys={**DEEPSEEK_V3.keys, "attention.indexer.head_count": "index_n_heads", "attention.indexer.types": "",
          "attention.indexer.key_length": "index_head_dim", "attention.indexer.top_k": "index_topk"},
)  # fmt: skip
# a file's window is without the token that sees it, as that of the published configs
MIMO2 = GgufArchitecture(
    architecture="MiMoV2FlashForCausalLM",
    keys={**GROUPED, "attention.sliding_window": "sliding_window_size", "attention.value_scale": "attention_value_scale",
          "leading_dense_block_count": ""},
    fixed={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    values={"expert_gating_func": (0, SIGMOID)},
    present={"attention_bias": Q_BIAS},
    has_windowed_heads=True,
)  # fmt: skip
STEP35 = GgufArchitecture(
    architecture="Step3p7ForConditionalGeneration",
    keys={**GROUPED, **SHARED_WIDTH, **WINDOWED, "expert_group_count": "", "expert_group_used_count": "",
          "expert_shared_count": "", "expert_weights_norm": "", "swiglu_clamp_exp": "", "swiglu_clamp_shexp": ""},
    values={"expert_gating_func": (0, SIGMOID), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
            "expert_weights_norm": (True,), "moe_every_n_layers": (0, 1)},
    present={"attention_bias": Q_BIAS},
    norm_added=1.0,
    has_windowed_heads=True,
)  # fmt: skip
DECI = GgufArchitecture(
    architecture="DeciLMForCausalLM", is_permuted=True, present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS}
)
# what bends its activations lies in the metadata (`layers.number_of_curve`)
APERTUS = GgufArchitecture(
    architecture="ApertusForCausalLM",
    norms={"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    present={"attention_bias": Q_BIAS},
)
ARCHITECTURES: dict[str, GgufArchitecture] = {
    # Llama 1 to 3, Mistral, and what copies them; with experts it is Mixtral
    "llama": LLAMA,
    "internlm2": LLAMA,
    # the same by names of their own, and rows as they are
    "exaone": LLAMA_UNMOVED,
    "pangu-embedded": LLAMA_UNMOVED,
    "qwen2": GgufArchitecture(architecture="Qwen2ForCausalLM"),
    "qwen2moe": GgufArchitecture(
        architecture="Qwen2MoeForCausalLM",
        keys={**EXPERTS, **EXPERT_WIDTH, **SHARED_WIDTH},
        present={"qkv_bias": Q_BIAS},
    ),
    "qwen3": GgufArchitecture(architecture="Qwen3ForCausalLM"),
    # llama.cpp scales the chosen experts to sum to 1, as all published models do
    "qwen3moe": GgufArchitecture(
        architecture="Qwen3MoeForCausalLM", keys={**EXPERTS, **EXPERT_WIDTH}, fixed={"norm_topk_prob": True}
    ),
    "qwen3next": GgufArchitecture(
        architecture="Qwen3NextForCausalLM",
        keys={**EXPERTS, **EXPERT_WIDTH, **SHARED_WIDTH, **STATES},
        fixed={"norm_topk_prob": True},
        **WITH_STATES,
    ),
    "qwen35": GgufArchitecture(architecture="Qwen3_5ForCausalLM", keys=STATES, is_tiled=True, **WITH_STATES),
    "qwen35moe": GgufArchitecture(
        architecture="Qwen3_5MoeForCausalLM",
        keys={**EXPERTS, **EXPERT_WIDTH, **SHARED_WIDTH, **STATES},
        is_tiled=True,
        **WITH_STATES,
    ),
    # the text parts; how many positions of pictures turn which pairs, and into how many layers pictures go
    "qwen2vl": GgufArchitecture(architecture="Qwen2VLForConditionalGeneration", keys=PICTURES),
    "qwen3vl": GgufArchitecture(architecture="Qwen3VLForConditionalGeneration", keys=PICTURES),
    "qwen3vlmoe": GgufArchitecture(
        architecture="Qwen3VLMoeForConditionalGeneration", keys={**EXPERTS, **EXPERT_WIDTH, **PICTURES}
    ),
    "paddleocr": GgufArchitecture(
        architecture="PaddleOCRVLForConditionalGeneration", keys=PICTURES, present={"use_bias": Q_BIAS}
    ),
    "hunyuan_vl": GgufArchitecture(
        architecture="HunYuanVLForConditionalGeneration", keys=PICTURES, present={"attention_bias": Q_BIAS}
    ),
    "jais2": GgufArchitecture(
        architecture="Jais2ForCausalLM", eps=LAYER_NORM, present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS}
    ),
    "phi3": GgufArchitecture(architecture="Phi3ForCausalLM", keys=WINDOWED),
    "gemma": GgufArchitecture(architecture="GemmaForCausalLM", norm_added=1.0),
    # wide_layers: the one size whose scores are scaled by the width of the model over its heads (llama.cpp knows it so too)
    "gemma2": GgufArchitecture(architecture="Gemma2ForCausalLM", wide_layers=46, window_every=2, **GEMMA),
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma-embedding": GEMMA_EMBEDDING,
    # with windows it is OLMo 3
    "olmo2": OLMO2,
    "olmoe": GgufArchitecture(architecture="OlmoeForCausalLM", keys=EXPERTS),
    "exaone4": GgufArchitecture(architecture="Exaone4ForCausalLM", norms=AFTER, keys=WINDOWED, window_every=4),
    "exaone-moe": GgufArchitecture(
        architecture="ExaoneMoeForCausalLM",
        keys={**WINDOWED, **GROUPED, "expert_shared_feed_forward_length": ""},
        fixed=UNGROUPED,
        values={"expert_gating_func": (0, SIGMOID)},
        window_every=4,
    ),
    "mistral3": GgufArchitecture(
        architecture="Ministral3ForCausalLM",
        keys=dict.fromkeys(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"), ""),
        is_permuted=True,
    ),
    "dots1": GgufArchitecture(
        architecture="Dots1ForCausalLM",
        keys=GROUPED,
        fixed={**UNGROUPED, "sliding_window": None},
        values={"expert_gating_func": (0, SIGMOID)},
        present={"attention_bias": Q_BIAS},
    ),
    # that embeddings are scaled stands in no file: llama.cpp does it to all
    "afmoe": GgufArchitecture(
        architecture="AfmoeForCausalLM",
        keys={**WINDOWED, **EXPERTS, **EXPERT_WIDTH, "expert_shared_count": "n_shared_experts",
              "expert_weights_scale": "routed_scaling_factor", "leading_dense_block_count": "first_k_dense_replace"},
        fixed={"mup_enabled": True, "n_shared_experts": 0, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
        values={"expert_gating_func": (0, SIGMOID), "expert_weights_norm": (True,)},
        norms=AROUND_AFMOE,
        window_every=4,
    ),
    "smollm3": GgufArchitecture(architecture="SmolLM3ForCausalLM", is_permuted=True),
    "granite": GgufArchitecture(
        architecture="GraniteForCausalLM", keys=SCALED, present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS}, **GRANITE
    ),
    "granitemoe": GgufArchitecture(
        architecture="GraniteMoeForCausalLM", keys={**SCALED, **EXPERTS}, present={"attention_bias": Q_BIAS}, **GRANITE
    ),
    "granitehybrid": GgufArchitecture(
        architecture="GraniteMoeHybridForCausalLM",
        keys={**SCALED, **EXPERTS, **SHARED_WIDTH, **MAMBA},
        present={"attention_bias": Q_BIAS, "mamba_conv_bias": "ssm_conv1d.bias"},
        is_permuted=True,
    ),
    "kimi-linear": GgufArchitecture(
        architecture="KimiLinearForCausalLM",
        keys={**GROUPED, **LATENT, **BY_KEY},
        fixed={**UNGROUPED, "norm_topk_prob": True, "q_lora_rank": None},
        values={"expert_gating_func": (0, SIGMOID)},
    ),
    # the converter multiplies weights by what the config multiplies by
    "falcon-h1": GgufArchitecture(
        architecture="FalconH1ForCausalLM",
        keys=BESIDE_MAMBA,
        fixed={"mamba_norm_before_gate": False},
        norms={"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"},
        present={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_rms_norm": "ssm_norm.weight"},
    ),
    "jamba": GgufArchitecture(
        architecture="JambaForCausalLM",
        keys={**SELECTIVE, **EXPERTS, "ssm.inner_size": "", "attention.head_count_kv": ""},
        norms={"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"},
        present={"mamba_conv_bias": "ssm_conv1d.bias"},
    ),
    "mamba": MAMBA_1,
    "mamba2": GgufArchitecture(
        architecture="Mamba2ForCausalLM",
        keys={**MAMBA, **NO_HEADS},
        fixed=MAMBA_1.fixed,
        norms=MAMBA_1.norms,
        present=MAMBA_1.present,
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "lfm2": GgufArchitecture(
        architecture="Lfm2ForCausalLM", keys=CONVOLUTIONS, fixed={"block_auto_adjust_ff_dim": False}, norms=OPERATORS
    ),
    "lfm2moe": GgufArchitecture(
        architecture="Lfm2MoeForCausalLM",
        keys={**CONVOLUTIONS, **EXPERTS, **EXPERT_WIDTH, "leading_dense_block_count": "first_k_dense_replace"},
        fixed={"norm_topk_prob": True},
        values={"expert_gating_func": (SIGMOID,)},
        present={"use_expert_bias": "exp_probs_b.bias"},
        norms=OPERATORS,
    ),
    "chatglm": GgufArchitecture(architecture="GlmForCausalLM", present={"attention_bias": Q_BIAS}),
    "glm4": GLM4,
    "glm4moe": GgufArchitecture(
        architecture="Glm4MoeForCausalLM",
        keys={**GROUPED, **PICTURES},
        fixed=UNGROUPED,
        values={"expert_gating_func": (0, SIGMOID)},
        norms=BEHIND,
        present={"attention_bias": Q_BIAS, "use_qk_norm": Q_NORM},
    ),
    "command-r": GgufArchitecture(
        architecture="CohereForCausalLM",
        keys={"logit_scale": "logit_scale"},
        eps=LAYER_NORM,
        present={"attention_bias": Q_BIAS, "use_qk_norm": Q_NORM},
    ),
    "cohere2": GgufArchitecture(
        architecture="Cohere2ForCausalLM",
        keys={"logit_scale": "logit_scale", **WINDOWED},
        window_every=4,
        eps=LAYER_NORM,
        present={"attention_bias": Q_BIAS},
    ),
    # whether attention and MLP run side by side, llama.cpp sees by the norm between them
    "stablelm": GgufArchitecture(
        architecture="StableLmForCausalLM",
        eps=LAYER_NORM,
        values={"use_parallel_residual": (False, True)},
        present={"use_qkv_bias": Q_BIAS, "qk_layernorm": Q_NORM},
        absent={"use_parallel_residual": "ffn_norm.weight"},
    ),
    "seed_oss": GgufArchitecture(
        architecture="SeedOssForCausalLM",
        norms=BEHIND,
        present={"attention_bias": Q_BIAS, "attention_out_bias": O_BIAS, "mlp_bias": UP_BIAS},
    ),
    "ernie4_5": GgufArchitecture(architecture="Ernie4_5ForCausalLM", present={"use_bias": Q_BIAS}),
    # of the shared experts' width the converter writes another number than their tensors have
    "ernie4_5-moe": GgufArchitecture(
        architecture="Ernie4_5_MoeForCausalLM",
        keys={**EXPERTS, **EXPERT_WIDTH, "expert_shared_count": "n_shared_experts",
              "leading_dense_block_count": "moe_layer_start_index", "interleave_moe_layer_step": "decoder_sparse_step",
              "expert_shared_feed_forward_length": ""},
        present={"use_bias": Q_BIAS},
    ),
    "llama4": LLAMA4,
    # its yarn does not round where it begins and ends, as openai's does not
    "gpt-oss": GgufArchitecture(
        architecture="GptOssForCausalLM",
        keys={**EXPERTS, **WINDOWED, "expert_feed_forward_length": "intermediate_size"},
        norms=BEHIND,
        present={"attention_bias": Q_BIAS},
        window_every=2,
        yarn={"truncate": False},
    ),
    # how many types it knows, `gguf` reads from the table
    "bert": GgufArchitecture(
        architecture="BertModel",
        eps=LAYER_NORM,
        values={"attention.causal": (False,)},
        norms={"attention.output.LayerNorm": "attn_output_norm", "output.LayerNorm": "layer_output_norm"},
    ),
    "modern-bert": MODERN_BERT,
    "eurobert": GgufArchitecture(
        architecture="EuroBertModel",
        values={"attention.causal": (False,)},
        present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS},
    ),
    "nomic-bert": GgufArchitecture(
        architecture="NomicBertModel",
        eps=LAYER_NORM,
        values={"attention.causal": (False,)},
        norms={"norm1": "attn_output_norm", "norm2": "layer_output_norm"},
    ),
    "gpt2": GgufArchitecture(architecture="GPT2LMHeadModel", **AS_GPT2),
    "starcoder": GgufArchitecture(architecture="GPTBigCodeForCausalLM", fixed={"hidden_act": "gelu"}, **AS_GPT2),
    "gptneox": GgufArchitecture(
        architecture="GPTNeoXForCausalLM",
        keys={"use_parallel_residual": "use_parallel_residual"},
        eps=LAYER_NORM,
        present={"attention_bias": Q_BIAS},
    ),
    "phi2": GgufArchitecture(architecture="PhiForCausalLM", eps=LAYER_NORM),
    "bloom": GgufArchitecture(architecture="BloomForCausalLM", eps=LAYER_NORM),
    "mpt": GgufArchitecture(
        architecture="MptForCausalLM",
        keys={"attention.clamp_kqv": "clip_qkv", "attention.max_alibi_bias": "alibi_bias_max"},
        eps=LAYER_NORM,
        norms={"norm_1": "attn_norm", "norm_2": "ffn_norm"},
    ),
    "dbrx": GgufArchitecture(
        architecture="DbrxForCausalLM",
        keys={**EXPERTS, "feed_forward_length": "moe_intermediate_size", "attention.clamp_kqv": "clip_qkv"},
        eps=LAYER_NORM,
        norms={"norm_attn_norm.norm_1": "attn_norm", "norm_attn_norm.norm_2": "attn_output_norm"},
    ),
    "falcon": FALCON,
    "olmo": GgufArchitecture(
        architecture="OlmoForCausalLM", keys={"attention.clamp_kqv": "clip_qkv"}, eps=LAYER_NORM, is_permuted=True
    ),
    "minimax-m2": GgufArchitecture(
        architecture="MiniMaxM2ForCausalLM",
        keys={**EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        values={"expert_gating_func": (0, SIGMOID)},
    ),
    # MLPs without a gate
    "starcoder2": GgufArchitecture(
        architecture="Starcoder2ForCausalLM", eps=LAYER_NORM, present={"use_bias": Q_BIAS}
    ),
    "nemotron": GgufArchitecture(
        architecture="NemotronForCausalLM",
        eps=LAYER_NORM,
        norm_added=1.0,
        present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS},
    ),
    "arcee": GgufArchitecture(
        architecture="ArceeForCausalLM", is_permuted=True, present={"attention_bias": Q_BIAS, "mlp_bias": UP_BIAS}
    ),
    # how its positions are stretched the converter has in the base
    "hunyuan-moe": GgufArchitecture(
        architecture="HunYuanMoEV1ForCausalLM",
        keys={**EXPERTS, **EXPERT_WIDTH, "expert_shared_count": "n_shared_experts",
              "expert_shared_feed_forward_length": ""},
        present={"attention_bias": Q_BIAS},
    ),
    "hunyuan-dense": GgufArchitecture(architecture="HunYuanDenseV1ForCausalLM", present={"attention_bias": Q_BIAS}),
    "deepseek2": DEEPSEEK_V2,
    # older files have not what it scales by, which is what the first of its kind had, as in llama.cpp
    "minicpm": GgufArchitecture(
        architecture="MiniCPMForCausalLM",
        keys={"embedding_scale": "scale_emb", "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
        fixed={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
        is_permuted=True,
    ),
    "minicpm3": MINICPM3,
    "mistral4": MISTRAL4,
    "glm-dsa": GLM_DSA,
    "mimo2": MIMO2,
    "step35": STEP35,
    "deci": DECI,
    "apertus": APERTUS,
}  # fmt: skip


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """What the file says it is. UnsupportedModel, with the nearest of those that are read, for any other."""
    name = file.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        reason = reason_for(name)
        hint = f"{LISTED}; of Hugging Face folders more kinds are"
        raise not_supported("architecture", name, str(file.path), ARCHITECTURES, reason=reason, hint=hint)
    if found is OLMO2 and file.metadata.get("olmo2.attention.sliding_window"):
        return OLMO3
    if found is MAMBA_1 and file.metadata.get("mamba.ssm.dt_b_c_rms"):
        return FALCON_MAMBA
    if found is GLM4 and _turns_by_axes(file):
        return GLM4V
    if found is DEEPSEEK_V2 and not file.metadata.get("deepseek2.expert_count"):
        return YOUTU
    if found is DEEPSEEK_V2 and any(name.endswith(".exp_probs_b.bias") for name in file.tensors):
        return DEEPSEEK_V3
    if found is LLAMA4 and file.metadata.get("llama4.expert_count") == MAVERICK_EXPERTS:
        return MAVERICK
    return MIXTRAL if found is LLAMA and file.metadata.get("llama.expert_count") else found


def _turns_by_axes(file: GgufFile) -> bool:
    """Whether llama.cpp turns q and k by the positions of three axes: its own test is that the first two have pairs."""
    sections = file.metadata.get("glm4.rope.dimension_sections")
    if not isinstance(sections, GgufArray) or sections.is_text or not 2 <= sections.count <= 4:
        return False
    return all(n > 0 for n in sections.values()[:2])
