"""The routes of Anthropic's protocol."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from pydantic_core import to_json
from starlette.responses import Response

from diptych.server.http.answers import JsonAnswer
from diptych.server.http.openapi import ANTHROPIC_ERROR, body_of, responses
from diptych.server.jobs import generate
from diptych.server.messages.answer import MessagesAnswer
from diptych.server.messages.body import MessagesBody, MessagesCountBody
from diptych.server.messages.conversation import conversation, settings
from diptych.server.state import ServerState

BODIES = (MessagesBody, MessagesCountBody)


def add_messages(app: FastAPI, state: ServerState) -> None:
    """`/v1/messages` and its count."""
    refusals: dict[str, Any] = {"responses": responses(400, 404, 413, 503, schema=ANTHROPIC_ERROR)}

    @app.post("/v1/messages", openapi_extra=body_of(MessagesBody), **refusals)
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's protocol."""
        return await generate(state, request, MessagesBody, MessagesAnswer)

    @app.post("/v1/messages/count_tokens", openapi_extra=body_of(MessagesCountBody), **refusals)
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a message has; nothing is generated."""
        body = await state.bodies.read(request, MessagesCountBody)
        state.generation.served(body.model)
        variables = settings(state.generation, body)
        rendered = await state.reader.render(lambda: conversation(body, variables), limit_tokens=state.counted_tokens)
        count = to_json({"input_tokens": len(rendered.token_ids)})
        return JsonAnswer(count)
