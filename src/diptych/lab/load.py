"""Load for any OpenAI-compatible server: open loop (Poisson, seeded, never rescaled) or closed loop.

Latency counts from the moment a request was due, not from when this program got round to sending it, so a slow client
cannot hide a queue. A failed request is a miss of every objective. Definitions of the metrics: `DEFINITIONS`.

>>> plan = arrivals(3, rate_per_s=2.0, seed=0)
>>> plan == sorted(plan), len(plan)
(True, 3)
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from diptych.ground.clock import Clock, MonotonicClock
from diptych.lab.http_client import HttpClient, HttpFailure

DEFINITIONS = {
    "ttft_s": "time to first token: from when the request was due to the first event that carries output",
    "itl_s": "inter-token latency: gaps between neighbouring output events of one answer, all answers pooled "
    "(time between tokens, TBT, elsewhere)",
    "tpot_s": "time per output token: (last event - first event) / (output tokens - 1), one value per answer",
    "e2e_s": "end to end: from when the request was due to the end of its answer",
    "lag_s": "how late this program sent the request; large values mean that the client machine was the limit",
    "goodput_per_s": "requests per second that met every objective; failures never do",
    "attainment": "share of all requests sent that met every objective",
    "output_tokens_per_s": "output tokens of answered requests / wall time from the first due to the last end",
    "prompt_tokens_per_s": "prompt tokens of answered requests / the same wall time",
}
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """What to send. Exactly one of rate_per_s (open loop) and concurrency (closed loop).

    prompt_tokens, new_tokens: (low, high), drawn uniformly. vocab_size: send random token ids below it, so that lengths
    are exact; None: send English words, about one token each. shared_prefix_tokens: the same start for every prompt.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = "completions"
    requests: int = 100
    rate_per_s: float | None = None
    concurrency: int | None = None
    prompt_tokens: tuple[int, int] = (128, 128)
    new_tokens: tuple[int, int] = (64, 64)
    shared_prefix_tokens: int = 0
    vocab_size: int | None = None
    seed: int = 0
    ignores_eos: bool = True
    ttft_objective_s: float | None = None
    tpot_objective_s: float | None = None
    timeout_s: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request as the client saw it; times are seconds since the run began."""

    number: int
    due_s: float
    sent_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    status: int | None = None
    timings: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float | None:
        """From due to the first output event."""
        return self.event_s[0] - self.due_s if self.event_s else None

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None for answers of one token."""
        if self.output_tokens < 2 or len(self.event_s) < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)


def arrivals(n_requests: int, *, rate_per_s: float, seed: int) -> list[float]:
    """Due times of a Poisson process: sums of exponential gaps as they were drawn.

    They are not stretched to end at n / rate: that would remove the very bursts that make queues.
    """
    noise = random.Random(seed)
    due_s, times = 0.0, []
    for _ in range(n_requests):
        due_s += noise.expovariate(rate_per_s)
        times.append(due_s)
    return times


