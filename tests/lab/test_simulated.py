"""What `diptych lab simulated` compares, on step times that are known."""

from __future__ import annotations

import pytest

from diptych.ground.shape import StepShape
from diptych.lab.simulated import SITUATIONS, Compared, numbers, simulate


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
