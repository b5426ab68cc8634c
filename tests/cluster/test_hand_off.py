"""Keys and values handed from one engine to another: the same answers as one engine's, whatever the link does."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.checkpoints import make_checkpoint
from tests.cluster.local import Fault, LocalCluster, flipped, no_fault
from tests.engine.conftest import tiny_config

from diptych.cluster.messages import Done, Parcel, Read, StopReading, ToWorker
from diptych.compute.kv_store import KVPayload
from diptych.engine.async_llm import AsyncLLM
from diptych.engine.engine import Engine, OutputDelta
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.ground.config import SchedulerConfig
from diptych.ground.errors import CapacityError
from diptych.ground.events import TokenEvent
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams, StructuredSpec
from diptych.insight.segments import TokenWork
from diptych.server.accounting import Account, Accountant, chunk_times

pytestmark = pytest.mark.native
BLOCK = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(
    max_tokens=16, temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.3
)
# lengths around the edges of blocks (16) and of steps (48)
LENGTHS = (1, 2, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 95, 96, 97, 130, 200, 239)


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> LoadedModel:
    return load(str(tiny_dir), tiny_config("cpu"))


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300, 4000) for _ in range(n)] for n in lengths]


def random_model(directory: Path, **options: int) -> None:
    """Random weights under the bundled tokenizer."""
    make_checkpoint("llama", directory, vocab_size=4096, **options)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, directory / name)


def said(completions: list[Completion]) -> list[object]:
    """All of an answer but its times."""
    return [(one.choices, one.prompt_logprobs, one.error) for one in completions]


def account(one: Completion) -> None:
    """Tokens by source and times by phase add up."""
    usage, timings = one.usage, one.timings
    assert usage.computed_tokens + usage.cached_tokens + usage.transferred_tokens == usage.prompt_tokens, usage
    assert usage.remaining_tokens == 0
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s + timings.transfer_s)
    assert min(timings.queue_s, timings.prefill_s, timings.transfer_s, timings.decode_s) >= -1e-9, timings


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, n=3),
        replace(SAMPLED, logprobs=2, stop=("the", "a")),
        replace(GREEDY, prompt_logprobs=1),
        SamplingParams(
            max_tokens=24, seed=3, structured=StructuredSpec(kind="regex", source="[a-f]{4}-[0-9]{6}"), logprobs=1
        ),
    ],
    ids=["greedy", "sampled", "n", "logprobs", "prompt_logprobs", "grammar"],
)
@pytest.mark.parametrize("machine", [None, "this"])
def test_two_engines_answer_as_one(loaded: LoadedModel, sampling: SamplingParams, machine: str | None) -> None:
    """The whole promise of a hand-off: who reads the prompt cannot be told from the answer."""
    config = tiny_config("cpu")
    asked = prompts(LENGTHS if sampling.n == 1 else LENGTHS[::3])
    wanted = LLM(loaded, config).generate(asked, sampling)
    cluster = LocalCluster(loaded, config, machine=machine)
    got = cluster.llm.generate(asked, sampling)
    assert said(got) == said(wanted)
    for one in got:
        account(one)
    cluster.check()
    if sampling.prompt_logprobs is None:
        read = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in asked)
        assert sum(one.usage.transferred_tokens for one in got) == read, "every whole block travels"
        assert any(one.timings.transfer_s > 0.0 for one in got)
    assert not cluster.reasons("recomputes")


@pytest.mark.parametrize("n_steps", [2, 5])
def test_tokens_behind_a_stop_string_are_counted_by_nobody(loaded: LoadedModel, n_steps: int) -> None:
    """A worker that is ahead of the door tells of several steps at once, and all that stood behind the stop was billed."""
    sampling = replace(SAMPLED, n=2, max_tokens=40, ignore_eos=True, stop=("the", "a", "e"))
    asked = prompts((17, 64, 100, 33))
    wanted = LLM(loaded, tiny_config("cpu")).generate(asked, sampling)
    cluster = LocalCluster(loaded, tiny_config("cpu"))
    cluster.batch_steps = n_steps
    got = cluster.llm.generate(asked, sampling)
    assert said(got) == said(wanted)
    for one, expected in zip(got, wanted, strict=True):
        assert one.usage.output_tokens == expected.usage.output_tokens == sum(len(c.token_ids) for c in one.choices)
        account(one)
    cluster.check()


def test_what_is_cached_is_what_one_engine_had_cached(loaded: LoadedModel) -> None:
    """A client that pays for uncached tokens must not pay for how the service is built."""
    config = tiny_config("cpu")
    first, second = prompts((100, 100))
    turns = [[first], [first + second[:60]], [first[:64] + second], [first]]
    one, cluster = LLM(loaded, config), LocalCluster(loaded, config)
    for turn in turns:
        wanted, got = one.generate(turn, GREEDY)[0], cluster.llm.generate(turn, GREEDY)[0]
        assert said([got]) == said([wanted])
        assert got.usage.cached_tokens == wanted.usage.cached_tokens
        account(got)
    cluster.check()


def test_salts_hold_across_workers(loaded: LoadedModel) -> None:
    """What another tenant had read must not be found, on either side of a link."""
    cluster = LocalCluster(loaded, tiny_config("cpu"))
    prompt = prompts((100,))[0]
    for salt, cached in (("a", 0), ("b", 0), ("a", 96), (None, 0)):
        engine = cluster.engine
        request = engine.make_request(prompt, GREEDY, arrival_s=engine.clock.now_s(), cache_salt=salt)
        opened = engine.submit(request, lambda delta: None)
        while not opened.is_finished:
            engine.step()
        assert opened.record is not None
        assert opened.record.cached_tokens == cached, salt
    cluster.check()


def test_other_kernels_are_refused_unless_asked_for(tiny_dir: Path, loaded: LoadedModel) -> None:
    """Two kinds of processors have other last bits: taken in silently, answers would depend on who read a prompt."""
    config = tiny_config("cpu")
    other = load(str(tiny_dir), replace(config, compute=replace(config.compute, instruction_set="scalar")))
    assert other.model.revision != loaded.model.revision
    asked, sampling = prompts((40, 130, 200)), replace(GREEDY, logprobs=0)
    wanted = LLM(loaded, config).generate(asked, sampling)
    strict = LocalCluster(loaded, config, reader=other)
    assert said(strict.llm.generate(asked, sampling)) == said(wanted), "recomputed, and so bit for bit our own"
    assert strict.reasons("recomputes") == {"revision": 3}
    strict.check()
    lax = LocalCluster(loaded, config, reader=other, takes_other_kernels=True)
    got = lax.llm.generate(asked, sampling)
    assert [one.usage.transferred_tokens for one in got] == [32, 128, 192]
    assert not lax.reasons("recomputes")
    for one, expected in zip(got, wanted, strict=True):
        first, right = one.choices[0].logprobs[0], expected.choices[0].logprobs[0]
        assert first.logprob == pytest.approx(right.logprob, abs=0.05)
    lax.check()


def test_another_model_is_refused_even_then(tmp_path: Path, loaded: LoadedModel) -> None:
    """The option is about kernels; keys and values of other weights are nobody's."""
    random_model(tmp_path, seed=1, max_position_embeddings=512)
    config = tiny_config("cpu")
    asked = prompts((130,))
    wanted = LLM(loaded, config).generate(asked, GREEDY)
    cluster = LocalCluster(loaded, config, reader=load(str(tmp_path), config), takes_other_kernels=True)
    assert said(cluster.llm.generate(asked, GREEDY)) == said(wanted)
    assert cluster.reasons("recomputes") == {"tokens": 1}, "its blocks go by other names"
    cluster.check()


