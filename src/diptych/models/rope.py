"""Rotary settings from a config: default, linear, dynamic, proportional, llama3, yarn, longrope, in both layouts.

transformers 5 writes `rope_parameters` (per layer type in Gemma 3), older versions `rope_theta` beside `rope_scaling`.

`dynamic` and `longrope` depend on how long a sequence may become. transformers looks at the longest sequence of each forward
and changes the frequencies when it crosses the trained length, which leaves keys in the cache that were turned by the old
ones. Here the choice is made once per engine, by max_context_tokens or by the user: every key of an engine is turned alike,
so caching, chunking and preemption cannot change a result. At or below the trained length it equals transformers for every
prompt; above it equals transformers for sequences longer than that (dynamic: for sequences of exactly max_context_tokens).

Papers: yarn arXiv:2309.00071, longrope arXiv:2402.13753.
"""

from __future__ import annotations

import math
from functools import partial

from diptych.ground.errors import ConfigError, LoadError
from diptych.models.config import NUMBER_LIMIT, HfConfig
from diptych.models.positions import Rope

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings")
# what each type reads beside rope_type, rope_theta and partial_rotary_factor
SECTION_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast",
             "beta_slow", "truncate", "llama_4_scaling_beta"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor",
                 "short_mscale", "long_mscale"),
}  # fmt: skip
ALWAYS_READ = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
# written by many tools and read by no type; `finetuned` only says how the model came to be
NOT_READ = (
    "finetuned", "original_max_position_embeddings", "max_position_embeddings",
    "mrope_section", "xdrope_section", "mrope_interleaved",  # of pictures: the positions of a token of text are one
)  # fmt: skip
# names of some files: by positions of pictures, Qwen2-VL's older ones and HunyuanOCR's; Sarvam's
ALIASES = {"mrope": "default", "xdrope": "dynamic", "deepseek_yarn": "yarn"}
# types whose factor stretches the positions beyond max_position_embeddings
STRETCHING = ("linear", "dynamic", "yarn")
LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_section(config: HfConfig, *, aliases: tuple[str, ...] = (), is_partial: bool = False) -> HfConfig:
    """The rotary settings in one flat object with rope_theta, rope_type and the trained length filled in.

    Of layers that attend to everything, where windowed ones have others. Where both layouts are there, the older counts, as in
    transformers. aliases: names that mean longrope in this family. is_partial: whether it may turn a part of each head only.
    """
    newer, older = config.section("rope_parameters"), config.section("rope_scaling")
    if _is_by_layer(newer):
        raw = {**newer.section("full_attention").raw, **older.raw}
    else:
        raw = dict((older.section("full_attention") if _is_by_layer(older) else older).raw or newer.raw)
    raw.setdefault("rope_theta", config.number("rope_theta"))
    if config.raw.get("partial_rotary_factor") is not None:
        raw.setdefault("partial_rotary_factor", config.raw["partial_rotary_factor"])
    if config.raw.get("original_max_position_embeddings") is not None:  # Phi-3 keeps it outside; it wins
        raw["original_max_position_embeddings"] = config.raw["original_max_position_embeddings"]
    if config.raw.get("kv_lora_rank") is not None and raw.get("partial_rotary_factor") == _latent_share(config):
        del raw["partial_rotary_factor"]  # transformers writes it beside latent heads: of what turns it is the whole
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    rope_type = ALIASES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    raw["rope_type"] = "longrope" if rope_type in aliases else rope_type
    section = HfConfig(raw, path=f"rope_parameters of {config.path}")
    if not isinstance(raw["rope_type"], str) or raw["rope_type"] not in SECTION_KEYS:
        raise LoadError(f"rope type in {section.path} is {rope_type!r}; supported: {', '.join(SECTION_KEYS)}")
    known = (*ALWAYS_READ, *NOT_READ, *SECTION_KEYS[raw["rope_type"]])
    if raw.get("mrope_section"):
        known = (*known, "interleaved")  # of the axes of pictures (Qwen3-Omni)
    unread = sorted(name for name, value in raw.items() if name not in known and value is not None)
    if unread:
        raise LoadError(f"{unread[0]} in {section.path} is {raw[unread[0]]!r}; {raw['rope_type']} rope has no such key")
    if not is_partial and raw["rope_type"] != "proportional" and section.number("partial_rotary_factor", 1.0) != 1.0:
        raise LoadError(
            f"partial_rotary_factor in {section.path} is {raw['partial_rotary_factor']!r}; this family turns whole heads"
        )
    return section


def _latent_share(config: HfConfig) -> float:
    """How much of a head turns where attention is latent."""
    nope, turned = (config.integer(f"qk_{part}_head_dim") for part in ("nope", "rope"))
    return turned / (nope + turned)


def _is_by_layer(section: HfConfig) -> bool:
    return any(isinstance(section.raw.get(kind), dict) for kind in LAYER_TYPES)


def position_limit(config: HfConfig, rope: HfConfig | None, max_context_tokens: int | None) -> int:
    """How many positions the engine may use: max_position_embeddings, or what was asked up to its stretched length."""
    trained = config.integer("max_position_embeddings")
    if max_context_tokens is None or rope is None or rope.raw["rope_type"] not in STRETCHING:
        return trained
    base = trained
    if rope.raw["rope_type"] == "yarn":
        base = rope.integer("original_max_position_embeddings", trained)
    most = max(trained, int(base * (rope.optional_number("factor") or 1.0)))
    return max(trained, min(max_context_tokens, most))


