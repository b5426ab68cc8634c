"""Families most of whose layers keep a state of a sequence in place of its keys and values."""

from __future__ import annotations

from typing import Any

from diptych.models.families.family import NORM_NAMES, Family, TensorNames
from diptych.models.families.shared import BESIDE_VISION, BY_ATTENTION_BIAS, BY_GROUPS, GRANITE, LOCAL_EXPERTS, USUAL
from diptych.models.mlp import Scores
from diptych.models.spec import Norms, QkNorm
from diptych.models.states import StateRule

DELTA = {**USUAL, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "max_position_embeddings": 32_768, "attention_bias": False, "partial_rotary_factor": 0.25, "layer_types": None,
         "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}  # fmt: skip
# norm weights are stored as w - 1, but for those behind the states
STATE_LAYERS: dict[str, Any] = {
    "state_rule": StateRule.DELTA, "full_every": 4, "norm_offset": 1.0, "qk_norm": QkNorm.HEAD, "has_attention_gate": True,
    "prefixes": ("model.", "model.language_model."), "ignored": ("rotary_emb.inv_freq", "mtp.", "visual."),
    **BY_ATTENTION_BIAS}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

# what configs say beside that, in the one form that runs here
QWEN_3_5: dict[str, Any] = {"fixed": {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",),
                                      "output_gate_type": ("swish", "silu", None)}, **STATE_LAYERS}  # fmt: skip

# Mamba-2 beside attention
MAMBA = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_conv_bias": True, "time_step_limit": None, "layer_types": None,
         "attention_layers": None}  # fmt: skip
MAMBA_LAYERS: dict[str, Any] = {"state_rule": StateRule.SSD, "fixed": {"mamba_proj_bias": (False,)}}
IN_MAMBA: dict[str, Any] = {"states": "mamba", "states_in": ("in_proj",)}

# Mamba-2, attention and MLPs as blocks of their own
NEMOTRON_H = {"layer_norm_epsilon": "rms_norm_eps", "attention_head_dim": "head_dim", "mlp_hidden_act": "hidden_act",
              "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
              "ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
              "n_routed_experts": "num_experts",
              "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}  # fmt: skip
IN_BLOCKS: dict[str, Any] = {
    "embedding": "embeddings", "final_norm": "norm_f", "attention": "mixer", "mlp": ("mixer.",), "gate_up": ("up_proj",),
    "expert": ("up_proj", "down_proj"), "stacked": ("experts.up_proj", "experts.down_proj"),
    "norms": {Norms.BEFORE: ("norm", None, "norm", None), Norms.ALONE: ("norm", None, None, None)}, **IN_MAMBA,
    "states": "mixer"}  # fmt: skip

# Mamba, alone. No class of these says how long a text may be, as nothing of it grows; so many tokens is the longest that one of
# them was published for (Codestral Mamba)
ALONE: dict[str, Any] = {
    "vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32, "num_attention_heads": 1,
    "hidden_act": "silu", "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_conv_bias": True}  # fmt: skip
ALONE_NAMES = {"layer_norm_epsilon": "rms_norm_eps", "state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv",
               "use_conv_bias": "mamba_conv_bias"}  # fmt: skip
ALONE_TENSORS: dict[str, Any] = {**IN_BLOCKS, "others": {"embeddings": "embedding"}}  # as they were trained with
SELECTIVE = {"mamba_d_ssm": None, "mamba_expand": 2, "mamba_dt_rank": "auto"}
SELECTIVE_NAMES = {"intermediate_size": "mamba_d_ssm", "expand": "mamba_expand", "time_step_rank": "mamba_dt_rank"}
STATES_ALONE: dict[str, Any] = {
    "fixed": {"use_bias": (False,)}, "has_states_alone": True, "prefixes": ("backbone.", "model."),
    # how weights were drawn, and words of the code that they were trained with
    "unread": ("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_falcon_mambapy",
               "use_associative_scan", "rms_norm", "norm_before_gate", "d_inner", "d_model", "n_layer", "ssm_cfg",
               "fused_add_norm", "pad_vocab_size_multiple")}  # fmt: skip

# Kimi Linear: latent attention without positions, a delta rule that fades by key
KIMI_LINEAR = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
               "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
               "num_shared_experts": "n_shared_experts"}  # fmt: skip
