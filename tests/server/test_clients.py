"""The clients people have: the openai package, sync and async, and curl; everything over TCP."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from server_process import ServerProcess, check_account, events_of

MODEL = "diptych-10m"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "the time of a city",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
        },
    }
]


def test_completion_and_chat_with_the_openai_package(server: ServerProcess) -> None:
    client = server.openai()
    done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0)
    assert done.choices[0].text
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 12
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
    )
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_streamed_text_equals_the_whole_answer(server: ServerProcess) -> None:
    client = server.openai()
    whole = client.completions.create(model=MODEL, prompt="The capital of", max_tokens=16, temperature=0)
    parts = list(
        client.completions.create(model=MODEL, prompt="The capital of", max_tokens=16, temperature=0, stream=True)
    )
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == "length"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 16
    messages = [{"role": "user", "content": "What is the capital of Finland?"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0, stream=True)  # type: ignore[call-overload]
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat.choices[0].message.content


def test_stream_options_add_one_last_chunk_with_usage(server: ServerProcess) -> None:
    """LangChain adds up the usage of every chunk, so it may come once only."""
    stream = server.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_n_stop_seed_and_logit_bias(server: ServerProcess) -> None:
    client = server.openai()
    several = client.completions.create(model=MODEL, prompt="Once", max_tokens=6, n=3, temperature=1.0, seed=7)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1
    again = client.completions.create(model=MODEL, prompt="Once", max_tokens=6, n=3, temperature=1.0, seed=7)
    assert [choice.text for choice in again.choices] == [choice.text for choice in several.choices]
    free = client.completions.create(model=MODEL, prompt="The capital of Finland is", max_tokens=24, temperature=0)
    stop = free.choices[0].text[4:7]
    stopped = client.completions.create(
        model=MODEL, prompt="The capital of Finland is", max_tokens=24, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text.partition(stop)[0]
    assert stopped.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": " zebra", "add_special_tokens": False}).json()["tokens"]
    biased = client.completions.create(
        model=MODEL, prompt="The capital of", max_tokens=1, temperature=0, logit_bias={str(ids[0]): 100}
    )
    named = httpx.post(f"{server.url}/detokenize", json={"tokens": ids[:1]}).json()["prompt"]
    assert biased.choices[0].text == named


def test_logprobs_in_both_shapes(server: ServerProcess) -> None:
    client = server.openai()
    done = client.completions.create(model=MODEL, prompt="The capital of", max_tokens=4, temperature=0, logprobs=3)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == done.choices[0].text
    for token, chosen, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values()) == top[token]
        assert chosen <= 0.0
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    entries = chat.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    assert len(entries.content) == 3
    assert all(len(entry.top_logprobs) == 2 and entry.bytes for entry in entries.content)


def test_echo_with_prompt_logprobs_and_no_output(http: httpx.Client) -> None:
    """Evaluation harnesses score a given text this way."""
    body = {
        "prompt": "The capital of Finland is Helsinki",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    answer = http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == body["prompt"]
    assert "".join(choice["logprobs"]["tokens"]) == body["prompt"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert len(choice["logprobs"]["token_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    shown = {**body, "return_token_ids": True}
    assert http.post("/v1/completions", json=shown).json()["choices"][0]["token_ids"] == []
    streamed = {**shown, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    (event,) = events_of(http.post("/v1/completions", json=streamed).content)
    assert event["choices"][0]["text"] == body["prompt"]
    assert event["choices"][0]["token_ids"] == []
    assert event["usage"]["completion_tokens"] == 0


def test_token_id_prompts_and_batches_of_prompts(http: httpx.Client) -> None:
    texts = ["The capital of", "Once upon a"]
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    body = {"max_tokens": 5, "temperature": 0, "n": 2, "return_token_ids": True}
    by_text = http.post("/v1/completions", json={**body, "prompt": texts}).json()
    by_ids = http.post("/v1/completions", json={**body, "prompt": ids}).json()
    one = http.post("/v1/completions", json={**body, "prompt": ids[0]}).json()
    assert [choice["text"] for choice in by_text["choices"]] == [choice["text"] for choice in by_ids["choices"]]
    assert [choice["text"] for choice in one["choices"]] == [choice["text"] for choice in by_ids["choices"][:2]]
    assert [choice["index"] for choice in by_ids["choices"]] == [0, 1, 2, 3]
    assert by_ids["choices"][2]["prompt_token_ids"] == ids[1]
    assert all(len(choice["token_ids"]) == 5 for choice in by_ids["choices"])
    assert by_ids["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert by_ids["usage"]["completion_tokens"] == 20
    streamed = events_of(http.post("/v1/completions", json={**body, "prompt": ids, "stream": True}).content)
    for index, choice in enumerate(by_ids["choices"]):
        parts = [event["choices"][0]["text"] for event in streamed if event["choices"][0]["index"] == index]
        assert "".join(parts) == choice["text"]


def test_async_clients_beside_each_other(server: ServerProcess) -> None:
    async def ask(client: AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=f"Story number {number}:", max_tokens=8, temperature=0, stream=True
        )
        return "".join([part.choices[0].text async for part in stream])

    async def all_at_once() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    together = asyncio.run(all_at_once())
    alone = [
        server.openai()
        .completions.create(model=MODEL, prompt=f"Story number {number}:", max_tokens=8, temperature=0)
        .choices[0]
        .text
        for number in (0, 11)
    ]
    assert [together[0], together[11]] == alone


def test_errors_reach_openai_clients_as_their_exceptions(server: ServerProcess) -> None:
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "5000" in caught.value.message


def test_a_stream_is_valid_sse_byte_for_byte(http: httpx.Client) -> None:
    """One event per step and choice, one data line each, [DONE] last, nothing else between."""
    body = {
        "prompt": "Once",
        "max_tokens": 7,
        "n": 2,
        "temperature": 0.9,
        "seed": 1,
        "stream": True,
        "ignore_eos": True,
    }
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    raw = answer.content
    assert raw.endswith(b"data: [DONE]\n\n")
    blocks = raw.split(b"\n\n")
    assert blocks[-1] == b""
    events = [json.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]
    for block in blocks[:-1]:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        assert b"\r" not in block
    by_choice: dict[int, int] = {0: 0, 1: 0}
    for event in events:
        assert len(event["choices"]) == 1
        by_choice[event["choices"][0]["index"]] += 1
    assert by_choice == {0: 7, 1: 7}
    assert [("usage" in event, "timings" in event) for event in events] == [(False, False)] * 13 + [(True, True)]
    check_account(events[-1])


def test_utf8_is_never_split(http: httpx.Client) -> None:
    """Bytes of one character may come from several tokens; every event must be whole text."""
    text = "naïve 東京 🎉 "
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    # force the output to spell the text, one token after the other
    body = {"prompt": "x", "max_tokens": len(ids) + 4, "temperature": 0, "stream": True}
    body["structured_outputs"] = {"choice": [text.strip()]}
    raw = http.post("/v1/completions", json=body).content
    parts = [event["choices"][0]["text"] for event in events_of(raw)]
    assert "".join(parts) == text.strip()
    assert all("�" not in part for part in parts)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: ServerProcess) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    out = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert out.endswith(b"data: [DONE]\n\n")
    assert events_of(out)[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_forced_tool_call_is_always_a_valid_call(server: ServerProcess, choice: object) -> None:
    """The grammar holds even for a model of 10M parameters; streamed and not."""
    client = server.openai()
    arguments = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What time is it in Rome?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    call = whole.choices[0].message.tool_calls[0]
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    name, text = "", ""
    for chunk in client.chat.completions.create(**arguments, stream=True):  # type: ignore[call-overload]
        for part in chunk.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            text += part.function.arguments or ""
    assert (name, text) == (call.function.name, call.function.arguments)
    with client.chat.completions.stream(**arguments) as stream:  # type: ignore[arg-type]
        pieces = [one.arguments_delta for one in stream if one.type == "tool_calls.function.arguments.delta"]
        (kept,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert kept.function.arguments == "".join(pieces) == call.function.arguments, "it lost what came with the name"
    history = [
        *arguments["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "12:00"},
    ]
    after = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=4)  # type: ignore[arg-type]
    assert after.usage is not None


def test_a_form_of_the_answer_is_no_matter_of_a_forced_call(http: httpx.Client) -> None:
    """Libraries send both, as instructor does with Responses, and OpenAI takes them; here it was a 400."""
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    function = TOOLS[0]["function"]
    form = {"type": "json_schema", "name": "a", "schema": schema}
    asked: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "Time?"}],
            "tools": TOOLS,
            "tool_choice": "required",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        },
        "/v1/responses": {
            "input": "Time?",
            "tools": [{"type": "function", **function}],  # type: ignore[dict-item]
            "tool_choice": {"type": "function", "name": "get_time"},
            "text": {"format": form},
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": "Time?"}],
            "max_tokens": 90,
            "tools": [{"name": "get_time", "input_schema": function["parameters"]}],  # type: ignore[index]
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    }
    told = {}
    for path, body in asked.items():
        answer = http.post(path, json={"model": MODEL, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        told[path] = answer.json()
    assert told["/v1/chat/completions"]["choices"][0]["finish_reason"] == "tool_calls"
    assert [one["type"] for one in told["/v1/responses"]["output"]] == ["function_call"]
    assert told["/v1/messages"]["stop_reason"] == "tool_use"
    body = asked["/v1/chat/completions"]
    del body["response_format"]
    refused = http.post("/v1/chat/completions", json={"model": MODEL, "structured_outputs": {"regex": "[ab]"}, **body})
    assert refused.status_code == 400
    assert "a forced tool_choice and a regex exclude each other" in refused.json()["error"]["message"]


def test_thinking_goes_to_reasoning_content_and_is_counted_apart(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 3 + 4?"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "structured_outputs": {"grammar": 'start: <think> "\\n3 and 4 make 7.\\n" </think> "\\n\\nThe sum is 7."'},
        "max_tokens": 80,
        "temperature": 0,
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "3 and 4 make 7."
    assert message["content"] == "The sum is 7."
    own = answer["timings"]["diptych"]
    assert own["thinking_n"] > 3
    assert own["answer_n"] > 3
    assert own["thinking_ms"] > 0
    assert own["ttft_visible_ms"] > own["ttft_ms"]
    check_account(answer)
    events = events_of(http.post("/v1/chat/completions", json={**body, "stream": True}).content)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "3 and 4 make 7."
    assert "".join(delta.get("content", "") for delta in deltas) == "The sum is 7."
    check_account(events[-1])


def test_a_schema_holds_behind_the_thinking_and_takes_none_of_it_away(http: httpx.Client) -> None:
    """The bundled model thinks before sums when told to; a response_format used to switch that off."""
    schema = closed(sum={"type": "integer"})
    body = {
        "messages": [{"role": "user", "content": "What is 3 + 4?"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 200,
        "temperature": 0,
    }
    free = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert free["reasoning_content"]
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = http.post("/v1/chat/completions", json={**body, "response_format": form}).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == free["reasoning_content"]
    assert set(json.loads(message["content"])) == {"sum"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    check_account(answer)
    events = events_of(
        http.post("/v1/chat/completions", json={**body, "response_format": form, "stream": True}).content
    )
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    check_account(events[-1])
    quick = {**body, "response_format": form, "chat_template_kwargs": {"enable_thinking": False}}
    answer = http.post("/v1/chat/completions", json=quick).json()
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"sum"}


def test_a_forced_tool_call_may_be_thought_over(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 3 + 4?"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 300,
        "temperature": 0,
        "logit_bias": {str(http.post("/tokenize", json={"prompt": "<think>"}).json()["tokens"][0]): 100},
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["city"] in ("Rome", "Oslo")
    check_account(answer)


def closed(**properties: object) -> dict[str, object]:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
