"""Tokens drawn from rows of logits: by inverse CDF over what top-k, top-p and min-p leave. Results depend on arguments alone.

>>> draw(logits_V, SamplingParams(temperature=0.8, top_p=0.9), uniform(seed, position))  # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from diptych.ground.errors import SequenceError
from diptych.ground.request import SamplingParams
from diptych.ground.step import TokenLogprobs

_LANES = 64  # logits per block of the candidate search: 64 keeps the block maxima of a 152k vocabulary at 2.4k
_FIRST_CANDIDATES = (64, 1024)  # so many are tried for top-p first; real models' sets are nearly always smaller
_SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)  # a masked token's weight is 0
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: output `position` of SplitMix64 begun at mix(seed).

    Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
    """
    state = (_mix((seed + _GOLDEN) & _MASK_64) + (position + 1) * _GOLDEN) & _MASK_64
    return (_mix(state) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Weighed:
    """One row's draw from softmax(logits / temperature), uncut.

    best: the largest logit, NaN where one is. total: sum of exp((logit - best) / temperature).
    """

    token_id: int
    best: float
    total: float


class Drawing(Protocol):
    """The arithmetic of draws over whole vocabularies; a Model does it where its logits are."""

    def argmax(self, logits_RV: torch.Tensor) -> Sequence[int]:
        """The likeliest id of each row, the lowest among equals; that of a NaN where there is one."""
        ...

    def weigh(
        self, logits_RV: np.ndarray, rows: Sequence[int], temperatures: Sequence[float], quantiles: Sequence[float]
    ) -> Sequence[Weighed]:
        """For each named row of logits on the CPU a token of softmax(logits / temperature), by inverse CDF at its quantile."""
        ...


class PlainDrawing:
    """Drawing with numpy and torch, for logits on any device."""

    def __init__(self) -> None:
        self._scratch = Scratch(0)

    def argmax(self, logits_RV: torch.Tensor) -> list[int]:
        """By numpy on the CPU: 10 us for 152k logits, torch's takes 130; NaN counts as the largest in both."""
        best = logits_RV.numpy().argmax(axis=-1) if logits_RV.device.type == "cpu" else logits_RV.argmax(dim=-1)
        ids: list[int] = best.tolist()
        return ids

    def weigh(
        self, logits_RV: np.ndarray, rows: Sequence[int], temperatures: Sequence[float], quantiles: Sequence[float]
    ) -> list[Weighed]:
        """Row by row. A row that holds a NaN or no finite number is not drawn from: its `best` says so."""
        if logits_RV.shape[1] != len(self._scratch.row_V):
            self._scratch = Scratch(logits_RV.shape[1])
        return [
            _weigh_row(logits_RV[row], temperature, quantile, self._scratch)
            for row, temperature, quantile in zip(rows, temperatures, quantiles, strict=True)
        ]


def _weigh_row(logits_V: np.ndarray, temperature: float, quantile: float, scratch: Scratch) -> Weighed:
    """Inverse CDF over the whole vocabulary, in index order."""
    best = float(logits_V.max())
    if not math.isfinite(best):
        return Weighed(0, best, math.nan)
    weights_V = _weights(logits_V, temperature, scratch)
    cdf_V = scratch.cdf_V()
    total = float(cdf_V[-1])
    index = int(np.searchsorted(cdf_V, quantile * total, side="right"))
    if index == len(cdf_V):
        index = int(np.flatnonzero(weights_V)[-1])  # rounding took the quantile past the end
    return Weighed(index, best, total)


class Scratch:
    """Room for one row, reused for every draw: fresh megabytes cost more in page faults than the arithmetic does."""

    def __init__(self, vocab_size: int) -> None:
        self.row_V = np.empty(vocab_size, dtype=np.float32)
        self.weights_V = np.empty(vocab_size, dtype=np.float32)
        self.doubles_V = np.empty(vocab_size)
        self.bins_V = np.empty(vocab_size, dtype=np.int64)
        self.mask_V = np.empty(vocab_size, dtype=bool)
        # numpy adds up doubles one by one; torch's cumsum of the same memory is three times as fast
        self._weights = torch.from_numpy(self.weights_V)
        self._doubles = torch.from_numpy(self.doubles_V)

    def cdf_V(self) -> np.ndarray:
        """Running sum of weights_V in fp64, in doubles_V."""
        torch.cumsum(self._weights, 0, dtype=torch.float64, out=self._doubles)
        return self.doubles_V


def wants_total(params: SamplingParams, vocab_size: int) -> bool:
    """Whether a draw needs the weights of the whole vocabulary."""
    is_cut = params.top_k is not None and params.top_k < vocab_size
    return not params.is_greedy and not is_cut and (params.top_p < 1.0 or params.min_p == 0.0)


def draw(logits_V: np.ndarray, params: SamplingParams, noise: float) -> int:
    """The token at quantile `noise` [0, 1) of softmax(logits_V / temperature) cut by top-k, top-p and min-p.

    logits_V [V] fp32, read only. What `Sampler.sample` does for one row, without its state.
    """
    scratch = Scratch(len(logits_V))
    weighed = _weigh_row(logits_V, params.temperature, noise, scratch) if wants_total(params, len(logits_V)) else None
    return draw_token(logits_V, params, noise, scratch, weighed)


def draw_token(
    logits_V: np.ndarray, params: SamplingParams, noise: float, scratch: Scratch, weighed: Weighed | None
) -> int:
    """As `draw`, in this scratch; weighed: the draw from the whole row, where `wants_total`."""
    if params.top_k is not None and params.top_k < len(logits_V):
        return _draw_among(_top(logits_V, params.top_k, scratch), params, noise)
    if weighed is not None:
        finite(weighed.best)
        finite(weighed.total)
    if params.top_p < 1.0:
        assert weighed is not None
        return _draw_top_p(logits_V, params, noise, scratch, weighed)
    if params.min_p > 0.0:
        best = finite(float(logits_V.max()))
        low = np.float32(best + params.temperature * math.log(params.min_p))
        ids = np.flatnonzero(np.greater_equal(logits_V, low, out=scratch.mask_V))
        weights = np.exp((logits_V[ids].astype(np.float64) - best) / params.temperature)
        return _pick(ids, np.cumsum(weights), noise)
    assert weighed is not None
    return weighed.token_id


def _pick(ids: np.ndarray, cdf: np.ndarray, noise: float) -> int:
    """Inverse CDF; cdf need not end at 1."""
    return int(ids[min(int(np.searchsorted(cdf, noise * cdf[-1], side="right")), len(ids) - 1)])


def _weights(logits_V: np.ndarray, temperature: float, scratch: Scratch) -> np.ndarray:
    """exp((logit - best) / temperature) [V] fp32 in the scratch: probabilities up to a factor, the best token 1."""
    best = finite(float(logits_V.max()))
    weights_V = np.subtract(logits_V, np.float32(best), out=scratch.weights_V)
    if temperature != 1.0:
        weights_V /= np.float32(temperature)
    np.exp(weights_V, out=weights_V)
    return weights_V


def _draw_top_p(logits_V: np.ndarray, params: SamplingParams, noise: float, scratch: Scratch, weighed: Weighed) -> int:
    """Sort the best few only, when they hold the top-p mass (real models); else find the border by histogram."""
    mass = params.top_p * weighed.total
    most = max(8, len(logits_V) // (2 * _LANES))
    for n_first in sorted({min(n, most) for n in _FIRST_CANDIDATES if min(n, most) < len(logits_V)}):
        ids, values = _top(logits_V, n_first, scratch)
        best_weights = np.exp((values.astype(np.float64) - float(values[0])) / params.temperature)
        if best_weights.sum() >= mass:
            return _draw_among((ids, values), params, noise, mass=mass)
    weights_V = _weights(logits_V, params.temperature, scratch)
    ids = _heaviest(weights_V, mass, scratch)
    ids = ids[weights_V[ids] >= max(params.min_p, _SMALLEST_WEIGHT)]
    return _pick(ids, np.cumsum(weights_V[ids], dtype=np.float64), noise)


def _heaviest(weights: np.ndarray, mass: float, scratch: Scratch) -> np.ndarray:
    """Ids, ascending, of the smallest set of heaviest tokens that holds `mass`; weights [V] in [0, 1].

    A histogram over the weights' logarithms finds the bin where the mass is reached, so only that bin is sorted.
    """
    # the upper half of a float's bits grows with its logarithm: 2^7 bins per doubling
    bins = np.right_shift(weights.view(np.int32), 16, out=scratch.bins_V)
    doubles = scratch.doubles_V
    doubles[:] = weights
    by_bin = np.bincount(bins, weights=doubles)
    above = np.cumsum(by_bin[::-1])[::-1]  # weight of this bin and all heavier ones
    border = max(0, int(np.searchsorted(-above, -mass, side="right")) - 1)
    sure = np.greater(bins, border, out=scratch.mask_V)
    in_border = np.flatnonzero(bins == border)
    rest = mass - (float(above[border + 1]) if border + 1 < len(above) else 0.0)
    order = in_border[np.argsort(-weights[in_border], kind="stable")]
    n_more = int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), rest, side="left")) + 1
    sure[order[:n_more]] = True
    return np.flatnonzero(sure)


