"""The routes. Each reads a body, hands it to the room that knows, and shapes refusals; no engine work is done here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from diptych.engine.engine import Engine
from diptych.ground.clock import wall_time_s
from diptych.ground.errors import EngineError
from diptych.server.answers import JsonAnswer, json_bytes
from diptych.server.chat import ChatAnswer
from diptych.server.completions import CompletionAnswer
from diptych.server.door import RequireKey, unless_disconnected
from diptych.server.errors import ApiError, error_response, from_engine_error
from diptych.server.fields import ignored_header
from diptych.server.metrics_export import exposition
from diptych.server.openapi import body_of, install_openapi, responses
from diptych.server.request_id import RequestIds, request_id_of
from diptych.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TemplateBody,
    TokenizeBody,
)
from diptych.server.sites import site_middleware
from diptych.server.sse import EventStream
from diptych.server.state import ServerState
from diptych.server.telemetry import LiveHistogram
from diptych.server.timelines import timelines_json

logger = logging.getLogger("diptych.server")

WATCH_S = 0.05
LOG_EVERY_S = 10.0
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/try.js": ("try.js", "text/javascript; charset=utf-8"),
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def create_app(state: ServerState) -> FastAPI:
    """The application around one engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.engine.subscribe(state.telemetry.on_events)
        watch = asyncio.ensure_future(watch_loop(state.telemetry.loop_lag_s))
        try:
            yield
        finally:
            watch.cancel()
            state.live.close()
            state.workers.close()

    key = state.config.api_key
    middleware = [
        Middleware(RequestIds),
        *site_middleware(state.config),
        *([Middleware(RequireKey, key=key)] if key is not None else []),
    ]
    app = FastAPI(
        title="Diptych",
        version=state.model.version,
        docs_url=None,
        redoc_url=None,  # both load scripts from elsewhere
        openapi_url=None,  # made on a thread, as it takes 0.1 s
        lifespan=lifespan,
        middleware=middleware,
    )
    _add_error_handlers(app, state)
    _add_generation(app, state)
    _add_text(app, state)
    _add_requests(app, state)
    _add_status(app, state)
    _add_page(app, state)
    install_openapi(app, CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, TemplateBody)
    return app


async def watch_loop(lag_s: LiveHistogram) -> None:
    """Note how late timers fire, for ever. What holds the event loop or the interpreter holds every stream."""
    now_s = asyncio.get_running_loop().time
    while True:
        due_s = now_s() + WATCH_S
        await asyncio.sleep(WATCH_S)
        lag_s.add(max(0.0, now_s() - due_s))


class OverloadLog:
    """Tells of refusals for overload at most every LOG_EVERY_S: a flood must not fill the log too."""

    def __init__(self) -> None:
        self._n_refused = 0
        self._next_s = float("-inf")

    def note(self, error: ApiError, now_s: float) -> None:
        """Count one, and log those that have come since the last line."""
        self._n_refused += 1
        if now_s >= self._next_s:
            logger.warning("overloaded refused=%d last=%r", self._n_refused, error.message.partition("\n")[0])
            self._n_refused, self._next_s = 0, now_s + LOG_EVERY_S


def _add_error_handlers(app: FastAPI, state: ServerState) -> None:
    overload = OverloadLog()

    def refuse(error: ApiError) -> Response:
        state.telemetry.on_refused(error.status)
        if error.status == 503:
            overload.note(error, state.now_s())
        return error_response(error)

    async def on_known(request: Request, error: Exception) -> Response:
        return refuse(from_engine_error(error, retry_after_s=state.desk.retry_after_s()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: f"there is no {request.url.path[:200]!r} here", 405: f"{request.method} is not allowed here"}
        response = refuse(ApiError(error.status_code, words.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    async def on_validation(request: Request, error: Exception) -> Response:
        return refuse(ApiError(400, "the path or query of this request is malformed", code="invalid_value"))

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def on_unknown(request: Request, error: Exception) -> Response:
        logger.error("request failed path=%s", request.url.path, exc_info=error)
        return refuse(from_engine_error(error))

    app.add_exception_handler(ApiError, on_known)
    app.add_exception_handler(EngineError, on_known)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_unknown)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    def free_id(request: Request) -> str | None:
        """The id in the client's header, unless a request under it is still open: proxies send a retry under the same one."""
        name = request_id_of(request)
        is_open = name is not None and any(log.end_s is None for log in state.timelines.find(name))
        return None if is_open else name

    async def generate(
        request: Request, schema: type[GenerationBody], make: Callable[..., CompletionAnswer | ChatAnswer]
    ) -> Response:
        arrival_s = state.now_s()
        body = await state.bodies.read(request, schema)
        body.request_id = body.request_id or free_id(request)
        job = make(state.generation, body, arrival_s=arrival_s)
        await job.start()
        headers = ignored_header(body.ignored_fields)
        if body.stream:
            return EventStream(job.stream(), on_close=job.close, headers=headers)
        try:
            answer = await unless_disconnected(request, asyncio.ensure_future(job.answer()))
        finally:
            job.close()
        if body.is_answered_at_length:
            return JsonAnswer(await state.workers.run(json_bytes, answer), headers=headers)
        return JsonAnswer(to_json(answer), headers=headers)

    @app.post("/v1/completions", openapi_extra=body_of(CompletionBody), responses=responses(400, 404, 413, 503))
    async def completions(request: Request) -> Response:
        """Continue a text or token ids."""
        return await generate(request, CompletionBody, CompletionAnswer)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatBody), responses=responses(400, 404, 413, 503))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generate(request, ChatBody, ChatAnswer)


