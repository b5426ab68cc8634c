"""What ranks tell each other, on paper: against the components of the cost model, and against the program that is recorded."""

from __future__ import annotations

import pytest

from diptych.cost.components import cost_of
from diptych.cost.exchange import GLOO_MEETING_S, SHARED_MEETING_S, all_reduced, gathered
from diptych.cost.setup import find_model
from diptych.cost.tables import kv_spec, quant_spec
from diptych.ground.shape import StepShape

MODELS = ("llama-3.1-8b", "gemma-2-9b", "mixtral-8x7b")


@pytest.mark.parametrize("name", MODELS)
def test_all_reduces_are_those_that_the_planner_prices(name: str) -> None:
    """Knowledge stands once: both count the same bytes per row."""
    model = find_model(name)
    cost = cost_of(
        model, StepShape.decode(batch=1, context_tokens=1), quant=quant_spec("bf16"), kv=kv_spec("bf16"), tp=4
    )
    link_bytes = sum(part.link_bytes for part in cost.components if part.name != "head")
    assert all_reduced(model, tp=4).row_bytes == pytest.approx(link_bytes)


def test_gathering_moves_more_than_an_all_reduce() -> None:
    """Llama 3.1 8B on two ranks: 4,096 values in bf16, the stream twice in fp32, 14,336 of the gate in bf16; half is theirs."""
    model = find_model("llama-3.1-8b")
    row_bytes = 32 * (4096 * 2 + 2 * 4096 * 4 + 14336 * 2) / 2 + 4096 * 4 / 2
    ours, theirs = gathered(model, tp=2), all_reduced(model, tp=2)
    assert ours.row_bytes == row_bytes
    assert (ours.meetings, theirs.meetings) == (4 * 32 + 2, 2 * 32)
    assert 1.5 < ours.row_bytes / theirs.row_bytes < 2.5
    assert gathered(model, tp=1).row_bytes == 0.0


def test_what_meeting_costs_between_machines() -> None:
    """A step of Llama 3.1 8B on two machines: 130 collectives, and 1,122 kB a token through the cable."""
    ours = gathered(find_model("llama-3.1-8b"), tp=2)
    assert ours.time_s(1, meeting_s=SHARED_MEETING_S) == pytest.approx(52e-6)
    assert ours.time_s(16, meeting_s=GLOO_MEETING_S, bytes_per_s=1.25e9) == pytest.approx(
        130 * 288e-6 + 16 * ours.row_bytes / 1.25e9
    )