def test_short_prompts_are_read_where_they_are_answered(loaded: LoadedModel) -> None:
    """A message to another worker and back takes longer than reading a few tokens."""
    cluster = LocalCluster(loaded, tiny_config("cpu"), local_prefill_tokens=64)
    short, long = cluster.llm.generate(prompts((60, 100)), GREEDY)
    assert (short.usage.transferred_tokens, long.usage.transferred_tokens) == (0, 96)
    again = cluster.llm.generate([prompts((60, 100))[1]], GREEDY)[0]
    assert again.usage.cached_tokens == 96
    assert cluster.workers["prefill-0"].counts().sent_tokens == 96, "what is cached there is not asked for"
    cluster.check()


def _parcels_only(change: Fault) -> Fault:
    return lambda message: change(message) if isinstance(message, Parcel) else [(0, message)]


def _dropping(share: float, seed: int) -> Fault:
    rng = random.Random(seed)
    return lambda message: [] if rng.random() < share else [(0, message)]


def _delaying(seed: int) -> Fault:
    rng = random.Random(seed)
    return lambda message: [(rng.randrange(6), message)]


def _with_header(**changes: str) -> Fault:
    def change(message: ToWorker) -> list[tuple[int, ToWorker]]:
        assert isinstance(message, Parcel)
        header = replace(message.payload.header, **changes)
        payload = KVPayload(header=header, checksums=message.payload.checksums, data_NB=message.payload.data_NB)
        return [(0, replace(message, payload=payload))]

    return _parcels_only(change)


FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "drop_10": (_dropping(0.1, 1), {"missing", "lease"}),
    "drop_30": (_dropping(0.3, 2), {"missing", "lease"}),
    "reorder": (_delaying(3), set()),
    "duplicate": (lambda message: [(0, message), (2, message)], set()),
    "bit": (_parcels_only(lambda message: [(0, flipped(message))]), {"checksum"}),
    "revision": (_with_header(revision="of another model"), {"revision"}),
    "layout": (_with_header(layout="of another backend"), {"layout"}),
    "wrong_tokens": (_parcels_only(lambda m: [(0, replace(m, digests=tuple(d[::-1] for d in m.digests)))]), {"tokens"}),
    "silence": (lambda message: [] if isinstance(message, Parcel | Done) else [(0, message)], {"lease"}),
    "never_done": (lambda message: [] if isinstance(message, Done) else [(0, message)], {"lease"}),
    "never_asked": (lambda message: [] if isinstance(message, Read) else [(0, message)], {"lease"}),
    "too_late": (_parcels_only(lambda message: [(10_000, message)]), {"missing"}),
}


@pytest.mark.parametrize("machine", [None, "this"])
@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_of_a_link_changes_an_answer(loaded: LoadedModel, name: str, machine: str | None) -> None:
    """Everybody's hand-off works on a good link; on a bad one many answer from what did not come, or hang."""
    fault, reasons = FAULTS[name]
    config = tiny_config("cpu")
    asked = prompts((17, 64, 97, 130, 200))
    wanted = [LLM(loaded, config).generate(asked, sampling) for sampling in (GREEDY, SAMPLED)]
    # what is lost is waited for in vain; what is not must never be given up on a slow machine
    waits = {"lease_s": 0.15, "late_s": 0.05} if reasons & {"missing", "lease"} else {"lease_s": 300.0, "late_s": 300.0}
    cluster = LocalCluster(loaded, config, fault=fault, machine=machine, **waits)
    for sampling, expected in zip((GREEDY, SAMPLED), wanted, strict=True):
        got = cluster.llm.generate(asked, sampling)
        assert said(got) == said(expected)
        for one in got:
            account(one)
        cluster.core.reset_prefix_cache()
    found = set(cluster.reasons("recomputes"))
    assert found <= reasons | ({"lease"} if "missing" in reasons else set()), found
    # a reader that never says that it is done has sent all the same
    assert found or not reasons or name in ("drop_10", "never_done"), "the fault was seen"
    assert bool(cluster.total("recomputed_tokens")) == bool(found)
    cluster.fault = lambda message: []
    cluster.check()


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_the_time_of_a_prompt_is_charged_to_its_parts(loaded: LoadedModel, kept: float) -> None:
    """What another worker had read for nothing was charged to no token, so segments did not add up to the prefill."""
    rng = random.Random(2)
    fault = _parcels_only(lambda message: [(0, message)] if rng.random() < kept else [])
    cluster = LocalCluster(loaded, tiny_config("cpu"), fault=fault)
    engine = cluster.engine
    opened = engine.submit(
        engine.make_request(prompts((200,))[0], GREEDY, arrival_s=engine.clock.now_s()), lambda delta: None
    )
    while not opened.is_finished:
        engine.step()
    record = opened.record
    assert record is not None
    assert record.transferred_tokens == {0.0: 0, 1.0: 192}.get(kept, record.transferred_tokens)
    timings = record.timings()
    charged_s = sum(one.seconds for one in chunk_times(record, timings) if one.start < one.end)
    assert charged_s == pytest.approx(timings.prefill_s)
    cluster.check()


