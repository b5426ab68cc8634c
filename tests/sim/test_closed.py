"""A closed loop's schedule, priced, against a simulation with the same prices."""

from __future__ import annotations

import random

import pytest

from diptych.cost.fitting.recipes import Scheduling
from diptych.cost.setup import setup_of
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.events import Event, FinishEvent
from diptych.ground.shape import StepShape
from diptych.metrics import RequestRecord
from diptych.sim.closed import BLOCK_TOKENS, ClosedLoop, Schedule, Times, schedule_of
from diptych.sim.engine import SimulatedEngine
from diptych.sim.load import request_of
from diptych.workload import LengthRange, WorkloadItem


def simulated(loop: ClosedLoop, predict_s) -> list[RequestRecord]:
    """The same clients, with every step as long as predicted while the loop runs."""
    ended: list[str] = []

    def note(events: list[Event]) -> None:
        ended.extend(event.request_id for event in events if isinstance(event, FinishEvent))

    longest = loop.input.high + loop.output.high
    config = SchedulerConfig(
        max_step_tokens=loop.scheduling.step_tokens, max_running_sequences=loop.streams, max_context_tokens=longest,
        max_waiting_tokens=(loop.streams + 1) * longest, enable_prefix_cache=False,
        prefills_alone=loop.scheduling.prefills_alone,
    )  # fmt: skip
    kv_tokens = loop.kv_tokens or loop.streams * (longest + BLOCK_TOKENS)
    blocks = BlockConfig(n_blocks=-(-kv_tokens // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS)
    engine = SimulatedEngine(config, blocks, predict_s=predict_s, on_events=note)
    rng, n_sent = random.Random(f"closed loop {loop.seed}"), 0

    def send(n: int) -> int:
        n = min(n, loop.n_requests - n_sent)
        for number in range(n_sent, n_sent + n):
            prompt, output = loop.input.draw(rng), loop.output.draw(rng)
            item = WorkloadItem(index=number, at_s=0.0, prompt_tokens=prompt, output_tokens=output)
            engine.stepper.submit(request_of(item, engine.clock.now_s()))
        return n

    n_sent += send(loop.streams)
    seen = 0
    while engine.stepper.step():
        n_new, seen = len(ended) - seen, len(ended)
        n_sent += send(n_new)
    return list(engine.book.records.values())


@pytest.mark.parametrize(
    ("kv_tokens", "scheduling"),
    [
        (None, Scheduling(step_tokens=2048)),
        (6400, Scheduling(step_tokens=2048)),
        (None, Scheduling(step_tokens=2048, prefills_alone=True)),
    ],
)
def test_what_a_schedule_says_is_what_a_simulation_does(kv_tokens: int | None, scheduling: Scheduling) -> None:
    """The schedule is made without any prices; if decisions depended on them, or steps were lumped too coarsely, the two
    would part. With 6,400 tokens of KV, requests wait for blocks.
    """
    loop = ClosedLoop(
        streams=12,
        input=LengthRange(low=400, high=900),
        output=LengthRange(low=60, high=140),
        n_requests=48,
        of_each=4,
        scheduling=scheduling,
        kv_tokens=kv_tokens,
    )
    predict_s = setup_of("llama-3.1-8b", "h100-80gb-sxm").model_of_time().predict_s
    times = schedule_of(loop).times(predict_s)
    records = simulated(loop, predict_s)
    assert len(records) == 48
    mean_ttft_s = sum(one.timings().ttft_s for one in records) / 48
    mean_tpot_s = sum(one.timings().tpot_s for one in records) / 48
    assert times.ttft_s == pytest.approx(mean_ttft_s, rel=0.03)
    assert times.tpot_s == pytest.approx(mean_tpot_s, rel=0.01)
    end_s = max(one.end_s for one in records)
    assert times.output_tokens_per_s == pytest.approx(sum(one.output_tokens for one in records) / end_s, rel=0.01)


def test_the_first_of_many_requests_weigh_as_in_the_published_run() -> None:
    """All streams begin at once, so the first requests wait longest; 4 of each are simulated, and published runs had 10."""
    loop = ClosedLoop(
        streams=32, input=LengthRange(low=1024, high=1024), output=LengthRange(low=50, high=90), n_requests=128
    )
    predict_s = setup_of("llama-3.1-8b", "h100-80gb-sxm").model_of_time().predict_s
    few = schedule_of(
        ClosedLoop(**{name: getattr(loop, name) for name in ("streams", "input", "output", "n_requests")}, of_each=4)
    )
    assert schedule_of(loop).times(predict_s).ttft_s < few.times(predict_s).ttft_s


def test_a_request_of_each_stream_is_the_whole_run() -> None:
    """The first wave counted as a tenth of a run whose rest was nobody's: TTFT and TPOT came out ten times too short."""
    loop = ClosedLoop(streams=4, input=LengthRange(low=64, high=64), output=LengthRange(low=5, high=5), n_requests=4)
    assert schedule_of(loop).times(second_each) == Times(1.0, 1.0, 4.0)


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="one request takes 1100"):
        schedule_of(
            ClosedLoop(
                streams=1,
                input=LengthRange(low=1000, high=1000),
                output=LengthRange(low=100, high=100),
                n_requests=1,
                kv_tokens=640,
            )
        )


LENGTHS = LengthRange(low=40, high=60)


def schedule(**options: object) -> Schedule:
    """Of eight streams whose answers are of different lengths."""
    loop = ClosedLoop(
        streams=8, input=LENGTHS, output=LENGTHS, n_requests=32, of_each=4, scheduling=Scheduling(**options)
    )
    return schedule_of(loop)


def second_each(shape: StepShape) -> float:
    return 1.0


def test_prompts_alone_mix_with_no_decode_and_come_first() -> None:
    """SGLang's policy: nobody reads and writes in one step, and a new prompt waits for at most the step that runs."""
    alone = schedule(prefills_alone=True)
    assert all(shape.decode_tokens in (0, shape.n_tokens) for shape in alone.kinds)
    mixed = schedule()
    assert any(0 < shape.decode_tokens < shape.n_tokens for shape in mixed.kinds)
    assert alone.times(second_each).ttft_s == pytest.approx(1.0, abs=0.1)
    assert alone.times(second_each).tpot_s > mixed.times(second_each).tpot_s  # decode waits instead


def test_a_scheduler_that_looks_rarely_lets_requests_wait_half_the_time_between() -> None:
    """SGLang's `--scheduler-recv-interval`: of 20 steps, those who come while others decode wait 10 on average."""
    often, rarely = schedule(prefills_alone=True), schedule(prefills_alone=True, poll_steps=20)
    first_wave = 1 / 4  # comes at once, to an engine that is idle
    waited = rarely.times(second_each).ttft_s - often.times(second_each).ttft_s
    assert waited == pytest.approx(10 * (1 - first_wave), rel=0.4)


def test_one_that_looks_rarely_looks_sooner_where_enough_have_come() -> None:
    """TensorRT-LLM's groups of attention-data parallel start prompts when each has one, and else every so many steps."""
    often, rarely, sooner, never = (
        schedule(**options)
        for options in (
            {},
            {"poll_steps": 40},
            {"poll_steps": 40, "poll_prompts": 2},
            {"poll_steps": 40, "poll_prompts": 9},
        )
    )
    assert never == rarely
    waits = [one.times(second_each).ttft_s for one in (often, sooner, rarely)]
    assert waits == sorted(waits)
    assert waits[0] < 0.8 * waits[1] < 0.8 * 0.8 * waits[2]


def test_prompts_wait_for_others_until_there_are_enough() -> None:
    """TensorRT-LLM's `batch_wait_timeout_iters`: 15 steps, or until so many tokens have come together."""
    at_once, gathered = schedule(), schedule(gather_steps=15, gather_tokens=10_000)
    soon_enough = schedule(gather_steps=15, gather_tokens=1)
    assert soon_enough == at_once
    waited = gathered.times(second_each).ttft_s - at_once.times(second_each).ttft_s
    assert 4.0 < waited < 15.0


def test_of_a_limit_of_running_requests_the_others_wait_whole_answers() -> None:
    """What TensorRT-LLM does where KV for whole answers is short."""
    assert schedule(max_running=4).times(second_each).ttft_s > 20.0
    assert max(shape.n_sequences for shape in schedule(max_running=4).kinds) == 4


def test_who_comes_waits_for_the_steps_that_are_launched() -> None:
    """The engine does not wait for its clients: in what it plans ahead, nobody new can be. An idle one starts at once."""
    ahead, at_once = (schedule(ahead_steps=steps).times(second_each).ttft_s for steps in (2, 0))
    assert ahead - at_once == pytest.approx(2 * 3 / 4, abs=0.25)
    alone = ClosedLoop(streams=1, input=LENGTHS, output=LENGTHS, n_requests=4, scheduling=Scheduling(ahead_steps=2))
    assert schedule_of(alone).times(second_each).ttft_s == 1.0


def test_streams_of_one_length_come_few_at_once_and_spread_over_the_steps() -> None:
    """All prompts of the first wave stand in one step. Those who end together come two by two, and stay apart from then on."""
    equal = LengthRange(low=50, high=50)
    marching, coming = (
        schedule_of(
            ClosedLoop(streams=8, input=equal, output=equal, n_requests=80, scheduling=Scheduling(at_once=places))
        )
        for places in (None, 2)
    )
    assert {shape.prefill_tokens for shape in marching.kinds} == {0, 8 * 50}
    assert {shape.prefill_tokens for shape in coming.kinds} == {0, 8 * 50, 2 * 50}
    assert coming.output_tokens == marching.output_tokens == 80 * 50
    # one step for the prompt; those who ended with the first wave waited 0 to 3 more, once
    assert coming.times(second_each).ttft_s == pytest.approx(1.0 + 1.5 * 0.8 / 8, abs=0.01)
