"""Constraints on output from the body's fields: `response_format`, `structured_outputs`.

Bounds of size and depth are checked where the grammar is compiled (`compute.structured`).
"""

from __future__ import annotations

import json

from diptych.ground.request import StructuredSpec
from diptych.server.errors import ApiError
from diptych.server.schema import ChatBody, GenerationBody, StructuredOutputs


def structured_spec(body: GenerationBody) -> StructuredSpec | None:
    """The one constraint a body asks for, or None. Raises ApiError 400 when there are two."""
    found: list[StructuredSpec] = []
    form = body.response_format
    if form is not None and form.type == "json_object":
        found.append(StructuredSpec(kind="json_object", source=""))
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        found.append(StructuredSpec(kind="json_schema", source=json.dumps(form.json_schema.schema_)))
    if body.structured_outputs is not None:
        found += _from_outputs(body.structured_outputs)
    if len(found) > 1:
        raise ApiError(
            400,
            f"{len(found)} constraints on the output are given; at most 1 can hold",
            param="structured_outputs",
            code="invalid_value",
        )
    return found[0] if found else None


def constraint_field(body: GenerationBody) -> str | None:
    """The field that the constraint of a body comes from; a forced tool_choice's are the tools."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        return f"structured_outputs.{next(iter(given))}"
    return "tools" if isinstance(body, ChatBody) and body.tools else None


def _from_outputs(outputs: StructuredOutputs) -> list[StructuredSpec]:
    found = []
    if outputs.json_ is not None:
        source = outputs.json_ if isinstance(outputs.json_, str) else json.dumps(outputs.json_)
        found.append(StructuredSpec(kind="json_schema", source=source))
    if outputs.regex is not None:
        found.append(StructuredSpec(kind="regex", source=outputs.regex))
    if outputs.choice is not None:
        found.append(StructuredSpec(kind="choice", source=json.dumps(outputs.choice)))
    if outputs.grammar is not None:
        found.append(StructuredSpec(kind="grammar", source=outputs.grammar))
    if outputs.json_object:
        found.append(StructuredSpec(kind="json_object", source=""))
    return found
