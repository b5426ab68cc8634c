"""The real engine under a load, without text and HTTP: every step with its times, and the requests' records.

    run = Served(model, config, blocks, predict_s)
    drive(run.stepper, run.clock, requests, run.ended, users=4, wait=sleep_s)
    run.steps, run.book, run.kept_s()

The engine is brought to where a server is when it serves: the memory of its KV pool is there, and `undisturbed` keeps objects
that stay out of the collector's way. Clients of a closed loop live on the engine's thread.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from diptych.compute.runner import Model
from diptych.compute.sampling.sampler import Sampler
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder
from diptych.control.scheduler import Predict
from diptych.engine.executor import ModelExecutor
from diptych.ground.clock import Clock, MonotonicClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import Event, FinishEvent
from diptych.ground.request import Request
from diptych.metrics import EventBook, StepRecord
from diptych.sim.counterfactual import times_of
from diptych.stepper import Stepper, serve

Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsHost:
    """What a request costs the host beside its steps: when it comes, and behind its last step. Not by its prompts' steps, of
    which a long one has many, and one that was preempted some more.
    """

    come_s: float = 0.0
    end_s: float = 0.0


WITH_PROMPTS = RequestsHost()  # as a profile has it: prompts have it in their price


class Served:
    """One run of the real engine. is_recorded: every call to its core is kept, for `lines`.

    Times are taken of runs that are not: what is kept is memory that the next step cannot use again.
    """

    def __init__(
        self,
        model: Model,
        config: SchedulerConfig,
        blocks: BlockConfig,
        predict_s: Predict,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.clock = MonotonicClock()
        self.steps: list[StepRecord] = []
        self.coming_s: list[float] = []  # what requests cost that came before each step
        self.book = EventBook(on_step=self._note)
        self.ended: list[str] = []
        self.core = EngineCore(config, blocks, model_revision=model.revision, predict_s=predict_s)
        self._recorder = Recorder(self.core) if is_recorded else None
        kv = model.make_kv(blocks.n_blocks, blocks.block_tokens, blocks.n_places)
        sampler = Sampler(model.spec.vocab_size, model.device, drawing=model)
        executor = ModelExecutor(model, kv, sampler, clock=self.clock)
        executor.back_memory(lambda: False)
        self.stepper = _TimedStepper(self._recorder or self.core, executor, self.clock, fold=self._fold)

    def lines(self) -> list[str]:
        """The recording."""
        assert self._recorder is not None
        return self._recorder.lines()

    @property
    def n_requests(self) -> int:
        """That came."""
        return len(self.book.records)

    def kept_s(self) -> list[float]:
        """How long each step kept the engine: the host's work until the next one begins included, where that decodes (else the
        engine may have been idle), without the coming of requests.
        """
        kept = [kept_s for _, kept_s in times_of((one.begin_s, one.end_s, one.shape) for one in self.steps)]
        for i, coming_s in enumerate(self.coming_s):
            if i and self.steps[i].shape.decode_tokens:
                kept[i - 1] -= coming_s
        return kept

    def _note(self, step: StepRecord) -> None:
        self.steps.append(step)
        self.coming_s.append(self.stepper.coming_s)
        self.stepper.coming_s = 0.0

    def _fold(self, events: list[Event]) -> None:
        self.book.fold(events)
        self.ended += [event.request_id for event in events if isinstance(event, FinishEvent)]


class _TimedStepper(Stepper):
    """Adds up what requests take when they come."""

    coming_s = 0.0

    def submit(self, request: Request) -> None:
        """As ever."""
        begin_s = self.clock.now_s()
        super().submit(request)
        self.coming_s += self.clock.now_s() - begin_s


def drive(
    stepper: Stepper, clock: Clock, requests: Sequence[Request], ended: list[str], *, users: int | None, wait: Wait
) -> None:
    """Put requests through: when they are due, or one after the other for each user as answers come."""
    begin_s = clock.now_s()
    if users is None:
        serve(stepper, [replace(one, arrival_s=begin_s + one.arrival_s) for one in requests], wait=wait)
        return
    coming = iter(requests)

    def send(n: int) -> None:
        for _ in range(n):
            request = next(coming, None)
            if request is not None:
                stepper.submit(replace(request, arrival_s=clock.now_s()))

    send(users)
    n_seen = len(ended)
    while stepper.step():
        send(len(ended) - n_seen)
        n_seen = len(ended)


@contextmanager
def undisturbed() -> Iterator[None]:
    """As a server does: a collection of all that is loaded takes as long as a hundred steps.

    Where something is frozen already, so it stays: who unfreezes, unfreezes all.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