def bodies(config: LoadConfig) -> list[dict[str, Any]]:
    """Request bodies, the same for the same config and seed."""
    noise = random.Random(config.seed + 1)
    prefix = _tokens(noise, config.shared_prefix_tokens, config.vocab_size)
    made = []
    for _ in range(config.requests):
        n_prompt = noise.randint(*config.prompt_tokens)
        content = (prefix + _tokens(noise, max(1, n_prompt - len(prefix)), config.vocab_size))[: max(1, n_prompt)]
        body: dict[str, Any] = {
            "max_tokens": noise.randint(*config.new_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            **config.extra_body,
        }
        if config.model is not None:
            body["model"] = config.model
        if config.ignores_eos:
            body["ignore_eos"] = True
        if config.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": " ".join(map(str, content))}]
        else:
            body["prompt"] = content if config.vocab_size is not None else " ".join(map(str, content))
        made.append(body)
    return made


def _tokens(noise: random.Random, n_tokens: int, vocab_size: int | None) -> list[Any]:
    if vocab_size is None:
        return [noise.choice(WORDS) for _ in range(n_tokens)]
    return [noise.randrange(vocab_size) for _ in range(n_tokens)]


async def run_load(
    config: LoadConfig, *, clock: Clock | None = None, on_done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Send everything and return one Outcome per request, in order. Never raises for a failed request."""
    clock = clock or MonotonicClock()
    client = HttpClient(config.url, api_key=config.api_key)
    sender = _Sender(client, config, clock)
    made = bodies(config)
    try:
        if config.rate_per_s is not None:
            due = arrivals(config.requests, rate_per_s=config.rate_per_s, seed=config.seed)
            return await sender.open_loop(made, due, on_done)
        return await sender.closed_loop(made, config.concurrency or 1, on_done)
    finally:
        await client.close()


class _Sender:
    def __init__(self, client: HttpClient, config: LoadConfig, clock: Clock) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._begin_s = clock.now_s()
        self._path = "/v1/chat/completions" if config.endpoint == "chat" else "/v1/completions"

    async def open_loop(
        self, made: Sequence[dict[str, Any]], due: Sequence[float], on_done: Callable[[Outcome], None] | None
    ) -> list[Outcome]:
        """Send each request when it is due, whatever became of the others."""
        self._begin_s = self._clock.now_s()
        tasks = []
        for number, (body, due_s) in enumerate(zip(made, due, strict=True)):
            wait_s = self._begin_s + due_s - self._clock.now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._send(number, body, due_s, on_done)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(
        self, made: Sequence[dict[str, Any]], concurrency: int, on_done: Callable[[Outcome], None] | None
    ) -> list[Outcome]:
        """Keep `concurrency` requests in flight; the next is due when one ends."""
        self._begin_s = self._clock.now_s()
        queue = iter(enumerate(made))

        async def worker() -> list[Outcome]:
            return [await self._send(number, body, self._now_s(), on_done) for number, body in queue]

        groups = await asyncio.gather(*(worker() for _ in range(min(concurrency, len(made)))))
        return sorted((one for group in groups for one in group), key=lambda one: one.number)

    def _now_s(self) -> float:
        return self._clock.now_s() - self._begin_s

    async def _send(
        self, number: int, body: dict[str, Any], due_s: float, on_done: Callable[[Outcome], None] | None
    ) -> Outcome:
        outcome = Outcome(number=number, due_s=due_s, sent_s=self._now_s())
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._read_answer(outcome, body)
        except HttpFailure as failure:
            outcome.error, outcome.status = str(failure), failure.status
        except TimeoutError:
            outcome.error = f"no complete answer within {self._config.timeout_s:g} s"
        outcome.end_s = self._now_s()
        if on_done is not None:
            on_done(outcome)
        return outcome

    async def _read_answer(self, outcome: Outcome, body: dict[str, Any]) -> None:
        async with aclosing(self._client.events(self._path, body)) as events:
            async for data in events:
                now_s = self._now_s()
                chunk = json.loads(data)
                if carries_output(chunk):
                    outcome.event_s.append(now_s)
                if chunk.get("usage"):
                    _note_usage(outcome, chunk)
        if outcome.output_tokens == 0:
            outcome.output_tokens = len(outcome.event_s)


def carries_output(chunk: dict[str, Any]) -> bool:
    """Whether a stream chunk brings tokens: text, reasoning, a tool call, or an event whose text is still held back."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta")
        if delta is None:
            if choice.get("text") or choice.get("finish_reason") is None:
                return True
        elif (
            delta.get("content")
            or delta.get("reasoning_content")
            or delta.get("tool_calls")
            or ("content" in delta and "role" not in delta and choice.get("finish_reason") is None)
        ):
            return True
    return False


def _note_usage(outcome: Outcome, chunk: dict[str, Any]) -> None:
    usage = chunk["usage"]
    outcome.prompt_tokens = usage.get("prompt_tokens") or 0
    outcome.output_tokens = usage.get("completion_tokens") or 0
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.timings = chunk.get("timings") or outcome.timings


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` of the values lie, interpolated linearly; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the mean."""
    kept = list(values)
    return {
        "p50": percentile(kept, 0.50),
        "p95": percentile(kept, 0.95),
        "p99": percentile(kept, 0.99),
        "mean": sum(kept) / len(kept) if kept else None,
    }


def summarize(config: LoadConfig, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything the run says, as one JSON object. Latencies are those of answered requests; failures are counted."""
    answered = [one for one in outcomes if one.error is None]
    first_due_s = min((one.due_s for one in outcomes), default=0.0)
    wall_s = max((one.end_s for one in outcomes), default=0.0) - first_due_s
    good = [one for one in answered if _meets(config, one)]
    gaps = [later - sooner for one in answered for sooner, later in zip(one.event_s, one.event_s[1:], strict=False)]
    failures: dict[str, int] = {}
    first_errors: dict[str, str] = {}
    for one in outcomes:
        if one.error is not None:
            key = f"status {one.status}" if one.status is not None else one.error.split(":")[0]
            failures[key] = failures.get(key, 0) + 1
            first_errors.setdefault(key, one.error)
    settings = asdict(config) | {"api_key": None}
    return {
        "config": settings,
        "requests": len(outcomes),
        "answered": len(answered),
        "failed": failures,
        "first_errors": first_errors,
        "wall_s": wall_s,
        "request_rate_per_s": len(answered) / wall_s if wall_s > 0 else None,
        "output_tokens_per_s": sum(one.output_tokens for one in answered) / wall_s if wall_s > 0 else None,
        "prompt_tokens_per_s": sum(one.prompt_tokens for one in answered) / wall_s if wall_s > 0 else None,
        "cached_tokens": sum(one.cached_tokens for one in answered),
        "ttft_s": spread(one.ttft_s for one in answered if one.ttft_s is not None),
        "itl_s": spread(gaps),
        "tpot_s": spread(one.tpot_s for one in answered if one.tpot_s is not None),
        "e2e_s": spread(one.end_s - one.due_s for one in answered),
        "lag_s": spread(one.sent_s - one.due_s for one in outcomes),
        "goodput_per_s": len(good) / wall_s if wall_s > 0 else None,
        "attainment": len(good) / len(outcomes) if outcomes else None,
        "definitions": DEFINITIONS,
    }


def _meets(config: LoadConfig, one: Outcome) -> bool:
    if config.ttft_objective_s is not None and (one.ttft_s is None or one.ttft_s > config.ttft_objective_s):
        return False
    return config.tpot_objective_s is None or one.tpot_s is None or one.tpot_s <= config.tpot_objective_s
