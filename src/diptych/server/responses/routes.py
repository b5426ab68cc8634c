"""The routes of Open Responses."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from pydantic_core import to_json
from starlette.responses import Response

from diptych.server.http.answers import JsonAnswer, json_bytes
from diptych.server.http.errors import ApiError
from diptych.server.http.openapi import body_of, responses
from diptych.server.http.query import page, several
from diptych.server.jobs import named, respond, trace_parent
from diptych.server.responses.answer import Responses, ResponsesAnswer
from diptych.server.responses.body import Includable, ResponsesBody, ResponsesCountBody
from diptych.server.responses.items import conversation, given_items, settings
from diptych.server.responses.output import include_in, with_included
from diptych.server.state import ServerState

BODIES = (ResponsesBody, ResponsesCountBody)
CANCEL_TIMEOUT_S = 30.0


def add_responses(app: FastAPI, state: ServerState) -> None:
    """`/v1/responses` and what belongs to it."""
    shared = Responses(state.store, max_bytes=state.bodies.limits.max_bytes)
    _add_creation(app, state, shared)
    _add_stored(app, state, shared)


def _add_creation(app: FastAPI, state: ServerState, shared: Responses) -> None:
    refusals: dict[str, Any] = {"responses": responses(400, 404, 413, 503)}

    @app.post("/v1/responses", openapi_extra=body_of(ResponsesBody), **refusals)
    async def create_response(request: Request) -> Response:
        """Answer, by the Open Responses specification."""
        arrival_s = state.now_s()
        body = await state.bodies.read(request, ResponsesBody)
        body.follow(trace_parent(request))
        with named(request, body, state.timelines) as name:
            if name is not None and await shared.has(f"resp_{name}"):
                body.request_id = None
            job = ResponsesAnswer(state.generation, shared, body, arrival_s=arrival_s)
            if not body.background:
                return await respond(request, job, body, state.workers)
            await job.start()
        begun = json_bytes(job.snapshot())
        state.desk.spawn(job.run())
        await job.keep_begun()
        return JsonAnswer(begun)

    @app.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponsesCountBody), **refusals)
    async def response_input_tokens(request: Request) -> Response:
        """How many tokens the prompt of a response has; nothing is generated."""
        body = await state.bodies.read(request, ResponsesCountBody)
        state.generation.served(body.model or await shared.model_before(body))
        before, given = await shared.items_before(body.previous_response_id, given_items(body))
        variables = settings(body, state.reader.template.source)
        rendered = await state.reader.render(
            lambda: conversation(body, before + given, variables), limit_tokens=state.counted_tokens
        )
        count = to_json({"object": "response.input_tokens", "input_tokens": len(rendered.token_ids)})
        return JsonAnswer(count)

    @app.post("/v1/responses/compact", responses=responses(400))
    async def compact_response() -> Response:
        """Refused: what stands for a conversation afterwards is a summary in an encrypted item, which its own service reads."""
        raise ApiError(
            400,
            "conversations are not compacted here: that is a summary, which a model would have to write\n"
            'hint: send truncation "auto", which drops the first items of a prompt that is too long, or ask the model for a '
            "summary and begin with it",
            code="unsupported",
        )


def _add_stored(app: FastAPI, state: ServerState, shared: Responses) -> None:
    refusals: dict[str, Any] = {"responses": responses(400, 404)}

    def unknown(response_id: str) -> ApiError:
        return ApiError(404, f"no response {response_id[:100]!r} is stored here", code="not_found")

    async def stored(response_id: str) -> bytes:
        job = shared.open.get(response_id)
        body = json_bytes(job.snapshot()) if job is not None else await shared.store.get(response_id)
        if body is None:
            raise unknown(response_id)
        return body

    @app.get("/v1/responses/{response_id}", **refusals)
    async def get_response(
        response_id: str,
        include: Annotated[list[Includable] | None, several("include")] = None,
        stream: bool = False,
        starting_after: int | None = None,
        include_obfuscation: bool = False,
    ) -> Response:
        """A response that is stored or still being written."""
        for name, is_asked in (
            ("stream", stream),
            ("starting_after", starting_after is not None),
            ("include_obfuscation", include_obfuscation),
        ):
            if is_asked:
                told = f"{name} is of streams; a stored response is read whole"
                raise ApiError(400, told, param=name, code="invalid_value")
        body = await stored(response_id)
        return JsonAnswer(await state.workers.run(with_included, body, include) if include else body)

    @app.delete("/v1/responses/{response_id}", **refusals)
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        if response_id in shared.open:  # it would be kept all the same once it has ended
            told = f"{response_id[:100]!r} is still being written; cancel it first, or wait for its end"
            raise ApiError(400, told, code="response_not_finished")
        if not await shared.store.delete(response_id):
            raise unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel", **refusals)
    async def cancel_response(response_id: str) -> Response:
        """End a response that is still being written; one that has ended stays as it is."""
        job = shared.open.get(response_id)
        if job is not None:
            job.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(job.over.wait(), CANCEL_TIMEOUT_S)
        return JsonAnswer(await stored(response_id))

    @app.get("/v1/responses/{response_id}/input_items", **refusals)
    async def input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        include: Annotated[list[Includable] | None, several("include")] = None,
    ) -> Response:
        """The items that came with a response's request, the newest first."""
        items = await shared.store.given(response_id)
        if items is None:
            raise unknown(response_id)
        include_in(items, include or ())
        ordered = items if order == "asc" else items[::-1]
        return JsonAnswer(json_bytes(page(ordered, after=("after", after), limit=limit)))
