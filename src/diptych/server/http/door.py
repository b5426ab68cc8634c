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
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from diptych.ground.bounds import lone_surrogate
from diptych.server.http.bases import Body
from diptych.server.http.errors import ApiError, error_response, from_validation_error
from diptych.server.http.fields import note_ignored
from diptych.server.http.request_id import id_headers

MAX_HEADER_BYTES = 64 * 1024
HEADER_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0
# a reader that takes nothing for this long is gone
SEND_TIMEOUT_S = 60.0
# a token of English has 4 to 5 bytes, of spaces up to 64; JSON may write 6 for each character (\u00e9)
BODY_BYTES_PER_TOKEN = 32
# tools, schemas, metadata, and several prompts in one body
BODY_ROOM_BYTES = 4 * 1024 * 1024
# below this many bytes, parsing costs less than a hand-over to a thread (about 0.1 ms)
INLINE_BODY_BYTES = 16 * 1024
# above it, bodies are parsed one after the other, as each parse holds the interpreter, and with it every stream
SERIAL_BODY_BYTES = 256 * 1024
# A parse holds the interpreter, and with it every stream, for 0.3 to 0.4 us per key, object or list, a twentieth of that per
# entry of a list, and 7 ns per character that is escaped or not ASCII (benchmarks/interpreter_held.py), so that each of these
# takes at most some 20 ms. 16,384 messages have 50,000 keys and objects.
MAX_NODES = 65_536
MAX_ENTRIES = 300_000  # 64 prompts of 4,096 token ids have 262,144
MAX_SLOW_CHARS = 2_500_000
SLOW_CHARS_PER_TOKEN = 8  # no text has more: a token of Hindi has 4 characters, an escaped one of Chinese 2
_PIECE_BYTES = 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/ready"})
TELL_REFUSED = "diptych.refused"  # of the application's state: whom to tell of what is refused before it
LEFT = 499  # the status of a request whose client has gone, which nobody reads

AnyBody = TypeVar("AnyBody", bound=Body)
Answer = TypeVar("Answer")


class BoundedHeaders(HttpToolsProtocol):
    """uvicorn's protocol with a limit on header bytes, on the time a client may take to send them, and to read what it is sent.

    What is no HTTP is refused in the API's shape too.
    """

    _header_bytes = 0
    _in_headers = True
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request's headers."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell who answers. uvicorn tells the request that came last, which may wait behind that one."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._stop_clock()
        self._stop_waiting()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to: it has so long to take what waits, of whichever answer."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        self._stop_waiting()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for long after an answer: close, which waits until all of it is read."""
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def on_message_begin(self) -> None:
        """A request starts, the first of its connection or a later one: its headers count from zero."""
        self._header_bytes, self._in_headers = 0, True
        if self._deadline is None:
            self._start_clock()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are in: stop the clock, refuse too many bytes."""
        self._stop_clock()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEADER_BYTES:
            self._refuse()
            return
        self._in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what arrives before the headers are complete."""
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse()

    def _start_clock(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEADER_TIMEOUT_S, self._too_slow)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_reader(self) -> None:
        self._stop_waiting()
        self._unread = asyncio.get_running_loop().call_later(
            SEND_TIMEOUT_S, self._look_at_reader, self.transport.get_write_buffer_size()
        )

    def _look_at_reader(self, n_bytes: int) -> None:
        """Cut the connection if nothing was read of what waited, so many bytes; whoever reads slowly has as long again.

        An answer that is not over then has no end that could be taken for its own.
        """
        if self.transport.get_write_buffer_size() < n_bytes:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        message = f"request headers are longer than {MAX_HEADER_BYTES} bytes"
        self._end_with(ApiError(431, message, code="headers_too_large"))

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, in the API's shape."""
        self._end_with(ApiError(400, "this is no HTTP request that can be read", code="invalid_http"))

    def _end_with(self, error: ApiError) -> None:
        """Answer and close; only close where an answer has begun, as these bytes would become part of it.

        No middleware sees it, so it is told here to whom the application named for it.
        """
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            sent = (self.headers or ()) if self._in_headers else ()  # else they are those of a request before
            answer = error_response(error)
            head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
            told = [*answer.raw_headers, (b"connection", b"close"), *id_headers("", sent)]
            head += [name + b": " + value for name, value in told]
            self.transport.write(b"\r\n".join([*head, b"", b""]) + bytes(answer.body))
            self.app_state.get(TELL_REFUSED, _tell_nobody)(error.status)
        self.transport.close()


