"""What configs of encoders say in words of their own: T5's MLPs, GTE's stretched positions, scores learned by distance, and
those of contents and distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.positions import Distances, Related

FARTHEST = 65_536  # each head has a number for each distance up to it, to either side


def by_distance(config: HfConfig) -> dict[str, Any]:
    """Of `AttentionLayer` what scores gain by distance."""
    return {"distances": _learned_distances(config), "related": _related(config)}


def _learned_distances(config: HfConfig) -> Distances | None:
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


def _related(config: HfConfig) -> Related | None:
    """How what scores gain by contents and distance is kept, in models that learn that; others have no key for it."""
    if "pos_att_type" not in config.raw:
        return None
    key, further = "position_buckets", "max_relative_positions"
    n_buckets, reach = (max(0, config.integer(one, -1, low=-1)) for one in (key, further))
    reach = reach or config.integer("max_position_embeddings")
    config.at_most(further, reach, FARTHEST)
    if n_buckets and (n_buckets < 2 or reach - 1 <= n_buckets // 2):
        raise LoadError(
            f"{key} in {config.path} is {n_buckets} and {further} {reach}; half as many buckets, of one distance each, must "
            "reach less far"
        )
    said = config.raw.get("norm_rel_ebd", "none")
    words = said.lower().split("|") if isinstance(said, str) else None
    if words not in (["none"], ["layer_norm"]):
        raise LoadError(f"norm_rel_ebd in {config.path} is {said!r}; only 'none' and 'layer_norm' are supported")
    return Related(
        n_buckets=n_buckets, reach=reach, is_shared=config.flag("share_att_key"), is_normed=words == ["layer_norm"]
    )


def as_related(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """DeBERTa's config with the scale of its scores, of three products each, as others say it. LoadError where they are of
    fewer, or positions are told otherwise, too.
    """
    for key, usual, wanted in (("relative_attention", False, True), ("position_biased_input", True, False)):
        if raw.get(key, usual) is not wanted:
            raise LoadError(f"{key} in {path} is {raw.get(key, usual)!r}; of DeBERTa, only {wanted} is supported")
    said = raw.get("pos_att_type")
    kinds = said.split("|") if isinstance(said, str) else said
    if not isinstance(kinds, list) or {str(one).strip() for one in kinds} != {"c2p", "p2c"}:
        raise LoadError(f"pos_att_type in {path} is {said!r}; only 'c2p|p2c' is supported")
    config = HfConfig({**defaults, **raw}, path=path)
    width = config.integer("head_dim", max(1, config.integer("hidden_size") // config.integer("num_attention_heads")))
    return {**raw, "pos_att_type": ["c2p", "p2c"], "query_pre_attn_scalar": 3 * width}


def as_windowed(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """UltraBERT's published config with a name for each layer and a base for each kind of them, in place of a window (0 or null
    where a layer attends to everything) and a base for each layer. LoadError for several windows, or bases of one kind.
    """
    n, key = HfConfig({**defaults, **raw}, path=path).integer("num_hidden_layers"), "attention_windows"
    if raw.get(key) is not None:
        given = raw[key] if isinstance(raw[key], list) else None
        windows = HfConfig({key: [one or 0 for one in given] if given else raw[key]}, path=path).integers(key) or []
        named = ["sliding_attention" if one else "full_attention" for one in windows]
        if raw.get("layer_types") not in (None, named):
            raise LoadError(f"{key} and layer_types in {path} say different things of the layers")
        raw = {**raw, "layer_types": named, "sliding_window": _alike(key, [one for one in windows if one], path)}
    if not isinstance(raw.get("rope_theta"), list):
        return raw
    config = HfConfig({**defaults, **raw}, path=path)
    kinds = config.layer_types(n) or ["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(n)]
    bases = list(zip(config.numbers("rope_theta", n), kinds, strict=True))
    ours = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    said = {ours[kind]: _alike("rope_theta", [base for base, one in bases if one == kind], path) for kind in kinds}
    return {**{name: one for name, one in raw.items() if name != "rope_theta"}, **said}


def _alike(key: str, given: Sequence[float], path: str) -> float | None:
    """What all say; None where there are none."""
    if len(set(given)) > 1:
        raise LoadError(f"{key} in {path} holds {given[0]:g} and others for layers of one kind; they must be the same")
    return given[0] if given else None


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
