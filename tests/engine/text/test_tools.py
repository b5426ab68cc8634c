"""Tool calls in text: found whatever the pieces, and nothing of the text is ever lost."""

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

H, L, M = ToolFormat.HERMES, ToolFormat.LLAMA3, ToolFormat.MISTRAL
GOOD = '{"name": "f", "arguments": {"a": 1}}'
CASES = [
    # (format, output, content (None: all of it), [(name, arguments to the letter)])
    (H, f"<tool_call>\n{GOOD}\n</tool_call>", "", [("f", '{"a": 1}')]),
    (H, f"Look. <tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call> Done", "Look.Done", [("f", '{"a": 1}')] * 2),
    (H, f"<tool_call>{GOOD}", "", [("f", '{"a": 1}')]),
    (H, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> \\" {"}}</tool_call>', "", [
        ("f", '{"a": "</tool_call> \\" {"}')]),
    (H, '<tool_call>{ "name" :"f",\n"arguments":  { "b":\n[ {} ] }, "id": "}" }</tool_call>', "", [("f", '{ "b":\n[ {} ] }')]),
    (H, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (H, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (H, '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>', "", [("f", '{"a": "é"}')]),
    (H, '<tool_call>{"name": "x\\u00e9 \\"", "arguments": {}}</tool_call>', "", [('xé "', "{}")]),
    # what a model breaks inside the arguments reaches the client as it is, as OpenAI's own stream would
    (H, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> x', "x", [("f", '{"a": }')]),
    (H, '<tool_call>{"name": "f", "arguments": {"a": x}}\n</tool_call>y', "y", [("f", '{"a": x}}\n')]),
    (H, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', "x", [("f", '{"a": 1}')]),
    (H, '<tool_call>{"name": "f", "arguments": {"a": "cut o', "", [("f", '{"a": "cut o')]),
    (H, f'<tool_call>{{"name": </tool_call><tool_call>{GOOD}</tool_call>', '<tool_call>{"name": </tool_call>', [
        ("f", '{"a": 1}')]),
    (H, '<tool_call>{"name": "f", "argu', None, []),
    (H, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
    (H, '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>', None, []),
    (H, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    (H, '<tool_call>["f"]</tool_call>', None, []),
    (H, "a < b, <tool or <tool_cal", None, []),
    (H, "no call at all\n", None, []),
    (H, "", "", []),
    (L, '{"name": "f", "parameters": {"a": "é"}}', "", [("f", '{"a": "é"}')]),
    (L, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (L, '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": [1]}}', "", [("f", "{}"), ("g", '{"x": [1]}')]),
    (L, '{"name": "f", "parameters": {}},\n{"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    (L, '<|python_tag|>{"name": "g", "parameters": {}}', "", [("g", "{}")]),
    (L, '{"name": "unknown", "parameters": {}}', None, []),
    (L, '{"answer": 42}', None, []),
    (L, '<|python_tag|>print("f")', None, []),
    (L, 'The call is {"name": "f", "parameters": {}}', None, []),
    (L, '{"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
    (L, "<|pyth", None, []),
    (L, '{"name": "f", "parameters": {}} Then', "Then", [("f", "{}")]),
    (M, f"[TOOL_CALLS][{GOOD}]", "", [("f", '{"a": 1}')]),
    (M, f'Well. [TOOL_CALLS] [{GOOD}, {{"name": "g", "arguments": {{}}, "id": "abcdef123"}}] x', "Well.x", [
        ("f", '{"a": 1}'), ("g", "{}")]),
    (M, f"[TOOL_CALLS]{GOOD}", "", [("f", '{"a": 1}')]),
    (M, f"[TOOL_CALLS][{GOOD}, 5]", ", 5]", [("f", '{"a": 1}')]),
    (M, "[TOOL_CALLS] none", None, []),
    (M, "[TOOL_CALLS][", None, []),
    (M, "a [TOOL", None, []),
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
                assert call.arguments == ""
                calls.append([call.name, ""])
            else:
                assert call.name is None
                assert call.arguments
            calls[call.index][1] += call.arguments
    return content, [tuple(call) for call in calls]


@pytest.mark.parametrize(("tool_format", "output", "content", "calls"), CASES)
def test_calls_and_content_whole_and_streamed(tool_format, output, content, calls):
    """The stream must tell the same story as the whole; `content` None: all of it, untouched."""
    expected = output if content is None else content
    got, found = parse_tool_calls(output, tool_format, tool_names=["f", "g"])
    assert got.replace(" ", "") == expected.replace(" ", "")
    assert [(call.name, call.arguments) for call in found] == calls
    assert len({call.id for call in found}) == len(found)
    if content is None:
        assert got == output
    for seed in range(25):
        assert streamed(tool_format, output, seed) == (got, calls), seed


@pytest.mark.parametrize(
    ("tool_format", "begin"),
    [
        (H, '<tool_call>\n{"name": "f", "arguments": '),
        (L, '{"name": "f", "parameters": '),
        (M, '[TOOL_CALLS][{"name":"f","arguments":'),
    ],
)
def test_arguments_come_out_while_they_are_written(tool_format, begin):
    """A client that shows a long argument, or writes it to a file, must not wait for its end."""
    parser = ToolCallParser(tool_format, tool_names=["f"])
    assert parser.push(begin).calls == ()
    arguments = '{"text": "a long {text} with \\"quotes\\"", "n": [1, 2]}'
    seen = []
    for char in arguments:
        deltas = parser.push(char).calls
        seen += [call.arguments for call in deltas if call.id is None]
    assert seen == list(arguments)


def test_plain_json_answer_streams_as_content_at_once():
    """In the Llama 3 format it looks like a call until its first key is read."""
    parser = ToolCallParser(L, tool_names=["f"])
    assert parser.push('{"ans').content == ""
    assert parser.push('wer": "a lo').content == '{"answer": "a lo'
    assert parser.push("ng text").content == "ng text"


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    ",",
    ";",
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


@given(st.sampled_from([H, L, M]), st.lists(st.sampled_from(PIECES), max_size=14), st.integers(0, 99))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_no_text_is_lost_and_cuts_do_not_matter(tool_format, pieces, seed):
    """Wreckage of calls in any order: without a call the content is the output, and streaming changes nothing."""
    output = "".join(pieces)
    content, calls = parse_tool_calls(output, tool_format, tool_names=["f", "g"])
    if not calls:
        assert content == output
    assert streamed(tool_format, output, seed) == (content, [(call.name, call.arguments) for call in calls])


def test_format_is_read_from_the_template():
    """A parser for another format would show calls as text."""
    assert tool_format_of_template(templates.CHATML) is H
    assert tool_format_of_template(templates.LLAMA3) is L
    assert tool_format_of_template(templates.ZEPHYR) is None
    assert tool_format_of_template("{{ '[TOOL_CALLS]' }}{{ tools }}") is M


def test_ids_are_those_the_models_own_template_takes():
    """Mistral's templates refuse any id that has not nine letters and digits."""
    (call,) = parse_tool_calls(f"[TOOL_CALLS][{GOOD}]", M)[1]
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_named_choice_must_exist():
    """Otherwise the grammar would be empty."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="the tools are: f"):
        tool_call_spec(tools, H, name="g")
    with pytest.raises(RequestError, match=r"tools\[0\] has no function name"):
        tool_call_spec([{"type": "function"}], H)