def _add_text(app: FastAPI, state: ServerState) -> None:
    context_tokens, reader = state.model.max_context_tokens, state.reader
    counted_tokens = state.counted_tokens

    @app.post("/tokenize", openapi_extra=body_of(TokenizeBody), responses=responses(400, 404, 413))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of messages."""
        body = await state.bodies.read(request, TokenizeBody)
        state.generation.check_model(body.model)
        if body.messages is not None:
            ids = (await reader.render(body, limit_tokens=counted_tokens)).token_ids
        else:
            add = body.add_special_tokens is not False
            [ids] = await reader.ids([body.prompt or ""], limit_tokens=counted_tokens, add_special_tokens=add)
        with_texts = bool(body.return_token_strs)

        def encoded() -> bytes:
            answer: dict[str, Any] = {"count": len(ids), "max_model_len": context_tokens, "tokens": list(ids)}
            if with_texts:
                answer["token_strs"] = [reader.tokenizer.token_bytes(one).decode(errors="replace") for one in ids]
            return json_bytes(answer)

        return JsonAnswer(await state.workers.run(encoded))

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeBody), responses=responses(400, 404, 413))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        body = await state.bodies.read(request, DetokenizeBody)
        state.generation.check_model(body.model)
        highest, asked = state.engine.loaded.model.spec.vocab_size - 1, max(body.tokens, default=0)
        if asked > highest:
            raise ApiError(400, f"tokens holds {asked}; ids must be at most {highest}", param="tokens")
        return {"prompt": await reader.text(body.tokens, skip_special_tokens=False)}

    @app.post("/apply-template", openapi_extra=body_of(TemplateBody), responses=responses(400, 404, 413))
    async def apply_template(request: Request) -> Response:
        """What the chat template makes of messages, with the token range of each part and what the cache holds."""
        body = await state.bodies.read(request, TemplateBody)
        state.generation.check_model(body.model)
        rendered = await reader.render(body, limit_tokens=counted_tokens, documents=body.documents)

        def hits(engine: Engine) -> int:
            return engine.core.prefix_match(rendered.token_ids, body.cache_salt)

        cached_tokens = await state.engine.call(hits)

        def encoded() -> bytes:
            return json_bytes(
                {
                    "prompt": rendered.text,
                    "tokens": list(rendered.token_ids),
                    "segments": [
                        {"name": one.name, "start": one.start, "end": one.end, "tokens": one.end - one.start}
                        for one in rendered.segments
                    ],
                    "cached_tokens": cached_tokens,
                    "block_tokens": state.model.block_tokens,
                }
            )

        return JsonAnswer(await state.workers.run(encoded))


def _add_requests(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/requests/{request_id}/timeline", responses=responses(404))
    async def timeline(request_id: str) -> Response:
        """Chunks, tokens, stalls and preemptions of an open or recent request."""
        logs = state.timelines.find(request_id)
        if not logs:
            raise ApiError(404, f"no request {request_id[:100]!r} is open or among the last ones", code="not_found")
        now_s = state.now_s()
        return JsonAnswer(await state.workers.run(lambda: json_bytes(timelines_json(request_id, logs, now_s=now_s))))

    @app.delete("/v1/requests/{request_id}", responses=responses(404))
    async def abort(request_id: str) -> dict[str, Any]:
        """End an open request; its reader gets finish_reason "abort"."""
        still_open = [one for one in state.timelines.find(request_id) if one.request_id in state.telemetry.records]
        if not still_open:
            raise ApiError(404, f"no request {request_id[:100]!r} is open", code="not_found")
        for log in still_open:
            state.engine.abort(log.request_id)
        # several: the prompts of one body
        name = still_open[0].request_id if len(still_open) == 1 else request_id
        return {"id": name, "object": "request.aborted", "aborted": True}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, Any]:
        """Forget all cached prefixes that no running sequence holds."""
        await state.engine.call(lambda engine: engine.core.reset_prefix_cache())
        return {"reset": True}


def _add_status(app: FastAPI, state: ServerState) -> None:
    @app.get("/health", responses=responses(503))
    async def health() -> dict[str, str]:
        """The process is alive and its engine has not failed."""
        if state.engine.failure is not None:
            raise ApiError(503, "the engine has failed", code="engine_failed", retry_after_s=5)
        return {"status": "ok"}

    @app.get("/ready", responses=responses(503))
    async def ready() -> dict[str, str]:
        """The model is loaded and requests are taken; false while draining."""
        state.desk.refuse_when_draining()
        return {"status": "ready"}

    def model_card() -> dict[str, Any]:
        return {
            "id": state.model.name,
            "object": "model",
            "created": created,
            "owned_by": "diptych",
            "root": state.engine.loaded.name,  # where clients look for the tokenizer
            "max_model_len": state.model.max_context_tokens,
            "backend": state.model.backend,
            "weights": state.model.weights,
        }

    created = int(wall_time_s())

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """The OpenAPI document."""
        return JsonAnswer(await state.workers.run(lambda: json_bytes(app.openapi())))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model served here."""
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}", responses=responses(404))
    async def model(name: str) -> dict[str, Any]:
        """One model by name."""
        state.generation.check_model(name)
        return model_card()

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(
            exposition(state.collector, state.engine.stats(), state.desk.outlook()),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )


def _add_page(app: FastAPI, state: ServerState) -> None:
    folder = resources.files("diptych.server") / "page"

    def file_route(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (folder / name).read_bytes()

        async def send() -> Response:
            return Response(content, headers={**PAGE_HEADERS, "content-type": kind})

        return send

    for path, (name, kind) in PAGE_FILES.items():
        app.add_api_route(path, file_route(name, kind), include_in_schema=False)

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        """Frames for the page, as server-sent events."""
        return EventStream(state.live.watch())
