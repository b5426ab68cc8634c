"""Whatever cuts a step short, the engine goes on: no block is lost, nobody waits for ever, the next answer is right."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.conftest import tiny_config

from diptych.engine.async_llm import AsyncLLM, RequestHandle
from diptych.engine.engine import OutputDelta
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, load
from diptych.ground.errors import EngineError, ExecutorError
from diptych.ground.events import Event, TokenEvent
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams
from diptych.ground.step import Executor, StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital", "It was night; " * 8, "b"]


class FailsAt:
    """Runs steps until the n-th, which raises before or after the model ran."""

    def __init__(self, executor: Executor, n: int, error: BaseException, *, has_run: bool) -> None:
        self._executor, self._n, self._error, self._has_run = executor, n, error, has_run

    def execute(self, plan: StepPlan) -> StepResult:
        self._n -= 1
        if self._n or self._has_run:
            result = self._executor.execute(plan)
        if not self._n:
            raise self._error
        return result


def assert_nothing_is_left(llm: LLM) -> None:
    assert llm.engine.n_open == 0
    assert not llm.engine.has_work
    llm.engine.core.check()
    assert llm.engine.stats().blocks_in_use == 0


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("error", [ExecutorError("no device"), KeyboardInterrupt(), MemoryError("no room")])
def test_after_a_step_that_raised_the_next_call_works(
    loaded: LoadedModel, n: int, error: BaseException, has_run: bool
) -> None:
    """Every later call failed with "the step before has not ended"."""
    llm = LLM(loaded, tiny_config())
    expected = [one.choices[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    told: list[OutputDelta] = []
    stepper = llm.engine.stepper
    working, stepper.executor = stepper.executor, FailsAt(stepper.executor, n, error, has_run=has_run)
    with pytest.raises(type(error)):
        llm.generate(PROMPTS, GREEDY, on_delta=lambda _, delta: told.append(delta))
    assert FinishReason.ERROR in {delta.finish_reason for delta in told}
    stepper.executor = working
    assert_nothing_is_left(llm)
    assert [one.choices[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.fixture
def sigint_interrupts() -> Iterator[None]:
    """As in a terminal: jobs in the background of a shell inherit that it is ignored.

    Hypothesis watches the garbage collector, and what is raised in there is lost: Python drops a callback's exceptions.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watching, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = watching
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_interrupts")
def test_ctrl_c_at_any_moment_leaves_an_engine_that_works(loaded: LoadedModel) -> None:
    """A real SIGINT lands between any two instructions of a step: 25 of them, spread over prefill and decode."""
    llm = LLM(loaded, tiny_config())
    expected = [one.choices[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    n_interrupted = 0
    for k in range(25):
        sender = threading.Timer(0.0007 * k, os.kill, (os.getpid(), signal.SIGINT))
        try:
            sender.start()
            llm.generate(PROMPTS, LONG)  # takes longer than any of the delays
            sender.join()
        except KeyboardInterrupt:
            n_interrupted += 1
        sender.join()
        assert_nothing_is_left(llm)
    assert n_interrupted >= 20  # a fast machine may be done before the last of them
    assert [one.choices[0].token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.native
def test_no_tensor_is_asked_in_python_for_its_memory_while_a_step_runs(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Ctrl-C in seventy was lost there: the binding of the kernels takes whatever `__dlpack__` raises for "no array"."""
    llm = LLM(load(str(tiny_dir), tiny_config("cpu")), tiny_config())

    asked: list[torch.Tensor] = []

    def noted(self: torch.Tensor, **_: object) -> object:
        asked.append(self)
        raise BufferError

    monkeypatch.setattr(torch.Tensor, "__dlpack__", noted)
    for params in (GREEDY, SamplingParams(max_tokens=8, temperature=1.0, logprobs=2, prompt_logprobs=1)):
        llm.generate(PROMPTS, params)
    assert asked == []


class BadListener:
    """Raises at every batch of events from the first token on."""

    def __init__(self) -> None:
        self.n_raised = 0

    def __call__(self, events: list[Event]) -> None:
        if self.n_raised or any(isinstance(event, TokenEvent) for event in events):
            self.n_raised += 1
            raise ZeroDivisionError("a bug in a listener")


def test_a_listener_that_always_raises_leaves_no_client_waiting(loaded: LoadedModel) -> None:
    """It raised again while the engine answered its open requests: the thread died, and all but the first waited for ever."""
    engine = AsyncLLM(loaded, tiny_config())
    failures: list[BaseException] = []
    engine.start(on_failure=failures.append)

    async def client(prompt: str) -> FinishReason | str | None:
        try:
            handle = await engine.generate(prompt, LONG)
        except EngineError:
            return "refused"
        return [delta.finish_reason async for delta in handle][-1]

    async def run() -> list[FinishReason | str | None]:
        engine.subscribe(BadListener())
        clients = asyncio.gather(*[client(prompt) for prompt in PROMPTS * 2])
        return await asyncio.wait_for(clients, timeout=60)

    ends = asyncio.run(run())
    assert set(ends) <= {FinishReason.ERROR, "refused"}
    assert FinishReason.ERROR in ends
    engine.stop()
    assert isinstance(failures[0], ZeroDivisionError)
    assert engine.engine.n_open == 0


def test_a_question_that_fails_is_answered(loaded: LoadedModel) -> None:
    """Whoever asked the engine's thread something that raised anything but EngineError waited for ever."""
    engine = AsyncLLM(loaded, tiny_config())
    engine.start()
    with pytest.raises(ExecutorError, match="division"):
        asyncio.run(asyncio.wait_for(engine.call(lambda inner: 1 // 0), timeout=30))
    engine.stop()


def test_a_closed_event_loop_ends_no_other_clients_request(engine: AsyncLLM) -> None:
    """Its answers went to a loop that had been closed in the meantime, and took the engine with them."""
    closed = asyncio.new_event_loop()
    closed.run_until_complete(engine.generate(PROMPTS[0], LONG, request_id="left"))
    closed.close()

    async def other() -> FinishReason | None:
        engine.abort("left")
        return [delta.finish_reason async for delta in await engine.generate(PROMPTS[1], GREEDY)][-1]

    assert asyncio.run(asyncio.wait_for(other(), timeout=60)) is FinishReason.LENGTH


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[AsyncLLM]:
    running = AsyncLLM(loaded, tiny_config())
    running.start()
    yield running
    running.stop()


async def _leave_by_break(handle: RequestHandle) -> None:
    async for _ in handle:
        break


async def _leave_by_error(handle: RequestHandle) -> None:
    async def fail() -> None:
        async for _ in handle.steps():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def _leave_by_cancellation(handle: RequestHandle) -> None:
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in handle:
            begun.set()

    task = asyncio.create_task(consume())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [_leave_by_break, _leave_by_error, _leave_by_cancellation])
def test_a_consumer_that_leaves_ends_its_request_within_a_step(engine: AsyncLLM, leave) -> None:
    """Generation went on to the last token, with its blocks, for nobody."""

    async def run() -> tuple[int, int]:
        handle = await engine.generate(PROMPTS[0], LONG)
        await leave(handle)
        for _ in range(3):  # the generator is closed by the event loop, in its own time
            await asyncio.sleep(0)
        # what is posted now runs after the abort, between two steps
        await engine.call(lambda inner: inner.step())
        stats = engine.engine.core.stats()
        return stats.running + stats.waiting, stats.blocks_in_use

    assert asyncio.run(run()) == (0, 0)
    assert engine.engine.n_open == 0
    engine.engine.core.check()
