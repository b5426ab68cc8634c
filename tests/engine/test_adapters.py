"""Adapters through the engine: each request has its own, whoever runs beside it, and none is lost under it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.conftest import tiny_config
from tests.lora import ALL, write_adapter

from diptych.engine.async_llm import AsyncLLM
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import LoadedModel
from diptych.engine.phases import TwoPhase
from diptych.ground.errors import CapacityError, ConfigError, LoadError, RequestError
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "It was a dark and stormy night; " * 3, "a"]
LONG = "It was a dark and stormy night; " * 6
N_MANY = 300  # tokens: more than an engine makes while its reader gets to read the first five, on a busy machine too


@pytest.fixture(scope="module")
def paths(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "poet": write_adapter(folder / "poet", tiny_dir, ALL, seed=1),
        "clerk": write_adapter(folder / "clerk", tiny_dir, {"q_proj": 8, "v_proj": 8}, seed=2, size=2.0),
        "wide": write_adapter(folder / "wide", tiny_dir, {"q_proj": 65}, seed=3),
    }


@pytest.fixture
def loras(paths: dict[str, Path]) -> dict[str, Path]:
    return {name: paths[name] for name in ("poet", "clerk")}


def ids_of(done: list[Completion]) -> list[tuple[int, ...]]:
    return [choice.token_ids for one in done for choice in one.choices]


def test_answers_of_several_adapters_at_once_are_those_of_each_alone(
    loaded: LoadedModel, loras: dict[str, Path]
) -> None:
    """Small steps, a small pool and preemption cut the work in every way; an adapter stays with its request."""
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    names = [None, "poet", "clerk"] * len(PROMPTS)
    sampling = [replace(GREEDY, n=2, temperature=0.7, seed=7) if i % 4 == 1 else GREEDY for i in range(len(prompts))]
    alone = [
        ids_of(LLM(loaded, tiny_config(), loras=loras).generate([prompt], params, adapter=name))
        for prompt, name, params in zip(prompts, names, sampling, strict=True)
    ]
    together = LLM(loaded, tiny_config(), loras=loras, kv_memory_bytes=16 * 2 * 16 * loaded.model.kv_bytes_per_block(1))
    done = together.generate(prompts, sampling, adapter=names)
    assert [ids_of([one]) for one in done] == alone
    assert [one.adapter for one in done] == names
    assert alone[0] != alone[1] != alone[2] != alone[0], "the adapters do next to nothing"
    assert [loaded.n_requests for loaded in together.engine.adapters.served] == [0, 0]
    (plain,) = LLM(loaded, tiny_config()).generate([PROMPTS[0]], GREEDY)
    assert ids_of([plain]) == alone[0]


def test_cached_prefixes_are_an_adapter_s_own(loaded: LoadedModel, loras: dict[str, Path]) -> None:
    """Keys and values of the same text differ by adapter: a hit across would answer with another's memory."""
    llm = LLM(loaded, tiny_config(), loras=loras)

    def ask(adapter: str | None) -> tuple[int, list[tuple[int, ...]]]:
        done = llm.generate([LONG], GREEDY, adapter=adapter)
        return done[0].usage.cached_tokens, ids_of(done)

    names = ("poet", "clerk", None)
    first = {name: ask(name) for name in names}
    assert [cached for cached, _ in first.values()] == [0, 0, 0]
    again = {name: ask(name) for name in names}
    assert all(cached > 0 for cached, _ in again.values())
    assert [ids for _, ids in again.values()] == [ids for _, ids in first.values()]
    # unloaded and loaded again, even by another name, the same numbers find what they have written
    llm.unload_lora("poet")
    llm.load_lora("bard", loras["poet"])
    assert ask("bard") == again["poet"]


@pytest.mark.parametrize("speculate", ["lookup"])
def test_drafts_that_know_no_adapter_change_no_answer(
    loaded: LoadedModel, loras: dict[str, Path], speculate: str
) -> None:
    """Whoever guesses, rows are verified by the model with the adapter."""
    params = replace(GREEDY, max_tokens=40)
    plain = LLM(loaded, tiny_config(), loras=loras).generate([LONG, LONG], params, adapter=["poet", None])
    guessed = LLM(loaded, tiny_config(), loras=loras, speculate=speculate).generate(
        [LONG, LONG], params, adapter=["poet", None]
    )
    assert ids_of(guessed) == ids_of(plain)


