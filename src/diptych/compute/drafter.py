"""Drafters that run tensors: what the executor asks of one, and the drafter that is a second, smaller model.

A drafter is told of every chunk that its sequence computes and of what came of it, and guesses what comes next. Its guesses
are verified by the usual draw of the target, so nothing here can change an answer: a wrong guess is a row for nothing.

    drafter.begin(start)
    drafts = drafter.propose(chunks, token_ids, tables_CM)   # after the target's step: {seq_id: guesses}
    drafter.end(seq_id)

Guesses are drawn from the drafter's logits as the target's tokens are from its own: same options, penalties and grammar,
same noise of (seed, position). Where the two models agree they then agree at any temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from diptych.compute.batch import ForwardBatch
from diptych.compute.draft_store import DraftStore
from diptych.compute.model import Model, Want
from diptych.compute.sampler import SampledToken, Sampler
from diptych.ground.clock import Clock
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.step import Chunk, SequenceStart

Observe = Callable[[StepShape, float], None]  # how long a forward of the drafter took


class Drafter(ABC):
    """Guesses what comes next in sequences of the engine. One call at a time, on the thread that steps it."""

    @abstractmethod
    def begin(self, start: SequenceStart) -> None:
        """A sequence that the drafter has not seen."""

    @abstractmethod
    def end(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are fine."""

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The step's copies of blocks, before its chunks."""

    @abstractmethod
    def propose(
        self, chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]], tables_CM: np.ndarray
    ) -> Mapping[int, Sequence[int]]:
        """Guesses of every sequence that wants some, best first in line.

        token_ids: what each chunk gave. tables_CM: the block table of each chunk's sequence, as the step left it.
        """


@dataclass(slots=True)
class _Followed:
    """A sequence as the drafter knows it."""

    token_ids: list[int]
    computed: int = 0  # tokens whose keys and values lie in its blocks
    fed: list[int] = field(default_factory=list)  # guesses behind the known tokens, computed too
    fed_from: int = 0  # where the first of them would stand
    fed_end: int = 0  # up to here what was computed lies in blocks that stay


@dataclass(slots=True)
class _Job:
    """One sequence's part of a step: compute tokens [begin, end), then guess `wanted`."""

    seq_id: int
    followed: _Followed
    table_M: np.ndarray
    begin: int
    end: int
    n_held: int  # blocks
    wanted: int
    drafts: list[int] = field(default_factory=list)
    is_over: bool = False


