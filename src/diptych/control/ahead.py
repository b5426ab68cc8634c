"""What a simulator, which knows every token beforehand, need not walk through step by step.

Steps in which nothing is left to decide: every running sequence decodes one token and guesses none, none ends, blocks
suffice. `ForeseeingCore` says how many there are, and leaves everything as that many steps would have left it, block ids
and prefix index included. Of other steps `draw_in_rows` leaves the decode rows out of plan, results and events.
`tests/control/test_ahead.py` holds both on random loads. No engine that computes loads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from diptych.control.loop import EngineCore
from diptych.control.scheduler import Scheduler
from diptych.control.sequence import Sequence
from diptych.control.step_draft import StepDraft
from diptych.ground.events import Event
from diptych.ground.phase import Phase, Status
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.step import StepPlan, StepResult

_new = tuple.__new__  # of a NamedTuple, in half the time


class DecodeRun(NamedTuple):
    """`n_steps` steps, the first of this shape and each one position further than the one before.

    choices: (request id, choice) of every chunk. new_blocks: how many blocks each step takes from the pool.
    """

    n_steps: int
    shape: StepShape
    choices: tuple[tuple[str, int], ...]
    new_blocks: list[int]


class _InRows(Scheduler):
    """A scheduler that may leave decode chunks out of its plans: they are in the shape, and their sequences in `rows`.

    rows: None where plans are to be whole.
    """

    rows: list[Sequence] | None = None

    def _plan_decodes(self, draft: StepDraft) -> None:
        rows = self.rows
        if rows is None:
            super()._plan_decodes(draft)
            return
        block_tokens, references, decode = self.pool.block_tokens, self.pool.references, Phase.DECODE
        shapes: list[ChunkShape] = []
        context, is_adapted = 0, False
        for seq in tuple(self.decoding):
            if seq.status is not Status.DECODE:
                continue  # preempted for an earlier one
            start, block_ids = seq.computed_tokens, seq.block_ids
            i = start // block_tokens
            if i >= len(block_ids) or references(block_ids[i]) > 1:
                if not self._make_room(seq, draft):
                    continue
                self._take_blocks(seq, start, start + 1, draft)
                seq.table_sent = len(seq.block_ids)
            shapes.append(_new(ChunkShape, (decode, 1, start, True, 1, seq.adapter, False)))
            context += start + 1
            is_adapted = is_adapted or seq.adapter is not None
            seq.is_in_flight = True
            if self.states is not None:
                self.states.use(seq, start, start + 1)
            rows.append(seq)
        if shapes:
            draft.left_tokens -= len(shapes)
            draft.shape = StepShape(shapes) if is_adapted else StepShape.tokens(shapes, context)


class ForeseeingCore(EngineCore):
    """An `EngineCore` whose caller knows every token beforehand.

    on_rows: told of the sequences that a step gives a token each, and when, in place of their chunks, results and
    `TokenEvent`s; None: they have those. Only without speculation.
    """

    on_rows: Callable[[list[Sequence], float], object] | None = None
    _drawn = 0

    def draw_in_rows(self, token_id: int, on_rows: Callable[[list[Sequence], float], object] | None) -> None:
        """From the next step on: every token drawn is token_id. None: as any other core."""
        assert self._plan is None, "the step before has not ended"
        self.on_rows, self._drawn = on_rows, token_id

    def begin_step(self, now_s: float) -> tuple[StepPlan | None, list[Event]]:
        """As any core's."""
        self._in_rows.rows = None if self.on_rows is None else []
        return super().begin_step(now_s)

    def end_step(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """As any core's."""
        rows = self._in_rows.rows
        if not rows or self.on_rows is None:
            return super().end_step(plan, result, now_s)
        self._is_torn = True
        self.on_rows(rows, now_s)
        return [*self._commit_rows(rows, now_s), *super().end_step(plan, result, now_s)]

    def _new_scheduler(self, kind: type[Scheduler] = _InRows) -> Scheduler:
        return super()._new_scheduler(kind)

    @property
    def _in_rows(self) -> _InRows:
        assert isinstance(self._scheduler, _InRows)
        return self._scheduler

    def _commit_rows(self, rows: list[Sequence], now_s: float) -> list[Event]:
        """As `_commit_decode` for each, without its `TokenEvent`."""
        events: list[Event] = []
        scheduler, token_id = self._scheduler, self._drawn
        block_tokens = scheduler.pool.block_tokens
        for seq in rows:
            seq.is_in_flight = False
            known = seq.token_ids
            computed = len(known)
            seq.computed_tokens = computed
            if computed > seq.peak_computed_tokens:
                seq.peak_computed_tokens = computed
            known.append(token_id)
            if computed // block_tokens > len(seq.serials):
                scheduler.register_computed(seq)
            if computed + 1 - seq.prompt_tokens >= seq.max_output_tokens or token_id in seq.stop_ids:
                reason, stop_token_id = seq.stop_after(token_id, is_complete=False)
                if reason is not None:
                    events.append(self._books.end(seq, now_s, reason, stop_token_id=stop_token_id))
                    self._books.forget_if_over(seq.request.request_id)
        return events

    def foreseen(self, *, token_id: int, limit: int) -> DecodeRun | None:
        """The steps from now on that only decode, `limit` at most, where every token drawn is token_id; None for none."""
        assert self._plan is None, "the step before has not ended"
        return _foreseen(self._scheduler, token_id=token_id, limit=limit)

    def commit_run(self, n_steps: int, *, token_id: int) -> None:
        """Run so many of them at once: in place of that many calls of begin_step and end_step. There are no events."""
        self._is_torn = True
        _commit_run(self._scheduler, n_steps, token_id=token_id)
        self._next_step_id += n_steps
        self._books.ended_seq_ids = []
        self._is_torn = False

    @property
    def room(self) -> tuple[int, ...]:
        """What `reserve` looks at beside the prompt: as long as this stays, so does its answer to one."""
        scheduler, pool = self._scheduler, self.pool
        return (
            len(scheduler.waiting),
            len(scheduler.decoding),
            scheduler.promised_blocks,
            pool.available_blocks,
            pool.n_drops,
            pool.n_registered,
        )

    def warm(self, token_ids: tuple[int, ...]) -> None:
        """Put the full blocks of these tokens into the prefix cache, as if a sequence had left them.

        Nothing where the pool has too few blocks.
        """
        _warm(self._scheduler, token_ids)


def _foreseen(scheduler: Scheduler, *, token_id: int, limit: int) -> DecodeRun | None:
    decoding = tuple(scheduler.decoding)
    # where states are kept every block counts
    if not decoding or scheduler.states is not None or not _admits_nobody(scheduler):
        return None
    pool = scheduler.pool
    block_tokens, references = pool.block_tokens, pool.references
    n_steps = limit
    for seq in decoding:
        left = seq.max_output_tokens - seq.output_tokens - 1  # the last one ends the sequence
        if left < n_steps:
            n_steps = left
        i = seq.computed_tokens // block_tokens
        if (
            seq.speculation is not None
            or token_id in seq.stop_ids
            or (i < len(seq.block_ids) and references(seq.block_ids[i]) > 1)
        ):
            return None
    if n_steps < 1:
        return None
    new_blocks = [0] * n_steps
    for seq in decoding:
        first = len(seq.block_ids) * block_tokens - seq.computed_tokens
        for step in range(first, n_steps, block_tokens):
            new_blocks[step] += 1
    while sum(new_blocks) > pool.available_blocks:
        del new_blocks[len(new_blocks) // 2 :]
        if not new_blocks:
            return None
    chunks = [_new(ChunkShape, (Phase.DECODE, 1, seq.computed_tokens, True, 1, seq.adapter, False)) for seq in decoding]
    if any(seq.adapter is not None for seq in decoding):
        shape = StepShape(chunks)
    else:
        shape = StepShape.tokens(chunks, sum([seq.computed_tokens for seq in decoding]) + len(decoding))
    choices = tuple([(seq.request.request_id, seq.index) for seq in decoding])
    return DecodeRun(len(new_blocks), shape, choices, new_blocks)


def _commit_run(scheduler: Scheduler, n_steps: int, *, token_id: int) -> None:
    pool = scheduler.pool
    block_tokens = pool.block_tokens
    # what the steps do to the pool, in their order: (step, 0 a block taken, 1 one offered to the index, place, sequence)
    deeds: list[tuple[int, int, int, Sequence]] = []
    tokens = [token_id] * n_steps
    for place, seq in enumerate(tuple(scheduler.decoding)):
        start = seq.computed_tokens
        for step in range(len(seq.block_ids) * block_tokens - start, n_steps, block_tokens):
            deeds.append((step, 0, place, seq))
        if pool.is_caching:
            for step in range((len(seq.serials) + 1) * block_tokens - start - 1, n_steps, block_tokens):
                deeds.append((step, 1, place, seq))
        seq.token_ids += tokens
        seq.advance(start + n_steps)
    deeds.sort(key=lambda deed: deed[:3])
    for _, is_offer, _, seq in deeds:
        if is_offer:
            scheduler.register(seq, len(seq.serials) + 1)
        else:
            seq.block_ids += pool.take(1)
            seq.table_sent = len(seq.block_ids)
    if not pool.is_caching:
        for seq in scheduler.decoding:
            seq.serials += [None] * (seq.computed_tokens // block_tokens - len(seq.serials))


def _warm(scheduler: Scheduler, token_ids: tuple[int, ...]) -> None:
    pool = scheduler.pool
    n_blocks = len(token_ids) // pool.block_tokens
    if not pool.is_caching or n_blocks > pool.available_blocks:
        return
    block_ids = pool.take(n_blocks)
    pool.register(
        block_ids, n_blocks, serials=[], token_ids=token_ids, salt=None, digests=[], root=scheduler.root_of(None)
    )
    for block_id in reversed(block_ids):
        pool.drop(block_id)


def _admits_nobody(scheduler: Scheduler) -> bool:
    """Whether no prefill would be planned before a sequence ends or a block comes back."""
    if scheduler.prefilling:
        return False
    head, n_running = scheduler.waiting.first, scheduler.n_running
    budget = scheduler.config.max_step_tokens
    if head is None or n_running >= min(scheduler.max_running, budget):
        return True
    return head.parked_at_drops == scheduler.pool.n_drops
