"""Values of arguments that a model writes as plain text: which JSON they are, by the tool's schema or by how they look.

>>> json_value("12", {"string"}), json_value("12", None), json_value("{'a': True}", None)
('"12"', '12', '{"a": true}')
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from diptych.compute.sampling.json_schema import MAX_SCHEMA_DEPTH, target

SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (dict, "object"), (list, "array"),
)  # fmt: skip


def json_types_of(schema: object, root: Mapping[str, Any] | None = None) -> set[str] | None:
    """The JSON types that a schema allows; None where it does not say. root: what its references point into."""
    return _types_of(schema, root or {}, set(), 0) or None


def _types_of(schema: object, root: Mapping[str, Any], followed: set[str], depth: int) -> set[str] | None:
    """followed: references that the types of a union hold already; each is read once, however many lead to it."""
    if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
        return None
    named = schema.get("type")
    if named is not None:
        return {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)} or None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found = [_types_of(one, root, followed, depth + 1) for one in schema[name]]
            return None if None in found else set().union(*(one or () for one in found))
    parts = schema.get("allOf")
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref in followed:
            return set()
        followed.add(ref)
        parts = [target(root, unquote(ref))]
    said = (_types_of(one, root, followed, depth + 1) for one in (parts if isinstance(parts, list) else ()))
    return next((types for types in said if types is not None), None)


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties that an object's schema lists, also by reference and in parts, where one may stand more than once."""
    listed: dict[str, list[Any]] = {}
    followed: set[str] = set()
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Mapping):
            continue
        properties = node.get("properties")
        for key, one in properties.items() if isinstance(properties, Mapping) else ():
            listed.setdefault(key, []).append(one)
        for name in ("allOf", "anyOf", "oneOf"):
            waiting += node[name] if isinstance(node.get(name), list) else ()
        ref = node.get("$ref")
        if isinstance(ref, str) and ref not in followed:
            followed.add(ref)
            waiting.append(target(schema, unquote(ref)))
    return {key: found[0] if len(found) == 1 else {"anyOf": found} for key, found in listed.items()}


def json_value(text: str, types: Collection[str] | None) -> str:
    """`text` as JSON: of one of `types` where it is one, else text where text is allowed, else what it looks like."""
    if types is not None and set(types) == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    for value, found in _read(text.strip()):
        if types is None or "string" not in types or _is_one_of(value, types):
            return found
    return json.dumps(text, ensure_ascii=False)


def json_string(quoted: str) -> str:
    """A text between quotes, with backslashes, as JSON; also over several lines, and where neither language reads it."""
    source = quoted.replace("\n", "\\n").replace("\r", "\\r")
    found = next((found for value, found in _read(source) if isinstance(value, str)), None)
    return json.dumps(quoted[1:-1], ensure_ascii=False) if found is None else found


def _read(text: str) -> Iterator[tuple[Any, str]]:
    """What a text is, and that as JSON: in the signs of JSON, and of Python."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            found = as_json(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        yield value, found


def as_json(value: Any) -> str:
    """A value as JSON in valid Unicode: half a surrogate pair stays an escape. ValueError for a number that JSON has not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if SURROGATE.search(text) else text


def _type_of(value: object) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _is_one_of(value: object, types: Collection[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types) or (kind == "number" and "integer" in types)
