"""Logits to tokens. Owns what each running sequence needs for that: counts for penalties, its grammar, its seed.

A row's result depends on its logits, its own options, its own tokens, and (seed, position): never on its neighbours.
Order of operations, as in Hugging Face's `generate` with vLLM's penalties:
  repetition penalty (prompt + output), presence and frequency penalty (output), logit bias, min_tokens, grammar;
  then greedy, or temperature, top-k (ties with the k-th kept), top-p, min-p and one draw by inverse CDF.
Log-probabilities and ranks are those of the model itself, before any of this.

>>> sampler = Sampler(32000, "cpu")  # doctest: +SKIP
>>> sampler.begin(start); sampler.sample(logits_RV, [start.seq_id], [n_prompt])[0].token_id  # doctest: +SKIP
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from diptych.compute.penalty import Penalty, has_penalty
from diptych.compute.structured import GrammarCompiler, GrammarState
from diptych.ground.errors import BadSampling, EngineError, InternalError, SequenceError
from diptych.ground.request import SamplingParams
from diptych.ground.step import SequenceStart, TokenLogprobs

_LANES = 64  # logits per block of the candidate search: 64 keeps the block maxima of a 152k vocabulary at 2.4k
_FIRST_CANDIDATES = (64, 1024)  # so many are tried for top-p first; real models' sets are nearly always smaller
_SMALLEST_WEIGHT = float(np.finfo(np.float32).tiny)  # a masked token's weight is 0
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

logger = logging.getLogger("diptych.compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One drawn token. `is_complete`: the sequence's grammar can accept nothing more after it."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_complete: bool = False


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
        self._scratch = _Scratch(0)

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
            self._scratch = _Scratch(logits_RV.shape[1])
        return [
            _weigh_row(logits_RV[row], temperature, quantile, self._scratch)
            for row, temperature, quantile in zip(rows, temperatures, quantiles, strict=True)
        ]


def _weigh_row(logits_V: np.ndarray, temperature: float, quantile: float, scratch: _Scratch) -> Weighed:
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


class _SequenceState:
    """What one sequence needs beyond a plain arg-max. Changed by its own `Sampler` only."""

    __slots__ = ("banned_ids", "bias", "grammar", "n_prompt", "output_ids", "params", "penalty", "seed")

    def __init__(self, start: SequenceStart, grammar: GrammarState | None, *, vocab_size: int) -> None:
        params = start.sampling
        self.params = params
        self.seed = start.seed
        self.n_prompt = len(start.prompt_token_ids)
        self.output_ids: list[int] = []
        self.grammar = grammar
        self.penalty = Penalty(start.prompt_token_ids, params) if has_penalty(params) else None
        self.bias: tuple[np.ndarray, np.ndarray] | None = None
        if params.logit_bias:
            ids, values = list(params.logit_bias), list(params.logit_bias.values())
            self.bias = np.array(ids), np.array(values, dtype=np.float32)
        banned = dict.fromkeys((*start.eos_token_ids, *params.stop_token_ids)) if params.min_tokens else {}
        self.banned_ids = np.array([token_id for token_id in banned if 0 <= token_id < vocab_size], dtype=np.int64)

    def truncate(self, n_output: int) -> None:
        """Forget output tokens from index `n_output` on (they were drawn but not kept)."""
        gone = self.output_ids[n_output:]
        del self.output_ids[n_output:]
        if self.penalty is not None:
            self.penalty.forget(gone)
        if self.grammar is not None:
            self.grammar.rollback(len(gone))

    def advance(self, token_id: int) -> None:
        """Add one output token."""
        self.output_ids.append(token_id)
        if self.penalty is not None:
            self.penalty.add(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)


class _Scratch:
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


def _is_plain(params: SamplingParams) -> bool:
    """Whether the token is the arg-max of the raw logits and nothing else is wanted."""
    changes = has_penalty(params) or params.logit_bias or params.min_tokens or params.structured is not None
    return params.is_greedy and not changes and params.logprobs is None


class Sampler:
    """Draws one token per row. Not thread-safe: the thread that steps the engine owns it.

    drawing: who does the arithmetic over whole vocabularies; a Model.
    """

    def __init__(
        self,
        vocab_size: int,
        device: str | torch.device = "cpu",
        *,
        grammars: GrammarCompiler | None = None,
        drawing: Drawing | None = None,
    ) -> None:
        self._drawing = drawing or PlainDrawing()
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._is_cpu = torch.device(device).type == "cpu"
        self._scratch = _Scratch(vocab_size)
        self._states: dict[int, _SequenceState] = {}  # plain greedy sequences have none

    def begin(self, start: SequenceStart) -> None:
        """Take in a sequence. Raises BadSampling (bias outside the vocabulary) or GrammarError."""
        params = start.sampling
        for token_id in params.logit_bias:
            if not 0 <= token_id < self._vocab_size:
                raise BadSampling(
                    f"logit_bias names token {token_id}; the vocabulary has {self._vocab_size}", param="logit_bias"
                )
        if _is_plain(params):
            return
        grammar = None
        if params.structured is not None:
            if self._grammars is None:
                raise InternalError("a structured request reached a sampler without a grammar compiler")
            grammar = self._grammars.compile(params.structured).begin()
        state = self._states[start.seq_id] = _SequenceState(start, grammar, vocab_size=self._vocab_size)
        for token_id in start.output_token_ids:
            state.advance(token_id)

    def end(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are fine."""
        self._states.pop(seq_id, None)

    def rewind(self, seq_id: int, position: int) -> None:
        """Forget what was drawn for `position` and behind it."""
        state = self._states.get(seq_id)
        if state is not None:
            state.truncate(position - state.n_prompt)

    def is_plain(self, seq_ids: Iterable[int]) -> bool:
        """Whether every one of these sequences takes the arg-max of its raw logits and wants nothing else of them."""
        return self._states.keys().isdisjoint(seq_ids)

    def sample(
        self, logits_RV: torch.Tensor, seq_ids: Sequence[int], positions: Sequence[int]
    ) -> list[SampledToken | EngineError]:
        """One token per row of `logits_RV` [R,V] fp32 (read only), or why that row's sequence cannot go on.

        positions: the absolute position each token will stand at (prompt tokens + output tokens before it). A position
        already drawn before is drawn again, and everything after it is forgotten.
        """
        drawn = self.verify(logits_RV, seq_ids, positions, [None] * len(seq_ids))
        return [token for token in drawn if token is not None]

    def verify(
        self, logits_RV: torch.Tensor, seq_ids: Sequence[int], positions: Sequence[int], drafts: Sequence[int | None]
    ) -> list[SampledToken | EngineError | None]:
        """As `sample`, where a sequence may have several rows, one behind the other at positions in order.

        drafts: for each row the token that the sequence's next row stands behind, None for its last. The first row whose token
        is another ends its sequence's run, as do an error and a complete grammar: the rows behind it give None and change
        nothing, so penalties, counts and grammars only ever stand behind tokens that hold.
        """
        states = self._states
        rows = [states.get(seq_id) for seq_id in seq_ids] if states else ()
        if not any(rows):
            return _runs(self._best(logits_RV), drafts)
        plain = [i for i, state in enumerate(rows) if state is None]
        drawn: list[SampledToken | EngineError | None] = [None] * len(seq_ids)
        if plain:
            # numpy copies on this thread; torch would wait for threads of its own, behind those of the kernels
            plain_RV = torch.from_numpy(logits_RV.numpy()[plain]) if self._is_cpu else logits_RV[plain]
            run = _runs(self._best(plain_RV), [drafts[i] for i in plain])
            for i, token in zip(plain, run, strict=True):
                drawn[i] = token
        others = [i for i, state in enumerate(rows) if state is not None]
        # one copy to the CPU for all rows that need more than an arg-max; none where the logits are there already
        values_RV = _on_cpu(logits_RV if len(others) == len(rows) or self._is_cpu else logits_RV[others])
        places = {i: i if len(values_RV) == len(rows) else place for place, i in enumerate(others)}
        weighed = self._weigh_rows(values_RV, rows, places, positions)
        over: int | None = None  # the sequence whose run has ended: what else it has here stands behind a wrong token
        for i, place in places.items():
            state = rows[i]
            assert state is not None
            if seq_ids[i] == over:
                continue
            try:
                drawn[i] = self._sample_row(values_RV[place], state, positions[i], weighed.get(i))
            except EngineError as error:
                drawn[i] = error
            except Exception as error:
                # one sequence's options met a bug of ours; its neighbours must not pay for it
                logger.error("draw failed seq_id=%d", seq_ids[i], exc_info=error)
                drawn[i] = SequenceError(f"no token could be drawn: {type(error).__name__}: {error}")
            over = None if drafts[i] is None or _holds(drawn[i], drafts[i]) else seq_ids[i]
        return drawn

    def _weigh_rows(
        self,
        values_RV: np.ndarray,
        rows: Sequence[_SequenceState | None],
        places: Mapping[int, int],
        positions: Sequence[int],
    ) -> dict[int, Weighed]:
        """The draws of all rows whose logits are taken as they are, in one call."""
        ready: list[int] = []
        temperatures, quantiles = [], []
        for i in places:
            state = rows[i]
            if (
                state is None
                or not _wants_total(state.params, self._vocab_size)
                or _changes_logits(state, positions[i] - state.n_prompt)
            ):
                continue
            ready.append(i)
            temperatures.append(state.params.temperature)
            quantiles.append(uniform(state.seed, positions[i]))
        if not ready:
            return {}
        weighed = self._drawing.weigh(values_RV, [places[i] for i in ready], temperatures, quantiles)
        return dict(zip(ready, weighed, strict=True))

    def _best(self, logits_RV: torch.Tensor) -> list[SampledToken | EngineError]:
        """The arg-max of each row, or the row's error where that is no number."""
        best = self._drawing.argmax(logits_RV)
        if self._is_cpu:
            values_R = logits_RV.numpy()[np.arange(len(best)), best]
        else:
            values_R = _on_cpu(logits_RV.gather(1, torch.tensor(best, device=logits_RV.device)[:, None])[:, 0])
        return [
            SampledToken(token_id=token_id) if math.isfinite(value) else not_finite(value)
            for token_id, value in zip(best, values_R.tolist(), strict=True)
        ]

    def _sample_row(
        self, logits_V: np.ndarray, state: _SequenceState, position: int, weighed: Weighed | None
    ) -> SampledToken:
        n_output = position - state.n_prompt
        if not 0 <= n_output <= len(state.output_ids):
            raise InternalError(f"draw at position {position}; known are {state.n_prompt + len(state.output_ids)}")
        if n_output < len(state.output_ids):
            state.truncate(n_output)
        params = state.params
        row_V = _processed(logits_V, state, n_output, self._scratch)
        if params.is_greedy:
            token_id = int(row_V.argmax())
            _finite(float(row_V[token_id]))
        else:
            noise = uniform(state.seed, position)
            if weighed is None and _wants_total(params, self._vocab_size):
                (weighed,) = self._drawing.weigh(row_V[None], [0], [params.temperature], [noise])
            token_id = _draw(row_V, params, noise, self._scratch, weighed)
        logprobs = None
        if params.logprobs is not None:
            logprobs = _token_logprobs(logits_V, token_id, params.logprobs, self._scratch)
        state.advance(token_id)
        is_complete = state.grammar is not None and state.grammar.is_complete
        return SampledToken(token_id=token_id, logprobs=logprobs, is_complete=is_complete)

    def prompt_logprobs(self, logits_CV: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """For each row of `logits_CV` [C,V] fp32 the log-probability of the prompt token that follows it."""
        return [
            _token_logprobs(_on_cpu(logits_V), token_id, top, self._scratch)
            for logits_V, token_id in zip(logits_CV, token_ids, strict=True)
        ]


def _holds(drawn: SampledToken | EngineError | None, draft: int | None) -> bool:
    """Whether the row behind this one stands on the token that was drawn here."""
    return isinstance(drawn, SampledToken) and drawn.token_id == draft and not drawn.is_complete


def _runs(
    drawn: Sequence[SampledToken | EngineError], drafts: Sequence[int | None]
) -> list[SampledToken | EngineError | None]:
    """What was drawn, without the rows that stand behind a wrong draft."""
    kept: list[SampledToken | EngineError | None] = []
    is_over = False
    for token, draft in zip(drawn, drafts, strict=True):
        kept.append(None if is_over else token)
        is_over = draft is not None and (is_over or not _holds(token, draft))
    return kept


def _bans_end(state: _SequenceState, n_output: int) -> bool:
    return n_output < state.params.min_tokens and len(state.banned_ids) > 0


def _changes_logits(state: _SequenceState, n_output: int) -> bool:
    is_free = state.penalty is None and state.bias is None and state.grammar is None
    return not is_free or _bans_end(state, n_output)


def _wants_total(params: SamplingParams, vocab_size: int) -> bool:
    """Whether a draw needs the weights of the whole vocabulary."""
    is_cut = params.top_k is not None and params.top_k < vocab_size
    return not params.is_greedy and not is_cut and (params.top_p < 1.0 or params.min_p == 0.0)


def _processed(logits_V: np.ndarray, state: _SequenceState, n_output: int, scratch: _Scratch) -> np.ndarray:
    """`logits_V` after penalties, bias, min_tokens and grammar; a copy where anything changes."""
    if not _changes_logits(state, n_output):
        return logits_V
    bans_end = _bans_end(state, n_output)
    row_V = scratch.row_V
    row_V[:] = logits_V
    _finite(float(row_V.max()))  # what is masked below may be a NaN
    if state.penalty is not None:
        state.penalty.apply(row_V)
    if state.bias is not None:
        ids, values = state.bias
        row_V[ids] += values
    if state.grammar is not None:
        state.grammar.mask(row_V)
    if bans_end:
        before = row_V[state.banned_ids]
        row_V[state.banned_ids] = -np.inf
        if state.grammar is not None and row_V.max() == -np.inf:
            row_V[state.banned_ids] = before  # the grammar allows nothing but the end: it wins over min_tokens
    return row_V


def draw(logits_V: np.ndarray, params: SamplingParams, noise: float) -> int:
    """The token at quantile `noise` [0, 1) of softmax(logits_V / temperature) cut by top-k, top-p and min-p.

    logits_V [V] fp32, read only. What `Sampler.sample` does for one row, without its state.
    """
    scratch = _Scratch(len(logits_V))
    weighed = _weigh_row(logits_V, params.temperature, noise, scratch) if _wants_total(params, len(logits_V)) else None
    return _draw(logits_V, params, noise, scratch, weighed)


def _draw(
    logits_V: np.ndarray, params: SamplingParams, noise: float, scratch: _Scratch, weighed: Weighed | None
) -> int:
    if params.top_k is not None and params.top_k < len(logits_V):
        return _draw_among(_top(logits_V, params.top_k, scratch), params, noise)
    if weighed is not None:
        _finite(weighed.best)
        _finite(weighed.total)
    if params.top_p < 1.0:
        assert weighed is not None
        return _draw_top_p(logits_V, params, noise, scratch, weighed)
    if params.min_p > 0.0:
        best = _finite(float(logits_V.max()))
        low = np.float32(best + params.temperature * math.log(params.min_p))
        ids = np.flatnonzero(np.greater_equal(logits_V, low, out=scratch.mask_V))
        weights = np.exp((logits_V[ids].astype(np.float64) - best) / params.temperature)
        return _pick(ids, np.cumsum(weights), noise)
    assert weighed is not None
    return weighed.token_id


def _pick(ids: np.ndarray, cdf: np.ndarray, noise: float) -> int:
    """Inverse CDF; cdf need not end at 1."""
    return int(ids[min(int(np.searchsorted(cdf, noise * cdf[-1], side="right")), len(ids) - 1)])


def _weights(logits_V: np.ndarray, temperature: float, scratch: _Scratch) -> np.ndarray:
    """exp((logit - best) / temperature) [V] fp32 in the scratch: probabilities up to a factor, the best token 1."""
    best = _finite(float(logits_V.max()))
    weights_V = np.subtract(logits_V, np.float32(best), out=scratch.weights_V)
    if temperature != 1.0:
        weights_V /= np.float32(temperature)
    np.exp(weights_V, out=weights_V)
    return weights_V


def _draw_top_p(logits_V: np.ndarray, params: SamplingParams, noise: float, scratch: _Scratch, weighed: Weighed) -> int:
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


def _heaviest(weights: np.ndarray, mass: float, scratch: _Scratch) -> np.ndarray:
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


def _top(logits_V: np.ndarray, k: int, scratch: _Scratch) -> tuple[np.ndarray, np.ndarray]:
    """(ids, logits) of the k best, best first, ties by index; everything equal to the k-th is kept as well."""
    n = len(logits_V)
    blocks = n // _LANES
    if k >= n:
        low = -math.inf
    elif blocks >= 2 * k:
        # The k-th largest of the blocks' maxima is a lower bound for the k-th largest of all, whatever lies in a block. Every
        # blocks-th logit: numpy takes the maxima of whole rows. Not torch: its threads would wait for those of the kernels.
        maxima = logits_V[: blocks * _LANES].reshape(_LANES, blocks).max(axis=0)
        _finite(float(np.max(logits_V[blocks * _LANES :], initial=maxima.max())))
        low = float(np.partition(maxima, blocks - k)[blocks - k])
    else:
        _finite(float(logits_V.max()))
        low = float(np.partition(logits_V, n - k)[n - k])
    ids, values = _at_least(logits_V, low, scratch)
    if len(ids) > k:
        keep = int(np.searchsorted(-values, -values[k - 1], side="right"))
        ids, values = ids[:keep], values[:keep]
    return ids, values


def _at_least(values: np.ndarray, low: float, scratch: _Scratch) -> tuple[np.ndarray, np.ndarray]:
    """(ids, logits) with logit >= low, best first, ties by index; masked tokens (-inf) are never among them."""
    compare = np.greater_equal if low > -math.inf else np.greater
    ids = np.flatnonzero(compare(values, np.float32(low), out=scratch.mask_V))
    _finite(float(values[ids].max()) if len(ids) else float(values.max()))
    order = np.argsort(-values[ids], kind="stable")
    return ids[order], values[ids[order]]


def _on_cpu(values: torch.Tensor) -> np.ndarray:
    """The tensor as fp32 numpy; no copy where it already is that."""
    on_cpu: np.ndarray = values.float().cpu().numpy()
    return on_cpu


def _finite(best: float) -> float:
    """The largest logit, checked: NaN, or nothing left to choose from, is a SequenceError."""
    if not math.isfinite(best):
        raise not_finite(best)
    return best


def not_finite(best: float) -> SequenceError:
    """What a sequence ends with whose largest logit is no finite number."""
    return SequenceError(f"the largest logit is {best}; no token can be drawn")


def _token_logprobs(logits_V: np.ndarray, token_id: int, top: int, scratch: _Scratch) -> TokenLogprobs:
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
