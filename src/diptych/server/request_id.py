"""`x-request-id` on every answer: the client's own, or one made here; generation requests are known by it too."""

from __future__ import annotations

import re
import uuid

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.server.errors import is_anthropic
from diptych.server.schema import REQUEST_ID_PATTERN

HEADER = b"x-request-id"
_SCOPE_KEY = "diptych.request_id"
_IS_SOUND = re.compile(REQUEST_ID_PATTERN)


class RequestIds:
    """Middleware. A client's id that is no plain word is left alone, and one is made in its place."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and put the id on the answer's head."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER), "")
        names = (HEADER, b"request-id") if is_anthropic(scope["path"]) else (HEADER,)
        own = scope[_SCOPE_KEY] = sent if _IS_SOUND.fullmatch(sent) else None
        shown = (own or uuid.uuid4().hex).encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *((name, shown) for name in names)]
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(request: Request) -> str | None:
    """The client's own id, when it sent one."""
    found: str | None = request.scope.get(_SCOPE_KEY)
    return found
