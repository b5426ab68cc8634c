"""What `diptych lab simulated` compares, on step times that are known."""

from __future__ import annotations

import pytest

from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab.experiment import Verdict
from diptych.lab.parts import parts_of
from diptych.lab.simulated import SITUATIONS, Compared, Pace, Round, chosen, numbers, simulate
from diptych.metrics import StepRecord

ONE = dict.fromkeys(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"), 1.0)
REQUESTS = SITUATIONS[0].requests(16, capacity_per_s=20.0, vocab_size=1000, seed=3)


def seconds(shape: StepShape) -> float:
    return 1e-3 + 1e-4 * shape.n_tokens


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.name.replace(" ", "_"))
def test_every_load_is_served_to_its_end_on_a_virtual_clock(situation) -> None:
    requests = situation.requests(16, capacity_per_s=20.0, vocab_size=1000, seed=3)
    book = simulate(situation, requests, seconds)
    assert len(book.records) == len(requests)
    assert all(record.is_over for record in book.records.values())
    assert all(value > 0.0 for value in numbers(book).values())


def compared(*rounds: tuple[int, dict, dict], others: float = 0.0, **fields) -> Compared:
    """Rounds of (seed, measured, simulated)."""
    made = [
        Round(seed=seed, measured=measured, simulated=simulated, paced=ONE, others=others)
        for seed, measured, simulated in rounds
    ]
    return Compared(situation=SITUATIONS[0], rounds=made, **fields)


def test_the_verdict_tells_medians_and_tails_and_decisions() -> None:
    """A median of 4 % holds, one of 6 % does not; a tail may be 15 % off; one other decision undoes all."""
    near = compared((0, ONE, ONE | {"ttft_p50": 1.04, "tpot_p99": 1.14}))
    assert near.verdict() is Verdict.HOLDS
    assert near.error("ttft_p50") == pytest.approx(0.04)
    assert compared((0, ONE, ONE | {"tpot_p50": 0.94})).verdict() is Verdict.FAILS
    near.differences.append("recorded ... simulated ...")
    assert near.verdict() is Verdict.FAILS


def test_a_simulation_is_held_against_the_run_of_its_own_requests() -> None:
    """Medians of each side were compared: of three loads that differ, runs 10 % slower than said came out as right."""
    loads = [
        (seed, ONE | {"ttft_p50": 1.1 * said}, ONE | {"ttft_p50": said}) for seed, said in enumerate((1.0, 1.1, 2.0))
    ]
    assert compared(*loads).error("ttft_p50") == pytest.approx(1 / 1.1 - 1.0)


def test_two_runs_of_the_same_requests_say_what_no_prediction_can_be_held_to() -> None:
    runs = [(0, ONE, ONE), (0, ONE | {"ttft_p99": 1.2}, ONE), (1, ONE | {"ttft_p99": 5.0}, ONE)]
    assert compared(*runs).apart("ttft_p99") == pytest.approx(0.2)
    assert compared(runs[0], runs[2]).apart("ttft_p99") is None


def test_a_disturbed_machine_gives_no_verdict() -> None:
    """What ran beside other programs says nothing of the prediction; other decisions are wrong whatever ran."""
    runs = [(0, ONE, ONE)] * 3
    assert compared(*runs, others=0.2).verdict() is Verdict.WITHHELD
    assert compared(*runs, others=0.2, differences=["recorded ..."]).verdict() is Verdict.FAILS
    assert compared(*runs, others=0.01).verdict() is Verdict.HOLDS


def test_loads_are_chosen_by_a_part_of_their_name() -> None:
    assert [one.name for one in chosen(["open loop", "preemption"])] == [
        "open loop at 0.5", "open loop at 0.9", "open loop at 1.5", "preemption"
    ]  # fmt: skip
    assert chosen([]) == list(SITUATIONS)
    with pytest.raises(ConfigError, match="no load is called 'opened'"):
        chosen(["opened"])


def test_the_parts_of_a_run_are_all_of_its_time_with_work() -> None:
    """Kernels and host of every step and what lies between two of them; the wait for a prompt is nobody's."""
    shapes = [StepShape.prefill(batch=1, new_tokens=10), *[StepShape.decode(batch=1, context_tokens=11)] * 2]
    begins, ends = (0.0, 0.005, 0.010), (0.004, 0.008, 0.013)
    steps = [
        StepRecord(i, begin_s, end_s, shape, None, [], (), 0.002, 0.0)
        for i, (begin_s, end_s, shape) in enumerate(zip(begins, ends, shapes, strict=True))
    ]
    steps.append(steps[0]._replace(begin_s=1.0, end_s=1.004))
    parts = parts_of(steps, lambda shape: 0.0035, lambda shape: 0.001)
    prefill, decode = parts.phases[Phase.PREFILL], parts.phases[Phase.DECODE]
    assert (prefill.steps, decode.steps) == (2, 2)
    assert parts.total.measured_s == pytest.approx(0.013 + 0.004)
    assert decode.kernels.measured_s == pytest.approx(0.004)
    assert decode.host.measured_s == pytest.approx(0.004)  # 5 and 3 ms, of which 2 are the kernels'
    assert prefill.kernels.error == pytest.approx(0.0025 / 0.002 - 1.0)
    assert prefill.host.predicted_s == pytest.approx(0.002)


def test_a_pace_is_learned_by_phase_and_believed_from_a_few_steps_on() -> None:
    """A machine that takes a third longer to decode than its profile says does so in the next run, too; one prompt that took
    four times as long tells nothing of prompts.
    """
    decode, prompt = StepShape.decode(batch=2, context_tokens=50), StepShape.prefill(batch=1, new_tokens=40)
    pace, steps, now_s = Pace(seconds), [], 0.0
    for shape, times in ((decode, 4 / 3), (decode, 4 / 3), (prompt, 4.0), *[(decode, 4 / 3)] * 3):
        steps.append(StepRecord(0, now_s, now_s + times * seconds(shape), shape, None, [], (), 0.0, 0.0))
        now_s = steps[-1].end_s
    assert pace.learn(steps) == {Phase.DECODE: pytest.approx(4 / 3)}
    assert pace.predict_s(decode) == pytest.approx(4 / 3 * seconds(decode))
    assert pace.predict_s(prompt) == pytest.approx(seconds(prompt))
    slower = simulate(SITUATIONS[0], REQUESTS, seconds, time_s=pace.predict_s)
    usual = simulate(SITUATIONS[0], REQUESTS, seconds)
    assert numbers(slower)["tpot_p50"] == pytest.approx(4 / 3 * numbers(usual)["tpot_p50"])
    assert numbers(slower)["ttft_p50"] == pytest.approx(numbers(usual)["ttft_p50"])


def test_the_price_of_steps_is_told_apart_from_what_is_made_of_it() -> None:
    wrong = Round(seed=0, measured=ONE, simulated=dict.fromkeys(ONE, 0.8), paced=ONE, steps={Phase.DECODE: 1.25})
    found = Compared(situation=SITUATIONS[0], rounds=[wrong])
    assert (found.verdict(), found.verdict(is_paced=True)) == (Verdict.FAILS, Verdict.HOLDS)
    assert found.step_error(Phase.DECODE) == pytest.approx(-0.2)
    assert found.step_error(Phase.PREFILL) is None