# what configs of Ling 3.0 say beside what is read, in the one form that its class has
LING_WORDS: dict[str, tuple[Any, ...]] = {
    "score_function": ("sigmoid",), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "use_bias": (False,),
    "use_qkv_bias": (False,), "use_mla_nope": (False,), "use_nGPT": (False,), "up_proj_norm": (False,), "value_norm": (False,),
    "scale_router_input": (False,)}  # fmt: skip

# what RecurrentGemma's layers are, again and again
GRIFFIN = ["recurrent", "recurrent", "attention"]

# Lightning attention: transformers' names -> what published configs of MiniMax-Text-01 and M1 call them
MINIMAX = {f"{part}_{one}_factor": f"layernorm_{theirs}_{one}"
           for part, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
           for one in ("alpha", "beta")}  # fmt: skip

# short convolutions beside attention
LFM2 = {**USUAL, "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_key_value_heads": 8,
        "max_position_embeddings": 128_000, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
        "conv_L_cache": 3, "layer_types": None, "attention_layers": None}  # fmt: skip
LFM2_LAYERS: dict[str, Any] = {
    **BESIDE_VISION,
    "state_rule": StateRule.CONVOLUTION, "qk_norm": QkNorm.HEAD, "fixed": {"conv_bias": (False,)}}  # fmt: skip
LFM2_NAMES: dict[str, str] = {
    "norm_eps": "rms_norm_eps", "block_norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings", "full_attn_idxs": "attention_layers"}  # fmt: skip
IN_LFM2: dict[str, Any] = {
    "final_norm": "embedding_norm", "o": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm", "states": "conv",
    "states_in": ("in_proj",), "taps": ("conv",), "mlp": ("feed_forward.",), "gate_up": ("w1", "w3"), "down": "w2",
    "expert": ("w1", "w3", "w2"), "choice_bias": "expert_bias",
    "norms": {Norms.BEFORE: ("operator_norm", None, "ffn_norm", None)}}  # fmt: skip

