"""`/v1/messages` with the clients people have: the anthropic package over TCP, and the bytes underneath."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator

import httpx
import pytest

from diptych.engine.text.tools import ToolCallDelta
from diptych.server.messages.answer import Blocks, read_input
from diptych.server.messages.body import NO_EFFECT, REFUSED, MessagesBody, MessagesCountBody
from diptych.server.turn_parts import TextPart, ThinkingPart
from server_process import ServerProcess

if typing.TYPE_CHECKING:  # it takes seconds, of each process that collects tests: those that need it import it
    from anthropic import Anthropic

MODEL = "diptych-10m"
ASK: list = [{"role": "user", "content": "What is the capital of Finland?"}]
LONG = "the history of the old town and its river and the people who lived there " * 8
TOOL: dict = {
    "name": "get_time",
    "description": "the time of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}
GREEDY: dict = {"temperature": 0}  # newer clients have no argument for it


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_a_message_and_its_stream_are_one_answer(client: Anthropic, http: httpx.Client) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=20, messages=ASK, extra_body=GREEDY)
    assert whole.type == "message"
    assert whole.role == "assistant"
    assert whole.id.startswith("msg_")
    assert [block.type for block in whole.content] == ["text"]
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert last.content[0].text == whole.content[0].text
    assert (last.stop_reason, last.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    chat = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 20, "temperature": 0}).json()
    assert whole.content[0].text == chat["choices"][0]["message"]["content"]


def test_every_event_names_its_type_and_stands_in_order(http: httpx.Client) -> None:
    body = {"model": MODEL, "max_tokens": 6, "messages": ASK, "temperature": 0, "stream": True, "ignore_eos": True}
    raw = http.post("/v1/messages", json=body).text
    blocks = [block.split("\n") for block in raw.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    kinds = [event["type"] for event in events]
    n_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * n_deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6
    assert events[-2]["timings"]["predicted_n"] == 6


def test_cache_tokens_are_those_of_the_prefix_cache(client: Anthropic, http: httpx.Client) -> None:
    """input + cache_creation + cache_read is the prompt; what one request writes the next one reads."""
    system: list = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    count = client.messages.count_tokens(model=MODEL, messages=ASK, system=system).input_tokens
    extra = {"cache_salt": "messages-cache"}
    first, second = (
        client.messages.create(model=MODEL, max_tokens=4, messages=ASK, system=system, extra_body=extra)
        for _ in range(2)
    )
    for usage in (first.usage, second.usage):
        assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == count
    assert first.usage.cache_read_input_tokens == 0
    assert first.usage.cache_creation_input_tokens == count // 32 * 32
    assert second.usage.cache_read_input_tokens == count // 32 * 32 > 0
    assert second.usage.cache_creation_input_tokens == 0
    other = client.messages.create(
        model=MODEL, max_tokens=4, messages=ASK, system=system, extra_body={"cache_salt": "messages-other"}
    )
    assert other.usage.cache_read_input_tokens == 0, "another salt"
    with client.messages.stream(model=MODEL, max_tokens=4, messages=ASK, system=system, extra_body=extra) as stream:
        head = next(iter(stream)).message.usage
        assert head.cache_read_input_tokens == second.usage.cache_read_input_tokens
        assert head.input_tokens == second.usage.input_tokens


def test_no_prefix_is_kept_where_the_cache_is_off() -> None:
    options = ("--no-prefix-cache", "--kv-memory-bytes", "16777216")
    with ServerProcess(*options) as process, process.client() as http:
        body = {"max_tokens": 2, "messages": ASK, "system": LONG}
        for _ in range(2):
            usage = http.post("/v1/messages", json=body).json()["usage"]
            assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_time"}])
def test_a_forced_call_its_result_and_what_follows(client: Anthropic, choice: typing.Any) -> None:
    ask: dict = {"model": MODEL, "max_tokens": 120, "extra_body": GREEDY, "tools": [TOOL],
                 "messages": [{"role": "user", "content": "What time is it in Rome?"}]}  # fmt: skip
    forced = {**choice, "disable_parallel_tool_use": True}
    whole = client.messages.create(**ask, tool_choice=forced)
    call = whole.content[-1]
    assert whole.stop_reason == "tool_use"
    assert call.type == "tool_use"
    assert call.name == "get_time"
    assert call.input["city"] in ("Rome", "Oslo")
    with client.messages.stream(**ask, tool_choice=forced) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message().content[-1]
    assert json.loads("".join(pieces)) == streamed.input == call.input
    history = [
        *ask["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12:00"}]},
            {"type": "text", "text": "And then?"}]},
    ]  # fmt: skip
    after = client.messages.create(**{**ask, "messages": history, "max_tokens": 4}, tool_choice={"type": "none"})
    assert after.usage.output_tokens > 0


def test_blocks_become_the_turns_that_the_template_knows(http: httpx.Client) -> None:
    """The same prompt as the same conversation in OpenAI's words, to the token."""
    theirs = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Time "}, {"type": "text", "text": "in Rome?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "ask the tool", "signature": ""}, {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "call_1", "name": "get_time", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "12:00"},
                {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": "no clock"},
                {"type": "text", "text": "Thanks"}]},
        ],
        "tools": [TOOL],
    }  # fmt: skip
    ours = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Time in Rome?"},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "ask the tool", "tool_calls": [
                {"id": "call_1", "type": "function",
                 "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "call_1", "content": "Error: no clock"},
            {"role": "user", "content": "Thanks"},
        ],
        "tools": [{"type": "function", "function": {"name": "get_time", "parameters": TOOL["input_schema"],
                                                    "description": TOOL["description"]}}],
    }  # fmt: skip
    counted = http.post("/v1/messages/count_tokens", json=theirs).json()
    assert counted == {"input_tokens": http.post("/v1/chat/completions/input_tokens", json=ours).json()["input_tokens"]}
    salt = {"cache_salt": "blocks", "max_tokens": 1}
    first = http.post("/v1/messages", json={**theirs, **salt}).json()["usage"]
    second = http.post("/v1/chat/completions", json={**ours, **salt}).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached == first["cache_creation_input_tokens"] > 0, "another prompt would not be found in the cache"


