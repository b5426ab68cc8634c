"""Facts of the Open Responses specification of 2026-04-24 (openresponses/openresponses) and of its compliance suite.

What a response, its items and its events must have, with types; the suite's cases, and how it looks at their answers.
"""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response as OpenAIResponse

Shape = dict[str, tuple[type | None, ...]]
# the fields that a ResponseResource must have, by the types that they may have
RESOURCE: Shape = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), (str,)),
    **dict.fromkeys(("previous_response_id", "instructions", "safety_identifier", "prompt_cache_key"), (str, None)),
    **dict.fromkeys(("created_at", "top_logprobs"), (int,)),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), (int, None)),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), (bool,)),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, None)),
    "output": (list,), "tools": (list,), "text": (dict,), "metadata": (dict, None), "tool_choice": (str, dict),
}  # fmt: skip
TOOL: Shape = {
    "type": (str,), "name": (str,), "description": (str, None), "parameters": (dict, None), "strict": (bool, None)
}  # fmt: skip
USAGE: Shape = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), (int,)),
    **dict.fromkeys(("input_tokens_details", "output_tokens_details"), (dict,)),
}
ITEMS: dict[str, Shape] = {
    "message": {"type": (str,), "id": (str,), "status": (str,), "role": (str,), "content": (list,)},
    "function_call": dict.fromkeys(("type", "id", "call_id", "name", "arguments", "status"), (str,)),
    "reasoning": {"type": (str,), "id": (str,), "summary": (list,)},
}
PARTS: dict[str, Shape] = {
    "output_text": {"type": (str,), "text": (str,), "annotations": (list,), "logprobs": (list,)},
    "reasoning_text": {"type": (str,), "text": (str,)},
}
_ALL: Shape = {"type": (str,), "sequence_number": (int,)}
_ITEM: Shape = _ALL | {"output_index": (int,)}
_AT: Shape = _ITEM | {"item_id": (str,)}
_PART: Shape = _AT | {"content_index": (int,)}
EVENTS: dict[str, Shape] = {
    **{
        f"response.{word}": _ALL | {"response": (dict,)}
        for word in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": _ITEM | {"item": (dict,)},
    "response.output_item.done": _ITEM | {"item": (dict,)},
    "response.content_part.added": _PART | {"part": (dict,)},
    "response.content_part.done": _PART | {"part": (dict,)},
    "response.output_text.delta": _PART | {"delta": (str,), "logprobs": (list,)},
    "response.output_text.done": _PART | {"text": (str,), "logprobs": (list,)},
    # by the names that OpenAI's clients know: the specification writes response.reasoning.delta and .done
    "response.reasoning_text.delta": _PART | {"delta": (str,)},
    "response.reasoning_text.done": _PART | {"text": (str,)},
    "response.function_call_arguments.delta": _AT | {"delta": (str,)},
    "response.function_call_arguments.done": _AT | {"arguments": (str,)},
    "error": _ALL | {"error": (dict,)},
}  # fmt: skip


def check_shape(value: dict[str, Any], shape: Shape) -> None:
    """Every required field is there with one of its types; a truth value is no number."""
    assert sorted(shape.keys() - value.keys()) == []
    wrong = {name: value[name] for name, kinds in shape.items() if _kind(value[name]) not in kinds}
    assert wrong == {}


def _kind(value: object) -> type | None:
    return None if value is None else type(value)


def check_item(item: dict[str, Any]) -> None:
    """An output item and the parts of its content."""
    check_shape(item, ITEMS[item["type"]])
    assert item.get("status", "completed") in ("in_progress", "completed", "incomplete")
    assert item.get("role", "assistant") == "assistant"
    for part in item.get("content") or ():
        check_shape(part, PARTS[part["type"]])


def check_resource(response: dict[str, Any]) -> None:
    """The shape that the specification requires, and that the openai package reads without a warning."""
    check_shape(response, RESOURCE)
    assert response["object"] == "response"
    assert response["truncation"] in ("auto", "disabled")
    for item in response["output"]:
        check_item(item)
    for tool in response["tools"]:
        check_shape(tool, TOOL)
    usage = response["usage"]
    if usage is not None:
        check_shape(usage, USAGE)
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        check_shape(usage["input_tokens_details"], {"cached_tokens": (int,)})
        check_shape(usage["output_tokens_details"], {"reasoning_tokens": (int,)})
    OpenAIResponse.model_validate(response, strict=False)


def events_of(raw: str) -> list[dict[str, Any]]:
    """The events of a stream: named, numbered, of the specified shapes, and with [DONE] at the end."""
    *blocks, done, rest = raw.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check_shape(event, EVENTS[event["type"]])
        if "item" in event:
            check_item(event["item"])
        if "part" in event:
            check_shape(event["part"], PARTS[event["part"]["type"]])
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def put_together(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(type, text) of the output items, from the deltas alone."""
    items: list[list[str]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append([event["item"]["type"], ""])
        elif event["type"].endswith(".delta"):
            items[event["output_index"]][1] += event["delta"]
    return [(kind, text) for kind, text in items]


def texts_of(response: dict[str, Any]) -> list[tuple[str, str]]:
    """(type, text) of the output items of a response."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]


def said(content: object, role: str = "user") -> dict[str, Any]:
    """A message item."""
    return {"type": "message", "role": role, "content": content}


GET_WEATHER = {
    "type": "function", "name": "get_weather", "description": "Get the current weather for a location",
    "parameters": {
        "type": "object", "required": ["location"],
        "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
    },
}  # fmt: skip
# the suite's cases of one request: the body, and the kinds of item that must come
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "basic-response": ({"input": [said("Say hello in exactly 3 words.")]}, set()),
    "streaming-response": ({"input": [said("Count from 1 to 5.")]}, set()),
    "system-prompt": (
        {"input": [said("You are a pirate. Always respond in pirate speak.", "system"), said("Say hello.")]}, set()
    ),
    "tool-calling": (
        {"input": [said("What's the weather like in San Francisco?")], "tools": [GET_WEATHER]}, {"function_call"}
    ),
    "multi-turn": (
        {"input": [said("My name is Alice."),
                   said("Hello Alice! Nice to meet you. How can I help you today?", "assistant"),
                   said("What is my name?")]}, set()
    ),
}  # fmt: skip
# those of what a model of text has not, and the suite's optional ones: refused, by the name of what is at fault
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "image-input": (
        {"input": [said([{"type": "input_text", "text": "What do you see?"},
                         {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}])]}, "input_image"
    ),
    "file-input": (
        {"input": [said([{"type": "input_text", "text": "What is its title?"},
                         {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}])]},
        "input_file",
    ),
    "file-search": (
        {"input": "Summarise one result.", "tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}],
         "tool_choice": {"type": "file_search"}, "include": ["file_search_call.results"]}, "file_search"
    ),
    "offline-web-search": (
        {"input": "Find the best result.", "tools": [{"type": "web_search", "external_web_access": False}],
         "tool_choice": {"type": "web_search"}, "include": ["web_search_call.action.sources"]}, "web_search"
    ),
}  # fmt: skip
