"""Which requests are taken when there is more work than the engine can do: a bound on the predicted wait, in seconds.

Owns the tokens of requests that have not been answered their first token yet, and a running estimate of the engine's
rate. Control has its own bound in tokens (`max_waiting_tokens`); this one keeps the latency of those admitted.
"""

from __future__ import annotations

from diptych.server.errors import ApiError

# the estimate forgets a fast second at this rate, so that a slower mix of requests is noticed within a minute
RATE_DECAY_PER_S = 0.02
MIN_OBSERVED_S = 0.25
SMOOTHING = 0.1


class Admission:
    """Predicts how long a new request would wait. All times are passed in; used on the event loop only."""

    def __init__(self, *, max_queue_s: float | None, max_open_requests: int) -> None:
        self._max_queue_s = max_queue_s
        self._max_open_requests = max_open_requests
        self._waiting_tokens: dict[str, int] = {}
        self.n_open = 0
        self._output_tokens = 128.0  # typical length of an answer, smoothed
        self._rate: float | None = None  # tokens per second of both phases, at its best lately
        self._last_tokens = 0
        self._last_s: float | None = None

    def observe(self, tokens: int, now_s: float) -> None:
        """Tell how many tokens of both phases the engine has done in all, by now."""
        if self._last_s is None or tokens < self._last_tokens:
            self._last_s, self._last_tokens = now_s, tokens
            return
        elapsed_s = now_s - self._last_s
        if elapsed_s < MIN_OBSERVED_S:
            return
        measured = (tokens - self._last_tokens) / elapsed_s
        decayed = (self._rate or 0.0) * max(0.0, 1.0 - RATE_DECAY_PER_S * elapsed_s) if measured > 0 else self._rate
        self._rate = max(measured, decayed or 0.0) or None
        self._last_s, self._last_tokens = now_s, tokens

    def predicted_wait_s(self) -> float:
        """How long the requests that wait now will keep the engine busy."""
        if self._rate is None:
            return 0.0
        return sum(self._waiting_tokens.values()) / self._rate

    def check(self, *, n_waiting: int) -> None:
        """Raise ApiError 503 when a new request would wait too long. n_waiting: sequences waiting in control."""
        if self.n_open >= self._max_open_requests:
            raise ApiError(
                503,
                f"{self.n_open} requests are open; this server takes at most {self._max_open_requests} at one time",
                code="overloaded",
                retry_after_s=max(1.0, self.predicted_wait_s()),
            )
        if self._max_queue_s is None or n_waiting == 0:
            return
        wait_s = self.predicted_wait_s()
        if wait_s > self._max_queue_s:
            raise ApiError(
                503,
                f"a new request would wait about {wait_s:.1f} s for its first step; this server allows "
                f"{self._max_queue_s:g} s\nhint: try again later, or raise --max-queue-s",
                code="overloaded",
                retry_after_s=wait_s,
            )

    def opened(self, request_id: str, *, prompt_tokens: int, max_tokens: int) -> None:
        """A request was submitted and waits for its first token."""
        self.n_open += 1
        self._waiting_tokens[request_id] = prompt_tokens + int(min(max_tokens, self._output_tokens))

    def first_token(self, request_id: str) -> None:
        """It waits no longer."""
        self._waiting_tokens.pop(request_id, None)

    def closed(self, request_id: str, *, output_tokens: int) -> None:
        """It ended, however."""
        self.n_open -= 1
        self._waiting_tokens.pop(request_id, None)
        if output_tokens > 0:
            self._output_tokens += SMOOTHING * (output_tokens - self._output_tokens)
