"""Families that `diptych plan` prices and the engine does not run, because an op is missing."""

from __future__ import annotations

from diptych.models.families_gpt import ALL_BIASES, GPT, NOT_GATED
from diptych.models.family import Family

PRICED_ONLY: tuple[Family, ...] = (
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
