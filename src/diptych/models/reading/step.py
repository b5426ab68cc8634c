"""Step 3.7's text, whose published files have a number for each layer, and those of the layers that draft behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.rope import LAYER_TYPES

BY_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
            "partial_rotary_factors")  # fmt: skip
# of attention_other_setting: what windowed layers have, and the key for all layers where they have no other
OTHERS = {"attention_type": None, "num_attention_heads": None, "num_attention_groups": "num_key_value_heads",
          "head_dim": "head_dim", "true_head_dim": "head_dim"}  # fmt: skip


def as_usual(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same config with lists of its own layers only, and the numbers of a kind of layers once."""
    config = HfConfig({**defaults, **raw}, path=path)
    n, n_drafting = config.integer("num_hidden_layers"), config.integer("num_nextn_predict_layers", 0, low=0)
    raw = {key: value[:n] if key in BY_LAYER and isinstance(value, list) and len(value) == n + n_drafting else value
           for key, value in raw.items()}  # fmt: skip
    kinds = raw["layer_types"] = HfConfig(raw, path=path).layer_types(n) or ["full_attention"] * n
    if raw.get("mlp_layer_types") is None and raw.get("moe_layers_enum") is not None:
        mixtures = _numbers(raw["moe_layers_enum"], path)
        raw["mlp_layer_types"] = ["sparse" if i in mixtures else "dense" for i in range(n)]
    heads = _windowed_heads(HfConfig({**defaults, **raw}, path=path), kinds)
    if heads is not None:
        raw["num_sliding_attention_heads"] = heads
    given = config.section("rope_parameters").raw
    if not all(isinstance(given.get(kind), dict) for kind in kinds):
        if given:
            raise LoadError(f"rope_parameters in {path} must hold an object for each kind of layers")
        raw["rope_parameters"] = _rotary({**defaults, **raw}, kinds, path)
    said = ("moe_layers_enum", "attention_other_setting", "per_layer_config", "rope_theta", "partial_rotary_factors",
            "rope_scaling")  # fmt: skip
    return {key: value for key, value in raw.items() if key not in said}


def _numbers(layers: object, path: str) -> set[int]:
    """Of a list of layers, or of one that is written as text."""
    items = [one for one in layers.split(",") if one.strip()] if isinstance(layers, str) else layers
    if not isinstance(items, list) or not all(str(one).strip().isdecimal() for one in items):
        raise LoadError(f"moe_layers_enum in {path} is {layers!r}; it must name layers by their numbers")
    return {int(one) for one in items}


def _windowed_heads(config: HfConfig, kinds: Sequence[str]) -> int | None:
    """Query heads of windowed layers, as published files say it or as transformers writes it; None: all layers have as many."""
    other, by_layer = config.section("attention_other_setting"), config.section("per_layer_config").raw
    for key, value in other.raw.items():
        ours = OTHERS.get(key, "")
        if ours is not None and value != config.raw.get(ours):
            raise LoadError(
                f"{key} in {other.path} is {value!r}; windowed layers may have query heads of their own only"
            )
    if not by_layer:
        return other.optional_integer("num_attention_heads")
    windowed = [i for i, kind in enumerate(kinds) if kind == LAYER_TYPES[1]]
    entries = [one if isinstance(one, dict) else {} for one in by_layer.values()]
    named = sorted(int(number) if str(number).isdecimal() else -1 for number in by_layer)
    if named != windowed or any(one != entries[0] or list(one) != ["num_attention_heads"] for one in entries):
        raise LoadError(
            f"per_layer_config in {config.path} must say how many query heads windowed layers have, and no more"
        )
    return HfConfig(entries[0], path=f"per_layer_config of {config.path}").integer("num_attention_heads")


def _rotary(raw: dict[str, Any], kinds: Sequence[str], path: str) -> dict[str, dict[str, Any]]:
    """rope_parameters of each kind of layers; what scales positions is of those that attend to everything."""
    found: dict[str, dict[str, Any]] = {}
    for kind in LAYER_TYPES:
        own = [i for i, one in enumerate(kinds) if one == kind]
        section: dict[str, Any] = {"rope_type": "default"}
        for key, ours in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
            value = raw.get(key)
            if isinstance(value, list):
                if len(value) != len(kinds) or any(value[i] != value[own[0]] for i in own):
                    raise LoadError(
                        f"{key} in {path} must hold a number for each layer, the same for all {kind} layers"
                    )
                section |= {ours: value[own[0]]} if own else {}
            elif value is not None:
                section[ours] = value
        found[kind] = section
    found[LAYER_TYPES[0]] |= HfConfig(raw, path=path).section("rope_scaling").raw
    return found
