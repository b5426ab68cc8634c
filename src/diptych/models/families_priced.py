"""Families that `diptych plan` prices and the engine does not run, because an op is missing."""

from __future__ import annotations

from diptych.models.families_gpt import ALL_BIASES, GPT, NOT_GATED
from diptych.models.families_shared import LOCAL_EXPERTS, USUAL
from diptych.models.family import Family
from diptych.models.spec import QkNorm, Scores

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
        name="bloom", architectures=("BloomForCausalLM",),
        keys={**GPT, "vocab_size": 250_880, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": None,
              "num_attention_heads": 8, "hidden_act": "gelu_new"},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        renamed={"layer_norm_epsilon": "rms_norm_eps", "n_embed": "hidden_size", "n_layer": "num_hidden_layers",
                 "n_head": "num_attention_heads", "seq_length": "max_position_embeddings"},
        is_run=False,
        has_embedding_norm=True,
        **NOT_GATED,
        **ALL_BIASES,
    ),
)  # fmt: skip
