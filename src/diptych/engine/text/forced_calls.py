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

from diptych.compute.json_schema import holdable
from diptych.engine.text.argument_values import json_types_of
from diptych.engine.text.call_form import COUNT, HOLES, ID, KEY, KIND, NAME, CallForm, Style
from diptych.ground.errors import GrammarError, RequestError
from diptych.ground.request import StructuredSpec

_BLANKS = r"[ \n\t]{0,8}"  # a model that likes blanks must not write them for ever
_HOLE_RULES = {ID: "/[a-zA-Z0-9]{9}/", COUNT: "/[0-9]{1,2}/"}
_SCALARS = {"integer": r"-?(0|[1-9][0-9]{0,17})", "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?"}
_MAX_DEPTH = 8


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
    stops: tags that end an output, and so are not part of one. Objects are closed (`compute.json_schema`).
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

    A tool that is not strict, and whose schema no grammar holds, is held to JSON alone.
    """
    if form.trigger not in tag_ids:
        return None
    forced = tool_call_spec(
        [tool if _is_strict(tool) else _loosened(tool) for tool in tools],
        form,
        is_parallel=is_parallel,
        tag_ids=tag_ids,
        stops=stops,
    )
    start, rest = forced.source.split("\n", 1)
    calls = start.removeprefix("start: LEAD ")
    # text spells no tag: the token that begins a call is where the grammar of calls begins
    source = f"start: TEXT ({calls})?\n{rest}\nTEXT: /(?s:.*)/"
    return StructuredSpec(kind="grammar", source=source)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, Mapping) and function.get("strict") is True


def _loosened(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    try:
        _holdable_parameters(function)
    except GrammarError:
        return {"type": "function", "function": {**function, "parameters": {"additionalProperties": True}}}
    return tool


@dataclass(slots=True)
class _Grammar:
    """The rules of one form, as they are needed."""

    form: CallForm
    tag_ids: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

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

    def rule(self, body: str) -> str:
        """The name of a new rule."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Any JSON of a schema, which is a root of its own, or its `$ref`s would point nowhere."""
        whole = {**schema, "x-guidance": {"whitespace_pattern": _BLANKS}}
        return self.rule(f"%json {json.dumps(whole)}")

    def call(self, function: Mapping[str, Any]) -> str:
        """The rule of a call of one function."""
        form = self.form
        schema = _holdable_parameters(function)
        head = self.literal(form.head if form.begin.strip() else form.head.lstrip(), name=function["name"])
        if form.style is Style.TAGGED:
            arguments = self._tagged(schema)
        elif form.style is Style.LITERAL:
            arguments = self._pairs(schema, schema, depth=0)
        else:
            arguments = self.json(schema)
        return self.rule(f"{head} {arguments} {self.literal(form.close)}")

    # ---- arguments between tags

    def _tagged(self, schema: Mapping[str, Any]) -> str:
        properties, required = _properties(schema)
        parts = []
        for key, one in properties.items():
            types = json_types_of(one)
            kind = self.form.kinds.get(next(iter(sorted(types or ["string"]))), "")
            close = self.form.key_close.replace(KIND, kind)
            value_close = self.form.value_close.replace(KEY, key)
            value = self._text(one, value_close) if types == {"string"} else None
            if value is None:
                value = f"{self.json(_rooted(one, schema))} {self.literal(value_close)}"
            part = self.rule(f"{self.literal(self.form.key_open + key + close)} {value}")
            parts.append(part if key in required else f"{part}?")
        return " ".join(parts) or '""'

    def _text(self, schema: Mapping[str, Any], close: str) -> str:
        """Plain text up to what closes it, with that."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            texts = " | ".join(self.literal(str(value)) for value in values)
            return f"({texts}) {self.literal(close)}"
        signs = _signs(schema)
        tag = next((one for one in self.tag_ids if close.strip().startswith(one)), None)
        if tag is not None:
            return f"{self.rule(self._all(signs))} {self.literal(close)}"
        body = self.rule(self._all(signs, close.strip()))
        self.lines[-1] = self.lines[-1].replace(":", "[lazy]:", 1)
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

    def _pairs(self, schema: Mapping[str, Any], root: Mapping[str, Any], *, depth: int) -> str:
        """`key=value, ...` of an object, in the order of its properties."""
        properties, required = _properties(schema)
        comma = '", "' if self.form.quote == "'" else '","'
        parts = [
            self.rule(f"{json.dumps(key + self.form.assign)} {self._value(one, root, depth=depth)}")
            for key, one in properties.items()
        ]
        optional = [key not in required for key in properties]
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

    def _value(self, schema: Mapping[str, Any], root: Mapping[str, Any], *, depth: int) -> str:
        types = json_types_of(schema) or set()
        kind = next(iter(types), "") if len(types) == 1 else ""
        is_python = self.form.quote == "'"
        if kind == "string":
            opening = self.literal(self.form.quote)
            return f"{opening} {self._text(schema, self.form.quote)}"
        if is_python or depth > _MAX_DEPTH:
            return self.json(_rooted(schema, root))
        writers: dict[str, Callable[[], str]] = {
            "integer": lambda: f"/{_SCALARS['integer']}/",
            "number": lambda: f"/{_slashed(_SCALARS['number'])}/",
            "boolean": lambda: '("true" | "false")',
            "object": lambda: f'"{{" {self._pairs(schema, root, depth=depth + 1)} "}}"',
            "array": lambda: self._list(schema, root, depth=depth + 1),
        }
        if kind in writers and "enum" not in schema and "const" not in schema and not _is_open(schema, kind):
            return writers[kind]()
        return self.json(_rooted(schema, root))

    def _list(self, schema: Mapping[str, Any], root: Mapping[str, Any], *, depth: int) -> str:
        item = self.rule(self._value(schema["items"], root, depth=depth))
        return f'"[" ({item} ("," {item})*)? "]"'


def _signs(schema: Mapping[str, Any]) -> list[str]:
    """The patterns that a text must match, one at least."""
    signs = []
    if "pattern" in schema:
        pattern = str(schema["pattern"])
        begins, ends = pattern.startswith("^"), pattern.endswith("$")
        signs.append(
            f"{'' if begins else '(?s:.*)'}({pattern.removeprefix('^').removesuffix('$')}){'' if ends else '(?s:.*)'}"
        )
    if schema.get("minLength") or "maxLength" in schema:
        signs.append(rf"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    return signs or ["(?s:.*)"]


def _properties(schema: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], Sequence[str]]:
    """The properties of an object that may be there, `true` being any value, and which of them must."""
    listed = (schema.get("properties") or {}).items()
    return {key: {} if one is True else one for key, one in listed if one is not False}, schema.get("required") or ()


def _is_open(schema: Mapping[str, Any], kind: str) -> bool:
    """Whether only JSON's own grammar can hold what a schema says of numbers, lists and objects."""
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"}
    if bounds & schema.keys():
        return True
    return (kind == "object" and not schema.get("properties")) or (
        kind == "array" and not isinstance(schema.get("items"), Mapping)
    )