def test_what_cannot_be_loaded_is_refused_with_its_numbers(
    loaded: LoadedModel, paths: dict[str, Path], loras: dict[str, Path]
) -> None:
    """Nothing is ignored, and what was refused leaves no trace."""
    llm = LLM(loaded, tiny_config(), loras=loras, max_loras=2)
    with pytest.raises(CapacityError, match=r"2 adapters are loaded .*; at most 2"):
        llm.load_lora("third", paths["poet"])
    with pytest.raises(ConfigError, match="'poet' is already loaded"):
        llm.load_lora("poet", paths["clerk"])
    llm.unload_lora("clerk")
    with pytest.raises(CapacityError, match="rank 65; at most 64"):
        llm.load_lora("wide", paths["wide"])
    with pytest.raises(LoadError, match="no such folder"):
        llm.load_lora("nobody", "/nowhere/at/all")
    for name in ("a,b", "a\nb"):
        with pytest.raises(ConfigError, match="commas and control characters"):
            llm.load_lora(name, paths["clerk"])
    for name in ("clerk", "nobody"):
        with pytest.raises(RequestError, match="no adapter"):
            llm.generate(["a"], GREEDY, adapter=name)
        with pytest.raises(RequestError, match="no adapter"):
            llm.unload_lora(name)
    for wrong in (5, [5], [["poet"]]):
        with pytest.raises(RequestError, match="adapter"):
            llm.generate(["a"], GREEDY, adapter=wrong)
    with pytest.raises(RequestError, match="1 prompt came with 2 adapters"):
        llm.generate(["a"], GREEDY, adapter=["poet", "poet"])
    assert [one.ref.name for one in llm.engine.adapters.served] == ["poet"]
    with pytest.raises(ConfigError, match="loras has 2 adapters; max_loras is 1"):
        LLM(loaded, tiny_config(), loras=loras, max_loras=1)
    with pytest.raises(ConfigError, match="loras"):
        LLM(loaded, tiny_config(), loras=["poet"])
    with pytest.raises(ConfigError, match="TwoPhase"):
        TwoPhase(loaded, tiny_config(), loras=loras)


def test_a_request_that_is_refused_holds_no_adapter(loaded: LoadedModel, loras: dict[str, Path]) -> None:
    """It would never be unloaded."""
    llm = LLM(loaded, tiny_config(), loras=loras)
    with pytest.raises(RequestError):
        llm.generate([list(range(3, 900))], GREEDY, adapter="poet")
    llm.unload_lora("poet")
    assert len(llm.engine.adapters.served) == 1
    assert llm.engine.adapters.n_bytes == llm.engine.adapters.served[0].n_bytes


@pytest.fixture
def engine(loaded: LoadedModel, loras: dict[str, Path]) -> Iterator[AsyncLLM]:
    running = AsyncLLM(loaded, tiny_config(), loras=loras, max_loras=3)
    running.start()
    yield running
    running.stop()


async def tokens(engine: AsyncLLM, adapter: str | None, n: int = 60) -> list[int]:
    found: list[int] = []
    handle = await engine.generate(LONG, replace(GREEDY, max_tokens=n), adapter=adapter)
    async for delta in handle:
        assert delta.finish_reason is not FinishReason.ERROR, handle.error
        found += delta.token_ids
    return found


def test_unloading_waits_for_open_requests_and_loses_none(
    engine: AsyncLLM, loaded: LoadedModel, loras: dict[str, Path]
) -> None:
    """Its memory must not go under a request; new ones are refused meanwhile, and others run on."""
    expected = ids_of(LLM(loaded, tiny_config(), loras=loras).generate(
        [LONG] * 2, replace(GREEDY, max_tokens=N_MANY), adapter=["poet", "clerk"]
    ))  # fmt: skip

    async def everyone() -> None:
        handle = await engine.generate(LONG, replace(GREEDY, max_tokens=N_MANY), adapter="poet")
        beside = asyncio.ensure_future(tokens(engine, "clerk", N_MANY))
        unloading = asyncio.ensure_future(engine.unload_lora("poet"))
        await engine.call(lambda inner: None)
        with pytest.raises(RequestError, match=r"no adapter|has been unloaded"):
            await engine.generate(LONG, GREEDY, adapter="poet")
        found: list[int] = []
        async for delta in handle:
            if len(found) < 5:
                assert not unloading.done()
            found += delta.token_ids
        await unloading
        assert tuple(found) == expected[0]
        assert tuple(await beside) == expected[1]

    asyncio.run(everyone())
    assert [one.ref.name for one in engine.engine.adapters.served] == ["clerk"]


