"""What is answered outside of all middleware, by the HTTP layer or for a fault nobody expected, is told as any refusal.

And what is the server's state is not told as the request's fault.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from diptych.compute.sampling import structured
from diptych.engine.async_llm import AsyncLLM
from diptych.server.app import create_app
from diptych.server.config import ServerConfig
from diptych.server.state import ServerState
from server_process import ServerProcess

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: mine\r\n\r\n"
LONG = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100))


def exchange(server: ServerProcess, *parts: bytes) -> str:
    """The heads and bodies of all answers on one connection, on which each part is sent when the one before is answered."""
    received = b""
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            received += answer
        assert connection.recv(65536) == b"", "it is closed behind what is no HTTP"
    return received.decode()


@pytest.mark.parametrize(
    ("parts", "statuses", "ids"),
    [
        ([b"nonsense\r\n\r\n"], ["400"], [None]),
        ([b"GET / HTTP/1.1\r\nX-Request-ID: mine\r\nX: y\r\nHost localhost\r\n\r\n"], ["400"], ["mine"]),
        ([b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: mine\r\n" + LONG + b"\r\n"], ["431"], ["mine"]),
        # behind a request that was answered, and no part of it
        ([HEALTH, b"\x00\x01\r\n\r\n"], ["200", "400"], ["mine", None]),
    ],
)
def test_what_is_no_http_has_an_id_and_is_counted(
    server: ServerProcess, parts: list[bytes], statuses: list[str], ids: list[str | None]
) -> None:
    """These had no x-request-id, and `/metrics` did not know of them."""
    before = server.metric("diptych_requests_refused_total")
    received = exchange(server, *parts)
    assert re.findall(r"HTTP/1.1 (\d+) ", received) == statuses
    told = re.findall(r"^x-request-id: (\S+)\r$", received, re.MULTILINE)
    assert len(told) == len(ids)
    for shown, own in zip(told, ids, strict=True):
        assert shown == own or (own is None and re.fullmatch("[0-9a-f]{32}", shown))
    assert server.metric("diptych_requests_refused_total") == before + 1


@asynccontextmanager
async def served() -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """The application in this process, and a client of it."""
    async with AsyncLLM("bundled", threads=1, kv_memory_bytes=33554432) as engine:
        app = create_app(ServerState(engine, ServerConfig(), ceilings=None))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield app, http


def test_an_answer_to_what_nobody_expected_has_an_id_too() -> None:
    async def ask() -> httpx.Response:
        async with served() as (app, http):

            @app.get("/broken")
            async def broken() -> None:
                raise ZeroDivisionError

            return await http.get("/broken", headers={"x-request-id": "mine"})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (500, ["mine"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_grammars_that_others_left_behind_are_no_fault_of_a_request(
    monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """It was a 400, which no client sends again."""
    monkeypatch.setattr(structured, "_MAX_LEFT", 0)
    tool = {"name": "f", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"model": "diptych-10m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    if path.endswith("messages"):
        tools = {"tools": [{"name": "f", "input_schema": tool["parameters"]}], "tool_choice": {"type": "any"}}
    else:
        tools = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}

    async def ask() -> list[httpx.Response]:
        async with served() as (_, http):
            return [await http.post(path, json={**body, **more, "stream": stream}) for more in (tools, {})]

    refused, answered = asyncio.run(ask())
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert "is not compiled now" in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert answered.status_code == 200
