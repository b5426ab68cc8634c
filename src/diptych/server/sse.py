r"""Server-sent events: the exact bytes, and a response that notices a client that has left or stopped reading.

>>> event({"a": "é"})
b'data: {"a":"\xc3\xa9"}\n\n'
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.server.door import until_disconnect
from diptych.server.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"
# a reader that takes nothing for this long is gone
SEND_TIMEOUT_S = 60.0
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

    `on_close` is called when the events are exhausted, when the client disconnects, and when it reads nothing for
    SEND_TIMEOUT_S; also when nothing was ever sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            headers={
                **(headers or {}),
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",  # proxies must not hold tokens back
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, until the client is gone, or until it takes nothing any more."""
        pump = asyncio.ensure_future(self._pump(send))
        watchers = [asyncio.ensure_future(until_disconnect(receive)), asyncio.ensure_future(self._until_stuck())]
        try:
            await asyncio.wait({pump, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (pump, *watchers):
                task.cancel()
            await asyncio.wait({pump, *watchers})
            await self._events.aclose()
            if self._on_close is not None:
                self._on_close()

    async def _pump(self, send: Send) -> None:
        now_s = asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        turn_bytes = 0
        async for part in self._events:
            self._sending_since_s = now_s()
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._sending_since_s = None
            turn_bytes += len(part)
            if turn_bytes > TURN_BYTES:
                turn_bytes = 0
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_stuck(self) -> None:
        """Return when one send has taken longer than SEND_TIMEOUT_S.

        The closing part is not sent then, so the server cuts the connection and the client cannot take it for the end.
        One look now and then: a timeout around every send would cost more than the send (10 of 15 microseconds).
        """
        now_s = asyncio.get_running_loop().time
        while self._sending_since_s is None or now_s() - self._sending_since_s < SEND_TIMEOUT_S:
            await asyncio.sleep(SEND_TIMEOUT_S / 4)
