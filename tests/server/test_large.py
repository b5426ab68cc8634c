"""Bodies and answers of many megabytes: refused or served while every stream goes on."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from diptych.server.http.answers import json_bytes
from diptych.server.http.door import BodyLimits, json_shape, parse_within
from diptych.server.http.errors import ApiError
from diptych.server.schema import ChatBody, CompletionBody
from server_process import ServerProcess, check_account, events_of

MB = 1024 * 1024
JSON = {"content-type": "application/json"}
# The freezes were of 7 to 38 seconds. In quiet, no timer is later than 0.1 s; a busy machine adds its own.
FREEZE_S = 1.0


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerProcess]:
    """Reads bodies of up to 32 MiB."""
    with ServerProcess("--max-queue-s", "0", "--max-body-bytes", str(32 * MB), "--kv-memory-bytes", "67108864") as one:
        yield one


def late_timers(server: ServerProcess) -> float:
    """How many timers of the server's event loop fired later than FREEZE_S."""
    return server.histogram_above("diptych_event_loop_lag_seconds", FREEZE_S)


def beside_a_stream(server: ServerProcess, load: Callable[[], Any]) -> Any:
    """Run `load` beside a stream; the stream must come out whole and equal, and no timer may be late."""
    body = {"prompt": "A long story:", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    with server.client() as http:
        alone = http.post("/v1/completions", json=body).content
        late, parts, begun = late_timers(server), [], threading.Event()

        def read() -> None:
            with http.stream("POST", "/v1/completions", json=body) as stream:
                for part in stream.iter_raw():
                    parts.append(part)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        made = load()
        reader.join(120)
    assert text_of(b"".join(parts)) == text_of(alone)
    assert late_timers(server) == late
    return made


def text_of(raw: bytes) -> str:
    assert raw.endswith(b"data: [DONE]\n\n")
    return "".join(event["choices"][0]["text"] for event in events_of(raw))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """All calls on threads of their own."""
    answers: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        answers[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers


def counted(value: Any) -> tuple[int, int]:
    """(keys + objects + lists, commas) of a JSON value, the plain way."""
    if isinstance(value, dict):
        inside, own = [counted(one) for one in value.values()], 1 + len(value)
    elif isinstance(value, list):
        inside, own = [counted(one) for one in value], 1
    else:
        return 0, 0
    return own + sum(one for one, _ in inside), max(0, len(inside) - 1) + sum(one for _, one in inside)


def test_the_shape_of_a_body_is_counted_without_its_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text full of commas and braces is one value, wherever the pieces of the count are cut."""
    draw = random.Random(5)

    def value(depth: int) -> Any:
        kind = draw.randrange(4) if depth else 2
        if kind == 0:
            return {text(): value(depth - 1) for _ in range(draw.randrange(4))}
        if kind == 1:
            return [value(depth - 1) for _ in range(draw.randrange(5))]
        return text() if kind == 2 else draw.randrange(10**6)

    def text() -> str:
        return "".join(draw.choice('ab,:{[]}"\\é\n') for _ in range(draw.randrange(8)))

    for piece_bytes in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr("diptych.server.http.door._PIECE_BYTES", piece_bytes)
        for _ in range(60):
            made = value(4)
            raw = json.dumps(made, ensure_ascii=draw.random() < 0.5)
            slow_chars = raw.count("\\") + sum(not char.isascii() for char in raw)
            assert json_shape(bytearray(raw.encode())) == (*counted(made), slow_chars), made
    json_shape(bytearray(b'\\"\\\\"{,'))  # broken JSON must not break the count


def test_millions_of_values_are_refused_before_they_are_parsed() -> None:
    """They used to be parsed, validated and repeated in an error: 8.6 s for 28 MB, with the interpreter held."""
    limits = BodyLimits.of_context(4096)
    for body_type, raw, what in (
        (CompletionBody, b'{"prompt":[' + b"3," * 2_000_000 + b"3]}", "2000000 entries"),
        (ChatBody, b'{"messages":[' + b'{"a":[]},' * 500_000 + b"3]}", "1500003 keys, objects and lists"),
        (CompletionBody, b'{"prompt":"a","logit_bias":{' + b'"1":1,' * 500_000 + b'"1":1}}', "keys"),
        # 7 ns each, at the worst in a text of 28 MB: 97 ms
        (CompletionBody, b'{"prompt":"' + b"\\n" * 2_500_001 + b'"}', "2500001 characters that are escaped"),
        (CompletionBody, '{{"prompt":"{}"}}'.format("é" * 2_500_001).encode(), "2500001 characters that are escaped"),
    ):
        with pytest.raises(ApiError, match=what) as caught:
            parse_within(bytearray(raw), body_type, limits)
        assert caught.value.status == 413
    ids = bytearray(json.dumps({"prompt": [[5] * 4096] * 64}).encode())
    assert len(parse_within(ids, CompletionBody, limits).prompt) == 64
    text = bytearray(json.dumps({"prompt": "{[,:" * 500_000}).encode())
    assert parse_within(text, CompletionBody, limits).prompt == ["{[,:" * 500_000]


def test_the_cap_follows_the_context_and_is_told(server: ServerProcess, http: httpx.Client) -> None:
    cap = BodyLimits.of_context(65536).max_bytes
    answer = http.post("/v1/completions", content=b'{"prompt":"' + b"a" * cap + b'"}', headers=JSON)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == "body_too_large"
    assert str(cap + 13) in error["message"]
    assert str(cap) in error["message"]
    assert "--max-body-bytes" in error["message"]
    assert BodyLimits.of_context(1_000_000).max_bytes > 32 * MB
    assert BodyLimits.of_context(1_000_000, 5000).max_bytes == 5000


def test_six_bodies_of_14_megabytes_hold_no_stream(patient: ServerProcess) -> None:
    """Twice as large they held every stream for 38 s and took 6 GB."""
    hostile = [
        b'{"prompt":[' + b"3," * (7 * MB) + b"3]}",
        b'{"prompt":[' + b'"a",' * (7 * MB // 2) + b'"a"]}',
        b'{"prompt":"a","metadata":{"x":[' + b'{"a":1},' * (3 * MB // 2) + b"3]}}",
        b'{"prompt":"' + b"\\n" * (7 * MB) + b'"}',
    ]
    refused_before = patient.rss_bytes()

    def send(raw: bytes) -> Callable[[], httpx.Response]:
        return lambda: httpx.post(f"{patient.url}/v1/completions", content=raw, headers=JSON, timeout=120)

    calls = [send(raw) for raw in (*hostile, *hostile[:2])]
    answers = beside_a_stream(patient, lambda: at_once(*calls))
    assert [answer.status_code for answer in answers] == [413, 413, 413, 413, 413, 413]
    assert patient.rss_bytes() - refused_before < 750_000_000


def test_64_choices_with_20_log_probabilities_hold_no_stream(patient: ServerProcess) -> None:
    """Building and encoding such an answer on the event loop held every stream for 7.3 s, where it had 60 tokens."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "n": 64, "max_tokens": 30, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "return_token_ids": True,
    }  # fmt: skip

    def ask(stream: bool) -> httpx.Response:
        return httpx.post(f"{patient.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=120)

    whole, streamed = beside_a_stream(patient, lambda: at_once(lambda: ask(False), lambda: ask(True)))
    answer = whole.json()
    check_account(answer)
    assert len(answer["choices"]) == 64
    for choice in answer["choices"]:
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [20] * 30
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"])
    check_account(events_of(streamed.content)[-1])


def test_long_texts_and_conversations_hold_no_stream(patient: ServerProcess) -> None:
    """Tokenising, rendering and the OpenAPI document each held the event loop for 0.1 s and more."""
    properties = {f"p{i}": {"type": "string", "description": "a word " * 20} for i in range(20)}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": properties}}}
        for i in range(30)
    ]
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "hello world " * 5} for i in range(1001)]
    with patient.client() as http:
        echo = {"prompt": [5] * 3800, "logprobs": 20, "echo": True, "max_tokens": 1, "stream": True}

        def load() -> list[httpx.Response]:
            return at_once(
                lambda: http.post("/tokenize", json={"prompt": "word " * 60_000, "return_token_strs": True}),
                lambda: http.post("/apply-template", json={"messages": turns, "tools": tools}),
                lambda: http.get("/openapi.json"),
                lambda: http.post("/v1/completions", json=echo),
            )

        answers = beside_a_stream(patient, load)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[0].json()["count"] == len(answers[0].json()["token_strs"]) > 60_000
    assert len(answers[1].json()["tokens"]) > 30_000
    echoed = [part for one in events_of(answers[3].content) for part in one["choices"][0]["logprobs"]["tokens"]]
    assert len(echoed) == 3801


def test_pieces_of_an_answer_make_the_same_json() -> None:
    entries = [{"token": "é\n", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []} for _ in range(1000)]
    answer = {
        "id": "x",
        "choices": [{"index": i, "logprobs": {"content": entries}, "token_ids": list(range(700))} for i in range(3)],
        "empty": [],
        "nothing": {},
        "usage": {"deep": {"deeper": {"deepest": {"x": [1, None, True, 1e-9]}}}},
    }
    assert json.loads(json_bytes(answer)) == answer
    assert json.loads(json_bytes([[1, 2], [3]])) == [[1, 2], [3]]