def test_a_tool_runner_goes_on_with_the_whole_conversation(client: Anthropic, http: httpx.Client) -> None:
    """It asks the server to keep the conversation (`thread`) and sends the tool's result alone, unless that is refused in
    the words it knows. The field was ignored: the model read a result without the question before it.
    """
    from anthropic import beta_tool

    asked: list[str] = []

    @beta_tool
    def get_time(city: typing.Literal["Rome", "Oslo"]) -> str:
        """The time of a city."""
        asked.append(city)
        return "12:00"

    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=120, extra_body=GREEDY, tools=[get_time], max_iterations=2,
        messages=[{"role": "user", "content": "What time is it in Rome?"}],
        tool_choice={"type": "tool", "name": "get_time", "disable_parallel_tool_use": True},
    )  # fmt: skip
    first, second = (one.usage for one in runner)
    assert asked
    assert second.input_tokens + (second.cache_read_input_tokens or 0) > first.input_tokens
    refused = http.post("/v1/messages", json={"max_tokens": 1, "messages": ASK, "thread": {"type": "create"}})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["message"].startswith("thread is not supported")
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_thinking_comes_as_its_own_block_and_is_counted(client: Anthropic) -> None:
    ask: dict = {"model": MODEL, "max_tokens": 200, "extra_body": GREEDY,
                 "messages": [{"role": "user", "content": "What is 3 + 4?"}]}  # fmt: skip
    thinking = client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 100})
    assert [block.type for block in thinking.content] == ["thinking", "text"]
    assert thinking.usage.output_tokens_details.thinking_tokens > 3
    plain = client.messages.create(**ask, thinking={"type": "disabled"})
    assert [block.type for block in plain.content] == ["text"]
    assert plain.usage.output_tokens_details.thinking_tokens == 0
    with client.messages.stream(**ask, thinking={"type": "adaptive"}) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        assert stream.get_final_message().content[1].text == thinking.content[1].text
    assert thought == thinking.content[0].thinking
    again = [*ask["messages"], {"role": "assistant", "content": [block.model_dump() for block in thinking.content]},
             {"role": "user", "content": "And 5 + 5?"}]  # fmt: skip
    assert client.messages.create(**{**ask, "messages": again, "max_tokens": 4}).usage.output_tokens > 0


