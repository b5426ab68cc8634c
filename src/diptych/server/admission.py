"""Which requests are taken when there is more work than the engine can do: a bound on the predicted wait, in seconds.

Owns an estimate of how fast the line moves. Control has its own bound in tokens (`max_waiting_tokens`); this one keeps the
latency of the requests that are admitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.server.errors import ApiError

SMOOTHING = 0.2
# prefill tokens between two samples below which a sample says more about step overhead than about the rate
MIN_SAMPLE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What stands before a new request. oldest_s: how long the first in line has waited already."""

    waiting: int
    waiting_prompt_tokens: int
    oldest_s: float
    running: int
    max_running: int


class Admission:
    """Predicts how long a new request would wait for its first step. Used on the event loop only."""

    def __init__(self, *, max_queue_s: float | None, max_open_requests: int) -> None:
        self._max_queue_s = max_queue_s
        self._max_open_requests = max_open_requests
        self.n_open = 0
        self._prefill_token_s: float | None = None
        self._service_s: float | None = None  # first step to last token, smoothed
        self._seen = (0, 0.0)

    def observe(self, prefill_tokens: int, prefill_steps_s: float) -> None:
        """Tell the totals so far: tokens prefilled, and time of the steps that held any."""
        tokens, seconds = prefill_tokens - self._seen[0], prefill_steps_s - self._seen[1]
        if tokens < MIN_SAMPLE_TOKENS:
            return
        self._seen = (prefill_tokens, prefill_steps_s)
        self._prefill_token_s = _smooth(self._prefill_token_s, seconds / tokens)

    def predicted_wait_s(self, backlog: Backlog) -> float:
        """Time until a request that arrives now is scheduled.

        The prompts before it must be read; where all places are taken, some must become free. And it will hardly wait
        less than the first in line has waited already, whatever the reason.
        """
        if backlog.waiting == 0:
            return 0.0
        wait_s = backlog.waiting_prompt_tokens * (self._prefill_token_s or 0.0)
        n_places_needed = backlog.running + backlog.waiting + 1 - backlog.max_running
        if n_places_needed > 0 and self._service_s is not None:
            wait_s = max(wait_s, n_places_needed * self._service_s / backlog.max_running)
        return max(wait_s, backlog.oldest_s)

    def check(self, backlog: Backlog) -> None:
        """Raise ApiError 503 when a new request would wait too long.

        While there are places for all, nobody is refused: a burst of no more clients than places is no overload.
        """
        wait_s = self.predicted_wait_s(backlog)
        if self.n_open >= self._max_open_requests:
            raise ApiError(
                503,
                f"{self.n_open} requests are open; this server takes at most {self._max_open_requests} at one time",
                code="overloaded",
                retry_after_s=max(1.0, wait_s),
            )
        has_place = backlog.running + backlog.waiting < backlog.max_running
        if self._max_queue_s is not None and not has_place and wait_s > self._max_queue_s:
            raise ApiError(
                503,
                f"a new request would wait about {wait_s:.1f} s for its first step; this server allows "
                f"{self._max_queue_s:g} s\nhint: try again later, or raise --max-queue-s",
                code="overloaded",
                retry_after_s=wait_s,
            )

    def opened(self) -> None:
        """A request was submitted."""
        self.n_open += 1

    def closed(self, *, service_s: float | None) -> None:
        """It ended, however; service_s: from its first step to its end, None when it was cut short."""
        self.n_open -= 1
        if service_s is not None:
            self._service_s = _smooth(self._service_s, service_s)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
