r"""Server-sent events: the exact bytes, and a response that notices a client that has left or stopped reading.

>>> event({"a": "é"})
b'data: {"a":"\xc3\xa9"}\n\n'
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.server.door import until_disconnect
from diptych.server.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"
# a reader that takes nothing for this long is gone
SEND_TIMEOUT_S = 60.0
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: dict[str, Any]) -> bytes:
    """One event. JSON holds no raw line breaks, so one data line is always enough."""
    return b"data: " + _encode(data).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after its first byte."""
    return b"event: error\n" + event(error_body(error))


class EventStream(Response):
    """A response that sends what `events` yields and cleans up however the stream ends.

    `on_close` is called when the events are exhausted, when the client disconnects, and when it reads nothing for
    SEND_TIMEOUT_S; also when nothing was ever sent.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_close: Callable[[], None] | None = None) -> None:
        super().__init__(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # proxies must not hold tokens back
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client is gone."""
        watch = asyncio.ensure_future(until_disconnect(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({watch, pump}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            watch.cancel()
            pump.cancel()
            await asyncio.wait({watch, pump})
            await self._events.aclose()
            if self._on_close is not None:
                self._on_close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for part in self._events:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            return  # without the closing part the server cuts the connection, so the client cannot take it for the end
        await send({"type": "http.response.body", "body": b"", "more_body": False})