def _draw_among(
    candidates: tuple[np.ndarray, np.ndarray], params: SamplingParams, noise: float, *, mass: float | None = None
) -> int:
    """Apply temperature, top-p and min-p to (ids, logits) sorted best first, and draw.

    mass: the top-p mass relative to the best token's weight, or None when the candidates are all there is.
    """
    ids, values = candidates
    weights = np.exp((values.astype(np.float64) - float(values[0])) / params.temperature)
    keep = len(weights)
    if params.top_p < 1.0:
        cdf = np.cumsum(weights)
        wanted = params.top_p * cdf[-1] if mass is None else mass
        keep = min(keep, int(np.searchsorted(cdf, wanted, side="left")) + 1)
    if params.min_p > 0.0:
        keep = min(keep, int(np.searchsorted(-weights, -params.min_p, side="right")))
    keep = max(1, min(keep, int(np.count_nonzero(weights))))
    return _pick(ids[:keep], np.cumsum(weights[:keep]), noise)


def _top(logits_V: np.ndarray, k: int, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """(ids, logits) of the k best, best first, ties by index; everything equal to the k-th is kept as well."""
    n = len(logits_V)
    blocks = n // _LANES
    if k >= n:
        low = -math.inf
    elif blocks >= 2 * k:
        # The k-th largest of the blocks' maxima is a lower bound for the k-th largest of all, whatever lies in a block. Every
        # blocks-th logit: numpy takes the maxima of whole rows. Not torch: its threads would wait for those of the kernels.
        maxima = logits_V[: blocks * _LANES].reshape(_LANES, blocks).max(axis=0)
        finite(float(np.max(logits_V[blocks * _LANES :], initial=maxima.max())))
        low = float(np.partition(maxima, blocks - k)[blocks - k])
    else:
        finite(float(logits_V.max()))
        low = float(np.partition(logits_V, n - k)[n - k])
    ids, values = _at_least(logits_V, low, scratch)
    if len(ids) > k:
        keep = int(np.searchsorted(-values, -values[k - 1], side="right"))
        ids, values = ids[:keep], values[:keep]
    return ids, values


def _at_least(values: np.ndarray, low: float, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """(ids, logits) with logit >= low, best first, ties by index; masked tokens (-inf) are never among them."""
    compare = np.greater_equal if low > -math.inf else np.greater
    ids = np.flatnonzero(compare(values, np.float32(low), out=scratch.mask_V))
    finite(float(values[ids].max()) if len(ids) else float(values.max()))
    order = np.argsort(-values[ids], kind="stable")
    return ids[order], values[ids[order]]


def finite(best: float) -> float:
    """The largest logit, checked: NaN, or nothing left to choose from, is a SequenceError."""
    if not math.isfinite(best):
        raise not_finite(best)
    return best


def not_finite(best: float) -> SequenceError:
    """What a sequence ends with whose largest logit is no finite number."""
    return SequenceError(f"the largest logit is {best}; no token can be drawn")


def token_logprobs(logits_V: np.ndarray, token_id: int, top: int, scratch: Scratch) -> TokenLogprobs:
    """Log-probability, rank (1 + number of larger logits) and `top` best alternatives of one token in its row."""
    norm = float(logits_V.max()) + math.log(float(_weights(logits_V, 1.0, scratch).sum(dtype=np.float64)))
    chosen = logits_V[token_id]
    rank = 1 + int(np.count_nonzero(np.greater(logits_V, chosen, out=scratch.mask_V)))
    alternatives: tuple[tuple[int, float], ...] = ()
    if top:
        ids, best_values = _top(logits_V, top, scratch)
        pairs = zip(ids[:top].tolist(), best_values[:top].tolist(), strict=True)
        alternatives = tuple((other, value - norm) for other, value in pairs)
    return TokenLogprobs(token_id=token_id, logprob=float(chosen) - norm, rank=rank, top=alternatives)
