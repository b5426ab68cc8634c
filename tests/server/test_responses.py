"""`/v1/responses` by the Open Responses specification, with the openai package and openai-agents over TCP."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import typing
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import response_create_params
from openai.types.responses.input_token_count_params import InputTokenCountParams
from pydantic import BaseModel

from diptych.engine.text.tools import ToolCallDelta
from diptych.ground.clock import sleep_s
from diptych.server.responses.body import NO_EFFECT, REFUSED, ResponsesBody, ResponsesCountBody
from diptych.server.responses.items import without_first
from diptych.server.responses.output import OutputItems
from diptych.server.turn_parts import TextPart, ThinkingPart
from open_responses import check_resource, events_of, put_together, texts_of
from server_process import CLOCK, ServerProcess

MODEL = "diptych-10m"
ASK = "What is the capital of Finland?"
LONG = "the history of the old town and its river and the people who lived there " * 8
TOOL: dict = {
    "type": "function", "name": "get_time", "description": "the time of a city",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}  # fmt: skip


def test_the_openai_package_reads_streams_and_parses(server: ServerProcess) -> None:
    client = server.openai()
    whole = client.responses.create(model=MODEL, input=ASK, temperature=0, instructions="Be brief.")
    assert whole.output_text
    assert whole.usage.output_tokens > 0
    with client.responses.stream(model=MODEL, input=ASK, temperature=0, instructions="Be brief.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == whole.output_text

    class City(BaseModel):
        name: typing.Literal["Paris", "Rome"]

    parsed = client.responses.parse(model=MODEL, input="Name a city.", temperature=0, text_format=City)
    assert parsed.output_parsed.name in ("Paris", "Rome")
    assert parsed.text.format.type == "json_schema"
    counted = client.responses.input_tokens.count(model=MODEL, input=ASK, instructions="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens
    logprobs = client.responses.create(
        model=MODEL, input=ASK, temperature=0, include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = logprobs.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text == client.responses.create(
        model=MODEL, input=ASK, temperature=0).output_text  # fmt: skip
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_thinking_streams_by_the_names_that_the_openai_package_knows(server: ServerProcess) -> None:
    """Of a name that it does not know the package makes some other event, whose fields are not there."""
    ask = {"model": MODEL, "input": "What is 3 + 4?", "temperature": 0, "reasoning": {"effort": "medium"}}
    with server.openai().responses.stream(**ask) as stream:
        events = [event for event in stream if event.type.startswith("response.reasoning")]
        (thought, _) = stream.get_final_response().output
    assert {type(event).__name__ for event in events} == {
        "ResponseReasoningTextDeltaEvent",
        "ResponseReasoningTextDoneEvent",
    }
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == thought.content[0].text


def test_a_conversation_goes_on_from_a_stored_response(server: ServerProcess, http: httpx.Client) -> None:
    """The prompt is the one of the whole history, and its beginning is found in the cache."""
    client, extra = server.openai(), {"cache_salt": "previous"}
    first = client.responses.create(model=MODEL, input=LONG + ASK, temperature=0, extra_body=extra)
    second = client.responses.create(
        model=MODEL, input="And of Italy?", temperature=0, previous_response_id=first.id, extra_body=extra
    )
    assert second.previous_response_id == first.id
    history = [{"role": "user", "content": LONG + ASK}, {"role": "assistant", "content": first.output_text},
               {"role": "user", "content": "And of Italy?"}]  # fmt: skip
    chat = http.post("/v1/chat/completions", json={"messages": history, "temperature": 0, **extra}).json()
    assert chat["choices"][0]["message"]["content"] == second.output_text
    assert chat["usage"]["prompt_tokens"] == second.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 32 * 32 > 0
    assert second.usage.input_tokens_details.cached_tokens == first.usage.input_tokens_details.cache_write_tokens
    third = client.responses.create(
        model=MODEL, temperature=0, previous_response_id=second.id,
        input=[{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Again?"}],
    )  # fmt: skip
    assert third.usage.input_tokens > second.usage.input_tokens + first.usage.output_tokens
    with pytest.raises(openai.BadRequestError, match="no stored response has it"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_none"}])
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"


def test_stored_responses_are_read_listed_and_deleted(server: ServerProcess, http: httpx.Client) -> None:
    client = server.openai()
    items: list = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two"},
    ]
    made = client.responses.create(model=MODEL, input=items, max_output_tokens=4, metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made
    listed = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed] == ["One", "1", "Two"], "the pages go on by themselves"
    assert [item.content[0].text for item in client.responses.input_items.list(made.id).data] == ["Two", "1", "One"]
    client.responses.delete(made.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            act(made.id)
    hidden = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4, store=False)
    assert hidden.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)
    streamed = events_of(http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4, "stream": True}).text)
    assert http.get(f"/v1/responses/{streamed[-1]['response']['id']}").json() == streamed[-1]["response"]


def wait_for(http: httpx.Client, response_id: str) -> dict[str, Any]:
    deadline_s = CLOCK.now_s() + 60
    while (found := http.get(f"/v1/responses/{response_id}").json())["status"] == "in_progress":
        assert CLOCK.now_s() < deadline_s
        sleep_s(0.02)
    return found


def test_a_response_in_the_background_is_asked_for_or_cancelled(server: ServerProcess, http: httpx.Client) -> None:
    body = {"input": ASK, "temperature": 0, "background": True}
    begun = http.post("/v1/responses", json=body).json()
    assert begun["status"] in ("queued", "in_progress")
    assert begun["background"] is True
    done = wait_for(http, begun["id"])
    check_resource(done)
    assert done["status"] == "completed"
    assert texts_of(done) == texts_of(http.post("/v1/responses", json={"input": ASK, "temperature": 0}).json())
    long = http.post("/v1/responses", json={**body, "ignore_eos": True}).json()
    refused = http.post("/v1/responses", json={"input": "Hi", "previous_response_id": long["id"]})
    assert refused.json()["error"]["code"] == "previous_response_not_finished"
    kept = http.delete(f"/v1/responses/{long['id']}")  # it was not stored here, and when it had ended it was
    assert (kept.status_code, kept.json()["error"]["code"]) == (400, "response_not_finished")
    cancelled = http.post(f"/v1/responses/{long['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert http.get(f"/v1/responses/{long['id']}").json() == cancelled
    assert http.post(f"/v1/responses/{begun['id']}/cancel").json() == done
    for wrong in ({"stream": True}, {"store": False}):
        assert http.post("/v1/responses", json={**body, **wrong}).json()["error"]["param"] == "background"
    server.wait_idle()


def test_a_stored_response_outlives_the_server(tmp_path: Path) -> None:
    """Killed at once, too: what it had written is found as it was, and what it was writing in the background as failed."""
    options = ("--response-store", str(tmp_path / "responses.db"), "--kv-memory-bytes", "16777216")
    with ServerProcess(*options) as process, process.client() as http:
        first = http.post("/v1/responses", json={"input": ASK, "temperature": 0}).json()
        beside = {"input": ASK, "temperature": 0, "background": True}
        whole = wait_for(http, http.post("/v1/responses", json=beside).json()["id"])
        begun = http.post("/v1/responses", json={**beside, "ignore_eos": True}).json()
        assert http.get(f"/v1/responses/{begun['id']}").json()["status"] == "in_progress"
        process.process.kill()
    assert (tmp_path / "responses.db").stat().st_mode & 0o77 == 0
    with ServerProcess(*options) as process, process.client() as http:
        for one in (first, whole):
            assert http.get(f"/v1/responses/{one['id']}").json() == one
        cut = http.get(f"/v1/responses/{begun['id']}").json()
        check_resource(cut)
        assert (cut["status"], cut["error"]["code"], cut["output"]) == ("failed", "server_error", [])
        again = {"input": "And of Italy?", "temperature": 0, "previous_response_id": first["id"]}
        assert http.post("/v1/responses", json=again).json()["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        with ServerProcess("--kv-memory-bytes", "16777216") as other, other.client() as elsewhere:
            assert elsewhere.get(f"/v1/responses/{first['id']}").status_code == 404
        check_a_damaged_row(tmp_path / "responses.db", http, again)


def check_a_damaged_row(path: Path, http: httpx.Client, again: dict[str, Any]) -> None:
    """An error that nobody expected is an answer; the next request on the same connection once met a closed one."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE responses SET bytes = ?", (b"\xff",))
    answer = http.post("/v1/responses", json=again)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["connection"] == "close"
    assert http.post("/v1/responses", json={"input": ASK, "max_output_tokens": 1}).status_code == 200


