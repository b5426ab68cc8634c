"""How a GGUF file's metadata becomes a config.json's keys, and where a tensor of ours lies in it.

A file is read as the Hugging Face checkpoint that it was converted from: the keys of `read_config` go through
`models.read` like any config.json, and `place_of` knows a tensor's name there and what the converter did to it (rows of q
and k reordered, 1 added to norms, experts stacked). What differs between architectures is in `architectures`.

>>> place_of("model.layers.3.mlp.up_proj.weight", GgufArchitecture(architecture="Qwen2ForCausalLM")).name
'blk.3.ffn_up.weight'
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.table import BY_ARCHITECTURE
from diptych.models.gguf.architecture import USUAL, GgufArchitecture
from diptych.models.gguf.architectures import (
    APERTUS,
    DECI,
    DEEPSEEK_V2,
    FALCON,
    GEMMA3N,
    GEMMA4,
    GLM_DSA,
    MIMO2,
    MODERN_BERT,
    NEMOTRON_H,
    STEP35,
    architecture_of,
)
from diptych.models.gguf.file import PART, GgufFile, GgufTensor, open_gguf
from diptych.models.gguf.keys import NEEDED, Keys
from diptych.models.gguf.layers import (
    CURVES,
    FFN,
    HEADS,
    SHARED,
    add_mimo,
    add_searched,
    add_step,
    add_windowed_heads,
    check_curves,
    index_kinds,
)
from diptych.models.gguf.states import add_states
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.models")

IN_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.gate_proj": "attn_gate",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm", "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.g_proj": "attn_gate",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
    **{f"{mixer}.{one}_proj": f"ssm_{one}" for mixer in ("mamba", "mixer") for one in ("x", "dt")},
    **{f"mamba.{one}_layernorm": f"ssm_{one}_norm" for one in ("dt", "b", "c")},
    "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm", "mixer.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    "self_attn.f_a_proj": "ssm_f_a", "self_attn.f_b_proj": "ssm_f_b", "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b", "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm",
    **{f"self_attn.{one}_conv1d": f"ssm_conv1d_{one}" for one in ("q", "k", "v")},
    "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "mlp.w1": "ffn_gate", "mlp.w3": "ffn_up", "mlp.w2": "ffn_down",
    **dict.fromkeys(("attn.c_attn", "attention.query_key_value", "self_attention.query_key_value", "attn.Wqkv",
                     "norm_attn_norm.attn.Wqkv"), "attn_qkv"),
    **dict.fromkeys(("attn.c_proj", "attention.dense", "self_attention.dense", "self_attn.dense", "attn.out_proj",
                     "norm_attn_norm.attn.out_proj"),
                    "attn_output"),
    **{f"attention.self.{one}": f"attn_{one[0]}" for one in ("query", "key", "value")},
    "attention.output.dense": "attn_output", "intermediate.dense": "ffn_up", "output.dense": "ffn_down",
    "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate",
    "attn.Wo": "attn_output", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    **dict.fromkeys(("router.proj", "mlp.gate", "mlp.gate.wg", "mlp.router", "mlp.router.layer", "mlp.router.gate"),
                    "ffn_gate_inp"),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm", "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef", "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
TYPES = "token_types.weight"
AT_THE_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "backbone.embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "embed_out.weight": "output.weight",
    **dict.fromkeys(
        ("transformer.wte.weight", "transformer.word_embeddings.weight", "gpt_neox.embed_in.weight"),
        "token_embd.weight",
    ),
    "transformer.wpe.weight": "position_embd.weight",
    "bert.embeddings.position_embeddings.weight": "position_embd.weight",
    **{f"{one}bert.embeddings.word_embeddings.weight": "token_embd.weight" for one in ("", "nomic_")},
    **{f"{one}bert.embeddings.token_type_embeddings.weight": TYPES for one in ("", "nomic_")},
    **{
        f"{norm}.{ending}": f"token_embd_norm.{ending}"
        for ending in ("weight", "bias")
        for norm in ("bert.embeddings.LayerNorm", "nomic_bert.emb_ln")
    },
    **{
        f"{norm}.{ending}": f"output_norm.{ending}"
        for ending in ("weight", "bias")
        for norm in ("transformer.ln_f", "transformer.norm_f", "gpt_neox.final_layer_norm", "model.final_layernorm")
    },
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.embeddings.tok_embeddings.weight": "token_embd.weight",
    "model.embeddings.norm.weight": "token_embd_norm.weight",
    "model.final_norm.weight": "output_norm.weight",
    "transformer.word_embeddings_layernorm.weight": "token_embd_norm.weight",
    "transformer.word_embeddings_layernorm.bias": "token_embd_norm.bias",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
# tensors that a checkpoint names without an ending, or with another
ODD_ENDINGS = {
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    **{
        f"{mixer}.{theirs}": ours
        for mixer in ("mamba", "mixer", "self_attn")
        for theirs, ours in (("A_log", "ssm_a"), ("dt_bias", "ssm_dt.bias"), ("D", "ssm_d"))
    },
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "moe.router_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
}
# what lies by value head: along rows, of which those of q and k come first, or along the inputs of a row
BY_VALUE_HEAD = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_conv1d.weight",
                 "ssm_a", "ssm_dt.bias")  # fmt: skip
INPUTS_BY_VALUE_HEAD = "ssm_out.weight"
EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
LAYER = re.compile(
    r"^(?:model\.layers|backbone\.layers|transformer\.(?:h|blocks)|gpt_neox\.layers|bert\.encoder\.layer"
    r"|nomic_bert\.encoder\.layers)\.(\d+)\.(.+)$"
)
MLP = re.compile(r"^(?:block_sparse_moe|feed_forward|ffn|moe)\.")  # what some checkpoints call it
ONE_EXPERT = re.compile(r"^(?:m(?:lp|ixer)\.)?experts\.(\d+)\.(\w+)$")
SHARED_EXPERTS = re.compile(r"^(?:m(?:lp|ixer)\.)?(?:shared?_expert|shared_experts|shared_mlp)\.(\w+)$")
# one head's matrix, queries to latents or latents to values, of those that are stacked here
LATENT_HEAD = re.compile(r"^self_attn\.([kv]_b)_proj\.(\d+)$")
STREAM_END = re.compile(r"^model\.altup_(un)?(?:embed_)?projections\.(\d+)\.weight$")  # stacked
HEAD_NORM = re.compile(r"^self_attn\.([qk])_layernorm\.norms\.(\d+)$")
# their names of tensors that may lie stacked along their rows in another, and which part of it they are
JOINED = {
    "attn_q": ("attn_qkv", "first"), "attn_k": ("attn_qkv", "second to last"), "attn_v": ("attn_qkv", "last"),
    "ffn_gate_exps": ("ffn_gate_up_exps", "first"), "ffn_up_exps": ("ffn_gate_up_exps", "last"),
    # where there are no experts beside them
    "ffn_gate_shexp": ("ffn_gate", "first"), "ffn_up_shexp": ("ffn_up", "first"), "ffn_down_shexp": ("ffn_down", "first"),
}  # fmt: skip
# what a rotation divides its frequencies by: Llama 3's own scaling, and the two sets of Phi 3
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
INDEX = re.compile(r"^blk\.(\d+)\.indexer\.")
UNUSED_KV = re.compile(r"^blk\.\d+\.attn_(k|v|k_norm)\.weight$")
NEVER = 1e20  # what a frequency is divided by that is none
BLOCK = re.compile(r"^blk\.(\d+)\.")
ROPE_TENSOR = re.compile(r"^(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor of ours lies. expert: entry of a stacked tensor; heads: whose rows were reordered, 'q', 'k' or 'v' (the
    value heads of states), or with 'inputs' the inputs of each row.

    begin: the first of its rows where it is a part of a tensor. added: to the values.
    is_negative: the file has their negatives.
    """

    name: str
    expert: int | None = None
    begin: int | None = None
    heads: str | None = None
    added: float = 0.0
    is_negative: bool = False