def make_rope(
    config: HfConfig, rope: HfConfig, *, head_dim: int, max_context_tokens: int, longrope: str = "auto"
) -> Rope:
    """The settings for an engine whose sequences have at most max_context_tokens. longrope: auto, short or long."""
    part = rope.number("partial_rotary_factor", 1.0)
    if not 0.0 <= part <= 1.0:
        raise LoadError(f"partial_rotary_factor in {rope.path} is {part}; it must be between 0 and 1")
    # proportional: over whole heads, of which pairs from some on do not turn
    # GPT-J's files have the number itself, MiniMax M2's may have both, of which the part counts, as in transformers
    is_said = rope.raw.get("partial_rotary_factor") is not None
    own = int(head_dim * part) if is_said else config.optional_integer("rotary_dim") or head_dim
    rotary_dim = head_dim if rope.raw["rope_type"] == "proportional" else own
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise LoadError(f"rotary dimension {rotary_dim} of head_dim {head_dim} in {config.path} is no even part of it")
    kind, theta = str(rope.raw["rope_type"]), rope.number("rope_theta")
    trained = config.integer("max_position_embeddings")
    if theta <= 1.0:
        raise LoadError(f"rope_theta in {rope.path} is {theta}; it must be greater than 1")
    if longrope != "auto" and kind != "longrope":
        raise ConfigError(f"longrope is {longrope!r}; this model's rope is {kind}, which has one set of factors")
    # HunYuan's files call it dynamic what stretches the base once for all lengths
    alpha = rope.optional_number("alpha") if kind == "dynamic" else None
    if alpha:
        theta, kind = theta * alpha ** (rotary_dim / max(rotary_dim - 2, 1)), "default"
    if kind == "dynamic":
        stretch, length = rope.number("factor"), max(max_context_tokens, trained)
        if rotary_dim <= 2:
            raise LoadError(f"rotary dimension {rotary_dim} in {config.path} is too small for dynamic rope")
        theta *= ((stretch * length / trained) - (stretch - 1)) ** (rotary_dim / (rotary_dim - 2))
    if theta > NUMBER_LIMIT:
        raise LoadError(
            f"{kind} rope in {rope.path} stretches rope_theta to {theta:g}; at most {NUMBER_LIMIT:g} is possible"
        )
    made = partial(Rope, theta=theta, rotary_dim=rotary_dim, kind=kind)
    if kind in ("default", "dynamic"):
        return made()
    if kind == "proportional":
        return made(factor=rope.number("factor", 1.0), n_turning=int(part * head_dim // 2))
    if kind == "linear":
        return made(factor=rope.number("factor"))
    old_length = rope.integer("original_max_position_embeddings", trained, low=2)
    if kind == "llama3":
        if rope.number("low_freq_factor") > rope.number("high_freq_factor"):  # equal in Llama 4 Scout
            raise LoadError(f"high_freq_factor in {rope.path} must not be less than low_freq_factor")
        return made(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            trained_tokens=old_length,
        )
    # longrope's follows from the lengths; yarn without one is refused, as transformers does
    factor = rope.number("factor", None if kind == "yarn" else trained / old_length)
    if kind == "yarn":
        return made(
            factor=factor,
            trained_tokens=old_length,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            is_truncated=rope.flag("truncate", True),
            attention_factor=yarn_attention(rope, factor),
            query_slope=rope.number("llama_4_scaling_beta") if rope.raw.get("llama_4_scaling_beta") else 0.0,
        )
    is_long = max_context_tokens > old_length if longrope == "auto" else longrope == "long"
    name = "long_factor" if is_long else "short_factor"
    return made(
        factor=factor,
        trained_tokens=old_length,
        attention_factor=_longrope_attention(rope, factor, old_length, name),
        divisors=rope.numbers(name, rotary_dim // 2),
        divisors_name=name,
    )


def _longrope_attention(rope: HfConfig, stretch: float, old_length: int, divisors: str) -> float:
    for name in ("attention_factor", f"{divisors.removesuffix('factor')}mscale"):  # Phi-3.5-MoE has one for each set
        if rope.raw.get(name) is not None:
            return rope.number(name)
    return 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(old_length))


def yarn_attention(rope: HfConfig, stretch: float) -> float:
    """What yarn multiplies cos and sin by: as it is said, or made of how far positions are stretched."""
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is not None:
        return attention_factor
    mscale, mscale_all = rope.raw.get("mscale"), rope.raw.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(stretch, rope.number("mscale")) / _mscale(stretch, rope.number("mscale_all_dim"))
    return _mscale(stretch, 1.0)


def latent_stretch(config: HfConfig) -> float:
    """What yarn multiplies queries and keys by where attention is latent (mscale_all_dim); cos and sin have the rest of it."""
    rope = rope_section(config)
    if rope.raw["rope_type"] == "default" or not rope.raw.get("mscale_all_dim"):
        return 1.0
    return _mscale(rope.number("factor"), rope.number("mscale_all_dim"))


def _mscale(stretch: float, mscale: float) -> float:
    return 1.0 if stretch <= 1 else 0.1 * mscale * math.log(stretch) + 1.0