STATES: tuple[Family, ...] = (
    Family(
        name="qwen3_next", architectures=("Qwen3NextForCausalLM",),
        keys={**DELTA, **EXPERTS, "vocab_size": 151_936, "intermediate_size": 5632, "num_hidden_layers": 48,
              "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
              "mlp_only_layers": None},
        has_shared_gate=True,
        names=TensorNames(shared="shared_expert", states_in=("in_proj_qkvz", "in_proj_ba")),
        **STATE_LAYERS,
    ),
    Family(
        name="qwen3_5_text", architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        more_model_types=("qwen3_5",),
        keys={**DELTA, "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 4},
        **QWEN_3_5,
    ),
    Family(
        name="qwen3_5_moe_text", architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        more_model_types=("qwen3_5_moe",),
        keys={**DELTA, **EXPERTS, "vocab_size": 248_320, "intermediate_size": None, "num_hidden_layers": 40,
              "num_experts_per_tok": 8, "num_experts": 256},
        has_shared_gate=True,
        renormalises=True,
        names=TensorNames(shared="shared_expert"),
        **QWEN_3_5,
    ),
    # Lara 4 Mini: the delta rule beside windows, and layers that attend to everything without positions
    Family(
        name="lara_mini", architectures=("LaraMiniForCausalLM",),
        keys={**{key: value for key, value in DELTA.items() if key not in ("partial_rotary_factor", "full_attention_interval")},
              **EXPERTS, "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": None, "num_hidden_layers": 34,
              "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
              "sliding_window": 512, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_experts_per_tok": 4,
              "num_experts": 128, "norm_topk_prob": True, "layer_types": (
                  "linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")},
        renamed=LOCAL_EXPERTS,
        state_rule=StateRule.DELTA, turns_windowed_only=True, qk_norm=QkNorm.HEAD,
        names=TensorNames(shared="shared_expert", states_in=("in_proj",), states_norm="out_norm"),
        **BY_ATTENTION_BIAS,
    ),
    # streams in one row that are read by gates, n-grams, an index that chooses blocks by the means of their keys
    Family(
        name="qwen4_exp_text", architectures=("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        more_model_types=("qwen4_exp",),
        keys={**DELTA, **EXPERTS, "partial_rotary_factor": 1.0, "vocab_size": 248_320, "intermediate_size": None,
              "num_hidden_layers": 40, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
              "output_gate_type": None, "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": None, "ple_embed_dim": None,
              "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000,
              "make_ngram_vocab_size_divisible_by": 128, "seed": 1234, "split_ngram_parts": 512, "eos_token_id": None,
              "index_n_heads": None, "indexer_kv_heads": None, "index_head_dim": None, "indexer_budget": None,
              "indexer_compress_ratio": None},
        renamed={"indexer_n_heads": "index_n_heads", "indexer_head_dim": "index_head_dim"},
        fixed={key: QWEN_3_5["fixed"][key] for key in ("attn_output_gate", "mamba_ssm_dtype")},
        unread=("number_of_conv_states", "mtp"),  # which follows from ple_layer_ids, and is of layers that draft
        norms=Norms.BARE,
        has_shared_gate=True,
        names=TensorNames(shared="shared_expert"),
        **{**STATE_LAYERS, "ignored": (*STATE_LAYERS["ignored"], "layer_multipliers", "ngram_heads_")},
    ),
    # norms whose outputs go on as the stream, experts in every layer
    Family(
        name="minimax", architectures=("MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"),
        more_model_types=("minimax_m1", "minimax_text_01"),
        keys={**USUAL, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
              "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "rotary_dim": None, "num_experts_per_tok": 2,
              "num_experts": 8, "layer_types": None, **dict.fromkeys(MINIMAX, 1.0)},
        renamed={**LOCAL_EXPERTS, **{theirs: ours for ours, theirs in MINIMAX.items()}},
        numbered={"attn_type_list": ("layer_types", ("linear_attention", "full_attention"))},
        fixed={"sliding_window": (None,), "postnorm": (True,), "shared_intermediate_size": (0,)},
        unread=("block_size", "shared_moe_mode"),
        renormalises=True,
        norms=Norms.KEPT,
        full_every=2, full_first=True,
        state_rule=StateRule.SSD, state_norm_eps=1e-6,
        names=TensorNames(mlp=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2"), states="self_attn",
                          states_in=("qkv_proj", "output_gate")),
        ignored=("rotary_emb.inv_freq", "slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    ),
    # a rule of its own before it, norms of whole rows of q and k and norms behind attention where there are keys and values
    Family(
        name="olmo_hybrid", architectures=("OlmoHybridForCausalLM",),
        keys={**USUAL, "vocab_size": 100_352, "hidden_size": 3840, "num_attention_heads": 30,
              "max_position_embeddings": 65_536, "attention_bias": False, "layer_types": None,
              "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_key_head_dim": None,
              "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        state_rule=StateRule.DELTA,
        full_every=4,
        norms=Norms.AFTER, state_norms=Norms.BEFORE, state_norm_eps=1e-5,
        qk_norm=QkNorm.FULL,
        theta_may_be_null=True,
        names=TensorNames(states_in=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), states_o="o_proj",
                          states_norm="o_norm", taps=("q_conv1d", "k_conv1d", "v_conv1d"),
                          others={"input_layernorm": "attention_layer_norm",
                                  "post_attention_layernorm": "feedforward_layer_norm"}),
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="kimi_linear", architectures=("KimiLinearForCausalLM",),
        keys={key: value for key, value in USUAL.items() if key != "rope_theta"}
        | {**BY_GROUPS, "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
           "num_key_value_heads": 32, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
           "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
           "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1024,
           "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "mlp_layer_types": None, "layer_types": None,
           "linear_attn_config": None, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
        renamed=KIMI_LINEAR,
        fixed={"moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,), "mla_use_nope": (True,),
               "mla_use_output_gate": (False, None), "moe_layer_freq": (1,), "attention_bias": (False,),
               "num_nextn_predict_layers": (0, None)},
        unread=("rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "head_dim"),
        state_rule=StateRule.DELTA,
        scores=Scores.SIGMOID, group_best=2, has_choice_bias=True,
        names=TensorNames(
            mlp=("block_sparse_moe.", "mlp."), expert=("w1", "w3", "w2"), states="self_attn",
            states_in=("q_proj", "k_proj", "v_proj", "g_a_proj", "g_b_proj", "b_proj", "f_a_proj", "f_b_proj"),
            states_o="o_proj", states_norm="o_norm", taps=("q_conv1d", "k_conv1d", "v_conv1d"), wraps_decays=True),
    ),
    # Ling 3.0: a delta rule that fades by key no faster than a bound, latent attention with a gate for each head
    Family(
        name="bailing_hybrid", architectures=("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
        keys={**USUAL, **BY_GROUPS, "vocab_size": 157_184, "hidden_size": 2560, "intermediate_size": 6144,
              "num_hidden_layers": 42, "num_key_value_heads": 32, "max_position_embeddings": 262_144, "rope_theta": 6_000_000.0,
              "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
              "attention_bias": False, "num_experts": 512, "num_experts_per_tok": 8, "n_shared_experts": 1,
              "moe_intermediate_size": 768, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
              "first_k_dense_replace": 2, "mlp_layer_types": None, "layer_types": None, "full_attention_interval": 6,
              "linear_head_dim": 128, "linear_num_heads": None, "linear_conv_kernel_dim": 4, "kda_safe_gate": True,
              "kda_lower_bound": -5.0, "swiglu_limits": None, "swiglu_limits_shared": None},
        renamed={**KIMI_LINEAR, **LOCAL_EXPERTS, "layer_group_size": "full_attention_interval",
                 "short_conv_kernel_size": "linear_conv_kernel_dim"},
        fixed={**LING_WORDS, "linear_attention": ("kda",), "no_kda_lora": (True,), "use_kda_lora": (False,),
               "gated_attention_proj_granularity_type": ("head_wise",), "rope_interleave": (True,),
               "num_kv_heads_for_linear_attn": (0, None), "moe_router_enable_expert_bias": (True,)},
        unread=("group_norm_size", "linear_silu", "use_qk_norm", "router_dtype", "mtp_use_kda", "mtp_loss_scaling_factor",
                "num_mtp_layers", "num_nextn_predict_layers"),
        state_rule=StateRule.DELTA,
        is_interleaved=True, o_bias="attention_bias", has_attention_gate=True, gates_heads=True,
        scores=Scores.SIGMOID, group_best=2, has_choice_bias=True,
        names=TensorNames(
            embedding="word_embeddings", attention="attention", o="dense", gate="g_proj", states="attention",
            states_in=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"), states_o="dense", states_norm="o_norm",
            taps=("q_conv1d", "k_conv1d", "v_conv1d"), choice_bias="gate.expert_bias",
            others={"dense": "o_proj", "gate.expert_bias": "gate.e_score_correction_bias"}),
        ignored=("rotary_emb.inv_freq", "model.mtp"),
    ),
    # GLM-5.3-Flash: the same in two steps, streams that mix, latent attention without positions, an index that chooses pools
    Family(
        name="glm5_next_text", architectures=("Glm5NextForConditionalGeneration",),
        more_model_types=("glm5_next",),
        keys={key: value for key, value in USUAL.items() if key != "rope_theta"}
        | {**BY_GROUPS, "vocab_size": 154_880, "intermediate_size": 12_288, "num_hidden_layers": 45, "num_attention_heads": 64,
           "num_key_value_heads": 64, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5, "kv_lora_rank": 512,
           "q_lora_rank": 1536, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "attention_bias": False,
           "num_experts": 288, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
           "routed_scaling_factor": 2.5, "mlp_layer_types": None, "layer_types": None, "swiglu_limit": 10.0,
           "linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
           "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "index_topk": 2048,
           "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16, "indexer_types": None, "index_topk_pattern": None,
           "index_topk_freq": 1, "index_skip_topk_offset": 2},
        fixed={"qk_rope_head_dim": (0,), "index_kpool_always_select_tail": (True,), "index_kpool_compress": (True,),
               "mla_use_nope": (True,), "mhc": (True,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",),
               "use_head_norm": (False,)},
        renamed={"n_routed_experts": "num_experts", **LOCAL_EXPERTS},
        unread=("indexer_rope_interleave", "index_share_for_mtp_iteration", "moe_router_dtype", "num_nextn_predict_layers",
                "rope_theta", "rope_parameters", "rope_scaling"),
        state_rule=StateRule.DELTA,
        o_bias="attention_bias", norms_latents_alike=True, limits_all=True, has_end_connection=False,
        scores=Scores.SIGMOID, group_best=2, has_choice_bias=True,
        names=TensorNames(
            states="self_attn",
            states_in=("q_proj", "k_proj", "v_proj", "g_a_proj", "g_b_proj", "b_proj", "f_a_proj", "f_b_proj"),
            states_o="o_proj", states_norm="o_norm", taps=("q_conv1d", "k_conv1d", "v_conv1d")),
        prefixes=("model.language_model.", "model."),
        ignored=("rotary_emb.inv_freq", "visual.", ".shared_head."),
    ),
    Family(
        name="granitemoehybrid", architectures=("GraniteMoeHybridForCausalLM",),
        keys={**USUAL, **GRANITE, **MAMBA, "num_experts_per_tok": 2, "num_experts": 8,
              "shared_expert_intermediate_size": 1024, "position_embedding_type": None},
        renamed={**LOCAL_EXPERTS, "shared_intermediate_size": "shared_expert_intermediate_size"},
        renormalises=True,
        names=TensorNames(mlp=("block_sparse_moe.", ""), dense="shared_mlp.", router="router.layer", shared="shared_mlp",
                          gate_up=("input_linear",), down="output_linear",
                          stacked=("input_linear.weight", "output_linear.weight"), **IN_MAMBA),
        **MAMBA_LAYERS, **BY_ATTENTION_BIAS,
    ),
    # Mamba-1 of several heads in each layer, and one such block, without positions
    Family(
        name="zamba", architectures=("ZambaForCausalLM",),
        keys={key: value for key, value in USUAL.items() if key != "rope_theta"}
        | {"hidden_size": 3712, "intermediate_size": 14_848, "num_hidden_layers": 76, "num_attention_heads": 16,
           "num_key_value_heads": 16, "hidden_act": "gelu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
           "tie_word_embeddings": True, "layers_block_type": None, "layer_types": None, "attn_layer_period": 6,
           "attn_layer_offset": 4, "query_pre_attn_scalar": None, "attention_hidden_size": None, "hybrid_layer_ids": None,
           "n_mamba_heads": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_ssm": None,
           "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_hidden_act": "silu"},
        renamed={"hidden_mamba_act": "mamba_hidden_act", "attention_head_dim": "head_dim"},
        fixed={"mamba_proj_bias": (False,), "hidden_act": ("gelu",), "tie_word_embeddings": (True,)},
        unread=("use_associative_scan",),
        shares_blocks=True, norms=Norms.ASIDE,
        state_rule=StateRule.SELECTIVE,
        names=TensorNames(final_norm="final_layernorm", mlp=("feed_forward.",), aside="shared_transf.",
                          after_aside="mamba_decoder.", selects_by_head=True, **IN_MAMBA),
        ignored=("rotary_emb.inv_freq", ".shared_transf."),
    ),
    # Mamba-2 in each layer; before some of them attention and an MLP aside of the stream, whose weights layers share
    Family(
        name="zamba2", architectures=("Zamba2ForCausalLM",),
        keys={**USUAL, "hidden_size": 2560, "intermediate_size": None, "num_hidden_layers": 54, "hidden_act": "gelu",
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
              "layers_block_type": None, "layer_types": None, "num_mem_blocks": 1, "use_shared_attention_adapter": False,
              "adapter_rank": 128, "use_mem_rope": False, "use_long_context": False, "position_embedding_type": None,
              "query_pre_attn_scalar": None, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 64,
              "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_ssm": None, "mamba_d_head": None, "mamba_conv_bias": True,
              "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_hidden_act": "silu",
              "time_step_min": 0.001, "time_step_limit": None, "attention_hidden_size": None, "hybrid_layer_ids": None},
        renamed={"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups", "mamba_headdim": "mamba_d_head",
                 "attention_head_dim": "head_dim"},
        # where the head is no embedding the class ties no blocks either
        fixed={"add_bias_linear": (False,), "hidden_act": ("gelu",), "use_shared_mlp_adapter": (True,),
               "tie_word_embeddings": (True,)},
        unread=("kv_channels", "num_query_groups", "use_conv_bias", "use_mem_eff_path", "mamba_dt_rank"),
        shares_blocks=True, norms=Norms.ASIDE,
        state_rule=StateRule.SSD, state_norm_eps=1e-5,
        names=TensorNames(final_norm="final_layernorm", mlp=("feed_forward.",), gate_up=("gate_up_proj",),
                          after_aside="mamba_decoder.", **IN_MAMBA),
        # layers that share a block have each its name in some files
        ignored=("rotary_emb.inv_freq", ".shared_transformer."),
    ),
    # windows of attention on every third layer, recurrent units on the others
    Family(
        name="recurrent_gemma", architectures=("RecurrentGemmaForCausalLM",),
        # no class says how long a text may be; they were trained on so many tokens
        keys={**USUAL, "vocab_size": 256_000, "hidden_size": 2560, "intermediate_size": 7680, "num_hidden_layers": 26,
              "num_attention_heads": 10, "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh",
              "tie_word_embeddings": True, "attention_bias": False, "partial_rotary_factor": 0.5, "block_types": GRIFFIN,
              "layer_types": None, "embedding_multiplier": None, "lru_width": None, "conv1d_width": 4,
              "sliding_window": 2048, "final_logit_softcapping": 30.0},
        renamed={"hidden_activation": "hidden_act", "logits_soft_cap": "final_logit_softcapping",
                 "attention_window_size": "sliding_window"},
        fixed={"embeddings_scale_by_sqrt_dim": (True,)},
        unread=("w_init_variance_scale", "final_w_init_variance_scale", "_block_types"),
        norm_offset=1.0,
        state_rule=StateRule.RG_LRU,
        qkv_bias="attention_bias", o_bias=True, mlp_bias=True,
        names=TensorNames(final_norm="final_norm", attention="temporal_block", states="temporal_block",
                          states_in=("linear_x", "linear_y"), states_o="linear_out", taps=("conv_1d",), mlp=("mlp_block.",),
                          norms={Norms.BEFORE: ("temporal_pre_norm", None, "channel_pre_norm", None)}),
    ),
    # states alone: selective ones, with norms of steps, keys and queries or without, and Mamba-2's
    Family(
        name="mamba", architectures=("MambaForCausalLM",),
        keys={**ALONE, **SELECTIVE}, renamed={**ALONE_NAMES, **SELECTIVE_NAMES},
        state_rule=StateRule.SELECTIVE, names=TensorNames(**ALONE_TENSORS), **STATES_ALONE,
    ),
    Family(
        name="falcon_mamba", architectures=("FalconMambaForCausalLM",),
        keys={**ALONE, **SELECTIVE, "mixer_rms_eps": 1e-6}, renamed={**ALONE_NAMES, **SELECTIVE_NAMES},
        state_rule=StateRule.SELECTIVE, names=TensorNames(**ALONE_TENSORS), **STATES_ALONE,
    ),
    Family(
        name="mamba2", architectures=("Mamba2ForCausalLM",),
        keys={**ALONE, "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "tie_word_embeddings": False,
              "mamba_d_state": 128, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 8, "time_step_limit": None},
        renamed={**ALONE_NAMES, "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "n_groups": "mamba_n_groups"},
        state_rule=StateRule.SSD, names=TensorNames(**ALONE_TENSORS),
        **{**STATES_ALONE, "unread": (*STATES_ALONE["unread"], "intermediate_size")},
    ),
    # a selective state, attention without positions on every eighth layer, mixtures on every second
    Family(
        name="jamba", architectures=("JambaForCausalLM",),
        keys={key: value for key, value in USUAL.items() if key != "rope_theta"}
        | {"vocab_size": 65_536, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
           "num_experts_per_tok": 2, "num_experts": 16, "mlp_layer_types": None, "expert_layer_period": 2,
           "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
           "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
           "mamba_dt_rank": "auto", "mamba_conv_bias": True},
        renamed=LOCAL_EXPERTS,
        fixed={"mamba_proj_bias": (False,), "attention_bias": (False,), "sliding_window": (None,),
               "mamba_inner_layernorms": (True,)},
        unread=("use_mambapy", "use_associative_scan", "layers_block_type"),
        state_rule=StateRule.SELECTIVE,
        names=TensorNames(final_norm="final_layernorm", mlp=("feed_forward.",), router="router",
                          norms={Norms.BEFORE: ("input_layernorm", None, "pre_ff_layernorm", None)}, **IN_MAMBA),
    ),
    Family(
        name="bamba", architectures=("BambaForCausalLM",),
        keys={**USUAL, **MAMBA, "vocab_size": 128_000, "intermediate_size": 14_336, "num_key_value_heads": 8,
              "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
              "partial_rotary_factor": 0.5},
        renamed={"attn_layer_indices": "attention_layers"},
        mlp_bias="mlp_bias",
        names=TensorNames(final_norm="final_layernorm", mlp=("feed_forward.",),
                          norms={Norms.BEFORE: ("input_layernorm", None, "pre_ff_layernorm", None)}, **IN_MAMBA),
        **MAMBA_LAYERS, **BY_ATTENTION_BIAS,
    ),
    # a state and attention by one norm in each layer, and multipliers almost everywhere
    Family(
        name="falcon_h1", architectures=("FalconH1ForCausalLM",),
        keys={**USUAL, **{key: value for key, value in MAMBA.items() if key != "attention_layers"}, "vocab_size": 128_000,
              "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
              "attention_bias": False, "mamba_d_ssm": 1024, "mamba_rms_norm": False,
              "mamba_norm_before_gate": True, "embedding_multiplier": 1.0, "logit_scale": 1.0, "key_multiplier": 1.0,
              "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
              "ssm_out_multiplier": 1.0, "ssm_multipliers": None, "mlp_multipliers": None},
        renamed={"lm_head_multiplier": "logit_scale"},
        has_pairs=True,
        names=TensorNames(final_norm="final_layernorm", mlp=("feed_forward.",),
                          norms={**NORM_NAMES, Norms.BEFORE: ("input_layernorm", None, "pre_ff_layernorm", None)}, **IN_MAMBA),
        **{**MAMBA_LAYERS, "fixed": {"mamba_proj_bias": (False,), "projectors_bias": (False,), "mlp_bias": (False,),
                                  "mamba_use_mlp": (True,)}},
        unread=("layers_block_type", "mlp_expansion_factor", "attn_layer_indices"),
        **BY_ATTENTION_BIAS,
    ),
    Family(
        name="nemotron_h", architectures=("NemotronHForCausalLM",),
        keys={key: value for key, value in USUAL.items() if key != "rope_theta"}
        | {"vocab_size": 131_072, "intermediate_size": 21_504, "num_hidden_layers": None, "num_key_value_heads": 8,
           "head_dim": 128, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
           "layers_block_type": None, "hybrid_override_pattern": None, "mamba_n_heads": 128, "mamba_d_head": 64,
           "mamba_n_groups": 8, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_conv_bias": True,
           "mamba_hidden_act": "silu", "time_step_limit": None, **BY_GROUPS, "num_experts": 8,
           "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "shared_expert_intermediate_size": 7688,
           "moe_latent_size": None},
        renamed=NEMOTRON_H,
        fixed={"attention_bias": (False,), "mlp_bias": (False,), "use_bias": (False,), "mamba_proj_bias": (False,),
               "n_shared_experts": (1,), "sliding_window": (None,)},
        unread=("norm_eps", "rope_theta", "partial_rotary_factor"),  # published files have them beside what is read
        has_blocks=True,
        state_rule=StateRule.SSD,
        is_gated=False,
        scores=Scores.SIGMOID,
        group_best=2,
        has_choice_bias=True,
        names=TensorNames(**IN_BLOCKS),
        prefixes=("backbone.", "model."),
        ignored=("rotary_emb.inv_freq", "mtp."),
    ),
    Family(
        name="lfm2", architectures=("Lfm2ForCausalLM",),
        keys={**LFM2, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
        renamed=LFM2_NAMES,
        names=TensorNames(**IN_LFM2),
        **LFM2_LAYERS,
    ),
    # windows on some of the layers that attend, each with a rotation of its own, norms around, a gate for each head
    Family(
        name="lfm3", architectures=("Lfm3ForCausalLM",),
        keys={**LFM2, "vocab_size": 128_000, "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24,
              "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7,
              "sliding_window": 256, "use_attention_gate": True, "rope_local_base_freq": 10_000.0,
              "rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0,
                                                     "partial_rotary_factor": 0.5},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
        renamed=LFM2_NAMES,
        needs_layer_types=True,
        norms=Norms.AROUND,
        has_attention_gate="use_attention_gate", gates_heads=True,
        local_theta="rope_local_base_freq",
        names=TensorNames(**{**IN_LFM2, "o": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm", "gate": "gate_proj", "norms": {
            Norms.AROUND: ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")}}),
        **{**LFM2_LAYERS, "fixed": {"conv_bias": (False,), "attention_bias": (False,), "use_sandwich_norm": (True,)}},
    ),
    Family(
        name="lfm2_moe", architectures=("Lfm2MoeForCausalLM",),
        keys={**LFM2, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
              "num_experts_per_tok": 4, "num_experts": 32, "first_k_dense_replace": 2, "routed_scaling_factor": 1.0,
              "norm_topk_prob": True, "use_expert_bias": True},
        renamed={**LFM2_NAMES, "num_dense_layers": "first_k_dense_replace"},
        scores=Scores.SIGMOID,
        renormalises="norm_topk_prob",
        has_choice_bias="use_expert_bias",
        names=TensorNames(**IN_LFM2),
        **LFM2_LAYERS,
    ),
)  # fmt: skip
