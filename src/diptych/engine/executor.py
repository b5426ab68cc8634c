"""Turns a StepPlan into tensors, runs the model, draws tokens: the real `Executor`.

Owns the block tables of running sequences as integers (the bytes belong to the KVStore) and the sampler's state.
One step: copies -> ForwardBatch -> Model.forward -> Sampler -> StepResult. A step in which every sequence wants only its
likeliest token asks for no logits (`Want.BEST`). Where a drafter runs, it guesses behind the drawn tokens (`drafting`).
Prompts of which states are wanted have their rows tapped behind the last layer and pooled (`Pooler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import isfinite
from typing import Any

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.kv_store import KVPayload, KVStore
from diptych.compute.model import Best, Model, Want
from diptych.compute.ops.contract import Taps
from diptych.compute.pooler import Pooler
from diptych.compute.sampling.drawing import not_finite
from diptych.compute.sampling.sampler import SampledToken, Sampler
from diptych.engine.drafting import Draftings
from diptych.ground.clock import Clock
from diptych.ground.config import MOST_DRAFTS
from diptych.ground.errors import EngineError, ExecutorError, InternalError
from diptych.ground.phase import Phase
from diptych.ground.request import Pooling
from diptych.ground.step import Chunk, ChunkResult, SequenceStart, StepPlan, StepResult, TokenLogprobs


class ModelExecutor:
    """Executes plans on a model. Not thread-safe: one thread steps the engine."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        sampler: Sampler,
        *,
        clock: Clock,
        drafting: Draftings | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        self.drafting = drafting
        self._pooler = pooler  # None: no request here may ask for states
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._clock = clock
        self._tables = np.zeros(
            (8, 8), dtype=np.int32
        )  # as wide as the longest sequence so far needed, as high as the most
        self._rows: dict[int, int] = {}  # seq_id -> row of _tables
        self._free_rows = list(range(7, -1, -1))
        self._starts: dict[int, SequenceStart] = {}
        self._n_adapted = 0  # sequences with an adapter
        self._n_structured = 0  # those with a grammar
        self._n_both_ways = 0  # sequences whose tokens attend to all of them
        self._n_pairs = 0  # those of two texts that the model tells apart
        self._failed: dict[int, EngineError] = {}  # sequences that cannot go on, until control has ended them

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """Have the KV pool's memory provided before steps need it; on any thread, beside steps."""
        self._kv.back_memory(wants_stop)

    @property
    def lineage(self) -> str:
        """Of the model; see `compute.model.Model`."""
        return self._model.lineage

    @property
    def block_bytes(self) -> int:
        """Of one block over all layers, as it travels."""
        return self._kv.header.block_bytes

    def export_blocks(self, block_ids: Sequence[int], out: np.ndarray | None = None) -> KVPayload:
        """The bytes of these blocks, for another engine; between steps."""
        return self._kv.export_blocks(block_ids, out)

    def import_blocks(self, block_ids: Sequence[int], payload: KVPayload) -> None:
        """Take in another engine's; between steps. TransferError, and nothing is written, unless all of them are right."""
        self._kv.import_blocks(block_ids, payload)

    @property
    def has_states(self) -> bool:
        """Whether the model keeps a state of each sequence: then blocks alone are not all that was read."""
        return self._model.state_bytes > 0

    def export_state(self, place: int) -> KVPayload:
        """The bytes of the state in a place, for another engine; between steps."""
        state = self._kv.read_state(place).cpu().numpy().view(np.uint8)[None]
        return KVPayload.of(replace(self._kv.header, block_bytes=state.shape[1]), state)

    def import_state(self, place: int, payload: KVPayload) -> None:
        """Take in another engine's; between steps. TransferError, and nothing is written, unless it is right."""
        payload.check(replace(self._kv.header, block_bytes=self._model.state_bytes), 1)
        self._kv.write_state(place, torch.from_numpy(payload.data_NB[0].copy()).view(torch.float32))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises ExecutorError, with the cause, when the model or the step as a whole fails.

        What fails for one sequence alone (its options, its grammar, its logits) is the error of its own result.
        """
        begin_s = self._clock.now_s()
        draft_s = 0.0
        try:
            self._begin_and_end_sequences(plan)
            if plan.copies:
                self._kv.copy_blocks([(copy.source_block_id, copy.target_block_id) for copy in plan.copies])
            drafted = None if self.drafting is None else self.drafting.begin(plan)
            forced = self._forced_rows(plan)
            batch = self._batch(plan, forced)
            needs_logits = self._needs_logits(plan)
            taps = self._with_last(plan, drafted)
            ends: dict[str, Any] = {} if taps is None else {"taps": taps}
            forward_s = self._clock.now_s()
            if needs_logits:
                logits_RV = self._model.forward(batch, self._kv, Want.LOGITS, **ends)
                device_s = self._clock.now_s() - forward_s
                results = self._read_logits(plan, logits_RV, forced)
            else:
                best = self._model.forward(batch, self._kv, Want.BEST, **ends)
                device_s = self._clock.now_s() - forward_s
                results = self._take_best(plan, best)
            if taps is not drafted:
                assert taps is not None
                results = self._pooled(plan, results, taps, drafted)
            if self.drafting is not None:
                drawn_s = self._clock.now_s()
                results = self.drafting.end(plan, results, self._tables_of, drafted)
                draft_s = self._clock.now_s() - drawn_s if self.drafting.has_asked else 0.0
        except EngineError:
            raise
        except Exception as error:
            raise ExecutorError(f"step {plan.step_id} failed: {type(error).__name__}: {error}") from error
        total_s = self._clock.now_s() - begin_s
        host_s = max(0.0, total_s - device_s - draft_s)
        return StepResult(step_id=plan.step_id, results=results, device_s=device_s, host_s=host_s, draft_s=draft_s)

    def _begin_and_end_sequences(self, plan: StepPlan) -> None:
        for seq_id in plan.ended_seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._free_rows.append(row)
            start = self._starts.pop(seq_id, None)
            if start is not None:
                self._n_adapted -= start.adapter is not None
                self._n_structured -= start.sampling.structured is not None
                self._n_both_ways -= _is_both_ways(start)
                self._n_pairs -= _second(start) is not None
                self._sampler.end(seq_id)
                if self._pooler is not None:
                    self._pooler.end(seq_id)
            self._failed.pop(seq_id, None)
        for start in plan.starts:
            self._starts[start.seq_id] = start
            self._n_adapted += start.adapter is not None
            self._n_structured += start.sampling.structured is not None
            self._n_both_ways += _is_both_ways(start)
            self._n_pairs += _second(start) is not None
            self._rows[start.seq_id] = self._take_row()
            try:
                if start.pooling is not None:
                    self._begin_pooling(start, start.pooling)
                else:
                    self._sampler.begin(start)
            except EngineError as error:
                self._failed[start.seq_id] = error
        for chunk in plan.chunks:
            if chunk.new_block_ids:
                first = chunk.first_new_block
                end = first + len(chunk.new_block_ids)
                if end > self._tables.shape[1]:
                    self._tables = np.pad(self._tables, ((0, 0), (0, end)))
                self._tables[self._rows[chunk.seq_id], first:end] = chunk.new_block_ids

    def _begin_pooling(self, start: SequenceStart, pooling: Pooling) -> None:
        if self._pooler is None:
            raise InternalError("a request for states reached an executor without a pooler")
        self._pooler.begin(start.seq_id, pooling, n_tokens=len(start.prompt_token_ids))

    def _with_last(self, plan: StepPlan, drafted: Taps | None) -> Taps | None:
        """What the drafter reads, and behind it the states behind the last layer where the step holds prompts to pool."""
        pooler = self._pooler
        if pooler is None or not any(pooler.has(chunk.seq_id) for chunk in plan.chunks):
            return drafted
        return Taps(numbers=(*(() if drafted is None else drafted.numbers), self._model.spec.n_layers - 1))

    def _pooled(
        self, plan: StepPlan, results: tuple[ChunkResult, ...], taps: Taps, drafted: Taps | None
    ) -> tuple[ChunkResult, ...]:
        """The results with the states of prompts that end in this step; the drafter gets what it asked for."""
        pooler = self._pooler
        assert pooler is not None
        assert taps.states is not None
        if drafted is not None:
            drafted.states = taps.states[:-1]
        rows_TD = taps.states[-1].cpu().numpy()
        made, begin = list(results), 0
        for i, chunk in enumerate(plan.chunks):
            end = begin + len(chunk.token_ids)
            if pooler.has(chunk.seq_id) and made[i].error is None:
                state = pooler.feed(chunk.seq_id, rows_TD[begin:end], start=chunk.start_pos)
                if isinstance(state, EngineError):
                    made[i] = ChunkResult(seq_id=chunk.seq_id, error=state)
                elif state is not None:
                    made[i] = ChunkResult(seq_id=chunk.seq_id, state=state)
            begin = end
        return tuple(made)

    def _take_row(self) -> int:
        if not self._free_rows:
            n_rows = len(self._tables)
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
            self._free_rows = list(range(2 * n_rows - 1, n_rows - 1, -1))
        return self._free_rows.pop()

    def _forced_rows(self, plan: StepPlan) -> dict[int, int]:
        """By sequence, of the rows that draw, how many from the first need no logits, as its grammar says what they give."""
        if not self._n_structured:
            return {}
        forced: dict[int, int] = {}
        for chunk in plan.chunks:
            if chunk.samples and not self._wants_prompt_logprobs(chunk):
                drafts = chunk.draft_token_ids
                n = self._sampler.n_forced(chunk.seq_id, chunk.end_pos - len(drafts), drafts)
                if n:
                    forced[chunk.seq_id] = n
        return forced

    def _batch(self, plan: StepPlan, forced: Mapping[int, int]) -> ForwardBatch:
        token_ids: list[int] = []
        starts, ends = [0], []
        table_rows: list[int] = []
        logits_rows: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            starts.append(len(token_ids))
            ends.append(chunk.end_pos)
            table_rows.append(self._rows[chunk.seq_id])
            if chunk.phase is Phase.DECODE or self._wants_prompt_logprobs(chunk):
                logits_rows += range(starts[-2] + forced.get(chunk.seq_id, 0), starts[-1])
            elif chunk.samples and chunk.seq_id not in forced:
                logits_rows.append(starts[-1] - 1)
        return ForwardBatch(
            token_ids_T=np.array(token_ids, dtype=np.int32),
            query_start_S1=np.array(starts, dtype=np.int32),
            context_tokens_S=np.array(ends, dtype=np.int32),
            block_table_SM=self._tables.take(table_rows, axis=0),  # half the time of indexing, caches being cold
            logits_rows_R=np.array(logits_rows, dtype=np.int32),
            adapters_S=self._adapters_of(plan) if self._n_adapted else None,
            both_ways_S=self._both_ways_of(plan) if self._n_both_ways else None,
            second_S=self._second_of(plan) if self._n_pairs else None,
            states=_states_of(plan) if plan.chunks[0].state is not None else None,
        )

    def _adapters_of(self, plan: StepPlan) -> np.ndarray | None:
        numbers = [self._starts[chunk.seq_id].adapter for chunk in plan.chunks]
        if all(number is None for number in numbers):
            return None
        return np.array([-1 if number is None else number for number in numbers], dtype=np.int32)

    def _both_ways_of(self, plan: StepPlan) -> np.ndarray | None:
        marks = [_is_both_ways(self._starts[chunk.seq_id]) for chunk in plan.chunks]
        return np.array(marks, dtype=np.int32) if any(marks) else None

    def _second_of(self, plan: StepPlan) -> np.ndarray | None:
        begins = [_second(self._starts[chunk.seq_id]) for chunk in plan.chunks]
        if all(begin is None for begin in begins):
            return None
        ends = (chunk.end_pos for chunk in plan.chunks)
        return np.array(
            [end if begin is None else begin for begin, end in zip(begins, ends, strict=True)], dtype=np.int32
        )

    def _tables_of(self, seq_ids: Iterable[int]) -> np.ndarray:
        return self._tables.take([self._rows[seq_id] for seq_id in seq_ids], axis=0)

    def _wants_prompt_logprobs(self, chunk: Chunk) -> bool:
        if chunk.phase is not Phase.PREFILL:
            return False
        start = self._starts[chunk.seq_id]
        if start.sampling.prompt_logprobs is None:
            return False
        return chunk.start_pos < len(start.prompt_token_ids) - 1 or chunk.start_pos == 0

    def _needs_logits(self, plan: StepPlan) -> bool:
        """Whether the step is for more than the likeliest token of each of its sequences."""
        if not self._sampler.is_plain(chunk.seq_id for chunk in plan.chunks):
            return True
        return any(self._wants_prompt_logprobs(chunk) for chunk in plan.chunks)

    def _read_logits(
        self, plan: StepPlan, logits_RV: torch.Tensor, forced: Mapping[int, int]
    ) -> tuple[ChunkResult, ...]:
        rows: list[int | None] = []  # of each draw
        seq_ids: list[int] = []
        positions: list[int] = []
        drafts: list[int | None] = []
        prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        row = 0
        for chunk in plan.chunks:
            drafted = chunk.draft_token_ids
            n_forced = forced.get(chunk.seq_id, 0)
            n_drawn = 1 + len(drafted) - n_forced if chunk.samples else 0
            if self._wants_prompt_logprobs(chunk):
                n_rows = len(chunk.token_ids)
                try:
                    prompt_logprobs[chunk.seq_id] = self._prompt_logprobs(chunk, logits_RV[row : row + n_rows])
                except EngineError as error:
                    self._failed[chunk.seq_id] = error
            else:
                n_rows = n_drawn
            row += n_rows
            if chunk.samples and chunk.seq_id not in self._failed:
                rows += [None] * n_forced
                rows += range(row - n_drawn, row)
                seq_ids += [chunk.seq_id] * (n_forced + n_drawn)
                positions += range(chunk.end_pos - len(drafted), chunk.end_pos + 1)
                drafts += (*drafted, None)
        drawn: dict[int, list[SampledToken]] = {}
        late: dict[int, EngineError] = {}  # of rows behind drafts that hold: what the sequence's next step ends with
        is_each = not forced and len(rows) == len(logits_RV)  # row for row
        tokens = (
            self._sampler.verify(logits_RV, seq_ids, positions, drafts, None if is_each else rows) if seq_ids else []
        )
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            if isinstance(token, SampledToken):
                drawn.setdefault(seq_id, []).append(token)
            elif token is not None:
                (late if seq_id in drawn else self._failed)[seq_id] = token
        results = tuple(
            self._result(chunk.seq_id, drawn.get(chunk.seq_id, []), prompt_logprobs.get(chunk.seq_id, ()))
            for chunk in plan.chunks
        )
        self._failed.update(late)
        return results

    def _result(
        self, seq_id: int, tokens: list[SampledToken], prompt_logprobs: tuple[TokenLogprobs | None, ...]
    ) -> ChunkResult:
        if seq_id in self._failed:
            return ChunkResult(seq_id=seq_id, error=self._failed[seq_id])
        return ChunkResult(
            seq_id=seq_id,
            token_ids=tuple([token.token_id for token in tokens]),
            logprobs=tuple([token.logprobs for token in tokens if token.logprobs is not None]),
            prompt_logprobs=prompt_logprobs,
            is_complete=bool(tokens) and tokens[-1].is_complete,
            forced_token_ids=self._sampler.forced(seq_id, MOST_DRAFTS) if self._n_structured else (),
        )

    def _take_best(self, plan: StepPlan, best: Best) -> tuple[ChunkResult, ...]:
        rows = zip(*best, strict=True)
        results = []
        for chunk in plan.chunks:
            seq_id = chunk.seq_id
            token_ids: tuple[int, ...] = ()
            if chunk.samples:
                token_id, logit = next(rows)
                token_ids = (token_id,)
                if not isfinite(logit):
                    self._failed.setdefault(seq_id, not_finite(logit))
                if len(chunk.token_ids) > 1 and chunk.draft_token_ids:
                    token_ids = _run(token_id, chunk.draft_token_ids, rows)
            error = self._failed.get(seq_id)
            if error is None:
                results.append(ChunkResult(seq_id=seq_id, token_ids=token_ids))
            else:
                results.append(ChunkResult(seq_id=seq_id, error=error))
        return tuple(results)

    def _prompt_logprobs(self, chunk: Chunk, logits_CV: torch.Tensor) -> tuple[TokenLogprobs | None, ...]:
        # The row at position p judges the prompt token at p + 1; token 0 has nothing before it.
        start = self._starts[chunk.seq_id]
        prompt, top = start.prompt_token_ids, start.sampling.prompt_logprobs
        assert top is not None
        judged = list(prompt[chunk.start_pos + 1 : chunk.end_pos + 1])
        entries = self._sampler.prompt_logprobs(logits_CV[: len(judged)], judged, top) if judged else []
        return (None, *entries) if chunk.start_pos == 0 else tuple(entries)


def _states_of(plan: StepPlan) -> StatePlaces:
    uses = [chunk.state for chunk in plan.chunks if chunk.state is not None]
    saves = [(s, *save) for s, use in enumerate(uses) for save in use.saves]
    return StatePlaces(
        reads_S=np.array([use.reads for use in uses], dtype=np.int32),
        writes_S=np.array([use.writes for use in uses], dtype=np.int32),
        saves_N3=np.array(saves, dtype=np.int32).reshape(-1, 3),
    )


def _is_both_ways(start: SequenceStart) -> bool:
    return start.pooling is not None and start.pooling.both_ways


def _second(start: SequenceStart) -> int | None:
    return None if start.pooling is None else start.pooling.second


def _run(token_id: int, drafts: tuple[int, ...], rows: Iterator[tuple[int, float]]) -> tuple[int, ...]:
    """The likeliest tokens of a chunk's rows as far as the drafts hold; takes a row for every draft.

    A row without a number ends the run too: the next step finds it again as its first, and fails.
    """
    run = [token_id]
    behind = tuple(islice(rows, len(drafts)))
    for draft, (next_id, logit) in zip(drafts, behind, strict=True):
        if run[-1] != draft or not isfinite(logit):
            break
        run.append(next_id)
    return tuple(run)
