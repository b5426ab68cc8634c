"""`AsyncLLM`: many clients, one engine thread; every request gets exactly one end, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
from tests.engine.conftest import tiny_config

from diptych.engine.async_llm import AsyncLLM, RequestHandle
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel
from diptych.ground.errors import CapacityError, EngineError, ExecutorError, RequestError
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams
from diptych.ground.step import StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital", "It was night; " * 8, "b", "x y z"]


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[AsyncLLM]:
    running = AsyncLLM(loaded, tiny_config())
    running.start()
    yield running
    running.stop()


async def collect(handle: RequestHandle) -> tuple[str, FinishReason | None]:
    text, reason = "", None
    async for delta in handle:
        text += delta.text
        reason = delta.finish_reason or reason
    return text, reason


def test_concurrent_clients_get_what_llm_gives(engine: AsyncLLM, loaded: LoadedModel) -> None:
    """The thread and the queues may not change an answer."""
    expected = [one.choices[0].text for one in LLM(loaded, tiny_config()).generate(PROMPTS, GREEDY)]

    async def client(prompt: str) -> str:
        return (await collect(await engine.generate(prompt, GREEDY)))[0]

    async def everyone() -> list[str]:
        return await asyncio.gather(*[client(prompt) for prompt in PROMPTS])

    assert asyncio.run(everyone()) == expected


def test_abort_ends_the_stream_and_frees_the_blocks(engine: AsyncLLM) -> None:
    """A client that leaves must cost nothing afterwards."""

    async def leave_early() -> FinishReason | None:
        handle = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        reason = None
        async for delta in handle:
            engine.abort(handle.request_id)
            reason = delta.finish_reason or reason
        await engine.call(lambda inner: inner.step())
        return reason

    assert asyncio.run(leave_early()) is FinishReason.ABORT
    assert engine.stats().blocks_in_use == 0


def test_a_request_that_is_over_goes_without_the_garbage_collector(engine: AsyncLLM) -> None:
    """Each was a circle of handle, callback and request: thousands waited for a full collection, which held every stream."""
    seen: list[weakref.ref[object]] = []

    async def one(*, ends_by: str) -> None:
        stop = ("e",) if ends_by == "stop" else ()
        handle = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=8, stop=stop, ignore_eos=True))
        seen.extend([weakref.ref(handle), weakref.ref(handle.opened)])
        async for _ in handle:
            if ends_by == "abort":
                engine.abort(handle.request_id)
            if ends_by == "leaving":
                break

    async def everyone() -> None:
        for ends_by in ("length", "stop", "abort", "leaving"):
            await one(ends_by=ends_by)
        for _ in range(500):  # who left is told of on the engine's thread, and its last delta comes back from there
            if not any(ref() for ref in seen):
                return
            await asyncio.sleep(0.01)

    was_on = gc.isenabled()
    gc.disable()
    try:
        asyncio.run(everyone())
        assert len(seen) == 8
        assert [ref() for ref in seen if ref() is not None] == []
    finally:
        if was_on:
            gc.enable()


def test_who_leaves_ends_no_later_request_of_its_name(engine: AsyncLLM) -> None:
    """A client tries again under its own id when an answer is slow to reach it: the end of the first try ended the second."""
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)

    async def again() -> list[FinishReason | None]:
        slow = (await engine.generate(PROMPTS[0], GREEDY, request_id="same")).steps()
        await anext(slow)
        while engine.engine.n_open:
            await asyncio.sleep(0.001)
        second = await engine.generate(PROMPTS[1], long, request_id="same")
        await slow.aclose()
        third = asyncio.ensure_future(
            engine.generate(PROMPTS[2], GREEDY, request_id="same")
        )  # refused, as the second is open
        engine._post, post = lambda action: (post(action), third.cancel()), engine._post  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await third
        engine._post = post  # type: ignore[method-assign]
        return [(await collect(second))[1]]

    assert asyncio.run(again()) == [FinishReason.LENGTH]


def test_refusals_come_at_once_and_by_name(engine: AsyncLLM) -> None:
    """A bad request is answered by `generate` itself, not by a silent stream."""

    async def refused() -> None:
        with pytest.raises(RequestError, match="0 tokens"):
            await engine.generate([], GREEDY)
        # long enough to be running still when its name is asked for again
        long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        first = await engine.generate(PROMPTS[0], long, request_id="same")
        with pytest.raises(RequestError, match="already in use"):
            await engine.generate(PROMPTS[0], GREEDY, request_id="same")
        await collect(first)
        engine.drain()
        with pytest.raises(CapacityError, match="draining"):
            await engine.generate(PROMPTS[0], GREEDY)

    asyncio.run(refused())


def test_one_reader_at_a_time_gets_all(engine: AsyncLLM) -> None:
    """Two of them shared the deltas, and one waited for an end that the other had taken."""

    async def run() -> FinishReason | None:
        handle = await engine.generate(PROMPTS[0], GREEDY)
        steps = handle.steps()
        read = await anext(steps)
        with pytest.raises(RequestError, match="is being read already"):
            await collect(handle)
        read += [delta async for group in steps for delta in group]
        return read[-1].finish_reason

    assert asyncio.run(run()) is FinishReason.LENGTH


def test_an_engine_is_started_once_and_before_it_is_asked(loaded: LoadedModel) -> None:
    """A second start was a failed assertion, one behind `close` a crash on the engine's thread."""
    engine = AsyncLLM(loaded, tiny_config())
    with pytest.raises(CapacityError, match="not running") as caught:
        asyncio.run(engine.generate(PROMPTS[0], GREEDY))
    assert caught.value.hint == "call start, or use `async with`"
    engine.start()
    with pytest.raises(CapacityError, match="this engine was started before"):
        engine.start()
    engine.close()
    with pytest.raises(CapacityError, match="this engine was closed before"):
        engine.start()


