"""Which layers attend to a window only, and how each of them turns queries and keys, as a config says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.positions import Rope
from diptych.models.reading.mixtures import mixture_layers
from diptych.models.rope import LAYER_TYPES, ROPE_KEYS, rope_section


def windows_of(config: HfConfig, family: Family, n_layers: int) -> list[int | None]:
    """The window of each layer: by layer_types, by the family's pattern, or on every layer; none where switched off."""
    window = _window(config) if config.flag("use_sliding_window", True) else None
    if window is not None and is_both_ways(config):
        window = window // 2  # to either side
    given = config.raw.get("layer_types")
    if family.needs_layer_types and given is None:
        raise LoadError(f"layer_types is missing from {config.path}; it says what each layer of {family.name} is")
    if family.state_rule is not None:  # what the others are called is looked at with the states
        said = given if isinstance(given, list) and "sliding_window" in family.keys else []
        _check_window(config, window, said)
        return [window if i < len(said) and said[i] == "sliding_attention" else None for i in range(n_layers)]
    types = config.layer_types(n_layers, "chunked_attention" if family.attends_in_chunks else "sliding_attention")
    pattern = config.optional_integer("sliding_window_pattern") or family.full_every
    _check_window(config, window, types or [])
    if window is None:
        windows: list[int | None] = [None] * n_layers
    elif types is not None and "layer_types" in family.keys:
        windows = [None if kind == "full_attention" else window for kind in types]
    elif pattern is not None and "prefix_dense_sliding_window_pattern" in family.keys:
        n_dense, of_dense = config.integer("first_k_dense_replace", 0, low=0), _dense_pattern(config)
        patterns = [(i, of_dense) if i < n_dense else (i - n_dense, pattern) for i in range(n_layers)]
        windows = [None if (i + 1) % every == 0 else window for i, every in patterns]
    elif pattern is not None:
        first = 0 if family.full_first else pattern - 1
        windows = [
            None if i % pattern == first or (i == 0 and family.first_is_full) else window for i in range(n_layers)
        ]
    elif "max_window_layers" in family.keys:
        bound, begins = config.integer("max_window_layers", low=0), family.windows_begin
        windows = [window if (i < bound and i % 2 == 0 if begins else i >= bound) else None for i in range(n_layers)]
    elif "no_rope_layers" in family.keys:
        windows = [window if turns is family.attends_in_chunks else None for turns in no_rope(config, n_layers)]
    else:
        windows = [window] * n_layers
    if family.full_last:
        windows[-1] = None
    if types is not None and "layer_types" not in family.keys:
        found = ["full_attention" if one is None else "sliding_attention" for one in windows]
        if types != found:
            raise LoadError(
                f"layer_types in {config.path} mixes full and windowed layers; {family.name} has no such key",
                hint="the architecture named there may be wrong, or newer than this version knows",
            )
    return windows


def _check_window(config: HfConfig, window: int | None, types: list[str]) -> None:
    named = next((kind for kind in types if kind in ("sliding_attention", "chunked_attention")), None)
    if window is None and named is not None:
        raise LoadError(
            f"sliding_window is missing from {config.path}, or switched off; layer_types names layers of {named}",
            hint="name them full_attention if they attend to everything",
        )


def _window(config: HfConfig) -> int | None:
    before = config.optional_integer("sliding_window_size")  # a token sees so many, and itself
    return config.optional_integer("sliding_window") if before is None else before + 1


def _dense_pattern(config: HfConfig) -> int:
    """Of how many dense layers before a mixture one attends to everything (Command A+); where all do, they turn."""
    return config.integer("prefix_dense_sliding_window_pattern", 1)