def _tell_nobody(status: int) -> None:
    pass


class RequireKey:
    """Middleware: every route but `/health` and `/ready` needs the key, as a bearer token or as Anthropic's `x-api-key`.

    HTTP basic with the key as password is taken too, so that a browser can ask for it and show the live page.
    """

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or pass on."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_allowed(scope):
            refusal = ApiError(
                401,
                "no valid API key was sent; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
            await error_response(refusal, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            sent = _sent_key(value) if name == b"authorization" else value.strip() if name == b"x-api-key" else None
            if sent is not None and hmac.compare_digest(sent, self._key):
                return True
        return False


class CountRefused:
    """Middleware: tells of each request that gets an error, by its status, whoever refuses it.

    Not of probes, which ask whether there is one, nor of clients that have left.
    """

    def __init__(self, app: ASGIApp, *, tell: Callable[[int], None]) -> None:
        self._app = app
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at the answer's head."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and message["status"] != LEFT:
                self._tell(message["status"])
            await send(message)

        await self._app(scope, receive, send_counted)


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


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may have: bytes, keys + objects + lists, entries of lists, escaped and other characters that are slow to
    read; and bytes of all bodies at one time.
    """

    max_bytes: int
    max_nodes: int
    max_entries: int
    max_slow_chars: int

    @classmethod
    def of_context(cls, context_tokens: int, max_bytes: int | None = None) -> BodyLimits:
        """What requests need whose prompts have at most `context_tokens` tokens; max_bytes: asked for instead."""
        return cls(
            max_bytes=max_bytes or BODY_ROOM_BYTES + BODY_BYTES_PER_TOKEN * context_tokens,
            max_nodes=max(MAX_NODES, context_tokens),
            max_entries=max(MAX_ENTRIES, 4 * context_tokens),
            max_slow_chars=max(MAX_SLOW_CHARS, SLOW_CHARS_PER_TOKEN * context_tokens),
        )

    @property
    def max_all_bytes(self) -> int:
        """Of all bodies that are being read or parsed: hundreds of clients must not fill the memory."""
        return 8 * self.max_bytes

    def check_sizes(self, size: int, all_sizes: int) -> None:
        """Raise 413 for a body that is too large, 503 when there are too many large ones."""
        if size > self.max_bytes:
            raise ApiError(
                413,
                f"body has {size} bytes or more; at most {self.max_bytes} are read\n"
                "hint: shorten the prompt, send fewer prompts in one body, or raise --max-body-bytes",
                code="body_too_large",
            )
        if all_sizes > self.max_all_bytes:
            raise ApiError(503, "too many large bodies at one time", code="overloaded", retry_after_s=1.0)

    def check_shape(self, raw: bytearray) -> None:
        """Raise 413 for millions of values in few bytes: parsing would hold every stream and take 50 bytes per byte."""
        if len(raw) <= min(self.max_nodes, self.max_entries):
            return
        nodes, entries, slow_chars = json_shape(raw)
        for name, number, limit in (
            ("keys, objects and lists", nodes, self.max_nodes),
            ("entries", entries, self.max_entries),
            ("characters that are escaped or not ASCII", slow_chars, self.max_slow_chars),
        ):
            if number > limit:
                raise ApiError(413, f"body has {number} {name}; at most {limit} are read", code="body_too_large")


def json_shape(raw: bytearray) -> tuple[int, int, int]:
    """(keys + objects + lists, commas) of JSON text, strings left out, and its backslashes and characters beyond ASCII.

    For any bytes; nearly all of it without the GIL.
    """
    nodes = entries = slow_chars = 0
    is_inside, held = 0, b""
    for start in range(0, len(raw), _PIECE_BYTES):
        piece = bytes(raw[start : start + _PIECE_BYTES])
        codes = np.frombuffer(piece, np.uint8)
        # a character beyond ASCII begins with a byte of 0xC0 or more
        slow_chars += int(np.count_nonzero(codes >= 0xC0)) + int(np.count_nonzero(codes == ord("\\")))
        piece = held + piece
        # a pair of backslashes is a character of a string, and so is a quote behind one: neither ends it
        held = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece[: len(piece) - len(held)].replace(b"\\\\", b"").replace(b'\\"', b"")
        codes = np.frombuffer(piece, np.uint8)
        quotes = np.cumsum(codes == ord('"'), dtype=np.uint8)
        outside = codes[(quotes & 1) == is_inside]
        is_inside ^= int(quotes[-1]) & 1 if len(quotes) else 0
        entries += int(np.count_nonzero(outside == ord(",")))
        nodes += sum(int(np.count_nonzero(outside == ord(mark))) for mark in ":{[")
    return nodes, entries, slow_chars


class Workers:
    """Threads for what takes long and needs no engine: parsing, templates, tokenising, grammars, large answers."""

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="diptych-text")

    async def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call on a thread and wait without holding the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Drop what has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BodyReader:
    """Reads and validates JSON bodies within `limits`. Used on one event loop."""

    def __init__(self, workers: Workers, limits: BodyLimits) -> None:
        self.limits = limits
        self._workers = workers
        self._held_bytes = 0  # of all bodies being read or parsed
        self._large = asyncio.Lock()

    async def read(self, request: Request, body_type: type[AnyBody]) -> AnyBody:
        """Raises ApiError 400, 408, 413, 415 or 503; ClientDisconnect when the client left."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"content-type is {kind!r}; it must be 'application/json'", code="invalid_content_type")
        packing = request.headers.get("content-encoding", "identity").strip().lower()
        if packing not in ("", "identity"):
            raise ApiError(
                415,
                f"content-encoding is {packing[:100]!r}; bodies are read as they are",
                code="invalid_content_encoding",
            )
        announced = request.headers.get("content-length", "0")
        self.limits.check_sizes(int(announced) if announced.isdigit() else 0, 0)
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    self._held_bytes += len(part)
                    raw += part
                    self.limits.check_sizes(len(raw), self._held_bytes)
            body = await self._parse(raw, body_type)
            note_ignored(request.scope, body.ignored_fields)
            return body
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds"
            raise ApiError(408, message, code="body_timeout") from None
        finally:
            self._held_bytes -= len(raw)

    async def _parse(self, raw: bytearray, body_type: type[AnyBody]) -> AnyBody:
        if len(raw) <= INLINE_BODY_BYTES:
            return parse(raw, body_type)
        if len(raw) <= SERIAL_BODY_BYTES:
            return await self._workers.run(parse_within, raw, body_type, self.limits)
        async with self._large:
            return await self._workers.run(parse_within, raw, body_type, self.limits)


def parse_within(raw: bytearray, body_type: type[AnyBody], limits: BodyLimits) -> AnyBody:
    """`parse`, when the body's shape is within the limits. Raises ApiError 400 or 413."""
    limits.check_shape(raw)
    return parse(raw, body_type)


def parse(raw: bytes | bytearray, body_type: type[AnyBody]) -> AnyBody:
    """Validate JSON bytes. Raises ApiError 400."""
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation_error(error) from None
    except UnicodeEncodeError as error:  # a lone surrogate, legal in JSON escapes but no text
        words = f"a text of the body has {lone_surrogate(error.object)}; it must be valid Unicode"
        raise ApiError(400, words, code="invalid_json") from None


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
