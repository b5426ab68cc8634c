"""Speculation over HTTP: the answers of a server without, and accounts that add up in every place that tells them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from server_process import ServerProcess, check_account

WORDS = "one two three four five six seven eight nine ten "
CHAT = [{"role": "user", "content": "Say it again: " + WORDS * 6}]
OPTIONS = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def speculating() -> Iterator[ServerProcess]:
    """The bundled model with all its drafters."""
    with ServerProcess("--speculate", "auto", "--max-queue-s", "0", "--kv-memory-bytes", "67108864") as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors
        assert "Traceback" not in errors, errors


def client_of(process: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="none")


def counters(process: ServerProcess) -> dict[str, int]:
    """The counts of speculation that /metrics shows."""
    text = httpx.get(f"{process.url}/metrics").text
    found = re.findall(r'^vllm:spec_decode_(num_\w+)_total\{[^}]*?(?:position="(\d+)")?\} ([0-9.]+)$', text, re.M)
    return {f"{name}{position}": int(float(value)) for name, position, value in found}


def test_accounts_add_up_wherever_they_are_told(server: ServerProcess, speculating: ServerProcess) -> None:
    """usage, timings, /metrics and the timeline count the same drafts; a rejected one is no token of the answer."""
    plain = client_of(server).chat.completions.create(model="diptych-10m", messages=CHAT, **OPTIONS)
    before, answer = counters(speculating), None
    client = client_of(speculating)
    totals = {"drafted": 0, "accepted": 0, "chunks": 0}
    for _ in range(3):
        answer = client.chat.completions.create(model="diptych-10m", messages=CHAT, **OPTIONS)
        check_account(answer.model_dump())
        assert answer.choices[0].message.content == plain.choices[0].message.content
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        details, timings = answer.usage.completion_tokens_details, answer.model_dump()["timings"]
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)) == (accepted + rejected, accepted)
        timeline = httpx.get(f"{speculating.url}/v1/requests/{answer.id}/timeline").json()
        assert sum(step["drafted"] for step in timeline["drafts"]) == accepted + rejected
        assert sum(step["kept"] for step in timeline["drafts"]) == accepted
        totals["drafted"] += accepted + rejected
        totals["accepted"] += accepted
        totals["chunks"] += len(timeline["drafts"])
    assert totals["drafted"] > 0
    after = counters(speculating)
    told = {name: number - before.get(name, 0) for name, number in after.items()}
    assert told["num_drafts"] == totals["chunks"]
    assert told["num_draft_tokens"] == totals["drafted"]
    assert told["num_accepted_tokens"] == totals["accepted"]
    by_depth = [number for name, number in told.items() if name.startswith("num_accepted_tokens_per_pos")]
    assert sum(by_depth) == totals["accepted"]
    assert by_depth == sorted(by_depth, reverse=True), "a draft holds only where those before it do"


# Guesses are made while they pay, by the times of this machine: a step that the host disturbed can keep an answer from them.
TRIES = 8


def test_a_prediction_is_honoured_where_nobody_else_guesses(server: ServerProcess) -> None:
    """OpenAI's predicted outputs: `prediction` was taken without a word and without any use."""
    client = client_of(server)
    plain = client.chat.completions.create(model="diptych-10m", messages=CHAT, **OPTIONS)
    text = plain.choices[0].message.content
    assert "draft_n" not in plain.model_dump()["timings"]
    for content in (text, [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}]):
        prediction = {"type": "content", "content": content}
        for _ in range(TRIES):
            answer = client.chat.completions.create(
                model="diptych-10m", messages=CHAT, prediction=prediction, **OPTIONS
            )
            assert answer.choices[0].message.content == text
            if answer.usage.completion_tokens_details.accepted_prediction_tokens > 0:
                break
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    for _ in range(TRIES):
        chunks = list(
            client.chat.completions.create(
                model="diptych-10m",
                messages=CHAT,
                prediction={"type": "content", "content": text},
                stream=True,
                stream_options={"include_usage": True},
                **OPTIONS,
            )
        )
        if chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0:
            break
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    usage = chunks[-1].usage
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize("field", ["max_draft_tokens", "speculative.n_max"])
def test_a_request_may_want_no_drafts(speculating: ServerProcess, field: str) -> None:
    """Ours and llama.cpp's name of it."""
    body = {"messages": CHAT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with speculating.client() as http:
        answer = http.post("/v1/chat/completions", json={**body, field: 0})
    assert answer.status_code == 200, answer.text
    assert "draft_n" not in answer.json()["timings"]
    assert "x-diptych-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prediction", {"type": "text", "content": "x"}, "prediction.type"),
        ("prediction", {"type": "content"}, "prediction.content is missing"),
        ("prediction", {"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ("prediction", {"type": "content", "content": "one two " * 20000}, "prediction has more than"),
        ("max_draft_tokens", -1, "max_draft_tokens is -1"),
        ("max_draft_tokens", "4", "max_draft_tokens"),
    ],
)
def test_bad_fields_are_refused_by_name(http: httpx.Client, field: str, value: object, message: str) -> None:
    """An option is honoured or refused."""
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4, field: value})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith(field)
