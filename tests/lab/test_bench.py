"""Static batches: what stands behind a prompt is taken in, not read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from diptych.engine.executor import ModelExecutor
from diptych.engine.load import load
from diptych.ground.config import EngineConfig
from diptych.ground.errors import ConfigError
from diptych.ground.step import StepPlan, StepResult
from diptych.lab import bench
from diptych.lab.bench import SAMPLE_TOKENS, StaticBench


@pytest.fixture(scope="module")
def static() -> Iterator[StaticBench]:
    """What the machine can do, which takes most of the time, is measured once here."""
    config = EngineConfig()
    loaded = load("bundled", config)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("machine_ceilings", "arithmetic_ceilings", "read_ceiling"):
            monkeypatch.setattr(bench, name, cache(getattr(bench, name)))
        yield StaticBench(loaded.model, name=loaded.name, load_s=0.0, config=config)


def test_tokens_behind_a_prompt_are_taken_in_and_not_read(static: StaticBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind more tokens than the sample has, each prompt of 16 is one chunk of 16, and decode stands behind all of them."""
    shapes = []

    def execute(executor: ModelExecutor, plan: StepPlan) -> StepResult:
        shapes.append(plan.shape)
        return run(executor, plan)

    run = ModelExecutor.execute
    monkeypatch.setattr(ModelExecutor, "execute", execute)
    behind = SAMPLE_TOKENS + 32
    report = static.run(
        prompt_tokens=[16], batches=[2], new_tokens=3, repeats=1, progress=lambda _: None, behind_tokens=[behind]
    )
    assert [point.context_tokens for point in report.results] == [behind + 16, behind + 17]
    prefill, decode = shapes[-3].shapes, shapes[-1].shapes
    assert [(chunk.new_tokens, chunk.start_pos) for chunk in prefill] == [(16, behind)] * 2
    assert [(chunk.new_tokens, chunk.start_pos) for chunk in decode] == [(1, behind + 17)] * 2
    assert sum(shape.prefill_tokens for shape in shapes) == SAMPLE_TOKENS + 2 * 2 * 16


def test_every_length_meets_every_batch_behind_every_number_of_tokens(static: StaticBench) -> None:
    """In the order of the arguments."""
    asked = {"prompt_tokens": [16, 32], "batches": [1, 2], "behind_tokens": [0, 32]}
    report = static.run(new_tokens=3, repeats=2, progress=lambda _: None, **asked)
    points = [(point.behind_tokens, point.prompt_tokens, point.batch, point.phase) for point in report.results]
    assert points == [*product([0, 32], [16, 32], [1, 2], ["prefill", "decode"])]


def test_points_that_the_model_has_no_positions_for_are_refused_before_any_is_measured(static: StaticBench) -> None:
    """The first points were measured, and then max_context_tokens was blamed, which nobody had set and bench does not have."""
    said: list[str] = []
    with pytest.raises(ConfigError, match="has 4098 tokens, prompt and answer; 4096 is the most") as caught:
        static.run(prompt_tokens=[16, 4095], batches=[1], new_tokens=3, repeats=1, progress=said.append)
    assert "--prompt-tokens" in (caught.value.hint or "")
    assert said == []
