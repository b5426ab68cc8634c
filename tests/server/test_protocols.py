"""One turn, three shapes: chat, Responses and Messages tell the same answer, and are let in, refused and ended alike."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.engine.async_llm import AsyncLLM
from diptych.engine.engine import OutputDelta
from diptych.ground.clock import sleep_s
from diptych.server.app import create_app
from diptych.server.config import ServerConfig
from diptych.server.generation import OpenedRequest, StepDelta
from diptych.server.state import ServerState
from server_process import CLOCK, ServerProcess, check_account

LONG = "the history of the old town and its river and the people who lived there " * 8
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"name": "get_time", "description": "the time of a city", "parameters": SCHEMA}
Told = dict[str, Any]


def sse(raw: str) -> Iterator[dict[str, Any]]:
    """The events of any protocol's stream."""
    for line in raw.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def chat_body(case: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "system", "content": case["system"]}, {"role": "user", "content": case["ask"]}]
    }
    body["max_tokens"] = case["limit"]
    if "thinks" in case:
        body["reasoning_effort"] = "medium" if case["thinks"] else "none"
    if "tools" in case:
        body |= {
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto" if "form" in case else "required",
            "parallel_tool_calls": False,
        }
    if "form" in case:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "sum", "schema": case["form"]}}
    return body


