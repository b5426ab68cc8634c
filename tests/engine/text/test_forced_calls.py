"""tool_choice required or named: whatever the model prefers, the output is calls that the parser finds."""

import json
import re
from dataclasses import replace
from functools import cache

import jsonschema_rs
import numpy as np
import pytest
import tokenizers

from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.text.call_form import (
    HERMES,
    KIND,
    LFM2,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    NAME,
    CallForm,
    Style,
)
from diptych.engine.text.forced_calls import calls_or_json_spec, strict_calls_spec, tool_call_spec
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import GrammarError
from diptych.ground.request import StructuredSpec
from text.small_tokenizers import byte_level_json
from text.whole_calls import parse_tool_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
FORMS = [HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED]
EOS = (0, 2)
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


@cache
def with_tags(kind: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_json())
    tags = [tokenizers.AddedToken(tag, special=kind == "special", normalized=False) for tag in TAGS]
    if kind == "special":
        tokenizer.add_special_tokens(tags)
    elif kind == "added":
        tokenizer.add_tokens(tags)
    return tokenizer


@cache
def ready(kind: str) -> tuple[Tokenizer, GrammarCompiler]:
    """Of `with_tags`, once: a compiler takes longer to read a vocabulary than to compile what these tests ask of it."""
    tokenizer = Tokenizer(with_tags(kind), {}, EOS)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size)


def write(kind: str, spec, *, seed: int) -> str:
    """Random draws under the grammar, as a client sees them: special tokens that mark no call are hidden."""
    tokenizer, compiler = ready(kind)
    state = compiler.compile(spec).begin()
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(300):
        token_id = int(rng.choice(np.flatnonzero(state.allowed())))
        if token_id in EOS:
            break
        ids.append(token_id)
        state.advance(token_id)
        if state.is_complete:
            break
    return tokenizer.decode(ids)


@pytest.mark.parametrize("tool_format", FORMS)
@pytest.mark.parametrize("name", [None, "time"])
@pytest.mark.parametrize("kind", ["letters", "added", "special"])
def test_forced_output_is_always_a_call(tool_format, name, kind):
    """required and named must never give prose; tags that are tokens of their own are written as such."""
    tokenizer = with_tags(kind)
    tag_ids = {} if kind == "letters" else {tag: tokenizer.token_to_id(tag) for tag in TAGS}
    spec = tool_call_spec(TOOLS, tool_format, name=name, tag_ids=tag_ids)
    names = set()
    for seed in range(8):
        output = write(kind, spec, seed=seed)
        content, calls = parse_tool_calls(output, tool_format, tool_names=["weather", "time"])
        assert calls, output
        assert not content.strip(), output
        for call in calls:
            names.add(call.name)
            assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert names == ({"weather", "time"} if name is None else {name})


@pytest.mark.parametrize("tool_format", FORMS)
def test_one_call_only_when_parallel_calls_are_off(tool_format):
    """parallel_tool_calls: false."""
    spec = tool_call_spec(TOOLS, tool_format, is_parallel=False)
    for seed in range(6):
        assert len(parse_tool_calls(write("letters", spec, seed=seed), tool_format)[1]) == 1


@pytest.mark.parametrize("tool_format", FORMS)
def test_references_within_a_tools_schema_are_followed(tool_format):
    """Clients that make schemas from classes put nested ones under `$defs`; a forced call used to be refused for that."""
    city = {"properties": {"c": {"$ref": "#/$defs/City"}}, "required": ["c"], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**city, "$defs": {"City": {"const": name * 2}}}}}
        for name in ("f", "g")
    ]
    spec = tool_call_spec(tools, tool_format)
    for seed in range(4):
        calls = parse_tool_calls(write("letters", spec, seed=seed), tool_format)[1]
        assert calls
        for call in calls:
            assert json.loads(call.arguments) == {"c": call.name * 2}


STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS[:1]] + TOOLS[1:]