def turns_of(config: HfConfig, family: Family, windows: list[int | None]) -> list[bool]:
    """Whether each layer has rotary positions."""
    if "position_embedding_type" in family.keys and config.raw["position_embedding_type"] != "rope":
        return [False] * len(windows)
    if family.turns_by_kind:
        kinds = [_kind(window) for window in windows]
        return [kind in _of_kinds(config, kinds) for kind in kinds]
    has_no_window = config.raw.get("sliding_window") is None
    if family.turns_windowed_only and not (family.turns_full_alone and has_no_window):
        turns = [window is not None for window in windows]
        if "prefix_dense_sliding_window_pattern" in family.keys:
            mixtures = mixture_layers(config, len(windows)) if _dense_pattern(config) == 1 else range(len(windows))
            return [one or i not in mixtures for i, one in enumerate(turns)]
        return turns
    return no_rope(config, len(windows))


def no_rope(config: HfConfig, n_layers: int) -> list[bool]:
    """What no_rope_layers says, or its interval: true for layers that turn."""
    turns = config.integers("no_rope_layers")
    if not turns:
        interval = config.optional_integer("no_rope_layer_interval")
        return [interval is None or (i + 1) % interval != 0 for i in range(n_layers)]
    if len(turns) < n_layers:
        raise LoadError(f"no_rope_layers in {config.path} has {len(turns)} entries; the model has {n_layers} layers")
    return [bool(one) for one in turns[:n_layers]]


def named_layers(raw: dict[str, Any], family: Family, path: str) -> dict[str, Any]:
    """The config with lists of layers' names where it has numbers that stand for them."""
    for key, (ours, names) in family.numbered.items():
        numbers = raw.get(key)
        if numbers is None:
            continue
        if not isinstance(numbers, list) or any(type(one) is not int or not 0 <= one < len(names) for one in numbers):
            raise LoadError(f"{key} in {path} is {numbers!r}; it must hold a number below {len(names)} for each layer")
        named = [names[one] for one in numbers]
        if raw.get(ours) not in (None, named):
            raise LoadError(f"{key} and {ours} in {path} say different things of the layers")
        raw = {**raw, ours: named}
    return {key: value for key, value in raw.items() if key not in family.numbered}


