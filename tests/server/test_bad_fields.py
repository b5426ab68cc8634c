"""Every field of a request with wrong types and extreme values, beside a stream that must not notice. Over real HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from threading import Event
from typing import Any

import httpx
import pytest

from diptych.server.http.bases import Body
from diptych.server.messages.body import MessagesBody
from diptych.server.responses.body import ResponsesBody
from diptych.server.schema import ChatBody, CompletionBody
from diptych.server.text_bodies import DetokenizeBody, TemplateBody, TokenizeBody
from server_process import ServerProcess, events_of

STREAM = {"prompt": "A long story:", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}
ROUTES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "Hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1, 2]}),
    "/v1/messages": (MessagesBody, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "Hi", "max_output_tokens": 2}),
    "/apply-template": (TemplateBody, {"messages": [{"role": "user", "content": "Hi"}]}),
}
# as JSON text, because Python's encoder would not write some of them
VALUES = (
    "null", "true", "false", "0", "-1", "1", "1.5", "-0.0", "1e308", "1e-320", "1e999", "NaN", "Infinity", "2147483647",
    "2147483648", "9223372036854775807", "-9223372036854775808", "9" * 400, '""', '"x"', '"1"', '"\\u0000"',
    '"\\ud800"', '"' + "é" * 3000 + '"', "[]", "[[]]", "[null]", "[1.5]", "[-1]", "[9223372036854775807]", '["x"]',
    '["", ""]', "[[1], [2]]", "[true]", "{}", '{"a": 1}', '{"0": 1e308}', '{"-1": 0}', '{"99999999999": 1}',
    '{"type": "function"}', '{"type": "json_schema", "json_schema": {"schema": true}}', '{"json": "{"}', '{"choice": []}',
    '{"regex": "("}', '[{"role": "user", "content": 5}]', '[{"type": "function", "function": {"name": "f"}}]',
    "[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150,
)  # fmt: skip


def _cases() -> list[tuple[str, str, str]]:
    """A field that several routes have is tried with every value on the first of them, and with every fourth on the others."""
    cases, seen = [], set()
    for path, (body_type, _) in ROUTES.items():
        for name, field in body_type.model_fields.items():
            values = VALUES[::4] if name in seen else VALUES
            cases += [(path, field.alias or name, value) for value in values]
            seen.add(name)
    return cases


CASES = _cases()


def body_with(path: str, field: str, value: str) -> bytes:
    """The route's smallest body, one field of it replaced by JSON text."""
    base = {name: json.dumps(one) for name, one in ROUTES[path][1].items()} | {field: value}
    return ("{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in base.items()) + "}").encode()


def text_of(raw: bytes) -> str:
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    return "".join(event["choices"][0]["text"] for event in events_of(raw))


class Sender(HTTPConnection):
    """A kept connection. The standard library's: httpx takes as long for a request as the server does for its answer."""

    def post(self, path: str, raw: bytes) -> tuple[int, bytes]:
        self.request("POST", path, raw, {"content-type": "application/json"})
        with self.getresponse() as answer:
            return answer.status, answer.read()


def test_no_value_of_any_field_harms_another_stream(server: ServerProcess) -> None:
    """A seed of 1.5 ended the engine, and with it everybody's answers."""
    wrong: list[str] = []
    is_over = Event()

    def stream() -> bytes:
        with closing(Sender(server.host, server.port, timeout=300)) as sender:
            return sender.post("/v1/completions", json.dumps(STREAM).encode())[1]

    def streams() -> list[bytes]:
        seen = []
        while not is_over.is_set():
            seen.append(stream())
        return seen

    def send(cases: list[tuple[str, str, str]]) -> None:
        with closing(Sender(server.host, server.port, timeout=300)) as sender:
            for path, field, value in cases:
                status, raw = sender.post(path, body_with(path, field, value))
                if status not in (200, 400, 404, 413):
                    wrong.append(f"{path} {field}={value[:60]}: {status} {raw[:200]!r}")
                elif status != 200 and not json.loads(raw)["error"]["message"]:
                    wrong.append(f"{path} {field}={value[:60]}: no message")

    alone = stream()
    with ThreadPoolExecutor(9) as pool:
        beside = pool.submit(streams)
        try:
            for sent in [pool.submit(send, CASES[number::8]) for number in range(8)]:
                sent.result()
        finally:
            is_over.set()
    assert not wrong, "\n".join(wrong[:20])
    assert len(CASES) > 2000
    assert beside.result()
    for raw in beside.result():
        assert text_of(raw) == text_of(alone)
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("field", ["seed", "top_k", "max_tokens", "n", "min_tokens"])
def test_a_fraction_is_no_whole_number(http: httpx.Client, field: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", field: 1.5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
