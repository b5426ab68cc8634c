"""The calls of a whole output, through the parser that streams."""

from collections.abc import Collection, Mapping
from typing import Any

from diptych.engine.text.call_form import CallForm
from diptych.engine.text.tools import ToolCall, ToolCallParser


def parse_tool_calls(
    text: str,
    tool_format: CallForm,
    *,
    tool_names: Collection[str] | None = None,
    tools: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[str, tuple[ToolCall, ...]]:
    """(content, calls)."""
    parser = ToolCallParser(tool_format, tool_names=tool_names, tools=tools)
    deltas = [parser.push(text), parser.finish()]
    calls: dict[int, ToolCall] = {}
    for delta in (call for one in deltas for call in one.calls):
        known = calls.get(delta.index, ToolCall(id=delta.id or "", name=delta.name or "", arguments=""))
        calls[delta.index] = ToolCall(id=known.id, name=known.name, arguments=known.arguments + delta.arguments)
    return "".join(one.content for one in deltas), tuple(calls.values())