def read_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as a config.json. Raises UnsupportedModel and LoadError, which name the key."""
    kind = architecture_of(file)
    keys = Keys(file)
    names = {**USUAL, **kind.keys, kind.eps: "rms_norm_eps"}
    keys.refuse_changing(names, kind)
    config: dict[str, Any] = {"architectures": [kind.architecture], **kind.fixed}
    for name, ours in names.items():
        if (kind.has_windowed_heads and name in HEADS) or (kind is DECI and name in (*HEADS, FFN)):
            continue
        read = keys.by_layer if name in kind.by_layer else keys.number
        value = read(name) if ours else None
        is_needed = ours and name in (*NEEDED, kind.eps) and not (name == "feed_forward_length" and kind.is_tiled)
        if value is None and is_needed:
            raise LoadError(
                f"{keys.full(name)} is missing from {file.path}", hint="the file is damaged, or no language model"
            )
        if value is not None:
            config[ours] = value
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise LoadError(
            f"tensor token_embd.weight is missing from {file.path}", hint="it holds a vocabulary, or an adapter"
        )
    config["num_hidden_layers"] = n_layers_of(file)
    HfConfig(config, path=str(file.path)).integer("num_hidden_layers")  # lists as long as that are made below
    if kind.has_windowed_heads:
        add_windowed_heads(config, keys)
    elif kind is DECI:
        add_searched(config, keys)
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    heads = config["num_attention_heads"]
    if not isinstance(heads, int) or heads < 1:
        raise LoadError(f"{keys.full('attention.head_count')} in {file.path} is {heads}; it must be at least 1")
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    if not isinstance(config["head_dim"], int) or config["head_dim"] < 1:
        raise LoadError(
            f"heads in {file.path} are {config['head_dim']} wide ({keys.full('attention.key_length')}); it must be at least 1"
        )
    config.setdefault("rope_theta", 10_000.0)
    blocks = {name.partition(".")[2].partition(".")[2] for name in file.tensors if name.startswith("blk.")}
    blocks |= {"attn_q.bias" for name in blocks if name == "attn_qkv.bias"}
    config |= {ours: theirs in blocks for ours, theirs in kind.present.items()}
    config |= {ours: theirs not in blocks for ours, theirs in kind.absent.items()}
    if "attention.kv_lora_rank" in kind.keys:
        _add_latent(config, keys)
    elif kind is not MIMO2 and keys.number("attention.value_length") not in (
        None,
        config.get("global_head_dim", config["head_dim"]),
    ):
        raise LoadError(f"{file.path} has values of another width than keys, which are not read from GGUF files")
    if keys.number("pooling_type"):
        config["pooling_type"] = keys.number("pooling_type")
    _add_own(config, keys, file, kind)
    return _without_unread(config, file)


def _add_own(config: dict[str, Any], keys: Keys, file: GgufFile, kind: GgufArchitecture) -> None:
    """What families have of their own: scales, states, windows, how they turn."""
    if kind.wide_layers is not None:
        is_wide = config["num_hidden_layers"] == kind.wide_layers
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
        )
    if kind.keys.get("attention.scale"):
        config.setdefault("attention_multiplier", config["head_dim"] ** -0.5)
    if kind is GEMMA3N:
        _add_streams(config, keys, file)
    add_states(config, keys, file, kind)
    _add_windows(config, keys, kind)
    if kind is GLM_DSA:
        config["indexer_types"] = index_kinds(file, config["num_hidden_layers"])
    if kind is MIMO2:
        add_mimo(config, keys, file)
    if kind is APERTUS:
        check_curves(file, config["num_hidden_layers"])
    if kind is GEMMA4:
        _add_full_heads(config, keys, file)
    elif kind is STEP35:
        add_step(config, keys, file)
    elif kind is not NEMOTRON_H:  # which knows no positions, whatever the converter says of how much of a head turns
        _add_rope(config, keys, file, kind)
    if "multi_query" in BY_ARCHITECTURE[kind.architecture].keys:
        config["multi_query"] = config["num_key_value_heads"] == 1
    if kind is FALCON:
        _add_grouping(config, file)
    if kind is MODERN_BERT and keys.text("hidden_activation") is not None:
        config["hidden_activation"] = keys.text("hidden_activation")
    if TYPES in file.tensors and "type_vocab_size" in BY_ARCHITECTURE[kind.architecture].keys:
        config["type_vocab_size"] = file.tensors[TYPES].shape[0]


def _add_grouping(config: dict[str, Any], file: GgufFile) -> None:
    """Of Falcon: one KV head is the older architecture's; two norms, or several KV heads, are the newer one's."""
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    config["new_decoder_architecture"] = has_two_norms or not config["multi_query"]
    config["num_ln_in_parallel_attn"] = 2 if has_two_norms else 1


def _without_unread(config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Without what was filled in above and the family has no key for. LoadError where it says more than usual."""
    read = BY_ARCHITECTURE[config["architectures"][0]].keys
    usual: dict[str, Any] = {
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "num_key_value_heads": config["num_attention_heads"],
    }
    if "rope_theta" not in read:
        usual |= {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, "rope_scaling": {"rope_type": "default"}}
    for name in [name for name in usual if name in config and name not in read]:
        value = config.pop(name)
        if value != usual[name]:
            raise LoadError(f"{name} of {file.path} is {value}; {config['architectures'][0]} has no such key")
    return config


