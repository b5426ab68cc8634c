"""`close`: threads, memory and rank processes go back to the system at once, whoever still has the `LLM`'s name."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.engine.conftest import tiny_config
from tests.engine.test_ranks import memfds, rank_processes, wait_until

from diptych.engine.async_llm import AsyncLLM
from diptych.engine.llm import LLM
from diptych.engine.load import load
from diptych.engine.phases import TwoPhase
from diptych.ground.errors import CapacityError
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams

KV_BYTES = 128 << 20
SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "kv_memory_bytes": KV_BYTES,
    "max_context_tokens": 4096,
    "threads": 2,
    "numa": "off",
}
CONFIG = tiny_config("cpu")
pytestmark = pytest.mark.native
FOUR = SamplingParams(max_tokens=4, temperature=0.0)
Closing = TypeVar("Closing", LLM, TwoPhase)


def held() -> tuple[int, set[str]]:
    """(bytes of address space, ids of the threads) of this process."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmSize:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10, set(os.listdir("/proc/self/task"))


@contextmanager
def all_goes_back(kind: Callable[..., Closing]) -> Iterator[Closing]:
    """An engine that is used within, and has given memory and threads back behind it; closed twice."""
    kind("bundled", **SETTINGS).close()  # what is loaded once for the whole process
    gc.collect()  # what earlier tests left behind would else go in between, with its threads
    before_bytes, before_threads = held()
    with kind("bundled", **SETTINGS) as engine:
        yield engine
        during_bytes, during_threads = held()
    after_bytes, after_threads = held()
    assert during_bytes - before_bytes > KV_BYTES
    assert during_threads - before_threads
    assert after_bytes - before_bytes < KV_BYTES // 4
    assert not after_threads - before_threads
    engine.close()


def test_memory_and_threads_go_back_and_what_is_asked_later_is_refused() -> None:
    """There was no way to: the pool of an `LLM` stayed until some collection came by, also behind `del`."""
    with all_goes_back(LLM) as llm:
        llm.generate("Once", FOUR)
    for ask in (lambda: llm.generate("Once", FOUR), lambda: llm.load_lora("a", "b"), lambda: llm.unload_lora("a")):
        with pytest.raises(CapacityError, match="this engine is closed"):
            ask()
    assert llm.render([{"role": "user", "content": "Hi"}]).token_ids  # words need no engine


def test_two_phases_give_all_back_too() -> None:
    """There was no way to: an `LLM` has had one for long."""
    with all_goes_back(TwoPhase) as phases:
        state = phases.prefill([5, 6, 7])
    for ask in (lambda: phases.prefill([5]), lambda: phases.decode(state), lambda: phases.fork(state)):
        with pytest.raises(CapacityError, match="this TwoPhase is closed"):
            ask()
    phases.free(state)
    loaded = load("bundled", CONFIG)
    first, second = TwoPhase(loaded, CONFIG), TwoPhase(loaded, CONFIG)
    first.close()
    assert second.decode(second.prefill([5, 6, 7]))
    loaded.model.close()


def test_a_model_of_the_callers_stays_loaded() -> None:
    config = CONFIG
    loaded = load("bundled", config)
    first, second = LLM(loaded, config), LLM(loaded, config)
    want = first.generate("Once", FOUR)[0].choices[0].text
    first.close()
    assert second.generate("Once", FOUR)[0].choices[0].text == want
    second.close()
    loaded.model.close()


def test_close_waits_for_calls_of_other_threads_and_refuses_to_cut_its_own() -> None:
    llm = LLM("bundled", CONFIG)
    refused: list[CapacityError] = []

    def close_it(index: int, delta: object) -> None:
        with pytest.raises(CapacityError, match="close was called by on_delta") as error:
            llm.close()
        refused.append(error.value)

    with ThreadPoolExecutor(1) as other:
        running = other.submit(llm.generate, "Once", FOUR, on_delta=close_it)
        while not refused:
            pass
        llm.close()
        assert running.done()
        assert len(running.result()[0].choices[0].token_ids) == 4


def test_rank_processes_end() -> None:
    gc.collect()  # what earlier tests of this process left
    held = memfds()
    with LLM("bundled", CONFIG, tp=2, threads=2) as llm:
        llm.generate("Once", FOUR)
        assert len(rank_processes()) == 1
    wait_until(lambda: not rank_processes() and memfds() == held, "a process or its memory stayed")


@pytest.mark.parametrize("leave", [AsyncLLM.stop, AsyncLLM.close])
def test_an_async_engine_answers_all_and_gives_all_back(leave: Callable[[AsyncLLM], None]) -> None:
    """Requests in flight end as aborted; the consumer that is left behind, and who asks anew, get an answer."""
    before = set(threading.enumerate())  # what earlier tests of this process left

    async def talk() -> None:
        async with AsyncLLM("bundled", CONFIG) as llm:
            handle = await llm.generate("Once", SamplingParams(max_tokens=300, ignore_eos=True))
            assert await anext(aiter(handle))
            await asyncio.to_thread(leave, llm)
        reasons = [delta.finish_reason async for delta in handle if delta.finish_reason]
        assert reasons == [FinishReason.ABORT]
        llm.abort(handle.request_id)
        with pytest.raises(CapacityError, match="the engine is closed"):
            await llm.generate("Once", FOUR)
        llm.close()

    asyncio.run(talk())
    assert [one.name for one in threading.enumerate() if one not in before and one.name.startswith("diptych")] == []
