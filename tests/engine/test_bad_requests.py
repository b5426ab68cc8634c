"""A bad request never ends others: every field with wrong types and extreme values, beside a running stream."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import tiny_config

from diptych.engine.async_llm import AsyncLLM, RequestHandle
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir
from diptych.engine.phases import TwoPhase
from diptych.ground.errors import ConfigError, LoadError, RequestError
from diptych.ground.request import SamplingParams, StructuredSpec

GREEDY = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
NAN, INF, HUGE = float("nan"), float("inf"), 10**5000
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, NAN, INF, -INF, HUGE, -HUGE, 2**31, 2**63, 2**64, -(2**63), 1e308, 1e-320, 0.01, 100,
    "", "x", "1", "\ud800", "\x00", b"x", [], [[]], [1], ["x"], [None], [1.5], [[1, 2], [3]], (), {}, {"x": 1}, {1: NAN},
    {1: 5.0}, {HUGE: 1.0}, {1, 2}, object(), 1j, np.int64(3), np.float32(0.5), np.array([1, 2]), np.array(3), np.array([]),
    np.zeros((2, 2), dtype=np.int64), torch.tensor([1, 2]), torch.tensor(1), range(3), iter([1, 2]), lambda: 1, int,
    StructuredSpec(kind="regex", source="("), StructuredSpec(kind="nothing", source="x"),
    StructuredSpec(kind="json_schema", source="[" * 5000), StructuredSpec(kind="grammar", source="start: start"),
    StructuredSpec(kind="choice", source="{}"),
]  # fmt: skip
PROMPTS: list[Any] = [
    *STRANGE, -1, [-1], [4096], [4095, 2**70], ["Once", "upon"], [[1, 2]], [{"role": "user", "content": "hi"}],
    [1, "x"], [1, None], [1, True], [1, 2.0], np.array([1.0, 2.0]), [HUGE], list(range(4000)), "word " * 9000,
]  # fmt: skip


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[AsyncLLM]:
    running = AsyncLLM(loaded, tiny_config())
    running.start()
    yield running
    running.stop()


def tries() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every argument of `AsyncLLM.generate` and every field of SamplingParams with every strange value."""
    for value in PROMPTS:
        yield "prompt", {"prompt": value}
    for name in ("sampling", "priority", "cache_salt", "request_id", "arrival_s"):
        for value in (*STRANGE, "x" * 300, "\udfff"):
            yield name, {name: value}
    for one in fields(SamplingParams):
        for value in STRANGE:
            yield one.name, {"fields": {one.name: value}}


async def attempt(engine: AsyncLLM, asked: dict[str, Any]) -> str:
    """What became of one try: taken, or refused as a request that is wrong in itself. Anything else propagates."""
    sampling_fields = {"max_tokens": 2, "temperature": 0.0} | asked.pop("fields", {})
    try:
        sampling = SamplingParams(**sampling_fields)
        handle = await engine.generate(**({"prompt": "The capital", "sampling": sampling} | asked))
    except RequestError as refusal:
        return "refused" if len(str(refusal)) < 400 else f"refused at length: {refusal}"
    engine.abort(handle.request_id)
    async for _ in handle:
        pass
    assert handle.error is None
    return "taken"


async def text_of(handle: RequestHandle) -> str:
    return "".join([delta.text async for delta in handle])


def test_a_sweep_of_bad_requests_leaves_a_running_stream_whole(engine: AsyncLLM, loaded: LoadedModel) -> None:
    """`seed=1.5` passed the door and killed the engine's thread: every stream of every other client ended with it."""
    expected = LLM(loaded, tiny_config()).generate("Once upon a time", GREEDY)[0].choices[0].text

    async def sweep() -> tuple[dict[str, set[str]], list[str]]:
        outcomes: dict[str, set[str]] = {}
        texts: list[str] = []
        beside = asyncio.create_task(text_of(await engine.generate("Once upon a time", GREEDY)))
        for name, asked in tries():
            if beside.done():
                texts.append(await beside)
                beside = asyncio.create_task(text_of(await engine.generate("Once upon a time", GREEDY)))
            outcomes.setdefault(name, set()).add(await attempt(engine, asked))
        return outcomes, [*texts, await beside]

    outcomes, texts = asyncio.run(sweep())
    assert engine.failure is None
    assert engine.engine.n_open == 0
    assert all(seen in ({"refused"}, {"refused", "taken"}) for seen in outcomes.values()), outcomes
    assert set(texts) == {expected}
    assert len(texts) > 1