@pytest.mark.parametrize(
    ("tool_format", "kind"), [(HERMES, "added"), (HERMES, "special"), (MISTRAL, "special"), (MISTRAL_NAMED, "special")]
)
def test_strict_calls_fit_from_their_tag_on_and_text_is_free(tool_format, kind):
    """`strict` under tool_choice auto had no effect: a model could break the schema that it was promised to keep."""
    tokenizer = with_tags(kind)
    own, compiler = ready(kind)
    tag_ids = own.tags_in(tool_format.literals)
    spec = strict_calls_spec(STRICT, tool_format, tag_ids=tag_ids)
    assert spec is not None
    begin = tag_ids[tool_format.trigger]
    for seed, text in enumerate(("", "Let me look.\n", "{ [ < tool")):
        state = compiler.compile(spec).begin()
        ids = tokenizer.encode(text).ids
        for token_id in ids:
            assert state.allowed()[token_id], "text is free"
            state.advance(token_id)
        assert state.is_accepting, "it may end without a call"
        assert not any(state.allowed()[i] for tag, i in tag_ids.items() if i != begin), "no tag but the one of a call"
        rng = np.random.default_rng(seed)
        token_id = begin
        while token_id not in EOS:
            ids.append(token_id)
            state.advance(token_id)
            if state.is_complete or len(ids) > 300:
                break
            token_id = int(rng.choice(np.flatnonzero(state.allowed())))
        content, calls = parse_tool_calls(own.decode(ids), tool_format, tool_names=["weather", "time"])
        assert content.strip() == text.strip()
        assert calls
        for call in calls:
            assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


SUM = {"type": "object", "properties": {"sum": {"enum": [7, 12]}}, "required": ["sum"]}
AS_JSON = StructuredSpec(kind="json_schema", source=json.dumps(SUM))


@pytest.mark.parametrize("tool_format", FORMS)
@pytest.mark.parametrize("kind", ["letters", "special"])
def test_where_the_answer_must_be_json_a_model_may_still_call(tool_format, kind):
    """It could not: the schema of the answer held from the first token on, so an agent with both never used its tools."""
    tokenizer = with_tags(kind)
    tag_ids = Tokenizer(tokenizer, {}, EOS).tags_in(tool_format.literals)
    spec = calls_or_json_spec(TOOLS, tool_format, AS_JSON, tag_ids=tag_ids)
    seen = set()
    for seed in range(24):
        content, calls = parse_tool_calls(write(kind, spec, seed=seed), tool_format, tool_names=["weather", "time"])
        seen.add("calls" if calls else "answer")
        if calls:
            assert not content.strip()
            assert {json.loads(call.arguments)["city"] for call in calls} <= {"Paris", "Rome"}
        else:
            assert json.loads(content)["sum"] in (7, 12)
    assert seen == {"calls", "answer"}


def test_what_is_neither_json_nor_a_call_is_not_written():
    own, compiler = ready("special")
    any_object = StructuredSpec(kind="json_object", source="")
    state = compiler.compile(
        calls_or_json_spec(TOOLS, HERMES, any_object, tag_ids=own.tags_in(HERMES.literals))
    ).begin()
    begins = {own.token(int(token_id)) for token_id in np.flatnonzero(state.allowed())}
    assert {"{", "<tool_call>"} <= begins
    assert all(
        re.match(r"\s*(\{|<tool_call>|$)", own.token_bytes(int(i)).decode()) for i in np.flatnonzero(state.allowed())
    )
    for token_id in own.encode('{"a": [1, "b"]}'):
        assert state.allowed()[token_id]
        state.advance(token_id)
    assert state.is_accepting


def test_tools_beside_an_answer_of_json_are_held_as_far_as_they_can_be():
    """One whose schema no grammar holds was offered beside such an answer before, and still is; a strict one is refused."""
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "array", "uniqueItems": True}}}
    assert calls_or_json_spec([TOOLS[0], odd], HERMES, AS_JSON, tag_ids={}).looser is not None
    strict = {**odd, "function": {**odd["function"], "strict": True}}
    with pytest.raises(GrammarError):
        calls_or_json_spec([TOOLS[0], strict], HERMES, AS_JSON, tag_ids={})
    with pytest.raises(GrammarError, match="json_schema is not JSON"):
        calls_or_json_spec(TOOLS, HERMES, StructuredSpec(kind="json_schema", source="{"), tag_ids={})