@pytest.mark.parametrize("gap", [None, "decode-0: this machine was measured with 2 threads, not with 1 thread"])
def test_what_was_expected_of_a_prompt_is_of_both_engines_or_of_none(loaded: LoadedModel, gap: str | None) -> None:
    """Of 57 tokens that took 22.7 ms an answer said that 589 were predicted: what an engine without a profile, which has
    measured nothing yet, takes for its budgets. Where another engine read the prompt, only the last tokens were counted.
    """
    cluster = LocalCluster(loaded, tiny_config("cpu"))
    engine, steps = cluster.engine, []
    engine.book.on_step.append(steps.append)
    request = engine.make_request(prompts((200,))[0], GREEDY, arrival_s=engine.clock.now_s())
    opened = engine.submit(request, lambda delta: None)
    while not opened.is_finished:
        engine.step()
    record = opened.record
    assert record is not None
    reading = [step for step in steps if step.shape.prefill_tokens]
    assert len(reading) > 2, "chunks there, the last one here"
    accountant = Accountant(
        work=TokenWork(linear=1.0, attention=0.0), view=None, ceilings=None, cold_start_s=0.0, cache_block_tokens=None,
        unpredicted=lambda: gap,
    )  # fmt: skip
    account = Account(request=request, usage=record.usage(), timings=record.timings(), record=record)
    said = accountant.timings([account])["diptych"]["predicted"]
    assert said["reason"] == gap
    if gap is None:
        assert said["prefill_ms"] == pytest.approx(1e3 * sum(step.predicted_s for step in reading))
        assert said["decode_ms"] > 0.0
    else:
        assert said["prefill_ms"] is said["decode_ms"] is None
    cluster.check()


def test_a_lost_end_is_not_waited_for(loaded: LoadedModel) -> None:
    """All blocks were there, and the request stood still for the whole lease, as nobody had said that there are no more."""
    lost = lambda message: [] if isinstance(message, Done) else [(0, message)]  # noqa: E731
    cluster = LocalCluster(loaded, tiny_config("cpu"), fault=lost, lease_s=1e6, late_s=0.05)
    got = cluster.llm.generate(prompts((130,)), GREEDY)[0]
    assert got.usage.transferred_tokens == 128
    assert not cluster.reasons("recomputes")
    assert cluster.total("lost_ends") == 1, "it costs time, so it is counted"
    cluster.fault = no_fault
    cluster.llm.generate(prompts((130,), seed=1), GREEDY)
    assert cluster.total("lost_ends") == 1
    cluster.check()


def kill_when(cluster: LocalCluster, victim: str, state: str) -> list[str]:
    """Kill a worker once, as soon as a request is in that state; answers what was killed."""
    killed: list[str] = []

    def watch() -> None:
        worker = cluster.workers.get(victim)
        if killed or worker is None:
            return
        counts, n_tokens = (
            worker.counts(),
            max((len(t) for o in cluster.core._open.values() for t in o.token_ids), default=0),
        )
        is_now = {
            "queued": bool(cluster.core._open),
            "prefilling": counts.core.running > 0 or counts.reading > 0,
            "transferring": counts.received_tokens > 0 or counts.sent_tokens > 0,
            "decoding": n_tokens >= 4,
        }[state]
        if is_now:
            killed.append(victim)
            cluster.kill(victim)
            cluster.start(victim, decodes=victim.startswith("decode"))

    pump = cluster.core._pump
    cluster.core._pump = lambda: (pump(), watch())
    return killed


