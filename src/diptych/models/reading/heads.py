"""Heads of grouped queries, as a config gives them: how many there are and how wide, of layers with windows and without."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.reading.gpt import n_kv_heads
from diptych.models.reading.streams import full_heads
from diptych.models.rope import LAYER_TYPES


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, the width of queries and keys, of values (None: the same), and whether values are projected."""

    n: int
    n_kv: int
    width: int
    v_width: int | None = None
    has_v: bool = True


@dataclass(frozen=True, slots=True)
class HeadsByWindow:
    """Of layers that attend to everything, and of windowed ones, or of layers that have KV heads of their own number."""

    full: Heads
    windowed: Heads
    n_kv: tuple[int, ...] | None = None  # of each layer, where they differ; 0: it has no heads
    n: tuple[int, ...] | None = None  # query heads, likewise

    @staticmethod
    def read(config: HfConfig, family: Family, windows: list[int | None]) -> HeadsByWindow:
        """LoadError where query heads cannot share those of keys and values evenly."""
        usual = Heads(
            n=config.integer("num_attention_heads"),
            n_kv=n_kv_heads(config),
            width=_head_dim(config),
            v_width=_v_width(config),
        )
        full = windowed = usual
        if family.has_full_heads:
            n_kv, width = full_heads(config, windows, (usual.n_kv, usual.width))
            full = Heads(n=usual.n, n_kv=n_kv, width=width, has_v=not config.flag("attention_k_eq_v"))
        if "swa_num_key_value_heads" in family.keys:
            windowed = _windowed(config, usual)
        elif "num_sliding_attention_heads" in family.keys:
            windowed = replace(usual, n=config.integer("num_sliding_attention_heads", usual.n))
        if full != windowed and not family.has_full_heads and _lacks_window(config, family):
            raise LoadError(f"sliding_window is missing from {config.path}; windowed layers have heads of their own")
        by_layer = [_by_layer(config, f"num_{kind}_heads_per_layer", len(windows), least)
                    for kind, least in (("key_value", 0), ("attention", 1))]  # fmt: skip
        found = HeadsByWindow(full, windowed, *by_layer)
        for one in found.by_layer(windows):
            if one is not None and one.n % one.n_kv:
                raise LoadError(f"{one.n} query heads cannot share {one.n_kv} key-value heads ({config.path})")
        return found

    def by_layer(self, windows: list[int | None]) -> list[Heads | None]:
        """Of each layer; None: it has none."""
        found = [self.full if window is None else self.windowed for window in windows]
        if self.n is not None:
            found = [replace(one, n=n) for one, n in zip(found, self.n, strict=True)]
        if self.n_kv is None:
            return [*found]
        return [replace(one, n_kv=n) if n else None for one, n in zip(found, self.n_kv, strict=True)]


def _by_layer(config: HfConfig, key: str, n_layers: int, least: int) -> tuple[int, ...] | None:
    """The heads of each layer, where a config says them so; no KV heads: the layer has an MLP alone."""
    given = config.integers(key)
    if given is None:
        return None
    if len(given) != n_layers or min(given) < least:
        raise LoadError(f"{key} in {config.path} must hold {n_layers} numbers from {least} on, one for each layer")
    return tuple(given)


def _lacks_window(config: HfConfig, family: Family) -> bool:
    """Whether some layers are windowed and nobody says how far they see."""
    kinds = config.raw.get("layer_types")
    has_windowed = family.full_every is not None if kinds is None else LAYER_TYPES[1] in kinds
    return has_windowed and config.raw.get("sliding_window") is None and config.raw.get("sliding_window_size") is None


def _windowed(config: HfConfig, usual: Heads) -> Heads:
    """As MiMo-V2-Flash's published files say it; its class in transformers knows twice as many KV heads alone."""
    return Heads(
        n=config.integer("swa_num_attention_heads", usual.n),
        n_kv=config.integer("swa_num_key_value_heads", 2 * usual.n_kv),
        width=_even("swa_head_dim", config.integer("swa_head_dim", usual.width), config),
        v_width=config.integer("swa_v_head_dim", usual.v_width),
    )


def _head_dim(config: HfConfig) -> int:
    """Width of a head; of its rotary part where attention is latent."""
    if config.raw.get("kv_lora_rank") is not None:
        return config.integer("qk_rope_head_dim", low=1 if "rope_theta" in config.raw else 0)
    n_heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    return _even("head_dim", config.integer("head_dim", max(1, hidden // n_heads)), config)


def _v_width(config: HfConfig) -> int | None:
    """Of values, where a config has a key for it; latent attention's is another thing."""
    return None if config.raw.get("kv_lora_rank") is not None else config.optional_integer("v_head_dim")


def _even(name: str, width: int, config: HfConfig) -> int:
    if width % 2:
        raise LoadError(f"{name} in {config.path} is {width}; it must be even")
    return width
