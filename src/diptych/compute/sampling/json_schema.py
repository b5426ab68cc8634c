"""JSON schemas in the form that a grammar can hold: objects closed, formats as patterns, depth bounded, no word to people.

`schema_numbers` has what is said of numbers.
Standard library only: the grammars of tool calls are made of schemas too, in a room without tensors.

>>> holdable({"type": "object", "properties": {"a": {"type": "integer"}}})["additionalProperties"]
False
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from diptych.compute.sampling.schema_numbers import check_multiples, check_numbers, narrowed
from diptych.ground.errors import GrammarError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_INDEX_DIGITS = 10  # of an entry of a list, in a `$ref`: a text of thousands is no number to int()

# llguidance's own forms of these allow what validators refuse: second 60 at any time, a local part of any length, a label
# with two hyphens in a row (reserved, RFC 5891).
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAY = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_LABEL = r"[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}"
_WORD = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,30}"
_FORMATS = {
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}[Tt]{_TIME}$",
    "hostname": rf"^({_LABEL}\.){{0,3}}{_LABEL}$",
    "email": rf"^{_WORD}(\.{_WORD})?@({_LABEL}\.){{1,4}}[A-Za-z]{{2,20}}$",
}
_HEX = "[0-9A-Fa-f]"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = f"{_HEX}{{1,4}}"
_TIMES = r"([0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S)"
_DAYS = r"([0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}D)"
_URI_SIGN = rf"([A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
# of texts that are not written as JSON, where llguidance holds no format
PATTERNS = _FORMATS | {
    "date": f"^{_DAY}$",
    "duration": f"^P({_DAYS}(T{_TIMES})?|T{_TIMES}|[0-9]{{1,4}}W)$",
    "uuid": f"^{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": "^({})$".format("|".join([
        f"({_GROUP}:){{7}}{_GROUP}", f"({_GROUP}:){{1,7}}:", f":((:{_GROUP}){{1,7}}|:)",
        *(f"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7)),
    ])),
    "uri": rf"^[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(//[A-Za-z0-9._~-]{{0,255}}(:[0-9]{{1,5}})?|{_URI_SIGN}+)(/{_URI_SIGN}*)*"
    rf"(\?({_URI_SIGN}|[/?])*)?(#({_URI_SIGN}|[/?])*)?$",
}  # fmt: skip
# what a schema says to people, which makes up most of a tool's
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONES = ("items", "additionalProperties", "additionalItems", "if", "then", "else", "not", "contains")
# each describes a part of the same object as the properties beside it do
_PARTS = ("allOf", "anyOf", "oneOf")
_LONE_PARTS = ("if", "then", "else")


def holdable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with objects closed that do not say otherwise, and formats written as patterns.

    A model that may add any property hardly ever ends an object, so one that lists its `properties` has no others (as with
    OpenAI's strict schemas and llama.cpp's grammars) unless it says `additionalProperties` or requires some. Every answer still
    satisfies the schema that was sent. An object that several schemas describe together (allOf) stays as it is.
    Raises GrammarError for a schema that is nested too deeply or asks for what no grammar can hold.
    """
    check_depth(schema)
    check_multiples(schema)
    made: dict[str, Any] = _Closer(schema).closed(schema, "#", is_part=False)
    made.pop("x-guidance", None)  # no keyword of JSON Schema, but by which the compiler would hold less than is asked
    check_numbers(made)
    return made


def check_depth(schema: object) -> None:
    """Raise GrammarError for more than MAX_SCHEMA_DEPTH levels."""
    depth = 0
    level: list[object] = [schema]
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} deep", param="json_schema")
        inner: list[object] = []
        for node in level:
            inner += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        level = [child for child in inner if isinstance(child, dict | list)]


def _describes(schema: object) -> bool:
    """Whether a schema says which properties an object has."""
    if not isinstance(schema, dict):
        return False
    return "properties" in schema or "$ref" in schema or any(map(_describes, _parts(schema)))


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in _PARTS:
        yield from _listed(schema, name)
    yield from (schema[name] for name in _LONE_PARTS if name in schema)


