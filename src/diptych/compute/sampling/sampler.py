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

import numpy as np
import torch

from diptych.compute.sampling.drawing import (
    Drawing,
    PlainDrawing,
    Scratch,
    Weighed,
    draw_token,
    finite,
    not_finite,
    token_logprobs,
    uniform,
    wants_total,
)
from diptych.compute.sampling.penalty import Penalty, has_penalty
from diptych.compute.sampling.structured import GrammarCompiler, GrammarState
from diptych.ground.errors import BadSampling, EngineError, InternalError, SequenceError
from diptych.ground.request import SamplingParams
from diptych.ground.step import SequenceStart, TokenLogprobs

logger = logging.getLogger("diptych.compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One drawn token. `is_complete`: the sequence's grammar can accept nothing more after it."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_complete: bool = False


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
        self._scratch = Scratch(vocab_size)
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
        if grammar is not None:
            grammar.begin_fill()

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

    def forced(self, seq_id: int, n: int) -> tuple[int, ...]:
        """The tokens, n at most, that the sequence's grammar forces behind what was drawn; they are known without a model."""
        state = self._states.get(seq_id)
        return () if state is None or state.grammar is None else tuple(state.grammar.forced(n))

    def n_forced(self, seq_id: int, position: int, drafts: Sequence[int]) -> int:
        """Of the 1 + len(drafts) rows of a sequence from `position` on, how many, from the first, need no logits: their tokens
        are forced, or they stand behind a draft that is not what is forced. `verify` draws them without.
        """
        state = self._states.get(seq_id)
        if state is None or state.grammar is None or state.params.logprobs is not None:
            return 0
        if position != state.n_prompt + len(state.output_ids):
            return 0  # drawn again
        forced = state.grammar.forced(1 + len(drafts))
        is_wrong = any(draft != token_id for draft, token_id in zip(drafts, forced, strict=False))
        return 1 + len(drafts) if is_wrong else len(forced)

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
        self,
        logits_RV: torch.Tensor,
        seq_ids: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[int | None],
        rows: Sequence[int | None] | None = None,
    ) -> list[SampledToken | EngineError | None]:
        """As `sample`, where a sequence may have several draws, one behind the other at positions in order.

        drafts: for each draw the token that the sequence's next stands behind, None for its last. The first whose token is
        another ends its sequence's run, as do an error and a complete grammar: the draws behind it give None and change
        nothing, so penalties, counts and grammars only ever stand behind tokens that hold.
        rows: of the logits, for each draw; None: it needs none (`n_forced`). Left out: one row for each.
        """
        states = [self._states.get(seq_id) for seq_id in seq_ids] if self._states else ()
        if not any(states):
            return _runs(self._best(logits_RV if rows is None else logits_RV[rows]), drafts)
        at: Sequence[int | None] = range(len(seq_ids)) if rows is None else rows
        drawn: list[SampledToken | EngineError | None] = [None] * len(seq_ids)
        plain = [i for i, state in enumerate(states) if state is None]
        if plain:
            # numpy copies on this thread; torch would wait for threads of its own, behind those of the kernels
            picked = [row for i in plain if (row := at[i]) is not None]
            plain_RV = torch.from_numpy(logits_RV.numpy()[picked]) if self._is_cpu else logits_RV[picked]
            run = _runs(self._best(plain_RV), [drafts[i] for i in plain])
            for i, token in zip(plain, run, strict=True):
                drawn[i] = token
        others = {i: at[i] for i, state in enumerate(states) if state is not None}
        if not self._is_cpu:  # one copy for all rows that need more than an arg-max
            picked = [row for row in others.values() if row is not None]
            logits_RV, places = logits_RV[picked], {row: place for place, row in enumerate(picked)}
            others = {i: None if row is None else places[row] for i, row in others.items()}
        self._draw_each(_on_cpu(logits_RV), others, seq_ids, positions, drafts, states, drawn)
        return drawn

    def _draw_each(
        self,
        values_RV: np.ndarray,
        places: Mapping[int, int | None],
        seq_ids: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[int | None],
        states: Sequence[_SequenceState | None],
        drawn: list[SampledToken | EngineError | None],
    ) -> None:
        """The draws of `verify` that have a state, one by one into `drawn`. places: of each its row of values_RV."""
        weighed = self._weigh_rows(values_RV, states, places, positions)
        over: int | None = None  # the sequence whose run has ended: what else it has here stands behind a wrong token
        for i, place in places.items():
            state = states[i]
            assert state is not None
            if seq_ids[i] == over:
                continue
            logits_V = None if place is None else values_RV[place]
            try:
                drawn[i] = self._sample_row(logits_V, state, positions[i], weighed.get(i))
            except EngineError as error:
                drawn[i] = error
            except Exception as error:
                # one sequence's options met a bug of ours; its neighbours must not pay for it
                logger.error("draw failed seq_id=%d", seq_ids[i], exc_info=error)
                drawn[i] = SequenceError(f"no token could be drawn: {type(error).__name__}: {error}")
            goes_on = drafts[i] is not None and _holds(drawn[i], drafts[i])
            over = None if goes_on or drafts[i] is None else seq_ids[i]
            if state.grammar is not None and not goes_on:
                state.grammar.begin_fill()

    def _weigh_rows(
        self,
        values_RV: np.ndarray,
        states: Sequence[_SequenceState | None],
        places: Mapping[int, int | None],
        positions: Sequence[int],
    ) -> dict[int, Weighed]:
        """The draws of all rows whose logits are taken as they are, in one call."""
        ready: list[int] = []
        taken, temperatures, quantiles = [], [], []
        for i, place in places.items():
            state = states[i]
            if (
                state is None
                or place is None
                or not wants_total(state.params, self._vocab_size)
                or _changes_logits(state, positions[i] - state.n_prompt)
            ):
                continue
            ready.append(i)
            taken.append(place)
            temperatures.append(state.params.temperature)
            quantiles.append(uniform(state.seed, positions[i]))
        if not ready:
            return {}
        weighed = self._drawing.weigh(values_RV, taken, temperatures, quantiles)
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
        self, logits_V: np.ndarray | None, state: _SequenceState, position: int, weighed: Weighed | None
    ) -> SampledToken:
        _stand_at(state, position)
        params = state.params
        forced = None if state.grammar is None else state.grammar.forced_token_id
        token_id = self._drawn(logits_V, state, position, weighed) if forced is None else forced
        logprobs = None
        if params.logprobs is not None:
            assert logits_V is not None
            logprobs = token_logprobs(logits_V, token_id, params.logprobs, self._scratch)
        state.advance(token_id)
        is_complete = state.grammar is not None and state.grammar.is_complete
        return SampledToken(token_id=token_id, logprobs=logprobs, is_complete=is_complete)

    def _drawn(self, logits_V: np.ndarray | None, state: _SequenceState, position: int, weighed: Weighed | None) -> int:
        """A token by the row's options."""
        assert logits_V is not None
        params, grammar = state.params, state.grammar
        if params.is_greedy and grammar is not None and not _changes_beside_grammar(state, position - state.n_prompt):
            likeliest = int(logits_V.argmax())
            finite(float(logits_V[likeliest]))
            if grammar.admits(likeliest):  # as nearly always: no mask need be laid on the row
                return likeliest
        row_V = _processed(logits_V, state, position - state.n_prompt, self._scratch)
        if params.is_greedy:
            token_id = int(row_V.argmax())
            finite(float(row_V[token_id]))
            return token_id
        noise = uniform(state.seed, position)
        if weighed is None and wants_total(params, self._vocab_size):
            (weighed,) = self._drawing.weigh(row_V[None], [0], [params.temperature], [noise])
        return draw_token(row_V, params, noise, self._scratch, weighed)

    def prompt_logprobs(self, logits_CV: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """For each row of `logits_CV` [C,V] fp32 the log-probability of the prompt token that follows it."""
        return [
            token_logprobs(_on_cpu(logits_V), token_id, top, self._scratch)
            for logits_V, token_id in zip(logits_CV, token_ids, strict=True)
        ]


def _stand_at(state: _SequenceState, position: int) -> None:
    """Forget what was drawn for `position` and behind it; it is the next to be drawn."""
    n_output = position - state.n_prompt
    if not 0 <= n_output <= len(state.output_ids):
        raise InternalError(f"draw at position {position}; known are {state.n_prompt + len(state.output_ids)}")
    if n_output < len(state.output_ids):
        state.truncate(n_output)


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
    return state.grammar is not None or _changes_beside_grammar(state, n_output)


def _changes_beside_grammar(state: _SequenceState, n_output: int) -> bool:
    return state.penalty is not None or state.bias is not None or _bans_end(state, n_output)


def _processed(logits_V: np.ndarray, state: _SequenceState, n_output: int, scratch: Scratch) -> np.ndarray:
    """`logits_V` after penalties, bias, min_tokens and grammar; a copy where anything changes."""
    if not _changes_logits(state, n_output):
        return logits_V
    bans_end = _bans_end(state, n_output)
    row_V = scratch.row_V
    row_V[:] = logits_V
    finite(float(row_V.max()))  # what is masked below may be a NaN
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


def _on_cpu(values: torch.Tensor) -> np.ndarray:
    """The tensor as fp32 numpy; no copy where it already is that."""
    on_cpu: np.ndarray = values.float().cpu().numpy()
    return on_cpu
