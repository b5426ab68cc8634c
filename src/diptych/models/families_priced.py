"""Families that `diptych plan` prices and the engine does not run, because an op is missing."""

from __future__ import annotations

from typing import Any

from diptych.models.families_shared import LOCAL_EXPERTS, USUAL
from diptych.models.family import Family
from diptych.models.spec import QkNorm, Scores

NOT_IN_GPT = ("rope_theta", "num_key_value_heads", "head_dim")
GPT: dict[str, Any] = {**{key: USUAL[key] for key in USUAL if key not in NOT_IN_GPT}, "tie_word_embeddings": True}
NOT_GATED: dict[str, Any] = {"is_run": False, "is_gated": False, "has_norm_bias": True}
ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}

PRICED_ONLY: tuple[Family, ...] = (
    Family(
        name="minimax_m2", architectures=("MiniMaxM2ForCausalLM",),
        keys={**USUAL, "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
              "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
              "rope_theta": 5_000_000.0, "num_experts_per_tok": 8, "num_experts": 256},
        fixed={"scoring_func": ("sigmoid",), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",)},
        renamed=LOCAL_EXPERTS,
        is_run=False,
        qk_norm=QkNorm.FULL,
        renormalises=True,
        scores=Scores.SIGMOID,
        has_choice_bias=True,
    ),
    Family(
        name="opt", architectures=("OPTForCausalLM",),
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
        name="gpt2", architectures=("GPT2LMHeadModel",),
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
        name="bloom", architectures=("BloomForCausalLM",),
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
