"""Objects of a schema are closed where that cannot contradict it; what no grammar can hold is refused."""

import json
import random

import jsonschema_rs
import pytest

from diptych.compute.json_schema import MAX_SCHEMA_DEPTH, holdable
from diptych.ground.errors import GrammarError

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
CLOSED_A, CLOSED_B = {**A, "additionalProperties": False}, {**B, "additionalProperties": False}


def test_objects_are_closed_at_every_depth() -> None:
    """As pydantic, instructor and langchain send them: without additionalProperties, nested, and behind $ref."""
    schema = {
        "type": "object",
        "properties": {"one": A, "many": {"type": "array", "items": B}, "far": {"$ref": "#/$defs/Far"}},
        "$defs": {"Far": {"type": "object", "properties": {"either": {"anyOf": [A, {"type": "null"}]}}}},
    }
    made = holdable(schema)
    assert made["additionalProperties"] is False
    assert made["properties"]["one"] == CLOSED_A
    assert made["properties"]["many"]["items"] == CLOSED_B
    assert made["$defs"]["Far"]["additionalProperties"] is False
    assert made["$defs"]["Far"]["properties"]["either"]["anyOf"][0] == CLOSED_A
    assert "additionalProperties" not in schema, "the caller's schema is left alone"


@pytest.mark.parametrize("said", [{"additionalProperties": True}, {"additionalProperties": {"type": "string"}}])
def test_what_a_schema_says_itself_holds(said: dict) -> None:
    """`dict[str, int]` fields and extra="allow" say so."""
    assert holdable({**A, **said}) == {**A, **said}
    assert holdable({"type": "object"}) == {"type": "object"}, "any object was asked for"


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": B}},
        {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
        {"allOf": [{"anyOf": [A]}, {"$ref": "#/$defs/C"}], "$defs": {"C": {"$ref": "#/$defs/B"}, "B": B}},
        {"allOf": [{"$ref": "#/$defs/A%20b"}, B], "$defs": {"A b": A}},
        {"allOf": [{"$ref": "#/$defs/C/anyOf/1"}, B], "$defs": {"C": {"anyOf": [B, {"$ref": "#/$defs/A"}]}, "A": A}},
    ],
)
def test_objects_described_together_stay_open(schema: dict) -> None:
    """Closing either would forbid what the other one asks for, and nothing would satisfy both."""
    assert jsonschema_rs.is_valid(schema, {"a": 1, "b": 2})
    assert jsonschema_rs.is_valid(holdable(schema), {"a": 1, "b": 2})


def test_what_is_required_and_not_listed_may_come() -> None:
    """Closed without it the object could not be: a schema that allows answers was refused as one that allows none."""
    made = holdable({**A, "required": ["a", "b"]})
    assert made["properties"] == {**A["properties"], "b": {}}
    assert jsonschema_rs.is_valid(made, {"a": 1, "b": ["x"]})
    assert not jsonschema_rs.is_valid(made, {"a": 1, "b": 2, "c": 3})
    by_pattern = {**A, "required": ["a", "b"], "patternProperties": {"^b": {"type": "integer"}}}
    assert holdable(by_pattern)["properties"] == A["properties"]


def test_a_lone_part_is_closed() -> None:
    """pydantic writes a field with a default as allOf of one $ref."""
    made = holdable({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}})
    assert made["$defs"]["A"] == CLOSED_A


def random_schema(rng: random.Random, depth: int) -> dict:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([{"type": "integer"}, {"type": "string"}, {"$ref": "#/$defs/A"}, A, B])
    names = rng.sample("abcd", rng.randint(0, 3))
    schema: dict = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    if rng.random() < 0.3:
        schema[rng.choice(["allOf", "anyOf", "oneOf"])] = [
            random_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))
        ]
    if rng.random() < 0.2:
        schema["additionalProperties"] = rng.choice([True, {"type": "integer"}])
    return schema


def random_value(rng: random.Random, depth: int) -> object:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([1, "x"])
    return {name: random_value(rng, depth - 1) for name in rng.sample("abcd", rng.randint(0, 3))}


def test_every_answer_to_the_closed_schema_satisfies_the_one_that_was_sent() -> None:
    """Closing takes answers away and adds none (oneOf apart: there one closed branch may let another one hold alone)."""
    n_valid = 0
    for seed in range(400):
        rng = random.Random(seed)
        schema = {**random_schema(rng, 3), "$defs": {"A": A}}
        if "oneOf" in json.dumps(schema):
            continue
        sent, held = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(holdable(schema))
        for _ in range(40):
            value = random_value(rng, 3)
            if held.is_valid(value):
                n_valid += 1
                assert sent.is_valid(value), (seed, schema, value)
    assert n_valid > 300


def test_unique_items_are_refused_and_not_forgotten() -> None:
    """A grammar cannot compare entries; `set[str]` fields ask for it."""
    unique = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        holdable({"type": "object", "properties": {"tags": unique}})
    assert "uniqueItems" not in holdable({**unique, "maxItems": 1})
    assert "uniqueItems" not in holdable({**unique, "uniqueItems": False})
    assert holdable({"const": {"uniqueItems": True}}) == {"const": {"uniqueItems": True}}, "a value, not a schema"


def test_depth_is_bounded() -> None:
    """A tool's parameters used to have no bound of their own."""
    schema: dict = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(GrammarError, match=str(MAX_SCHEMA_DEPTH)):
        holdable(schema)
