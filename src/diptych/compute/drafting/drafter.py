"""Drafters that run tensors: what the executor asks of one, and the drafter that is a second, smaller model.

`head_drafters` has those that read the model's own states.

A drafter is told of every chunk that its sequence computes and of what came of it, which costs next to nothing, and computes
where it is asked to. Its guesses are verified by the usual draw of the target, so nothing here can change an answer: a wrong
guess is a row for nothing.

    drafter.begin(start)
    drafter.follow(chunks, token_ids)                                # after each of the target's steps
    drafts = drafter.propose(chunks, token_ids, tables_CM, states)   # behind one that wants some: {seq_id: guesses}
    drafter.end(seq_id)

Guesses are drawn from the drafter's logits as the target's tokens are from its own: same options, penalties and grammar,
same noise of (seed, position). Where the two models agree they then agree at any temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from diptych.compute.batch import ForwardBatch
from diptych.compute.drafting.draft_store import DraftStore
from diptych.compute.model import Model, Want
from diptych.compute.sampling.sampler import SampledToken, Sampler
from diptych.ground.clock import Clock
from diptych.ground.phase import Phase
from diptych.ground.request import SamplingParams
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.step import Chunk, SequenceStart

Observe = Callable[[StepShape, float], None]  # how long a forward of the drafter took

REHEARSED_STEPS = 4
_NOBODY = -1  # the sequence of a rehearsal


class Drafter(ABC):
    """Guesses what comes next in sequences of the engine. One call at a time, on the thread that steps it.

    taps: behind which of the model's layers it reads the residual stream; none where that is not its business.
    n_read: tokens that it read in its last `propose`, before it guessed.
    """

    taps: tuple[int, ...] = ()
    n_read: int = 0

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
    def follow(self, chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]]) -> None:
        """Take in what each chunk of a step gave."""

    @abstractmethod
    def reads(self, chunk: Chunk) -> bool:
        """Whether it would do something behind this chunk, which is about to be computed."""

    @abstractmethod
    def propose(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[Sequence[int]],
        tables_CM: np.ndarray,
        states: torch.Tensor | None = None,
    ) -> Mapping[int, Sequence[int]]:
        """Guesses of every sequence that wants some, best first in line; the step was followed before.

        token_ids: what each chunk gave. tables_CM: the block table of each chunk's sequence, as the step left it.
        states [taps, T, D]: the residual stream behind those layers, of all rows of the step.
        """


def rehearse(drafter: Drafter, *, block_tokens: int, n_drafts: int, width: int, device: torch.device) -> None:
    """Have it draft behind a prompt and a few tokens that fill block 0, whose contents are lost: a first forward is cold
    and may take several times as long as a later one, and what is tried in vain at that price is given up. width: of the
    model's states.
    """
    n = max(1, block_tokens - REHEARSED_STEPS)
    chunks = [Chunk(_NOBODY, Phase.PREFILL, 0, (0,) * n, 0, (0,), True, n_drafts)]
    chunks += [Chunk(_NOBODY, Phase.DECODE, at, (0,), 1, (), True, n_drafts) for at in range(n, block_tokens)]
    prompt = chunks[0].token_ids
    drafter.begin(SequenceStart(seq_id=_NOBODY, prompt_token_ids=prompt, sampling=SamplingParams(), seed=0))
    table = np.zeros((1, 1), dtype=np.int32)
    for chunk in chunks:
        drafter.follow([chunk], [(0,)])
        rows = (len(drafter.taps), len(chunk.token_ids), width)
        drafter.propose([chunk], [(0,)], table, torch.zeros(rows, device=device) if drafter.taps else None)
    drafter.end(_NOBODY)
    drafter.follow(chunks[:1], [()])  # nothing is written in the block


@dataclass(slots=True)
class Followed:
    """A sequence as the drafter knows it."""

    token_ids: list[int]
    computed: int = 0  # tokens whose keys and values lie in its blocks
    found: int | None = (
        None  # tokens that the target had when it began here; what of them the drafter has is not known yet
    )
    base: int = 0  # blocks before those that the drafter reads: it was not there when they were computed
    fed: list[int] = field(default_factory=list)  # guesses behind the known tokens, computed too
    fed_from: int = 0  # where the first of them would stand
    fed_end: int = 0  # up to here what was computed lies in blocks that stay


@dataclass(slots=True)
class Job:
    """One sequence's part of a step: compute positions [begin, end), then guess `wanted`.

    shift: the token that position p computes is p + shift, and the first guess stands at end + shift.
    """

    seq_id: int
    followed: Followed
    table_M: np.ndarray
    begin: int
    end: int
    n_held: int  # blocks
    wanted: int
    shift: int = 0
    given: torch.Tensor | None = None  # what the next forward reads beside tokens, one row for each
    drafts: list[int] = field(default_factory=list)
    is_over: bool = False


class PagedDrafter(Drafter):
    """A drafter with keys and values of its own: one forward over what is new, then one for each further draft.

    most_rows: of one forward.
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
        vocab_size: int | None = None,
    ) -> None:
        """vocab_size: of the target; None: as the drafter's. Tables of one tokenizer may be padded to other sizes."""
        self._vocab_size: int = model.spec.vocab_size if vocab_size is None else vocab_size
        self._model = model
        self._store = store
        self._sampler = sampler
        self._most_rows = most_rows
        self._clock = clock
        self._observe = observe
        self._followed: dict[int, Followed] = {}

    def begin(self, start: SequenceStart) -> None:
        """See Drafter."""
        self._followed[start.seq_id] = Followed([*start.prompt_token_ids, *start.output_token_ids])

    def end(self, seq_id: int) -> None:
        """See Drafter."""
        self._followed.pop(seq_id, None)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Drafter."""
        self._store.copy_blocks(pairs)

    def propose(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[Sequence[int]],
        tables_CM: np.ndarray,
        states: torch.Tensor | None = None,
    ) -> dict[int, list[int]]:
        """See Drafter."""
        jobs: list[Job] = []
        rows, row = self._most_rows, 0
        for chunk, given, table_M in zip(chunks, token_ids, tables_CM, strict=True):
            followed = self._followed.get(chunk.seq_id)
            if followed is not None and chunk.wanted_drafts is not None:
                if followed.found is not None:
                    followed.computed, followed.found = self._store.covered(table_M, followed.found), None
                job = self._job(followed, chunk, given, table_M, rows=rows)
                if job is not None and len(jobs) < self._store.most_sequences:
                    rows -= job.end - job.begin
                    self._give(job, states, row - chunk.start_pos)
                    jobs.append(job)
            row += len(chunk.token_ids)
        self.n_read = sum(job.end - job.begin for job in jobs)
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

    def follow(self, chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]]) -> None:
        """See Drafter. O(1) for each chunk, and for each new block."""
        for chunk, given in zip(chunks, token_ids, strict=True):
            if chunk.new_block_ids:
                self._store.take_over(chunk)
            followed = self._followed.get(chunk.seq_id)
            if followed is None:
                continue
            if given:
                n_known = 1 if chunk.phase is Phase.DECODE else len(chunk.token_ids)  # drafts stand behind them
                followed.token_ids[chunk.start_pos + n_known :] = given
            if chunk.new_block_ids and chunk.first_new_block == 0:  # its first chunk, or the first after a preemption
                followed.computed = followed.base = 0
                followed.found, followed.fed = chunk.start_pos, []

    @abstractmethod
    def _job(
        self, followed: Followed, chunk: Chunk, given: Sequence[int], table_M: np.ndarray, *, rows: int
    ) -> Job | None:
        """What the drafter has to do for a chunk, in at most so many rows; None where that is nothing."""

    def _give(self, job: Job, states: torch.Tensor | None, first: int) -> None:
        """Put in what the job's first forward reads beside tokens; position p is row first + p of the states."""

    @abstractmethod
    def _forward(self, jobs: Sequence[Job], batch: ForwardBatch, want: Want) -> Any:
        """The drafter's forward over a batch of these jobs: logits or the best of its logits rows."""

    def _tables(self, jobs: Sequence[Job]) -> np.ndarray:
        """[jobs, M], wide enough for every draft."""
        block_tokens = self._store.block_tokens
        width = max(-(-(job.end + job.wanted) // block_tokens) - job.followed.base for job in jobs)
        tables = []
        for i, job in enumerate(jobs):
            base = job.followed.base
            tables.append(self._store.table(i, job.table_M[base:], min(job.n_held - base, width), width))
        return np.stack(tables)

    def _base_pos(self, job: Job) -> int:
        """Positions before those that it reads; only distances count in its attention."""
        return job.followed.base * self._store.block_tokens

    def _catch_up(self, jobs: Sequence[Job], tables: np.ndarray) -> None:
        """One forward over all that is known and not computed; its last rows give the first guesses."""
        token_ids: list[int] = []
        starts, last_rows = [0], []
        for job in jobs:
            token_ids += job.followed.token_ids[job.begin + job.shift : job.end + job.shift]
            starts.append(len(token_ids))
            if job.wanted:
                last_rows.append(len(token_ids) - 1)
        batch = _batch(token_ids, starts, [job.end - self._base_pos(job) for job in jobs], tables, last_rows)
        shapes = [ChunkShape(Phase.PREFILL, job.end - job.begin, job.begin, job.wanted > 0) for job in jobs]
        self._draw(jobs, [job for job in jobs if job.wanted], batch, StepShape(shapes))

    def _guess_next(self, jobs: Sequence[Job], tables: np.ndarray) -> None:
        """One more guess behind the last one."""
        contexts = [job.end + len(job.drafts) - self._base_pos(job) for job in jobs]
        rows = range(len(jobs) + 1)
        batch = _batch([job.drafts[-1] for job in jobs], list(rows), contexts, tables, list(rows[:-1]))
        shapes = [ChunkShape(Phase.DECODE, 1, context - 1, True) for context in contexts]
        self._draw(jobs, jobs, batch, StepShape(shapes))

    def _draw(self, jobs: Sequence[Job], wanting: Sequence[Job], batch: ForwardBatch, shape: StepShape) -> None:
        """Forward, and a guess of each that wants one. One that has no next token, or no number for it, is over."""
        begin_s = self._clock.now_s()
        seq_ids = [job.seq_id for job in wanting]
        if self._sampler.is_plain(seq_ids):
            best, _ = self._forward(jobs, batch, Want.BEST)
            for job, token_id in zip(wanting, best, strict=True):
                job.drafts.append(token_id)
        else:
            logits_RV = self._forward(jobs, batch, Want.LOGITS)
            positions = [job.end + job.shift + len(job.drafts) for job in wanting]
            for job, token in zip(wanting, self._sampler.sample(logits_RV, seq_ids, positions), strict=True):
                job.is_over = not isinstance(token, SampledToken) or token.is_complete
                if isinstance(token, SampledToken):
                    job.drafts.append(token.token_id)
        self._observe(shape, self._clock.now_s() - begin_s)

    def _remember(self, job: Job) -> None:
        """Note what is computed, and give the sampler back the state that it had."""
        followed, held = job.followed, job.n_held * self._store.block_tokens
        end = min(job.end, held)
        if end > job.begin:
            self._store.note(job.table_M, job.begin, end)
        followed.computed = max(followed.computed, end)
        if job.drafts:
            followed.fed, followed.fed_from, followed.fed_end = job.drafts[:-1], job.end, held
            self._sampler.rewind(job.seq_id, job.end + job.shift)


class DraftModel(PagedDrafter):
    """A second model with the same tokenizer.

    It computes a prompt with the target's chunks. In decode it computes what it has not seen (the token that corrected it, and
    a last guess that held) together with its first guess. A sequence that nobody asks for drafts waits, and catches up when
    somebody does.
    """

    def reads(self, chunk: Chunk) -> bool:
        """See Drafter. A chunk of decode without a guess behind it can be read later."""
        return chunk.wanted_drafts is not None and (chunk.wanted_drafts > 0 or chunk.phase is Phase.PREFILL)

    def _forward(self, jobs: Sequence[Job], batch: ForwardBatch, want: Want) -> Any:
        own = self._model.spec.vocab_size
        if own < self._vocab_size:  # no word has such an id
            batch = replace(batch, token_ids_T=np.where(batch.token_ids_T < own, batch.token_ids_T, 0))
        out = self._model.forward(batch, self._store.kv, want)  # type: ignore[call-overload]
        if want is Want.BEST or own == self._vocab_size:
            return out
        return F.pad(out, (0, self._vocab_size - own), value=-torch.inf)  # a negative width cuts

    def _job(
        self, followed: Followed, chunk: Chunk, given: Sequence[int], table_M: np.ndarray, *, rows: int
    ) -> Job | None:
        self._keep_fed(followed, table_M)
        wanted = chunk.wanted_drafts
        if wanted is None or not self.reads(chunk):
            return None
        end = len(followed.token_ids) if given else chunk.end_pos
        begin = min(followed.computed, end - 1)
        held = end - 1 if given else end  # the newest token is not the target's yet
        if end - begin > rows:  # the rest in later steps
            end, wanted = begin + rows, 0
        room = self._model.spec.max_context_tokens - end + 1
        n_held = -(-held // self._store.block_tokens)
        if end <= begin or room < 1:
            return None
        return Job(chunk.seq_id, followed, table_M, begin, end, n_held, min(wanted if given else 0, room))

    def _keep_fed(self, followed: Followed, table_M: np.ndarray) -> None:
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
