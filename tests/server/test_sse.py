from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.server.http import door, sse
from diptych.server.http.answers import JsonAnswer
from diptych.server.http.errors import ApiError


async def three() -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield sse.event({"n": number})


def run(stream: sse.EventStream, *, leaves: bool = False) -> list[dict[str, object]]:
    """Drive a response as an ASGI server would; returns what was sent."""
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    asyncio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 30))  # type: ignore[arg-type]
    return sent


def test_everything_is_sent_and_closed_once() -> None:
    closed: list[int] = []
    sent = run(sse.EventStream(three(), on_close=lambda: closed.append(1)))
    assert [message.get("body") for message in sent[1:]] == [
        b'data: {"n":0}\n\n',
        b'data: {"n":1}\n\n',
        b'data: {"n":2}\n\n',
        b"",
    ]
    assert sent[-1]["more_body"] is False
    assert closed == [1]


def test_a_client_that_leaves_closes_the_request() -> None:
    closed: list[int] = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x"
        finally:
            closed.append(2)

    run(sse.EventStream(endless(), on_close=lambda: closed.append(1)), leaves=True)
    assert 1 in closed


async def endless_events() -> AsyncGenerator[bytes, None]:
    while True:
        yield sse.event({"text": "x" * 65536})


@pytest.mark.parametrize("kind", ["stream", "json", "text"])
def test_a_reader_that_takes_nothing_is_cut_off_whatever_the_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams were given up, while what was left of them, and every other answer, waited in memory for ever."""
    monkeypatch.setattr(door, "SEND_TIMEOUT_S", 0.2)
    large = b"x" * 32_000_000
    makes = {
        "stream": lambda: sse.EventStream(endless_events(), on_close=lambda: closed.append(1)),
        "json": lambda: JsonAnswer(large),
        "text": lambda: Response(large),
    }
    asked: list[int] = []
    closed: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(1)
        await makes[kind]()(scope, receive, send)

    async def run() -> None:
        config = uvicorn.Config(app, http=door.BoundedHeaders, lifespan="off", log_level="error", loop="none")
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            serving = asyncio.ensure_future(server._serve([listener]))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not asked or server.server_state.connections or server.server_state.tasks:
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(run(), 60))
    assert closed == ([1] if kind == "stream" else [])


def test_a_reader_that_is_slow_gets_all_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes more than twice as long as one may who reads nothing."""
    monkeypatch.setattr(door, "SEND_TIMEOUT_S", 1.0)
    large = b"x" * 16_000_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(large)(scope, receive, send)

    async def run() -> int:
        config = uvicorn.Config(app, http=door.BoundedHeaders, lifespan="off", log_level="error", loop="none")
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            serving = asyncio.ensure_future(server._serve([listener]))
            client.setblocking(False)
            loop, n_bytes = asyncio.get_running_loop(), 0
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while some := await loop.sock_recv(client, 400_000):
                n_bytes += len(some)
                await asyncio.sleep(0.06)
            server.should_exit = True
            await serving
            return n_bytes

    assert asyncio.run(asyncio.wait_for(run(), 60)) > len(large)


def test_events_are_one_line_of_utf8_and_errors_have_their_name() -> None:
    assert sse.event({"text": "é\n\r\u2028"}) == 'data: {"text":"é\\n\\r\u2028"}\n\n'.encode()
    error = sse.error_event(ApiError(500, "it broke", code="x"))
    assert error.startswith(b"event: error\ndata: {")
    assert error.endswith(b"\n\n")
    with pytest.raises(ValueError, match="JSON"):
        sse.event({"x": float("nan")})
