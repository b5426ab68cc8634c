"""What `diptych lab simulated` compares, on step times that are known."""

from __future__ import annotations

import pytest

from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab.simulated import SITUATIONS, Compared, Pace, numbers, simulate

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


def test_the_verdict_tells_medians_and_tails_and_decisions() -> None:
    """A median of 4 % holds, one of 6 % does not; a tail may be 15 % off; one other decision undoes all."""
    one = dict.fromkeys(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"), 1.0)
    near = Compared(
        situation=SITUATIONS[0], measured=[one, one], simulated=[one | {"ttft_p50": 1.04, "tpot_p99": 1.14}]
    )
    assert near.holds
    assert near.error("ttft_p50") == pytest.approx(0.04)
    far = Compared(situation=SITUATIONS[0], measured=[one], simulated=[one | {"tpot_p50": 0.94}])
    assert not far.holds
    near.differences.append("recorded ... simulated ...")
    assert not near.holds
    apart = Compared(situation=SITUATIONS[0], measured=[one, one | {"ttft_p50": 1.2}, one], simulated=[one])
    assert apart.spread("ttft_p50") == pytest.approx(0.2)


def test_a_pace_is_learned_by_phase_and_believed_from_a_few_steps_on() -> None:
    """A machine that takes a third longer to decode than its profile says does so in the next run, too; one prompt that took
    four times as long tells nothing of prompts.
    """
    decode, prompt = StepShape.decode(batch=2, context_tokens=50), StepShape.prefill(batch=1, new_tokens=40)
    pace, steps, now_s = Pace(seconds), [], 0.0
    for shape, times in ((decode, 4 / 3), (decode, 4 / 3), (prompt, 4.0), *[(decode, 4 / 3)] * 3):
        steps.append((now_s, now_s + times * seconds(shape), shape))
        now_s = steps[-1][1]
    assert pace.learn(steps) == {Phase.DECODE: pytest.approx(4 / 3)}
    assert pace.predict_s(decode) == pytest.approx(4 / 3 * seconds(decode))
    assert pace.predict_s(prompt) == pytest.approx(seconds(prompt))
    slower = simulate(SITUATIONS[0], REQUESTS, seconds, time_s=pace.predict_s)
    usual = simulate(SITUATIONS[0], REQUESTS, seconds)
    assert numbers(slower)["tpot_p50"] == pytest.approx(4 / 3 * numbers(usual)["tpot_p50"])
    assert numbers(slower)["ttft_p50"] == pytest.approx(numbers(usual)["ttft_p50"])


def test_the_price_of_steps_is_told_apart_from_what_is_made_of_it() -> None:
    one = dict.fromkeys(("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"), 1.0)
    compared = Compared(
        situation=SITUATIONS[0],
        measured=[one],
        simulated=[dict.fromkeys(one, 0.8)],
        paced=[dict.fromkeys(one, 0.99)],
        steps=[{Phase.DECODE: 1.25}],
    )
    assert (compared.holds, compared.holds_paced) == (False, True)
    assert compared.step_error(Phase.DECODE) == pytest.approx(-0.2)
    assert compared.step_error(Phase.PREFILL) is None
