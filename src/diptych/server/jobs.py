"""A request on its way through a protocol's shape: started, then answered whole or as a stream, and closed in every case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from diptych.engine.spans import PARENT_HEADERS
from diptych.server.http.answers import JsonAnswer, json_bytes
from diptych.server.http.door import Workers, unless_disconnected
from diptych.server.http.request_id import request_id_of
from diptych.server.http.sse import EventStream
from diptych.server.schema import RequestBody, SamplingBody
from diptych.server.state import ServerState
from diptych.server.watch.timelines import Timelines

AnyBody = TypeVar("AnyBody", bound=SamplingBody)


class Job(Protocol):
    """What every protocol's answer is to the routes."""

    async def start(self) -> None:
        """Admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        ...

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        ...

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer."""
        ...

    def close(self) -> None:
        """Abort what still runs."""
        ...


@contextmanager
def named(request: Request, body: RequestBody, timelines: Timelines) -> Iterator[str | None]:
    """Know a request that has no name by the id in the client's header; gives that id.

    Unless another one has it: proxies send a retry under the same id, and services all that they ask for one of theirs.
    """
    name = None if body.request_id is not None else request_id_of(request)
    if name is None or timelines.is_open(name):
        yield None
        return
    body.request_id = name
    timelines.given.add(name)
    try:
        yield name
    finally:
        timelines.given.discard(name)


def trace_parent(request: Request) -> dict[str, str]:
    """The client's headers that say of which trace its request is a part."""
    return {name: request.headers[name] for name in PARENT_HEADERS if name in request.headers}


async def respond(request: Request, job: Job, body: SamplingBody, workers: Workers) -> Response:
    """Run `job` and answer with what it gives, as the body asks for it."""
    # also while the prompts are read and handed over: of many in one body, each waits for a step of the engine
    await unless_disconnected(request, asyncio.ensure_future(job.start()))
    if body.stream:
        return EventStream(job.stream(), on_close=job.close)
    try:
        answer = await unless_disconnected(request, asyncio.ensure_future(job.answer()))
    finally:
        job.close()
    if body.is_answered_at_length:
        return JsonAnswer(await workers.run(json_bytes, answer))
    return JsonAnswer(to_json(answer))


async def generate(
    state: ServerState, request: Request, body_type: type[AnyBody], make: Callable[..., Job]
) -> Response:
    """Read the body of a request that generates, and answer it by what `make` makes of it."""
    arrival_s = state.now_s()
    body = await state.bodies.read(request, body_type)
    body.follow(trace_parent(request))
    with named(request, body, state.timelines):
        return await respond(request, make(state.generation, body, arrival_s=arrival_s), body, state.workers)
