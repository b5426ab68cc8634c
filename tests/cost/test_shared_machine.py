"""Whether workers pay on the machine that they share, by hand."""

from __future__ import annotations

import pytest

from diptych.cost.shared_machine import BATCH, OUTPUT_TOKENS, Speeds, judge


def test_a_reader_more_pays_where_the_writer_waits_for_memory() -> None:
    """A prompt of 1 s on all cores, an answer of 2 s of decode steps: apart, the two go on at one time."""
    speeds = Speeds(read_s=1.0, decode_s=2.0 * BATCH / OUTPUT_TOKENS)
    found = judge(speeds, prefill=1, decode=1, max_step_tokens=512)
    assert found.one_per_s == pytest.approx(1 / 3)
    assert found.workers_per_s == pytest.approx(min(1 / 2, 1 / 2)), "half the cores read, and the answer takes as long"
    assert found.pays
    assert found.one_gap_s == pytest.approx(0.25), "a quarter of the prompt in a step"
    assert found.workers_gap_s == pytest.approx(speeds.decode_s)


def test_prompts_that_take_long_do_not_pay_apart() -> None:
    """Cores that decode read nothing meanwhile: what is bound by arithmetic gets slower."""
    found = judge(Speeds(read_s=8.0, decode_s=0.01), prefill=1, decode=1, max_step_tokens=2048)
    assert found.workers_per_s == pytest.approx(1 / 16)
    assert not found.pays


def test_engines_that_do_both_only_make_gaps_longer() -> None:
    """On one machine they share its cores, and each prompt holds its engine's streams for longer."""
    found = judge(Speeds(read_s=1.0, decode_s=0.01), prefill=0, decode=2, max_step_tokens=2048)
    assert not found.pays
    assert found.workers_gap_s == pytest.approx(2 * found.one_gap_s)
