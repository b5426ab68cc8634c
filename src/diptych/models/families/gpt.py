"""Families around GPT-2: LayerNorms and projections with biases, MLPs without a gate, and names and keys of their own."""

from __future__ import annotations

from typing import Any

from diptych.models.families.family import Family, TensorNames
from diptych.models.families.shared import BY_ATTENTION_BIAS, FIXED_EPS, USUAL
from diptych.models.spec import Norms, QkNorm

NOT_IN_GPT = ("rope_theta", "num_key_value_heads", "head_dim")
GPT: dict[str, Any] = {**{key: USUAL[key] for key in USUAL if key not in NOT_IN_GPT}, "tie_word_embeddings": True,
                       "rms_norm_eps": 1e-5}  # fmt: skip
GPT_2 = {**GPT, "vocab_size": 50_257, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": None,
         "num_attention_heads": 12, "hidden_act": "gelu_new", "max_position_embeddings": 1024}  # fmt: skip
GPT_2_KEYS = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
              "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
              "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"}  # fmt: skip
NOT_GATED: dict[str, Any] = {"is_gated": False, "centres_norms": True, "has_norm_bias": True}
ALL_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
OF_GPT_2: dict[str, Any] = {"prefixes": ("transformer.",), "ignored": (".attn.bias", ".attn.masked_bias")}
NAMES: dict[str, Any] = {
    "embedding": "wte", "positions": "wpe", "layers": "h", "final_norm": "ln_f", "attention": "attn",
    "qkv": ("c_attn",), "o": "c_proj", "gate_up": ("c_fc",), "down": "c_proj",
    "norms": {Norms.BEFORE: ("ln_1", None, "ln_2", None), Norms.PARALLEL: ("ln_1", None, None, None)}}  # fmt: skip
GPT_J = {**GPT_2, "vocab_size": 50_400, "hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16,
         "max_position_embeddings": 2048, "rotary_dim": 64, "rope_theta": 10_000.0, "tie_word_embeddings": False}  # fmt: skip
NAMES_OF_GPT_J = {**NAMES, "o": "out_proj", "gate_up": ("fc_in",), "down": "fc_out"}
LIKE_GPT_J: dict[str, Any] = {"renamed": GPT_2_KEYS, "norms": Norms.PARALLEL, "is_interleaved": True, "mlp_bias": True,
                              "has_head_bias": True, "prefixes": ("transformer.",), **NOT_GATED,
                              "ignored": (*OF_GPT_2["ignored"], ".attn.causal_mask")}  # fmt: skip
BY_HEAD: dict[str, Any] = {"qkv": ("query_key_value",), "qkv_by_head": True, "o": "dense",
                           "gate_up": ("dense_h_to_4h",), "down": "dense_4h_to_h"}  # fmt: skip

