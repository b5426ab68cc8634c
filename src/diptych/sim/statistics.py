"""Statistics of any number of values in bounded memory: distributions to half a percent, and a timeline of fixed length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.metrics import Distribution

ERROR = 0.005  # relative, of every percentile
_GROWTH = (1.0 + ERROR) / (1.0 - ERROR)
_PER_LOG = 1.0 / math.log(_GROWTH)
N_BINS = 512


class Stream:
    """A distribution of durations, seen one after the other.

    Counts per bucket of equal ratio, as in DDSketch (Masson, Rim and Lee, VLDB 2019): a percentile lies within ERROR of where
    the values of its ranks put it; mean, least and greatest are exact. The same values give the same numbers in any order.
    """

    def __init__(self) -> None:
        self.n = 0
        self._sum = 0.0
        self._least = math.inf
        self._greatest = 0.0
        self._zeros = 0
        self._buckets: dict[int, int] = {}

    def add(self, values: Iterable[float]) -> None:
        """Take in durations, each 0 or more."""
        seen = values if isinstance(values, list | tuple) else tuple(values)
        if not seen:
            return
        self.n += len(seen)
        self._sum += sum(seen)
        self._least, self._greatest = min(self._least, *seen), max(self._greatest, *seen)
        buckets, log, ceil = self._buckets, math.log, math.ceil
        for value in seen:
            if value > 0.0:
                key = ceil(log(value) * _PER_LOG)
                buckets[key] = buckets.get(key, 0) + 1
            else:
                self._zeros += 1

    def take(self, other: Stream) -> None:
        """Add what another one saw."""
        self.n += other.n
        self._sum += other._sum
        self._least, self._greatest = min(self._least, other._least), max(self._greatest, other._greatest)
        self._zeros += other._zeros
        for key, count in other._buckets.items():
            self._buckets[key] = self._buckets.get(key, 0) + count

    def distribution(self) -> Distribution | None:
        """The numbers; None of nothing."""
        if not self.n:
            return None
        p50, p90, p95, p99 = (self._at(q) for q in (0.50, 0.90, 0.95, 0.99))
        return Distribution(
            n=self.n, mean=self._sum / self.n, min=self._least, p50=p50, p90=p90, p95=p95, p99=p99, max=self._greatest
        )

    def shares(self) -> list[tuple[float, float]]:
        """(value, share of all at or below it), rising: the curve of a picture."""
        seen = self._zeros
        curve = [(0.0, seen / self.n)] if seen else []
        for key in sorted(self._buckets):
            seen += self._buckets[key]
            curve.append((self._value(key), seen / self.n))
        return curve

    def _at(self, q: float) -> float:
        """Interpolated between ranks, as `metrics.percentile` does: few values have no other tail than their greatest."""
        place = q * (self.n - 1)
        rank = int(place)
        low = self._of_rank(rank)
        return low + (self._of_rank(min(rank + 1, self.n - 1)) - low) * (place - rank)

    def _of_rank(self, rank: int) -> float:
        seen = self._zeros
        if rank < seen:
            return 0.0
        if rank == self.n - 1:
            return self._greatest
        for key in sorted(self._buckets):
            seen += self._buckets[key]
            if rank < seen:
                return self._value(key)
        return self._greatest

    def _value(self, key: int) -> float:
        middle = 2.0 * math.exp(key / _PER_LOG) / (_GROWTH + 1.0)
        return min(max(middle, self._least), self._greatest)


@dataclass(slots=True)
class Bin:
    """What happened in one stretch of the timeline, over all engines; the weighted ones are divided by the time they cover."""

    arrivals: int = 0
    output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    mixed_s: float = 0.0
    kv_share_s: float = 0.0
    running_s: float = 0.0
    waiting_s: float = 0.0

    def take(self, other: Bin) -> None:
        """Add another one."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Timeline:
    """N_BINS stretches at most; where time runs out of them, neighbours are joined and each is twice as long."""

    bin_s: float = 1.0
    bins: list[Bin] = field(default_factory=list)

    def at(self, at_s: float) -> Bin:
        """The stretch of an instant."""
        place = int(at_s / self.bin_s)
        if place < len(self.bins):
            return self.bins[place]
        while place >= N_BINS:
            self._join()
            place = int(at_s / self.bin_s)
        while len(self.bins) <= place:
            self.bins.append(Bin())
        return self.bins[place]

    def take(self, other: Timeline) -> None:
        """Add another one; the stretches are then those of the coarser."""
        while self.bin_s < other.bin_s:
            self._join()
        for place, one in enumerate(other.bins):
            self.at((place + 0.5) * other.bin_s).take(one)

    def _join(self) -> None:
        for i in range(0, len(self.bins) - 1, 2):
            self.bins[i].take(self.bins[i + 1])
        self.bins = self.bins[::2]
        self.bin_s *= 2.0
