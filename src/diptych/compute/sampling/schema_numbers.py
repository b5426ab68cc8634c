"""Numbers of JSON schemas, as far as a grammar can hold them: llguidance reads each as a double, and whole ones as 64 bits.

What it reads otherwise than it was sent would have an answer break the schema. Standard library only.

>>> narrowed({"exclusiveMinimum": 0, "maximum": 0.5})
{'maximum': 0.5, 'minimum': 1e-12}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from diptych.ground.bounds import shown
from diptych.ground.errors import GrammarError

# a grammar has a state for each remainder, 10 us and 2 KB of them when it is compiled, and no limit of llguidance counts them
MOST_REMAINDERS = 50_000
# the largest double that is a whole number of 64 bits; what lies wholly below -MOST_NUMBER ends the process that compiles it
MOST_NUMBER = 2**63 - 1024
_BESIDE = 1e-12  # of a bound that is left out itself
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def narrowed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with each bound that a grammar does not hold moved inwards to one that it does.

    A whole number that is left out is moved, too, where what is allowed begins there and leads away from 0: llguidance allows
    "0" between 0 and 0.5.
    """
    out = dict(schema)
    for (closed, opened), inwards in ((_LOW, math.inf), (_HIGH, -math.inf)):
        for name in (closed, opened):
            value = _number(out.get(name))
            # what lies beyond MOST_NUMBER on the other side allows nothing that a grammar holds; `check_numbers` refuses it
            if value is None or (value > MOST_NUMBER if inwards > 0 else value < -MOST_NUMBER):
                continue
            bound = max(value, -MOST_NUMBER) if inwards > 0 else min(value, MOST_NUMBER)
            if name == opened and bound == int(bound) and (bound >= 0 if inwards > 0 else bound <= 0):
                del out[name]
                name, bound = closed, _behind(bound, inwards)
                other = _number(out.get(closed))
                if other is not None:
                    bound = max(bound, other) if inwards > 0 else min(bound, other)
            out[name] = _nearest(bound, inwards)
    return out


def check_numbers(*schemas: object) -> None:
    """Raise GrammarError for a number that no grammar holds: in `const` and `enum`, or a bound beyond MOST_NUMBER."""
    for node in _nodes_in(list(schemas)):
        if not isinstance(node, Mapping):
            continue
        for name in (*_LOW, *_HIGH):
            value = _number(node.get(name))
            if value is not None and abs(value) > MOST_NUMBER:
                raise _not_held(name, value)
        for name in ("const", "enum"):
            for value in _numbers_in(node.get(name)):
                if not _is_held(value):
                    raise _not_held(name, value)


def _not_held(name: str, value: float) -> GrammarError:
    return GrammarError(
        f"json_schema has the number {shown(value)} for {name}, which a grammar cannot hold: "
        f"it holds doubles from -{MOST_NUMBER} to {MOST_NUMBER}",
        hint="send it as a string, or look at the number in the answer",
        param="json_schema",
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and (isinstance(value, int) or math.isfinite(value)) else None  # type: ignore[arg-type,return-value]


def _nodes_in(value: object) -> Iterator[object]:
    """A JSON value with all that is in it, lists aside; iterative, as a schema may be nested deeply."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
            continue
        if isinstance(node, Mapping):
            waiting += node.values()
        yield node


def _numbers_in(value: object) -> Iterator[float]:
    return (number for node in _nodes_in(value) if (number := _number(node)) is not None)


def _behind(bound: float, inwards: float) -> float:
    """A number that is allowed where the whole number `bound` is the first that is not."""
    beside, following = bound + math.copysign(_BESIDE, inwards), math.nextafter(float(bound), inwards)
    return max(beside, following) if inwards > 0 else min(beside, following)


def _nearest(bound: float, inwards: float) -> float:
    """The first number from `bound` on that a grammar holds; one beyond MOST_NUMBER, as it is, where there is none."""
    number = bound
    while (-number if inwards < 0 else number) <= MOST_NUMBER and not _is_held(number):
        number = float(number) if float(number) != number else math.nextafter(number, inwards)
        if number < bound if inwards > 0 else number > bound:
            number = math.nextafter(number, inwards)
        number = int(number) if number.is_integer() else number
    return number


def _is_held(number: float) -> bool:
    """Whether llguidance reads it as it is: it multiplies all digits and a power of ten, both as doubles."""
    if abs(number) > MOST_NUMBER:
        return False
    if isinstance(number, int):
        return float(number) == number
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    read, places = float(int("".join(map(str, digits)))), int(exponent)
    while places < -308:
        read, places = read / 1e308, places + 308
    power = float(f"1e{abs(places)}")
    return (read / power if places < 0 else read * power) == abs(number)


def check_multiples(*schemas: object) -> None:
    """Raise GrammarError for more than MOST_REMAINDERS of all `multipleOf` together."""
    if sum({_n_remainders(schema) for schema in schemas}) > MOST_REMAINDERS:
        raise GrammarError(
            f"json_schema has numbers for multipleOf whose least common multiple, in units of their last digit, is above "
            f"{MOST_REMAINDERS}, which a grammar cannot hold",
            hint="leave multipleOf out, and round or refuse the number in the answer",
            param="json_schema",
        )


def _n_remainders(schema: object) -> int:
    """Of what a value is divided by: any two of a schema may meet in one value (allOf, $ref). Above 2^31 it may be more."""
    # a digit's place (0.01) adds none
    found = [(number, places) for number, places in _multiples(schema) if number > 1 or not places]
    most = max((places for _, places in found), default=0)
    common = 1
    for number, places in found:
        common = math.lcm(common, number * 10 ** (most - places))
        if common > 2**31:
            return common
    digit = int(str(common).rstrip("0"))
    return digit if digit < 10 else common  # zeros at the end are looked for at the end of a number


def _multiples(schema: object) -> Iterator[tuple[int, int]]:
    """Every number for multipleOf, as a whole one and how many of its digits are decimal places."""
    for node in _nodes_in(schema):
        value = node.get("multipleOf") if isinstance(node, Mapping) else None
        if isinstance(value, float) and 0 < value < math.inf and not value.is_integer():
            _, digits, exponent = Decimal(str(value)).as_tuple()
            yield int("".join(map(str, digits))), -int(exponent)
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            yield int(value), 0
