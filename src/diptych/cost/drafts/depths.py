"""How deep to draft, and how far off the prices are: what all who price drafts have in common.

>>> choose_depths([[0.9, 0.8, 0.1]], n_sure=1, most_rows=8, price_s=lambda depths: 1.0 + 0.2 * sum(depths))
[2]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

LEAST_GAIN = 1.05  # a prediction is no better than this, and what would be lost counts more than what would be won
DISTURBED = 3.0  # times what was expected: the machine did something else, which the drafter does not pay for
FARTHEST = 1.5  # what one measurement may say beyond those before it: the machine may have been busy
_LATEST = 15  # measurements
LOW = 0.4  # where in their order the undisturbed ones are, where three of ten are disturbed: the middle of the others
LOWEST = 0.2  # the same of what drafts are weighed against: too low a time costs a gain, and too high a one a loss
_OLD = 0.5  # less believed than that, a measurement is forgotten by the next
_SINGLY = 4  # drafts up to which sizes double; then rows of the step fill tiles


class Ratio:
    """Measured over predicted time of one kind of step, as it is where nobody disturbs: of the latest measurements one low in
    their order. A machine that others use makes steps longer and never shorter, and a mean of them made drafts seem to pay
    where they lost a fifth.
    """

    __slots__ = ("_faded", "_latest", "_low", "_towards", "_value")

    def __init__(self, low: float = LOW) -> None:
        """low: which of the latest, in their order, as a share of them."""
        self._low = low
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._value = 1.0
        self._towards, self._faded = 1.0, 1.0

    @property
    def value(self) -> float:
        """1 before anything was measured."""
        return self._towards + (self._value - self._towards) * self._faded

    @property
    def is_known(self) -> bool:
        """Whether any was measured."""
        return bool(self._latest)

    @property
    def is_settled(self) -> bool:
        """Whether as many were as count."""
        return len(self._latest) == _LATEST

    def add(self, ratio: float, like: float | None = None) -> None:
        """Take in one measurement; like: what the first is expected to be near to, where anything is. A first that is far
        longer is not believed before a second: it may have been disturbed, or cold.
        """
        latest = self._latest
        if self._faded < _OLD:
            latest.clear()
        self._faded = 1.0
        latest.append(ratio)
        self._value = sorted(latest)[int(self._low * len(latest))]
        if len(latest) == 1 and like is not None:
            self._value = min(ratio, FARTHEST * like)

    def fade(self, towards: float, kept: float) -> None:
        """Believe it a little less."""
        self._towards = towards
        self._faded *= kept


def choose_depths(
    chances: Sequence[Sequence[float]],
    *,
    n_sure: int,
    most_rows: int,
    price_s: Callable[[list[int]], float],
    limit_s: float | None = None,
) -> list[int]:
    """How many drafts of each sequence to verify, at most `most_rows` together: the likeliest, while they pay.

    chances: of each sequence and depth, falling with depth. n_sure: tokens that the step gives anyway. price_s: predicted
    time of the step with these depths. limit_s: longest that a step with drafts may take.
    O(rows log rows), and O(log rows) calls of price_s.
    """
    # equal chances: the shallower first, so that a draft never comes without those before it
    ranked = sorted([(-chance, j, i) for i, row in enumerate(chances) for j, chance in enumerate(row)])
    del ranked[max(0, most_rows) :]
    chosen = [0] * len(chances)
    if not ranked:
        return chosen
    best = LEAST_GAIN * n_sure / max(price_s(chosen), 1e-12)
    depths = list(chosen)
    tokens, taken = float(n_sure), 0
    while taken < len(ranked):
        size = max(1, 2 * taken) if taken < _SINGLY else _rounder(len(chances) + taken) - len(chances)
        for minus_chance, _, i in ranked[taken:size]:
            depths[i] += 1
            tokens -= minus_chance
        taken = min(size, len(ranked))
        step_s = price_s(depths)
        if limit_s is not None and step_s > limit_s:
            break
        if tokens / step_s > best:
            chosen, best = list(depths), tokens / step_s
    return chosen


def _rounder(rows: int) -> int:
    """The next number of rows that fills whole tiles: a power of two, or half as much again."""
    power = 1 << (rows.bit_length() - 1)
    return power * 3 // 2 if power > 1 and rows < power * 3 // 2 else 2 * power
