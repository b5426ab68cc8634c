"""Structured output over HTTP: whatever the schema and whatever happens to the sequence, a finished answer obeys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import jsonschema_rs
import pytest

from schemas import random_object_schema
from server_process import ServerProcess, check_account, events_of

AT_ONCE = 16


@pytest.fixture(scope="module")
def crowded() -> Iterator[ServerProcess]:
    """A pool of 2,048 tokens for 16 sequences that may have 400 each: they preempt each other, grammars and all."""
    with ServerProcess(
        "--max-context-tokens", "512", "--kv-memory-bytes", "4800000", "--max-step-tokens", "64", "--max-queue-s", "0"
    ) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


def answers(
    server: ServerProcess, numbers: range
) -> list[tuple[dict[str, object], dict[str, object], list[dict[str, object]]]]:
    """For each schema the schema, its answer, and the events of the same request streamed."""

    async def ask(http: httpx.AsyncClient, gate: asyncio.Semaphore, number: int, stream: bool) -> httpx.Response:
        schema = random_object_schema(number)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        body = {
            "prompt": f"Answer {number}:",
            "max_tokens": 400,
            "seed": number,
            "response_format": form,
            "stream": stream,
        }
        async with gate:
            return await http.post("/v1/completions", json={**body, "temperature": 0.8})

    async def ask_all() -> list[httpx.Response]:
        gate = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
            return await asyncio.gather(
                *(ask(http, gate, number, stream) for number in numbers for stream in (False, True))
            )

    got = asyncio.run(ask_all())
    assert [response.status_code for response in got] == [200] * len(got)
    return [
        (random_object_schema(number), whole.json(), events_of(streamed.content))
        for number, whole, streamed in zip(numbers, got[::2], got[1::2], strict=True)
    ]


def check_answers(server: ServerProcess, numbers: range) -> None:
    n_finished = n_preempted = 0
    for schema, whole, events in answers(server, numbers):
        (choice,) = whole["choices"]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == choice["text"], "the stream and the whole answer differ"
        assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        for account in (whole, events[-1]):
            check_account(account)
            n_preempted += account["timings"]["diptych"]["preemptions"] > 0
        if choice["finish_reason"] == "stop":
            n_finished += 1
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(text))
    assert n_finished >= 0.8 * len(numbers)
    assert n_preempted >= len(numbers) / 10, "the pool was meant to be too small"
    server.wait_idle()


def test_thirty_schemas_with_preemption_whole_and_streamed(crowded: ServerProcess) -> None:
    check_answers(crowded, range(30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_schemas_with_preemption_whole_and_streamed(crowded: ServerProcess) -> None:
    check_answers(crowded, range(1000, 1200))
