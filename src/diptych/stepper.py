"""One step: begin, execute, observe, end, fold. The only place that does it, for engine, simulator, bench and lab.

    stepper = Stepper(core, executor, clock, fold=book.fold)
    while stepper.step():
        ...

`serve` puts a load through it: each request when it is due. Nothing here knows whether the clock is the machine's or a
virtual one, nor whether the core is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from diptych.ground.clock import Clock
from diptych.ground.errors import EngineError, ExecutorError
from diptych.ground.events import Event
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.ground.step import Executor, StepPlan, StepResult

Observe = Callable[[StepShape, float], None]


class Core(Protocol):
    """What a step needs of `EngineCore`; its `Recorder` has it too."""

    def submit(self, request: Request) -> list[Event]:
        """Put a request in line."""
        ...

    def begin_step(self, now_s: float) -> tuple[StepPlan | None, list[Event]]:
        """Plan the next step."""
        ...

    def end_step(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Commit what it gave."""
        ...

    def abort_step(self, now_s: float, *, error: EngineError) -> list[Event]:
        """Give up whatever was begun and not ended."""
        ...


class Stepper:
    """Steps one core with one executor. `fold` gets every event in order; `observe` learns how long each shape took."""

    def __init__(
        self,
        core: Core,
        executor: Executor,
        clock: Clock,
        *,
        fold: Callable[[list[Event]], object],
        observe: Observe | None = None,
    ) -> None:
        self.core = core
        self.executor = executor
        self.clock = clock
        self._fold = fold
        self._observe = observe

    def submit(self, request: Request) -> None:
        """Put a request in line. Raises as `EngineCore.submit` does."""
        self._fold(self.core.submit(request))

    def step(self) -> bool:
        """Run one step; False when there was nothing to do.

        Whatever is raised on the way (by the executor, by a listener, by Ctrl-C) ends the requests of the step with ERROR,
        gives their blocks back and goes on to the caller: the next step finds everything in order.
        """
        try:
            plan, events = self.core.begin_step(self.clock.now_s())
            self._fold(events)
            if plan is None:
                return False
            result = self.executor.execute(plan)
            if self._observe is not None:
                self._observe(plan.shape, result.device_s + result.host_s)
            self._fold(self.core.end_step(plan, result, self.clock.now_s()))
        except BaseException as error:
            self.abort(error)
            raise
        return True

    def abort(self, error: BaseException) -> None:
        """Give up the step in flight, if there is one, because of `error`."""
        told = error if isinstance(error, EngineError) else ExecutorError(f"the step was cut short: {error!r}")
        self._fold(self.core.abort_step(self.clock.now_s(), error=told))


def serve(stepper: Stepper, requests: Iterable[Request], *, wait: Callable[[float], object]) -> None:
    """Put requests through, in order of `arrival_s` on the stepper's clock, until nothing is left to do.

    wait(seconds): pass the time until the next arrival when there is no work (sleep, or advance a virtual clock).
    """
    coming = iter(requests)
    next_one = next(coming, None)
    while True:
        while next_one is not None and next_one.arrival_s <= stepper.clock.now_s():
            stepper.submit(next_one)
            next_one = next(coming, None)
        if stepper.step():
            continue
        if next_one is None:
            return
        wait(max(0.0, next_one.arrival_s - stepper.clock.now_s()))
