"""One request's minutes run again with one thing changed, on an engine whose step times are known exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder
from diptych.cost.setup import setup_of
from diptych.ground.clock import VirtualClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.sim import counterfactual
from diptych.sim.counterfactual import Change, Counterfactual, Machine, Minutes, times_of
from diptych.sim.executor import PredictedExecutor
from diptych.sim.journal import BlockNames, head_line, journal_minutes, request_line, step_line
from diptych.sim.recorded import minutes_of
from diptych.stepper import Stepper, serve

LONG = tuple(range(5000, 5900))


def seconds(shape: StepShape) -> float:
    """2 ms a step, 0.1 ms a row, 1 us for each position that decode reads."""
    return 2e-3 + 1e-4 * shape.n_tokens + 1e-6 * shape.decode_context_tokens


def request(name: str, tokens: tuple[int, ...], *, at_s: float, writes: int = 30) -> Request:
    sampling = SamplingParams(max_tokens=writes, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=tokens, sampling=sampling, arrival_s=at_s)


def recorded(requests: list[Request], **settings: object) -> Minutes:
    """What a recording of an engine says whose steps take `seconds`."""
    clock = VirtualClock()
    config = SchedulerConfig(**{"max_step_tokens": 2048, "max_running_sequences": 8} | settings)
    core = EngineCore(config, BlockConfig(n_blocks=512, block_tokens=16), model_revision="x", predict_s=seconds)
    recorder = Recorder(core)
    stepper = Stepper(recorder, PredictedExecutor(seconds, clock), clock, fold=lambda events: None)
    serve(stepper, requests, wait=clock.advance)
    return minutes_of(iter(recorder.lines()))


def crowd() -> list[Request]:
    """Four streams; a long prompt comes among them, then the same prompt once more."""
    streams = [request(f"s{i}", tuple(range(100 * i, 100 * i + 40)), at_s=0.01 * i, writes=200) for i in range(1, 5)]
    return [*streams, request("long", LONG, at_s=0.5), request("again", (*LONG, 7, 8), at_s=0.9)]


def test_without_a_change_the_minutes_come_out_as_they_were() -> None:
    """The model learned from the steps is all that stands between the two; were requests, tokens or the cache not the
    same, queues and prefix hits would differ.
    """
    minutes = recorded(crowd())
    for past in minutes.requests:
        again = Counterfactual(minutes, past.request.request_id).outcome()
        assert again.cached_tokens == past.cached_tokens
        for name in ("ttft_s", "tpot_s"):
            assert getattr(again.seen, name) == pytest.approx(getattr(past.seen, name), rel=0.05), (
                past.request.request_id
            )
    assert minutes.find("again").cached_tokens == 896


def test_what_an_earlier_request_found_was_read_by_a_later_one_of_more_priority() -> None:
    """The cache was filled in order of arrival, so that the one that read it all found it there."""
    low, high = request("low", LONG, at_s=0.01), replace(request("high", LONG, at_s=0.02), priority=5)
    minutes = recorded([request("stream", (1, 2, 3), at_s=0.0), low, high], max_running_sequences=1)
    assert [minutes.find(name).cached_tokens for name in ("low", "high")] == [896, 0]
    for name in ("low", "high"):
        past, again = minutes.find(name), Counterfactual(minutes, name).outcome()
        assert again.cached_tokens == past.cached_tokens
        assert again.seen.ttft_s == pytest.approx(past.seen.ttft_s, rel=0.05)


def test_a_prompt_whose_log_probabilities_are_wanted_is_read_again(tmp_path: Path) -> None:
    """It is found in no cache, and was when it was run again, also by a server's journal."""
    first, second = request("first", LONG, at_s=0.0, writes=200), request("second", LONG, at_s=0.2)
    minutes = recorded([first, replace(second, sampling=replace(second.sampling, prompt_logprobs=0))])
    assert Counterfactual(minutes, "second").outcome().cached_tokens == minutes.find("second").cached_tokens == 0
    names, begin_s, lines = BlockNames(b"k" * 32, 16), 0.0, [head_line(minutes.config, minutes.blocks)]
    for shape, time_s in minutes.steps:
        lines.append(step_line(begin_s, begin_s + time_s, shape))
        begin_s += time_s
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join([*lines, *(request_line(past, names) for past in minutes.requests)]) + "\n", "utf-8")
    assert Counterfactual(*journal_minutes(path, "second")).outcome().cached_tokens == 0


