r"""Server-sent events: the exact bytes, and a response that notices a client that has left.

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

from diptych.server.http.door import until_disconnect
from diptych.server.http.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"
# a stream that always has its next event ready lets others in after this many bytes, which take 4 to 8 ms to make
TURN_BYTES = 128 * 1024
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: dict[str, Any]) -> bytes:
    """One event. JSON holds no raw line breaks, so one data line is always enough."""
    return b"data: " + _encode(data).encode() + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """One event whose `event:` line says its type, as Responses and Messages send it."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after its first byte."""
    return b"event: error\n" + event(error_body(error))


class EventStream(Response):
    """A response that sends what `events` yields and cleans up however the stream ends.

    `on_close` is called when the events are exhausted, and when the client disconnects or is cut off, as it reads nothing
    (`door.BoundedHeaders`); also when nothing was ever sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
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
        """Send until the end, or until the client is gone."""
        pump, watcher = asyncio.ensure_future(self._pump(send)), asyncio.ensure_future(until_disconnect(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (pump, watcher):
                task.cancel()
            await asyncio.wait({pump, watcher})
            await self._events.aclose()
            if self._on_close is not None:
                self._on_close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        turn_bytes = 0
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            turn_bytes += len(part)
            if turn_bytes > TURN_BYTES:
                turn_bytes = 0
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
