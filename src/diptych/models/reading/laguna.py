"""Laguna's configs: a gate of heads by several names, rotary settings of each kind of layers, lists that repeat each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.rope import LAYER_TYPES

# what `gating`, and `gating_types` of each layer, may say -> whether a gate is of a whole head
GATINGS = {"per-head": True, "per_head": True, "per-element": False, "per_element": False}
# said elsewhere too, and read here or by nobody
SAID = ("gating_types", "mlp_only_layers", "partial_rotary_factor", "rope_theta", "rope_scaling")


def as_gated(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same config with `gating` true for gates of whole heads and false for those of single channels, what each layer is,
    and rotary settings of each kind. LoadError where two keys say different things.
    """
    n = HfConfig({**defaults, **raw}, path=path).integer("num_hidden_layers")
    kinds = HfConfig(raw, path=path).layer_types(n) or [LAYER_TYPES[0]] * n
    raw = {**raw, "layer_types": kinds, "gating": _gating(raw, defaults, n, path)}
    if LAYER_TYPES[1] not in kinds and not raw.get("sliding_window"):
        raw["sliding_window"] = None  # Laguna M.1 says 0
    if not raw.get("moe_router_logit_softcapping"):
        raw["moe_router_logit_softcapping"] = None
    _check_dense(HfConfig(raw, path=path), n)
    if raw.get("rope_scaling"):
        raise LoadError(
            f"rope_scaling in {path} is {raw['rope_scaling']!r}; rope_parameters has an object for each kind of layers instead"
        )
    if raw.get("rope_parameters") is None:
        raw["rope_parameters"] = defaults["rope_parameters"]
    else:
        raw["rope_parameters"] = _by_kind(HfConfig(raw, path=path).section("rope_parameters"), kinds)
    return {key: value for key, value in raw.items() if key not in SAID}


def _gating(raw: Mapping[str, Any], defaults: Mapping[str, Any], n: int, path: str) -> bool:
    said = raw.get("gating", defaults["gating"])
    found = True if said is True else GATINGS.get(said) if isinstance(said, str) else None
    if found is None:
        raise LoadError(f"gating in {path} is {said!r}; true, 'per-head' and 'per-element' are supported")
    kinds = raw.get("gating_types")
    if kinds is None:
        return found
    if not isinstance(kinds, list) or len(kinds) != n:
        raise LoadError(f"gating_types in {path} must name the gates of {n} layers")
    if any(not isinstance(kind, str) or GATINGS.get(kind) is not found for kind in kinds):
        raise LoadError(
            f"gating_types in {path} names other gates than gating, {said!r}; all layers have one kind here"
        )
    return found


def _check_dense(config: HfConfig, n: int) -> None:
    """`mlp_only_layers` repeats `mlp_layer_types`, which stands for the first layer alone where it is missing."""
    dense, kinds = config.integers("mlp_only_layers"), config.raw.get("mlp_layer_types")
    if dense is None:
        return
    found = [i for i in range(n) if i == 0] if kinds is None else [i for i, kind in enumerate(kinds) if kind == "dense"]
    if sorted(dense) != found:
        raise LoadError(f"mlp_only_layers in {config.path} is {dense}; by mlp_layer_types layers {found} are dense")


def _by_kind(section: HfConfig, kinds: list[str]) -> dict[str, Any]:
    """Each kind's settings; one that says nothing of it turns whole heads, whatever stands outside."""
    missing = [kind for kind in dict.fromkeys(kinds) if not isinstance(section.raw.get(kind), dict)]
    if missing:
        raise LoadError(f"{section.path} has no object for {missing[0]} layers; each kind of layers has one")
    of_kinds = {kind: section.raw[kind] for kind in LAYER_TYPES if isinstance(section.raw.get(kind), dict)}
    for kind, own in of_kinds.items():
        if own.get("rope_theta") is None:
            raise LoadError(f"rope_theta is missing from {kind} of {section.path}")
    return {kind: {"partial_rotary_factor": 1.0, **own} for kind, own in of_kinds.items()}
