"""Families whose layers, but every fourth, keep a state of a sequence in place of its keys and values (a gated delta rule)."""

from __future__ import annotations

from typing import Any

from diptych.models.families_shared import BY_ATTENTION_BIAS, USUAL
from diptych.models.family import Family, TensorNames
from diptych.models.spec import QkNorm

DELTA = {**USUAL, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "max_position_embeddings": 32_768, "attention_bias": False, "partial_rotary_factor": 0.25, "layer_types": None,
         "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32}  # fmt: skip
# norm weights are stored as w - 1, but for those behind the states
DELTA_LAYERS: dict[str, Any] = {
    "has_delta": True, "full_every": 4, "norm_offset": 1.0, "qk_norm": QkNorm.HEAD, "has_attention_gate": True,
    "prefixes": ("model.", "model.language_model."), "ignored": ("rotary_emb.inv_freq", "mtp.", "visual."),
    **BY_ATTENTION_BIAS}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

# what configs say beside that, in the one form that runs here
QWEN_3_5: dict[str, Any] = {"fixed": {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}, **DELTA_LAYERS}

STATES: tuple[Family, ...] = (
    Family(
        name="qwen3_next", architectures=("Qwen3NextForCausalLM",),
        keys={**DELTA, **EXPERTS, "vocab_size": 151_936, "intermediate_size": 5632, "num_hidden_layers": 48,
              "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
              "mlp_only_layers": None},
        has_shared_gate=True,
        names=TensorNames(shared="shared_expert", delta_in=("in_proj_qkvz", "in_proj_ba")),
        **DELTA_LAYERS,
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
)  # fmt: skip
