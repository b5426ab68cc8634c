"""The rules of choice, apart from the mechanics: who goes before whom, how long a prefill chunk may be, and how late steps are.

Order. rank = arrival_s - priority * aging_s, smallest first, ties in the order of submission. A waiting request gains
one level per aging_s seconds, all at the same pace, so their order never changes and needs no clock: a request is
overtaken only by higher priorities that arrive within (difference of levels) * aging_s of it, hence by finitely many.
The same order chooses whom to preempt (largest rank), so the first in line is never preempted and always ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from diptych.control.sequence import Sequence

# 16: so few rows cost hardly more than one, as the step is still bound by reading the weights. A prefill gets this many
# tokens even where the stall budget allows none, so that it ends after a bounded number of steps.
MIN_PREFILL_TOKENS = 16
LATER = 1 / 8  # a prompt of 8k tokens is some forty steps of 50 ms
MOST_LATENESS = 4.0  # then prompts are read at a quarter of the pace, and more would hardly help


def rank_of(*, arrival_s: float, priority: int, aging_s: float) -> float:
    """Place in line in seconds; smaller is sooner."""
    return arrival_s - priority * aging_s


class RankedList:
    """Sequences in order of rank. Adding and removing is a bisection."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    @property
    def first(self) -> Sequence | None:
        """The one to serve next."""
        return self._items[0] if self._items else None

    @property
    def last(self) -> Sequence | None:
        """The one to preempt next."""
        return self._items[-1] if self._items else None

    def add(self, sequence: Sequence) -> None:
        """Insert at its rank."""
        i = bisect_left(self._keys, sequence.key)
        self._keys.insert(i, sequence.key)
        self._items.insert(i, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out; it must be there."""
        i = bisect_left(self._keys, sequence.key)
        assert self._items[i] is sequence, sequence.seq_id
        del self._keys[i], self._items[i]

    def holds(self, sequence: Sequence) -> bool:
        """Whether it is in this list."""
        i = bisect_left(self._keys, sequence.key)
        return i < len(self._keys) and self._items[i] is sequence

    def after(self, key: tuple[float, int] | None) -> Sequence | None:
        """The first one whose key is greater than `key` (None: the first of all)."""
        if key is None:
            return self.first
        i = bisect_left(self._keys, (key[0], key[1] + 1))
        return self._items[i] if i < len(self._items) else None


class Lateness:
    """How many times as long as predicted a slow step of both phases takes: nineteen of twenty are quicker.

    A stall budget is a promise about slow steps, while a prediction is of a usual one, on a machine with nothing else to do.
    A quantile followed by steps of one size (Robbins and Monro, 1951): a process that stood still once counts as one slow step.
    """

    def __init__(self) -> None:
        self.factor = 1.0  # never less: to be early is no licence to be late

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Learn from one step."""
        is_later = measured_s > self.factor * predicted_s
        self.factor += LATER if is_later else -LATER / 19
        self.factor = min(max(self.factor, 1.0), MOST_LATENESS)


def longest_within(*, limit: int, quantum: int, is_within: Callable[[int], bool]) -> int:
    """The largest length in {limit, multiples of quantum below it} that `is_within` accepts; 0 when none is.

    A bisection, so is_within should be monotone; where it is not, the answer is still one that it accepted.
    """
    if is_within(limit):
        return limit
    low, high = 0, (limit - 1) // quantum
    while low < high:
        middle = (low + high + 1) // 2
        if is_within(middle * quantum):
            low = middle
        else:
            high = middle - 1
    return low * quantum
