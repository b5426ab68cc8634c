"""What `diptych lab simulated` compares, on step times that are known."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice
from types import SimpleNamespace

import pytest

from diptych.compute.runner import random_model
from diptych.cost.calibration import Host
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab.calibrate import EMPTY_MODEL
from diptych.lab.experiment import Verdict
from diptych.lab.ladder import SEQUENCES, SIZES, WOKEN_TOKENS, Climb, Ladder, Level
from diptych.lab.parts import parts_of
from diptych.lab.simulated import SITUATIONS, Compared, Round, chosen, numbers, simulate
from diptych.metrics import StepRecord

ONE = dict.fromkeys(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"), 1.0)
REQUESTS = SITUATIONS[0].requests(16, capacity_per_s=20.0, vocab_size=1000, seed=3)


def seconds(shape: StepShape) -> float:
    return 1e-3 + 1e-4 * shape.n_tokens


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.name.replace(" ", "_"))
def test_every_load_is_served_to_its_end_on_a_virtual_clock(situation) -> None:
    requests = situation.requests(16, capacity_per_s=20.0, vocab_size=1000, seed=3)
    book = simulate(situation, requests, seconds, wake_s=0.0)
    assert len(book.records) == len(requests)
    assert all(record.is_over for record in book.records.values())
    assert all(value > 0.0 for value in numbers(book).values())


def compared(*rounds: tuple[int, dict, dict], others: float = 0.0, **fields) -> Compared:
    """Rounds of (seed, measured, simulated)."""
    made = [
        Round(seed=seed, measured=measured, simulated=simulated, by_profile=ONE, others=others)
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


PROFILE = Host(step_s=1e-4, sequence_s=1e-5)


class Priced:
    """A profile's prices: 1 ms and a tenth for each row, the host's time in it."""

    calibration = SimpleNamespace(host=PROFILE)

    def predict_s(self, shape: StepShape) -> float:
        return seconds(shape) + PROFILE.time_s(shape)


def climb(*, kernels, host: Host, wake_s: float = 0.0) -> Climb:
    """What a ladder sees where kernels take `kernels(shape)` times the profile's time."""
    shapes = []
    for n, size in enumerate(islice(cycle(SIZES), SEQUENCES)):
        decode = StepShape.decode(batch=n, context_tokens=100) if n else None
        prompt = StepShape.prefill(batch=1, new_tokens=size - n)
        shapes += [prompt if decode is None else decode.plus(prompt)]
        shapes += [StepShape.decode(batch=n + 1, context_tokens=100)] * 8
    woken = StepShape.prefill(batch=1, new_tokens=WOKEN_TOKENS)

    def kernels_s(shape: StepShape) -> float:
        return kernels(shape) * seconds(shape)

    def rest_s(shape: StepShape, after: StepShape) -> float:
        """What a request costs that comes stands behind the step before it: a third of what its prompt costs in all."""
        known_s = host.time_s(shape) - (host.prompt_s / 3 if shape.prefill_tokens else 0.0)
        return known_s + (host.prompt_s / 3 if after.prefill_tokens else 0.0)

    return Climb(
        steps=tuple(
            (shape, kernels_s(shape) + rest_s(shape, after), kernels_s(shape))
            for shape, after in zip(shapes, [*shapes[1:], shapes[-1]], strict=True)
        ),
        woken_s=(kernels_s(woken) + host.time_s(woken) + wake_s,) * 3,
    )


def test_a_ladder_says_what_steps_of_each_size_take_right_now() -> None:
    """Decode a third longer than the profile says and prompts a fifth shorter, and a host of its own: the prices are those, for
    sizes between those that were climbed, too. One factor for each phase missed small prompts by 8 %.
    """
    host = Host(step_s=8e-5, sequence_s=1.3e-5, prompt_s=2e-4, prompt_token_s=5e-7)

    def kernels(shape: StepShape) -> float:
        return 0.8 if shape.prefill_tokens else 1.0 + shape.decode_tokens / 48

    level = Level(Priced(), [climb(kernels=kernels, host=host, wake_s=4e-4)] * 2)
    for name in ("step_s", "sequence_s", "prompt_s", "prompt_token_s"):
        assert getattr(level.host, name) == pytest.approx(getattr(host, name), rel=1e-6)
    assert level.host.wake_s == pytest.approx(4e-4)
    for shape in (
        StepShape.decode(batch=16, context_tokens=300),
        StepShape.decode(batch=3, context_tokens=30),
        StepShape.prefill(batch=1, new_tokens=300),
        StepShape.decode(batch=4, context_tokens=64).plus(StepShape.prefill(batch=1, new_tokens=5)),
    ):
        assert level.predict_s(shape) == pytest.approx(kernels(shape) * seconds(shape) + host.time_s(shape), rel=1e-3)


def test_an_idle_engine_is_woken_once() -> None:
    """Behind a second without work the first step takes longer; of the loads before, only the open one had such steps. The
    simulator knew of none: in the open loop at half of the capacity the first token came out 5 % early.
    """
    requests = [replace(one, arrival_s=float(i)) for i, one in enumerate(REQUESTS[:4])]
    situation = SITUATIONS[3]
    plain, woken = (numbers(simulate(situation, requests, seconds, wake_s=wake_s)) for wake_s in (0.0, 2e-3))
    assert woken["ttft_p50"] - plain["ttft_p50"] == pytest.approx(2e-3)
    assert woken["tpot_p50"] == pytest.approx(plain["tpot_p50"])
    plain, woken = (numbers(simulate(SITUATIONS[0], REQUESTS, seconds, wake_s=wake_s)) for wake_s in (0.0, 2e-3))
    assert woken["ttft_p50"] == pytest.approx(plain["ttft_p50"])


def test_the_real_engine_climbs() -> None:
    """Every size beside few and many sequences, nothing left open, and prices that are near what its own steps took."""
    with closing(random_model(EMPTY_MODEL, ComputeConfig(), seed=0)) as model:
        ladder = Ladder(model, Priced())
        first, second = ladder.climb(), ladder.climb()
    assert [shape for shape, *_ in first.steps] == [shape for shape, *_ in second.steps]
    assert [shape.n_tokens for shape, *_ in first.steps if shape.prefill_tokens] == [*SIZES, *SIZES, *SIZES[:2]]
    assert first.steps[-1][0].decode_tokens == SEQUENCES
    level = Level(Priced(), [first, second])
    assert all(level.predict_s(shape) > 0.0 for shape, *_ in first.steps)
    assert level.host.step_s > 0.0


def test_the_price_of_steps_is_told_apart_from_what_is_made_of_it() -> None:
    """A profile of an hour ago that says 0.8 of what steps take fails; what is simulated by the ladder of this minute holds."""
    parts = parts_of(
        [StepRecord(0, 0.0, 0.01, StepShape.decode(batch=1, context_tokens=9), None, [], (), 0.01, 0.0)],
        lambda shape: 0.008,
        lambda shape: 0.0,
    )
    one = Round(seed=0, measured=ONE, simulated=ONE, by_profile=dict.fromkeys(ONE, 0.8), profile_parts=parts)
    found = Compared(situation=SITUATIONS[0], rounds=[one])
    assert (found.verdict(), found.verdict(by_profile=True)) == (Verdict.HOLDS, Verdict.FAILS)
    assert found.parts(by_profile=True).phases[Phase.DECODE].total.error == pytest.approx(-0.2)
