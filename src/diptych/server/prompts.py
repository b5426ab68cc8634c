"""Prompts as bodies have them: texts or token ids, one or several."""

from __future__ import annotations

from typing import Any

from diptych.ground.bounds import shown
from diptych.ground.request import MAX_TOKEN_ID

Prompt = str | list[int]
IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}


def are_ids(values: list[Any]) -> bool:
    """Whether all are token ids; built on C loops, because a body may hold millions."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN_ID


def prompts_of(value: object, most: int) -> list[Prompt]:
    """A text, texts, token ids or lists of them, always as a list of at most `most` prompts. ValueError names what is none."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids, or a list of lists of token ids")
    if are_ids(value):
        return [value]
    if int in set(map(type, value)):
        raise ValueError(_wrong_id(value))
    if len(value) > most:
        raise ValueError(f"has {len(value)} entries; it must have at most {most} (or be token ids only)")
    for number, item in enumerate(value):
        if isinstance(item, str) or (isinstance(item, list) and are_ids(item)):
            continue
        if isinstance(item, list) and item:
            raise ValueError(f"entry {number} {_wrong_id(item)}")
        raise ValueError(f"entry {number} is {shown(item)}; it must be a string or a non-empty list of token ids")
    return value


def _wrong_id(values: list[Any]) -> str:
    place = next(i for i, one in enumerate(values) if type(one) is not int or not 0 <= one <= MAX_TOKEN_ID)
    return f"has {shown(values[place])} at place {place}; token ids are whole numbers between 0 and {MAX_TOKEN_ID}"


def prompts_schema(most: int) -> dict[str, Any]:
    """What `prompts_of` takes, as a JSON schema."""
    forms = (
        _TEXT_SCHEMA,
        {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": most},
        IDS_SCHEMA,
        {"type": "array", "items": IDS_SCHEMA, "minItems": 1, "maxItems": most},
    )
    return {"anyOf": list(forms)}
