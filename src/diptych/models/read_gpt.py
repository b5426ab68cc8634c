"""What families say in keys of their own, from a config: of heads and norms around GPT-2, of layers one by one."""

from __future__ import annotations

from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.family import Family
from diptych.models.spec import Norms


def n_kv_heads(config: HfConfig) -> int:
    """One for all queries or one for each where `multi_query` decides; Falcon's newer architecture has a number."""
    n_heads = config.integer("num_attention_heads")
    if "multi_query" in config.raw and not config.flag("new_decoder_architecture"):
        return 1 if config.flag("multi_query") else n_heads
    return config.integer("num_key_value_heads", n_heads)


def arrangement(config: HfConfig, family: Family) -> Norms:
    """Where a layer norms, and whether attention and MLP run side by side."""
    if family.parallel_key is None:
        return family.norms
    is_parallel = config.flag(family.parallel_key)
    if "new_decoder_architecture" not in family.keys:
        return family.parallel_norms if is_parallel else family.norms
    is_new = config.flag("new_decoder_architecture")
    n_norms = config.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if n_norms > 2 or (n_norms == 2 and not is_new) or (is_new and not is_parallel):
        raise LoadError(
            f"num_ln_in_parallel_attn in {config.path} is {n_norms}, new_decoder_architecture {is_new} and "
            f"{family.parallel_key} {is_parallel}; no {family.name} has these together"
        )
    if not is_parallel:
        return family.norms
    return Norms.BESIDE if n_norms == 2 else Norms.PARALLEL


def of_all_layers(value: Any, name: str, path: str) -> Any:
    """What a list with an entry for each layer says of all of them. LoadError where layers differ."""
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise LoadError(f"{name} in {path} differs from layer to layer, which is not supported")
    return value[0]
