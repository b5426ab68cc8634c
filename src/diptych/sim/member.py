"""One engine of a cluster: its next step, or a whole run of steps in which nothing is left to decide."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, islice

from diptych.control.ahead import DecodeRun
from diptych.control.sequence import Sequence
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import InternalError
from diptych.ground.events import Event, FinishEvent, StepEndEvent, TokenEvent
from diptych.ground.shape import StepShape
from diptych.metrics import StepRecord
from diptych.sim.drafts import Drafts
from diptych.sim.engine import SimulatedEngine
from diptych.sim.executor import DRAWN_TOKEN
from diptych.sim.film import Film
from diptych.sim.tally import Work

# of a run: grown where runs come to their end, shrunk where arrivals cut them, as what was cut was predicted for nothing
_LEAST_RUN, _LONGEST_RUN = 8, 512


class Member:
    """Owned by a cluster, which tells it when. version: of its entry in the order of steps; an older entry is void.

    on_begin, on_finish, on_prefill: told of first tokens, of ends, and of steps that held prefill chunks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockConfig,
        *,
        predict_s: Callable[[StepShape], float],
        predict_run_s: Callable[[StepShape, int], list[float]] | None = None,
        wake_s: float = 0.0,
        seed: int,
        work: Work,
        drafts: Drafts | None = None,
    ) -> None:
        self.engine = SimulatedEngine(
            config,
            blocks,
            predict_s=predict_s,
            wake_s=wake_s,
            seed=seed,
            drafts=drafts,
            on_events=self._on_events,
            on_step=self._on_step,
            notes_steps=False,  # the tally asks no request for its stall, and a note of each token is dear
        )
        self.is_busy = False
        self.leaps = True
        self.version = 0
        self.run_evicts = False  # whether the steps not yet committed throw cached prefixes away
        self.on_begin: Callable[[str], object] | None = None
        self.on_finish: Callable[[FinishEvent], object] | None = None
        self.on_prefill: Callable[[StepRecord], object] | None = None
        self.film: Film | None = None  # while there is one every step is walked through
        self._draws_in_rows = drafts is None
        self._predict_s = predict_s
        self._predict_run_s = predict_run_s or self._one_by_one
        self._work = work
        self._kv_share = 0.0  # of the pool, while the step runs
        self._run: DecodeRun | None = None
        self._ends_s: list[float] = []
        self._limit = _LEAST_RUN

    def step(self) -> float | None:
        """Run what is due now; the instant at which it will have ended, None when nothing is left to do."""
        self.settle(math.inf)
        core, clock = self.engine.core, self.engine.clock
        run = core.foreseen(token_id=DRAWN_TOKEN, limit=self._limit) if self.leaps and self.film is None else None
        if run is not None and run.n_steps > 1:
            return self._foresee(run)
        core.draw_in_rows(DRAWN_TOKEN, self._on_rows if self._draws_in_rows and self.film is None else None)
        if self.engine.stepper.step():
            return clock.now_s()
        if core.has_work and not core.waits_for_others:
            raise InternalError("a simulated engine has open requests and plans nothing")
        self.is_busy = False
        return None

    def settle(self, at_s: float) -> bool:
        """Commit the foreseen steps that began before at_s and forget the others; False where none were foreseen."""
        run, ends_s = self._run, self._ends_s
        if run is None:
            return False
        n = min(bisect_left(ends_s, at_s) + 1, len(ends_s))
        self._run, self.run_evicts = None, False
        self._limit = min(2 * n, _LONGEST_RUN) if n == len(ends_s) else max(n, _LEAST_RUN)
        pool = self.engine.core.pool
        held_blocks, begin_s = pool.held_blocks, self.engine.clock.now_s()
        running, waiting = self.engine.core.running_and_waiting
        self.engine.core.commit_run(n, token_id=DRAWN_TOKEN)
        del ends_s[n:]
        held = islice(accumulate(run.new_blocks, initial=held_blocks), 1, None)
        self._work.decoded(begin_s, ends_s, held, of=pool.n_blocks, n=running, waiting=waiting)
        self.engine.worked_until(ends_s[-1])
        records = self.engine.book.records
        for request_id, index in run.choices:
            records[request_id].decoded(index, ends_s)
        return True

    def _on_rows(self, rows: list[Sequence], end_s: float) -> None:
        records, ends_s = self.engine.book.records, (end_s,)
        for seq in rows:
            records[seq.request.request_id].decoded(seq.index, ends_s)

    def _output_tokens(self, record: StepRecord) -> int:
        if self.on_prefill is not None:  # the first token behind a prompt that is handed over is drawn where it goes to
            return 0
        rejected = record.drafted_tokens - record.accepted_tokens
        return record.shape.n_logits_rows - rejected

    def _foresee(self, run: DecodeRun) -> float:
        ends_s = [*accumulate(self._predict_run_s(run.shape, run.n_steps), initial=self.engine.clock.now_s())][1:]
        self._run, self._ends_s = run, ends_s
        self.run_evicts = sum(run.new_blocks) > self.engine.core.pool.free_blocks
        return ends_s[-1]

    def _one_by_one(self, shape: StepShape, n_steps: int) -> list[float]:
        return [self._predict_s(shape.later(step)) for step in range(n_steps)]

    def _on_events(self, events: list[Event]) -> None:
        if self.film is not None:
            self.film.on_events(events)
        if not events or type(events[-1]) is not StepEndEvent:
            # before a step runs: those that end with it hold their blocks still
            pool = self.engine.core.pool
            self._kv_share = pool.held_blocks / pool.n_blocks
            return
        for event in events:
            if type(event) is FinishEvent:
                if self.on_finish is not None:
                    self.on_finish(event)
            elif type(event) is TokenEvent and not event.position and self.on_begin is not None:
                self.on_begin(event.request_id)

    def _on_step(self, record: StepRecord) -> None:
        if self.film is not None:
            self.film.on_step(record)
            self.film = None if self.film.is_over else self.film
        running, waiting = self.engine.core.running_and_waiting
        self._work.stepped(
            record.end_s,
            record.time_s,
            record.shape,
            output_tokens=self._output_tokens(record),
            kv_share=self._kv_share,
            running=running,
            waiting=waiting,
        )
        shape = record.shape
        if 0 < shape.decode_tokens < shape.n_tokens:
            decodes = shape
            while decodes.before is not None:
                decodes = decodes.before
            self._work.mixed_prefill_s += max(0.0, record.time_s - self._predict_s(decodes))
        if record.prefills and self.on_prefill is not None:
            self.on_prefill(record)
