"""One simulated engine: the real `EngineCore`, the real stepper, the real event book, and predicted time.

engine = SimulatedEngine(SchedulerConfig(), BlockConfig(n_blocks=4096), predict_s=predictor.predict_s)
engine.serve(requests_of(spec, vocab_size=32000))
summary = summarize([record.sample() for record in engine.book.records.values()])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct

from diptych.control.ahead import ForeseeingCore
from diptych.ground.clock import VirtualClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import Event
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.metrics import EventBook, StepRecord
from diptych.sim.drafts import Drafts
from diptych.sim.executor import PredictedExecutor, Remembered
from diptych.stepper import Stepper, serve

_as_bytes = Struct("q").pack


class SimulatedEngine:
    """Owns its clock, its core and its book. on_events, on_step: called after the book has taken them in.

    drafts: how speculation goes; None: there is none. time_s: how long steps take, where that is not what the scheduler is told
    (predict_s). wake_s: what the first step behind a time without work takes longer. notes_steps: see `EventBook`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockConfig,
        *,
        predict_s: Callable[[StepShape], float],
        time_s: Callable[[StepShape], float] | None = None,
        wake_s: float = 0.0,
        seed: int = 0,
        drafts: Drafts | None = None,
        on_events: Callable[[list[Event]], object] | None = None,
        on_step: Callable[[StepRecord], object] | None = None,
        notes_steps: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        self.book = EventBook(on_step=on_step, notes_steps=notes_steps)
        if drafts is not None:
            predict_s, config = drafts.timed(predict_s), drafts.configured(config)
        predict_s = Remembered(predict_s)
        self.core = ForeseeingCore(
            config,
            blocks,
            model_revision="simulated",
            predict_s=predict_s,
            seed=seed,
            depths=None if drafts is None else drafts.depths(predict_s),
            drafters={} if drafts is None else drafts.drafters(seed),
        )
        self.core.pool.next_digest = _next_digest
        self._on_events = on_events
        self._executor = PredictedExecutor(time_s or predict_s, self.clock, wake_s=wake_s)
        self.stepper = Stepper(self.core, self._executor, self.clock, fold=self._fold)

    def serve(self, requests: Iterable[Request]) -> None:
        """Let requests, in order of arrival_s, come and be answered."""
        serve(self.stepper, requests, wait=self.clock.advance)

    def worked_until(self, at_s: float) -> None:
        """Steps that nobody walked through have ended then."""
        self.clock.move_to(at_s)
        self._executor.worked_until_s = at_s

    def _fold(self, events: list[Event]) -> None:
        self.book.fold(events)
        if self._on_events is not None:
            self._on_events(events)


def _next_digest(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The chain one block further, where SHA-256 would take a tenth of a simulation. Equal chains give equal digests within
    one process, which is all that is asked of them: a match is believed only when the tokens agree too.
    """
    return _as_bytes(hash((previous, tuple(token_ids))))
