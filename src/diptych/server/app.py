"""The routes. Each reads a body, hands it to the room that knows, and shapes refusals; no engine work is done here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from diptych.engine.engine import Engine
from diptych.ground.clock import wall_time_s
from diptych.ground.errors import EngineError
from diptych.server.chat import ChatAnswer, turn_request
from diptych.server.completions import CompletionAnswer
from diptych.server.embeddings.routes import BODIES as EMBEDDING_BODIES
from diptych.server.embeddings.routes import add_embeddings
from diptych.server.http.answers import JsonAnswer, json_bytes
from diptych.server.http.door import LEFT, OPEN_PATHS, TELL_REFUSED, CountRefused, RequireKey
from diptych.server.http.errors import ApiError, error_response, from_engine_error, from_query_error
from diptych.server.http.openapi import body_of, install_openapi, responses
from diptych.server.http.query import TellingRoute, page, several
from diptych.server.http.request_id import RequestIds, id_headers
from diptych.server.http.sites import site_middleware
from diptych.server.jobs import generate
from diptych.server.loras import BODIES as LORA_BODIES
from diptych.server.loras import add_loras
from diptych.server.messages.routes import BODIES as MESSAGES_BODIES
from diptych.server.messages.routes import add_messages
from diptych.server.page_routes import add_page
from diptych.server.reader import piece
from diptych.server.responses.routes import BODIES as RESPONSES_BODIES
from diptych.server.responses.routes import add_responses
from diptych.server.schema import ChatBody, CompletionBody
from diptych.server.state import ServerState
from diptych.server.text_bodies import DetokenizeBody, TemplateBody, TokenizeBody
from diptych.server.watch.metrics_export import exposition
from diptych.server.watch.recent import parse_changes, what_if_answer
from diptych.server.watch.telemetry import LiveHistogram
from diptych.server.watch.timelines import timelines_json
from diptych.sim.counterfactual import USUAL_CHANGES, Minutes

logger = logging.getLogger("diptych.server")

WATCH_S = 0.05
LOG_EVERY_S = 10.0
Lifecycle = Literal["active", "deprecated", "retired"]  # of Anthropic's models


def create_app(state: ServerState) -> FastAPI:
    """The application around one engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        state.engine.subscribe(state.telemetry.on_events)
        watch = asyncio.ensure_future(watch_loop(state.telemetry.loop_lag_s))
        try:
            yield {TELL_REFUSED: state.telemetry.on_refused}
        finally:
            watch.cancel()
            state.live.close()
            state.workers.close()
            state.store.close()
            if state.spans is not None:
                await asyncio.to_thread(state.spans.close)
            if state.journal is not None:
                await asyncio.to_thread(state.journal.close)

    key = state.config.api_key
    middleware = [
        Middleware(CountRefused, tell=state.telemetry.on_refused),
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
    app.router.route_class = TellingRoute
    _add_error_handlers(app, state)
    _add_generation(app, state)
    add_responses(app, state)
    add_messages(app, state)
    add_embeddings(app, state)
    _add_text(app, state)
    _add_requests(app, state)
    _add_status(app, state)
    _add_models(app, state)
    add_loras(app, state)
    add_page(app, state)
    _add_short_paths(app)
    texts = (TokenizeBody, DetokenizeBody, TemplateBody)
    install_openapi(
        app, CompletionBody, ChatBody, *RESPONSES_BODIES, *MESSAGES_BODIES, *LORA_BODIES, *EMBEDDING_BODIES, *texts
    )
    return app


def _add_short_paths(app: FastAPI) -> None:
    """Every route of /v1 answers without it too: many clients are given an address and add the rest."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.path.startswith("/v1/"):
            methods = sorted(route.methods or ())
            app.add_api_route(route.path.removeprefix("/v1"), route.endpoint, methods=methods, include_in_schema=False)


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

    def refuse(error: ApiError, request: Request) -> Response:
        if error.status == 503 and request.url.path not in OPEN_PATHS:
            overload.note(error, state.now_s())
        return error_response(error, request.url.path)

    async def on_known(request: Request, error: Exception) -> Response:
        return refuse(from_engine_error(error, retry_after_s=state.desk.retry_after_s()), request)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if request.headers.get("upgrade", "").lower() == "websocket":
            told = "WebSockets are not spoken here\nhint: POST to the same path, with stream: true for events"
            return refuse(ApiError(501, told, code="unsupported"), request)
        taken = (error.headers or {}).get("Allow", "another method")
        words = {
            404: f"there is no {request.url.path[:200]!r} here",
            405: f"{request.method} is not allowed here; this route takes {taken}",
        }
        response = refuse(ApiError(error.status_code, words.get(error.status_code, str(error.detail))), request)
        response.headers.update(error.headers or {})
        return response

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refuse(from_query_error(error.errors()[0]), request)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=LEFT)

    async def on_unknown(request: Request, error: Exception) -> Response:
        logger.error("request failed path=%s", request.url.path, exc_info=error)
        response = refuse(from_engine_error(error), request)
        state.telemetry.on_refused(response.status_code)  # it is answered outside of all middleware
        response.raw_headers += id_headers(request.url.path, request.headers.raw)
        response.headers["connection"] = "close"  # the HTTP server closes it behind an error that it did not expect
        return response

    app.add_exception_handler(ApiError, on_known)
    app.add_exception_handler(EngineError, on_known)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_unknown)


def _add_generation(app: FastAPI, state: ServerState) -> None:
    refusals = responses(400, 404, 413, 503)

    @app.post("/v1/completions", openapi_extra=body_of(CompletionBody), responses=refusals)
    async def completions(request: Request) -> Response:
        """Continue a text or token ids."""
        return await generate(state, request, CompletionBody, CompletionAnswer)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatBody), responses=refusals)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generate(state, request, ChatBody, ChatAnswer)

    @app.post("/v1/chat/completions/input_tokens", openapi_extra=body_of(ChatBody), responses=responses(400, 404, 413))
    async def chat_input_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the prompt of a chat has; nothing is generated."""
        body = await state.bodies.read(request, ChatBody)
        state.generation.served(body.model)
        rendered = await turn_request(state.generation, body).render(state.counted_tokens)
        return {"object": "response.input_tokens", "input_tokens": len(rendered.token_ids)}


def _add_text(app: FastAPI, state: ServerState) -> None:
    context_tokens, reader = state.model.max_context_tokens, state.reader
    counted_tokens = state.counted_tokens

    @app.post("/tokenize", openapi_extra=body_of(TokenizeBody), responses=responses(400, 404, 413))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of messages."""
        body = await state.bodies.read(request, TokenizeBody)
        state.generation.served(body.model)
        if body.messages is not None:
            ids = (await reader.chat(body, limit_tokens=counted_tokens)).token_ids
        elif body.parse_special is False:
            ids = await reader.plain_ids(body.text, limit_tokens=counted_tokens, add_special_tokens=body.adds_special)
        else:
            [ids] = await reader.ids([body.text], limit_tokens=counted_tokens, add_special_tokens=body.adds_special)

        def encoded() -> bytes:
            answer: dict[str, Any] = {"count": len(ids), "max_model_len": context_tokens, "tokens": list(ids)}
            if body.with_pieces:
                answer["tokens"] = [{"id": one, "piece": piece(reader.tokenizer.token_bytes(one))} for one in ids]
            if body.return_token_strs:
                answer["token_strs"] = [reader.tokenizer.token_bytes(one).decode(errors="replace") for one in ids]
            return json_bytes(answer)

        return JsonAnswer(await state.workers.run(encoded))

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeBody), responses=responses(400, 404, 413))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Text of token ids."""
        body = await state.bodies.read(request, DetokenizeBody)
        state.generation.served(body.model)
        highest, asked = state.engine.loaded.model.spec.vocab_size - 1, max(body.tokens, default=0)
        if asked > highest:
            raise ApiError(400, f"tokens holds {asked}; ids must be at most {highest}", param="tokens")
        text = await reader.text(body.tokens, skip_special_tokens=False)
        return {"prompt": text, "content": text}  # vLLM's name and llama.cpp's

    @app.post("/apply-template", openapi_extra=body_of(TemplateBody), responses=responses(400, 404, 413))
    async def apply_template(request: Request) -> Response:
        """What the chat template makes of messages, with the token range of each part and what the cache holds."""
        body = await state.bodies.read(request, TemplateBody)
        adapter = state.generation.served(body.model).adapter
        scope = body.cache_salt if adapter is None else (adapter.revision, body.cache_salt)
        rendered = await reader.chat(body, limit_tokens=counted_tokens)

        def hits(engine: Engine) -> int:
            return engine.core.prefix_match(rendered.token_ids, scope)

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

    one_at_a_time = asyncio.Lock()

    @app.get("/v1/requests/{request_id}/what-if", responses=responses(400, 404))
    async def what_if(request_id: str, change: Annotated[list[str] | None, Query(max_length=16)] = None) -> Response:
        """A recent request's times with one change: cached, chunk=N, stall-budget=TIME, pools or device=NAME."""
        logs, recent = state.timelines.find(request_id), state.recent
        if recent is None:
            why = (
                "--keep-minutes 0" if state.engine.scale is None else "it has workers, and this is asked of one engine"
            )
            raise ApiError(404, f"this server keeps no minutes of requests ({why})", code="not_found")
        if not logs:
            raise ApiError(404, f"no request {request_id[:100]!r} is open or among the last ones", code="not_found")
        changes = parse_changes(change or USUAL_CHANGES)
        async with one_at_a_time:
            minutes = await state.engine.call(lambda engine: recent.minutes())
            assert isinstance(minutes, Minutes)
            asked = logs[0].request_id
            return JsonAnswer(
                await state.workers.run(lambda: json_bytes(what_if_answer(minutes, request_id, asked, changes)))
            )

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

    @app.post("/scale", responses=responses(400, 404))
    async def scale(
        prefill: Annotated[int | None, Query(ge=0, le=256)] = None,
        decode: Annotated[int | None, Query(ge=1, le=256)] = None,
    ) -> dict[str, Any]:
        """Have pools of workers grow or shrink to these sizes; it takes as long as loading, or as what is open there."""
        if state.engine.scale is None:
            raise ApiError(404, "this server has one engine and no workers", code="not_found")
        if prefill is None and decode is None:
            raise ApiError(
                400, "neither prefill nor decode is given\nhint: POST /scale?prefill=2&decode=4", code="invalid_value"
            )
        for pool, number in (("prefill", prefill), ("decode", decode)):
            if number is not None:
                state.engine.scale(pool, number)
        return {"scaling": True}


def _add_status(app: FastAPI, state: ServerState) -> None:
    @app.head("/health", include_in_schema=False)  # load balancers ask so
    @app.get("/health", responses=responses(503))
    async def health() -> dict[str, str]:
        """The process is alive and its engine has not failed."""
        if state.engine.failure is not None:
            raise ApiError(503, "the engine has failed", code="engine_failed", retry_after_s=5)
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=responses(503))
    async def ready() -> dict[str, str]:
        """The model is loaded and requests are taken; false while draining."""
        state.desk.refuse_when_draining()
        return {"status": "ready"}

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """The OpenAPI document."""
        return JsonAnswer(await state.workers.run(lambda: json_bytes(app.openapi())))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(
            exposition(
                state.collector,
                state.engine.stats(),
                state.desk.outlook(),
                state.engine.engine.adapter_counts(),
                state.engine.workers(),
            ),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )


def _add_models(app: FastAPI, state: ServerState) -> None:
    created = int(wall_time_s())

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "type": "model",  # from here on as Anthropic's clients read it
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": state.model.max_context_tokens,
            "max_tokens": state.model.max_context_tokens,
            "owned_by": "diptych",
            "root": state.engine.loaded.name,  # where clients look for the tokenizer
            "parent": None,
            "max_model_len": state.model.max_context_tokens,
            "backend": state.model.backend,
            "weights": state.model.weights,
        }

    def adapter_cards() -> list[dict[str, Any]]:
        return [
            model_card(one.ref.name) | {"root": str(one.path), "parent": state.model.name}
            for one in state.generation.adapters.served
        ]

    @app.get("/v1/models", responses=responses(400))
    async def models(
        limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
        after_id: str | None = None,
        before_id: str | None = None,
        lifecycle: Annotated[list[Lifecycle] | None, several("lifecycle")] = None,
    ) -> dict[str, Any]:
        """The model served here, once for each of its names, and its adapters."""
        names = state.config.served_model_names or (state.model.name,)
        cards = [model_card(name) for name in dict.fromkeys(names)] + adapter_cards()
        cards = [card for card in cards if lifecycle is None or card["lifecycle"] in lifecycle]
        return page(cards, after=("after_id", after_id), before=("before_id", before_id), limit=limit)

    @app.get("/v1/models/{name:path}", responses=responses(404))
    async def model(name: str) -> dict[str, Any]:
        """One model by name."""
        adapter = state.generation.served(name).adapter
        card = next((one for one in adapter_cards() if adapter is not None and one["id"] == adapter.name), None)
        return model_card(name) if card is None else card
