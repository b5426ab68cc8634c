"""Parts of a JSON schema by themselves: what they refer to comes with them, and alternatives are told apart.

Standard library only. For grammars of values that are not written as JSON, or not as part of their object's; JSON itself is
held by the whole schema (`json_schema`).

>>> Alternatives({"$defs": {"a": {"maxLength": 3}}}).of({"anyOf": [{"$ref": "#/$defs/a"}, {"const": "b"}]})
[{'maxLength': 3}, {'const': 'b'}]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from diptych.compute.sampling.json_schema import ANNOTATIONS, MAX_SCHEMA_DEPTH, target
from diptych.ground.errors import GrammarError

MOST_ALTERNATIVES = 256
MOST_MERGES = 4096  # of one with another, 3 us each
_ASIDE = ANNOTATIONS | {"$defs", "definitions", "$schema", "$id"}  # say nothing of the value
_JOINS = {"$ref", "allOf", "anyOf", "oneOf"}
_LEAST = {"minLength": max, "minProperties": max, "maxLength": min, "maxProperties": min}


def rooted(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` from within `root` as one of its own, with what its references point to."""
    names: dict[str, str] = {}
    waiting: list[str] = []

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(one) for one in node]
        if not isinstance(node, Mapping):
            return node
        return {key: place(one) if key == "$ref" else moved(one) for key, one in node.items()}

    def place(ref: Any) -> Any:
        if not isinstance(ref, str) or not isinstance(target(root, unquote(ref)), Mapping | bool):
            return moved(ref)  # of another document, or a property of that name
        if ref not in names:
            names[ref] = f"r{len(names)}"
            waiting.append(ref)
        return f"#/$defs/{names[ref]}"

    made: dict[str, Any] = moved(schema)
    defs = {}
    while waiting:
        ref = waiting.pop()
        defs[names[ref]] = moved(target(root, unquote(ref)))
    return {**made, "$defs": defs} if defs else made


def check_keywords(schema: object) -> None:
    """Raise GrammarError for what is no schema, by the keywords that grammars are made of here."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{schema!r:.80} stands where a schema must be: an object, true or false")
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise GrammarError(f"properties is a {type(properties).__name__}; it must be an object")
    for name in ("required", "enum", "allOf", "anyOf", "oneOf"):
        # some write `required: true` in the schema of a value itself, which says nothing of the value
        if name in schema and not isinstance(schema[name] or [], list) and (name != "required" or properties):
            raise GrammarError(f"{name} is {schema[name]!r:.80}; it must be a list")
    for name in _LEAST:
        if name in schema and (type(schema[name]) is not int or schema[name] < 0):
            raise GrammarError(f"{name} is {schema[name]!r:.80}; it must be a whole number")


class Alternatives:
    """Of the schemas in a whole one, `root`; each reference is followed once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._found: dict[str, list[dict[str, Any]] | None] = {}  # None: on the way to it
        self._depth = 0  # of references on the way
        self._n_merges = 0

    def of(self, schema: object) -> list[dict[str, Any]]:
        """Schemas without references, allOf, anyOf and oneOf, of which a value satisfies one where it satisfies `schema`.

        Raises GrammarError for a schema that is none, refers to itself, has very many alternatives or such as hold together.
        """
        check_keywords(schema)
        if not isinstance(schema, Mapping):
            return [{}] if schema else []
        made = [{key: value for key, value in schema.items() if key not in _ASIDE | _JOINS}]
        if not isinstance(schema.get("required") or [], list):
            del made[0]["required"]
        for options in self._choices(schema):
            self._n_merges += len(made) * len(options)
            if self._n_merges > MOST_MERGES:
                raise _too_many()
            pairs = ((one, other) for one in made for other in options)
            made = [both for one, other in pairs if (both := _merged(one, other)) is not None]
            if len(made) > MOST_ALTERNATIVES:
                raise _too_many()
        return made

    def _choices(self, schema: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
        """Lists of schemas of each of which one must hold."""
        if "$ref" in schema:
            yield self._followed(schema["$ref"])
        for part in schema.get("allOf") or ():
            yield self.of(part)
        if schema.get("anyOf"):
            yield [one for part in schema["anyOf"] for one in self.of(part)]
        if schema.get("oneOf"):
            parts = [self.of(part) for part in schema["oneOf"]]
            if sum(map(len, parts)) > MOST_ALTERNATIVES:
                raise _too_many()
            for first, second in combinations(parts, 2):
                if not all(_are_apart(one, other) for one in first for other in second):
                    raise GrammarError("oneOf has parts that may hold together, which a grammar cannot refuse")
            yield [one for part in parts for one in part]

    def _followed(self, ref: object) -> list[dict[str, Any]]:
        value = target(self.root, unquote(ref)) if isinstance(ref, str) else None
        if not isinstance(ref, str) or not isinstance(value, Mapping | bool):
            raise GrammarError(f"$ref is {ref!r:.80}, which points to no schema")
        if ref not in self._found:
            self._found[ref] = None
            self._depth += 1
            if self._depth > MAX_SCHEMA_DEPTH:
                raise GrammarError(f"$ref leads over more than {MAX_SCHEMA_DEPTH} others")
            self._found[ref] = self.of(value)
            self._depth -= 1
        found = self._found[ref]
        if found is None:
            raise GrammarError(f"$ref {ref!r:.80} leads back to itself")
        return found


def _too_many() -> GrammarError:
    return GrammarError(f"a schema has very many alternatives; at most {MOST_ALTERNATIVES} are told apart")


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    named = schema.get("type")
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    return (types | {"integer"} if "number" in types else types) or None


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    values: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema of what both describe; None: there is no such value."""
    made = {**one, **other}
    for key in one.keys() & other.keys():
        first, second = one[key], other[key]
        if first == second:
            continue
        if key == "properties":
            both = {name: {"allOf": [first[name], second[name]]} for name in first.keys() & second.keys()}
            made[key] = {**first, **second, **both}
        elif key == "required":
            made[key] = list(dict.fromkeys([*first, *second]))
        elif key in _LEAST:
            made[key] = _LEAST[key](first, second)
        elif key == "type":
            made[key] = sorted((_types(one) or set()) & (_types(other) or set()))
        elif key == "enum":
            made[key] = [value for value in first if value in second]
        else:
            raise GrammarError(f"{key} is said twice of one value, as {first!r:.40} and {second!r:.40}")
        if key in ("type", "enum") and not made[key]:
            return None
    for closed, open_ in ((one, other), (other, one)):
        if closed.get("additionalProperties") is False and not _listed(open_) <= _listed(closed):
            raise GrammarError(
                "additionalProperties is false of a part, and another part has properties beside its own"
            )
    return made


def _listed(schema: Mapping[str, Any]) -> set[str]:
    return set(schema.get("properties") or ())


def _are_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether surely no value satisfies both."""
    types = _types(one), _types(other)
    if None not in types and not types[0] & types[1]:  # type: ignore[operator]
        return True
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None and not any(value in values[1] for value in values[0]):
        return True
    both = set(one.get("required") or ()) & set(other.get("required") or ()) & _listed(one) & _listed(other)
    inner = [(one["properties"][name], other["properties"][name]) for name in both]
    return any(_are_apart(*pair) for pair in inner if all(isinstance(part, Mapping) for part in pair))
