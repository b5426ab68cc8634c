"""Items of Responses in the words of a turn: what the model is shown, and how it is cut where it is too long."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diptych.engine.text.template import RenderedPrompt
from diptych.ground.errors import PromptTooLong
from diptych.ground.request import StructuredSpec
from diptych.server.reader import Conversation, Reader, object_or_text
from diptych.server.responses.body import (
    FunctionTool,
    ResponsesCountBody,
    decoded_reasoning,
    shown_name,
)
from diptych.server.template_settings import effort_settings, verbosity_settings
from diptych.server.tool_choice import chosen
from diptych.server.turn import ToolUse

Item = dict[str, Any]
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}
# for an answer of no stated length, where the prompt is cut to leave room
ROOM_TOKENS = 1024


def new_id(kind: str) -> str:
    """An id for an item of this kind."""
    return f"{PREFIXES[kind]}{uuid.uuid4().hex}"


def given_items(body: ResponsesCountBody) -> list[Item]:
    """The input as items with ids, its references unresolved."""
    if body.input is None:
        return []
    if isinstance(body.input, str):
        content = [{"type": "input_text", "text": body.input}]
        return [{"type": "message", "id": new_id("message"), "status": "completed", "role": "user", "content": content}]
    made = []
    for one in body.input:
        item: Item = one.model_dump(exclude_none=True)
        if item["type"] != "item_reference":
            item = {"status": "completed", **item, "id": item.get("id") or new_id(item["type"])}
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            part: Item = {"type": kind, "text": item["content"]}
            item["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
        made.append(item)
    return made


def settings(body: ResponsesCountBody, template_source: str) -> dict[str, Any]:
    """Effort and verbosity as the template's variables. Raises ApiError 400 for what it has no setting for."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    verbosity = body.text.verbosity if body.text is not None else None
    return {
        **effort_settings(template_source, effort, param="reasoning.effort"),
        **verbosity_settings(template_source, verbosity, param="text.verbosity"),
    }


def conversation(
    body: ResponsesCountBody, items: Sequence[Item], variables: Mapping[str, Any], *, n_dropped: int = 0
) -> Conversation:
    """What the template is run over: instructions, and all items but the first `n_dropped`."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    return Conversation(
        messages=messages + messages_of(without_first(items, n_dropped)),
        tools=[template_tool(tool) for tool in body.offered] or None,
        variables={**variables, **(body.chat_template_kwargs or {})},
    )


def tool_use(body: ResponsesCountBody) -> ToolUse:
    """The tools that are offered, and whether one must be called."""
    choice = chosen(body.tool_choice)
    return ToolUse(
        tools=[template_tool(tool) for tool in body.offered],
        must_call=choice.must_call,
        name=choice.name,
        is_parallel=body.parallel_tool_calls is not False,
    )


def template_tool(tool: FunctionTool) -> dict[str, Any]:
    """A tool as templates expect it."""
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def structured(body: ResponsesCountBody) -> StructuredSpec | None:
    """The constraint that `text.format` asks for."""
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.schema_ is None:
        return StructuredSpec(kind="json_object", source="")
    return StructuredSpec(kind="json_schema", source=json.dumps(form.schema_))


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as the messages that templates know: reasoning, text and calls that follow each other are one turn."""
    made: list[dict[str, Any]] = []
    names = {item["call_id"]: _name_of(item) for item in items if item["type"] == "function_call"}
    for item in items:
        last = made[-1] if made and made[-1]["role"] == "assistant" else None
        match item["type"]:
            case "reasoning":
                made.append({"role": "assistant", "content": "", "reasoning_content": reasoning_of(item)})
            case "function_call":
                if last is None:
                    last = {"role": "assistant", "content": ""}
                    made.append(last)
                function = {"name": _name_of(item), "arguments": object_or_text(item["arguments"])}
                call = {"id": item["call_id"], "type": "function", "function": function}
                last.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])}
                name = names.get(item["call_id"], _name_of(item))
                made.append(result if name is None else {**result, "name": name})
            case "message" if item["role"] == "assistant" and last is not None and not last["content"]:
                last["content"] = text_of(item["content"])
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                made.append({"role": role, "content": text_of(item["content"])})
    return made


def _name_of(item: Item) -> str | None:
    """Of the function that a call or its result names, as the model is shown it."""
    name = item.get("name")
    return None if name is None else shown_name(item.get("namespace"), name)


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of parts."""
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def reasoning_of(item: Item) -> str:
    """The text of a reasoning item."""
    parts = item.get("content") or item.get("summary") or ()
    if not parts and item.get("encrypted_content"):
        return decoded_reasoning(item["encrypted_content"])
    return "".join(part["text"] for part in parts)


def without_first(items: Sequence[Item], n_dropped: int) -> list[Item]:
    """All but the first ones; what rules over the conversation stays, and no result stays without its call."""
    if not n_dropped:
        return list(items)
    ruling = [item for item in items[:n_dropped] if item.get("role") in ("system", "developer")]
    kept = list(items[n_dropped:])
    calls = {item["call_id"] for item in kept if item["type"] == "function_call"}
    return ruling + [item for item in kept if item["type"] != "function_call_output" or item["call_id"] in calls]


async def render_fitting(
    reader: Reader, make: Callable[[int], Conversation], *, n_items: int, limit_tokens: int, room_tokens: int
) -> tuple[RenderedPrompt, int]:
    """The prompt without as few of the first items as leave `room_tokens` behind it, and among how many of the first these are.

    The last item stays; where even that is too long, the prompt is as long as it is, and the engine refuses it.
    """

    async def fits(n_dropped: int) -> RenderedPrompt | None:
        try:
            rendered = await reader.render(lambda: make(n_dropped), limit_tokens=limit_tokens)
        except PromptTooLong:
            return None
        return rendered if len(rendered.token_ids) + room_tokens <= limit_tokens else None

    found = await fits(0)
    if found is not None or n_items < 2:
        return found or await reader.render(lambda: make(0), limit_tokens=limit_tokens), 0
    low, high, best = 1, n_items - 1, None
    while low < high:
        middle = (low + high) // 2
        found = await fits(middle)
        if found is not None:
            high, best = middle, found
        else:
            low = middle + 1
    return best or await reader.render(lambda: make(high), limit_tokens=limit_tokens), high
