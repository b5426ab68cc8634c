"""What families say in keys of their own, from a config: of heads and norms around GPT-2, of layers one by one."""

from __future__ import annotations

from typing import Any, cast

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.keys import HARMLESS
from diptych.models.spec import Norms

KINDS = {"global": "full_attention", "local": "sliding_attention"}
MOST_RUNS = 2048  # as many as there may be layers


def n_kv_heads(config: HfConfig) -> int:
    """One for all queries or one for each where `multi_query` decides; Falcon's newer architecture has a number."""
    n_heads = config.integer("num_attention_heads")
    if "multi_query" in config.raw and not config.flag("new_decoder_architecture"):
        return 1 if config.flag("multi_query") else n_heads
    return config.integer("num_key_value_heads", n_heads)


def arrangement(config: HfConfig, family: Family) -> Norms:
    """Where a layer norms, and with that whether attention and MLP run side by side."""
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


def with_kinds(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """GPT-Neo's config with layer_types in place of runs of names, each with how often it comes: [[["global"], 12]]."""
    runs, layers = raw.get("attention_types"), list[str]()
    for run in [[list(KINDS), 12]] if runs is None else runs if isinstance(runs, list) else [runs]:
        names, count = cast("list[Any]", run) if isinstance(run, list) and len(run) == 2 else (None, 0)
        if not isinstance(names, list) or any(one not in KINDS for one in map(str, names)) or not _is_count(count):
            raise LoadError(
                f"attention_types in {path} has {run!r}; a list of {' and '.join(KINDS)} and how often it comes are expected"
            )
        layers += names * count
    if raw.get("attention_layers", layers) != layers:
        raise LoadError(f"attention_layers and attention_types in {path} say different things of the layers")
    others = {key: one for key, one in raw.items() if key not in ("attention_types", "attention_layers")}
    return {**others, "layer_types": [KINDS[one] for one in layers]}


def with_section(raw: dict[str, Any], name: str, family: Family, path: str) -> dict[str, Any]:
    """MPT's and DBRX's with what a section says in its place; keys of the section that configs have anyway are left out."""
    section = HfConfig(raw, path=path).section(name).raw
    own = {key: one for key, one in section.items() if key not in HARMLESS and key not in family.renamed}
    by_own_names = {family.renamed[key]: one for key, one in section.items() if key in family.renamed}
    return {**own, **{key: one for key, one in raw.items() if key != name}, **by_own_names}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_RUNS


def of_all_layers(value: Any, name: str, path: str) -> Any:
    """What a list with an entry for each layer says of all of them. LoadError where layers differ."""
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise LoadError(f"{name} in {path} differs from layer to layer, which is not supported")
    return value[0]
