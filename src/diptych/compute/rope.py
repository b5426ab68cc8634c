"""Rotary frequencies in fp32 from a model's settings (`models.rope`), in the order transformers computes them."""

from __future__ import annotations

import math

import numpy as np

from diptych.compute.ops.contract import RopeSpec
from diptych.models.positions import Rope


def frequencies(rope: Rope) -> RopeSpec:
    """The turn per position of each pair of dimensions."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    wavelengths = np.float32(rope.theta) ** exponents
    inv_freq = np.float32(1.0) / wavelengths
    if rope.kind in ("linear", "proportional"):
        inv_freq = inv_freq / np.float32(rope.factor)
        if rope.n_turning is not None:
            inv_freq[rope.n_turning :] = 0.0
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.kind == "yarn":
        inv_freq = _yarn(wavelengths, rope)
    elif rope.kind == "longrope":
        inv_freq = np.float32(1.0) / (np.array(rope.divisors, dtype=np.float32) * wavelengths)
    inv_freq = -inv_freq if rope.turns_back else inv_freq
    return RopeSpec(inv_freq=tuple(float(value) for value in inv_freq), attention_factor=rope.attention_factor)


def standstill(rotary_dim: int) -> RopeSpec:
    """No turn, where an op wants one: a product with 1 and a sum with 0 change no number."""
    return RopeSpec(inv_freq=(0.0,) * (rotary_dim // 2))


def _llama3(inv_freq: np.ndarray, rope: Rope) -> np.ndarray:
    old_length, low, high = rope.trained_tokens, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    slow = np.where(wavelength > old_length / low, inv_freq / rope.factor, inv_freq)
    if low == high:  # nothing lies between
        return slow.astype(np.float32)
    smooth = (old_length / wavelength - low) / (high - low)
    between = (1 - smooth) * slow / rope.factor + smooth * slow
    is_between = (wavelength >= old_length / high) & (wavelength <= old_length / low)
    return np.where(is_between, between, slow).astype(np.float32)


def _yarn(wavelengths: np.ndarray, rope: Rope) -> np.ndarray:
    dim = rope.rotary_dim

    def dimension_of(n_turns: float) -> float:
        return (dim * math.log(rope.trained_tokens / (n_turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high  # as transformers: no division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1.0) - ramp
    inv_freq = (1.0 / (np.float32(rope.factor) * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
    return inv_freq.astype(np.float32)
