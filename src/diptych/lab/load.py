"""Load for any OpenAI-compatible server: open loop (Poisson, seeded, never rescaled) or closed loop.

Latency counts from the moment a request was due, not from when this program got round to sending it, so a slow client
cannot hide a queue. A failed request is a miss of every objective. Definitions of the metrics: `DEFINITIONS`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from diptych import metrics
from diptych.ground.clock import Clock, MonotonicClock
from diptych.lab.http_client import HttpClient, HttpFailure
from diptych.metrics import Distribution, Limits, Sample, distribution
from diptych.workload import LengthRange, WorkloadSpec, make_workload, token_ids_of

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
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """What to send. Exactly one of rate_per_s (open loop) and concurrency (closed loop).

    prompt_tokens, new_tokens: (low, high), drawn uniformly. vocab_size: send random token ids below it, so that lengths
    are exact; None, and in a chat: send English words, about one token each. shared_prefix_tokens: the same start for every
    prompt, put before its own tokens.
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

    @property
    def workload(self) -> WorkloadSpec:
        """Arrivals and lengths."""
        return WorkloadSpec(
            n_requests=self.requests,
            prompt=LengthRange(low=self.prompt_tokens[0], high=self.prompt_tokens[1]),
            output=LengthRange(low=self.new_tokens[0], high=self.new_tokens[1]),
            rate_per_s=self.rate_per_s,
            shared_prefix_tokens=self.shared_prefix_tokens,
            seed=self.seed,
        )


@dataclass(slots=True, kw_only=True)
class SentRequest:
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

    @property
    def sample(self) -> Sample:
        """This request as the metrics room counts it."""
        return Sample(
            start_s=self.due_s,
            end_s=self.end_s,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            itl_s=tuple(later - sooner for sooner, later in pairwise(self.event_s)),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            is_complete=self.error is None,
        )


def bodies(config: LoadConfig) -> list[dict[str, Any]]:
    """Request bodies, the same for the same config and seed."""
    made = []
    for item in make_workload(config.workload):
        vocab_size = None if config.endpoint == "chat" else config.vocab_size
        ids = token_ids_of(item, vocab_size=vocab_size or len(WORDS), seed=config.seed)
        body: dict[str, Any] = {
            "max_tokens": item.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            **config.extra_body,
        }
        if config.model is not None:
            body["model"] = config.model
        if config.ignores_eos:
            body["ignore_eos"] = True
        prompt = list(ids) if vocab_size is not None else " ".join(WORDS[token_id] for token_id in ids)
        if config.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        made.append(body)
    return made


async def run_load(
    config: LoadConfig, *, clock: Clock | None = None, on_done: Callable[[SentRequest], None] | None = None
) -> list[SentRequest]:
    """Send everything and return one SentRequest per request, in order. Never raises for a failed request."""
    clock = clock or MonotonicClock()
    client = HttpClient(config.url, api_key=config.api_key)
    sender = _Sender(client, config, clock)
    made = bodies(config)
    try:
        if config.rate_per_s is not None:
            due = [item.at_s for item in make_workload(config.workload)]
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
        self, made: Sequence[dict[str, Any]], due: Sequence[float], on_done: Callable[[SentRequest], None] | None
    ) -> list[SentRequest]:
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
        self, made: Sequence[dict[str, Any]], concurrency: int, on_done: Callable[[SentRequest], None] | None
    ) -> list[SentRequest]:
        """Keep `concurrency` requests in flight; the next is due when one ends."""
        self._begin_s = self._clock.now_s()
        queue = iter(enumerate(made))

        async def worker() -> list[SentRequest]:
            return [await self._send(number, body, self._now_s(), on_done) for number, body in queue]

        groups = await asyncio.gather(*(worker() for _ in range(min(concurrency, len(made)))))
        return sorted((one for group in groups for one in group), key=lambda one: one.number)

    def _now_s(self) -> float:
        return self._clock.now_s() - self._begin_s

    async def _send(
        self, number: int, body: dict[str, Any], due_s: float, on_done: Callable[[SentRequest], None] | None
    ) -> SentRequest:
        outcome = SentRequest(number=number, due_s=due_s, sent_s=self._now_s())
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

    async def _read_answer(self, outcome: SentRequest, body: dict[str, Any]) -> None:
        async with aclosing(self._client.events(self._path, body)) as events:
            async for data in events:
                now_s = self._now_s()
                try:
                    chunk = json.loads(data)
                    if carries_output(chunk):
                        outcome.event_s.append(now_s)
                    if chunk.get("usage"):
                        _note_usage(outcome, chunk)
                except (ValueError, TypeError, AttributeError) as error:
                    said = data[:100].decode(errors="replace")
                    raise HttpFailure(f"an event is no chunk of an answer: {said}") from error
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


def _note_usage(outcome: SentRequest, chunk: dict[str, Any]) -> None:
    usage = chunk["usage"]
    outcome.prompt_tokens = usage.get("prompt_tokens") or 0
    outcome.output_tokens = usage.get("completion_tokens") or 0
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.timings = chunk.get("timings") or outcome.timings


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the mean."""
    return _spread(distribution(list(values)))


def _spread(found: Distribution | None) -> dict[str, float | None]:
    return {name: None if found is None else getattr(found, name) for name in ("p50", "p95", "p99", "mean")}


def summarize(config: LoadConfig, outcomes: Sequence[SentRequest]) -> dict[str, Any]:
    """Everything the run says, as one JSON object. Latencies are those of answered requests; failures are counted."""
    limits = Limits(ttft_s=config.ttft_objective_s, tpot_s=config.tpot_objective_s)
    total = metrics.summarize([one.sample for one in outcomes], limits=limits)
    failures: dict[str, int] = {}
    first_errors: dict[str, str] = {}
    for one in outcomes:
        if one.error is not None:
            key = f"status {one.status}" if one.status is not None else one.error.split(":")[0]
            failures[key] = failures.get(key, 0) + 1
            first_errors.setdefault(key, one.error)
    has_time = total.duration_s > 0.0
    return {
        "config": asdict(config) | {"api_key": None},
        "requests": len(outcomes),
        "answered": total.n_complete,
        "failed": failures,
        "first_errors": first_errors,
        "wall_s": total.duration_s,
        "request_rate_per_s": total.requests_per_s if has_time else None,
        "output_tokens_per_s": total.output_tokens_per_s if has_time else None,
        "prompt_tokens_per_s": total.prompt_tokens / total.duration_s if has_time else None,
        "cached_tokens": sum(one.cached_tokens for one in outcomes if one.error is None),
        "ttft_s": _spread(total.ttft_s),
        "itl_s": _spread(total.itl_s),
        "tpot_s": _spread(total.tpot_s),
        "e2e_s": _spread(total.e2e_s),
        "lag_s": spread(one.sent_s - one.due_s for one in outcomes),
        "goodput_per_s": total.goodput_requests_per_s if has_time else None,
        "attainment": total.good_share if outcomes else None,
        "definitions": DEFINITIONS,
    }