def n_layers_of(file: GgufFile) -> int:
    """Its layers but those that only draft, which come last."""
    keys = Keys(file)
    drafting = keys.number("nextn_predict_layers") or 0
    n_blocks = keys.number("block_count")
    if n_blocks is None or (drafting and not 0 <= drafting < n_blocks):
        raise LoadError(f"{file.path} has {n_blocks} blocks, of which {drafting} draft", hint="the file is damaged")
    return int(n_blocks - drafting) if drafting else n_blocks


def _add_latent(config: dict[str, Any], keys: Keys) -> None:
    """Widths of heads: the file's are those of the latents, which one head of keys serves for all."""
    whole = keys.number("attention.key_length_mla") or keys.number("attention.key_length")
    turned = keys.number("rope.dimension_count")
    if not whole or not turned or turned >= whole:
        raise LoadError(
            f"{keys.full('rope.dimension_count')} is {turned} of heads of {whole}; it must be a part of them"
        )
    config.pop("head_dim")
    config["qk_rope_head_dim"], config["qk_nope_head_dim"] = turned, whole - turned
    config.setdefault("v_head_dim", keys.number("attention.value_length"))
    config["num_key_value_heads"] = config["num_attention_heads"]
    if config["architectures"] == [DEEPSEEK_V2.architecture]:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _add_streams(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """What the tensors say of widths, and quantiles of deviations as the parts of a row that they cut."""
    table, left = (file.tensors.get(name) for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"))
    if table is None or left is None:
        name = "per_layer_token_embd.weight" if table is None else "blk.0.laurel_l.weight"
        raise LoadError(f"tensor {name} is missing from {file.path}", hint="the file may be incomplete")
    config |= {"vocab_size_per_layer_input": table.shape[0], "laurel_rank": left.shape[0]}
    deviations = keys.values("activation_sparsity_scale")
    if deviations is not None:
        if any(not isinstance(one, float) or math.isnan(one) for one in deviations):
            raise LoadError(f"{keys.full('activation_sparsity_scale')} in {file.path} must hold numbers")
        config["activation_sparsity_pattern"] = [NormalDist().cdf(one) for one in deviations]


def _add_full_heads(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """What layers that attend to everything have of their own: KV heads, no projection of values, pairs that do not turn."""
    table, experts = (file.tensors.get(name) for name in ("per_layer_token_embd.weight", "blk.0.ffn_down_exps.weight"))
    config["vocab_size_per_layer_input"] = config["vocab_size"] if table is None else table.shape[0]
    config["enable_moe_block"] = experts is not None
    if experts is not None and experts.type.name == "NVFP4":
        raise LoadError(f"{file.path} has experts in NVFP4 whose scales are of the mixture too, which is not supported")
    windowed = [
        one == "sliding_attention" for one in config.get("layer_types") or [False] * config["num_hidden_layers"]
    ]
    full = [i for i, one in enumerate(windowed) if not one]
    heads = config["num_key_value_heads"]
    if isinstance(heads, list):
        if len(heads) != len(windowed) or len(set(zip(windowed, heads, strict=True))) > 2:
            raise LoadError(f"{keys.full('attention.head_count_kv')} in {file.path} differs between layers of one kind")
        of_kind = dict(zip(windowed, heads, strict=True))
        config["num_key_value_heads"] = of_kind.get(True, of_kind.get(False))
        config["num_global_key_value_heads"] = of_kind.get(False)
    width = config.get("global_head_dim") or config["head_dim"]
    differing = {"head_dim": width}
    if isinstance(heads, list):
        differing["num_key_value_heads"] = config.pop("num_global_key_value_heads")
    config.pop("global_head_dim", None)
    config["per_layer_config"] = {str(i): differing for i in full}
    names = [{one for one in ("attn_k", "attn_v") if f"blk.{i}.{one}.weight" in file.tensors} for i in full]
    config["attention_k_eq_v"] = {"attn_k"} in names
    for name, wanted in (("rope.dimension_count", width), ("rope.dimension_count_swa", config["head_dim"])):
        if keys.number(name) not in (None, wanted):
            raise LoadError(
                f"{keys.full(name)} in {file.path} is {keys.number(name)} of heads of {wanted}; all of it must turn"
            )
    divisors = file.floats(ROPE_FREQS) or [1.0] * (width // 2)
    n_turning = sum(one == 1.0 for one in divisors)
    if len(divisors) != width // 2 or any(one < NEVER for one in divisors[n_turning:]):
        raise LoadError(
            f"{ROPE_FREQS} in {file.path} must hold {width // 2} numbers: 1 for pairs that turn, then {NEVER:g} or more"
        )
    # the next number up, as the product with the width is cut to a whole number
    part = min(math.nextafter(2 * n_turning / width, 2.0), 1.0)
    theta = {kind: {"rope_type": "default", "rope_theta": config[key]} for kind, key in
             (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq"))}  # fmt: skip
    theta["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": part}
    config["rope_parameters"] = theta


def _add_windows(config: dict[str, Any], keys: Keys, kind: GgufArchitecture) -> None:
    local, pattern_key = keys.number("rope.freq_base_swa"), "attention.sliding_window_pattern"
    if kind is MODERN_BERT and local is not None:
        config["rope_local_base_freq"] = local
    elif kind in (GEMMA3N, GEMMA4) or kind.architecture == "Gemma3ForCausalLM":
        config["rope_local_base_freq"] = local or 10_000.0
    elif not kind.has_windowed_heads and local not in (None, config["rope_theta"]):
        raise LoadError(f"{keys.full('rope.freq_base_swa')} is {local}; {kind.architecture} turns all its layers alike")
    if kind.keys.get("attention.sliding_window") != "sliding_window":
        return
    config["sliding_window"] = config.get("sliding_window") or None
    if kind.window_every is None or config["sliding_window"] is None:
        return
    pattern = keys.values(pattern_key)
    if pattern is None:
        every = keys.number(pattern_key) or kind.window_every
        if not isinstance(every, int) or every < 1:
            raise LoadError(f"{keys.full(pattern_key)} is {every}; it must be at least 1")
        pattern = [(i + 1) % every != 0 for i in range(config["num_hidden_layers"])]
    config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _add_rope(config: dict[str, Any], keys: Keys, file: GgufFile, kind_of_file: GgufArchitecture) -> None:
    """partial_rotary_factor and rope_scaling: classes have defaults of their own, which a file that is silent does not mean."""
    if "head_dim" in config:
        config["partial_rotary_factor"] = (keys.number("rope.dimension_count") or config["head_dim"]) / config[
            "head_dim"
        ]
    kind, factor = (
        keys.text("rope.scaling.type"),
        keys.number("rope.scaling.factor") or keys.number("rope.scale_linear"),
    )
    original = keys.number("rope.scaling.original_context_length")
    attention = keys.number("rope.scaling.yarn_attn_factor") or keys.number("rope.scaling.attn_factor")
    freqs, long, short = (file.floats(name) for name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT))
    scaling: dict[str, Any] = {"rope_type": "default"}
    if freqs is not None and (long or short or kind not in (None, "none")):
        raise LoadError(f"{file.path} scales its positions twice: by {ROPE_FREQS} and by another rule")
    if freqs is not None:
        # the converter keeps Llama 3's rule as the numbers that come out of it, and drops the rule
        scaling = {"rope_type": "longrope", "long_factor": freqs, "short_factor": freqs, "factor": 1.0,
                   "attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}  # fmt: skip
    elif long is not None or short is not None:
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": attention or 1.0,
        }
        config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                   "attention_factor": attention, "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
                   "beta_slow": keys.number("rope.scaling.yarn_beta_slow"), **kind_of_file.yarn}  # fmt: skip
        stretch, bend = (
            keys.number(name) for name in ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")
        )
        if stretch:  # is the same for both here, as all published models have it; of latent attention a tenth of it
            stretch = stretch / 0.1 if "attention.kv_lora_rank" in kind_of_file.keys else stretch
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), stretch)
        if bend:
            scaling["llama_4_scaling_beta"] = bend
    elif kind == "linear" or (kind is None and factor not in (None, 0, 1)):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in (None, "none", "longrope"):
        raise LoadError(
            f"{keys.full('rope.scaling.type')} in {file.path} is {kind!r}; linear, yarn and longrope are read"
        )
    config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}


def place_of(name: str, kind: GgufArchitecture) -> Place | None:
    """Where the tensor that a Hugging Face checkpoint calls `name` lies; None for a name that GGUF has no word for."""
    if name in AT_THE_ENDS:
        is_norm = name == "model.norm.weight"
        return Place(name=AT_THE_ENDS[name], added=kind.norm_added if is_norm else 0.0)
    if name in kind.dense:
        return Place(name=name)
    stream = STREAM_END.match(name)
    if stream is not None:
        return Place(name="altup_unembd_proj.weight" if stream[1] else "altup_proj.weight", expert=int(stream[2]))
    layer = LAYER.match(name)
    if layer is None:
        return None
    block = f"blk.{layer[1]}"
    if layer[2] in ODD_ENDINGS:
        odd = ODD_ENDINGS[layer[2]]
        is_tiled = kind.is_tiled and odd in BY_VALUE_HEAD
        return Place(name=f"{block}.{odd}", heads="v" if is_tiled else None, is_negative=odd == "ssm_a")
    part, _, ending = MLP.sub("mlp.", layer[2]).rpartition(".")
    forms = (ONE_EXPERT, SHARED_EXPERTS, LATENT_HEAD, HEAD_NORM)
    expert, shared, head, norm = (form.match(part) for form in forms)
    if ending not in ("weight", "bias"):
        return None
    if expert is not None and expert[2] in EXPERT:
        return Place(name=f"{block}.ffn_{EXPERT[expert[2]]}_exps.{ending}", expert=int(expert[1]))
    if shared is not None and shared[1] in EXPERT:
        return Place(name=f"{block}.ffn_{EXPERT[shared[1]]}_shexp.{ending}")
    if head is not None:
        return Place(name=f"{block}.attn_{head[1]}.{ending}", expert=int(head[2]))
    if norm is not None:
        return Place(name=f"{block}.attn_{norm[1]}_norm.{ending}", expert=int(norm[2]))
    theirs = kind.norms.get(part) or IN_LAYER.get(part)
    if theirs is None:
        return None
    heads = {"attn_q": "q", "attn_k": "k"}.get(theirs) if kind.is_permuted else None
    if kind.is_tiled and f"{theirs}.{ending}" in (*BY_VALUE_HEAD, INPUTS_BY_VALUE_HEAD):
        heads = "inputs" if theirs == "ssm_out" else "v"
    is_added = part.endswith("norm") and ending == "weight" and theirs != "ssm_norm"
    added = kind.norm_added if is_added else 0.0
    return Place(name=f"{block}.{theirs}.{ending}", heads=heads, added=added)


def joined_place(place: Place, n_rows: int, tensors: Mapping[str, GgufTensor]) -> Place:
    """The same, or where a file has it along the rows of a larger tensor (q, k and v; gate and up of all experts), or by a name
    without an ending (a norm of Falcon-H1).
    """
    bare = place.name.removesuffix(".weight")
    if place.name not in tensors and bare in tensors:
        return replace(place, name=bare)
    block, _, ending = place.name.rpartition(".")
    block, _, stem = block.rpartition(".")
    whole, which = JOINED.get(stem, ("", ""))
    found = tensors.get(f"{block}.{whole}.{ending}")
    if place.name in tensors or found is None:
        return place
    held = (found.shape if place.expert is None else found.shape[1:])[0]
    begin = {"first": 0, "second to last": held - 2 * n_rows, "last": held - n_rows}[which]
    return replace(place, name=found.name, begin=begin) if 0 <= begin <= held - n_rows else place


def load_gguf_spec(path: Path) -> ModelSpec:
    """The model of a GGUF file, as the planner sees it. LoadError where it holds another number of parameters than it says."""
    file, part = open_gguf(path), PART.match(path.name)
    return read_model(HfConfig(read_config(file), path=str(path)), name=path.stem if part is None else part["stem"])


def is_beside(name: str, file: GgufFile) -> bool:
    """Whether a tensor is none of the decoder's: how positions turn, layers that only draft, keys and values of layers that
    attend to another's, an index of those that take another's choice, or for pooled states.
    """
    block = BLOCK.match(name)
    if block is not None and int(block[1]) >= n_layers_of(file):
        return True
    if INDEX.match(name) and block is not None:
        return index_kinds(file, n_layers_of(file))[int(block[1])] == SHARED
    if block is not None and "attention.shared_kv_layers" in architecture_of(file).keys and UNUSED_KV.match(name):
        return int(block[1]) >= n_layers_of(file) - (Keys(file).number("attention.shared_kv_layers") or 0)
    return ROPE_TENSOR.match(name) is not None or name in architecture_of(file).dense


def scales_beside(tensor: GgufTensor) -> tuple[str, ...]:
    """The names of what NVFP4 may have beside a matrix: its scale, and that of its inputs, which are rounded otherwise here."""
    stem = tensor.name.removesuffix("weight")
    return (f"{stem}scale", f"{stem}input_scale") if tensor.type.name == "NVFP4" else ()


def count_parameters(file: GgufFile) -> int:
    """Elements of all tensors that are the model's."""
    scales = {name for tensor in file.tensors.values() for name in scales_beside(tensor)}
    curves = len(CURVES) * n_layers_of(file) if architecture_of(file) is APERTUS else 0
    return curves + sum(
        math.prod(tensor.shape)
        for name, tensor in file.tensors.items()
        if name not in scales and not is_beside(name, file)
    )
