"""`x-request-id` on every answer: the client's own, or one made here; generation requests are known by it too."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.server.http.errors import is_anthropic
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
        scope[_SCOPE_KEY] = _own_id(scope["headers"])
        told = id_headers(scope["path"], scope["headers"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        await self._app(scope, receive, send_named)


def id_headers(path: str, sent: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What tells a request's id on its answer. sent: the client's headers, by their names in small letters."""
    shown = (_own_id(sent) or uuid.uuid4().hex).encode()
    names = (HEADER, b"request-id") if is_anthropic(path) else (HEADER,)
    return [(name, shown) for name in names]


def _own_id(sent: Iterable[tuple[bytes, bytes]]) -> str | None:
    own = next((value.decode("latin-1") for name, value in sent if name == HEADER), "")
    return own if _IS_SOUND.fullmatch(own) else None


def request_id_of(request: Request) -> str | None:
    """The client's own id, when it sent one."""
    found: str | None = request.scope.get(_SCOPE_KEY)
    return found
