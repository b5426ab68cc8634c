"""Random JSON schemas of varying shape. Shared by tests/compute and tests/server."""

from __future__ import annotations

import random
from typing import Any

_POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def random_object_schema(number: int) -> dict[str, Any]:
    """Schema `number` of an endless list; always an object, as clients send it."""
    rng = random.Random(number)
    schema = random_schema(rng)
    if schema.get("type") != "object":
        schema = {
            "type": "object",
            "properties": {"value": schema},
            "required": ["value"],
            "additionalProperties": False,
        }
    return schema | {"$defs": {"point": _POINT}}


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """Objects, arrays, unions, enums, references, bounded numbers and strings, patterns and formats."""
    leaves = [
        lambda: {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 500)},
        lambda: {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
        lambda: {"type": "string", "maxLength": rng.randint(1, 12)},
        lambda: {"type": "string", "minLength": 2, "maxLength": 9},
        lambda: {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(ab|cd)+[0-9]$", "^é[^x]?$"])},
        lambda: {
            "type": "string",
            "format": rng.choice(["date", "time", "date-time", "email", "uuid", "ipv4", "hostname"]),
        },
        lambda: {"enum": rng.sample(["alpha", "beta", 3, None, True, "γ", 2.5], k=rng.randint(1, 4))},
        lambda: {"const": rng.choice(["yes", 0, {"a": [1]}])},
        lambda: {"type": rng.choice(["boolean", "null", ["integer", "null"]])},
        lambda: {"type": "integer", "multipleOf": rng.choice([2, 5])},
        lambda: {"$ref": "#/$defs/point"},
    ]
    if depth >= 3 or rng.random() < 0.4:
        return rng.choice(leaves)()
    kind = rng.choice(["object", "object", "array", "tuple", "anyOf"])
    if kind == "object":
        names = rng.sample(["name", "kind", "a b", "ü", "items", 'q"'], k=rng.randint(1, 4))
        required = rng.sample(names, k=rng.randint(0, len(names)))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [random_schema(rng, depth + 1)] * 2, "minItems": 2, "items": False}
    return {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]}