@pytest.mark.parametrize("state", ["queued", "prefilling", "transferring", "decoding"])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_worker_that_dies_loses_nothing(loaded: LoadedModel, victim: str, state: str, n: int) -> None:
    """The stream goes on with the bits it would have had: no token twice, none missing, none wrong."""
    config = tiny_config("cpu")
    asked, sampling = prompts((5, 40, 97, 130, 200)), replace(SAMPLED, n=n, logprobs=1)
    wanted = LLM(loaded, config).generate(asked, sampling)
    cluster = LocalCluster(loaded, config, decode=2, machine="this")
    killed = kill_when(cluster, victim, state)
    got = cluster.llm.generate(asked, sampling)
    assert killed == [victim]
    assert said(got) == said(wanted)
    for one in got:
        account(one)
    assert cluster.core.workers[cluster.core._number[victim]].n_deaths == 1
    cluster.check()


def test_a_grammar_goes_on_where_it_was(loaded: LoadedModel) -> None:
    """The state of a grammar is nowhere but in the tokens."""
    config = tiny_config("cpu")
    sampling = SamplingParams(
        max_tokens=60, seed=3, structured=StructuredSpec(kind="regex", source="([a-f]{4}-){9}end")
    )
    wanted = LLM(loaded, config).generate(prompts((40,)), sampling)
    cluster = LocalCluster(loaded, config, decode=2)
    kill_when(cluster, "decode-0", "decoding")
    assert said(cluster.llm.generate(prompts((40,)), sampling)) == said(wanted)
    assert cluster.core.moved["decoding"] == 1
    cluster.check()


def test_a_request_that_kills_every_worker_ends_with_an_error(loaded: LoadedModel) -> None:
    """One poisoned request must not take the whole cluster down, worker by worker, for ever."""
    cluster = LocalCluster(loaded, tiny_config("cpu"), prefill=0, decode=2)
    pump = cluster.core._pump

    def die() -> None:
        pump()
        for one in list(cluster.core._open.values()):
            if any(one.token_ids) and one.decoder is not None:
                name = cluster.core.workers[one.decoder].name
                cluster.kill(name)
                cluster.start(name, decodes=True)

    cluster.core._pump = die
    got = cluster.llm.generate(prompts((20,)), GREEDY)[0]
    assert got.choices[0].finish_reason is FinishReason.ERROR
    assert "4 workers died with this request" in str(got.error)
    cluster.core._pump = pump
    cluster.check()


@pytest.mark.parametrize("n_steps", [0, 1, 2, 3, 4, 6, 9, 14])
def test_an_abort_leaves_nothing_behind_anywhere(loaded: LoadedModel, n_steps: int) -> None:
    """A client that leaves while its prompt is read for it elsewhere leaves blocks on two workers."""
    cluster = LocalCluster(loaded, tiny_config("cpu"), machine="this")
    engine = cluster.engine
    opened = [
        engine.submit(engine.make_request(prompt, SAMPLED, arrival_s=engine.clock.now_s()), lambda delta: None)
        for prompt in prompts((40, 200, 130))
    ]
    for _ in range(n_steps):
        engine.step()
    for one in opened:
        engine.abort(one.request.request_id)
    for _ in range(4):
        engine.step()
    cluster.check()
    assert all(worker.counts().core.waiting == 0 for worker in cluster.workers.values())


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_name_that_comes_again_is_another_request(loaded: LoadedModel, end: str) -> None:
    """What the worker had yet to say of the first one was taken for the second's, and ended the door."""
    config = tiny_config("cpu")
    first, second = prompts((20, 33))
    long = replace(GREEDY, max_tokens=60, ignore_eos=True)
    one, wanted = LLM(loaded, config).generate([first, second], long)
    stop = one.choices[0].text[8:12] if end == "stop" else ()
    cluster = LocalCluster(loaded, config, prefill=0)
    engine, worker = cluster.engine, cluster.workers["decode-0"]
    said: list[int] = []

    def ask(prompt: list[int], sampling: SamplingParams, on_delta: Callable[[OutputDelta], None]) -> None:
        now_s = engine.clock.now_s()
        engine.submit(engine.make_request(prompt, sampling, arrival_s=now_s, request_id="same"), on_delta)

    ask(first, replace(long, stop=stop), lambda delta: None)
    for _ in range(6 if end == "abort" else 60):
        if engine.n_open:
            engine.step()
    worker.step()
    late = worker.batch()
    engine.abort("same")
    assert any(isinstance(event, TokenEvent) for event in late.events)
    ask(second, long, lambda delta: said.extend(delta.token_ids))
    cluster.core.deliver("decode-0", late)
    while engine.n_open:
        engine.step()
    assert tuple(said) == wanted.choices[0].token_ids
    cluster.check()
    assert not cluster.core._unheard