def test_every_choice_ends_where_it_did() -> None:
    """One that a stop string or a grammar had ended went on for as long as the longest beside it."""
    clock = VirtualClock()
    core = EngineCore(SchedulerConfig(), BlockConfig(n_blocks=512), model_revision="x", predict_s=seconds)
    recorder = Recorder(core)
    stepper = Stepper(recorder, PredictedExecutor(seconds, clock), clock, fold=lambda events: None)
    many = request("many", (1, 2, 3), at_s=0.0, writes=200)
    stepper.submit(replace(many, sampling=replace(many.sampling, n=16)))
    for _ in range(10):
        stepper.step()
    for index in range(1, 16):
        recorder.finish("many", index, clock.now_s(), reason=FinishReason.STOP)
    while stepper.step():
        pass
    minutes = minutes_of(iter(recorder.lines()))
    assert {len(tokens) for tokens in minutes.find("many").outputs} == {200, 9}
    again = Counterfactual(minutes, "many").outcome()
    assert again.seen.tpot_s == pytest.approx(minutes.find("many").seen.tpot_s, rel=0.02)


def test_one_thing_is_changed_and_the_scheduler_answers() -> None:
    minutes = recorded(crowd())
    long, stream = Counterfactual(minutes, "long"), Counterfactual(minutes, "s1")
    before = long.outcome().seen
    cached = long.outcome(Change.parse("cached"))
    assert cached.cached_tokens == 896
    assert cached.seen.ttft_s < 0.2 * before.ttft_s
    chunked = long.outcome(Change.parse("chunk=128")).seen
    assert chunked.ttft_s > before.ttft_s  # eight steps, each with the streams' rows
    budget = long.outcome(Change.parse("stall-budget=10ms")).seen
    assert budget.ttft_s > chunked.ttft_s
    apart = stream.outcome(Change.parse("pools")).seen
    assert apart.tpot_s < stream.outcome().seen.tpot_s  # nobody's prefill stands in its way
    again = Counterfactual(minutes, "again")
    assert again.outcome(Change.parse("pools")).seen.ttft_s > 0.0


def test_pools_answer_for_the_request_that_was_asked_about() -> None:
    """The reading engine was run until the last of all was over: where that one is refused, nobody else had an answer."""
    minutes = recorded(crowd())
    narrow = replace(minutes, config=replace(minutes.config, max_context_tokens=902))  # what the last one has
    found, whole = (Counterfactual(some, "long").outcome(Change.parse("pools")).seen for some in (narrow, minutes))
    assert (found.queue_s, found.ttft_s) == (whole.queue_s, whole.ttft_s)
    assert Counterfactual(minutes, "s1").outcome(Change.parse("pools")).seen.ttft_s < 0.5 * whole.ttft_s
    with pytest.raises(ConfigError, match="'again' could not be served"):
        Counterfactual(narrow, "again").outcome(Change.parse("pools"))


def test_pools_follow_every_choice_of_a_request() -> None:
    """With a first choice of one token beside a longer one, nothing was handed over and a StopIteration came out."""
    minutes = recorded(crowd())
    long = minutes.find("long")
    sampling = replace(long.request.sampling, n=2, stop_token_ids=(7,))
    twice = replace(long, request=replace(long.request, sampling=sampling), outputs=((7,), long.outputs[0]))
    requests = tuple(twice if past is long else past for past in minutes.requests)
    found = Counterfactual(replace(minutes, requests=requests), "long").outcome(Change.parse("pools")).seen
    alone = Counterfactual(minutes, "long").outcome(Change.parse("pools")).seen
    assert found.tpot_s == pytest.approx(alone.tpot_s, rel=0.1)


