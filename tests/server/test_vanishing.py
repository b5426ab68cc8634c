"""Clients that are gone in the middle of an answer: what they asked for is over, counted, and no word of the log."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest

from diptych.engine.async_llm import AsyncLLM
from diptych.ground.clock import sleep_s
from diptych.server.completions import CompletionAnswer
from diptych.server.config import ServerConfig
from diptych.server.schema import CompletionBody
from diptych.server.state import ServerState
from server_process import ServerProcess

MOST_OPEN = 64


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """A request that was not counted as over keeps its place among so many."""
    options = ("--max-open-requests", str(MOST_OPEN), "--max-queue-s", "0", "--kv-memory-bytes", "67108864")
    with ServerProcess(*options) as process:
        yield process
        process.check_balance()
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


def leave(
    server: ServerProcess, body: dict[str, object], *, times: int = 1, path: str = "/v1/completions", n_running: int = 0
) -> None:
    """Ask, read the beginning, and go once so many sequences run."""
    asked = json.dumps({"model": "diptych-10m", "ignore_eos": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(asked)}\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        connection.sendall((head.encode() + asked) * times)
        if body.get("stream"):
            connection.recv(3000)
        while server.metric("diptych_sequences_running") < n_running:
            sleep_s(0.01)


def answers(server: ServerProcess) -> None:
    server.wait_idle()
    body = {"prompt": ["Once"] * MOST_OPEN, "max_tokens": 1}
    answer = server.client().post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == MOST_OPEN


@pytest.mark.parametrize("prompts", [["Once"], ["Once"] * 8])
def test_a_stream_closed_at_an_event_keeps_no_place(prompts: list[str]) -> None:
    """Where much is to be sent it stands there as its client leaves. The readers below it were not closed yet, so nobody waited
    for the end of its requests: they counted as open for ever, and in the end the server was full.
    """

    async def left() -> int:
        async with AsyncLLM("bundled", threads=1, kv_memory_bytes=33554432) as engine:
            state = ServerState(engine, ServerConfig(), ceilings=None)
            body = CompletionBody(prompt=prompts, max_tokens=900, ignore_eos=True, stream=True)
            job = CompletionAnswer(state.generation, body, arrival_s=state.now_s())
            await job.start()
            events = job.stream()
            assert await anext(events)
            assert state.desk.admission.n_open == len(prompts)
            await events.aclose()
            job.close()
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if not state.desk.admission.n_open:
                    break
            return state.desk.admission.n_open

    assert asyncio.run(left()) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_many_prompts_left_alone_keep_no_place(narrow: ServerProcess, stream: bool) -> None:
    for _ in range(3):
        body = {"prompt": ["Once"] * 60, "max_tokens": 2000, "n": 2, "stream": stream}
        leave(narrow, body, n_running=0 if stream else 20)
        narrow.wait_idle()
    answers(narrow)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_protocol_lets_go(narrow: ServerProcess, path: str) -> None:
    said = "input" if path.endswith("responses") else "messages"
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    several = {"n": 4} if path.endswith("completions") else {}
    body = {said: [{"role": "user", "content": "Hi"}], limit: 900, "stream": True, **several}
    for _ in range(20):
        leave(narrow, body, path=path)
    answers(narrow)


def test_who_leaves_with_requests_in_line_behind_another(narrow: ServerProcess) -> None:
    """The one that was being answered heard nothing of it, and wrote to a connection that was closed."""
    for _ in range(3):
        leave(narrow, {"prompt": "Once", "max_tokens": 900, "stream": True}, times=8)
    answers(narrow)
