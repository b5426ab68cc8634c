"""The door: header limits, the key, bodies read within bounds, and work that must not run on the event loop.

Owns nothing of the engine. Everything refused here is refused in the OpenAI error shape, before any route runs.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from diptych.server.errors import ApiError, error_response, from_validation_error
from diptych.server.schema import MAX_BODY_BYTES, Body

MAX_HEADER_BYTES = 64 * 1024
HEADER_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0
# all bodies being read or parsed at one time; 300 clients with 32 MiB each must not fill the memory
MAX_BODIES_BYTES = 512 * 1024 * 1024
# below this many bytes, parsing costs less than a hand-over to a thread (about 0.1 ms)
INLINE_BODY_BYTES = 16 * 1024
OPEN_PATHS = frozenset({"/health", "/ready"})

AnyBody = TypeVar("AnyBody", bound=Body)
Answer = TypeVar("Answer")


class BoundedHeaders(HttpToolsProtocol):
    """uvicorn's protocol with a limit on header bytes and on the time a client may take to send them."""

    _header_bytes = 0
    _in_headers = True
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request's headers."""
        super().connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(HEADER_TIMEOUT_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def on_message_begin(self) -> None:
        """A request starts: its headers count from zero."""
        self._header_bytes, self._in_headers = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are in: stop the clock, refuse too many bytes."""
        self._in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            self._refuse()
            return
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what arrives before the headers are complete."""
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse()

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        if self.transport.is_closing():
            return
        body = bytes(
            error_response(
                ApiError(431, f"request headers are longer than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
            ).body
        )
        head = f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class RequireKey:
    """Middleware: every route but `/health` and `/ready` needs the key, as a bearer token.

    HTTP basic with the key as password is taken too, so that a browser can ask for it and show the live page.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or pass on."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_allowed(scope):
            refusal = ApiError(
                401, "no valid API key was sent; send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                return hmac.compare_digest(_sent_key(value), self._key)
        return False


def _sent_key(header: bytes) -> bytes:
    kind, _, rest = header.partition(b" ")
    if kind.lower() == b"bearer":
        return rest.strip()
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


class Workers:
    """Threads for what takes long and needs no engine: parsing, templates, tokenising, grammars."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="diptych-text")
        self.bodies_bytes = 0

    async def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call on a thread and wait without holding the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Drop what has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def read_body(request: Request, body_type: type[AnyBody], workers: Workers) -> AnyBody:
    """Read and validate a JSON body. Raises ApiError 400, 408, 413 or 503; ClientDisconnect when the client left."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"content-type is {kind!r}; it must be 'application/json'", code="invalid_content_type")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_large(int(announced))
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                workers.bodies_bytes += len(part)
                raw += part
                _check_sizes(len(raw), workers.bodies_bytes)
        if len(raw) <= INLINE_BODY_BYTES:
            return parse(bytes(raw), body_type)
        return await workers.run(parse, bytes(raw), body_type)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds", code="body_timeout") from None
    finally:
        workers.bodies_bytes -= len(raw)


def parse(raw: bytes, body_type: type[AnyBody]) -> AnyBody:
    """Validate JSON bytes. Raises ApiError 400."""
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation_error(error) from None
    except UnicodeEncodeError:  # a lone surrogate, legal in JSON escapes but no text
        raise ApiError(400, "body holds a lone surrogate; text must be valid Unicode", code="invalid_json") from None


def _check_sizes(size: int, all_sizes: int) -> None:
    if size > MAX_BODY_BYTES:
        raise _too_large(size)
    if all_sizes > MAX_BODIES_BYTES:
        raise ApiError(503, "too many large bodies at one time", code="overloaded", retry_after_s=1.0)


def _too_large(size: int) -> ApiError:
    return ApiError(413, f"body has {size} bytes or more; at most {MAX_BODY_BYTES} are read", code="body_too_large")


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has gone. Only for requests whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: asyncio.Task[Answer]) -> Answer:
    """Wait for `work`, but cancel it as soon as the client leaves. Raises ClientDisconnect then."""
    watch = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        watch.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
