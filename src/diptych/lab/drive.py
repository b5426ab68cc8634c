"""The serving scheduler stepped by hand, on the real model or on the cost model.

`Engines.driver` runs real kernels on the wall clock; `Engines.rehearsal` runs the very same scheduler with an executor that
takes as long as the cost model predicts, on a clock of its own: the prediction beside every measurement of whole requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diptych.compute.drafting.drafter import Drafter
from diptych.compute.runner import Model
from diptych.compute.sampling.sampler import Sampler
from diptych.control.loop import EngineCore
from diptych.control.scheduler import Predict
from diptych.control.speculation import Depths, NewDrafter
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.drafts.prices import DraftPrices
from diptych.cost.step_time import StepTimeModel
from diptych.engine.drafters import OpenDrafter, draft_prices
from diptych.engine.drafting import join_drafters
from diptych.engine.executor import ModelExecutor
from diptych.engine.load import once_for_each
from diptych.ground.clock import Clock, MonotonicClock, VirtualClock
from diptych.ground.config import BlockConfig, EngineConfig, SchedulerConfig
from diptych.ground.events import Event, TokenEvent
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.ground.step import Executor, StepPlan, StepResult
from diptych.metrics import EventBook
from diptych.sim.executor import PredictedExecutor
from diptych.stepper import Observe, Stepper

MAX_SEQUENCES = 64  # that an experiment runs at one time where it does not say


class Driver:
    """Submits requests with random prompts, steps, and keeps the time of every token."""

    def __init__(
        self, core: EngineCore, executor: Executor, clock: Clock, *, vocab: int, observe: Observe | None = None
    ) -> None:
        self.core = core
        self.clock = clock
        self.book = EventBook()
        self.token_s: dict[str, list[float]] = {}
        self.token_ids: dict[str, list[int]] = {}
        self._executor = executor
        self._stepper = Stepper(core, executor, clock, fold=self._fold, observe=observe)
        self._vocab = vocab
        self._random = random.Random(1)

    @property
    def device_s(self) -> float:
        """Seconds inside the kernels, over all steps."""
        return self.book.device_s

    def back_memory(self) -> None:
        """Have the KV pool's memory provided, as a server has beside its first steps; nothing where nothing is computed."""
        if isinstance(self._executor, ModelExecutor):
            self._executor.back_memory(lambda: False)

    def prompt(self, n_tokens: int) -> tuple[int, ...]:
        """Random token ids, new with every call."""
        return tuple(self._random.choices(range(self._vocab), k=n_tokens))

    def submit(self, name: str, prompt: tuple[int, ...], *, new_tokens: int) -> float:
        """Put a request in line that writes exactly `new_tokens` tokens; returns its arrival."""
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
            arrival_s=self.clock.now_s(),
        )
        self.token_s[name], self.token_ids[name] = [], []
        self._stepper.submit(request)
        return request.arrival_s

    def watch(self, seen: Callable[[StepPlan, StepResult], object]) -> None:
        """From now on every step and what it took is shown to somebody."""
        executor = self._executor

        class Watched:
            def execute(self, plan: StepPlan) -> StepResult:
                result = executor.execute(plan)
                seen(plan, result)
                return result

        self._stepper.executor = Watched()

    def step(self) -> None:
        """One step; times of its tokens are noted."""
        has_run = self._stepper.step()
        assert has_run, "nothing to do with requests open"

    def run(self) -> None:
        """Step until everything has finished."""
        while self._stepper.step():
            pass

    def cancel(self, name: str) -> None:
        """End a request early."""
        self._fold(self.core.cancel(name, self.clock.now_s()))

    def forget(self, name: str) -> None:
        """Drop what is kept of a request that is over."""
        self.book.take(name)
        del self.token_s[name], self.token_ids[name]

    def _fold(self, events: list[Event]) -> None:
        self.book.fold(events)
        for event in events:
            if isinstance(event, TokenEvent):
                self.token_s[event.request_id].append(event.at_s)
                self.token_ids[event.request_id].append(event.token_id)