def test_behind_a_hand_off_every_token_is_a_step() -> None:
    """The last token of what was handed over is computed where it goes on, and its cache has to come there first: both were
    free, and an answer of two tokens had a TPOT of 0.
    """
    minutes = recorded([*crowd(), request("short", (1, 2, 3), at_s=30.0, writes=2)])
    found = Counterfactual(minutes, "short").outcome(Change.parse("pools")).seen
    seen = minutes.find("short").seen
    assert found.tpot_s == pytest.approx(seen.tpot_s, rel=0.1)
    assert found.ttft_s == pytest.approx(seen.ttft_s + seen.tpot_s, rel=0.1)
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    minutes = replace(minutes, machine=Machine(model=setup.model, quant=setup.quant, kv=setup.kv))
    over_a_link = Counterfactual(minutes, "short").outcome(Change.parse("pools")).seen
    moved_s = 16 * 131_072 / counterfactual.LINK_BYTES_PER_S  # a block
    assert over_a_link.ttft_s == pytest.approx(found.ttft_s + moved_s, rel=1e-6)


def test_another_device_is_priced_by_the_planner() -> None:
    minutes = recorded(crowd())
    with pytest.raises(ConfigError, match="does not say which model"):
        Counterfactual(minutes, "long").outcome(Change.parse("device=h100-80gb-sxm"))
    setup = setup_of("llama-3.1-8b", "a100-80gb-sxm")
    minutes = replace(minutes, machine=Machine(model=setup.model, quant=setup.quant, kv=setup.kv))
    asked = Counterfactual(minutes, "long")
    fast, slow = (asked.outcome(Change.parse(f"device={name}")).seen for name in ("h100-80gb-sxm", "l4"))
    assert fast.ttft_s < slow.ttft_s
    assert fast.tpot_s < slow.tpot_s


def test_on_another_device_a_request_comes_when_its_software_would_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of("llama-3.1-8b", "h100-80gb-sxm")
    minutes = recorded([request("only", LONG, at_s=0.5)])
    minutes = replace(minutes, machine=Machine(model=setup.model, quant=setup.quant, kv=setup.kv))

    def ttft_s(request_s: float) -> float:
        calibration = replace(setup.calibration, request_s=request_s)
        monkeypatch.setattr(counterfactual, "find_hardware", lambda name, **_: (setup.hardware, calibration))
        found = Counterfactual(minutes, "only").outcome(Change(kind="device", name="h100-80gb-sxm"))
        assert found.seen.ttft_s is not None
        assert ("its queue has 250 ms between client and scheduler" in found.note) == (request_s > 0.0)
        return found.seen.ttft_s

    assert ttft_s(0.25) == pytest.approx(ttft_s(0.0) + 0.25)


def test_what_stood_in_the_cache_before_the_minutes_stands_there_again() -> None:
    """The minutes begin somewhere: a prompt whose prefix an older, forgotten request had left would be read whole."""
    minutes = recorded(crowd())
    kept = replace(minutes, requests=tuple(p for p in minutes.requests if p.request.request_id != "long"))
    again = Counterfactual(kept, "again").outcome()
    assert again.cached_tokens == 896
    assert again.seen.ttft_s == pytest.approx(minutes.find("again").seen.ttft_s, rel=0.2)


def test_a_recording_with_a_stall_budget_is_run_again() -> None:
    minutes = recorded(crowd(), stall_budget_s=0.01)
    free = Counterfactual(minutes, "long").outcome(Change.parse("stall-budget=1s")).seen
    assert free.ttft_s < minutes.find("long").seen.ttft_s


def test_a_step_lasts_until_the_next_one_where_there_was_work() -> None:
    """What the host does between two steps is part of every token's time; an idle engine's pause is not."""
    decode, prefill = StepShape.decode(batch=1, context_tokens=9), StepShape.prefill(batch=1, new_tokens=9)
    steps = [(0.0, 1.0, prefill), (1.5, 2.0, decode), (7.0, 8.0, prefill)]
    assert times_of(steps) == ((prefill, 1.5), (decode, 0.5), (prefill, 1.0))
    assert times_of([]) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faster", "cannot change 'faster'"),
        ("chunk", "cannot change 'chunk'"),
        ("cached=1", "cannot change"),
        ("chunk=-4", "must be a number of tokens"),
        ("stall-budget=x", "stall budget"),
        ("device=h1000", "h1000"),
    ],
)
def test_a_change_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Change.parse(text)


def test_minutes_that_do_not_tell_enough_are_refused() -> None:
    minutes = recorded(crowd())
    with pytest.raises(ConfigError, match="no request 'nobody'"):
        Counterfactual(minutes, "nobody")
    with pytest.raises(ConfigError, match="hold 3 steps; at least 12"):
        Counterfactual(replace(minutes, steps=minutes.steps[:3]), "long")
