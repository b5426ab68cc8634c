"""Speculation in a simulation: the engine's scheduler and verification, with acceptance stated instead of learned."""

from __future__ import annotations

import pytest

from diptych.cost.adapters import Loras
from diptych.cost.advice import speculation
from diptych.cost.planner import Question
from diptych.cost.setup import setup_of
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.sim.drafts import StatedDrafts
from diptych.sim.engine import SimulatedEngine
from diptych.workload import LengthRange, WorkloadSpec, requests_of

BLOCKS = BlockConfig(n_blocks=4000, block_tokens=16)


def served(drafts: StatedDrafts | None, *, batch: int = 1, **settings: object) -> tuple[SimulatedEngine, float]:
    """`batch` answers of 600 tokens at once on an L40S: the engine, and seconds per token of a sequence."""
    predict_s = setup_of("llama-3.1-8b", "l40s").model_of_time().predict_s
    config = SchedulerConfig(max_running_sequences=batch, **settings)
    engine = SimulatedEngine(config, BLOCKS, predict_s=predict_s, drafts=drafts)
    spec = WorkloadSpec(
        n_requests=batch, prompt=LengthRange(low=200, high=200), output=LengthRange(low=600, high=600), rate_per_s=1e6
    )
    engine.serve(requests_of(spec, vocab_size=100))
    records = engine.book.records.values()
    assert all(record.output_tokens == 600 for record in records)
    engine.core.check()
    return engine, sum(record.timings().tpot_s or 0.0 for record in records) / batch


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_simulation_gains_what_the_planner_says(acceptance: float, batch: int) -> None:
    """Two ways to the same number: expected tokens over predicted time, and the scheduler step by step."""
    drafts = StatedDrafts(draft_tokens=16, acceptance=acceptance, draft_cost=0.0)
    engine, tpot_s = served(drafts, batch=batch)
    gain = served(None, batch=batch)[1] / tpot_s
    question = Question(context_tokens=500, draft_tokens=4, acceptance=acceptance, draft_cost=0.0)
    said = speculation(setup_of("llama-3.1-8b", "l40s"), question, batch).best_speedup
    assert gain == pytest.approx(said, rel=0.15)
    usages = [record.usage() for record in engine.book.records.values()]
    assert sum(usage.accepted_tokens for usage in usages) > 0


def test_first_drafts_hold_as_often_as_stated() -> None:
    """Acceptance is per draft once those before it held."""
    engine, _ = served(StatedDrafts(draft_tokens=1, acceptance=0.6, draft_cost=0.0))
    (record,) = engine.book.records.values()
    usage = record.usage()
    assert usage.drafted_tokens > 200
    assert usage.accepted_tokens / usage.drafted_tokens == pytest.approx(0.6, abs=0.08)


def test_the_drafters_time_passes_and_is_reckoned_with() -> None:
    """A drafter as slow as the model is not asked, and a cheap one gains less than one for nothing."""
    plain_s = served(None)[1]
    gains = [
        plain_s / served(StatedDrafts(draft_tokens=8, acceptance=0.8, draft_cost=cost))[1] for cost in (0.0, 0.1, 1.5)
    ]
    assert gains[0] > gains[1] > 1.3
    assert 0.97 <= gains[2] <= 1.0


@pytest.mark.parametrize("budget_s", [0.0255, 0.03])
def test_the_stall_budget_counts_rows_and_time_of_drafts(budget_s: float) -> None:
    """A step with drafts may last no longer than one with a neighbour's prefill."""
    drafts = StatedDrafts(draft_tokens=16, acceptance=0.95, draft_cost=0.02)
    steps = []
    predict_s = setup_of("llama-3.1-8b", "l40s").model_of_time().predict_s
    engine = SimulatedEngine(
        SchedulerConfig(stall_budget_s=budget_s), BLOCKS, predict_s=predict_s, drafts=drafts, on_step=steps.append
    )
    spec = WorkloadSpec(
        n_requests=1, prompt=LengthRange(low=200, high=200), output=LengthRange(low=300, high=300), rate_per_s=1.0
    )
    engine.serve(requests_of(spec, vocab_size=100))
    decode = [step for step in steps if step.shape.decode_tokens]
    assert max(step.time_s for step in decode) <= budget_s
    assert max(step.shape.decode_tokens for step in decode) > 1
    assert max(step.shape.decode_tokens for step in decode) < 17


@pytest.mark.parametrize(
    "values",
    [{"draft_tokens": 0}, {"draft_tokens": 17}, {"acceptance": 1.1}, {"acceptance": -0.1}, {"draft_cost": -1.0}],
)
def test_impossible_numbers_are_refused(values: dict[str, float]) -> None:
    """By name and limit."""
    with pytest.raises(ConfigError):
        StatedDrafts(**{"draft_tokens": 4, "acceptance": 0.5, **values})  # type: ignore[arg-type]


def test_drafting_costs_a_part_of_the_step_that_the_adapters_are_in() -> None:
    """The decode step of which a draft costs a share was one without adapters, and the planner's has them."""
    setup = setup_of("llama-3.1-8b", "l40s", loras=Loras(count=4, rank=256))
    predict_s = setup.model_of_time().predict_s
    plain = setup.asked(StepShape([ChunkShape(Phase.DECODE, 1, 500, True)] * 4))
    drafted = plain.with_drafts([3, 0, 1, 2])
    timed = StatedDrafts(draft_tokens=4, acceptance=0.8, draft_cost=0.1).timed(predict_s)
    assert timed(drafted) == pytest.approx(predict_s(drafted) + 0.3 * predict_s(plain))
