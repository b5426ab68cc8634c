"""Which engine a request goes to. Integers only, as in a router that sees tokens and nothing of the machine's clock.

Work is counted in prompt-token equivalents: one for each prompt token to compute, OUTPUT_WEIGHT for each token to write.
How long an answer will be is not known when it is asked; the mean of those seen stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.ground.config import one_of
from diptych.ground.request import Request

POLICIES = ("least-work", "longest-prefix", "round-robin")
# a decode row beside some tens of others costs about what a few prompt rows do, as it waits for its share of the weights
OUTPUT_WEIGHT = 8
FIRST_GUESS_TOKENS = 128  # of an answer, before any was seen


class Cache(Protocol):
    """What the router asks an engine."""

    def prefix_match(self, token_ids: tuple[int, ...], salt: str | None = None) -> int:
        """Leading tokens that are cached there."""
        ...


@dataclass(frozen=True, slots=True)
class _Sent:
    engine: int
    work: int


class Router:
    """least-work: where open requests and this one, less what is cached for it, add up to least. longest-prefix: where most
    of its prompt is cached, the least work among equals. round-robin: in turn.
    """

    def __init__(self, caches: Sequence[Cache], *, policy: str = "least-work") -> None:
        one_of("router", policy, POLICIES)
        self._caches = caches
        self._policy = policy
        self._work = [0] * len(caches)
        self._open: dict[str, _Sent] = {}
        self._turn = 0
        self._n_answers = 0
        self._answer_tokens = 0

    def choose(self, request: Request) -> int:
        """The engine for this request; its work counts until `forget`."""
        n, turn = len(self._caches), self._turn
        self._turn = (turn + 1) % n
        prompt_tokens = len(request.prompt_token_ids)
        cached = [0] * n
        if n > 1 and self._policy != "round-robin":
            cached = [cache.prefix_match(request.prompt_token_ids, request.cache_salt) for cache in self._caches]
        work = [prompt_tokens - hit + OUTPUT_WEIGHT * self._usual_answer * request.sampling.n for hit in cached]
        best = turn
        if self._policy != "round-robin":
            order = sorted(range(n), key=lambda i: (self._work[i] + work[i], (i - turn) % n))
            best = order[0] if self._policy == "least-work" else max(order, key=lambda i: cached[i])
        self._open[request.request_id] = _Sent(best, work[best])
        self._work[best] += work[best]
        return best

    def forget(self, request_id: str, *, output_tokens: int = 0) -> None:
        """It is over; output_tokens is what it wrote (0: it was refused)."""
        sent = self._open.pop(request_id)
        self._work[sent.engine] -= sent.work
        if output_tokens:
            self._n_answers += 1
            self._answer_tokens += output_tokens

    @property
    def _usual_answer(self) -> int:
        return self._answer_tokens // self._n_answers if self._n_answers else FIRST_GUESS_TOKENS
