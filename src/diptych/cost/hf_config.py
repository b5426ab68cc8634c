"""Any Hugging Face config.json as a `ModelSpec`: dense, grouped queries, mixtures of experts, latent attention, windows.

Only keys are read, never code. A family with parts that the cost model has no formula for (state-space or linear
attention layers) is refused by name instead of being priced wrongly.

>>> model_spec_from_hf({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
...                     "intermediate_size": 128, "vocab_size": 100}).head_dim
16
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.cost.tables import layer_windows
from diptych.ground.errors import ConfigError
from diptych.ground.specs import MlaSpec, ModelSpec, MoeSpec

_QKV_BIAS = ("qwen2", "qwen2_moe", "glm4_moe")
_HEAD_NORM = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_FULL_NORM = ("olmo2", "olmoe", "olmo3")
_FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text", "glm4")
_NOT_GATED = ("opt", "bloom", "gpt2", "gpt_neox", "gptj", "falcon", "phi", "starcoder2")
_ONE_NORM = ("phi", "gptj", "falcon", "cohere", "cohere2")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "bloom", "falcon")


def load_model_file(path: Path) -> ModelSpec:
    """The model of a config.json, or of a folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}", hint="give a config.json or the folder that holds it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file} as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_spec_from_hf(config, name=name)


