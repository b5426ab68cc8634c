"""Ling 3.0's configs: files of its makers have words of older models beside what is read, and other names for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.refused import LIGHTNING

OLDER = (
    "group_norm_size",
    "linear_silu",
)  # of Ling 2.5, which calls itself so, too; the newer model has more words beside
LIMITS = {"expert_swiglu_limit_list": "swiglu_limits", "share_expert_swiglu_limit_list": "swiglu_limits_shared"}


def as_ling(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same config with limits of its own layers only, and the width of heads that keep a state under its own name.

    Limits of experts and of shared experts are read by the makers' own serving, not by transformers: a gate is held below one
    behind its activation, and up within it. UnsupportedModel for Ling 2.5. LoadError where two keys say different things.
    """
    if any(raw.get(key) for key in OLDER) and not any(key.startswith("kda_") for key in raw):
        raise UnsupportedModel(f"{path} is that of Ling 2.5, which is not supported ({LIGHTNING}); Ling 3.0 is read")
    config = HfConfig({**defaults, **raw}, path=path)
    n, first = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace", low=0)
    group = config.integer("full_attention_interval")
    if raw.get("layer_types") is None and n % group:
        raise LoadError(
            f"layer_group_size in {path} is {group}, of {n} layers; what those behind the last group are is read in two ways",
            hint="layer_types says it of each layer",
        )
    for theirs, ours in LIMITS.items():
        given = raw.pop(theirs, None)
        if given is None:
            continue
        if not isinstance(given, list) or len(given) < n or any(given[:first]):
            raise LoadError(f"{theirs} in {path} must hold a number for each of {n} layers, 0 for the first {first}")
        raw[ours] = given[:n]
    for key, usual in (
        ("moe_shared_expert_intermediate_size", "moe_intermediate_size"),
        ("rotary_dim", "qk_rope_head_dim"),
    ):
        said = raw.pop(key, None)
        if said is not None and said != config.integer(usual):
            raise LoadError(f"{key} in {path} is {said!r}; it must be that of {usual}, {config.integer(usual)}")
    # rotary heads turn whole, whatever it says, or by pairs from the first on
    for section in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(section), dict) and raw[section].get("rope_type") != "proportional":
            raw[section] = {key: one for key, one in raw[section].items() if key != "partial_rotary_factor"}
    width = raw.get("linear_head_dim") or raw.get("head_dim") or defaults["linear_head_dim"]
    others = {key: one for key, one in raw.items() if key not in ("partial_rotary_factor", "head_dim")}
    return {**others, "linear_head_dim": width}