GPT_KIND: tuple[Family, ...] = (
    # projections lie as [inputs, outputs] in its files
    Family(
        name="gpt2", architectures=("GPT2LMHeadModel",), more_model_types=("gpt-sw3",),
        keys={**GPT_2, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        fixed={"add_cross_attention": (False,)},
        renamed=GPT_2_KEYS,
        positions_offset=0,
        names=TensorNames(transposes=True, **NAMES),
        **OF_GPT_2,
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # StarCoder 1, SantaCoder: one KV head for all queries
    Family(
        name="gpt_bigcode", architectures=("GPTBigCodeForCausalLM",),
        keys={**GPT_2, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": None, "multi_query": True,
              "scale_attn_weights": True},
        fixed={"add_cross_attention": (False,),
               **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), (True, False))},
        renamed=GPT_2_KEYS,
        positions_offset=0,
        names=TensorNames(qkv_by_head=True, **NAMES),
        **OF_GPT_2,
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # GPT-Neo, TinyStories: windows on every other layer, scores that nothing divides
    Family(
        name="gpt_neo", architectures=("GPTNeoForCausalLM",),
        keys={**GPT_2, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
              "max_position_embeddings": 2048, "sliding_window": 256, "attention_types": None,
              "attention_layers": None, "layer_types": None},
        renamed={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "window_size": "sliding_window",
                 "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"},
        attention_scale=1.0,
        positions_offset=0,
        o_bias=True, mlp_bias=True,
        names=TensorNames(**{**NAMES, "attention": "attn.attention", "qkv": ("q_proj", "k_proj", "v_proj"),
                             "o": "out_proj"}),
        prefixes=("transformer.",),
        ignored=(".attention.bias", ".attention.masked_bias"),
        **NOT_GATED,
    ),
    # nanochat: norms without weights, of embeddings, too, and of q and k behind a rotation that turns back
    Family(
        name="nanochat", architectures=("NanoChatForCausalLM",),
        keys={**USUAL, "vocab_size": 50_304, "hidden_size": 768, "intermediate_size": 8192, "num_hidden_layers": 12,
              "num_attention_heads": 6, "hidden_act": "relu2", "final_logit_softcapping": 15.0, "attention_bias": False},
        qk_norm=QkNorm.UNIT, turns_back=True,
        has_norm_weight=False, has_embedding_norm=True,
        is_gated=False,
        names=TensorNames(gate_up=("fc1",), down="fc2"),
        **BY_ATTENTION_BIAS,
    ),
    # attention and MLP read one norm; neighbouring dimensions turn together; the head has a bias
    Family(
        name="gptj", architectures=("GPTJForCausalLM",),
        keys=GPT_J,
        fixed={"rotary": (True,), "scale_attn_weights": (True,)},
        names=TensorNames(**{**NAMES_OF_GPT_J, "qkv": ("q_proj", "k_proj", "v_proj")}),
        **LIKE_GPT_J,
    ),
    # CodeGen: the same, q, v and k stacked as four accelerators held them
    Family(
        name="codegen", architectures=("CodeGenForCausalLM",),
        keys=GPT_J,
        fixed={"scale_attn_weights": (True,)},
        names=TensorNames(qkv_parts=4, **{**NAMES_OF_GPT_J, "qkv": ("qkv_proj",)}),
        **LIKE_GPT_J,
    ),
    # GPT-NeoX 20B, Pythia, Dolly: attention and MLP side by side, each with a norm of its own
    Family(
        name="gpt_neox", architectures=("GPTNeoXForCausalLM",),
        keys={**GPT, "vocab_size": 50_432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
              "intermediate_size": 24_576, "hidden_act": "gelu", "tie_word_embeddings": False,
              "use_parallel_residual": True, "partial_rotary_factor": 0.25, "rope_theta": 10_000.0,
              "attention_bias": True},
        renamed={"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        parallel_key="use_parallel_residual", parallel_norms=Norms.BESIDE,
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias=True,
        names=TensorNames(embedding="embed_in", final_norm="final_layer_norm", head="embed_out", attention="attention",
                          **BY_HEAD),
        prefixes=("gpt_neox.",),
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
        **NOT_GATED,
    ),
    # Persimmon, and the text of Fuyu: each head of q and k normed with a bias, by one weight for all heads
    Family(
        name="persimmon", architectures=("PersimmonForCausalLM", "FuyuForCausalLM"),
        more_model_types=("fuyu",),
        keys={**GPT, "vocab_size": 262_144, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 64,
              "intermediate_size": 16_384, "hidden_act": "relu2", "max_position_embeddings": 16_384,
              "tie_word_embeddings": False, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "qk_layernorm": True},
        renamed={"layer_norm_eps": "rms_norm_eps"},
        qk_norm=QkNorm.CENTRED, qk_norm_key="qk_layernorm",
        names=TensorNames(final_norm="final_layernorm", q_norm="q_layernorm", k_norm="k_layernorm", **BY_HEAD),
        prefixes=("model.", "language_model.model.", "model.language_model."),
        ignored=("rotary_emb.inv_freq", "vision_embed_tokens."),
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # Phi-1, 1.5 and 2; the head has a bias
    Family(
        name="phi", architectures=("PhiForCausalLM",),
        keys={**GPT, "vocab_size": 51_200, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
              "num_key_value_heads": None, "intermediate_size": 8192, "hidden_act": "gelu_new",
              "tie_word_embeddings": False, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "qk_layernorm": False},
        renamed={"layer_norm_eps": "rms_norm_eps"},
        norms=Norms.PARALLEL,
        qk_norm=QkNorm.CENTRED, qk_norm_key="qk_layernorm",
        has_head_bias=True,
        names=TensorNames(final_norm="final_layernorm", o="dense", q_norm="q_layernorm", k_norm="k_layernorm",
                          gate_up=("fc1",), down="fc2"),
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # 7B: one KV head, one norm; 40B and 180B: groups of heads, two norms; 11B: groups and one norm
    Family(
        name="falcon", architectures=("FalconForCausalLM",),
        keys={**GPT, "vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
              "num_key_value_heads": None, "intermediate_size": None, "hidden_act": "gelu", "rope_theta": 10_000.0,
              "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
              "num_ln_in_parallel_attn": None, "bias": False},
        fixed={"alibi": (False, None), "apply_residual_connection_post_layernorm": (False,)},
        renamed={"layer_norm_epsilon": "rms_norm_eps", "num_kv_heads": "num_key_value_heads", "activation": "hidden_act",
                 "ffn_hidden_size": "intermediate_size", "n_embed": "hidden_size"},
        parallel_key="parallel_attn",
        qkv_bias="bias", o_bias="bias", mlp_bias="bias",
        names=TensorNames(embedding="word_embeddings", layers="h", final_norm="ln_f", attention="self_attention",
                          norms={Norms.PARALLEL: ("input_layernorm", None, None, None),
                                 Norms.BESIDE: ("ln_attn", None, "ln_mlp", None),
                                 Norms.BEFORE: ("input_layernorm", None, "post_attention_layernorm", None)}, **BY_HEAD),
        prefixes=("transformer.",),
        ignored=(".inv_freq",),
        **NOT_GATED,
    ),
    # no positions: scores fall with the distance; the embedding is normed
    Family(
        name="bloom", architectures=("BloomForCausalLM",),
        keys={**GPT, "vocab_size": 250_880, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": None,
              "num_attention_heads": 8, "hidden_act": "gelu_new"},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        unread=("offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"),
        renamed={"layer_norm_epsilon": "rms_norm_eps", "n_embed": "hidden_size", "n_layer": "num_hidden_layers",
                 "n_head": "num_attention_heads", "seq_length": "max_position_embeddings"},
        has_slopes=True,
        has_embedding_norm=True,
        names=TensorNames(embedding="word_embeddings", embedding_norm="word_embeddings_layernorm", layers="h",
                          final_norm="ln_f", attention="self_attention", **BY_HEAD),
        prefixes=("transformer.", ""),
        **NOT_GATED,
        **ALL_BIASES,
    ),
    # the same by other names, without biases; what says how it attends lies in a section of its config
    Family(
        name="mpt", architectures=("MptForCausalLM", "MPTForCausalLM"),
        keys={**GPT, "vocab_size": 50_368, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": None, "hidden_act": "gelu", "clip_qkv": None, "alibi_bias_max": 8,
              "attention_multiplier": None},
        fixed={"attn_type": ("multihead_attention",), "alibi": (True,), "prefix_lm": (False,), "qk_ln": (False,),
               "attn_uses_sequence_id": (False,), "expansion_ratio": (4,), "no_bias": (True,), "logit_scale": (None,),
               "norm_type": ("low_precision_layernorm", "layernorm")},
        unread=("attn_config", "attn_impl", "learned_pos_emb", "embedding_fraction", "init_device", "emb_pdrop", "init_config"),
        renamed={"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
                 "max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps",
                 "softmax_scale": "attention_multiplier"},
        sections=("attn_config",),
        has_slopes=True,
        names=TensorNames(embedding="wte", layers="blocks", final_norm="norm_f", attention="attn", qkv=("Wqkv",),
                          o="out_proj", mlp=("ffn.",), gate_up=("up_proj",), down="down_proj",
                          norms={Norms.BEFORE: ("norm_1", None, "norm_2", None)}),
        prefixes=("transformer.",),
        is_gated=False, centres_norms=True,
    ),
    # the first two rows of its table stand for no position; the 350M norms behind each part, with words of another width
    Family(
        name="opt", architectures=("OPTForCausalLM",),
        keys={**GPT, "vocab_size": 50_272, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072,
              "num_attention_heads": 12, "hidden_act": "relu", "word_embed_proj_dim": None, "enable_bias": True,
              "layer_norm_elementwise_affine": True},
        fixed={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,), **FIXED_EPS},
        renamed={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        positions_offset=2,
        names=TensorNames(final_norm="final_layer_norm", o="out_proj", mlp=("",), gate_up=("fc1",), down="fc2",
                          norms={Norms.BEFORE: ("self_attn_layer_norm", None, "final_layer_norm", None)}),
        prefixes=("model.decoder.", "decoder."),
        has_norm_weight="layer_norm_elementwise_affine",
        qkv_bias="enable_bias", o_bias="enable_bias", mlp_bias="enable_bias",
        **{**NOT_GATED, "has_norm_bias": "layer_norm_elementwise_affine"},
    ),
)  # fmt: skip
