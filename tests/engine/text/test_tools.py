"""Tool calls in text: found whatever the pieces, and nothing of the text is ever lost."""

import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.text.argument_values import json_types_of, json_value
from diptych.engine.text.call_form import HERMES, LFM2, LLAMA3, MISTRAL, MISTRAL_NAMED, NAME, CallForm, Style
from diptych.engine.text.forced_calls import tool_call_spec
from diptych.engine.text.tools import ToolCallParser
from diptych.ground.errors import RequestError
from text.whole_calls import parse_tool_calls

H, L, M, N = FORMS = HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED
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
    (N, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    (N, 'Well. [TOOL_CALLS]f[ARGS]{"a": {"b": "]}"}}[TOOL_CALLS]g-2.x[ARGS]{}\n', "Well.", [
        ("f", '{"a": {"b": "]}"}}'), ("g-2.x", "{}")]),
    (N, '[TOOL_CALLS] f [ARGS] {"a": "[TOOL_CALLS]g[ARGS]{}"} then, [TOOL_CALLS]g[ARGS]{"x":2}', "then,", [
        ("f", '{"a": "[TOOL_CALLS]g[ARGS]{}"}'), ("g", '{"x":2}')]),
    (N, '[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}[TOOL_CALLS]g[CALL_ID]ABCDEF123[ARGS]{}', "", [("f", "{}"), ("g", "{}")]),
    (N, '[TOOL_CALLS]f[ARGS]{"a": x}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": x}'), ("g", "{}")]),
    (N, '[TOOL_CALLS]f[ARGS]{"a": "cut o', "", [("f", '{"a": "cut o')]),
    (N, "[TOOL_CALLS]f[ARGS]{}]", "]", [("f", "{}")]),
    (N, "[TOOL_CALLS]f[ARGS]{}, x", ", x", [("f", "{}")]),
    (N, "[TOOL_CALLS]f[ARGS]{} [TOOL_CALLS]g[ARGS]", "[TOOL_CALLS]g[ARGS]", [("f", "{}")]),
    (N, "[TOOL_CALLS]f[CALL_ID]abc", None, []),
    (N, "[TOOL_CALLS]f[ARGS] 5", None, []),
    (N, "[TOOL_CALLS]f[CALL_ID][ARGS]{}", None, []),
    (N, "[TOOL_CALLS]f g[ARGS]{}", None, []),
    (N, "[TOOL_CALLS]" + 129 * "f" + "[ARGS]{}", None, []),
    (N, "[ARGS]{} [CALL_ID]", None, []),
    # either of Mistral's forms is read in place of the other, also within one answer
    (M, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    (N, f"[TOOL_CALLS][{GOOD}, {GOOD}]", "", [("f", '{"a": 1}')] * 2),
    (N, f"[TOOL_CALLS]g[ARGS]{{}}[TOOL_CALLS][{GOOD}] x", "x", [("g", "{}"), ("f", '{"a": 1}')]),
]  # fmt: skip


def random_pieces(output: str, seed: int) -> list[str]:
    cuts = random.Random(seed)
    pieces = []
    while output:
        n = cuts.randint(1, 9)
        pieces.append(output[:n])
        output = output[n:]
    return pieces


def streamed(tool_format: CallForm, pieces: list[str]):
    """(content, calls) read in these pieces; checks the shape of the deltas on the way."""
    parser = ToolCallParser(tool_format, tool_names=["f", "g"])
    content, calls = "", []
    deltas = [parser.push(piece) for piece in pieces]
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
        assert streamed(tool_format, random_pieces(output, seed)) == (got, calls), seed


@pytest.mark.parametrize(("tool_format", "output", "content", "calls"), CASES)
def test_every_cut_of_the_text_gives_the_same(tool_format, output, content, calls):
    """Tokens end anywhere, in the middle of a tag too: one cut, two cuts, and a cut behind every character."""
    got = parse_tool_calls(output, tool_format, tool_names=["f", "g"])[0]
    n_chars = len(output)
    pairs = itertools.combinations_with_replacement(range(n_chars + 1), 2)
    if tool_format is not N and n_chars > 40:
        pairs = ((at, at) for at in range(n_chars + 1))
    for first, second in pairs:
        pieces = [output[:first], output[first:second], output[second:]]
        assert streamed(tool_format, pieces) == (got, calls), pieces
    assert streamed(tool_format, list(output)) == (got, calls)


