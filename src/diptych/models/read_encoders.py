"""What configs of encoders say in words of their own: T5's MLPs, GTE's stretched positions, scores learned by distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.positions import Distances

FARTHEST = 65_536  # each head has a number for each distance up to it, to either side


def learned_distances(config: HfConfig) -> Distances | None:
    """How what scores gain by distance is kept, in models that learn that; others have no key for it."""
    key, further = "relative_attention_num_buckets", "relative_attention_max_distance"
    if key not in config.raw:
        return None
    n_buckets, reach = config.integer(key, low=4), config.integer(further, 128)
    config.at_most(further, reach, FARTHEST)
    if n_buckets % 4 or reach <= n_buckets // 4:
        raise LoadError(
            f"{key} in {config.path} is {n_buckets} and {further} {reach}; buckets are four times as many as those of one "
            "distance each, which reach less far"
        )
    return Distances(n_buckets=n_buckets, reach=reach)


def as_gated_or_not(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """T5's config with the activation and whether it is a gate's in place of the one word that says both."""
    said = raw.get("feed_forward_proj", defaults["feed_forward_proj"])
    parts = said.split("-") if isinstance(said, str) else []
    if len(parts) not in (1, 2) or parts[:-1] not in ([], ["gated"]):
        raise LoadError(f"feed_forward_proj in {path} is {said!r}; it is an activation, or gated- and one")
    act = "gelu_new" if said == "gated-gelu" else parts[-1]
    return {**raw, "hidden_act": act, "is_gated": len(parts) == 2}


def with_stretched_base(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """GTE's published config with the rotation as others say it: `ntk` turns pair i by (theta f)^(-2i/d) f^(-2/d), whatever the
    length (https://kexue.fm/archives/9706; of it vLLM has the same).
    """
    said = raw.get("rope_scaling")
    if not isinstance(said, dict) or said.get("type", said.get("rope_type")) != "ntk":
        return raw
    config = HfConfig({**defaults, **raw}, path=path)
    stretch = config.section("rope_scaling")
    unread = sorted(
        name for name, value in said.items() if name not in ("type", "rope_type", "factor") and value is not None
    )
    if unread:
        raise LoadError(f"{unread[0]} in {stretch.path} is {said[unread[0]]!r}; ntk rope has no such key")
    factor, width = stretch.number("factor"), config.integer("hidden_size") // config.integer("num_attention_heads")
    if factor < 1.0 or width < 1:
        raise LoadError(f"factor in {stretch.path} is {factor}; it must be at least 1, of heads with some width")
    theta = config.number("rope_theta") * factor
    return {**raw, "rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor ** (2 / width)}}
