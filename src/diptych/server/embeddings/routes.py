"""The routes that read and do not write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from diptych.server.embeddings.answer import ClassifyAnswer, EmbeddingAnswer, PooledAnswer, RerankAnswer, ScoreAnswer
from diptych.server.embeddings.body import ClassifyBody, EmbeddingBody, PooledBody, RerankBody, ScoreBody
from diptych.server.http.answers import JsonAnswer
from diptych.server.http.door import unless_disconnected
from diptych.server.http.openapi import body_of, responses
from diptych.server.jobs import named
from diptych.server.state import ServerState

BODIES = (EmbeddingBody, RerankBody, ScoreBody, ClassifyBody)

AnyBody = TypeVar("AnyBody", bound=PooledBody)


def add_embeddings(app: FastAPI, state: ServerState) -> None:
    """`/v1/embeddings`, `/v1/rerank` (as `/v2/rerank`, too), `/v1/score` and `/v1/classify`."""
    refusals: dict[str, Any] = {"responses": responses(400, 404, 409, 413, 503)}

    @app.post("/v1/embeddings", openapi_extra=body_of(EmbeddingBody), **refusals)
    async def embeddings(request: Request) -> Response:
        """Vectors of texts or token ids."""
        return await _answer(state, request, EmbeddingBody, EmbeddingAnswer)

    @app.post("/v1/rerank", openapi_extra=body_of(RerankBody), **refusals)
    async def rerank(request: Request) -> Response:
        """Documents in the order in which they fit a query."""
        return await _answer(state, request, RerankBody, RerankAnswer)

    app.add_api_route("/v2/rerank", rerank, methods=["POST"], include_in_schema=False)

    @app.post("/v1/score", openapi_extra=body_of(ScoreBody), **refusals)
    async def score(request: Request) -> Response:
        """How well texts fit each other, pair by pair."""
        return await _answer(state, request, ScoreBody, ScoreAnswer)

    @app.post("/v1/classify", openapi_extra=body_of(ClassifyBody), **refusals)
    async def classify(request: Request) -> Response:
        """Which label texts, or pairs of texts, have."""
        return await _answer(state, request, ClassifyBody, ClassifyAnswer)


async def _answer(
    state: ServerState, request: Request, body_type: type[AnyBody], make: Callable[..., PooledAnswer]
) -> Response:
    """Read the body, answer it, and leave nothing open, also when the client leaves."""
    arrival_s = state.now_s()
    body = await state.bodies.read(request, body_type)
    with named(request, body, state.timelines):
        job = make(state.generation, body, arrival_s=arrival_s)
        try:
            content = await unless_disconnected(request, asyncio.ensure_future(job.answer()))
        finally:
            job.close()
    return JsonAnswer(content)
