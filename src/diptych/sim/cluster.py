"""Engines behind a router, each on a clock of its own, in one order of events.

The heap holds the instant at which each engine with work begins its next step. Whatever is due first happens: a request
that comes goes through the router; an engine runs its step to the end. A step can only cause what comes after its end,
so nothing ever happens in an engine's past. What the router sees of an engine in a step is how the step will leave it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, InternalError, RequestError
from diptych.ground.events import Event, FinishEvent, StepEndEvent
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.metrics import StepRecord
from diptych.sim.drafts import StatedDrafts
from diptych.sim.engine import SimulatedEngine
from diptych.sim.load import Due, Load
from diptych.sim.router import Router
from diptych.sim.tally import Tally


class Cluster:
    """`n_engines` alike. tally: what is told about every step and request; `refused` counts by the error's name."""

    def __init__(
        self,
        n_engines: int,
        config: SchedulerConfig,
        blocks: BlockConfig,
        *,
        predict_s: Callable[[StepShape], float],
        tally: Tally,
        router: str = "least-work",
        seed: int = 0,
        drafts: StatedDrafts | None = None,
    ) -> None:
        self.engines = [
            _Member(config, blocks, predict_s=predict_s, seed=seed + i, cluster=self, drafts=drafts)
            for i in range(n_engines)
        ]
        self.tally = tally
        self.refused: Counter[str] = Counter()
        self.n_over = 0
        self._router = Router([member.engine.core for member in self.engines], policy=router)
        self._open: dict[str, Request] = {}
        self._coming: list[tuple[float, int, Request]] = []
        self._n_coming = 0
        self._load: Load | None = None

    def run(self, load: Load, *, progress: Callable[[int, float], object] | None = None) -> None:
        """Serve the whole load. progress(requests that are over, seconds simulated) is called now and then."""
        self._load = load
        starting = load.start()
        self._expect(next(starting, None))
        n_last = self._n_coming  # the number of the newest request that came by itself
        steps: list[tuple[float, int]] = []
        n_told = 0
        while self._coming or steps:
            if self._coming and (not steps or self._coming[0][0] <= steps[0][0]):
                at_s, number, request = heappop(self._coming)
                if number == n_last:
                    self._expect(next(starting, None))
                    n_last = self._n_coming
                self._dispatch(request, at_s, steps)
            else:
                at_s, i = steps[0]
                if self.engines[i].step():
                    heapreplace(steps, (self.engines[i].engine.clock.now_s(), i))
                else:
                    heappop(steps)
            if progress is not None and self.n_over >= n_told:
                progress(self.n_over, at_s)
                n_told = self.n_over + 64

    def finished(self, event: FinishEvent, member: _Member) -> None:
        """A choice ended; where it was the last of its request, the next one may follow."""
        book = member.engine.book
        if not book.records[event.request_id].is_over:
            return
        record = book.take(event.request_id)
        assert record is not None
        self.tally.finished(record)
        self._router.forget(event.request_id, output_tokens=record.output_tokens)
        self._follow(self._open.pop(event.request_id), event.at_s, record.output_tokens)

    def _dispatch(self, request: Request, at_s: float, steps: list[tuple[float, int]]) -> None:
        self.tally.arrived(at_s)
        i = self._router.choose(request)
        engine = self.engines[i].engine
        try:
            engine.stepper.submit(request)
        except (RequestError, CapacityError) as error:
            self.refused[type(error).__name__] += 1
            self._router.forget(request.request_id)
            self._follow(request, at_s, 0)
            return
        self._open[request.request_id] = request
        if not self.engines[i].is_busy:
            self.engines[i].is_busy = True
            engine.clock.advance(max(0.0, at_s - engine.clock.now_s()))
            heappush(steps, (engine.clock.now_s(), i))

    def _follow(self, request: Request, at_s: float, output_tokens: int) -> None:
        assert self._load is not None
        self.n_over += 1
        self._expect(self._load.after(request, at_s, output_tokens=output_tokens))

    def _expect(self, due: Due | None) -> None:
        if due is not None:
            self._n_coming += 1
            heappush(self._coming, (due[0], self._n_coming, due[1]))


class _Member:
    """One engine of a cluster, and what is noted of each of its steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockConfig,
        *,
        predict_s: Callable[[StepShape], float],
        seed: int,
        cluster: Cluster,
        drafts: StatedDrafts | None,
    ) -> None:
        self.engine = SimulatedEngine(
            config,
            blocks,
            predict_s=predict_s,
            seed=seed,
            drafts=drafts,
            on_events=self._on_events,
            on_step=self._on_step,
        )
        self.is_busy = False
        self._cluster = cluster
        self._kv_share = 0.0  # of the pool, while the step runs

    def step(self) -> bool:
        """Run one step; False when nothing is left to do."""
        if self.engine.stepper.step():
            return True
        if self.engine.core.has_work:
            raise InternalError("a simulated engine has open requests and plans nothing")
        self.is_busy = False
        return False

    def _on_events(self, events: list[Event]) -> None:
        if (
            not events or type(events[-1]) is not StepEndEvent
        ):  # before a step runs: finished ones hold their blocks still
            pool = self.engine.core.pool
            self._kv_share = pool.held_blocks / pool.n_blocks
            return
        for event in events:
            if type(event) is FinishEvent:
                self._cluster.finished(event, self)

    def _on_step(self, record: StepRecord) -> None:
        stats = self.engine.core.stats()
        self._cluster.tally.stepped(record, kv_share=self._kv_share, running=stats.running, waiting=stats.waiting)