def test_strict_calls_need_a_token_that_begins_them():
    """Where a call begins with plain text, nobody can tell a text about calls from one."""
    assert strict_calls_spec(STRICT, LLAMA3, tag_ids={}) is None
    assert strict_calls_spec(STRICT, HERMES, tag_ids={}) is None


def test_a_loose_tool_beside_a_strict_one_may_have_any_schema():
    """It was offered before with a schema that no grammar holds, and must not be refused for its neighbour."""
    loose = {"type": "function", "function": {"name": "odd", "parameters": {"type": "array", "uniqueItems": True}}}
    tag_ids = {"<tool_call>": 5, "</tool_call>": 6}
    assert strict_calls_spec([STRICT[0], loose], HERMES, tag_ids=tag_ids) is not None
    with pytest.raises(GrammarError):
        strict_calls_spec([{**loose, "function": {**loose["function"], "strict": True}}], HERMES, tag_ids=tag_ids)


TAGGED = CallForm(
    style=Style.TAGGED,
    head=f"<tool_call>\n<function={NAME}>\n",
    close="</function>\n</tool_call>",
    key_open="<parameter=",
    key_close=">\n",
    value_close="\n</parameter>\n",
)
GEMMA = CallForm(style=Style.LITERAL, head=f"call:{NAME}{{", close="}", quote='<|"|>', assign=":")


@pytest.mark.parametrize("form", [HERMES, TAGGED, LFM2, GEMMA], ids=["hermes", "tagged", "lfm2", "gemma"])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"properties": ["a"]}, "properties is a list"),
        ({"properties": {"a": 7}}, "7 stands where a schema must be"),
        ({"properties": {"a": {"type": "object", "properties": 5}}}, "properties is a int"),
        ({"properties": {"a": {"type": "string"}}, "required": True}, "required is True"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum is 5"),
        ({"properties": {"a": {"type": "string", "minLength": "x"}}}, "minLength is 'x'"),
    ],
)
def test_parameters_that_are_no_schema_are_refused_by_the_tools_name(form, part, words) -> None:
    """In forms that take them apart they were a TypeError, and so an error of the server."""
    with pytest.raises(GrammarError, match=f"parameters of tool 'f': {words}"):
        tool_call_spec([{"type": "function", "function": {"name": "f", "parameters": part}}], form)


@pytest.mark.parametrize("form", [HERMES, TAGGED, LFM2, GEMMA], ids=["hermes", "tagged", "lfm2", "gemma"])
def test_a_property_may_be_any_value_or_none(form) -> None:
    """`true` and `false` are schemas."""
    parameters = {"properties": {"a": True, "b": False, "c": {"type": "array", "items": True}}, "required": ["c"]}
    _, compiler = ready("letters")
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    compiler.compile(tool_call_spec([tool], form))


