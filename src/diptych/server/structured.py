"""Constraints on output from the body's fields, in OpenAI's, vLLM's and llama.cpp's forms.

Bounds of size and depth are checked where the grammar is compiled (`compute.sampling.structured`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from diptych.ground.request import StructuredSpec
from diptych.server.http.errors import ApiError
from diptych.server.schema import ChatBody, GenerationBody, Schema


def structured_spec(body: GenerationBody) -> StructuredSpec | None:
    """The one constraint a body asks for, or None. Raises ApiError 400 when there are two."""
    found = _constraints(body)
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ApiError(
            400,
            f"{len(found)} constraints on the output are given ({names}); at most 1 can hold",
            param=found[-1][0],
            code="invalid_value",
        )
    return found[0][1] if found else None


def constraint_field(body: GenerationBody) -> str | None:
    """The field that the constraint of a body comes from; a forced tool_choice's are the tools."""
    found = _constraints(body)
    if found:
        return found[0][0]
    return "tools" if isinstance(body, ChatBody) and body.tools else None


def _constraints(body: GenerationBody) -> list[tuple[str, StructuredSpec]]:
    """(field, constraint) of every constraint in a body."""
    found: list[tuple[str, StructuredSpec | None]] = []
    form = body.response_format
    if form is not None and form.type != "text":
        found.append(("response_format", _schema(form.held_schema) or _json_object(is_asked=True)))
    given = body.structured_outputs
    if given is not None:
        found += [
            ("structured_outputs.json", _schema(given.json_)),
            ("structured_outputs.regex", _text("regex", given.regex)),
            ("structured_outputs.choice", _choice(given.choice)),
            ("structured_outputs.grammar", _text("grammar", given.grammar)),
            ("structured_outputs.json_object", _json_object(is_asked=bool(given.json_object))),
        ]
    found += [
        ("guided_json", _schema(body.guided_json)),
        ("guided_regex", _text("regex", body.guided_regex)),
        ("guided_choice", _choice(body.guided_choice)),
        ("guided_grammar", _text("grammar", body.guided_grammar)),
        ("json_schema", _schema(body.json_schema)),
        ("grammar", _text("grammar", body.grammar)),
    ]
    return [(name, spec) for name, spec in found if spec is not None]


def _schema(value: Schema | None) -> StructuredSpec | None:
    if value is None:
        return None
    return StructuredSpec(kind="json_schema", source=value if isinstance(value, str) else json.dumps(value))


def _text(kind: str, source: str | None) -> StructuredSpec | None:
    return None if source is None else StructuredSpec(kind=kind, source=source)


def _choice(choices: Sequence[str] | None) -> StructuredSpec | None:
    return None if choices is None else StructuredSpec(kind="choice", source=json.dumps(choices))


def _json_object(*, is_asked: bool) -> StructuredSpec | None:
    return StructuredSpec(kind="json_object", source="") if is_asked else None
