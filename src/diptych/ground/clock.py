"""Time. The only module that imports `time`; everything else takes `now_s` or a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """One monotonic clock, in seconds since an arbitrary start."""

    def now_s(self) -> float:
        """The current instant, never going back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds of `time.perf_counter`."""
        return time.perf_counter()


class VirtualClock:
    """A clock that moves only when told to (simulator, tests)."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The instant last advanced to."""
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move forward by `by_s` seconds; going back is an error of ours."""
        assert by_s >= 0.0, by_s
        self._now_s += by_s

    def move_to(self, at_s: float) -> None:
        """Move forward to an instant."""
        assert at_s >= self._now_s, (at_s, self._now_s)
        self._now_s = at_s


def wall_time_s() -> float:
    """Seconds since the epoch, for timestamps in answers and reports (never for durations)."""
    return time.time()


def sleep_s(duration_s: float) -> None:
    """Block this thread; for load generators and benchmarks only."""
    time.sleep(duration_s)