def test_a_body_that_comes_in_parts_has_its_adapter_to_the_last(engine: AsyncLLM, paths: dict[str, Path]) -> None:
    """Its later requests were asked for before the adapter was unloaded; whoever asks now is refused."""
    ref = engine.engine.adapters.find("poet")

    async def everyone() -> None:
        expected = await tokens(engine, "poet", 9)
        async with engine.keeping(ref, n_requests=2):
            unloading = asyncio.ensure_future(engine.unload_lora("poet"))
            await engine.call(lambda inner: None)
            await engine.load_lora("guest", paths["clerk"])
            with pytest.raises(CapacityError, match=r"3 adapters are loaded \(poet, leaving, clerk, guest\)"):
                await engine.load_lora("another", paths["clerk"])
            with pytest.raises(RequestError, match="no adapter"):
                await engine.generate(LONG, GREEDY, adapter="poet")
            handle = await engine.generate(LONG, replace(GREEDY, max_tokens=9), adapter=ref)
            assert not unloading.done()
        assert [one async for delta in handle for one in delta.token_ids] == expected
        await unloading
        with pytest.raises(RequestError, match="has been unloaded"):
            async with engine.keeping(ref, n_requests=2):
                pass
        left = asyncio.ensure_future(engine.keeping(engine.engine.adapters.find("guest"), n_requests=2).__aenter__())
        await asyncio.sleep(0)  # it has asked, and does not wait for the answer
        left.cancel()
        await asyncio.wait([left])
        await engine.unload_lora("guest")

    asyncio.run(everyone())
    assert [one.ref.name for one in engine.engine.adapters.served] == ["clerk"]


def test_loading_and_unloading_under_load_keeps_the_balance(
    engine: AsyncLLM, loaded: LoadedModel, loras: dict[str, Path], paths: dict[str, Path]
) -> None:
    """Numbers are given again and again while requests run; every answer is its own adapter's."""
    alone = LLM(loaded, tiny_config(), loras=loras)
    expected = {
        name: list(ids_of(alone.generate([LONG], replace(GREEDY, max_tokens=9), adapter=name))[0])
        for name in (None, "poet", "clerk")
    }

    async def come_and_go() -> None:
        for i in range(6):
            name = ("poet", "clerk")[i % 2]
            await engine.load_lora("guest", paths[name])
            handles = [await engine.generate(LONG, replace(GREEDY, max_tokens=9), adapter="guest") for _ in range(2)]
            unloading = asyncio.ensure_future(engine.unload_lora("guest"))
            for handle in handles:
                assert [one async for delta in handle for one in delta.token_ids] == expected[name]
            await unloading

    async def steady(name: str | None) -> None:
        for _ in range(4):
            assert await tokens(engine, name, 9) == expected[name]

    async def everyone() -> None:
        await asyncio.gather(come_and_go(), steady("poet"), steady("clerk"), steady(None))
        # in place: the old one goes with its last request
        handle = await engine.generate(LONG, replace(GREEDY, max_tokens=30), adapter="poet")
        await engine.load_lora("poet", paths["clerk"], replaces=True)
        assert await tokens(engine, "poet", 9) == expected["clerk"]
        async for _ in handle:
            pass

    asyncio.run(everyone())
    adapters = engine.engine.adapters
    assert [one.n_requests for one in adapters.served] == [0, 0]
    assert adapters.n_bytes == sum(one.n_bytes for one in adapters.served)


def test_an_engine_that_stops_answers_who_waits_for_an_unloading(loaded: LoadedModel, loras: dict[str, Path]) -> None:
    """The open request ends with the engine, and so does the wait."""
    engine = AsyncLLM(loaded, tiny_config(), loras=loras)
    engine.start()

    async def leave() -> None:
        await engine.generate(LONG, replace(GREEDY, max_tokens=120), adapter="poet")
        unloading = asyncio.ensure_future(engine.unload_lora("poet"))
        await engine.call(lambda inner: None)
        await asyncio.to_thread(engine.stop)
        await asyncio.wait_for(unloading, 20)

    asyncio.run(leave())
    assert [one.ref.name for one in engine.engine.adapters.served] == ["clerk"]
