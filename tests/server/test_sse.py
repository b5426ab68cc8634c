from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from diptych.server import sse
from diptych.server.errors import ApiError


async def three() -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield sse.event({"n": number})


def run(stream: sse.EventStream, *, sends_block: bool = False, leaves: bool = False) -> list[dict[str, object]]:
    """Drive a response as an ASGI server would; returns what was sent."""
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)
        if sends_block and len(sent) > 1:
            await asyncio.Event().wait()

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


def test_a_reader_that_takes_nothing_is_cut_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck client must not hold its request for ever, nor be told that the answer is complete."""
    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.05)
    closed: list[int] = []
    sent = run(sse.EventStream(three(), on_close=lambda: closed.append(1)), sends_block=True)
    assert closed == [1]
    assert all(message.get("more_body", True) for message in sent)


def test_events_are_one_line_of_utf8_and_errors_have_their_name() -> None:
    assert sse.event({"text": "é\n\r\u2028"}) == 'data: {"text":"é\\n\\r\u2028"}\n\n'.encode()
    error = sse.error_event(ApiError(500, "it broke", code="x"))
    assert error.startswith(b"event: error\ndata: {")
    assert error.endswith(b"\n\n")
    with pytest.raises(ValueError, match="JSON"):
        sse.event({"x": float("nan")})
