"""Checkpoints as they are published, where `transformers` would write others or has no class.

Each of REPUBLISHED is the same mathematics as a class that it has: MiniCPM is a Granite, EXAONE 3.5 and InternLM 2.5 are
Llamas, MiMo a Qwen2. So that class is the oracle, and its checkpoint is written as theirs are published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


def _renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """Patterns of names -> theirs, all that match in order."""
    found = {}
    for name, tensor in tensors.items():
        for ours, theirs in names.items():
            name = re.sub(ours, theirs, name)
        found[name] = tensor
    return found


def as_minicpm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Of a Granite: its multipliers by the numbers that they are made of."""
    said = {
        "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": config["hidden_size"] / config.pop("logits_scaling"),
    }
    assert config.pop("attention_multiplier") == (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    return config | {k: int(v) if v == int(v) else v for k, v in said.items()}, tensors


def as_exaone(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Of a Llama."""
    for ours, theirs in (
        ("num_hidden_layers", "num_layers"),
        ("hidden_act", "activation_function"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ):
        config[theirs] = config.pop(ours)
    names = {
        r"^model\.": "transformer.", r"embed_tokens": "wte", r"\.layers\.": ".h.", r"transformer\.norm": "transformer.ln_f",
        r"input_layernorm": "ln_1", r"post_attention_layernorm": "ln_2", r"self_attn": "attn.attention", r"o_proj": "out_proj",
        r"mlp\.gate_proj": "mlp.c_fc_0", r"mlp\.up_proj": "mlp.c_fc_1", r"mlp\.down_proj": "mlp.c_proj",
    }  # fmt: skip
    return config, _renamed(tensors, names)


def as_internlm2(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Of a Llama: rows of q, k and v in one projection, the queries of a KV head before its key and its value."""
    config["bias"] = config.pop("attention_bias")
    n_kv = config["num_key_value_heads"]
    names = {
        r"embed_tokens": "tok_embeddings", r"^lm_head": "output", r"self_attn\.o_proj": "attention.wo",
        r"input_layernorm": "attention_norm", r"post_attention_layernorm": "ffn_norm",
        r"mlp\.gate_proj": "feed_forward.w1", r"mlp\.up_proj": "feed_forward.w3", r"mlp\.down_proj": "feed_forward.w2",
    }  # fmt: skip
    found = _renamed({name: tensor for name, tensor in tensors.items() if not re.search("[qkv]_proj", name)}, names)
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{one}_proj")].unflatten(0, (n_kv, -1)) for one in "qkv"]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts, dim=1).flatten(0, 1)
    return config, found


def as_pangu(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Of a Llama."""
    config["bias"] = config.pop("attention_bias")
    return config, tensors


def as_mimo(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Of a Qwen2, beside a layer that drafts."""
    drafts = {f"model.mtp_layers.0.{part}.weight": torch.ones(4) for part in ("final_layernorm", "token_layernorm")}
    return config | {"attention_bias": True, "num_nextn_predict_layers": 1}, tensors | drafts


def as_nas(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Of a Llama of such layers."""
    return config | {"num_key_value_heads": None, "intermediate_size": None}, tensors


# family -> architecture, model_type, and how
REPUBLISHED: dict[str, tuple[str, str, Callable[[Config, Tensors], tuple[Config, Tensors]]]] = {
    "minicpm": ("MiniCPMForCausalLM", "minicpm", as_minicpm),
    "exaone": ("ExaoneForCausalLM", "exaone", as_exaone),
    "internlm2": ("InternLM2ForCausalLM", "internlm2", as_internlm2),
    "pangu": ("PanguEmbeddedForCausalLM", "PanguEmbedded", as_pangu),
    "mimo": ("MiMoForCausalLM", "mimo", as_mimo),
    "nemotron-nas": ("DeciLMForCausalLM", "nemotron-nas", as_nas),
}


def republish(family: str, model: Any, directory: Path) -> None:
    """Write config.json and model.safetensors as that family has them."""
    architecture, kind, how = REPUBLISHED[family]
    tied = model.config.tie_word_embeddings
    stored = {k: v.contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    config, tensors = how(model.config.to_dict(), stored)
    directory.mkdir(parents=True, exist_ok=True)
    config |= {"architectures": [architecture], "model_type": kind}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.clone() for k, v in tensors.items()}, directory / "model.safetensors", {"format": "pt"})


def published(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of an OLMo Hybrid by the names of the checkpoints that `transformers` reads."""
    found = {}
    keys = model.config.linear_num_key_heads * model.config.linear_key_head_dim
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else "-1"
        kind = model.config.layer_types[int(layer)]
        if name.endswith("conv1d.weight"):
            parts = tensor.split((keys, keys, len(tensor) - 2 * keys))
            found |= {
                name.replace("conv1d", f"{one}_conv1d"): part.clone() for one, part in zip("qkv", parts, strict=True)
            }
        elif kind == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            found[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = tensor
        else:
            found[name] = tensor
    return found