def _listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _n_describing(schema: Mapping[str, Any]) -> int:
    """How many schemas describe one object together; of alternatives (anyOf, oneOf) one holds at a time."""
    together = [*_listed(schema, "allOf"), *(schema.get(name) for name in _LONE_PARTS)]
    one_of = [_listed(schema, "anyOf"), _listed(schema, "oneOf")]
    return (
        ("properties" in schema) + ("$ref" in schema) + sum(map(_describes, together))
        + sum(any(map(_describes, alternatives)) for alternatives in one_of)
    )  # fmt: skip


def _shared_refs(root: Mapping[str, Any]) -> set[str]:
    """The `$ref`s to schemas that somewhere describe an object together with others, and so must stay open."""
    found: set[str] = set()
    seen: set[tuple[int, bool]] = set()  # many refs may point to one large schema
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        schema, is_part = waiting.pop()
        if not isinstance(schema, dict) or (id(schema), is_part) in seen:
            continue
        seen.add((id(schema), is_part))
        is_part = is_part or _n_describing(schema) > 1
        ref = schema.get("$ref")
        pointer = unquote(ref) if isinstance(ref, str) else None  # a fragment of a URI, where "%20" is a blank
        if is_part and pointer is not None and pointer not in found:
            found.add(pointer)
            waiting.append((target(root, pointer), True))
        waiting += [(part, is_part) for part in _parts(schema)]
        waiting += [(child, False) for child in _children(schema)]
    return found


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas inside that describe other values than this one does."""
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in _LISTS:
        if name not in _PARTS:
            yield from _listed(schema, name)
    yield from (schema[name] for name in _ONES if name not in _LONE_PARTS and isinstance(schema.get(name), dict))


def target(root: Mapping[str, Any], ref: str) -> Any:
    """What a `$ref` within the schema points to, its escapes of a URI undone; None for any other."""
    value: Any = root if ref.startswith("#") else None
    for part in ref.removeprefix("#").split("/")[1:]:
        if isinstance(value, list):
            is_index = part.isdecimal() and len(part) <= MAX_INDEX_DIGITS and int(part) < len(value)
            value = value[int(part)] if is_index else None
        else:
            value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


class _Closer:
    """Rebuilds one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._shared = _shared_refs(root)

    def closed(self, schema: Any, pointer: str, *, is_part: bool) -> Any:
        """`schema`, which stands at `pointer`; is_part: others describe the same object."""
        if not isinstance(schema, dict):
            return schema
        is_part = is_part or pointer in self._shared or _n_describing(schema) > 1
        out = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        for name in _BY_NAME:
            if isinstance(out.get(name), dict):
                at = f"{pointer}/{name}"
                out[name] = {
                    key: self.closed(one, f"{at}/{_escaped(key)}", is_part=False) for key, one in out[name].items()
                }
        for name in _LISTS:
            if isinstance(out.get(name), list):
                joins = is_part and name in _PARTS
                out[name] = [
                    self.closed(one, f"{pointer}/{name}/{i}", is_part=joins) for i, one in enumerate(out[name])
                ]
        for name in _ONES:
            if isinstance(out.get(name), dict):
                # what must not hold is not narrowed, or more would be allowed
                joins = name == "not" or (is_part and name in _LONE_PARTS)
                out[name] = self.closed(out[name], f"{pointer}/{name}", is_part=joins)
        if "properties" in out and not is_part and not {"additionalProperties", "unevaluatedProperties"} & out.keys():
            out["additionalProperties"] = False
            out["properties"] = _with_required(out)
        return narrowed(_with_pattern(_without_unique(out)))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _with_required(schema: Mapping[str, Any]) -> Any:
    """The properties of an object to be closed, with those that it requires and does not list: they may be anything."""
    listed, required = schema["properties"], schema.get("required")
    if not isinstance(listed, dict) or not isinstance(required, list) or "patternProperties" in schema:
        return listed
    return listed | {name: {} for name in required if isinstance(name, str) and name not in listed}


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None and "pattern" not in schema:
        del schema["format"]
        schema["pattern"] = pattern
    return schema


def _without_unique(schema: dict[str, Any]) -> dict[str, Any]:
    """A grammar cannot compare entries; a list of at most one needs no comparing."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is True and not (isinstance(most, int) and most <= 1):
        raise GrammarError(
            "json_schema has uniqueItems, which a grammar cannot hold",
            hint="leave it out and look for repeated entries in the answer, or list the possible answers with enum",
            param="json_schema",
        )
    schema.pop("uniqueItems", None)
    return schema
