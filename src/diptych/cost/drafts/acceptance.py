"""How far guesses at coming tokens hold, learned from every verdict, and what that gives: tokens of a step.

Draft j holds where it and all before it are right: with the chance c_j, which falls with j.

>>> round(expected_tokens(chances_at(0.7, 4)), 3)
2.773
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice, repeat

MOST_DEPTH = 16  # drafts of one sequence and step
N_CONFIDENCES = 3  # how sure a drafter is of a guess, in its own scale from 0: each learned apart
LEAST_CHANCE = 0.02
FIRST_RATE = 0.6
_FIRST_WEIGHT = 4
_FORGET = 0.15  # weight of a sequence's newest verdict
_FORGET_ALL = 0.02  # the same over all sequences


def chances_at(acceptance: float, n: int) -> list[float]:
    """Chances of n drafts where each is right with `acceptance` once all before it are: a, a^2, ..."""
    return [acceptance ** (j + 1) for j in range(n)]


def expected_tokens(chances: Sequence[float]) -> float:
    """Mean tokens of one sequence per step: its own and the drafts that hold; at one rate a, (1 - a^(n+1)) / (1 - a)."""
    return 1.0 + sum(chances)


def speedup(chances: Sequence[float], *, plain_s: float, verify_s: float) -> float:
    """Tokens per second with drafts over those without; verify_s holds the drafter's time, too."""
    return expected_tokens(chances) * plain_s / verify_s


class Acceptance:
    """How often guesses were right of late, by depth and by how sure the drafter was. Of one sequence, or of all (a pool)."""

    __slots__ = ("_n_verdicts", "_pool", "_rates", "on_kept")

    def __init__(self, pool: Acceptance | None = None, *, first_rate: float = FIRST_RATE) -> None:
        """first_rate: of each draft, before any was judged."""
        self._pool = pool
        self.on_kept: Callable[[int], None] | None = None  # learns of drafts that were verified and held
        self._n_verdicts = [_FIRST_WEIGHT] * N_CONFIDENCES  # the first rates count as so many
        # of draft j where all before it were right, as far as any was judged; a new sequence begins with what others taught
        self._rates: list[list[float]] = (
            [[first_rate] for _ in range(N_CONFIDENCES)] if pool is None else [list(rates) for rates in pool._rates]
        )

    def chances(self, n: int, confidence: int = 0) -> list[float]:
        """The chance of each of n drafts to be kept: falling, and cut where it is hopeless."""
        chances: list[float] = []
        chance, rates = 1.0, self._rates[confidence]
        for rate in islice(chain(rates, repeat(_deeper(rates))), n):
            chance *= rate
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def worth(self, n: int, confidence: int = 0) -> float:
        """Tokens that n drafts give on average."""
        return sum(self.chances(n, confidence))

    def learn(self, n_right: int, n_judged: int, confidence: int = 0) -> None:
        """The first n_right of n_judged drafts were right, and the next, where there is one, was wrong."""
        _move(self._rates[confidence], n_right, n_judged, _FORGET)
        pool = self._pool
        if pool is not None:  # a mean of the first verdicts, then of the latest
            n = pool._n_verdicts[confidence] = pool._n_verdicts[confidence] + 1
            _move(pool._rates[confidence], n_right, n_judged, _FORGET_ALL if n * _FORGET_ALL > 1.0 else 1.0 / n)

    def kept(self, n_kept: int) -> None:
        """So many drafts were verified and held."""
        if self.on_kept is not None:
            self.on_kept(n_kept)


def _move(rates: list[float], n_right: int, n_judged: int, weight: float) -> None:
    if n_judged > len(rates):
        rates += [_deeper(rates)] * (n_judged - len(rates))
    for j in range(n_right):
        rates[j] += weight * (1.0 - rates[j])
    if n_right < n_judged:
        rates[n_right] -= weight * rates[n_right]


def _deeper(rates: list[float]) -> float:
    """Of a draft deeper than any that was judged: where those before hold nearly always, nobody would go there at less."""
    return max(rates[-1], FIRST_RATE)
