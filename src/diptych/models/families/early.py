"""Families of a few models each, around GPT-2 and before it: other positions, norms in other places, a head in two steps."""

from __future__ import annotations

from typing import Any

from diptych.models.families.family import Family, HeadLayer, TensorNames
from diptych.models.families.gpt import ALL_BIASES, BY_HEAD, GPT, GPT_2, GPT_2_KEYS, NAMES, NOT_GATED, OF_GPT_2
from diptych.models.families.shared import BY_ATTENTION_BIAS, FIXED_EPS
from diptych.models.gates import Activation
from diptych.models.spec import Norms

AS_IN_FAIRSEQ: dict[str, Any] = {
    "final_norm": "layer_norm", "o": "out_proj", "mlp": ("",), "gate_up": ("fc1",), "down": "fc2",
    "norms": {Norms.BEFORE: ("self_attn_layer_norm", None, "final_layer_norm", None)}}  # fmt: skip
MODERN_BERT: dict[str, Any] = {
    **{key: value for key, value in GPT.items() if key != "hidden_act"}, "vocab_size": 50_368, "hidden_size": 768,
    "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12, "hidden_activation": "gelu",
    "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "decoder_bias": True,
    "local_attention": 128, "sliding_window_pattern": 3, "layer_types": None, "rope_theta": 160_000.0,
    "rope_local_base_freq": 10_000.0}  # fmt: skip
NAMES_OF_MODERN_BERT: dict[str, Any] = {
    "embedding": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "final_norm": "final_norm",
    "attention": "attn", "o": "Wo", "gate_up": ("Wi",), "down": "Wo",
    "norms": {Norms.BEFORE: ("attn_norm", None, "mlp_norm", None),
              Norms.BEFORE_MLP: (None, None, "mlp_norm", None)}}  # fmt: skip
JUDGED_BY_MODERN_BERT = (HeadLayer("head.dense", Activation.GELU, norm="head.norm"), HeadLayer("classifier"))
LIKE_MODERN_BERT: dict[str, Any] = {
    "fixed": {"classifier_bias": (False,), "classifier_activation": ("gelu",),
              "causal_mask": (True, None)},
    "unread": ("initializer_cutoff_factor", "classifier_pooling", "deterministic_flash_attn", "reference_compile",
               "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index", "position_embedding_type"),
    "renamed": {"norm_eps": "rms_norm_eps", "global_attn_every_n_layers": "sliding_window_pattern",
                "global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
    "full_first": True, "local_theta": "rope_local_base_freq", "mlp_bias": "mlp_bias",
    "centres_norms": True, "has_embedding_norm": True, "first_norms": Norms.BEFORE_MLP,
    **BY_ATTENTION_BIAS}  # fmt: skip
EARLY: tuple[Family, ...] = (
    # each part is normed behind it, with what it is added to; nothing is normed behind the last layer
    Family(
        name="openai-gpt", architectures=("OpenAIGPTLMHeadModel",),
        keys={**GPT_2, "vocab_size": 40_478, "hidden_act": "gelu", "max_position_embeddings": 512},
        renamed={**GPT_2_KEYS, "afn": "hidden_act"},
        norms=Norms.SUMS,
        gelu_means_tanh=True,
        positions_offset=0,
        names=TensorNames(transposes=True, **{**NAMES, "embedding": "tokens_embed", "positions": "positions_embed",
                                              "final_norm": None, "norms": {Norms.SUMS: (None, "ln_1", None, "ln_2")}}),
        **OF_GPT_2,
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # positions as in OPT, embeddings scaled; its class has an eps that it does not use
    Family(
        name="biogpt", architectures=("BioGptForCausalLM",),
        keys={**GPT, "vocab_size": 42_384, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096, "hidden_act": "gelu", "max_position_embeddings": 1024, "scale_embedding": True},
        fixed=FIXED_EPS,
        unread=("layer_norm_eps",),
        has_scaled_embedding="scale_embedding",
        positions_offset=2,
        names=TensorNames(head="output_projection", **AS_IN_FAIRSEQ),
        prefixes=("biogpt.",),
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # positions are sines and cosines, the first two of which stand for none
    Family(
        name="xglm", architectures=("XGLMForCausalLM",),
        keys={**GPT, "vocab_size": 256_008, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096, "hidden_act": "gelu", "max_position_embeddings": 2048, "scale_embedding": True},
        fixed={**FIXED_EPS, "add_cross_attention": (False,), "pad_token_id": (None, 0, 1)},  # whose row of the table is zero
        renamed={"d_model": "hidden_size", "ffn_dim": "intermediate_size", "num_layers": "num_hidden_layers",
                 "attention_heads": "num_attention_heads", "activation_function": "hidden_act"},
        has_scaled_embedding="scale_embedding",
        positions_offset=2, computes_positions=True,
        names=TensorNames(**AS_IN_FAIRSEQ),
        ignored=("embed_positions.",),
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # one bias: of what the last layer's heads are projected by
    Family(
        name="gpt_neox_japanese", architectures=("GPTNeoXJapaneseForCausalLM",),
        keys={**GPT, "vocab_size": 32_000, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
              "intermediate_size": None, "hidden_act": "gelu", "max_position_embeddings": 2048,
              "partial_rotary_factor": 1.0, "rope_theta": 10_000.0},
        fixed={"intermediate_multiple_size": (4,)},
        renamed={"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        has_last_bias=True,
        names=TensorNames(embedding="embed_in", final_norm="final_layer_norm", head="embed_out", attention="attention",
                          o_bias="dense_bias", **BY_HEAD),
        prefixes=("gpt_neox_japanese.",),
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
        **NOT_GATED,
    ),
    # Ettin: exact GELU in gates, windows on two layers of three, a norm of the embedding in place of the first layer's
    Family(
        name="modernbert-decoder", architectures=("ModernBertDecoderForCausalLM",),
        keys={**MODERN_BERT, "sliding_window": None, "norm_bias": False},
        has_norm_bias="norm_bias",
        has_head_bias="decoder_bias",
        classifier=JUDGED_BY_MODERN_BERT,
        names=TensorNames(head="decoder", transform=("lm_head.dense", "lm_head.norm"), **NAMES_OF_MODERN_BERT),
        **LIKE_MODERN_BERT,
    ),
)  # fmt: skip
