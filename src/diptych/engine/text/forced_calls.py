"""The grammar that holds an output to calls, in the form that the model's template teaches (`call_form`).

Literals of the form are written to the letter, those of their tags that are tokens of their own as such; arguments follow the
schema of their tool: as JSON, between tags, or in the signs of the form's language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diptych.compute.sampling.json_schema import MAX_SCHEMA_BYTES, PATTERNS, holdable
from diptych.compute.sampling.schema_parts import Alternatives, check_keywords, rooted
from diptych.compute.sampling.structured import json_form
from diptych.engine.text.argument_values import json_types_of
from diptych.engine.text.call_form import COUNT, HOLES, ID, KEY, KIND, NAME, CallForm, Style
from diptych.ground.errors import GrammarError, RequestError
from diptych.ground.request import StructuredSpec

_BLANKS = r"[ \n\t]{0,8}"  # a model that likes blanks must not write them for ever
_HOLE_RULES = {ID: "/[a-zA-Z0-9]{9}/", COUNT: "/[0-9]{1,2}/"}
_SCALARS = {"integer": r"-?(0|[1-9][0-9]{0,17})", "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?"}
_MAX_DEPTH = 8
_MOST_WRITTEN = 1 << 20  # 200 ms
_FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_-]{0,63}/"  # of an argument that no schema names
# all that a value's schema may say where it is not written as JSON
_PLAIN = {
    "integer": {"type"}, "number": {"type"}, "boolean": {"type"}, "array": {"type", "items"},
    "object": {"type", "properties", "required", "additionalProperties"},
}  # fmt: skip
_UNHELD = {"not", "if", "dependentRequired", "dependentSchemas", "propertyNames", "maxProperties"}


def tool_call_spec(
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    *,
    name: str | None = None,
    is_parallel: bool = True,
    tag_ids: Mapping[str, int] | None = None,
    stops: frozenset[str] = frozenset(),
) -> StructuredSpec:
    """The grammar for tool_choice "required" (name None) or a named function.

    tools: OpenAI tool objects. is_parallel: several calls may follow each other. tag_ids: tags that are tokens of their own.
    stops: tags that end an output, and so are not part of one. Objects are closed (`compute.sampling.json_schema`).
    Raises RequestError for an unknown name, GrammarError for parameters that no grammar can hold.
    """
    functions = [_function(tool, i) for i, tool in enumerate(tools)]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
    if not functions:
        known = ", ".join(str(_function(tool, i)["name"]) for i, tool in enumerate(tools)) or "none"
        raise RequestError(f"tool_choice names {name!r}; the tools are: {known}", param="tool_choice")
    is_several = is_parallel and name is None and not form.is_single
    form = _until_stop(form, stops, is_several=is_several)
    grammar = _Grammar(form, dict(tag_ids or {}))
    calls = [grammar.call(function) for function in functions]
    separator = grammar.literal(form.separator)
    begin = form.begin.lstrip()  # templates print blanks before it that belong to an empty text
    more = f" ({separator} call)*" if is_several else ""
    lines = [f"start: LEAD {grammar.literal(begin)} call{more} {grammar.literal(form.end)} TRAIL"]
    lines.append("call: " + " | ".join(calls))
    lines += [*grammar.lines, r"LEAD: /\n{0,2}/", r"TRAIL: /\n?/"]
    return StructuredSpec(kind="grammar", source="\n".join(lines))


def _until_stop(form: CallForm, stops: frozenset[str], *, is_several: bool) -> CallForm:
    """The form without the tags that end an output, and what templates print behind them."""
    if not stops:
        return form
    pattern = "|".join(map(re.escape, sorted(stops)))
    close = form.close if is_several else re.split(pattern, form.close)[0]
    return replace(form, close=close, end=re.split(pattern, form.end)[0] if close == form.close else "")


def strict_calls_spec(
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    *,
    is_parallel: bool = True,
    tag_ids: Mapping[str, int],
    stops: frozenset[str] = frozenset(),
) -> StructuredSpec | None:
    """The grammar for tool_choice "auto" where a tool is `strict`: text as the model likes, and calls that fit from the tag
    on that begins them. None where no token of its own begins a call, so that text cannot be told from one.

    A tool that is not strict, and whose schema no grammar holds, is held to JSON alone; all that are not strict, where the
    compiler finds that out.
    """
    if form.trigger not in tag_ids:
        return None

    def source(tools: Sequence[Mapping[str, Any]]) -> str:
        forced = tool_call_spec(tools, form, is_parallel=is_parallel, tag_ids=tag_ids, stops=stops)
        start, rest = forced.source.split("\n", 1)
        calls = start.removeprefix("start: LEAD ")
        # text spells no tag: the token that begins a call is where the grammar of calls begins
        return f"start: TEXT ({calls})?\n{rest}\nTEXT: /(?s:.*)/"

    return _of_held_tools(tools, form, source)


def calls_or_json_spec(
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    answer: StructuredSpec,
    *,
    is_parallel: bool = True,
    tag_ids: Mapping[str, int],
    stops: frozenset[str] = frozenset(),
) -> StructuredSpec:
    """The grammar for tool_choice "auto" where the answer must be JSON: that, or calls, which hold to their tools as with
    `strict_calls_spec`. answer: a json_schema or a json_object. Raises GrammarError where it cannot be held.
    """
    schema = _json_rule(json_form(answer))

    def source(tools: Sequence[Mapping[str, Any]]) -> str:
        forced = tool_call_spec(tools, form, is_parallel=is_parallel, tag_ids=tag_ids, stops=stops)
        start, rest = forced.source.split("\n", 1)
        return f"{start} | answer\nanswer: {schema}\n{rest}"

    return _of_held_tools(tools, form, source)


def _of_held_tools(
    tools: Sequence[Mapping[str, Any]], form: CallForm, source: Callable[[Sequence[Mapping[str, Any]]], str]
) -> StructuredSpec:
    """The grammar that `source` writes of tools, with each held to its schema where that is promised, or can be done."""
    loosened = [tool if _is_strict(tool) else _loosened(tool) for tool in tools]
    trial = _Grammar(form, {})  # one for all, as its bounds are those of all together
    pairs = zip(tools, loosened, strict=True)
    held = [tool if _is_strict(tool) or _is_writable(tool, trial) else loose for tool, loose in pairs]
    if held == loosened:
        return StructuredSpec(kind="grammar", source=source(held))
    try:
        return StructuredSpec(kind="grammar", source=source(held), looser=source(loosened))
    except GrammarError:  # all together they are too much
        return StructuredSpec(kind="grammar", source=source(loosened))


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, Mapping) and function.get("strict") is True


def _is_writable(tool: Mapping[str, Any], grammar: _Grammar) -> bool:
    """Whether a grammar can be written of its schema; the compiler may refuse that still."""
    try:
        grammar.call(tool.get("function", tool))
    except GrammarError:
        return False
    return True


def _loosened(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "function",
        "function": {**tool.get("function", tool), "parameters": {"additionalProperties": True}},
    }


@dataclass(slots=True)
class _Grammar:
    """The rules of one form, as they are needed."""

    form: CallForm
    tag_ids: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    names: dict[tuple[str, str], str] = field(default_factory=dict)  # of rules, by body and attributes
    n_chars: int = 0
    n_written: int = 0  # also of rules that were there
    parts: Alternatives = field(default_factory=lambda: Alternatives({}))  # of the function's parameters

    def literal(self, text: str, *, name: str = "") -> str:
        """A literal as a sequence of strings, tokens and what its holes may hold."""
        text = text.replace(NAME, name)
        tags = sorted(self.tag_ids, key=len, reverse=True)
        pattern = "|".join([*map(re.escape, tags), f"[{HOLES}]"])
        parts = re.split(f"({pattern})", text)
        made = [
            f"<[{self.tag_ids[part]}]>"
            if part in self.tag_ids
            else _HOLE_RULES.get(part) or json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(made) or '""'

    def rule(self, body: str, *, attributes: str = "") -> str:
        """The name of the rule of this body; tools have many in common."""
        self.n_written += len(body)
        known = self.names.get((body, attributes))
        if known is None:
            known = self.names[body, attributes] = f"r{len(self.lines)}"
            self.lines.append(f"{known}{attributes}: {body}")
            self.n_chars += len(body)
        # what references point to stands in every rule that needs it
        if self.n_chars > MAX_SCHEMA_BYTES or self.n_written > _MOST_WRITTEN:
            raise GrammarError(
                f"tools make a grammar of more than {MAX_SCHEMA_BYTES} bytes", hint="offer fewer", param="tools"
            )
        return known

    def json(self, schema: Mapping[str, Any]) -> str:
        """Any JSON of a schema, which is a root of its own, or its `$ref`s would point nowhere."""
        return self.rule(_json_rule(schema))

    def call(self, function: Mapping[str, Any]) -> str:
        """The rule of a call of one function."""
        form = self.form
        schema = _holdable_parameters(function)
        head = self.literal(form.head if form.begin.strip() else form.head.lstrip(), name=function["name"])
        try:
            arguments = self._arguments(schema)
        except GrammarError as error:
            raise _of_tool(function, error) from error
        return self.rule(f"{head} {arguments} {self.literal(form.close)}")

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        if self.form.style not in (Style.TAGGED, Style.LITERAL):
            return self.json(schema)
        self.parts = Alternatives(schema)
        write = self._tagged if self.form.style is Style.TAGGED else self._pairs
        return f"({' | '.join(map(write, _objects(self.parts.of(schema))))})"

    # ---- arguments between tags

    def _tagged(self, one: _Object) -> str:
        parts = []
        for key, schema in one.properties.items():
            part = self.rule(self._argument(self.literal(key), key, schema))
            parts.append(part if key in one.required else f"{part}?")
        if one.others is not None and KEY not in self.form.value_close:
            parts.append(f"{self.rule(self._argument(_FREE_KEY, '', one.others))}*")
        return " ".join(parts) or '""'

    def _argument(self, key: str, name: str, schema: Mapping[str, Any]) -> str:
        """One argument; key: what stands for its name in a rule."""
        form, types = self.form, json_types_of(schema, self.parts.root)
        value_close = form.value_close.replace(KEY, name)
        if types == {"string"}:
            kind, value = form.kinds.get("string", ""), self._text(schema, value_close)
        else:  # read as the JSON that it is, so of a kind that is no text
            kinds = [one for one in sorted(types or ()) if one != "string" and one in form.kinds]
            kind = form.kinds.get(next(iter(kinds), "object"), "")
            value = f"{self.json(rooted(schema, self.parts.root))} {self.literal(value_close)}"
        return f"{self.literal(form.key_open)} {key} {self.literal(form.key_close.replace(KIND, kind))} {value}"

    def _text(self, schema: Mapping[str, Any], close: str) -> str:
        """Plain text up to what closes it, with that."""
        texts = [self._one_text(one, close) for one in self.parts.of(schema)]
        if not texts:
            raise GrammarError("no text satisfies what a schema says of one")
        return texts[0] if len(texts) == 1 else f"({' | '.join(texts)})"

    def _one_text(self, schema: Mapping[str, Any], close: str) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            values = [value for value in values if isinstance(value, str) and value == schema.get("const", value)]
            texts = " | ".join(map(self.literal, values))
            return f"({texts}) {self.literal(close)}"
        signs = _signs(schema)
        tag = next((one for one in self.tag_ids if close.strip().startswith(one)), None)
        if tag is not None:
            return f"{self.rule(self._all(signs))} {self.literal(close)}"
        body = self.rule(self._all(signs, close.strip()), attributes="[lazy]")
        rest = close[len(close.rstrip()) :]
        return f"{body} {self.literal(rest)}" if rest else body

    def _all(self, signs: Sequence[str], close: str = "") -> str:
        """What matches text that each of these patterns matches, with what closes it."""
        if len(signs) == 1:
            return f"/{_slashed(signs[0] + re.escape(close))}/"
        name = f"T{len(self.lines)}"  # only terminals know of both
        both = " & ".join(f"/{_slashed(one)}/" for one in signs)
        self.lines.append(f"{name}: ({both}) {json.dumps(close, ensure_ascii=False) if close else ''}")
        return name

    # ---- arguments in the signs of a programming language

    def _pairs(self, one: _Object, *, depth: int = 0) -> str:
        """`key=value, ...` of an object, in the order of its properties."""
        comma = '", "' if self.form.quote == "'" else '","'
        parts = [
            self.rule(f"{json.dumps(key + self.form.assign)} {self._value(schema, depth=depth)}")
            for key, schema in one.properties.items()
        ]
        if not parts and one.others is not None:
            part = self.rule(f"{_FREE_KEY} {json.dumps(self.form.assign)} {self._value(one.others, depth=depth)}")
            return self.rule(f"({part} ({comma} {part})*)?")
        optional = [key not in one.required for key in one.properties]
        tails = ['""']  # what may follow when something stands before it, from the last property on
        for part, is_optional in zip(reversed(parts), reversed(optional), strict=True):
            tails.append(self.rule(f"({comma} {part}){'?' if is_optional else ''} {tails[-1]}"))
        tails.reverse()
        firsts = []
        for i, part in enumerate(parts):
            firsts.append(f"{part} {tails[i + 1]}")
            if not optional[i]:
                break
        else:
            firsts.append('""')
        return self.rule(" | ".join(firsts))

    def _value(self, schema: Mapping[str, Any], *, depth: int) -> str:
        types = json_types_of(schema, self.parts.root) or set()
        kind = next(iter(types), "") if len(types) == 1 else ""
        is_python = self.form.quote == "'"
        if kind == "string":
            opening = self.literal(self.form.quote)
            return f"{opening} {self._text(schema, self.form.quote)}"
        if is_python or depth > _MAX_DEPTH or kind not in _PLAIN or not schema.keys() <= _PLAIN[kind]:
            return self.json(rooted(schema, self.parts.root))
        writers: dict[str, Callable[[], str]] = {
            "integer": lambda: f"/{_SCALARS['integer']}/",
            "number": lambda: f"/{_slashed(_SCALARS['number'])}/",
            "boolean": lambda: '("true" | "false")',
            "object": lambda: f'"{{" {self._pairs(_objects([schema])[0], depth=depth + 1)} "}}"',
            "array": lambda: self._list(schema, depth=depth + 1),
        }
        is_open = (kind == "object" and not schema.get("properties")) or (
            kind == "array" and not isinstance(schema.get("items"), Mapping)
        )
        return self.json(rooted(schema, self.parts.root)) if is_open else writers[kind]()

    def _list(self, schema: Mapping[str, Any], *, depth: int) -> str:
        item = self.rule(self._value(schema["items"], depth=depth))
        return f'"[" ({item} ("," {item})*)? "]"'


def _json_rule(schema: Mapping[str, Any]) -> str:
    whole = {**schema, "x-guidance": {"whitespace_pattern": _BLANKS}}
    return f"%json {json.dumps(whole, separators=(',', ':'))}"


def _signs(schema: Mapping[str, Any]) -> list[str]:
    """The patterns that a text must match, one at least."""
    patterns = [str(schema["pattern"])] if "pattern" in schema else []
    named = schema.get("format")
    if isinstance(named, str) and named in PATTERNS:
        patterns.append(PATTERNS[named])
    signs = ["|".join(map(_whole, _branches(pattern))) for pattern in patterns]
    if schema.get("minLength") or "maxLength" in schema:
        signs.append(rf"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    return [f"({sign})" for sign in signs] or ["(?s:.*)"]


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern, each of which says for itself where it begins and ends."""
    branches, depth = [""], 0
    for part in re.findall(r"\\.|\[(?:\^?\]?)(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            branches.append("")
        else:
            branches[-1] += part
    return branches


def _whole(branch: str) -> str:
    """A pattern of the whole text of which `branch` must match a part."""
    begins, ends = branch.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", branch) is not None
    inner = branch[begins : len(branch) - ends]
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


@dataclass(frozen=True, slots=True)
class _Object:
    """What one alternative of an object's schema says. others: the schema of properties that it does not list, where such are
    written.
    """

    properties: Mapping[str, Mapping[str, Any]]
    required: frozenset[str]
    others: Mapping[str, Any] | None


def _objects(schemas: Sequence[Mapping[str, Any]]) -> list[_Object]:
    """Alternatives of an object whose properties are written one by one. GrammarError where they say more than those hold."""
    found = []
    for one in schemas:
        unheld = sorted(_UNHELD & one.keys())
        if unheld:
            raise GrammarError(f"{unheld[0]} cannot be held where a model writes arguments one by one")
        listed = (one.get("properties") or {}).items()
        properties = {key: {} if value is True else value for key, value in listed if value is not False}
        required = frozenset(one.get("required") or ())
        others = one.get("additionalProperties", True)
        if others is not False:
            others = {} if others is True else others
            properties |= {name: others for name in one.get("required") or () if name not in properties}
        is_free = not properties and "additionalProperties" in one and others is not False
        n_more = one.get("minProperties", 0) - len(required)
        if required <= properties.keys() and n_more <= 1:  # one more may be any: as many alternatives
            more = [{name} for name in properties if name not in required] if n_more == 1 else [set()]
            found += [_Object(properties, required | one, others if is_free else None) for one in more]
    if not found:
        raise GrammarError("no object satisfies it, or only one with properties that nothing names")
    return found


def _slashed(pattern: str) -> str:
    """As it stands between slashes: what is escaped already stays so."""
    pattern = pattern.replace("\n", "\\n")
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)


def _holdable_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where the schema forgets to say so."""
    try:
        parameters = holdable({"type": "object", **(function.get("parameters") or {})})
        _check_parts(parameters)
        return parameters
    except GrammarError as error:
        raise _of_tool(function, error) from error


def _of_tool(function: Mapping[str, Any], error: GrammarError) -> GrammarError:
    return GrammarError(f"parameters of tool {function['name']!r}: {error.message}", hint=error.hint, param="tools")


def _check_parts(schema: object) -> None:
    """GrammarError for what is no schema where the forms of calls are made of its parts; `holdable` has bounded its depth."""
    check_keywords(schema)
    if not isinstance(schema, Mapping):
        return
    items = schema.get("items")
    for part in (*(schema.get("properties") or {}).values(), *((items,) if isinstance(items, Mapping) else ())):
        _check_parts(part)


def _function(tool: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"tools[{place}] has no function name", param="tools")
    return function