def read_chat(answer: httpx.Response, stream: bool) -> Told:
    if not stream:
        whole = answer.json()
        message = whole["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        return {"thought": message.get("reasoning_content", ""), "text": message["content"] or "", "calls": calls,
                "usage": whole["usage"], "timings": whole["timings"], "print": whole["system_fingerprint"]}  # fmt: skip
    told: Told = {"thought": "", "text": "", "calls": []}
    for event in sse(answer.text):
        delta = event["choices"][0]["delta"]
        told["thought"] += delta.get("reasoning_content", "")
        told["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                told["calls"].append((call["function"]["name"], ""))
            name, arguments = told["calls"][call["index"]]
            told["calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    return told | {"usage": event["usage"], "timings": event["timings"], "print": event["system_fingerprint"]}


def responses_body(case: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"instructions": case["system"], "input": case["ask"], "max_output_tokens": case["limit"]}
    if "thinks" in case:
        body["reasoning"] = {"effort": "medium" if case["thinks"] else "none"}
    if "tools" in case:
        choice = "auto" if "form" in case else "required"
        body |= {"tools": [{"type": "function", **TOOL}], "tool_choice": choice, "parallel_tool_calls": False}
    if "form" in case:
        body["text"] = {"format": {"type": "json_schema", "name": "sum", "schema": case["form"]}}
    return body


def read_responses(answer: httpx.Response, stream: bool) -> Told:
    events = list(sse(answer.text)) if stream else []
    whole = events[-1]["response"] if stream else answer.json()
    told: Told = {"thought": "", "text": "", "calls": []}
    for item in whole["output"]:
        if item["type"] == "function_call":
            told["calls"].append((item["name"], item["arguments"]))
        else:
            told["thought" if item["type"] == "reasoning" else "text"] += item["content"][0]["text"]
    if stream:  # what the deltas give is what the last event holds
        for key, kind in (("thought", "reasoning_text"), ("text", "output_text")):
            deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            assert "".join(deltas) == told[key]
    usage = whole["usage"]
    usage = {
        "prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": usage["input_tokens_details"],
        "completion_tokens_details": usage["output_tokens_details"],
    }  # fmt: skip
    return told | {"usage": usage, "timings": whole["timings"], "print": whole["system_fingerprint"]}


def messages_body(case: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"system": case["system"], "messages": [{"role": "user", "content": case["ask"]}]}
    body["max_tokens"] = case["limit"]
    if "thinks" in case:
        body["thinking"] = {"type": "enabled", "budget_tokens": 20} if case["thinks"] else {"type": "disabled"}
    if "tools" in case:
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}
        choice = "auto" if "form" in case else "any"
        body |= {"tools": [tool], "tool_choice": {"type": choice, "disable_parallel_tool_use": True}}
    if "form" in case:
        body["output_config"] = {"format": {"type": "json_schema", "schema": case["form"]}}
    return body


def read_messages(answer: httpx.Response, stream: bool) -> Told:
    told: Told = {"thought": "", "text": "", "calls": []}
    if not stream:
        whole = answer.json()
        for block in whole["content"]:
            if block["type"] == "tool_use":
                told["calls"].append((block["name"], block["input"]))
            else:
                told["thought" if block["type"] == "thinking" else "text"] += block[block["type"]]
        usage, timings, mark = whole["usage"], whole["timings"], whole["system_fingerprint"]
    else:
        for event in sse(answer.text):
            if event["type"] == "message_start":
                mark = event["message"]["system_fingerprint"]
            elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                told["calls"].append((event["content_block"]["name"], ""))
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    name, arguments = told["calls"][-1]
                    told["calls"][-1] = (name, arguments + delta["partial_json"])
                else:
                    told["thought" if delta["type"] == "thinking_delta" else "text"] += delta[
                        delta["type"].removesuffix("_delta")
                    ]
            elif event["type"] == "message_delta":
                usage, timings = event["usage"], event["timings"]
    written, cached = usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
    read = usage["input_tokens"] + written
    usage = {
        "prompt_tokens": read + cached, "completion_tokens": usage["output_tokens"],
        "total_tokens": read + cached + usage["output_tokens"],
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "completion_tokens_details": {
            "reasoning_tokens": usage["output_tokens_details"]["thinking_tokens"],
            "accepted_prediction_tokens": timings.get("draft_n_accepted", 0),
            "rejected_prediction_tokens": timings.get("draft_n", 0) - timings.get("draft_n_accepted", 0),
        },
    }  # fmt: skip
    return told | {"usage": usage, "timings": timings, "print": mark}


PROTOCOLS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., Told]]] = {
    "/v1/chat/completions": (chat_body, read_chat),
    "/v1/responses": (responses_body, read_responses),
    "/v1/messages": (messages_body, read_messages),
}
SUM = {"type": "object", "properties": {"sum": {"enum": [7, 12]}}, "required": ["sum"]}
CASES = {
    "text": {"system": LONG, "ask": "What is the capital of Finland?", "limit": 30},
    "seeded": {"system": LONG, "ask": "Tell me a story.", "limit": 30, "extra": {"temperature": 1.3, "top_k": 40, "seed": 7}},
    "thinking": {"system": LONG, "ask": "What is 3 + 4?", "limit": 200, "thinks": True},
    "call": {"system": LONG, "ask": "What time is it in Rome?", "limit": 150, "tools": True},
    "thought over": {"system": LONG, "ask": "What is 3 + 4?", "limit": 300, "tools": True, "thinks": True, "starts": "<think>"},
    "called before it answers as json": {
        "system": LONG, "ask": "What time is it in Rome?", "limit": 150, "tools": True, "form": SUM, "starts": "<tool_call>"
    },
    "answered as json and not called": {
        "system": LONG, "ask": "What is 3 + 4?", "limit": 60, "tools": True, "form": SUM, "starts": "{"
    },
}  # fmt: skip


def counted(told: Told) -> Told:
    """What must be equal: everything but the times, of which the sums must hold."""
    check_account(told)
    timings = told["timings"]
    own = timings["diptych"]
    return {
        "thought": told["thought"],
        "text": told["text"],
        "calls": [(name, json.loads(a) if isinstance(a, str) else a) for name, a in told["calls"]],
        "print": told["print"],
        "usage": {key: told["usage"][key] for key in ("prompt_tokens", "completion_tokens", "prompt_tokens_details")},
        "reasoning": told["usage"]["completion_tokens_details"]["reasoning_tokens"],
        "timings": {key: timings[key] for key in ("prompt_n", "predicted_n", "cache_n")},
        "keys": (sorted(timings), sorted(own)),
        "segments": [(part["name"], part["tokens"], part["cached_tokens"]) for part in own["segments"]],
    }


