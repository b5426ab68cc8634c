"""Whether workers on one machine pay: arithmetic on two step times."""

from __future__ import annotations

import pytest

from diptych.cost.apart import BATCH, OUTPUT_TOKENS, PROMPT_TOKENS, Speeds, judge
from diptych.ground.shape import StepShape


def speeds(read_s: float, answer_s: float) -> Speeds:
    return Speeds(read_s=read_s, decode_s=answer_s * BATCH / OUTPUT_TOKENS)


def test_engines_that_do_both_answer_no_more_than_one_with_all_cores() -> None:
    """Who starts three engines on one machine for speed must be told."""
    verdict = judge(speeds(1.0, 1.0), prefill=0, decode=3, max_step_tokens=PROMPT_TOKENS)
    assert not verdict.pays
    assert verdict.workers_gap_s == pytest.approx(3 * verdict.one_gap_s), "and each of them is slower at a prompt"


@pytest.mark.parametrize(("read_s", "answer_s", "pays"), [(1.0, 0.5, False), (1.0, 3.0, True), (1.0, 0.0001, False)])
def test_pools_pay_where_answers_take_longer_than_prompts(read_s: float, answer_s: float, pays: bool) -> None:
    """1 + 1 workers: half the cores read at half the speed, while decode at best loses nothing."""
    verdict = judge(speeds(read_s, answer_s), prefill=1, decode=1, max_step_tokens=512)
    assert verdict.pays is pays
    assert verdict.one_per_s == pytest.approx(1.0 / (read_s + answer_s))
    assert verdict.one_gap_s == pytest.approx(read_s / 4)
    assert verdict.workers_gap_s == pytest.approx(answer_s * BATCH / OUTPUT_TOKENS)


def test_prices_follow_the_prediction() -> None:
    """The router adds them up: prompts by the tokens that are left to read, answers by their share of a step."""
    found = Speeds.of(lambda shape: shape.n_tokens * 1e-3, 100_000)
    assert found.prefill_us(100, 50) == 100_000
    assert found.decode_us(1000, 10) == 10_000
    asked: list[StepShape] = []
    Speeds.of(lambda shape: asked.append(shape) or 1.0, 512)  # type: ignore[func-returns-value]
    assert max(shape.n_tokens for shape in asked) == 511, "no context is asked for that the engine has not"