def test_a_request_that_no_worker_takes_ends_in_time(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every worker gone nobody woke the door either, and its clients waited for ever."""
    monkeypatch.setattr("diptych.cluster.core.PARK_S", 0.1)
    cluster = LocalCluster(loaded, tiny_config("cpu"), prefill=0)
    cluster.kill("decode-0")
    door = AsyncLLM(loaded, tiny_config("cpu"), engine=cluster.engine)
    door.start()

    async def ask() -> list[FinishReason | None]:
        handle = await door.generate([5, 6, 7], GREEDY)
        return [delta.finish_reason async for delta in handle]

    assert asyncio.run(asyncio.wait_for(ask(), 20)) == [FinishReason.ERROR]
    door.stop()


def test_a_reader_that_did_not_hear_hears_it_with_its_first_parcel(loaded: LoadedModel) -> None:
    """Blocks of a prompt that nobody waits for were held until all of it was read: the word had come before what it stops."""
    unheard: Fault = lambda message: [] if isinstance(message, StopReading) else [(0, message)]  # noqa: E731
    cluster = LocalCluster(loaded, tiny_config("cpu"), fault=unheard)
    engine = cluster.engine
    (prompt,) = prompts((239,))  # five steps
    one = engine.submit(engine.make_request(prompt, SAMPLED, arrival_s=engine.clock.now_s()), lambda delta: None)
    while not cluster.workers["prefill-0"].counts().sent_tokens:
        engine.step()
    engine.abort(one.request.request_id)
    engine.step()
    cluster.fault = no_fault
    engine.step()
    engine.step()
    assert cluster.workers["prefill-0"].counts().reading == 0
    assert cluster.workers["prefill-0"].counts().sent_tokens < 200
    cluster.check()


def test_a_pool_too_small_for_all_serves_all(loaded: LoadedModel) -> None:
    """Blocks that are held for what is to come must not keep what is here from ending."""
    config = tiny_config("cpu", kv_memory_bytes=16 * loaded.model.kv_bytes_per_block(BLOCK))
    asked = prompts((130, 200, 97, 64, 150, 200, 17))
    wanted = LLM(loaded, config).generate(asked, SAMPLED)
    cluster = LocalCluster(loaded, config, prefill=2, lease_s=2.0)
    got = cluster.llm.generate(asked, SAMPLED)
    assert said(got) == said(wanted)
    for one in got:
        account(one)
    cluster.check()


def test_a_higher_priority_is_sooner_where_blocks_are_short(loaded: LoadedModel) -> None:
    """Who waited for blocks to be held was served in order of arrival, whatever its priority."""
    config = tiny_config("cpu", kv_memory_bytes=16 * loaded.model.kv_bytes_per_block(BLOCK))
    for cluster in (LocalCluster(loaded, config), LocalCluster(loaded, config, prefill=0)):
        engine, order = cluster.engine, list[str]()

        def ask(name: str, prompt: list[int], priority: int, engine: Engine = engine, order: list[str] = order) -> None:
            now_s = engine.clock.now_s()
            request = engine.make_request(prompt, GREEDY, arrival_s=now_s, request_id=name, priority=priority)
            engine.submit(request, lambda delta: None if name in order else order.append(name))

        first, *others = prompts((200, 150, 160, 170))
        ask("first", first, 0)
        while not order:
            engine.step()
        for name, prompt, priority in zip(("usual", "lower", "higher"), others, (0, -5, 5), strict=True):
            ask(name, prompt, priority)
        while engine.n_open:
            engine.step()
        assert order == ["first", "higher", "usual", "lower"]
        cluster.check()


def test_the_waiting_line_is_bounded_where_blocks_are_short(loaded: LoadedModel) -> None:
    """What waited for the worker that answers to hold blocks was counted as waiting by nobody, and never refused."""
    config = tiny_config("cpu", kv_memory_bytes=16 * loaded.model.kv_bytes_per_block(BLOCK))
    config = replace(config, scheduler=replace(config.scheduler, max_waiting_tokens=600))
    cluster = LocalCluster(loaded, config)
    engine, sampling = cluster.engine, replace(GREEDY, max_tokens=50, ignore_eos=True)

    def ask() -> None:
        for prompt in prompts((200,) * 20):
            request = engine.make_request(prompt, sampling, arrival_s=engine.clock.now_s())
            engine.submit(request, lambda delta: None)
            for _ in range(3):
                engine.step()

    with pytest.raises(CapacityError, match=r"\d+ tokens are waiting; at most 600 may wait"):
        ask()
    stats = engine.stats()
    assert 0 < stats.waiting < 20
    assert stats.waiting_tokens == 250 * stats.waiting
    while engine.n_open:
        engine.step()
    assert engine.stats().waiting_tokens == 0
    cluster.check()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, replace(SAMPLED, logprobs=1)], ids=["greedy", "sampled"])
def test_a_hundred_prompts_up_to_4096_tokens(tmp_path: Path, sampling: SamplingParams) -> None:
    """Lengths at every distance from the edges of blocks and steps, several at one time, on two readers and two writers."""
    random_model(tmp_path, max_position_embeddings=8192)
    config = tiny_config(
        "cpu",
        max_context_tokens=4200,
        scheduler=SchedulerConfig(max_step_tokens=512, max_running_sequences=16, max_context_tokens=4200),
    )
    model = load(str(tmp_path), config)
    rng = random.Random(7)
    edges = [n * BLOCK + by for n in (1, 2, 3, 8, 31, 32, 33, 64, 100, 128, 200, 255) for by in (-1, 0, 1)]
    lengths = [1, 2, 4095, 4096, *edges, *(rng.randrange(3, 4096) for _ in range(60))]
    asked = prompts(tuple(lengths), seed=9)
    wanted = LLM(model, config).generate(asked, sampling)
    cluster = LocalCluster(model, config, prefill=2, decode=2)
    got = cluster.llm.generate(asked, sampling)
    assert said(got) == said(wanted)
    for one in got:
        account(one)
    cluster.check()


@pytest.mark.parametrize("victim", [None, "decode-0"])
def test_states_are_those_of_one_engine(tiny_dir: Path, victim: str | None) -> None:
    """Embedding models were refused behind workers. A state is drawn of a whole prompt, so nothing of it travels."""
    config = replace(tiny_config("cpu"), task="embed")
    loaded = load(str(tiny_dir), config)
    asked = prompts((5, 40, 97, 130, 200))
    wanted = LLM(loaded, config).embed(asked)
    cluster = LocalCluster(loaded, config, decode=2)
    killed = kill_when(cluster, victim or "nobody", "prefilling")
    got = cluster.llm.embed(asked)
    assert killed == ([] if victim is None else [victim])
    assert [one.vector.tobytes() for one in got] == [one.vector.tobytes() for one in wanted]
    assert not cluster.total("sent_tokens")
    cluster.check()