@pytest.mark.parametrize("name", CASES)
def test_a_turn_is_the_same_through_every_protocol(http: httpx.Client, name: str) -> None:
    """Text, calls, reasoning, tokens by source, segments, fingerprint; cold and with a prefix hit; whole and streamed."""
    case = CASES[name]
    extra = {"temperature": 0, **case.get("extra", {})}
    if "starts" in case:
        [token_id] = http.post("/tokenize", json={"content": case["starts"]}).json()["tokens"]
        extra["logit_bias"] = {str(token_id): 100}
    seen: dict[str, list[Told]] = {"cold": [], "hit": []}
    for (path, (body_of, read)), stream in product(PROTOCOLS.items(), (False, True)):
        body = {**body_of(case), **extra, "stream": stream, "cache_salt": f"{name} {path} {stream}"}
        for state in ("cold", "hit"):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            seen[state].append(counted(read(answer, stream)))
    for told in seen.values():
        assert told == [told[0]] * 6
    cold, hit = seen["cold"][0], seen["hit"][0]
    assert hit["timings"]["cache_n"] > cold["timings"]["cache_n"] == 0
    assert {key: cold[key] for key in ("thought", "text", "calls")} == {
        key: hit[key] for key in ("thought", "text", "calls")
    }
    assert bool(cold["calls"]) == ("tools" in case and case.get("starts") != "{")
    assert "form" not in case or bool(cold["calls"]) != (cold["text"] and json.loads(cold["text"]).keys() == {"sum"})
    assert bool(cold["thought"]) == bool(cold["reasoning"]) == bool(case.get("thinks"))


FOREVER = {"text": {"system": "Go on.", "ask": "Once", "limit": 3000}}["text"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServerProcess]:
    """With a key, and one place."""
    options = ("--max-running-sequences", "1", "--max-waiting-tokens", "100", "--drain-timeout-s", "20")
    with ServerProcess(*options, "--kv-memory-bytes", "67108864", key="a-key") as process:
        yield process


def error_type(path: str, answer: httpx.Response) -> str:
    """The type of a refusal, whose shape must be the protocol's."""
    body = answer.json()
    if path == "/v1/messages":
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["type"]