def _rooted(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema from within another, with what its references point to."""
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def _slashed(pattern: str) -> str:
    return pattern.replace("/", "\\/").replace("\n", "\\n")


def _holdable_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where the schema forgets to say so."""
    try:
        parameters = holdable({"type": "object", **(function.get("parameters") or {})})
        _check_parts(parameters)
        return parameters
    except GrammarError as error:
        raise GrammarError(
            f"parameters of tool {function['name']!r}: {error.message}", hint=error.hint, param="tools"
        ) from error


def _check_parts(schema: object) -> None:
    """GrammarError for what is no schema where the forms of calls are made of its parts; `holdable` has bounded its depth."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{schema!r:.80} stands where a schema must be: an object, true or false")
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise GrammarError(f"properties is a {type(properties).__name__}; it must be an object")
    for name in ("required", "enum"):
        if name in schema and not isinstance(schema[name] or [], list) and (name == "enum" or properties):
            raise GrammarError(f"{name} is {schema[name]!r:.80}; it must be a list")
    for name in ("minLength", "maxLength"):
        if name in schema and (type(schema[name]) is not int or schema[name] < 0):
            raise GrammarError(f"{name} is {schema[name]!r:.80}; it must be a whole number")
    items = schema.get("items")
    for part in (*properties.values(), *((items,) if isinstance(items, Mapping) else ())):
        _check_parts(part)


def _function(tool: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"tools[{place}] has no function name", param="tools")
    return function
