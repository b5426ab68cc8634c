"""How deep to draft, and how far off the prices are: what all who price drafts have in common.

>>> choose_depths([[0.9, 0.8, 0.1]], n_sure=1, most_rows=8, price_s=lambda depths: 1.0 + 0.2 * sum(depths))
[2]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LEAST_GAIN = 1.05  # a prediction is no better than this, and what would be lost counts more than what would be won
DISTURBED = 3.0  # times what was expected: the machine did something else, which the drafter does not pay for
FARTHEST = 1.5  # what one measurement may say beyond those before it: the machine may have been busy
_TRUST = 0.1  # weight of a newest measurement over predicted time, once there are many
_SINGLY = 4  # drafts up to which sizes double; then rows of the step fill tiles


class Ratio:
    """Measured over predicted time of one kind of step: a mean of the first, then of the latest."""

    __slots__ = ("_n", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._n = 0

    @property
    def is_known(self) -> bool:
        """Whether any was measured."""
        return self._n > 0

    def add(self, ratio: float, like: float | None = None) -> None:
        """Take in one measurement; like: what the first is expected to be near to, where anything is."""
        if self._n:
            ratio = min(max(ratio, self.value / FARTHEST), self.value * FARTHEST)
        elif like is not None:
            ratio = min(ratio, DISTURBED * like)
        self._n += 1
        self.value += max(_TRUST, 1.0 / self._n) * (ratio - self.value)

    def fade(self, towards: float, kept: float) -> None:
        """Believe it a little less."""
        self.value = towards + (self.value - towards) * kept


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