def test_calls_and_reasoning_come_back_with_the_next_request(server: ServerProcess, http: httpx.Client) -> None:
    """Items as an agent sends them back, and the same by previous_response_id, are one prompt: that of the chat route."""
    ask = {"input": "What is 3 + 4?", "temperature": 0, "reasoning": {"effort": "medium"},
           "include": ["reasoning.encrypted_content"]}  # fmt: skip
    thought = http.post("/v1/responses", json=ask).json()
    assert [item["type"] for item in thought["output"]] == ["reasoning", "message"]
    assert thought["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
    reasoning = thought["output"][0]
    assert reasoning["encrypted_content"].startswith("diptych.")
    events = events_of(http.post("/v1/responses", json={**ask, "stream": True}).text)
    assert put_together(events) == texts_of(thought)
    calls = {"input": "What time is it in Rome?", "tools": [TOOL], "tool_choice": "required", "temperature": 0,
             "parallel_tool_calls": False, "previous_response_id": thought["id"]}  # fmt: skip
    called = http.post("/v1/responses", json=calls).json()
    check_resource(called)
    call = called["output"][-1]
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
    sealed = {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    history = [{"role": "user", "content": "What is 3 + 4?"}, sealed, thought["output"][1],
               {"role": "user", "content": "What time is it in Rome?"}, *called["output"], result]  # fmt: skip
    counts = [
        http.post("/v1/responses/input_tokens", json={"tools": [TOOL], **one}).json()["input_tokens"]
        for one in ({"input": history}, {"input": [result], "previous_response_id": called["id"]})
    ]
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    chat = {
        "messages": [
            {"role": "user", "content": "What is 3 + 4?"},
            {"role": "assistant", "content": thought["output"][1]["content"][0]["text"],
             "reasoning_content": reasoning["content"][0]["text"]},
            {"role": "user", "content": "What time is it in Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": call["call_id"], "type": "function",
                 "function": {"name": call["name"], "arguments": call["arguments"]}}]},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "12:00"},
        ],
        "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    counts.append(http.post("/v1/chat/completions/input_tokens", json=chat).json()["input_tokens"])
    assert len(set(counts)) == 1
    foreign = http.post(
        "/v1/responses", json={"input": [{**sealed, "encrypted_content": "gAAAA"}, {"role": "user", "content": "a"}]}
    )
    assert "was not made by this server" in foreign.json()["error"]["message"]


