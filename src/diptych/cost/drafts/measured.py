"""Prices of drafts on a machine without a profile: only what its own steps took is believed.

Without a profile the time of a step of several rows is unknown, and a guess at it may be wrong many times over. So nothing is
drafted before steps without drafts were seen at the size; then a few rows are tried, and twice as many next, as long as what
they might cost at worst (every row as dear as the last) is in a purse. Out of it comes all that steps with drafts take longer
than steps without, and into it go the time of a token for each draft that holds and a hundredth of the time that decode takes.
So whatever rows cost, and whatever text comes, a load takes at every moment

    T <= (1 + EARNED) T_off + FIRST_STEPS step_s + (what first steps of a size take longer than they might at worst)

with EARNED and FIRST_STEPS of `drafter_trials.py`; T_off and step_s are what the same tokens and one step take without drafts.
A first step that takes half as long again as that worst, or longer, is paid for and believed as the worst: the next tells
whether the machine was disturbed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Unpack

from diptych.cost.drafts.acceptance import Acceptance
from diptych.cost.drafts.depths import FARTHEST, LOWEST, Ratio
from diptych.cost.drafts.prices import DraftCosts, DraftPrices
from diptych.ground.shape import StepShape

_SURE = 3  # steps without drafts of one size, until they are believed
_STAKE = 0.5  # of what the purse holds may go to a size that was never measured
_FINEST = 8  # sizes from one power of two to the next
_FADE = 0.998  # per measured step: an old measurement is tried again some day
_EAGER, _EVERY = 16, 4  # all of the first steps without drafts are looked at, then one in so many


class _Size:
    """Steps of about so many sequences: what they take without drafts, and by what drafts multiply it, by rows."""

    __slots__ = ("n_plain", "n_seen", "rows", "seconds", "times")

    def __init__(self) -> None:
        self.seconds = Ratio(LOWEST)  # of a step without drafts
        self.n_plain = 0
        self.n_seen = 0
        self.rows: list[int] = []  # that were measured with drafts, rising
        self.times: dict[int, tuple[Ratio, int]] = {}  # of those rows; and `n_seen` when they were measured last

    @property
    def is_known(self) -> bool:
        """Whether drafts may be weighed against steps without."""
        return self.n_plain >= _SURE

    def add_plain(self, measured_s: float) -> None:
        """A step without drafts."""
        self.n_seen += 1
        self.n_plain += 1
        if self.n_plain <= _EAGER or self.n_plain % _EVERY == 0:
            self.seconds.add(measured_s)

    def add(self, n_sequences: int, rows: int, times: float) -> None:
        """A step with drafts took so many times what it takes without."""
        self.n_seen += 1
        slot = _slot(rows)
        if slot in self.times:
            self.times[slot][0].add(times)
            self.times[slot] = self.times[slot][0], self.n_seen
            return
        known, worst = Ratio(), self.worst(n_sequences, rows)
        known.add(times, worst / FARTHEST if times > FARTHEST * worst else None)
        self.times[slot] = known, self.n_seen
        insort(self.rows, slot)

    def most_rows(self, n_sequences: int, stake: float) -> int:
        """Rows of the largest step that may be tried; stake: what it may take longer, in steps without drafts."""
        known = max(self.rows[-1] if self.rows else 0, n_sequences)
        return max(known, min(2 * known, int((1.0 + stake) * known / max(1.0, self._at(known)))))

    def worst(self, n_sequences: int, rows: int) -> float:
        """Times what it takes without, where each row beyond those known is as dear as a whole one before."""
        known = max(self.rows[-1] if self.rows else 0, n_sequences)
        return max(1.0, self._at(known)) * max(1.0, rows / known)

    def longer(self, n_sequences: int, rows: int) -> float:
        """Times what it takes without: as measured, on the line between two measured, or on the one through the last."""
        low_rows, low = n_sequences, 1.0
        for slot in self.rows:
            times = max(1.0, self._at(slot))
            if slot >= rows:
                if slot == low_rows:
                    return times
                return low + (times - low) * (rows - low_rows) / (slot - low_rows)
            if slot > low_rows:
                low_rows, low = slot, times
        if low_rows == n_sequences:
            return low
        return 1.0 + (low - 1.0) * (rows - n_sequences) / (low_rows - n_sequences)

    def _at(self, slot: int) -> float:
        """Of rows that were measured, less believed as it grows old; of others 1."""
        if slot not in self.times:
            return 1.0
        ratio, seen = self.times[slot]
        return 1.0 + (ratio.value - 1.0) * _FADE ** (self.n_seen - seen)


class MeasuredDraftPrices(DraftPrices):
    """See the module, and `DraftPrices`. One per engine."""

    def __init__(self, predict_s: Callable[[StepShape], float], **costs: Unpack[DraftCosts]) -> None:
        super().__init__(predict_s, **costs)
        self._sizes: dict[int, _Size] = {}

    def choose(
        self, guesses: Sequence[tuple[Acceptance, int, int]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """See DraftPrices; and none before it is known what the step takes without, or while the purse is empty."""
        n = len(guesses)
        size = self._sizes.get(_slot(n))
        if size is None or not size.is_known:
            return [0] * n
        self.rows_purse.fill(size.seconds.value, n)
        stake = _STAKE * self.rows_purse.balance_s / size.seconds.value
        most_rows = min(most_rows, size.most_rows(n, stake) - n)
        return super().choose(guesses, shape=shape, most_rows=most_rows, limit_s=limit_s)

    def _most_s(self, shape: StepShape, depths: Sequence[int], longer_s: float) -> tuple[float, float]:
        """Of rows that were never measured by what they might take at worst."""
        n, rows = len(depths), len(depths) + sum(depths)
        size = self._sizes[_slot(n)]
        if _slot(rows) in size.times:
            return super()._most_s(shape, depths, longer_s)
        worst_s = size.seconds.value * size.worst(n, rows)
        return FARTHEST * worst_s, worst_s

    def observe(self, shape: StepShape, measured_s: float) -> None:
        """See DraftPrices; steps with prefill say nothing of drafts, and those that the executor's drafter reads little."""
        if shape.decode_tokens and not shape.prefill_tokens:
            n = shape.n_sequences
            slot = _slot(n)
            size = self._sizes.get(slot) or self._sizes.setdefault(slot, _Size())
            if shape.decode_tokens == n:
                if not self._asker.has_asked or not size.is_known or self.rows_purse.is_empty:
                    size.add_plain(measured_s)
            elif size.is_known:
                size.add(n, shape.decode_tokens, measured_s / max(size.seconds.value, 1e-12))
        super().observe(shape, measured_s)

    def _price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        n, rows = len(depths), sum(depths)
        size = self._sizes.get(_slot(n))
        if size is None or not size.is_known:
            return super()._price_s(shape, depths)
        times = size.longer(n, n + rows) if rows else 1.0
        if shape.prefill_tokens:
            return self._predict_s(shape) + (times - 1.0) * size.seconds.value
        return times * size.seconds.value


def _slot(rows: int) -> int:
    """Rows that are one size: each of the first, then eighths from a power of two to the next."""
    width = max(1, (1 << rows.bit_length()) // (2 * _FINEST))
    return rows // width * width
