"""Layers with a state, as a GGUF file's metadata gives them: which they are, and their heads."""

from __future__ import annotations

from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.table import BY_ARCHITECTURE
from diptych.models.gguf.architecture import GgufArchitecture
from diptych.models.gguf.file import GgufFile
from diptych.models.gguf.keys import Keys
from diptych.models.states import StateRule


def add_states(config: dict[str, Any], keys: Keys, file: GgufFile, kind: GgufArchitecture) -> None:
    """What the keys of `GgufArchitecture` do not say by themselves, where some layers have a state."""
    family = BY_ARCHITECTURE[kind.architecture]
    rule = family.state_rule
    if rule is None or family.has_pairs:
        return
    if family.has_states_alone:
        if "mixer_rms_eps" in family.keys:  # of norms that have the epsilon of all others
            config["mixer_rms_eps"] = config["rms_norm_eps"]
        if rule is StateRule.SSD:
            config["mamba_d_head"] = value_heads(file)[2]
        return
    if rule is StateRule.SELECTIVE:
        _add_selective(config, keys, file)
        return
    if family.has_blocks:
        _add_blocks(config, keys, file)
        return
    if "linear_num_heads" in family.keys:
        _add_layers(config, keys, "linear_attention")
        config["num_key_value_heads"] = config["linear_num_heads"] = config["num_attention_heads"]
        return
    if rule is StateRule.DELTA:
        config["linear_value_head_dim"] = value_heads(file)[2]
        _add_recurrent(config, keys)
        return
    _add_layers(config, keys, "mamba" if rule is StateRule.SSD else "conv")
    if rule is not StateRule.SSD:
        return
    _, n_heads, head_dim = value_heads(file)
    _add_width(config, keys, n_heads * head_dim)
    config["position_embedding_type"] = "rope" if keys.number("rope.scaling.finetuned") else None
    if not config.get("num_experts"):
        config["num_experts"] = 0
        config.setdefault("shared_expert_intermediate_size", config["intermediate_size"])


def _add_selective(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """Of Mamba-1 beside attention: which layers have it, how wide it is, and which have a mixture."""
    _add_layers(config, keys, "mamba")
    _add_width(config, keys, keys.number("ssm.inner_size"))
    routers = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(config["num_hidden_layers"])]
    config["mlp_layer_types"] = ["sparse" if one else "dense" for one in routers]


def _add_width(config: dict[str, Any], keys: Keys, width: Any) -> None:
    """What the width of all channels is of the model's."""
    hidden = HfConfig(config, path=str(keys.path)).integer("hidden_size")
    if not isinstance(width, int) or width < 1 or width % hidden:
        raise LoadError(
            f"{keys.full('ssm.inner_size')} in {keys.path} is {width}; it must be a multiple of the model's width, {hidden}"
        )
    config["mamba_expand"] = width // hidden


def _add_recurrent(config: dict[str, Any], keys: Keys) -> None:
    """Which layers have one, where the file says so itself; else all but every so many-th."""
    name, n_layers = "attention.recurrent_layers", config["num_hidden_layers"]
    found = keys.values(name)
    if found is None:
        return
    if len(found) < n_layers or any(not isinstance(one, bool) for one in found):
        raise LoadError(
            f"{keys.full(name)} in {keys.path} must hold {n_layers} truth values or more, one for each layer"
        )
    config["layer_types"] = ["linear_attention" if one else "full_attention" for one in found[:n_layers]]


def _add_blocks(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """Blocks with KV heads attend, those with an inner width are MLPs or mixtures, all others keep a state."""
    heads, widths = (_of_layers(config, keys, name) for name in ("attention.head_count_kv", "feed_forward_length"))
    has_experts = any(name.endswith(".ffn_gate_inp.weight") for name in file.tensors)
    mlp = "moe" if has_experts else "mlp"
    config["layers_block_type"] = [
        "full_attention" if n else mlp if width else "linear_attention" for n, width in zip(heads, widths, strict=True)
    ]
    config["num_key_value_heads"] = max(heads) or config["num_attention_heads"]
    config["mamba_d_head"] = value_heads(file)[2]
    if has_experts:  # older files give the width of all that a token has
        config.setdefault("moe_intermediate_size", max(widths) // max(config.get("num_experts_per_tok") or 1, 1))
    else:
        config["intermediate_size"] = max(widths) or None


def _of_layers(config: dict[str, Any], keys: Keys, name: str) -> list[int]:
    """A number for each layer (or block), of which those above 0 are one number."""
    n_layers = config["num_hidden_layers"]
    found = (keys.values(name) or [keys.number(name)] * n_layers)[:n_layers]
    if (
        len(found) != n_layers
        or len({one for one in found if one}) > 1
        or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in found)
    ):
        raise LoadError(
            f"{keys.full(name)} in {keys.path} must hold {n_layers} whole numbers, one for each layer, and those above 0 must "
            "be one number"
        )
    return found


def _add_layers(config: dict[str, Any], keys: Keys, called: str) -> None:
    """Layers without KV heads have a state."""
    heads = _of_layers(config, keys, "attention.head_count_kv")
    config["layer_types"] = ["full_attention" if one else called for one in heads]
    config["num_key_value_heads"] = max(heads) or config["num_attention_heads"]


def value_heads(file: GgufFile) -> tuple[int, int, int]:
    """Of states: key heads, value heads, and how wide those are. LoadError where they do not go with each other."""
    keys = Keys(file)
    names = ("ssm.group_count", "ssm.time_step_rank", "ssm.inner_size")
    n_key_heads, n_value_heads, width = found = tuple(keys.number(name) for name in names)
    are_counts = all(isinstance(one, int) and one > 0 for one in found)
    if not are_counts or width % n_value_heads or n_value_heads % n_key_heads:
        raise LoadError(
            f"{', '.join(map(keys.full, names))} in {file.path} are {', '.join(map(str, found))}; each must be at least 1 and "
            "divide the next"
        )
    return n_key_heads, n_value_heads, width // n_value_heads
