"""Numbers in schemas: what a compiler reads otherwise than it was sent is narrowed or refused, and ends no process."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from diptych.compute.sampling.json_schema import holdable
from diptych.compute.sampling.schema_numbers import MOST_NUMBER, check_numbers, narrowed
from diptych.compute.sampling.structured import _grammar_text
from diptych.ground.errors import GrammarError
from diptych.ground.request import StructuredSpec

NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}
BYTES = llguidance.LLTokenizer("byte")


def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the compiled schema admits a whole text."""
    grammar = _grammar_text(StructuredSpec(kind="json_schema", source=json.dumps(schema)))()
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {**INTEGER, "enum": [-(2**63) + 1]},
        {"properties": {"a": {"const": {"b": [-(2**63)]}}}},
        {**INTEGER, "minimum": -1e300, "maximum": -1e19},
        {"$ref": "#/aside", "aside": {"allOf": [{**INTEGER, "maximum": -(2**63)}, {"minimum": -(2**64)}]}},
    ],
)
def test_numbers_of_more_than_64_bits_end_no_process(schema: dict) -> None:
    """The compiler negates the smallest whole number of 64 bits and calls itself without end: 31 bytes ended a server."""
    with pytest.raises(GrammarError, match="a grammar cannot hold"):
        holdable(schema)
    with pytest.raises(GrammarError, match="a grammar cannot hold"):
        _grammar_text(StructuredSpec(kind="grammar", source=f"start: %json {json.dumps(schema)}"))


@pytest.mark.parametrize(
    "value", [2**53 + 1, 1234567890123456789, 10**20, 10**400, -213529.15715275402, [{"id": 2**60 + 1}]]
)
def test_values_that_would_be_written_as_others_are_refused(value: object) -> None:
    """An id of 19 digits was written as the double beside it."""
    for schema in ({"const": value}, {**INTEGER, "enum": [1, value]}):
        with pytest.raises(GrammarError, match="a grammar cannot hold"):
            holdable(schema)


def test_values_that_are_held_are_written_as_they_are() -> None:
    values = [0, -1, 2**53, 2**62, -MOST_NUMBER, 0.1, 3.141592653589793, -2.5e-7, 1e15, True, None]
    holdable({"enum": values})
    for value in values:
        assert takes({"enum": values}, json.dumps(value)) or isinstance(value, float), value
        assert not takes({"const": value}, "7")


def test_bounds_of_64_bits_are_held() -> None:
    """What int64 is in many generated schemas was refused, and 2^53 + 1 was a bound one lower."""
    int64 = {**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1}
    for text in ("0", "-1", str(-MOST_NUMBER), str(MOST_NUMBER)):
        assert takes(int64, text)
    assert not takes(int64, str(-(2**63) - 1))
    assert not takes({**INTEGER, "minimum": 2**53 + 1, "maximum": 2**53 + 2}, str(2**53))
    assert takes({**INTEGER, "minimum": 2**53 + 1, "maximum": 2**53 + 2}, str(2**53 + 2))
    with pytest.raises(GrammarError, match="minimum"):
        holdable({**INTEGER, "minimum": 2**63, "maximum": 2**64})


@pytest.mark.parametrize(
    ("bounds", "bad", "good"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.25"),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, "3", "3.1"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "-0", "-0.5"),
        ({"exclusiveMaximum": -9, "exclusiveMinimum": -9.9}, "-9", "-9.2"),
        ({"exclusiveMinimum": 2**53, "maximum": 2**53 + 4}, str(2**53), str(2**53 + 2)),
    ],
)
def test_a_whole_number_that_is_left_out_is_not_written(bounds: dict, bad: str, good: str) -> None:
    """Above 0 and up to 0.5, "0" was a number."""
    assert not takes({**NUMBER, **bounds}, bad)
    assert takes({**NUMBER, **bounds}, good)
    assert takes({**INTEGER, "exclusiveMinimum": 0, "maximum": 9}, "1")


def test_narrowed_bounds_allow_nothing_that_those_sent_do_not() -> None:
    rng = random.Random(5)
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    near = [0, 1, -1, 5, 0.5, -0.5, 9.9, 2**53, 2**53 + 1, 2**62 + 1, -(2**63), 2**63 - 1, 1e300, -(10**30), 0.1 + 0.2]
    for _ in range(2000):
        sent = {name: rng.choice(near) for name in names if rng.random() < 0.5}
        held = narrowed(sent)
        before, after = jsonschema_rs.validator_for(sent), jsonschema_rs.validator_for(held)
        for value in (*near, *(value + 1 for value in near), *(value - 1 for value in near), 1e-6, -1e-6):
            assert before.is_valid(value) or not after.is_valid(value), (sent, held, value)
        assert narrowed(held) == held
    usual = {"minimum": 0, "maximum": 1, "exclusiveMaximum": 100, "multipleOf": 0.01, "exclusiveMinimum": True}
    assert narrowed(usual) == usual


def test_data_and_names_are_no_numbers_of_a_schema() -> None:
    check_numbers(
        {"properties": {"minimum": {"type": "string"}}, "default": 10**30, "const": float("nan")}, [], None, 3
    )


def test_what_the_compiler_would_hold_less_by_is_left_out() -> None:
    """A schema could switch off, by a keyword of the compiler, that it holds at all."""
    assert holdable({"x-guidance": {"lenient": True}, **NUMBER}) == NUMBER