def test_only_allowed_tools_are_shown(http: httpx.Client) -> None:
    other = {**TOOL, "name": "get_weather"}
    both = {"input": ASK, "tools": [TOOL, other]}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    answer = http.post("/v1/responses", json={**both, "tool_choice": choice, "parallel_tool_calls": False}).json()
    assert {item["name"] for item in answer["output"] if item["type"] == "function_call"} == {"get_weather"}
    assert [tool["name"] for tool in answer["tools"]] == ["get_time", "get_weather"]
    alone = http.post("/v1/responses/input_tokens", json={"input": ASK, "tools": [other]}).json()
    assert answer["usage"]["input_tokens"] == alone["input_tokens"]


def test_functions_of_a_namespace_are_called_by_both_names_and_come_back_apart(http: httpx.Client) -> None:
    """As coding agents offer their own tools and those of MCP servers."""
    space = {
        "type": "namespace",
        "name": "clock",
        "description": "Times.",
        "tools": [TOOL, {**TOOL, "name": "set_time"}],
    }
    ask = {"input": "What time is it in Rome?", "tools": [TOOL, space], "parallel_tool_calls": False, "temperature": 0}
    forced = {"tool_choice": {"type": "function", "name": "clock.set_time"}}
    called = http.post("/v1/responses", json=ask | forced).json()
    call = called["output"][-1]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "clock", "set_time")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert called["tools"][1]["name"] == "clock"
    assert set(called["tools"][1]) == {"type", "name", "description", "tools"}
    assert [tool["name"] for tool in called["tools"][1]["tools"]] == ["get_time", "set_time"]
    events = events_of(http.post("/v1/responses", json={**ask, **forced, "stream": True}).text)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (added[-1]["namespace"], added[-1]["name"]) == ("clock", "set_time")
    other = http.post("/v1/responses", json=ask | {"tool_choice": {"type": "function", "name": "get_time"}}).json()
    assert "namespace" not in other["output"][-1]

    # shown to the model as functions of chats, and so is a call that comes back
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
    functions = [
        {"name": name, "description": description, "parameters": TOOL["parameters"]}
        for name, description in (
            ("get_time", TOOL["description"]),
            ("clock.get_time", f"clock: Times.\n\n{TOOL['description']}"),
            ("clock.set_time", TOOL["description"]),
        )
    ]
    made = {"name": "clock.set_time", "arguments": call["arguments"]}
    chat = {
        "messages": [
            {"role": "user", "content": ask["input"]},
            {"role": "assistant", "content": "", "tool_calls": [{"id": call["call_id"], "type": "function", "function": made}]},
            {"role": "tool", "tool_call_id": call["call_id"], "content": "12:00"},
        ],
        "tools": [{"type": "function", "function": function} for function in functions],
    }  # fmt: skip
    counts = [
        http.post("/v1/responses/input_tokens", json={"tools": ask["tools"], **one}).json()["input_tokens"]
        for one in (
            {"input": [{"role": "user", "content": ask["input"]}, *called["output"], result]},
            {"input": [result], "previous_response_id": called["id"]},
        )
    ]
    counts.append(http.post("/v1/chat/completions/input_tokens", json=chat).json()["input_tokens"])
    assert len(set(counts)) == 1


