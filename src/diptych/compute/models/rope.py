"""Rotary frequencies from a config: default, linear, dynamic, llama3, yarn, longrope.

`dynamic` and `longrope` depend on how long a sequence may become. transformers looks at the longest sequence of each forward
and changes the frequencies when it crosses the trained length, which leaves keys in the cache that were turned by the old
ones. Here the choice is made once per engine, by max_context_tokens: every key of an engine is turned alike, so caching,
chunking and preemption cannot change a result. At or below the trained length it equals transformers for every prompt; above
it equals transformers for sequences longer than that (dynamic: for sequences of exactly max_context_tokens).

Papers: yarn arXiv:2309.00071, longrope arXiv:2402.13753. Formulas in fp32, in the order transformers computes them.
"""

from __future__ import annotations

import math

import numpy as np

from diptych.compute.models.hf_config import HfConfig
from diptych.compute.ops.contract import RopeSpec
from diptych.ground.errors import LoadError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# types whose factor stretches the positions beyond max_position_embeddings
STRETCHING = ("linear", "dynamic", "yarn")


def rope_section(config: HfConfig, *, default_theta: float, layer_type: str | None = None) -> HfConfig:
    """The rotary settings in one flat object with rope_theta, rope_type and the trained length filled in."""
    raw = dict(config.section("rope_parameters").raw or config.section("rope_scaling").raw)
    nested = isinstance(raw.get("full_attention"), dict) or isinstance(raw.get("sliding_attention"), dict)
    if nested:
        raw = dict(raw.get(layer_type or "full_attention") or {})
    raw.setdefault("rope_theta", config.number("rope_theta", default_theta))
    if config.raw.get("partial_rotary_factor") is not None:
        raw.setdefault("partial_rotary_factor", config.raw["partial_rotary_factor"])
    if config.raw.get("original_max_position_embeddings") is not None:  # Phi-3 keeps it outside; it wins
        raw["original_max_position_embeddings"] = config.raw["original_max_position_embeddings"]
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    raw["rope_type"] = "longrope" if rope_type == "su" else rope_type
    if raw["rope_type"] not in ROPE_TYPES:
        raise LoadError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return HfConfig(raw, path=f"rope_parameters of {config.path}")


def position_limit(config: HfConfig, rope: HfConfig, max_context_tokens: int | None) -> int:
    """How many positions the engine may use: max_position_embeddings, or what was asked up to its stretched length."""
    trained = config.integer("max_position_embeddings")
    if max_context_tokens is None or rope.raw["rope_type"] not in STRETCHING:
        return trained
    base = trained
    if rope.raw["rope_type"] == "yarn":
        base = rope.integer("original_max_position_embeddings", trained)
    most = max(trained, int(base * (rope.optional_number("factor") or 1.0)))
    return max(trained, min(max_context_tokens, most))


def make_rope(config: HfConfig, rope: HfConfig, *, head_dim: int, max_context_tokens: int) -> RopeSpec:
    """The frequencies for an engine whose sequences have at most max_context_tokens."""
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise LoadError(
            f"rotary dimension {rotary_dim} of head_dim {head_dim} in {config.path} is not an even part of it"
        )
    rope_type = rope.raw["rope_type"]
    theta = rope.number("rope_theta")
    trained = config.integer("max_position_embeddings")
    factor = 1.0
    if rope_type == "dynamic":
        stretch, length = rope.number("factor"), max(max_context_tokens, trained)
        theta *= ((stretch * length / trained) - (stretch - 1)) ** (rotary_dim / (rotary_dim - 2))
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    wavelengths = np.float32(theta) ** exponents
    inv_freq = np.float32(1.0) / wavelengths
    if rope_type == "linear":
        inv_freq = inv_freq / np.float32(rope.number("factor"))
    elif rope_type == "llama3":
        inv_freq = _llama3(inv_freq, rope, trained)
    elif rope_type == "yarn":
        inv_freq, factor = _yarn(wavelengths, rope, trained, theta)
    elif rope_type == "longrope":
        inv_freq, factor = _longrope(wavelengths, rope, trained, max_context_tokens)
    return RopeSpec(inv_freq=tuple(float(value) for value in inv_freq), attention_factor=factor)


def _llama3(inv_freq: np.ndarray, rope: HfConfig, trained: int) -> np.ndarray:
    stretch, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    old_length = rope.integer("original_max_position_embeddings", trained)
    wavelength = 2 * math.pi / inv_freq
    slow = np.where(wavelength > old_length / low, inv_freq / stretch, inv_freq)
    smooth = (old_length / wavelength - low) / (high - low)
    between = (1 - smooth) * slow / stretch + smooth * slow
    is_between = (wavelength >= old_length / high) & (wavelength <= old_length / low)
    return np.where(is_between, between, slow).astype(np.float32)


def _yarn(wavelengths: np.ndarray, rope: HfConfig, trained: int, theta: float) -> tuple[np.ndarray, float]:
    old_length = rope.integer("original_max_position_embeddings", trained)
    stretch = rope.number("factor", trained / old_length)
    dim = 2 * len(wavelengths)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = rope.raw.get("mscale"), rope.raw.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = _mscale(stretch, mscale) / _mscale(stretch, mscale_all)
        else:
            attention_factor = _mscale(stretch, 1.0)

    def dimension_of(n_turns: float) -> float:
        return (dim * math.log(old_length / (n_turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension_of(rope.number("beta_fast", 32.0)), dimension_of(rope.number("beta_slow", 1.0))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high  # as transformers: no division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1.0) - ramp
    inv_freq = (1.0 / (np.float32(stretch) * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
    return inv_freq.astype(np.float32), float(attention_factor)


def _mscale(stretch: float, mscale: float) -> float:
    return 1.0 if stretch <= 1 else 0.1 * mscale * math.log(stretch) + 1.0


def _longrope(
    wavelengths: np.ndarray, rope: HfConfig, trained: int, max_context_tokens: int
) -> tuple[np.ndarray, float]:
    old_length = rope.integer("original_max_position_embeddings", trained)
    name = "long_factor" if max_context_tokens > old_length else "short_factor"
    factors = rope.raw.get(name)
    if not isinstance(factors, list) or len(factors) != len(wavelengths):
        count = len(factors) if isinstance(factors, list) else 0
        raise LoadError(f"{name} in {rope.path} has {count} numbers; {len(wavelengths)} are needed")
    stretch = rope.number("factor", trained / old_length)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(old_length))
    return np.float32(1.0) / (np.array(factors, dtype=np.float32) * wavelengths), attention_factor
