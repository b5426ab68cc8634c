"""From a validated body to open engine requests, and from their deltas to accounts. Shared by all routes that run the model.

Owns the life of a request on the server's side: it is admitted, opened, read, and in every case closed exactly once,
also when the client leaves half-way; then its account is final and counted.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from diptych.engine.adapters import Adapters
from diptych.engine.async_llm import RequestHandle
from diptych.engine.encoder import Encoder
from diptych.engine.engine import OutputDelta
from diptych.engine.spans import OpenSpan
from diptych.engine.text.template import RenderedPrompt
from diptych.ground.errors import EngineError, GrammarError, RequestError
from diptych.ground.phase import FinishReason
from diptych.ground.request import AdapterRef, SamplingParams, StructuredSpec
from diptych.ground.step import TokenLogprobs
from diptych.server.accounting import Accountant
from diptych.server.desk import Desk
from diptych.server.fingerprint import with_adapter
from diptych.server.http.door import Workers
from diptych.server.http.errors import ApiError, from_engine_error
from diptych.server.reader import Ids, Reader
from diptych.server.schema import SamplingBody
from diptych.server.watch.metrics_export import ServedModel
from diptych.server.watch.request_spans import NAME, end_request_span

logger = logging.getLogger("diptych.server")

_NAMES_TOLD = 8  # of adapters, to whom asks for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What answers a request: its name and fingerprint, as answers tell them, and the adapter where it is one."""

    name: str
    fingerprint: str | None
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the generation routes need of the server, and nothing else.

    names: those under which the model may be asked for; takes_any_name: under any other too. adapters: asked for by theirs.
    """

    model: ServedModel
    names: frozenset[str]
    takes_any_name: bool
    adapters: Adapters
    reader: Reader
    desk: Desk
    workers: Workers
    accountant: Accountant
    encoder: Encoder | None = None  # where the model embeds or scores

    @property
    def context_tokens(self) -> int:
        """Prompt and output of one sequence together."""
        return self.model.max_context_tokens

    def served(self, name: str | None) -> Served:
        """What a body asks for: the model, where it names none, or an adapter. Raises 404 for what is not served here."""
        adapter = None if name is None or name in self.names else self.adapters.named(name)
        if adapter is not None:
            return Served(
                name=adapter.name,
                fingerprint=with_adapter(self.model.fingerprint, adapter.revision),
                adapter=adapter,
            )
        if name is not None and name not in self.names and not self.takes_any_name:
            others = "".join(f", {one.ref.name!r}" for one in self.adapters.served[:_NAMES_TOLD])
            raise ApiError(
                404,
                f"model {name[:100]!r} is not served here; this server has {self.model.name!r}{others}",
                param="model",
                code="model_not_found",
            )
        return Served(name=self.model.name, fingerprint=self.model.fingerprint)

    def output_limit(self, asked_tokens: int | None, *, default: int | None, prompt_tokens: int, param: str) -> int:
        """How many tokens may follow a prompt: what was asked for, else the default as far as the context reaches.

        Raises ApiError 400 when more is asked for than fits. A prompt that leaves no room at all is refused by the engine.
        """
        room = self.context_tokens - prompt_tokens
        if asked_tokens is not None and asked_tokens > room > 0:
            raise ApiError(
                400,
                f"{param} is {asked_tokens} and the prompt has {prompt_tokens} tokens, together "
                f"{asked_tokens + prompt_tokens}; the context of this model is {self.context_tokens}, so {param} may be at "
                f"most {room} (hint: leave it out to use all the room)",
                param=param,
                code="context_length_exceeded",
            )
        wanted = asked_tokens if asked_tokens is not None else default
        return 0 if wanted == 0 else max(1, room if wanted is None else min(wanted, room))


@dataclass(slots=True)
class StepDelta:
    """What one step added to one choice of one prompt: the unit of a stream event."""

    prompt: int
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    at_s: float = 0.0


class OpenedRequest:
    """One prompt in the engine, with what the server must do when it ends."""

    def __init__(self, desk: Desk, handle: RequestHandle, *, number: int, span: OpenSpan | None = None) -> None:
        self._desk = desk
        self._span = span
        self.handle = handle
        self.number = number
        self.reasons: dict[int, FinishReason] = {}
        self.reasoning_tokens = 0
        self._is_closed = False
        desk.admission.opened()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its reason."""
        return len(self.reasons) == self.handle.request.sampling.n

    async def steps(self) -> AsyncGenerator[list[StepDelta], None]:
        """Deltas of each step, one per choice. Raises ApiError when the engine failed."""
        async for group in self.handle.steps():
            merged = self._merge(group)
            if FinishReason.ERROR in self.reasons.values():
                error = self.handle.error or EngineError("the request was dropped")
                if not isinstance(error, RequestError):  # the client is told that it failed, the log why
                    logger.error("request failed id=%s: %s", self.handle.request_id, error.message)
                raise from_engine_error(error)
            if self._desk.is_leaving and FinishReason.ABORT in self.reasons.values():
                message = "this server is going down and has cut this answer off\nhint: send the request again"
                raise ApiError(503, message, code="shutting_down", retry_after_s=5)
            yield merged

    def _merge(self, group: list[OutputDelta]) -> list[StepDelta]:
        merged: dict[int, StepDelta] = {}
        for delta in group:
            step = merged.setdefault(delta.index, StepDelta(self.number, delta.index, at_s=delta.at_s))
            step.text += delta.text
            step.token_ids += delta.token_ids
            step.logprobs += delta.logprobs
            if delta.finish_reason is not None:
                step.finish_reason, step.stop_reason = delta.finish_reason, self._stop_reason(delta)
                self.reasons[delta.index] = delta.finish_reason
        return list(merged.values())

    def _stop_reason(self, delta: OutputDelta) -> str | int | None:
        """The stop string or id that the client asked for; the model's own end of text is no news."""
        is_own_end = (
            isinstance(delta.stop_reason, int) and delta.stop_reason not in self.handle.request.sampling.stop_token_ids
        )
        return None if is_own_end else delta.stop_reason

    def close(self) -> None:
        """The reader has left or is done: abort what still runs, count the request once its account is final."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.is_finished:
            self._count()
            return
        self.handle.abort()
        self._desk.spawn(self._drain())

    async def _drain(self) -> None:
        # what was read of it last may not be closed yet, and would be its reader still: of a stream that was being sent, or of
        # several prompts
        await self.handle.over()
        self.reasons = dict(self.handle.reasons)
        self._count()

    def _count(self) -> None:
        record, timings = self.handle.record(), self.handle.record().timings()
        reasons = [self.reasons[index] for index in sorted(self.reasons)]
        is_whole = FinishReason.ABORT not in reasons and FinishReason.ERROR not in reasons
        self._desk.admission.closed(service_s=timings.prefill_s + timings.decode_s if is_whole else None)
        self._desk.telemetry.on_finished(
            timings,
            reasons,
            reasoning_tokens=self.reasoning_tokens,
        )
        if self._span is not None and self._desk.spans is not None:
            end_request_span(self._desk.spans, self._span, self.handle.request, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every route hands to the engine, besides prompts and sampling."""

    response_id: str
    priority: int
    cache_salt: str | None
    served: Served
    arrival_s: float
    constraint: str | None  # the field that a constraint on the output comes from
    trace_parent: Mapping[str, str] = field(default_factory=dict)  # see `engine.spans`


