"""Tool calls in text: found whatever the pieces, and nothing of the text is ever lost."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.text.tools import (
    ToolCallParser,
    ToolFormat,
    parse_tool_calls,
    tool_call_spec,
    tool_format_of_template,
)
from diptych.ground.errors import RequestError
from text import templates

H, L = ToolFormat.HERMES, ToolFormat.LLAMA3
GOOD = '{"name": "f", "arguments": {"a": 1}}'
CASES = [
    # (format, output, content, [(name, arguments)])
    (H, f"<tool_call>\n{GOOD}\n</tool_call>", "", [("f", {"a": 1})]),
    (H, f"Look. <tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call> Done", "Look.Done", [("f", {"a": 1})] * 2),
    (H, f"<tool_call>{GOOD}", "", [("f", {"a": 1})]),
    (H, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> \\" {"}}</tool_call>', "", [
        ("f", {"a": '</tool_call> " {'})]),
    (H, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (H, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (H, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> x', None, []),
    (H, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', None, []),
    (H, f'<tool_call>{{"name": </tool_call><tool_call>{GOOD}</tool_call>', '<tool_call>{"name": </tool_call>', [
        ("f", {"a": 1})]),
    (H, '<tool_call>{"name": "f", "argu', None, []),
    (H, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
    (H, '<tool_call>["f"]</tool_call>', None, []),
    (H, "a < b, <tool or <tool_cal", None, []),
    (H, "no call at all\n", None, []),
    (H, "", "", []),
    (L, '{"name": "f", "parameters": {"a": "é"}}', "", [("f", {"a": "é"})]),
    (L, '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1]}}', "", [("f", {}), ("g", {"x": [1]})]),
    (L, '<|python_tag|>{"name": "g", "parameters": {}}', "", [("g", {})]),
    (L, '{"name": "unknown", "parameters": {}}', None, []),
    (L, '{"answer": 42}', None, []),
    (L, '<|python_tag|>print("f")', None, []),
    (L, 'The call is {"name": "f", "parameters": {}}', None, []),
    (L, '{"name": "f", "parameters": {"a": ', None, []),
    (L, "<|pyth", None, []),
    (L, '{"name": "f", "parameters": {}} Then', "Then", [("f", {})]),
]  # fmt: skip


def streamed(tool_format: ToolFormat, output: str, seed: int):
    """(content, calls) read in pieces of random size; checks the shape of the deltas on the way."""
    cuts = random.Random(seed)
    parser = ToolCallParser(tool_format, tool_names=["f", "g"])
    content, calls = "", []
    rest, deltas = output, []
    while rest:
        n = cuts.randint(1, 9)
        deltas.append(parser.push(rest[:n]))
        rest = rest[n:]
    for delta in [*deltas, parser.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            else:
                assert call.name is None
            calls[call.index][1] += call.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("tool_format", "output", "content", "calls"), CASES)
def test_calls_and_content_whole_and_streamed(tool_format, output, content, calls):
    """The stream must tell the same story as the whole; `content` None: all of it, untouched."""
    expected = output if content is None else content
    got, found = parse_tool_calls(output, tool_format, tool_names=["f", "g"])
    assert got.replace(" ", "") == expected.replace(" ", "")
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert len({call.id for call in found}) == len(found)
    if content is None:
        assert got == output
    for seed in range(25):
        assert streamed(tool_format, output, seed) == (got, calls), seed


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"',
    "\\",
    '"name": "f"',
    ", ",
    '"arguments": {}',
    GOOD,
    " ",
    "x",
    "[",
    "]",
]


@given(st.sampled_from([H, L]), st.lists(st.sampled_from(PIECES), max_size=14), st.integers(0, 99))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_no_text_is_lost_and_cuts_do_not_matter(tool_format, pieces, seed):
    """Wreckage of calls in any order: without a call the content is the output, and streaming changes nothing."""
    output = "".join(pieces)
    content, calls = parse_tool_calls(output, tool_format, tool_names=["f", "g"])
    if not calls:
        assert content == output
    assert streamed(tool_format, output, seed) == (content, [(call.name, json.loads(call.arguments)) for call in calls])


def test_format_is_read_from_the_template():
    """A parser for another format would show calls as text."""
    assert tool_format_of_template(templates.CHATML) is H
    assert tool_format_of_template(templates.LLAMA3) is L
    assert tool_format_of_template(templates.ZEPHYR) is None


def test_named_choice_must_exist():
    """Otherwise the grammar would be empty."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="the tools are: f"):
        tool_call_spec(tools, H, name="g")
    with pytest.raises(RequestError, match=r"tools\[0\] has no function name"):
        tool_call_spec([{"type": "function"}], H)