def test_truncation_drops_the_oldest_items_and_says_so() -> None:
    options = ("--max-context-tokens", "256", "--kv-memory-bytes", "16777216")
    with ServerProcess(*options) as process, process.client() as http:
        rule = {"role": "developer", "content": "Be brief."}
        talk = [
            {"role": role, "content": f"{number} {LONG[:120]}"} for number in range(9) for role in ("user", "assistant")
        ]
        body = {"input": [rule, *talk, {"role": "user", "content": ASK}], "temperature": 0, "max_output_tokens": 40}
        refused = http.post("/v1/responses", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answer = http.post("/v1/responses", json={**body, "truncation": "auto"}).json()
        dropped = answer["dropped_items"]
        assert 0 < dropped < len(talk)
        assert answer["usage"]["input_tokens"] <= 256 - 40
        kept = [rule, *talk[dropped:], body["input"][-1]]
        assert (
            http.post("/v1/responses", json={**body, "input": kept}).json()["usage"]["input_tokens"]
            == answer["usage"]["input_tokens"]
        )
        one_more = [rule, *talk[dropped - 1 :], body["input"][-1]]
        more = http.post("/v1/responses/input_tokens", json={"input": one_more}).json()["input_tokens"]
        assert more > 256 - 40, "no more was dropped than had to be"
        assert "dropped_items" not in http.post("/v1/responses", json={"input": ASK, "truncation": "auto"}).json()


def test_items_that_are_referred_to_count_as_often_as_they_are(http: httpx.Client) -> None:
    """A template shows no thoughts of before, so no prompt was too long, and the copies to be kept filled the memory."""
    thought = {"type": "reasoning", "id": "rs_long", "content": [{"type": "reasoning_text", "text": "so " * 300_000}]}
    ask = {"role": "user", "content": ASK}
    answer = http.post("/v1/responses", json={"input": [thought, ask], "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refused = http.post(path, json={"input": [{"id": "rs_long"}] * 100 + [ask]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "conversation_too_long"), refused.text


def test_no_result_stays_without_its_call() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    rule, ask = (
        {"type": "message", "role": "system", "content": "a"},
        {"type": "message", "role": "user", "content": "b"},
    )
    assert without_first([rule, call, result, ask], 2) == [rule, ask]
    assert without_first([rule, call, result, ask], 1) == [rule, call, result, ask]


def test_what_the_length_cuts_off_is_incomplete(http: httpx.Client) -> None:
    body = {"input": ASK, "max_output_tokens": 3, "ignore_eos": True}
    answer = http.post("/v1/responses", json=body).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][-1]["status"] == "incomplete"
    assert (
        events_of(http.post("/v1/responses", json={**body, "stream": True}).text)[-1]["type"] == "response.incomplete"
    )


def test_an_abort_ends_a_stream_as_cancelled(server: ServerProcess, http: httpx.Client) -> None:
    body = {"input": ASK, "ignore_eos": True, "stream": True, "request_id": "goes"}
    with http.stream("POST", "/v1/responses", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with server.client() as other:
            deadline_s = CLOCK.now_s() + 30
            while other.delete("/v1/requests/goes").status_code == 404:
                assert CLOCK.now_s() < deadline_s
                sleep_s(0.01)
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["status"] == "cancelled"
    assert http.post("/v1/responses", json={"input": "Hi", "request_id": "goes"}).status_code == 400, "the id is taken"
    retried = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}, headers={"x-request-id": "goes"})
    assert retried.status_code == 200
    assert retried.json()["id"] != "resp_goes"
    server.wait_idle()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_openai_agents_calls_a_tool_and_answers(server: ServerProcess, streamed: bool) -> None:
    """Its default mode, over /v1/responses: the call is forced for a small model, and released after the first turn."""
    # not at the top: it takes seconds, of each process that collects tests
    from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)

    @function_tool
    def get_time(city: typing.Literal["Rome", "Oslo"]) -> str:
        """The time of a city."""
        return "12:00" if city == "Rome" else "11:00"

    async def run() -> Any:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        agent = Agent(
            name="clock", model=MODEL, instructions="Tell the time.", tools=[get_time],
            model_settings=ModelSettings(temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False),
        )  # fmt: skip
        config = RunConfig(model_provider=OpenAIProvider(openai_client=client))
        async with client:
            if not streamed:
                return await Runner.run(agent, "What time is it in Rome?", run_config=config)
            result = Runner.run_streamed(agent, "What time is it in Rome?", run_config=config)
            assert [event async for event in result.stream_events()]
            return result

    result = asyncio.run(run())
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.new_items[1].output in ("12:00", "11:00")
    assert result.final_output