@pytest.mark.parametrize("path", PROTOCOLS)
def test_keys_sizes_and_overload_are_refused_in_the_protocol_s_shape(guarded: ServerProcess, path: str) -> None:
    body = PROTOCOLS[path][0](FOREVER)
    with httpx.Client(base_url=guarded.url, timeout=60) as http:
        for headers in ({}, {"x-api-key": "b-key"}, {"Authorization": "Bearer b-key"}):
            refused = http.post(path, json=body, headers=headers)
            assert refused.status_code == 401
            assert error_type(path, refused) == "authentication_error"
        short = PROTOCOLS[path][0]({**FOREVER, "limit": 2})
        for headers in ({"x-api-key": "a-key"}, {"Authorization": "Bearer a-key"}):
            assert http.post(path, json=short, headers=headers).status_code == 200
        http.headers["x-api-key"] = "a-key"
        large = {**body, "metadata": {"a": "b" * 8_000_000}}
        refused = http.post(path, json=large)
        assert refused.status_code == 413
        assert error_type(path, refused) == ("request_too_large" if path == "/v1/messages" else "invalid_request_error")
        with http.stream("POST", path, json={**body, "stream": True, "ignore_eos": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = http.post(path, json={**body, "cache_salt": "second"})
            assert refused.status_code == 503
            assert error_type(path, refused) == "overloaded_error"
            assert int(refused.headers["retry-after"]) >= 1
    guarded.wait_idle()  # who leaves a stream frees its blocks


@pytest.mark.parametrize("path", PROTOCOLS)
def test_every_protocol_is_counted_known_by_its_id_and_aborted(server: ServerProcess, path: str) -> None:
    name = path.rpartition("/")[2]
    before = server.metric("diptych_requests_taken_total")
    with server.client() as http, server.client() as other:
        answers = []
        body = {**PROTOCOLS[path][0](FOREVER), "ignore_eos": True, "request_id": f"id-{name}"}
        sender = threading.Thread(target=lambda: answers.append(http.post(path, json=body)))
        sender.start()
        deadline_s = CLOCK.now_s() + 30
        while other.delete(f"/v1/requests/id-{name}").status_code == 404:
            assert CLOCK.now_s() < deadline_s
            sleep_s(0.01)
        sender.join()
        answer = answers[0].json()
        if path == "/v1/chat/completions":
            answer |= answer["choices"][0]
        end = answer.get("finish_reason") or answer.get("stop_reason") or answer["status"]
        assert end in ("abort", "cancelled")
        timeline = other.get(f"/v1/requests/id-{name}/timeline").json()
        assert timeline["id"] == answer["id"]
        assert timeline["is_finished"]
    assert server.metric("diptych_requests_taken_total") == before + 1


def read_all(url: str, path: str, out: list[str]) -> None:
    """A stream that goes on until the server ends it."""
    body = {**PROTOCOLS[path][0](FOREVER), "stream": True, "ignore_eos": True}
    with httpx.stream("POST", url + path, json=body, timeout=60) as stream:
        out.append("".join(stream.iter_text()))


def test_a_crash_ends_every_stream_with_an_error_of_its_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never quietly: the last event says what happened, in the words that the client reads."""
    monkeypatch.setitem(os.environ, "CRASH_AT_STEP", "40")
    monkeypatch.setitem(os.environ, "CRASH_WITH", str(len(PROTOCOLS)))
    script = Path(__file__).parent / "crashing_server.py"
    assert sys.executable
    with ServerProcess("--max-queue-s", "0", "--kv-memory-bytes", "67108864", script=script) as process:
        streams: dict[str, list[str]] = {path: [] for path in PROTOCOLS}
        threads = [threading.Thread(target=read_all, args=(process.url, path, streams[path])) for path in PROTOCOLS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert process.process.wait(60) == 1
    last = {path: list(sse(told[0]))[-1] for path, told in streams.items()}
    assert last["/v1/chat/completions"]["error"]["type"] == "server_error"
    assert last["/v1/messages"] == {
        "type": "error",
        "error": {"type": "api_error", "message": last["/v1/messages"]["error"]["message"]},
    }
    assert last["/v1/responses"]["type"] == "error"
    failed = list(sse(streams["/v1/responses"][0]))[-2]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == last["/v1/responses"]["error"]["code"]


def test_a_fault_of_the_server_ends_a_stream_with_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody had thought of cut the connection, without a word of why."""
    merge = OpenedRequest._merge
    broken: set[OpenedRequest] = set()

    def merge_once(self: OpenedRequest, group: list[OutputDelta]) -> list[StepDelta]:
        if len(self.handle.record().choices[0].token_times_s) > 3 and self not in broken:
            broken.add(self)
            raise ValueError("who would have thought")
        return merge(self, group)

    monkeypatch.setattr(OpenedRequest, "_merge", merge_once)

    async def ask_all() -> dict[str, Any]:
        async with AsyncLLM("bundled", threads=1, kv_memory_bytes=33554432) as engine:
            app = create_app(ServerState(engine, ServerConfig(), ceilings=None))
            told = {}
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
            async with app.router.lifespan_context(app), http:
                bodies = {path: body_of(FOREVER) for path, (body_of, _) in PROTOCOLS.items()}
                for path, asked in (
                    bodies | {"/v1/completions": {"prompt": ["Once", "Twice"], "max_tokens": 3000}}
                ).items():
                    body = {**asked, "stream": True, "ignore_eos": True}
                    told[path] = list(sse((await http.post(path, json=body)).text))[-1]
                body = {**bodies["/v1/responses"], "background": True, "ignore_eos": True}
                name = (await http.post("/v1/responses", json=body)).json()["id"]
                while (last := (await http.get(f"/v1/responses/{name}")).json())["status"] == "in_progress":
                    await asyncio.sleep(0.01)
            return told | {"background": last}

    told = asyncio.run(ask_all())
    assert told["background"]["error"]["code"] == told["/v1/responses"]["code"] == "internal_error"
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert told[path]["error"]["type"] == "server_error"
    assert told["/v1/messages"]["error"]["type"] == "api_error"


def test_a_response_can_be_asked_for_while_a_call_follows_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """With log-probabilities of the text it was a 500."""
    merge = OpenedRequest._merge
    words = iter(["Let me ", "see.", '<tool_call>\n{"name": "get_time", "arguments": {"city": "'])

    def speak(self: OpenedRequest, group: list[OutputDelta]) -> list[StepDelta]:
        steps = merge(self, group)
        for step in steps:
            step.text = next(words, "Rome ")
        return steps

    monkeypatch.setattr(OpenedRequest, "_merge", speak)

    async def ask() -> dict[str, Any]:
        async with AsyncLLM("bundled", threads=1, kv_memory_bytes=33554432) as engine:
            app = create_app(ServerState(engine, ServerConfig(), ceilings=None))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
            async with app.router.lifespan_context(app), http:
                body = {"input": "What time is it in Rome?", "tools": [{"type": "function", **TOOL}], "top_logprobs": 1}
                body |= {"background": True, "ignore_eos": True, "max_output_tokens": 2000}
                told = (await http.post("/v1/responses", json=body)).json()
                while not told["output"]:
                    await asyncio.sleep(0.01)
                    told = (await http.get(f"/v1/responses/{told['id']}")).raise_for_status().json()
                await http.post(f"/v1/responses/{told['id']}/cancel")
                return told

    told = asyncio.run(ask())
    assert (told["status"], [item["type"] for item in told["output"]]) == ("in_progress", ["message"])
    [part] = told["output"][0]["content"]
    assert (part["text"], len(part["logprobs"])) == ("Let me see.", 2)


def test_a_response_has_its_id_alone_until_its_reader_has_it() -> None:
    """Of two, the first to end took the other out of those that can be read and cancelled."""
    body = {"input": "Hi", "stream": True, "request_id": "slow", "max_output_tokens": 5, "store": False}
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        return sent.pop() if sent else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def ask(engine: AsyncLLM) -> tuple[httpx.Response, httpx.Response]:
        app = create_app(ServerState(engine, ServerConfig(), ceilings=None))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), http:
            scope = {"type": "http", "method": "POST", "path": "/v1/responses", "raw_path": b"/v1/responses"}
            scope |= {"query_string": b"", "http_version": "1.1", "root_path": ""}
            scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
            reader = asyncio.ensure_future(app(scope, receive, send))
            while not (await http.get("/v1/requests/slow/timeline")).json().get("is_finished"):
                await asyncio.sleep(0.01)
            other = {**body, "stream": False}
            by_field = await http.post("/v1/responses", json=other)
            other.pop("request_id")
            by_header = await http.post("/v1/responses", json=other, headers={"x-request-id": "slow"})
            reader.cancel()
            await asyncio.wait({reader})
        return by_field, by_header

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with AsyncLLM("bundled", threads=1, kv_memory_bytes=33554432) as engine:
            return await ask(engine)

    by_field, by_header = asyncio.run(run())
    assert (by_field.status_code, by_field.json()["error"]["param"]) == (400, "request_id"), by_field.text
    assert by_header.status_code == 200, by_header.text
    assert by_header.json()["id"] != "resp_slow"


def test_a_drain_lets_every_protocol_finish(guarded: ServerProcess) -> None:
    """The last test of the server: streams and a response in the background end as they would have."""
    headers = {"x-api-key": "a-key"}
    path = "/v1/responses"
    body = {**PROTOCOLS[path][0]({**FOREVER, "limit": 1000}), "ignore_eos": True, "stream": True}
    with httpx.stream("POST", guarded.url + path, json=body, headers=headers, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        guarded.process.send_signal(signal.SIGTERM)
        deadline_s = CLOCK.now_s() + 30
        while httpx.get(f"{guarded.url}/ready").status_code == 200:
            assert CLOCK.now_s() < deadline_s
            sleep_s(0.01)
        for other, (body_of, _) in PROTOCOLS.items():
            refused = httpx.post(guarded.url + other, json=body_of(FOREVER), headers=headers, timeout=60)
            assert refused.status_code == 503
            assert error_type(other, refused) == "overloaded_error"
        events = list(sse("\n".join(lines)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 1000
    assert guarded.process.wait(60) == 0
