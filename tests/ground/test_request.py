"""What a request may hold: every value is plain and bounded before anything runs."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from diptych.ground.errors import BadSampling, RequestError
from diptych.ground.request import BOUNDS, FreeReasoning, Request, SamplingParams, StructuredSpec

NUMBERS = [one.name for one in fields(SamplingParams) if one.name in BOUNDS and one.name != "logit_bias"]
WHOLE = [name for name in NUMBERS if BOUNDS[name].kind is int]


class Hostile:
    """An object whose every answer is an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


STRANGE = [None, "1", b"1", True, 1.5, float("nan"), float("inf"), -float("inf"), 10**5000, -(10**5000), 1e308, [], [1],
           (), {}, {"a": 1}, {1}, object(), Hostile(), 1j, np.nan, np.array([1, 2]), np.array(1.5), lambda: 1]  # fmt: skip


def test_one_stop_string_is_one_stop() -> None:
    """`stop="END"` was read as the three stops E, N and D."""
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["END", "ST"]).stop == ("END", "ST")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [1.5, 2.0, True, "2", np.float32(2.0), np.True_, float("nan"), [2]])
def test_what_is_no_whole_number_is_refused(name: str, value: object) -> None:
    """`seed=1.5` killed the engine, and with it the requests of others; `top_k=2.5` passed."""
    with pytest.raises(BadSampling, match=f"{name} is") as refusal:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refusal.value.param == name


@pytest.mark.parametrize("value", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_of_any_library_pass_and_are_kept_plain(name: str, value: object) -> None:
    """NumPy's integers did not pass, though every index in a data pipeline is one."""
    kept = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
    assert kept == 2
    assert type(kept) is int


@pytest.mark.parametrize("value", [1, np.float32(1.0), np.float64(1.0), Fraction(1)])
def test_real_numbers_of_any_library_are_kept_plain(value: object) -> None:
    """What comes behind the door does arithmetic with floats only."""
    kept = SamplingParams(temperature=value, top_p=value, min_p=value, repetition_penalty=value)  # type: ignore[arg-type]
    assert {type(one) for one in (kept.temperature, kept.top_p, kept.min_p, kept.repetition_penalty)} == {float}


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_hold_at_both_ends(name: str) -> None:
    """The limits of the table are the limits of the constructor."""
    bound = BOUNDS[name]
    beside = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
    step = 1 if bound.kind is int else 1e-6
    assert bound.high is not None
    SamplingParams(**{name: bound.high}, **beside)  # type: ignore[arg-type]
    SamplingParams(**{name: bound.low + (step if bound.is_low_open else 0)}, **beside)  # type: ignore[arg-type]
    for outside in (bound.high + step, bound.low if bound.is_low_open else bound.low - step):
        with pytest.raises(BadSampling, match=f"{name} is"):
            SamplingParams(**{name: outside})  # type: ignore[arg-type]


def test_limits_are_written_in_full() -> None:
    """A message said "between 1 and 2.14748e+09"."""
    with pytest.raises(BadSampling, match="between 0 and 2147483647"):
        SamplingParams(max_tokens=-1)


@pytest.mark.parametrize("name", [one.name for one in fields(SamplingParams)])
def test_no_field_takes_anything_strange(name: str) -> None:
    """A field that were not checked would fail in the middle of a step, and take others with it."""
    for value in STRANGE:
        refusals: list[BadSampling] = []
        try:
            kept = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
        except BadSampling as refusal:
            refusals.append(refusal)
        else:
            kinds = str if name == "prediction" else int | float | bool | tuple | MappingProxyType
            assert kept is None or isinstance(kept, kinds)
        assert all(one.param == name and len(str(one)) < 300 for one in refusals)
    with pytest.raises(BadSampling):
        SamplingParams(**{name: object()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": [1]}, "stop has the entry 1"),
        ({"stop": b"END"}, "stop is b.END.; it must be a string or a list of strings"),
        ({"stop": ""}, "stop has 0 characters"),
        ({"stop": "\ud800"}, "lone surrogate"),
        ({"stop": "é" * 200}, "400 bytes"),
        ({"stop": ["a"] * 17}, "17 entries"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"stop_token_ids": [True]}, "token id True"),
        ({"stop_token_ids": [2**31]}, "token id 2147483648"),
        ({"stop_token_ids": range(65)}, "65 entries"),
        ({"logit_bias": {"5": 1.0}}, "the key '5'"),
        ({"logit_bias": {1.0: 1.0}}, "the key 1.0"),
        ({"logit_bias": {-1: 1.0}}, "the key -1"),
        ({"logit_bias": {5: "1"}}, "logit_bias of token 5 is '1'"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": [(5, 1.0)]}, "must map token ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 entries"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; it must be at most max_tokens, which is 8"),
        ({"structured": "json"}, "must be a StructuredSpec"),
    ],
)
def test_lists_and_mappings_are_refused_by_entry(values: dict[str, object], message: str) -> None:
    """The message names the entry that is wrong."""
    with pytest.raises(BadSampling, match=message.replace("(", r"\(")):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_options_are_copied_and_sent_to_other_processes() -> None:
    """The read-only mapping of biases could be neither, so `copy.deepcopy` of options raised a TypeError."""
    given = SamplingParams(logit_bias={5: -1.0}, stop="END", seed=3, max_tokens=7)
    for copied in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):  # noqa: S301  (our own bytes)
        assert copied == given
        assert copied.logit_bias == {5: -1.0}
        with pytest.raises(TypeError):
            copied.logit_bias[6] = 1.0


def test_what_is_kept_does_not_change_with_what_was_given() -> None:
    """A caller's list that changes later may not change a running request."""
    stop, stop_ids, biases = ["END"], np.array([3, 4]), {np.int64(5): np.float32(0.5)}
    kept = SamplingParams(stop=stop, stop_token_ids=stop_ids, logit_bias=biases)  # type: ignore[arg-type]
    stop.append("x")
    stop_ids[0] = 9
    biases.clear()
    assert (kept.stop, kept.stop_token_ids, dict(kept.logit_bias)) == (("END",), (3, 4), {5: 0.5})
    assert [type(one) for one in (*kept.stop_token_ids, *kept.logit_bias)] == [int, int, int]
    assert isinstance(kept.logit_bias, Mapping)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": 1, "source": "a"},
        {"kind": "regex", "source": ["a"]},
        {"kind": "regex", "source": "\ud800"},
        {"kind": "regex", "source": "a", "reasoning": "<think>"},
    ],
)
def test_constraints_are_text(values: dict[str, object]) -> None:
    """They are keys of a cache: a list as the source would be a TypeError deep inside, and a lone surrogate was."""
    with pytest.raises(BadSampling):
        StructuredSpec(**values)  # type: ignore[arg-type]
    with pytest.raises(BadSampling):
        FreeReasoning(begin=None, end=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["request_id", "sampling", "arrival_s", "priority", "cache_salt", "prompt_token_ids"])
def test_no_field_of_a_request_takes_anything_strange(name: str) -> None:
    """A salt that cannot be encoded, or a priority that is text, would be met by the scheduler, with others in line."""
    good: dict[str, object] = {
        "request_id": "a",
        "prompt_token_ids": (1,),
        "sampling": SamplingParams(),
        "arrival_s": 0.0,
    }
    for value in (*STRANGE, "\ud800", "", "x" * 300):
        with contextlib.suppress(RequestError):
            Request(**(good | {name: value}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=name.removesuffix("_token_ids")):
        Request(**(good | {name: object()}))  # type: ignore[arg-type]
