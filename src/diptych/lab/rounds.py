"""Timings that a shared machine cannot quietly spoil.

Points that will be compared are timed in turns, one sample each per round, so that a slow spell of the machine falls on all
of them; ratios and fits are taken within each round, where the machine was the same for both sides. A round in which other
processes used the cores is set aside, judged by their processor time and never by what was measured. Rounds go on until
every median is settled or the time is up. What is reported is the median over rounds with its 95 % interval.

    rounds = measure([lambda: seconds_of_a(), lambda: seconds_of_b()], Effort())
    rounds.point(0), rounds.of(lambda times_N: times_N[1] / times_N[0])

Whether one way is at least so many times as fast as another is asked of pairs: both directly one behind the other, the first
of them in turns, until the interval of their ratio says yes or no.

    pairs(lambda: seconds_off(), lambda: seconds_on(), Effort(), limit=0.97).verdict
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import psutil

from diptych.ground.clock import Clock, MonotonicClock

Sampler = Callable[[], float]  # takes one sample, in seconds

BURST_S = (
    0.02  # a shorter step is repeated for this long, and its first run, with other work's data in the caches, dropped
)
BURST_RUNS = 15
MOST_ROUNDS = 60
TAIL = 0.025
LEAST_QUIET = 3  # quiet rounds with which a verdict can be given
LEAST_PAIRS = 8  # of which the interval of a median is narrower than their range
MOST_PAIRS = 512
DISTURBED = 0.05  # share of all cores' time that others take in a round, beyond which it is set aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A quantity seen once per round: its median, the 95 % interval of that median, and how far the values lie apart.

    The interval is free of any assumption on the distribution (order statistics), and holds the medians of the first and
    of the second half of the rounds: a machine that drifts makes it wide. With five values it is their range.
    spread: third quartile minus first, over the median; of fewer than five values the range.
    """

    value: float
    low: float
    high: float
    spread: float
    samples: int

    @classmethod
    def of(cls, seen: Sequence[float]) -> Estimate:
        """The estimate from at least one value, in the order in which they were seen."""
        ordered = sorted(seen)
        n, median = len(ordered), statistics.median(ordered)
        rank = _interval_rank(n)
        halves = [statistics.median(seen[: n // 2]), statistics.median(seen[n // 2 :])] if n >= 6 else []
        # the middle half of fewer than five values says nothing (of two it is empty): their range
        quartiles = (ordered[0], ordered[-1]) if n < 5 else (ordered[(n - 1) // 4], ordered[(3 * (n - 1)) // 4])
        return cls(
            value=median,
            low=min(ordered[rank], *halves) if halves else ordered[rank],
            high=max(ordered[n - 1 - rank], *halves) if halves else ordered[n - 1 - rank],
            spread=(quartiles[1] - quartiles[0]) / abs(median) if median else 0.0,
            samples=n,
        )

    @property
    def uncertainty(self) -> float:
        """Half the interval over the median: how far the median itself may be off."""
        return (self.high - self.low) / (2.0 * abs(self.value)) if self.value else 0.0

    def times(self, factor: float) -> Estimate:
        """The same in another unit."""
        return replace(self, value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def text(self, pattern: str = "{:.2f}") -> str:
        """'2.31 (2.28 to 2.40)'."""
        return f"{pattern.format(self.value)} ({pattern.format(self.low)} to {pattern.format(self.high)})"


def _interval_rank(n: int) -> int:
    """Index of the order statistic that bounds the median from below: at most TAIL of the chance lies under it."""
    below, rank = 0.0, 0
    while rank < n // 2:
        below += math.comb(n, rank) / 2.0**n
        if below > TAIL:
            break
        rank += 1
    return max(0, rank - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure: at least `rounds` rounds, more until every median is settled or budget_s has gone by.

    For quiet rounds, when the first were disturbed, it goes on for twice budget_s.
    long_s: a sample that takes longer warms itself up, so its first one counts (None: none does).
    """

    rounds: int = 5
    budget_s: float = 10.0
    settled: float = 0.015
    long_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rounds:
    """times_RN[r, n]: seconds of point n in round r. others: share of the cores' time that other processes took, on average
    over all rounds; set_aside: rounds that were left out because of them; is_disturbed: fewer than LEAST_QUIET were quiet,
    so that the times are those of disturbed rounds, too, and decide nothing.
    """

    times_RN: np.ndarray
    others: float = 0.0
    set_aside: int = 0
    is_disturbed: bool = False

    def point(self, n: int) -> Estimate:
        """The time of one point."""
        return Estimate.of(self.times_RN[:, n].tolist())

    def of(self, statistic: Callable[[np.ndarray], float]) -> Estimate:
        """A quantity computed from the times [N] of each round."""
        return Estimate.of([float(statistic(times_N)) for times_N in self.times_RN])

    def each(self, statistics_K: Callable[[np.ndarray], np.ndarray]) -> list[Estimate]:
        """Several quantities [K] computed from the times [N] of each round."""
        values_RK = np.array([statistics_K(times_N) for times_N in self.times_RN])
        return [Estimate.of(column.tolist()) for column in values_RK.T]

    def rate(self, n: int, amount: float) -> Estimate:
        """`amount` per second at point n."""
        return Estimate.of((amount / self.times_RN[:, n]).tolist())


class Others:
    """Watches how much of the cores' time is taken by anything but this process and its children, steal included."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._now()

    def share(self) -> float:
        """Their share since the last call, 0 to 1. Times come in hundredths of a second: a short span is coarse."""
        before, self._last = self._last, self._now()
        total, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, max(0.0, busy - own) / total) if total > 0.0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        system, own = psutil.cpu_times(), self._process.cpu_times()
        ranks = 0.0  # children that run: those that have ended are in `own`
        for child in self._process.children():
            with suppress(psutil.Error):  # ended meanwhile
                times = child.cpu_times()
                ranks += times.user + times.system
        # guest time is part of user time already
        fields = system._asdict()
        total = sum(seconds for name, seconds in fields.items() if not name.startswith("guest"))
        idle = system.idle + getattr(system, "iowait", 0.0)
        return total, total - idle, own.user + own.system + own.children_user + own.children_system + ranks


def measure(samplers: Sequence[Sampler], effort: Effort, *, progress: Callable[[str], None] | None = None) -> Rounds:
    """Time the points in turns. Each is sampled once before the first round, which counts only where it was long."""
    clock = MonotonicClock()
    others = Others()
    first = [take() for take in samplers]
    ready = [seconds if effort.long_s is not None and seconds > effort.long_s else None for seconds in first]
    if not any(ready):
        others = Others()
    begin_s = clock.now_s()
    quiet: list[list[float]] = []
    disturbed: list[list[float]] = []
    shares: list[float] = []
    while len(shares) < MOST_ROUNDS:
        n, spent_s = len(shares), clock.now_s() - begin_s
        if n >= effort.rounds:
            is_enough = len(quiet) >= effort.rounds
            limit_s = effort.budget_s if is_enough else 2.0 * effort.budget_s
            if spent_s + spent_s / n > limit_s or (is_enough and _is_settled(quiet, effort.settled)):
                break
        if progress is not None:
            progress(f"round {n + 1}" + (f", {len(disturbed)} of them disturbed" if disturbed else ""))
        row = [take() if seconds is None else seconds for take, seconds in zip(samplers, ready, strict=True)]
        ready = [None] * len(row)
        shares.append(others.share())
        (disturbed if shares[-1] > DISTURBED else quiet).append(row)
    is_disturbed = len(quiet) < min(effort.rounds, LEAST_QUIET)
    kept = quiet + disturbed if is_disturbed else quiet
    others_share = float(np.mean(shares))
    return Rounds(np.array(kept), others=others_share, set_aside=len(shares) - len(kept), is_disturbed=is_disturbed)


class Verdict(Enum):
    """Whether a ratio is at least a limit."""

    YES = "yes"
    NO = "no"
    OPEN = "not decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """How many times as fast the second of two ways is, and whether that is at least the limit: where the whole interval is on
    one side of it, and the machine was quiet. others, set_aside: see Rounds.
    """

    gain: Estimate
    verdict: Verdict
    others: float = 0.0
    set_aside: int = 0

    def text(self) -> str:
        """'1.02 (0.99 to 1.04) over 16 pairs, yes'."""
        aside = f", {self.set_aside} more set aside" if self.set_aside else ""
        return f"{self.gain.text('{:.3f}')} over {self.gain.samples} pairs{aside}, {self.verdict.value}"


def pairs(first: Sampler, second: Sampler, effort: Effort, *, limit: float) -> Pairs:
    """Times of `first` over those of `second`, in pairs, until it is decided whether the ratio is at least the limit, or
    effort.budget_s is over, and effort.rounds of them at least. Each is sampled once before. Pairs in which others used the
    machine are set aside; the interval is looked at when the pairs have doubled, as who looks after each is lucky some time.
    """
    clock, others = MonotonicClock(), Others()
    first(), second()
    others.share()
    begin_s = clock.now_s()
    quiet: list[float] = []
    disturbed: list[float] = []
    shares: list[float] = []
    looks_at = max(LEAST_PAIRS, effort.rounds)
    while len(shares) < MOST_PAIRS:
        n, spent_s = len(shares), clock.now_s() - begin_s
        if n >= effort.rounds and spent_s + spent_s / max(n, 1) > effort.budget_s:
            break
        if len(quiet) >= looks_at:
            looks_at = 2 * len(quiet)
            if _verdict(Estimate.of(quiet), limit) is not Verdict.OPEN:
                break
        if n % 2:
            second_s, first_s = second(), first()
        else:
            first_s, second_s = first(), second()
        shares.append(others.share())
        (disturbed if shares[-1] > DISTURBED else quiet).append(first_s / second_s)
    is_quiet = len(quiet) >= LEAST_QUIET
    gain = Estimate.of(quiet if is_quiet else quiet + disturbed)
    verdict = _verdict(gain, limit) if is_quiet else Verdict.OPEN
    aside = len(disturbed) if is_quiet else 0
    return Pairs(gain=gain, verdict=verdict, others=float(np.mean(shares)), set_aside=aside)


def _verdict(gain: Estimate, limit: float) -> Verdict:
    if gain.samples < LEAST_PAIRS:
        return Verdict.OPEN
    return Verdict.YES if gain.low >= limit else Verdict.NO if gain.high < limit else Verdict.OPEN


def _is_settled(rows: Sequence[Sequence[float]], settled: float) -> bool:
    return all(Estimate.of(column).uncertainty <= settled for column in zip(*rows, strict=True))


def burst(
    run: Callable[[], object],
    clock: Clock | None = None,
    *,
    choose: Callable[[Sequence[float]], float] = min,
    between: Callable[[], object] | None = None,
) -> Sampler:
    """A sampler of something that does the same work every time: a long run is timed once, a short one several times.

    Of several the quickest counts: what another run of equal work takes longer is not its own time. choose: another one of
    them, such as the median, for what a run usually takes. between: done before each of several, and not timed: what a run
    finds in the caches where runs of its kind do not follow one another.
    """
    clock = clock or MonotonicClock()

    def timed() -> float:
        begin_s = clock.now_s()
        run()
        return clock.now_s() - begin_s

    def sample() -> float:
        first_s = timed()
        if first_s >= BURST_S:
            return first_s
        times_s: list[float] = []
        while sum(times_s) < BURST_S and len(times_s) < BURST_RUNS:
            if between is not None:
                between()
            times_s.append(timed())
        return choose(times_s)

    return sample