def test_parts_make_items_in_their_order() -> None:
    """Text behind a call is an item of its own, and log-probabilities stay with the message they belong to."""
    items = OutputItems(encodes_reasoning=True, namespaces={})
    entry = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    pushed = (
        ([ThinkingPart("a")], [entry]), ([], [entry]), ([TextPart("b"), ToolCallDelta(index=0, id="1", name="f")], [entry]),
        ([ToolCallDelta(index=0, arguments="{}"), ToolCallDelta(index=1, id="2", name="g"), TextPart("c")], []),
    )  # fmt: skip
    events = [event for parts, entries in pushed for event in items.push(parts, entries)] + list(
        items.finish(is_whole=False)
    )
    assert [item["type"] for item in items.items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [item["status"] for item in items.items] == ["completed"] * 4 + ["incomplete"]
    assert items.items[1]["content"][0]["logprobs"].parts == [
        b",".join([json.dumps(entry, separators=(",", ":")).encode()] * 2)
    ]
    assert items.items[4]["content"][0]["logprobs"] == []
    indexes = [event["output_index"] for event in events]
    assert indexes == sorted(indexes)


def test_every_field_of_openai_s_client_is_known() -> None:
    """Honoured, refused by name, or harmless and said to be."""
    asked = set(typing.get_type_hints(response_create_params.ResponseCreateParamsBase)) | {"stream"}
    asked |= set(typing.get_type_hints(InputTokenCountParams))
    honoured = set(ResponsesBody.model_fields)
    assert sorted(asked - honoured - REFUSED.keys() - NO_EFFECT.keys()) == []
    assert honoured & REFUSED.keys() == set()
    assert set(ResponsesCountBody.model_fields) < honoured


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'; it must be"),
        ({"input": None}, "input is missing"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "must be one of the tools"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "must have a schema"),
        ({"max_tokens": 5}, "max_output_tokens"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "at most 16"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(http: httpx.Client, wrong: dict, words: str) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", **wrong})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_websocket_is_refused_with_a_way_out(server: ServerProcess) -> None:
    """It was a 403 without a word, and a 405 where no library for them is installed."""
    url = httpx.URL(server.url)
    ask = "Upgrade: websocket\r\nConnection: Upgrade, close\r\nSec-WebSocket-Version: 13"
    ask += "\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(f"GET /v1/responses HTTP/1.1\r\nHost: {url.host}\r\n{ask}\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unsupported"


def test_compaction_is_refused_with_a_way_out(http: httpx.Client) -> None:
    """It was a 404 of a response named "compact"'s route, as if the server did not know the word."""
    answer = http.post("/v1/responses/compact", json={"model": "diptych-10m", "input": "Hi"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported"
    assert "truncation" in error["message"]
