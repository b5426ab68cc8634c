"""A body of Messages in the words of a turn: content blocks become the messages that chat templates know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diptych.engine.text.reasoning import tags_of_template
from diptych.ground.request import SamplingParams, StructuredSpec
from diptych.server.generation import Generation, sampling_params
from diptych.server.messages.body import (
    MessageParam,
    MessagesBody,
    MessagesCountBody,
    TextBlock,
    ThinkingBlock,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from diptych.server.reader import Conversation
from diptych.server.template_settings import effort_settings, unknown_setting
from diptych.server.turn import ToolUse, TurnRequest


def turn_request(generation: Generation, body: MessagesBody) -> TurnRequest:
    """A body in the words of a turn."""

    def sampling(max_tokens: int, structured: StructuredSpec | None) -> SamplingParams:
        return sampling_params(body, max_tokens=max_tokens, logprobs=None, structured=structured)

    choice = body.tool_choice
    tools = _offered(body)
    variables = settings(generation, body)
    return TurnRequest(
        render=lambda limit_tokens: generation.reader.render(
            lambda: conversation(body, variables), limit_tokens=limit_tokens
        ),
        continues=_continues(body),
        tool_use=ToolUse(
            tools=tools,
            must_call=choice is not None and choice.type in ("any", "tool"),
            name=choice.name if choice is not None else None,
            is_parallel=choice is None or not choice.disable_parallel_tool_use,
        ),
        structured=_structured(body),
        n=1,
        max_tokens=body.max_tokens,
        limit_param="max_tokens",
        is_limit_cut_to_room=True,
        sampling=sampling,
    )


def conversation(body: MessagesCountBody, variables: Mapping[str, Any]) -> Conversation:
    """What the template is run over."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    names: dict[str, str] = {}
    for message in body.messages:
        messages += _messages(message, names)
    continues = _continues(body)
    return Conversation(
        messages=messages,
        tools=_offered(body) or None,
        adds_prompt=not continues,
        continues=continues,
        variables={**variables, **(body.chat_template_kwargs or {})},
    )


def settings(generation: Generation, body: MessagesCountBody) -> dict[str, Any]:
    """Effort and thinking as the template's variables. Raises ApiError 400 for what it has no setting for."""
    source = generation.reader.template.source
    effort = body.output_config.effort if body.output_config is not None else None
    if effort == "high" and "reasoning_effort" not in source:
        effort = None  # what leaving it out means
    made = effort_settings(source, effort, param="output_config.effort")
    thinking = body.thinking
    if thinking is None:
        return made
    if "enable_thinking" in source:
        return {**made, "enable_thinking": thinking.type != "disabled"}
    thinks = tags_of_template(source) is not None
    if (thinking.type == "enabled" and not thinks) or (thinking.type == "disabled" and thinks):
        raise unknown_setting("thinking", thinking.type)
    return made


def _offered(body: MessagesCountBody) -> list[dict[str, Any]]:
    is_none = body.tool_choice is not None and body.tool_choice.type == "none"
    return [] if is_none else [_tool(tool) for tool in body.tools or ()]


def _tool(tool: ToolParam) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    function = {name: value for name, value in fields.items() if value is not None}  # in the order of the chat route
    return {"type": "function", "function": function}


def _continues(body: MessagesCountBody) -> bool:
    """A last message of the assistant's is the beginning of the answer."""
    last = body.messages[-1]
    is_text = isinstance(last.content, str) or all(isinstance(block, TextBlock) for block in last.content)
    return last.role == "assistant" and is_text and bool(_text(last.content))


def _structured(body: MessagesCountBody) -> StructuredSpec | None:
    form = body.output_config.format if body.output_config is not None else None
    return None if form is None else StructuredSpec(kind="json_schema", source=json.dumps(form.schema_))


def _text(content: str | Sequence[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content if isinstance(block, TextBlock))


def _messages(message: MessageParam, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The template's messages of one turn. names: of the calls so far, by their id; filled here."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    if message.role == "assistant":
        yield _assistant(message.content, names)
        return
    held: list[str] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            held.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if held:
                yield {"role": message.role, "content": "".join(held)}
                held = []
            yield _result(block, names)
    if held or not message.content:
        yield {"role": message.role, "content": "".join(held)}


def _assistant(blocks: Sequence[Any], names: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    names.update((call.id, call.name) for call in calls)
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return made


def _result(block: ToolResultBlock, names: Mapping[str, str]) -> dict[str, Any]:
    text = _text(block.content)
    made = {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}
    name = names.get(block.tool_use_id)
    return made if name is None else {**made, "name": name}