@pytest.mark.parametrize("form", [TAGGED, GEMMA], ids=["tagged", "gemma"])
@pytest.mark.parametrize("tags", ["letters", "added"])
def test_a_text_has_its_pattern_and_its_length(form, tags) -> None:
    """Beside a pattern the length was forgotten."""
    parameters = {
        "properties": {"a": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}},
        "required": ["a"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    own = Tokenizer(with_tags(tags), {}, EOS)
    spec = tool_call_spec([tool], form, is_parallel=False, tag_ids=own.tags_in(form.literals))
    for seed in range(4):
        ((_, arguments),) = [
            (one.name, json.loads(one.arguments)) for one in parse_tool_calls(write(tags, spec, seed=seed), form)[1]
        ]
        assert re.fullmatch("[a-z]{2,3}", arguments["a"])


KINDS = {"string": "true"} | dict.fromkeys(("integer", "number", "boolean", "object", "array"), "false")
TYPED = replace(TAGGED, key_open="<p name=", key_close=f" string={KIND}>", value_close="</p>\n", kinds=KINDS)
TEXT = {"type": "string", "maxLength": 5}
PARAMETERS = [
    {"properties": {"a": {"$ref": "#/$defs/P"}}, "required": ["a"],
     "$defs": {"P": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}},
    {"properties": {"a": {"$ref": "#/$defs/P"}}, "required": ["a"], "$defs": {"P": {"type": "string", "enum": ["1", "null"]}}},
    # zod refers to where a schema stood first, and names the whole
    {"properties": {"a": {"properties": {"x": TEXT}, "required": ["x"]}, "b": {"$ref": "#/properties/a"},
                    "c": {"$ref": "#/properties/a/properties/x"}}, "required": ["a", "b", "c"]},
    {"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
    {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": TEXT}, "required": ["b"]}],
     "$defs": {"A": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
    {"properties": {"a": {"type": "integer"}, "b": TEXT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"properties": {"k": {"const": "a"}, "x": TEXT}, "required": ["k", "x"]},
               {"properties": {"k": {"const": "b"}}, "required": ["k"]}]},
    {"properties": {"a": TEXT, "b": TEXT}, "minProperties": 1},
    {"properties": {"a": TEXT}, "required": ["z"], "additionalProperties": {"type": "integer"}},
    {"additionalProperties": {"type": "integer"}, "required": ["k"]},
    {"properties": {"a": {"anyOf": [TEXT, {"type": "null"}]}}, "required": ["a"]},
    {"properties": {"a": {"type": ["string", "integer"], "maxLength": 5}}, "required": ["a"]},
    {"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 4}]}}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "anyOf": [{"const": "x"}, {"pattern": "^[yz]$"}]}}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "pattern": r"^[0-9]{2}\$", "maxLength": 6}}, "required": ["a"]},
    {"properties": {"a": {"type": "string", "pattern": r"^a\/[b/]$|^(c|[|)])$"}}, "required": ["a"]},
    *({"properties": {"a": {"type": "string", "format": one, "maxLength": 40}}, "required": ["a"]}
      for one in ("date", "uuid", "ipv4", "ipv6", "duration", "uri")),
]  # fmt: skip


@pytest.mark.parametrize("form", [TAGGED, TYPED, LFM2, GEMMA], ids=["tagged", "typed", "lfm2", "gemma"])
def test_arguments_written_one_by_one_satisfy_the_schema(form) -> None:
    """Only its own list of properties was read: references were refused, and what stood beside the list was forgotten."""
    for number, parameters in enumerate(PARAMETERS):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        spec = tool_call_spec([tool], form, is_parallel=False)
        schema = jsonschema_rs.validator_for({"type": "object", **parameters}, validate_formats=True)
        for seed in range(2):
            output = write("letters", spec, seed=seed)
            ((_, arguments),) = [
                (one.name, json.loads(one.arguments))
                for one in parse_tool_calls(output, form, tools={"f": parameters})[1]
            ]
            assert schema.is_valid(arguments), (number, output, arguments)


@pytest.mark.parametrize("form", [TAGGED, GEMMA], ids=["tagged", "gemma"])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"properties": {"a": {"type": "string", "$ref": "#/$defs/x"}}}, "'#/\\$defs/x', which points to no schema"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}}, "leads back to itself"),
        ({"allOf": [{"anyOf": [{"required": [str(i)]} for i in range(20)]}] * 3}, "has very many alternatives"),
        ({"allOf": [{"properties": {"a": {}}, "required": 5}]}, "required is 5"),
        ({"oneOf": [{"const": i} for i in range(3000)]}, "has very many alternatives"),
        ({"allOf": [{"anyOf": [{"enum": [i, i + 1]} for i in range(200)]}] * 9}, "has very many alternatives"),
        (
            {
                "properties": {"a": {"type": "string", "$ref": "#/$defs/x0"}},
                "$defs": {f"x{i}": {"allOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(500)} | {"x500": {}},
            },
            "leads over more than 32 others",
        ),
        (
            {
                "properties": {f"a{i}": {"$ref": "#/$defs/x"} for i in range(400)},
                "$defs": {"x": {"properties": {f"p{i}": {"minimum": i} for i in range(400)}}},
            },
            "tools make a grammar of more than",
        ),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf has parts that may hold together"),
        ({"properties": {"a": {}}, "not": {"required": ["a"]}}, "not cannot be held"),
        ({"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "no object satisfies it"),
    ],
)
def test_what_arguments_written_one_by_one_cannot_hold_is_refused(form, part, words) -> None:
    """And nothing is looked at again and again."""
    with pytest.raises(GrammarError, match=f"parameters of tool 'f': .*{words}"):
        tool_call_spec([{"type": "function", "function": {"name": "f", "parameters": part}}], form)


@pytest.mark.parametrize("form", [TAGGED, GEMMA], ids=["tagged", "gemma"])
def test_required_of_a_value_itself_says_nothing(form) -> None:
    """As older schemas have it; these forms read the schema of a value apart."""
    for part in ({"required": True}, {"properties": {"a": {"type": "string", "required": True}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": part}}
        assert tool_call_spec([tool], form).source


def test_words_to_people_take_no_room_in_a_grammar() -> None:
    """Forty tools with descriptions were a grammar above its bound, and refused."""
    text = {"type": "string", "description": "word " * 200}
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": {"properties": {"description": text, "b": text}}},
        }
        for i in range(40)
    ]
    source = tool_call_spec(tools, HERMES).source
    assert len(source) < 16_384
    assert '"description":{"type":"string"}' in source


@pytest.mark.parametrize("form", [HERMES, TAGGED], ids=["hermes", "tagged"])
@pytest.mark.parametrize(
    "odd",
    [{"type": "string", "pattern": "(?=.*[A-Z])x"}, {"type": "object", "propertyNames": {"pattern": "x"}},
     {"not": {"type": "null"}}, {"type": "array", "uniqueItems": True}],
)  # fmt: skip
def test_a_loose_tool_whose_schema_no_compiler_takes_may_still_be_called(form, odd) -> None:
    """It had the whole request refused, strict tools and all; or could be called with no arguments at all."""
    loose = {
        "type": "function",
        "function": {"name": "odd", "parameters": {"properties": {"q": odd}, "required": ["q"]}},
    }
    own, compiler = ready("added")
    spec = strict_calls_spec([STRICT[0], loose], form, tag_ids=own.tags_in(form.literals))
    assert spec is not None
    arguments = '{"q": ["x"]}' if form is HERMES else '<parameter=q>\n["x"]\n</parameter>\n'
    for call in (
        f"{form.head}{arguments}{form.close}".replace(NAME, "odd"),
        f"{form.head}{arguments}{form.close}".replace(NAME, "weather"),
    ):
        state = compiler.compile(spec).begin()
        ids = own.encode(call, add_special_tokens=False)
        n_taken = next((i for i, token_id in enumerate(ids) if not _takes(state, token_id)), len(ids))
        assert (n_taken == len(ids)) == ("odd" in call), own.decode(ids[: n_taken + 1])


def _takes(state, token_id: int) -> bool:
    """Whether the token may come next, as it does then."""
    if token_id != state.forced_token_id and not state.admits(token_id):
        return False
    state.advance(token_id)
    return True


@pytest.mark.parametrize("form", [HERMES, TAGGED, GEMMA], ids=["hermes", "tagged", "gemma"])
def test_as_many_tools_as_a_request_may_have_make_a_grammar(form) -> None:
    """What they had in common stood there for each of them, so that fifty were refused."""
    parameters = {
        "properties": {f"{kind}{i}": {"type": kind} for kind in ("string", "integer", "object") for i in range(4)},
        "required": ["string0"],
    }
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(128)]
    _, compiler = ready("letters")
    compiler.compile(tool_call_spec(tools, form))