def model_spec_from_hf(config: Mapping[str, Any], *, name: str | None = None) -> ModelSpec:
    """The shape behind a Hugging Face config. ConfigError names the key that is missing or impossible."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # multimodal wrappers: the language part
        config = {**{key: config[key] for key in ("tie_word_embeddings",) if key in config}, **inner}
    kind = str(config.get("model_type", ""))
    _refuse(config, kind)
    n_layers = _size(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    n_heads = _size(config, "num_attention_heads", "n_head", "n_heads")
    n_kv_heads = _kv_heads(config, n_heads)
    head_dim = int(config.get("head_dim") or hidden // n_heads)
    if n_heads % n_kv_heads:
        raise ConfigError(f"config.json has {n_heads} heads and {n_kv_heads} kv heads; heads must be a multiple")
    moe = _moe(config, kind)
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or kind or "model"),
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=_ffn(config, hidden),
        vocab=_size(config, "vocab_size"),
        windows=_windows(config, kind, n_layers),
        max_context_tokens=_optional(config, "max_position_embeddings", "n_positions", "seq_length"),
        is_tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        is_gated=kind not in _NOT_GATED,
        has_qkv_bias=_has_qkv_bias(config, kind),
        has_o_bias=_has_o_bias(config, kind),
        has_mlp_bias=bool(config.get("mlp_bias", kind in _NOT_GATED)),
        has_norm_bias=kind in _NOT_GATED,
        has_embedding_norm=kind == "bloom",
        has_sinks=kind == "gpt_oss",
        qk_norm=_qk_norm(config, kind),
        norms_per_layer=4 if kind in _FOUR_NORMS else 1 if kind in _ONE_NORM else 2,
        n_position_embeddings=_positions(config, kind),
        mla=_mla(config),
        moe=moe,
    )


def _refuse(config: Mapping[str, Any], kind: str) -> None:
    layer_types = config.get("layer_types") or ()
    if "linear_attention" in layer_types or any(word in kind for word in ("mamba", "rwkv", "jamba", "lfm2")):
        raise ConfigError(
            f"model type {kind!r} has layers that are not attention; the planner has no formula for them",
            hint="supported: any transformer with full or windowed attention, MLA, dense or expert MLPs",
        )


def _size(config: Mapping[str, Any], *keys: str) -> int:
    value = _optional(config, *keys)
    if value is None:
        raise ConfigError(f"config.json has no {keys[0]}")
    if value < 1:
        raise ConfigError(f"config.json: {keys[0]} is {value}; it must be at least 1")
    return value


def _optional(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise ConfigError(f"config.json: {key} is {value!r}; it must be a whole number")
        return int(value)
    return None


def _kv_heads(config: Mapping[str, Any], n_heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _optional(config, "num_key_value_heads", "num_kv_heads") or n_heads


def _ffn(config: Mapping[str, Any], hidden: int) -> int:
    found = _optional(config, "intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    return found if found is not None else 4 * hidden


def _windows(config: Mapping[str, Any], kind: str, n_layers: int) -> tuple[int | None, ...]:
    window = _optional(config, "sliding_window")
    layer_types = config.get("layer_types")
    if window is None:
        return (None,) * n_layers
    if isinstance(layer_types, list) and len(layer_types) == n_layers:
        return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
    if kind in ("gemma2", "gpt_oss"):
        return layer_windows(n_layers, window, 2)
    if kind in ("gemma3", "gemma3_text"):
        return layer_windows(n_layers, window, _optional(config, "sliding_window_pattern") or 6)
    if kind.startswith("qwen"):  # declared, but off unless asked for; then only above max_window_layers
        if not config.get("use_sliding_window", False):
            return (None,) * n_layers
        full = _optional(config, "max_window_layers") or 0
        return tuple(window if layer >= full else None for layer in range(n_layers))
    return (window,) * n_layers


def _has_qkv_bias(config: Mapping[str, Any], kind: str) -> bool:
    if "attention_bias" in config:
        return bool(config["attention_bias"])
    return bool(config.get("qkv_bias", kind in _QKV_BIAS or kind == "gpt_oss" or kind in _NOT_GATED))


def _has_o_bias(config: Mapping[str, Any], kind: str) -> bool:
    """qwen2 and GLM give biases to q, k and v only; others with `attention_bias` also to the output."""
    if kind in _QKV_BIAS or kind == "glm4":
        return False
    return bool(config.get("attention_bias", kind == "gpt_oss" or kind in _NOT_GATED))


def _qk_norm(config: Mapping[str, Any], kind: str) -> str | None:
    if kind in _HEAD_NORM or (config.get("use_qk_norm") and kind != "llama4_text"):
        return "head"
    return "full" if kind in _FULL_NORM else None


def _positions(config: Mapping[str, Any], kind: str) -> int:
    if kind not in ("opt", "gpt2"):
        return 0
    return (_optional(config, "max_position_embeddings", "n_positions") or 0) + (2 if kind == "opt" else 0)


def _mla(config: Mapping[str, Any]) -> MlaSpec | None:
    kv_rank = _optional(config, "kv_lora_rank")
    if kv_rank is None:
        return None
    return MlaSpec(
        q_rank=_optional(config, "q_lora_rank"),
        kv_rank=kv_rank,
        nope_dim=_size(config, "qk_nope_head_dim"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        v_dim=_size(config, "v_head_dim"),
    )


def _moe(config: Mapping[str, Any], kind: str) -> MoeSpec | None:
    n_experts = _optional(config, "num_local_experts", "n_routed_experts", "num_experts")
    if not n_experts or n_experts < 2:
        return None
    per_token = _size(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token")
    if per_token > n_experts:
        raise ConfigError(f"config.json: {per_token} experts per token of {n_experts}")
    expert_ffn = _size(config, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = _optional(config, "shared_expert_intermediate_size")
    if shared is None:
        shared = (_optional(config, "n_shared_experts") or (1 if kind == "llama4_text" else 0)) * expert_ffn
    step = _optional(config, "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step") or 1
    first = _optional(config, "first_k_dense_replace")
    if first is None:  # "every step-th layer" counts from 1: layers step-1, 2 step-1, ...
        first = step - 1
    is_corrected = config.get("topk_method") == "noaux_tc" or kind in ("deepseek_v3", "kimi_k2", "glm4_moe")
    return MoeSpec(
        n_experts=n_experts,
        experts_per_token=per_token,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        first_layer=first,
        layer_step=step,
        has_router_bias=kind == "gpt_oss" or is_corrected,
        has_expert_bias=kind == "gpt_oss",
        has_shared_gate=kind == "qwen2_moe",
    )
