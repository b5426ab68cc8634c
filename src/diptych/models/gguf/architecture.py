"""What an entry of `architectures` may say, and the keys and names that several of them have: how files differ from others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# keys after the architecture's name -> keys of config.json
USUAL: dict[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
LAYER_NORM = (
    "attention.layer_norm_epsilon"  # in place of attention.layer_norm_rms_epsilon where norms take the mean away
)
WINDOWED = {"attention.sliding_window": "sliding_window"}
PICTURES = dict.fromkeys(("rope.dimension_sections", "n_deepstack_layers"), "")
CAPPED = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
GROUPED = {**EXPERTS, **EXPERT_WIDTH, "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
           "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
           "expert_weights_norm": "norm_topk_prob", "leading_dense_block_count": "first_k_dense_replace"}  # fmt: skip
SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
# of a gated delta rule; how wide its values are and which layers have it, `states` reads
STATES = {"ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
          "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads", "ssm.inner_size": "",
          "full_attention_interval": "full_attention_interval", "attention.recurrent_layers": "",
          "rope.dimension_sections": ""}  # fmt: skip
# of Mamba-2, and of short convolutions; which layers have them, `states` reads
MAMBA = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
         "ssm.time_step_rank": "mamba_n_heads", "ssm.inner_size": "", "attention.head_count_kv": ""}  # fmt: skip
BESIDE_MAMBA = {
    **{key: name for key, name in MAMBA.items() if name},
    "ssm.inner_size": "mamba_d_ssm",
}  # attention in each layer
# of Mamba-1; how wide it is, `states` reads where layers attend, too
SELECTIVE = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
             "ssm.time_step_rank": "mamba_dt_rank"}  # fmt: skip
NO_HEADS = {"attention.head_count": "", "feed_forward_length": ""}  # 0 each where no layer attends
# of a delta rule that fades by key; which layers have it, `states` reads
BY_KEY = {"kda.head_dim": "linear_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim", "attention.head_count_kv": ""}
CONVOLUTIONS = {"shortconv.l_cache": "conv_L_cache", "attention.head_count_kv": ""}
# attention and MLPs are blocks of their own, which `states` tells apart
BLOCKS = {**MAMBA, **EXPERTS, **EXPERT_WIDTH, **SHARED_WIDTH, "feed_forward_length": "",
          "attention.layer_norm_rms_epsilon": "",
          "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
          "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group",
          "moe_latent_size": "moe_latent_size"}  # fmt: skip
SCALED = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
          "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
LATENT = {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
          "attention.value_length_mla": "v_head_dim", "rope.scaling.yarn_log_multiplier": ""}  # fmt: skip
UNGROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "routed_scaling_factor": 1.0,
                             "norm_topk_prob": False, "first_k_dense_replace": 0}  # fmt: skip
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func; 0 or none: as the architecture always has it
# our names of a layer's norms -> theirs
BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
AROUND = {**AFTER, "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm"}
BEHIND = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}  # BEFORE by a newer name
AROUND_AFMOE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
                "pre_mlp_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm"}  # fmt: skip
OPERATORS = {"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}
AROUND_GLM = {"input_layernorm": "attn_norm", "post_self_attn_layernorm": "post_attention_norm",
              "post_attention_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffw_norm"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """What `general.architecture` names. keys: read beside USUAL; fixed: of the config, always; norms: names in a layer.

    values: what keys may say that change the mathematics and become none of the config's. present: flags of the config by
    the tensor whose presence says so; absent: by the one whose absence does. eps: the key of the norms' epsilon.
    is_permuted: rows of q and k lie in the order of llama.cpp's own rotation. norm_added: by the converter to every norm.
    is_tiled: value heads of states lie as llama.cpp repeats key heads, the first of each of those before all the seconds.
    by_layer: keys whose values may differ from layer to layer.
    window_every: every so many-th layer attends to everything where the file does not say which.
    has_windowed_heads: `layers` reads heads, and which layers are windowed, layer by layer.
    wide_layers: of the one size whose scores are scaled otherwise. yarn: what the family's yarn has beside the file's.
    dense: layers that a pooled state goes through, in order, where the file has them.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    present: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    eps: str = "attention.layer_norm_rms_epsilon"
    is_permuted: bool = False
    is_tiled: bool = False
    norm_added: float = 0.0
    by_layer: tuple[str, ...] = ()
    window_every: int | None = None
    has_windowed_heads: bool = False
    wide_layers: int | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)
    dense: tuple[str, ...] = ()