def with_turns(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The config of a Muse with a name for each layer, and whether it turns, in place of its base.

    Every fourth layer, counted from the last, attends to everything and knows no positions, where nothing else is said. Other
    bases than the model's are refused: its class takes what a layer says of one for whether it turns.
    """
    config = HfConfig({**defaults, **raw}, path=path)
    n = config.integer("num_hidden_layers")
    is_full = [(n - 1 - i) % 4 == 0 for i in range(n)]
    raw = {**raw, "layer_types": config.layer_types(n) or [LAYER_TYPES[not full] for full in is_full]}
    thetas = raw.pop("layer_rope_theta", None)
    if thetas is None:
        return {**raw, "no_rope_layers": [int(not full) for full in is_full]}
    theta = rope_section(HfConfig({**defaults, **raw}, path=path)).number("rope_theta")
    if not isinstance(thetas, list) or len(thetas) != n or any(one not in (0, None, theta) for one in thetas):
        raise LoadError(
            f"layer_rope_theta in {path} must hold {n} numbers, one for each layer, each rope_theta, {theta:g}, or 0"
        )
    return {**raw, "no_rope_layers": [int(bool(one)) for one in thetas]}


def is_both_ways(config: HfConfig) -> bool:
    """Whether every token attends to those behind it too (EmbeddingGemma): a model of states, which writes nothing.

    "vision": tokens that stand for pictures alone do. `is_causal: false` says less: GritLM embeds with it, and writes without.
    """
    return config.raw.get("use_bidirectional_attention") not in (None, False, "vision")


def rope_sections(config: HfConfig, family: Family) -> list[HfConfig]:
    """Rotary settings of the layers with full attention, and of the windowed ones where those are others.

    Of Molmo 2 those of layers whose positions are scaled, and of those whose are not.
    """
    if "rope_theta" not in family.keys:
        return []
    given, theta = config.raw.get("rope_parameters"), config.raw["rope_theta"]
    if family.theta_may_be_null and (given.get("rope_theta", theta) if isinstance(given, dict) else theta) is None:
        return []
    settings: dict[str, Any] = {"aliases": family.longrope_names, "is_partial": "partial_rotary_factor" in family.keys}
    if family.turns_by_kind:
        kinds = map(_kind, windows_of(config, family, config.integer("num_hidden_layers")))
        outside = {key: value for key, value in config.raw.items() if key not in ROPE_KEYS}
        return [
            rope_section(
                HfConfig({**outside, "rope_parameters": own, "rope_theta": own["rope_theta"]}, path=config.path)
            )
            for own in _of_kinds(config, list(kinds)).values()
        ]
    full = rope_section(config, **settings)
    if "rope_scaling_layers" in family.keys:  # the others turn by the base alone
        return [full, rope_section(HfConfig({"rope_theta": full.raw["rope_theta"]}, path=config.path))]
    if family.local_theta is None:
        return [full]
    # windowed layers have a base of their own, and no scaling but what the newer layout gives them
    local = {key: value for key, value in config.raw.items() if key not in ROPE_KEYS}
    local["rope_parameters"] = config.section("rope_parameters").section("sliding_attention").raw
    local["rope_theta"] = config.number(family.local_theta)
    return [full, rope_section(HfConfig(local, path=config.path), **settings)]


def _kind(window: int | None) -> str:
    return LAYER_TYPES[window is not None]


def _of_kinds(config: HfConfig, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Rotary settings of those kinds of layers that turn: null stands for no positions, and each kind says one or the other."""
    section = config.section("rope_parameters")
    for key, value in config.raw.items():
        if key in ("rope_scaling", "original_max_position_embeddings") and value:
            raise LoadError(
                f"{key} in {config.path} is {value!r}; rope_parameters has an object for each kind of layers instead"
            )
    for kind in LAYER_TYPES:
        if kind in kinds and (kind not in section.raw or not isinstance(section.raw[kind], dict | None)):
            raise LoadError(
                f"{section.path} has neither an object nor null for {kind} layers; each kind of layers has one"
            )
    # what published files have beside the kinds is read by nobody
    unknown = sorted(section.raw.keys() - {*LAYER_TYPES, "rope_theta", "rope_type"})
    if unknown:
        raise LoadError(
            f"{unknown[0]} in {section.path} is {section.raw[unknown[0]]!r}; it has objects for kinds of layers"
        )
    found = {kind: section.raw[kind] for kind in LAYER_TYPES if kind in kinds and section.raw[kind] is not None}
    for kind, own in found.items():
        if own.get("rope_theta") is None:
            raise LoadError(f"rope_theta is missing from {kind} of {section.path}")
    return found


def layer_ropes(config: HfConfig, family: Family, ropes: list[Rope], windows: list[int | None]) -> list[Rope | None]:
    """How each layer turns. ropes: as `rope_sections` says them."""
    scaled = config.integers("rope_scaling_layers")
    if scaled is not None:
        return [ropes[i not in scaled] for i in range(len(windows))]
    thetas = _thetas(config, len(windows))
    if thetas is not None:
        return [replace(ropes[0], theta=theta) if theta else None for theta in thetas]
    turns = turns_of(config, family, windows)
    return [
        (ropes[0] if window is None else ropes[-1]) if ropes and does_turn else None
        for window, does_turn in zip(windows, turns, strict=True)
    ]


def _thetas(config: HfConfig, n_layers: int) -> list[float] | None:
    """The base of each layer, 0 where it knows no positions; None where all have one."""
    given = config.raw.get("layer_rope_theta")
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != n_layers:
        raise LoadError(f"layer_rope_theta in {config.path} must hold {n_layers} numbers, one for each layer")
    if rope_section(config).raw["rope_type"] != "default":
        raise LoadError(
            f"{config.path} has a base of its own for each layer and scales its positions, which is not supported"
        )
    found = [0.0 if one in (0, None) else HfConfig({"layer_rope_theta": one}, path=config.path).number("layer_rope_theta")
             for one in given]  # fmt: skip
    low = [one for one in found if 0.0 < one <= 1.0]
    if low:
        raise LoadError(
            f"layer_rope_theta in {config.path} holds {low[0]}; a base must be greater than 1, or 0 for none"
        )
    return found
