"""A small HTTP/1.1 client for load generation: one POST, its answer read event by event, connections kept.

Beside a general client it costs about a tenth of the time per event, and the load generator shares its machine with the
server more often than not. Knows TLS; knows no redirects, proxies or compression.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from diptych.ground.errors import ConfigError


class HttpFailure(Exception):
    """The server answered with an error, or the connection broke. `status` is None for the latter."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class _Head:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


class HttpClient:
    """Connections to one server. `base_url` is the part before `/v1/...`."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        unlike = ConfigError(f"url is {base_url!r}; it must look like http://HOST:PORT")
        try:
            parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            port = parts.port
        except ValueError:
            raise unlike from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise unlike
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[_Connection] = []
        self.n_stale = 0  # kept connections that turned out to be closed

    async def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises HttpFailure unless it is a 200."""
        async with aclosing(self._exchange("GET", path, b"")) as parts:
            return b"".join([part async for part in parts])

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A POST answered with one JSON object."""
        async with aclosing(self._exchange("POST", path, json.dumps(body).encode())) as parts:
            return json.loads(b"".join([part async for part in parts]))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """A POST answered with server-sent events: the data of each, `[DONE]` left out.

        Raises HttpFailure for an error status, an `error` event, or a stream that ends without `[DONE]`.
        """
        buffer = b""
        is_done = False
        async with aclosing(self._exchange("POST", path, json.dumps(body).encode())) as parts:
            async for part in parts:
                *complete, buffer = (buffer + part).replace(b"\r\n", b"\n").split(b"\n\n")
                for block in complete:
                    data = _event_data(block)
                    if data == b"[DONE]":
                        is_done = True
                    elif data:
                        yield data
        if not is_done:
            raise HttpFailure("the stream ended without [DONE]")

    async def _begin(self, request: bytes) -> tuple[_Connection, _Head]:
        """Send, and read the head of the answer.

        A kept connection may have been closed by the server for being idle just when this request went out; where not a
        byte came back the request goes out again on another one, as in every HTTP client that keeps connections.
        """
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await _ask(connection, request)
            except ConnectionError:
                self.n_stale += 1
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                self.n_stale += 1
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=1 << 20)
        except OSError as error:
            raise HttpFailure(f"no connection to {self._host}:{self._port}: {error}") from error
        connection = _Connection(reader, writer)
        return connection, await _ask(connection, request)

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(body)}\r\n\r\n"
        connection: _Connection | None = None
        is_reusable = False
        try:
            connection, answer = await self._begin(head.encode() + body)
            if answer.status != 200:
                text = b"".join([part async for part in _read_body(connection.reader, answer)])
                raise _failure(answer, text)
            async for part in _read_body(connection.reader, answer):
                yield part
            is_reusable = answer.headers.get("connection", "").lower() != "close"
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise HttpFailure(f"connection broke: {type(error).__name__}: {error}") from error
        finally:
            if connection is not None and is_reusable:
                self._idle.append(connection)
            elif connection is not None:
                connection.writer.close()


async def _ask(connection: _Connection, request: bytes) -> _Head:
    try:
        connection.writer.write(request)
        await connection.writer.drain()
        return await _read_head(connection.reader)
    except BaseException:
        connection.writer.close()
        raise


def _event_data(block: bytes) -> bytes:
    """The data lines of one event, joined. Raises HttpFailure for an `error` event."""
    lines = block.split(b"\n")
    data = b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))
    if any(line.startswith(b"event:") and line[6:].strip() == b"error" for line in lines) or data.startswith(
        b'{"error"'
    ):
        raise HttpFailure(f"the stream failed: {data[:300].decode(errors='replace')}")
    return data


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, *words = lines[0].split(" ", 2)
    if not version.startswith("HTTP/") or not words:
        raise ValueError(f"the answer begins with {lines[0][:80]!r}, which is no HTTP")
    head = _Head(status=int(words[0]))
    for line in lines[1:]:
        name, _, value = line.partition(":")
        head.headers[name.strip().lower()] = value.strip()
    return head


async def _read_body(reader: asyncio.StreamReader, head: _Head) -> AsyncGenerator[bytes, None]:
    if head.headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in head.headers:
        yield await reader.readexactly(int(head.headers["content-length"]))
    else:
        while part := await reader.read(65536):
            yield part
        head.headers["connection"] = "close"


def _failure(head: _Head, body: bytes) -> HttpFailure:
    after = head.headers.get("retry-after", "")
    text = body[:300].decode(errors="replace")
    return HttpFailure(
        f"status {head.status}: {text}", status=head.status, retry_after_s=float(after) if after.isdigit() else None
    )
