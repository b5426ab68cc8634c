"""Which keys of a config nobody needs to read, and which are refused wherever nobody reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diptych.models.families.table import FAMILIES

# Keys that never change what a token's logits are: names of things, ids of special tokens, training, caches, defaults of
# generation, and switches of files that the loader holds against the tensors itself.
HARMLESS: frozenset[str] = frozenset((
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "name_or_path",
    "auto_map", "task_specific_params", "tokenizer_class", "finetuning_task", "problem_type", "id2label", "label2id",
    "use_cache", "initializer_range", "embedding_initializer_range", "init_std", "pretraining_tp",
    "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise",
    "input_jitter_noise",
    "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "ep_size", "chunk_size_feed_forward", "layerdrop",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "quantization_config", "cache_implementation", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "use_flash_attn", "torchscript", "use_bfloat16",
    "gradient_checkpointing", "max_window_layers", "attention_bias", "mlp_bias", "qkv_bias", "bias",
    "hidden_act", "hidden_activation", "vision_config", "mm_tokens_per_image", "image_token_index",
    "boi_token_index", "eoi_token_index", "is_decoder", "max_length", "min_length", "temperature", "top_k",
    "top_p", "do_sample", "repetition_penalty", "num_beams", "model_max_length", "neftune_noise_alpha", "unsloth_fixed",
    "unsloth_version", "reorder_and_upcast_attn", "slow_but_exact", "qk_head_dim", "n_ctx",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "use_logits_to_keep", "prefix", "initial_context_length", "layer_norm_eps", "pooling_type",
    "is_causal", "altup_coef_clip", "altup_lr_multiplier", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient",
    "chunk_size", "expand", "use_mamba_kernels", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank",
    "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
    "mamba_ssm_cache_dtype", "residual_in_fp32", "rescale_prenorm_residual", "moe_shared_expert_overlap",
    "quantization", "mtp_layer_types", "mtp_mlp_layer_types", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
))  # fmt: skip
HARMLESS_ENDINGS = ("_token_id", "_token_ids", "dropout", "dropout_prob")

# words by which files say what their class has anyway: looked at where a family knows them in one setting, not elsewhere
OWN_WORDS = (
    "norm_type",
    "transformer_block_type",
    "rope_style",
    "full_attn_mod",
    "interpolate_factor",
    "type_vocab_size",
)
# Keys of other families and of hybrids that change the mathematics: refused wherever nobody reads them.
CHANGING: frozenset[str] = frozenset((
    *(key for family in FAMILIES for key in (*family.keys, *family.fixed, *family.renamed, *family.numbered)
      if key not in OWN_WORDS),
    "is_encoder_decoder", "alibi", "use_alibi", "parallel_attn", "use_parallel_residual", "multi_query",
    "new_decoder_architecture", "rope_pct", "rotary_pct", "rotary_emb_base", "rotary_dim", "qk_layernorm", "qk_norm",
    "clip_qkv", "attn_config", "ffn_config", "ssm_cfg", "mamba_d_state", "mamba_d_conv", "mamba_expand",
    "mamba_num_heads", "hybrid_override_pattern", "layers_block_type", "attn_layer_indices", "attn_type_list",
    "sparse_attention_config", "linear_attn_config", "linear_num_key_heads", "full_attention_interval",
    "attention_chunk_size", "scale_emb",
    "scale_depth", "dim_model_base", "block_configs", "num_zero_experts", "moe_num_experts", "moe_k", "residual_scale",
    "index_topk", "attention_multiplier",
    "interleave_moe_layer_step", "attn_temperature_tuning", "no_rope_layers", "use_qk_norm", "moe_layer_freq",
))  # fmt: skip
# of other mathematics in the family that calls ours so
NO_SYNONYMS = ("attention_chunk_size", "logits_scaling", "intermediate_size", "intermediate_size_mlp", "bias")
# what a family calls one of our keys -> ours: said beside that one, and the same, it says nothing more
SYNONYMS: Mapping[str, frozenset[str]] = MappingProxyType({
    theirs: frozenset(family.renamed[theirs] for family in FAMILIES if theirs in family.renamed)
    for theirs in {theirs for family in FAMILIES for theirs in family.renamed if not theirs.endswith("multiplier")}
    if theirs not in NO_SYNONYMS
})  # fmt: skip
# values with which such a key says: as usual
NEUTRAL: Mapping[str, Any] = MappingProxyType({
    "partial_rotary_factor": 1.0, "rope_pct": 1.0, "rotary_pct": 1.0, "embedding_multiplier": 1.0,
    "logits_scaling": 1.0, "logit_scale": 1.0, "residual_multiplier": 1.0, "routed_scaling_factor": 1.0,
    "n_group": 1, "topk_group": 1, "decoder_sparse_step": 1, "no_rope_layer_interval": None, "moe_layer_freq": 1,
    "position_embedding_type": "rope", "activation": "swiglu", "scale_attn_weights": True,
    "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True,
})  # fmt: skip
