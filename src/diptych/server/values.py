"""Values of fields as several bodies have them: types with their bounds, which are those of `ground.request` and of grammars.

    seed: Seed | None = bounded("seed")
    stop: Stop = ()

Bodies of requests are made of them in `schema` and in the rooms of the protocols.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from diptych.compute.sampling.json_schema import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from diptych.ground.request import BOUNDS, MAX_LOGIT_BIAS, MAX_STOP_BYTES, MAX_STOP_STRINGS
from diptych.server.prompts import Prompt, prompts_of, prompts_schema

MAX_PROMPTS = 64
MAX_KWARGS_BYTES = 16 * 1024
MAX_KWARGS_DEPTH = 16
MAX_USER_BYTES = 512
_INT64 = 2**63 - 1


def depth_of(value: object) -> int:
    """Nesting depth of a JSON value (0 for a scalar); iterative, as the value may come from a hostile body."""
    deepest, level = 0, [value]
    while level:
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        deepest += 1
    return deepest - 1


def _whole(value: object) -> object:
    """JSON Schema counts 3.0 as an integer, and so do some clients."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_prompts(value: object) -> list[Prompt]:
    return prompts_of(value, MAX_PROMPTS)


def _check_stop(value: object) -> tuple[str, ...]:
    """One stop string or a list of them, within the contract's bounds."""
    if value is None:
        return ()
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries[: MAX_STOP_STRINGS + 1]):
        raise ValueError("must be a string or a list of strings")
    if len(entries) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(entries)} entries; it must have at most {MAX_STOP_STRINGS}")
    for entry in entries:
        if not 1 <= len(entry.encode()) <= MAX_STOP_BYTES:
            raise ValueError(f"has an entry of {len(entry.encode())} bytes; each must have 1 to {MAX_STOP_BYTES}")
    return tuple(entries)


def _check_logit_bias(value: object) -> dict[int, float] | None:
    """`{"token id": bias}` as integers and floats."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; it must have at most {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"has the key {key[:40]!r}; keys must be token ids")
        if not BOUNDS["logit_bias"].holds(bias):
            raise ValueError(f"of token {key} is {str(bias)[:40]}; it must be {BOUNDS['logit_bias'].rule}")
        biases[int(key)] = float(bias)
    return biases


def _check_schema(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        _within(value, max_bytes=MAX_SCHEMA_BYTES, max_depth=MAX_SCHEMA_DEPTH)
    return value


# variables of the template that are fields of the request
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def _check_kwargs(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        own = next((name for name in OWN_VARIABLES if name in value), None)
        if own is not None:
            raise ValueError(f"has {own!r}, which is a field of the request itself; send it as that")
        _within(value, max_bytes=MAX_KWARGS_BYTES, max_depth=MAX_KWARGS_DEPTH)
    return value


def _within(value: object, *, max_bytes: int, max_depth: int) -> None:
    depth = depth_of(value)
    if depth > max_depth:
        raise ValueError(f"is nested {depth} deep; it must be at most {max_depth}")
    size = json_size(value)
    if size > max_bytes:
        raise ValueError(f"has {size} bytes as JSON; it must have at most {max_bytes}")


def json_size(value: object) -> int:
    """Bytes of a value as JSON. ValueError for NaN and infinities, which parsers take and JSON has not."""
    try:
        return len(json.dumps(value, allow_nan=False).encode())
    except ValueError:
        raise ValueError("has a number that is not finite") from None


def _check_user(value: str | None) -> str | None:
    if value is not None and len(value.encode()) > MAX_USER_BYTES:
        raise ValueError(f"has {len(value.encode())} bytes; it must have at most {MAX_USER_BYTES}")
    return value


def bounded(name: str, *, low: float | None = None) -> Any:
    """An optional field with the bounds of the sampling option; `low` where clients of other servers may send less."""
    bound = BOUNDS[name]
    if bound.is_low_open:
        return Field(None, gt=bound.low, le=bound.high)
    return Field(None, ge=bound.low if low is None else low, le=bound.high)


Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-_INT64, le=_INT64)]
Seed = Annotated[int, BeforeValidator(_whole)]  # as wide as Python's, whose bounds are beyond those of other numbers
Prompts = Annotated[list[Prompt], PlainValidator(_check_prompts), WithJsonSchema(prompts_schema(MAX_PROMPTS))]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES // 4}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_SCHEMA,
                {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {
                        "type": "number",
                        "minimum": BOUNDS["logit_bias"].low,
                        "maximum": BOUNDS["logit_bias"].high,
                    },
                    "maxProperties": MAX_LOGIT_BIAS,
                },
                {"type": "null"},
            ]
        }
    ),
]
CacheSalt = Annotated[str | None, Field(min_length=1, max_length=256)]
JsonSchema = Annotated[dict[str, Any] | None, AfterValidator(_check_schema)]
TemplateVariables = Annotated[dict[str, Any] | None, AfterValidator(_check_kwargs)]
Name = Annotated[str, Field(max_length=1024)]
User = Annotated[str | None, Field(None, max_length=MAX_USER_BYTES), AfterValidator(_check_user)]