def test_stop_drains_what_is_running(loaded: LoadedModel) -> None:
    """SIGTERM lets streams finish within the time given."""
    engine = AsyncLLM(loaded, tiny_config())
    engine.start()

    async def run() -> tuple[str, FinishReason | None]:
        handle = await engine.generate(PROMPTS[0], GREEDY)
        stopping = asyncio.get_running_loop().run_in_executor(None, lambda: engine.stop(drain_s=60.0))
        answer = await collect(handle)
        await stopping
        return answer

    assert asyncio.run(run())[1] is FinishReason.LENGTH
    assert not engine.is_ready


def test_crash_in_a_step_answers_every_open_request(loaded: LoadedModel) -> None:
    """A dead engine with waiting clients would be a hang nobody can explain."""
    engine = AsyncLLM(loaded, tiny_config())
    failures: list[BaseException] = []

    class Broken:
        def execute(self, plan: StepPlan) -> StepResult:
            raise ExecutorError(f"step {plan.step_id} failed: no device")

    engine.engine.stepper.executor = Broken()
    engine.start(on_failure=failures.append)

    async def run() -> list[FinishReason | None]:
        handles = [await engine.generate(prompt, GREEDY) for prompt in PROMPTS[:1]]
        return [(await collect(handle))[1] for handle in handles]

    assert asyncio.run(run()) == [FinishReason.ERROR]
    engine.stop()
    assert isinstance(failures[0], ExecutorError)

    async def too_late() -> None:
        with pytest.raises(EngineError):
            await engine.generate(PROMPTS[0], GREEDY)

    asyncio.run(too_late())


LEFT_IN_NATIVE_CODE = """
import threading, time
from diptych.compute.ops.cpu.kernels import _cpu

def work():
    while True:
        _cpu.measure_read_bytes_per_s(1 << 16, 1, [], 1)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.native
def test_a_program_may_end_beside_a_thread_in_native_code():
    """The engine's thread is one where nobody closed the engine; such a program must not abort at its end."""
    ended = subprocess.run([sys.executable, "-c", LEFT_IN_NATIVE_CODE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
