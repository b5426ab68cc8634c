"""Pairs in turns: noise is neither a miss nor a hit, and a real difference is found. Times are scripted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from diptych.lab import rounds
from diptych.lab.rounds import LEAST_PAIRS, Effort, Verdict, pairs

EFFORT = Effort(rounds=5, budget_s=0.5)


class Machine:
    """In place of who watches it: how busy others are, and two ways to do the same, one of `gain` times the speed."""

    def __init__(self, gain: float, *, noise: float = 0.02, busy: Callable[[int], float] = lambda n: 0.0) -> None:
        self.rng, self.gain, self.noise, self.busy = random.Random(1), gain, noise, busy
        self.taken: list[str] = []

    def share(self) -> float:
        return self.busy(len(self.taken))

    def first(self) -> float:
        self.taken.append("first")
        return 1.0 + self.rng.uniform(0.0, self.noise)

    def second(self) -> float:
        self.taken.append("second")
        return (1.0 + self.rng.uniform(0.0, self.noise)) / self.gain


def judged(monkeypatch: pytest.MonkeyPatch, machine: Machine, effort: Effort = EFFORT) -> rounds.Pairs:
    monkeypatch.setattr(rounds, "Others", lambda: machine)
    return pairs(machine.first, machine.second, effort, limit=0.97)


def test_what_is_clear_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of twenty cells has no time to go on with those that are decided."""
    for gain, verdict in ((1.5, Verdict.YES), (1.0, Verdict.YES), (0.9, Verdict.NO)):
        machine = Machine(gain)
        found = judged(monkeypatch, machine)
        assert (found.verdict, found.gain.samples) == (verdict, LEAST_PAIRS)
        assert found.text().endswith(f"over {LEAST_PAIRS} pairs, {verdict.value}")
        turns = machine.taken[2:]
        assert turns == ["first", "second", "second", "first"] * (LEAST_PAIRS // 2), "neither is always the one behind"


def test_what_noise_hides_is_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.96 with a spread of a tenth read as a miss, 0.98 as a hit."""
    for gain in (0.969, 0.971):
        found = judged(monkeypatch, Machine(gain, noise=0.5), Effort(rounds=5, budget_s=0.02))
        assert found.verdict is Verdict.OPEN
    found = judged(monkeypatch, Machine(0.9, noise=0.0), Effort(rounds=5, budget_s=0.0))
    assert (found.verdict, found.gain.samples) == (Verdict.OPEN, 5), "five say nothing"


def test_pairs_that_others_disturbed_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nearly all were, nothing is decided."""
    machine = Machine(1.0, busy=lambda n: 0.5 if n % 4 else 0.0)
    found = judged(monkeypatch, machine)
    assert found.verdict is Verdict.YES
    assert found.set_aside > 0
    found = judged(monkeypatch, Machine(0.5, busy=lambda n: 0.5), Effort(rounds=5, budget_s=0.01))
    assert found.verdict is Verdict.OPEN
    assert found.others == 0.5