def asked(
    generation: Generation, body: SamplingBody, *, prefix: str, arrival_s: float, constraint: str | None
) -> Asked:
    """Find what is to answer, and choose the answer's id, under which the request can also be aborted and its timeline read.

    Raises ApiError 404 for a model that is not served here.
    """
    return Asked(
        response_id=f"{prefix}{body.request_id or uuid.uuid4().hex}",
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        served=generation.served(body.model),
        arrival_s=arrival_s,
        constraint=constraint,
        trace_parent=body.trace_parent,
    )


async def open_requests(
    desk: Desk,
    prompts: Sequence[RenderedPrompt | Ids],
    sampling: Sequence[SamplingParams],
    asked: Asked,
    *,
    follow: Callable[[str, int], None] | None = None,
) -> list[OpenedRequest]:
    """Admit and submit every prompt, or none: when one is refused the others are taken back.

    follow(request id, prompt tokens) is told of each before it is submitted.
    """
    desk.refuse_when_draining()
    opened: list[OpenedRequest] = []
    try:
        several = [f"{asked.response_id}-{number}" for number in range(len(prompts))]
        ids = several if len(prompts) > 1 else [asked.response_id]
        desk.timelines.group(asked.response_id, ids)
        async with desk.engine.keeping(asked.served.adapter, n_requests=len(prompts)):
            for number, (request_id, prompt, params) in enumerate(zip(ids, prompts, sampling, strict=True)):
                tokens = len(prompt.token_ids) if isinstance(prompt, RenderedPrompt) else len(prompt)
                if follow is not None:
                    follow(request_id, tokens)
                # all of a body or none: with more prompts than places, the last would be refused on an idle server too
                admitted = (
                    desk.admission.enter(request_id, tokens)
                    if number
                    else desk.admit(request_id, tokens, n_requests=len(prompts))
                )
                with admitted, _span_of(desk, asked) as span:
                    handle = await desk.engine.generate(
                        prompt,
                        params,
                        request_id=request_id,
                        priority=asked.priority,
                        cache_salt=asked.cache_salt,
                        adapter=asked.served.adapter,
                        arrival_s=asked.arrival_s,
                        trace=None if span is None else span.trace,
                        is_begun=True,
                    )
                opened.append(OpenedRequest(desk, handle, number=number, span=span))
    except GrammarError as error:
        close_all(opened)
        raise ApiError(400, str(error), param=asked.constraint, code="invalid_value") from error
    except BaseException:
        close_all(opened)
        raise
    return opened


@contextmanager
def _span_of(desk: Desk, asked: Asked) -> Iterator[OpenSpan | None]:
    """What follows a request, where somebody does; it ends here where the engine does not take it."""
    if desk.spans is None:
        yield None
        return
    span = desk.spans.begin(NAME, parent=asked.trace_parent, begin_s=asked.arrival_s)
    try:
        yield span
    except BaseException as error:
        span.end(desk.now_s(), {"gen_ai.request.id": asked.response_id}, error=f"refused: {type(error).__name__}")
        raise


def close_all(opened: Sequence[OpenedRequest]) -> None:
    """Close every request; those that still run are aborted."""
    for one in opened:
        one.close()


async def merged_steps(opened: Sequence[OpenedRequest]) -> AsyncIterator[list[StepDelta]]:
    """The steps of several requests as they come; of one request without any queue between."""
    if len(opened) == 1:
        async for group in opened[0].steps():
            yield group
        return
    queue: asyncio.Queue[list[StepDelta] | Exception | None] = asyncio.Queue()

    async def pump(one: OpenedRequest) -> None:
        try:
            async for group in one.steps():
                queue.put_nowait(group)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(one)) for one in opened]
    try:
        n_running = len(tasks)
        while n_running > 0:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def sampling_params(
    body: SamplingBody,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured: StructuredSpec | None = None,
) -> SamplingParams:
    """The body's sampling fields in the engine's words. Raises BadSampling for what the schema could not see."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        n=body.choices,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop=body.stop_strings,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        structured=structured,
        max_draft_tokens=body.max_draft_tokens,
        prediction=body.predicted_text,
    )
