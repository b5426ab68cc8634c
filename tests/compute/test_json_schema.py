"""Objects of a schema are closed where that cannot contradict it; what no grammar can hold is refused."""

import json
import random
import time

import jsonschema_rs
import pytest

from diptych.compute.sampling.json_schema import MAX_SCHEMA_DEPTH, holdable
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


def test_many_refs_to_one_schema_are_looked_at_once() -> None:
    """Each spelling of a pointer had the large schema behind it walked again: 5 s for 46 KB, before any clock ran."""
    alternatives = [{"properties": {}}] * 1200
    spellings = [f"#{number}" for number in range(1200)]  # an anchor leads to the root here
    schema = {"allOf": [{"anyOf": alternatives}, *({"$ref": one} for one in spellings)]}
    begin_s = time.process_time()
    holdable(json.loads(json.dumps(schema)))
    assert time.process_time() - begin_s < 1.0


def test_an_entry_whose_number_is_none_is_no_entry() -> None:
    """int() refuses texts of more than 4300 digits, which was a ValueError for whoever sent one."""
    schema = {"allOf": [A, {**B, "allOf": [{"$ref": f"#/allOf/{'9' * 5000}"}]}]}
    assert holdable(schema) == schema


INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    "schema",
    [
        {**INTEGER, "multipleOf": 50_021},
        {**INTEGER, "multipleOf": 31_536_000},  # took a minute, and 2 GB
        {**INTEGER, "multipleOf": 10**400},
        {**NUMBER, "multipleOf": 123456.78},
        {"allOf": [{**INTEGER, "multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]},
        {"properties": {"x": {**INTEGER, "multipleOf": 997, "$ref": "#/$defs/y"}}, "$defs": {"y": {"multipleOf": 991}}},
    ],
)
def test_multiples_that_a_grammar_cannot_hold_are_refused(schema: dict) -> None:
    """Whoever compiles counts remainders without a limit: 43 bytes of a client took a server's memory."""
    with pytest.raises(GrammarError, match="multipleOf"):
        holdable(schema)


def test_usual_multiples_are_held() -> None:
    fields = {f"x{i}": {**NUMBER, "multipleOf": one} for i, one in enumerate((5, 60, 1e-9, 0.25, 1000.0, 10**9))}
    for schema in (*fields.values(), {**INTEGER, "multipleOf": 49_999}, {"properties": {"a": {"multipleOf": True}}}):
        assert holdable(schema)["multipleOf" if "multipleOf" in schema else "properties"]
    money = {
        "properties": {"sum": {**NUMBER, "multipleOf": 0.01}, "lots": {**INTEGER, "multipleOf": 100}, "rest": NUMBER}
    }
    assert holdable(money)["properties"] == money["properties"]
