"""Where a tensor of ours lies in a GGUF file, and what the converter did to it: rows of q and k reordered, 1 added to norms,
experts stacked.

>>> place_of("model.layers.3.mlp.up_proj.weight", GgufArchitecture(architecture="Qwen2ForCausalLM")).name
'blk.3.ffn_up.weight'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from diptych.models.gguf.architecture import GgufArchitecture
from diptych.models.gguf.file import GgufTensor

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