@pytest.mark.parametrize(
    ("tool_format", "begin"),
    [
        (H, '<tool_call>\n{"name": "f", "arguments": '),
        (L, '{"name": "f", "parameters": '),
        (M, '[TOOL_CALLS][{"name":"f","arguments":'),
        (N, "[TOOL_CALLS]f[ARGS]"),
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
    "[ARGS]",
    "f[CALL_ID]id",
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


@given(st.sampled_from(FORMS), st.lists(st.sampled_from(PIECES), max_size=14), st.integers(0, 99))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_no_text_is_lost_and_cuts_do_not_matter(tool_format, pieces, seed):
    """Wreckage of calls in any order: without a call the content is the output, and streaming changes nothing."""
    output = "".join(pieces)
    content, calls = parse_tool_calls(output, tool_format, tool_names=["f", "g"])
    if not calls:
        assert content == output
    assert streamed(tool_format, random_pieces(output, seed)) == (
        content,
        [(call.name, call.arguments) for call in calls],
    )


def test_ids_are_those_the_models_own_template_takes():
    """Mistral's templates refuse any id that has not nine letters and digits."""
    (call,) = parse_tool_calls(f"[TOOL_CALLS][{GOOD}]", M)[1]
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_the_models_own_ids_are_kept():
    """They stand in the next prompt, where another id would miss the prefix cache; the same twice would confuse a client."""
    calls = "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}"
    first, second = parse_tool_calls(calls + calls, N)[1]
    assert first.id == "abcdef123"
    assert second.id != first.id
    assert len(second.id) == 9


def test_named_choice_must_exist():
    """Otherwise the grammar would be empty."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="the tools are: f"):
        tool_call_spec(tools, H, name="g")
    with pytest.raises(RequestError, match=r"tools\[0\] has no function name"):
        tool_call_spec([{"type": "function"}], H)


class Counted:
    """A pattern that counts what it is given to read."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.n_chars = pattern, 0

    def match(self, text: str) -> re.Match[str] | None:
        self.n_chars += len(text)
        return self.pattern.match(text)


def test_a_long_text_before_the_name_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read anew with every piece: of 40,000 characters, seconds in which every stream stood still."""
    parser = ToolCallParser(HERMES, tool_names=["f"])
    head = Counted(parser._head)
    monkeypatch.setattr(parser, "_head", head)
    text = '<tool_call>{"x": "' + "9" * 4000 + '", "name": "f", "arguments": {"a": 1}}</tool_call>'
    calls = [call for i in range(0, len(text), 4) for call in parser.push(text[i : i + 4]).calls]
    assert "".join(call.arguments for call in calls) == '{"a": 1}'
    assert head.n_chars < 3 * len(text)


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_texts_within_quotes_end_at_the_quote_that_nothing_escapes(n: int) -> None:
    parser = ToolCallParser(LFM2, tool_names=["f"])
    text = r"""<|tool_call_start|>[f(a={"k": "x\\\"y\\", "l": 'it\'s'}, b=["\""])]"""
    calls = [call for i in range(0, len(text), n) for call in parser.push(text[i : i + n]).calls]
    arguments = "".join(call.arguments for call in calls)
    assert json.loads(arguments) == {"a": {"k": 'x\\"y\\', "l": "it's"}, "b": ['"']}


@pytest.mark.parametrize("sign", ["[", "{'a': "])
def test_arguments_nested_without_end_are_read_like_any_cut_off(sign: str) -> None:
    """A thousand brackets in a row, which a model writes when it is stuck, were a RecursionError and no answer."""
    parser = ToolCallParser(LFM2, tool_names=["f"])
    text = "<|tool_call_start|>[f(a=" + sign * 3000
    deltas = [*map(parser.push, [text[i : i + 7] for i in range(0, len(text), 7)]), parser.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    assert [call.name for call in calls if call.name] == ["f"]
    said = "".join(call.arguments for call in calls) + "".join(delta.content for delta in deltas)
    assert said.removeprefix("{").count(sign[0]) == 3000, "and nothing is lost"
    parser = ToolCallParser(LFM2, tool_names=["f"])
    calls = list(parser.push("<|tool_call_start|>[f(a=" + "[" * 40 + "1" + "]" * 40 + ")]").calls)
    assert calls[1].arguments == '{"a": ' + "[" * 40 + "1" + "]" * 40 + "}"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("a=[1}, b=2", {"a": [1], "b": 2}),
        ("a=[1", {"a": [1]}),
        ("a={'b': [1}", {"a": {"b": [1]}}),
        ("a=[[1)", {"a": [[1]]}),
    ],
)
def test_a_list_closed_by_another_sign_ends(written: str, arguments: dict) -> None:
    """It was read on and on at that sign, and held the server for ever."""
    parser = ToolCallParser(LFM2, tool_names=["f"])
    calls = parser.push(f"<|tool_call_start|>[f({written})]<|tool_call_end|>").calls
    assert json.loads(calls[1].arguments) == arguments


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    r"""A model may write "\ud83d" alone; as a character it is no text that can be sent."""
    whole = ToolCallParser(HERMES, tool_names=["f"])
    calls = whole.push('<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>').calls
    assert calls[1].arguments == '{"a": "\\ud83d"}'
    literal = ToolCallParser(LFM2, tool_names=["f"])
    assert literal.push('<|tool_call_start|>[f(a="\\ud83d")]').calls[1].arguments == '{"a": "\\ud83d"}'
    for order in ('"name": "f\\ud83d", "arguments": {}', '"arguments": {}, "name": "f\\ud83d"'):
        named = ToolCallParser(HERMES)
        text = f"<tool_call>{{{order}}}</tool_call>"
        assert (named.push(text).content + named.finish().content, named.n_calls) == (text, 0)


def test_a_number_that_json_has_not_is_text() -> None:
    assert [json_value(text, None) for text in ("1e999", "[-1e999]", "NaN")] == ['"1e999"', '"[-1e999]"', '"NaN"']
    whole = ToolCallParser(HERMES)
    text = '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>'
    assert whole.push(text).content + whole.finish().content == text


def test_a_long_word_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_chars = 0
    compiled = re.compile

    class Searched:
        def __init__(self, pattern: str) -> None:
            self.pattern = compiled(pattern)

        def search(self, text: str, at: int = 0) -> re.Match[str] | None:
            nonlocal n_chars
            n_chars += len(text) - at
            return self.pattern.search(text, at)

    parser = ToolCallParser(LFM2, tool_names=["f"])
    monkeypatch.setattr("diptych.engine.text.argument_readers.re.compile", Searched)
    text = "<|tool_call_start|>[f(a=" + "9x" * 2000 + ")]"
    for i in range(0, len(text), 4):
        parser.push(text[i : i + 4])
    assert n_chars < 3 * len(text)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"one\ntwo\\n"', "one\ntwo\n"),
        ("{'k': 'one\r\ntwo'}", {"k": "one\r\ntwo"}),
        (r'"C:\x"', r"C:\x"),
        (r'"a\d"', r"a\d"),
    ],
)
def test_quotes_around_lines_and_odd_escapes_are_no_part_of_a_value(written: str, value: object) -> None:
    """Neither JSON nor Python has a string over several lines, and its quotes became part of the text."""
    parser = ToolCallParser(LFM2, tool_names=["f"])
    calls = parser.push(f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>").calls
    assert json.loads(calls[1].arguments) == {"a": value}


SIZE = {"type": "string", "enum": ["1", "2"]}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#/$defs/Size"}}, "$defs": {"Size": SIZE}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/a%20b~1"}, {"type": "null"}]}}, "$defs": {"a b/": SIZE}},
        {"properties": {"a": {"allOf": [{"$ref": "#/definitions/Size"}], "default": "1"}}, "definitions": {"Size": SIZE}},
        {"properties": {"size": SIZE, "a": {"$ref": "#/properties/size"}}},
        {"$ref": "#/definitions/Call", "definitions": {"Call": {"properties": {"a": SIZE}}}},
        {"allOf": [{"properties": {"a": SIZE}}]},
        {"additionalProperties": SIZE},
        {"properties": {"a": {"$ref": "#/$defs/x0"}}, "$defs": {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{min(i + 1, 9)}"}] * 2}
         for i in range(9)} | {"x9": SIZE}},
    ],
)  # fmt: skip
def test_types_are_those_that_a_schema_refers_to(parameters: dict) -> None:
    """pydantic and zod refer to what they name or use twice: the text 1 came as a number, which the tool then refused."""
    text = "<function=f><parameter=a>1</parameter></function>"
    form = CallForm(
        style=Style.TAGGED, head=f"<function={NAME}>", key_open="<parameter=", key_close=">", value_close="</parameter>",
        close="</function>",
    )  # fmt: skip
    parser = ToolCallParser(form, tools={"f": parameters})
    calls = [call for delta in (parser.push(text), parser.finish()) for call in delta.calls]
    assert "".join(call.arguments for call in calls) == '{"a": "1"}'


@pytest.mark.parametrize(
    "link", [{"$ref": "#/$defs/x1"}, {"anyOf": [{"$ref": "#/$defs/x1"}]}, {"$ref": "#/properties/a"}]
)
def test_references_without_end_say_no_type(link: dict) -> None:
    """Such a schema is nobody's but an attacker's; its answer is read all the same."""
    chain = {f"x{i}": json.loads(json.dumps(link).replace("x1", f"x{i + 1}")) for i in range(3000)}
    assert json_types_of(link, {"properties": {"a": link}, "$defs": chain}) is None