class DraftModel(Drafter):
    """A second model with the same tokenizer, one forward for each draft.

    It computes a prompt with the target's chunks. In decode it computes what it has not seen (the token that corrected it, and
    a last guess that held) together with its first guess. A sequence that nobody asks for drafts waits, and catches up when
    somebody does. most_rows: of one forward.
    """

    def __init__(
        self,
        model: Model,
        store: DraftStore,
        sampler: Sampler,
        *,
        most_rows: int,
        clock: Clock,
        observe: Observe = lambda shape, seconds: None,
    ) -> None:
        self._model = model
        self._store = store
        self._sampler = sampler
        self._most_rows = most_rows
        self._clock = clock
        self._observe = observe
        self._followed: dict[int, _Followed] = {}

    def begin(self, start: SequenceStart) -> None:
        """See Drafter."""
        self._followed[start.seq_id] = _Followed(list(start.prompt_token_ids))

    def end(self, seq_id: int) -> None:
        """See Drafter."""
        self._followed.pop(seq_id, None)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Drafter."""
        self._store.copy_blocks(pairs)

    def propose(
        self, chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]], tables_CM: np.ndarray
    ) -> dict[int, list[int]]:
        """See Drafter."""
        for chunk in chunks:
            self._store.take_over(chunk)
        jobs: list[_Job] = []
        rows = self._most_rows
        for chunk, given, table_M in zip(chunks, token_ids, tables_CM, strict=True):
            job = self._job(chunk, given, table_M, rows)
            if job is not None and len(jobs) < self._store.most_sequences:
                rows -= job.end - job.begin
                jobs.append(job)
        if not jobs:
            return {}
        tables = self._tables(jobs)
        self._catch_up(jobs, tables)
        wanting = [i for i, job in enumerate(jobs) if len(job.drafts) < job.wanted and not job.is_over]
        while wanting:
            self._guess_next([jobs[i] for i in wanting], tables[wanting])
            wanting = [i for i in wanting if len(jobs[i].drafts) < jobs[i].wanted and not jobs[i].is_over]
        for job in jobs:
            self._remember(job)
        return {job.seq_id: job.drafts for job in jobs if job.drafts}

    def _job(self, chunk: Chunk, given: Sequence[int], table_M: np.ndarray, rows: int) -> _Job | None:
        """What the drafter has to do for a chunk; None where that is nothing."""
        followed = self._followed.get(chunk.seq_id)
        if followed is None:
            return None
        tokens, n_known = followed.token_ids, chunk.end_pos - len(chunk.draft_token_ids)
        if given:
            tokens[n_known:] = given
        if chunk.new_block_ids and chunk.first_new_block == 0:  # its first chunk, or the first after a preemption
            followed.computed, followed.fed = self._store.covered(table_M, chunk.start_pos), []
        self._keep_fed(followed, table_M)
        is_prefill = chunk.phase is Phase.PREFILL
        wanted = chunk.wanted_drafts
        if wanted is None or (wanted == 0 and not is_prefill):
            return None
        end = len(tokens) if given else chunk.end_pos
        begin = min(followed.computed, end - 1)
        held = end - 1 if given else end  # the newest token is not the target's yet
        if end - begin > rows:  # the rest in later steps
            end, wanted = begin + rows, 0
        room = self._model.spec.max_context_tokens - end + 1
        n_held = -(-held // self._store.block_tokens)
        if end <= begin or room < 1:
            return None
        return _Job(chunk.seq_id, followed, table_M, begin, end, n_held, min(wanted if given else 0, room))

    def _keep_fed(self, followed: _Followed, table_M: np.ndarray) -> None:
        """Guesses that came true are computed already, where they lie in blocks that stayed."""
        if not followed.fed:
            return
        end = followed.fed_from
        for guess, token_id in zip(followed.fed, followed.token_ids[end:], strict=False):
            if guess != token_id:
                break
            end += 1
        end = min(end, followed.fed_end)
        if end > followed.computed:
            self._store.note(table_M, followed.computed, end)
            followed.computed = end
        followed.fed = []

    def _tables(self, jobs: Sequence[_Job]) -> np.ndarray:
        """[jobs, M], wide enough for every draft."""
        block_tokens = self._store.block_tokens
        width = max(-(-(job.end + job.wanted) // block_tokens) for job in jobs)
        return np.stack(
            [self._store.table(i, job.table_M, min(job.n_held, width), width) for i, job in enumerate(jobs)]
        )

    def _catch_up(self, jobs: Sequence[_Job], tables: np.ndarray) -> None:
        """One forward over all that is known and not computed; its last rows give the first guesses."""
        token_ids: list[int] = []
        starts, last_rows = [0], []
        for job in jobs:
            token_ids += job.followed.token_ids[job.begin : job.end]
            starts.append(len(token_ids))
            if job.wanted:
                last_rows.append(len(token_ids) - 1)
        batch = _batch(token_ids, starts, [job.end for job in jobs], tables, last_rows)
        shapes = [ChunkShape(Phase.PREFILL, job.end - job.begin, job.begin, job.wanted > 0) for job in jobs]
        self._draw([job for job in jobs if job.wanted], batch, StepShape(shapes))

    def _guess_next(self, jobs: Sequence[_Job], tables: np.ndarray) -> None:
        """One more guess behind the last one."""
        contexts = [job.end + len(job.drafts) for job in jobs]
        rows = range(len(jobs) + 1)
        batch = _batch([job.drafts[-1] for job in jobs], list(rows), contexts, tables, list(rows[:-1]))
        shapes = [ChunkShape(Phase.DECODE, 1, context - 1, True) for context in contexts]
        self._draw(jobs, batch, StepShape(shapes))

    def _draw(self, jobs: Sequence[_Job], batch: ForwardBatch, shape: StepShape) -> None:
        """Forward, and a guess of each job. One that has no next token, or no number for it, is over."""
        begin_s = self._clock.now_s()
        seq_ids = [job.seq_id for job in jobs]
        if self._sampler.is_plain(seq_ids):
            best, _ = self._model.forward(batch, self._store.kv, Want.BEST)
            for job, token_id in zip(jobs, best, strict=True):
                job.drafts.append(token_id)
        else:
            logits_RV = self._model.forward(batch, self._store.kv, Want.LOGITS)
            positions = [job.end + len(job.drafts) for job in jobs]
            for job, token in zip(jobs, self._sampler.sample(logits_RV, seq_ids, positions), strict=True):
                job.is_over = not isinstance(token, SampledToken) or token.is_complete
                if isinstance(token, SampledToken):
                    job.drafts.append(token.token_id)
        self._observe(shape, self._clock.now_s() - begin_s)

    def _remember(self, job: _Job) -> None:
        """Note what is computed, and give the sampler back the state that it had."""
        followed, held = job.followed, job.n_held * self._store.block_tokens
        end = min(job.end, held)
        if end > job.begin:
            self._store.note(job.table_M, job.begin, end)
        followed.computed = max(followed.computed, end)
        if job.drafts:
            followed.fed, followed.fed_from, followed.fed_end = job.drafts[:-1], job.end, held
            self._sampler.rewind(job.seq_id, job.end)


def _batch(
    token_ids: Sequence[int], starts: Sequence[int], contexts: Sequence[int], tables: np.ndarray, rows: Sequence[int]
) -> ForwardBatch:
    return ForwardBatch(
        token_ids_T=np.array(token_ids, dtype=np.int32),
        query_start_S1=np.array(starts, dtype=np.int32),
        context_tokens_S=np.array(contexts, dtype=np.int32),
        block_table_SM=np.ascontiguousarray(tables),
        logits_rows_R=np.array(rows, dtype=np.int32),
    )
