"""Which requests are taken when there is more work than the engine can do: a bound on the predicted wait, in seconds.

Owns an estimate of how fast the line moves, and whether the server is overloaded. Control has its own bound in tokens
(`max_waiting_tokens`); this one keeps the latency of the requests that are admitted. A request is taken when

1. there is a free place, as nobody knows when another becomes free, and its predicted wait is within the bound: as long as
   its own prompt or QUEUED_PROMPTS usual ones take to read; or
2. nobody was refused within OVERLOAD_S, or since the engine had nothing to do; there is a place for everybody; and this is
   a burst: the line has been long for at most BURST_S, or no more sequences are open than the burst brought (clients of a
   closed loop that come again).

So clients that start together are served together, and a rate beyond the engine's meets the strict rule 1 after half a
second. A queue that stands is told from a burst by how long it lasts, as in CoDel (Nichols and Jacobson, ACM Queue 2012).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from diptych.server.http.errors import ApiError

SMOOTHING = 0.2
# prefill tokens between two samples below which a sample says more about step overhead than about the rate
MIN_SAMPLE_TOKENS = 64
# one in twelve waits longer while the engine is half busy (M/D/1), so that overload waits like normal load
QUEUED_PROMPTS = 2
# a fast model's prompts are read within the jitter of threads and sockets
MIN_QUEUE_S = 0.05
# 64 clients that start together are read and parsed within 0.3 s on two busy cores
BURST_S = 0.5
# how long a refusal keeps the strict rule while there is work; a closed loop that starts later is a burst again
OVERLOAD_S = 1.0
MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What stands before a new request.

    unread_tokens: of prompts, not yet in any step. step_left_s: until the running step should end. oldest_s: how long the
    first in line has waited already. decode_step_s: of a usual step without prompts, which everybody waits for.
    sequences: running, waiting, and on their way to the engine.
    """

    unread_tokens: int = 0
    step_left_s: float = 0.0
    oldest_s: float = 0.0
    decode_step_s: float = 0.0
    sequences: int = 0
    max_running: int

    @property
    def has_place(self) -> bool:
        """Whether a new sequence could run at once."""
        return self.sequences < self.max_running


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a usual request that arrives now would meet: its predicted wait, the bound, and whether others are refused."""

    wait_s: float
    bound_s: float
    is_overloaded: bool


class Admission:
    """Predicts how long a new request would wait for its first step, and refuses. Used on the event loop only.

    max_queue_s: the bound as a fixed number instead, which may be spent waiting for a place; math.inf: never refuse.
    """

    def __init__(self, *, max_queue_s: float | None, max_open_requests: int) -> None:
        self._max_queue_s = max_queue_s
        self._max_open_requests = max_open_requests
        self.n_open = 0
        self.entering: dict[
            str, int
        ] = {}  # prompt tokens of requests that were let in and may not be in the engine yet
        self._prefill_token_s = 0.0  # per prompt token, cached ones included
        self._prompt_tokens = 0.0  # of a usual request
        self._service_s = 0.0  # first step to last token, smoothed
        self._seen = (0, 0.0)
        self._burst_since_s: float | None = None
        self._burst_sequences = 0
        self._strict_until_s = float("-inf")
        self._next_turn_s = float("-inf")

    @property
    def n_in_hand(self) -> int:
        """Requests that are open, and those on their way to the engine."""
        return self.n_open + len(self.entering)

    def observe(self, prompt_tokens: int, prefill_steps_s: float) -> None:
        """Tell the totals so far: prompt tokens read or found cached, and time of the steps that held any."""
        tokens, seconds = prompt_tokens - self._seen[0], prefill_steps_s - self._seen[1]
        if tokens < MIN_SAMPLE_TOKENS:
            return
        self._seen = (prompt_tokens, prefill_steps_s)
        self._prefill_token_s = _smooth(self._prefill_token_s, seconds / tokens)

    def predicted_wait_s(self, backlog: Backlog) -> float:
        """Time until a request that arrives now is scheduled.

        The running step must end and the prompts before it must be read; where all places are taken, some must become
        free. And it will hardly wait less than the first in line has waited already, whatever the reason.
        """
        wait_s = backlog.step_left_s + backlog.unread_tokens * self._prefill_token_s
        n_places_needed = backlog.sequences + 1 - backlog.max_running
        if n_places_needed > 0:
            wait_s = max(wait_s, n_places_needed * self._service_s / backlog.max_running)
        return max(wait_s, backlog.oldest_s)

    def bound_s(self, backlog: Backlog, prompt_tokens: int) -> float:
        """The longest predicted wait at which a request is taken whatever else is going on."""
        if self._max_queue_s is not None:
            return self._max_queue_s
        tokens = max(prompt_tokens, QUEUED_PROMPTS * self._prompt_tokens)
        return max(MIN_QUEUE_S, tokens * self._prefill_token_s) + backlog.decode_step_s

    def is_overloaded(self, now_s: float) -> bool:
        """Whether somebody was refused for a long line within OVERLOAD_S."""
        return now_s < self._strict_until_s

    def outlook(self, backlog: Backlog, *, now_s: float) -> Outlook:
        """The state of admission, for metrics and for `Retry-After` of other refusals."""
        return Outlook(self.predicted_wait_s(backlog), self.bound_s(backlog, 0), self.is_overloaded(now_s))

    def check(self, backlog: Backlog, *, prompt_tokens: int, now_s: float, n_requests: int = 1) -> None:
        """Raise ApiError 503 when a new request would wait too long (see the module) or too many are open.

        n_requests: of one body, which are let in together: each waits for those before it, however long that takes.
        """
        if backlog.sequences == 0:
            self._strict_until_s = now_s
        wait_s = self.predicted_wait_s(backlog)
        retry_s = partial(self._turn_s, backlog, wait_s, prompt_tokens=prompt_tokens, now_s=now_s)
        if self.n_in_hand and self.n_in_hand + n_requests > self._max_open_requests:
            raise ApiError(
                503,
                f"{self.n_in_hand} requests are open; this server takes at most {self._max_open_requests} at one time",
                code="overloaded",
                retry_after_s=retry_s(),
            )
        self._prompt_tokens = _smooth(self._prompt_tokens, prompt_tokens)
        bound_s, is_overloaded = self.bound_s(backlog, prompt_tokens), self.is_overloaded(now_s)
        may_wait = backlog.has_place or self._max_queue_s is not None
        if wait_s <= bound_s and may_wait:
            self._burst_since_s = None
        elif is_overloaded or not self._is_burst(backlog, now_s):
            self._strict_until_s = now_s + OVERLOAD_S
            raise ApiError(
                503,
                f"a new request would wait about {wait_s:.2f} s for its first step; this server allows "
                f"{bound_s:.2f} s\nhint: try again later, or raise --max-queue-s",
                code="overloaded",
                retry_after_s=retry_s(),
            )

    def _is_burst(self, backlog: Backlog, now_s: float) -> bool:
        """Whether a request that must wait belongs to a burst for which there are places."""
        if not backlog.has_place:
            return False
        if self._burst_since_s is None:
            self._burst_since_s, self._burst_sequences = now_s, 0
        if now_s - self._burst_since_s <= BURST_S:
            self._burst_sequences = max(self._burst_sequences, backlog.sequences + 1)
        return backlog.sequences < self._burst_sequences

    def _turn_s(self, backlog: Backlog, wait_s: float, *, prompt_tokens: int, now_s: float) -> float:
        """When to come again: after the line and after those who were sent away before, one turn of service each.

        By the time that as many turns are over as there are sequences now, all of these have left. Nobody is told a later
        time than that: those sent away beyond it share the turns.
        """
        turn_s = max(prompt_tokens * self._prefill_token_s, self._service_s / backlog.max_running)
        first_s = now_s + wait_s + turn_s
        last_s = now_s + min(MAX_RETRY_S, wait_s + turn_s * max(1, backlog.sequences))
        self._next_turn_s = max(self._next_turn_s + turn_s, first_s)
        if self._next_turn_s > last_s:
            self._next_turn_s = min(first_s, last_s)
        return self._next_turn_s - now_s

    @contextmanager
    def enter(self, request_id: str, prompt_tokens: int) -> Iterator[None]:
        """Keep a request that was let in under `entering` until the engine has taken or refused it."""
        self.entering[request_id] = prompt_tokens
        try:
            yield
        finally:
            self.entering.pop(request_id, None)

    def opened(self) -> None:
        """A request was submitted."""
        self.n_open += 1

    def closed(self, *, service_s: float | None) -> None:
        """It ended, however; service_s: from its first step to its end, None when it was cut short."""
        self.n_open -= 1
        if service_s is not None:
            self._service_s = _smooth(self._service_s, service_s)


def _smooth(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old) if old > 0.0 else new