def test_what_is_refused_with_extreme_values_that_are_allowed(engine: AsyncLLM) -> None:
    """The ends of every range, all at once, go through the sampler."""

    async def ends() -> None:
        for sampling in (
            SamplingParams(max_tokens=4, temperature=100.0, top_k=2**31 - 1, min_p=1.0, repetition_penalty=0.01,
                           presence_penalty=-2.0, frequency_penalty=2.0, seed=-(2**63), n=8, logprobs=20, prompt_logprobs=20,
                           logit_bias=dict.fromkeys(range(1024), -100.0), stop=["x" * 256] * 16),
            SamplingParams(max_tokens=4, temperature=1e-5, top_p=1e-300, top_k=1, repetition_penalty=100.0, seed=2**64 - 1,
                           min_tokens=4, stop_token_ids=list(range(64)), logit_bias={4095: 100.0}),
        ):  # fmt: skip
            handle = await engine.generate("Once upon a time", sampling, priority=2**31 - 1, cache_salt="x" * 256)
            async for _ in handle:
                pass
            assert handle.error is None

    asyncio.run(ends())
    assert engine.failure is None


@pytest.mark.parametrize(
    "ids", [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (np.int64(5), 6, np.uint8(7)), range(5, 8)]
)
def test_token_ids_of_any_library_are_one_prompt(llm: LLM, ids: Any) -> None:
    """Ids come from tokenizers as arrays and tensors; an array was an error, and its first entry hid that."""
    (one,) = llm.generate(ids, SamplingParams(max_tokens=2, temperature=0.0))
    assert one.prompt_token_ids == (5, 6, 7)
    assert {type(token_id) for token_id in one.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompt is None"),
        (5, "prompt is 5"),
        (b"hi", "prompt is b'hi'"),
        ({"role": "user"}, "render makes a prompt from messages"),
        ([{"role": "user", "content": "hi"}], "render makes a prompt from messages"),
        ([None], "prompt is None"),
        ([1, "x"], "token id 'x' at place 1"),
        ([[1, [2]]], r"token id \[2\] at place 1"),
        ("", "prompt has 0 tokens"),
        ([[]], "prompt has 0 tokens"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_named(llm: LLM, prompts: Any, message: str) -> None:
    """`TypeError: 'NoneType' object is not iterable` says nothing of what to do."""
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("sampling", [5, "greedy", {"temperature": 0.0}, [None], [{}], [GREEDY, GREEDY]])
def test_sampling_of_a_wrong_type_is_named(llm: LLM, sampling: Any) -> None:
    """A dict of settings looks right and is not."""
    with pytest.raises(RequestError, match="sampling") as caught:
        llm.generate("hi", sampling)
    assert "must be a list" not in caught.value.message, "one that is no list is fine"


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, TwoPhase])
def test_settings_by_name_make_a_model(tiny_dir: Any, kind: type[Any]) -> None:
    """Three config objects stood between a newcomer and int8 weights."""
    made = kind(tiny_dir, backend="torch", weights="fp32", threads=1, max_context_tokens=64, max_running_sequences=2)
    model = made.loaded.model
    assert (model.backend_name, model.weights_format) == ("torch", "fp32")
    if kind is LLM:
        assert made.config.scheduler.max_running_sequences == 2
        assert made.engine.core.context_limit_tokens == 64
        assert made.generate("Once upon a time", SamplingParams(max_tokens=2))[0].error is None


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, TwoPhase])
def test_settings_that_cannot_be_followed_are_refused(loaded: LoadedModel, kind: type[Any]) -> None:
    """An option is honoured or refused: a loaded model cannot change its weights."""
    with pytest.raises(ConfigError, match="weights is set, but the model is already loaded"):
        kind(loaded, weights="int8")
    with pytest.raises(ConfigError, match="did you mean max_context_tokens"):
        kind(loaded, max_context_token=64)
    assert kind(loaded, tiny_config(), max_context_tokens=64) is not None


def test_words_of_another_models_tokenizer_are_told_as_such(tmp_path: Path) -> None:
    """A text was refused for a token id that its writer had never seen."""
    make_checkpoint("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, tmp_path / name)
    llm = LLM(tmp_path, tiny_config())
    for prompt in ("Once upon a time", llm.render([{"role": "user", "content": "Once upon a time"}])):
        with pytest.raises(RequestError, match=r"token id .* 0 and 159") as caught:
            llm.generate(prompt)
        assert caught.value.hint == "the tokenizer has 4096 tokens: it may be another model's"
    with pytest.raises(RequestError, match="token id 160") as caught:
        llm.generate([160])
    assert caught.value.hint is None


@pytest.mark.parametrize(
    "model", ["", "\0", "a\0b", "a" * 5000, "\ud800", "~no-such-user/x", None, 5, b"bundled", ["bundled"]]
)
def test_what_is_no_models_name_is_refused_as_such(model: object) -> None:
    """`LLM("")` blamed ".", `LLM(None)` asked the hub for a model of that name, and long names ended in a raw OSError."""
    with pytest.raises((ConfigError, LoadError), match=r"model is .*; it must be"):
        LLM(model)  # type: ignore[arg-type]