def test_stop_sequences_prefill_and_formats(client: Anthropic, http: httpx.Client) -> None:
    ask: dict = {"model": MODEL, "max_tokens": 24, "extra_body": GREEDY, "messages": ASK}
    free = client.messages.create(**ask).content[0].text
    stopped = client.messages.create(**ask, stop_sequences=[free[4:7]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", free[4:7])
    assert stopped.content[0].text == free.partition(free[4:7])[0]
    begin = free[: free.index(" ", 5)]
    prefill = [*ASK, {"role": "assistant", "content": begin}]
    assert begin + client.messages.create(**{**ask, "messages": prefill}).content[0].text == free
    schema = {"type": "object", "properties": {"name": {"enum": ["Paris", "Rome"]}}, "required": ["name"]}
    held = client.messages.create(
        **{**ask, "max_tokens": 100}, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(held.content[0].text)["name"] in ("Paris", "Rome")


def test_more_tokens_than_the_context_has_room_for_end_as_such(http: httpx.Client) -> None:
    """Anthropic's clients ask for tens of thousands whatever the model; the end says what cut the answer off."""
    options = ("--max-context-tokens", "64", "--kv-memory-bytes", "16777216")
    with ServerProcess(*options) as process, process.client() as small:
        body = {"max_tokens": 32000, "messages": ASK, "ignore_eos": True}
        answer = small.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "model_context_window_exceeded"
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["output_tokens"] == 64
        over = small.post("/v1/messages", json={**body, "system": LONG})
        assert over.status_code == 400
        assert over.json()["error"]["type"] == "invalid_request_error"


def test_errors_reach_anthropic_s_clients_as_their_exceptions(client: Anthropic, server: ServerProcess) -> None:
    import anthropic

    ask: dict = {"model": MODEL, "max_tokens": 4, "messages": ASK}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ask, "model": "claude-9"})
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": f"model 'claude-9' is not served here; this server has {MODEL!r}"},
    }  # fmt: skip
    assert caught.value.request_id
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type is 'image'; it must be one of"
    ):
        client.messages.create(**{**ask, "messages": [{"role": "user", "content": [image]}]})
    for wrong, words in (
        ({"thinking": {"type": "enabled", "budget_tokens": 4}}, "must be less than max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'custom'"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers is not supported"),
        ({"output_config": {"effort": "little"}}, "output_config.effort"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"tool_choice": {"type": "any"}}, "only allowed when tools are given"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "may have text, tool_result"),
    ):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError, match=words.replace("(", r"\(")):
            client.messages.create(**ask, extra_body=wrong)
    missing = httpx.post(f"{server.url}/messages", json={"messages": ASK})
    assert missing.json()["error"]["message"] == "max_tokens is missing; it is required"
    assert httpx.get(f"{server.url}/v1/messages").json()["type"] == "error"
    [model] = client.models.list()
    assert (model.id, model.lifecycle) == (MODEL, "active")
    assert model.max_input_tokens == model.max_tokens == model.model_extra["max_model_len"] > 0


def test_parts_make_blocks_in_their_order() -> None:
    """Text behind a call is a block of its own; a call that goes on is the same block."""
    blocks = Blocks()
    pushed = (
        [ThinkingPart("a")],
        [TextPart("b"), ToolCallDelta(index=0, id="1", name="f")],
        [ToolCallDelta(index=0, arguments='{"x"')],
        [ToolCallDelta(index=0, arguments=": 1}")],
        [ToolCallDelta(index=1, id="2", name="g"), TextPart("c")],
    )
    events = [event for parts in pushed for event in blocks.push(parts)] + list(blocks.finish())
    assert blocks.content == [
        {"type": "thinking", "thinking": "a", "signature": ""},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        {"type": "text", "text": "c"},
    ]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3, 4]


def test_arguments_that_are_no_json_are_not_lost() -> None:
    """Under `auto` a model may break its JSON, and Anthropic's clients want an object."""
    assert read_input("") == {}
    assert read_input('{"a": [1, {"b": "c"}]}') == {"a": [1, {"b": "c"}]}
    assert read_input('{"a": "cut of') == {"a": "cut of"}
    assert read_input('{"a": nothing') == {"unreadable": '{"a": nothing'}
    assert read_input("[1]") == {"unreadable": "[1]"}


def test_every_field_of_anthropic_s_client_is_known() -> None:
    """Honoured, refused by name, or harmless and said to be; and the page shows them all."""
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta_message_create_params

    asked = set(typing.get_type_hints(message_create_params.MessageCreateParamsBase)) | {"stream"}
    asked |= set(typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams))
    asked |= set(typing.get_type_hints(beta_message_create_params.MessageCreateParamsBase)) - {"betas"}  # a header
    honoured = set(MessagesBody.model_fields)
    assert sorted(asked - honoured - REFUSED.keys() - NO_EFFECT.keys()) == []
    assert not honoured & (REFUSED.keys() | NO_EFFECT.keys())
    assert set(MessagesCountBody.model_fields) < honoured