class Engines:
    """Schedulers of different settings over one KV pool. The pool holds `n_tokens` tokens, a sequence context_tokens.

    Drivers take turns: one runs while no other has a request open. Only one of them may cache prefixes, as the others
    write over its blocks.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        predictor: CalibratedModel | None,
        context_tokens: int,
        n_tokens: int,
    ) -> None:
        self._model = model
        self._config = config
        self._predictor = predictor
        self._context_tokens = context_tokens
        block_tokens = config.block_tokens
        sequences = config.scheduler.max_running_sequences or MAX_SEQUENCES
        # every sequence may leave its last block partly empty
        n_blocks = -(-n_tokens // block_tokens) + sequences
        n_places = 2 * sequences if model.state_bytes else 0
        self._blocks = BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens, n_places=n_places)
        self._kv = model.make_kv(n_blocks, block_tokens, n_places)

    def driver(self, **settings: Any) -> Driver:
        """The real thing with these `SchedulerConfig` settings."""
        return self.speculating(settings, drafters=None, depths=None)

    def speculating(
        self, settings: dict[str, Any], *, drafters: dict[str, NewDrafter] | None, depths: Depths | None
    ) -> Driver:
        """The same with drafters and a choice of depths in place of the engine's own (None: these)."""
        clock, step_time = MonotonicClock(), StepTimeModel()
        predict_s = self._predict(step_time)
        prices = draft_prices([], predict_s, has_profile=self._predictor is not None)
        core = self._core(predict_s, settings, drafters=drafters, depths=prices if depths is None else depths)
        return self._joined(core, None, clock, step_time, prices)

    def drafting(self, settings: dict[str, Any], opened: OpenDrafter, wrap: Callable[[Drafter], Drafter]) -> Driver:
        """The same with a drafter that the executor runs, as `wrap` makes it."""
        clock, step_time = MonotonicClock(), StepTimeModel()
        predict_s = self._predict(step_time)
        prices = draft_prices([opened], predict_s, has_profile=self._predictor is not None)
        settings = settings | {"speculate": opened.kind, "max_draft_tokens": opened.most_drafts}
        core = self._core(predict_s, settings, depths=prices)
        return self._joined(core, lambda sampler: wrap(self._open(opened, sampler, clock)), clock, step_time, prices)

    def _predict(self, step_time: StepTimeModel) -> Predict:
        # the measured profile where there is one; until then the scheduler learns from its own steps, as the engine's does
        return once_for_each(step_time.predict_s if self._predictor is None else self._predictor.predict_s)

    def _open(self, opened: OpenDrafter, sampler: Sampler, clock: Clock) -> Drafter:
        return opened.drafter(self._blocks.n_blocks, sampler, clock=clock)

    def _joined(
        self,
        core: EngineCore,
        drafter: Callable[[Sampler], Drafter] | None,
        clock: Clock,
        step_time: StepTimeModel,
        prices: DraftPrices,
    ) -> Driver:
        def observe(shape: StepShape, measured_s: float) -> None:
            prices.observe(shape, measured_s)
            if self._predictor is None:
                step_time.observe(shape, measured_s)

        model = self._model
        vocab = model.spec.vocab_size
        sampler = Sampler(vocab, model.device, drawing=model)
        drafting = None
        if drafter is not None:
            drafting = join_drafters([drafter(sampler)], prices, vocab_size=vocab, clock=clock)
        executor = ModelExecutor(model, self._kv, sampler, clock=clock, drafting=drafting)
        return Driver(core, executor, clock, vocab=vocab, observe=observe)

    def rehearsal(self, **settings: Any) -> Driver | None:
        """The same scheduler on predicted step times; None when this machine was never calibrated. Nobody speculates there."""
        if self._predictor is None:
            return None
        settings |= {"speculate": "off"}
        clock = VirtualClock()
        executor = PredictedExecutor(self._predictor.predict_s, clock)
        core = self._core(self._predictor.predict_s, settings)
        return Driver(core, executor, clock, vocab=self._model.spec.vocab_size)

    def _core(
        self,
        predict_s: Callable[[StepShape], float],
        settings: dict[str, Any],
        *,
        drafters: dict[str, NewDrafter] | None = None,
        depths: Depths | None = None,
    ) -> EngineCore:
        scheduler: SchedulerConfig = replace(
            self._config.scheduler, max_context_tokens=self._context_tokens, **settings
        )
        return EngineCore(
            scheduler,
            self._blocks,
            model_revision=self._model.revision,
            predict_s=predict_s,
            seed=self._config.seed,
            depths=depths,
            n_vocab=self._model.spec.vocab_size,
            drafters=drafters,
        )
