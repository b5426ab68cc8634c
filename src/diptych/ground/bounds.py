"""What a value may be: numbers with their bounds, flags, texts, lists of ids. One place checks them and makes them plain.

A number may come as Python's, NumPy's or any other registered kind; it leaves as an `int` or a `float`, so that nothing
behind the door meets a surprise. Booleans and strings are no numbers. The caller says which error a bad value is.

>>> Bound(int, 1, 64, "number of answers").take("n", 3, EngineError)
3
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeVar

from diptych.ground.errors import EngineError

_MAX_SHOWN = 80
_Plain = TypeVar("_Plain", str, bool)


@dataclass(frozen=True, slots=True)
class Bound:
    """The numbers a field may hold: low <= value <= high, or low < value where `is_low_open`. high None: no limit.

    what: a few words for help pages and schemas.
    """

    kind: type[int] | type[float]
    low: float
    high: float | None
    what: str
    is_low_open: bool = False
    is_optional: bool = False  # None is a value too

    def take(
        self, name: str, value: object, error: type[EngineError], *, param: str | None = None
    ) -> int | float | None:
        """`value` as a plain int or float; raises `error` with the name, the value and the limits for anything else."""
        if value is None and self.is_optional:
            return None
        number = self._plain(value)
        if number is None:
            raise error(f"{name} is {shown(value)}; it must be {self.rule}", param=param or name)
        return number

    def holds(self, value: object) -> bool:
        """Whether `value` is such a number."""
        return self._plain(value) is not None

    def _plain(self, value: object) -> int | float | None:
        number = whole(value) if self.kind is int else real(value)
        return None if number is None or not self._holds(number) else number

    def _holds(self, number: float) -> bool:
        if number in (math.inf, -math.inf):
            return False
        is_high_enough = number > self.low if self.is_low_open else number >= self.low
        return is_high_enough and (self.high is None or number <= self.high)

    @property
    def rule(self) -> str:
        """The limits in words."""
        noun = "a whole number" if self.kind is int else "a number"
        if self.is_low_open:
            most = "" if self.high is None else f" and at most {_limit(self.high)}"
            return f"{noun} greater than {_limit(self.low)}{most}"
        if self.high is None:
            return f"{noun} of at least {_limit(self.low)}"
        return f"{noun} between {_limit(self.low)} and {_limit(self.high)}"


def _limit(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def whole(value: object) -> int | None:
    """`value` as an int when it is a whole number of any integer type; None for anything else, booleans among it."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several numbers, or of floats
        return None


def real(value: object) -> float | None:
    """`value` as a float when it is a real number and not NaN; None for anything else, booleans among it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the largest float
        number = math.inf if bool(value > 0) else -math.inf  # type: ignore[operator]
    return None if math.isnan(number) else number


def exactly(kind: type[_Plain], name: str, value: object, error: type[EngineError]) -> _Plain:
    """`value` when it is of `kind`: a flag is no number, a text is nothing else."""
    if isinstance(value, kind):
        return value
    noun = "true or false" if kind is bool else "a string"
    raise error(f"{name} is {shown(value)}; it must be {noun}", param=name)


def text(name: str, value: object, error: type[EngineError], *, least: int = 0, most: int = 2**31 - 1) -> str:
    """`value` when it is a string of Unicode characters with a length within the limits."""
    words = exactly(str, name, value, error)
    if not least <= len(words) <= most:
        raise error(f"{name} has {counted(len(words), 'character')}; it must have {least} to {most}", param=name)
    if (lone := lone_surrogate(words)) is not None:
        raise error(f"{name} has {lone}; it must be valid Unicode", param=name)
    return words


def lone_surrogate(words: str) -> str | None:
    """The first character that is half of a pair, and where; None: there is none."""
    if words.isascii():
        return None
    at = next((i for i, char in enumerate(words) if "\ud800" <= char <= "\udfff"), None)
    return None if at is None else f"a lone surrogate (U+{ord(words[at]):04X}) at character {at}"


def entries(name: str, value: object, error: type[EngineError], *, rule: str = "a list") -> tuple[object, ...]:
    """The entries of a list-like `value`; None has none. Texts and mappings are not lists."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise error(f"{name} is {shown(value)}; it must be {rule}", param=name)
    try:
        return tuple(value)
    except TypeError as cause:  # a NumPy array without dimensions calls itself iterable
        raise error(f"{name} is {shown(value)}; it must be {rule}", param=name) from cause


def ids(name: str, value: object, error: type[EngineError], *, n_ids: int) -> tuple[int, ...]:
    """Token ids below `n_ids` as plain ints, from a list, a tuple, a NumPy array or a one-dimensional tensor."""
    given = entries(name, value, error)
    # on C loops where nothing has to be made plain: a prompt may hold a hundred thousand
    if set(map(type, given)) <= {int}:
        plain: Sequence[int | None] = given  # type: ignore[assignment]
    else:
        plain = tuple(whole(entry) for entry in given)
    if None not in plain and (not plain or (min(plain) >= 0 and max(plain) < n_ids)):  # type: ignore[type-var,operator]
        return tuple(plain)  # type: ignore[arg-type]
    at = next(i for i, one in enumerate(plain) if one is None or not 0 <= one < n_ids)
    raise error(
        f"{name} has token id {shown(given[at])} at place {at}; ids are whole numbers between 0 and {n_ids - 1}",
        param=name,
    )


def counted(n: float, thing: str, form: str = "") -> str:
    """A number with what it counts, in the singular where it reads as one. form: of the number, as in a format string.

    >>> counted(1, "token"), counted(0, "token"), counted(2048, "token", ","), counted(0.98, "step", ".1f")
    ('1 token', '0 tokens', '2,048 tokens', '1.0 steps')
    """
    text = format(n, form)
    return f"{text} {thing}{'s' * (text != '1')}"


def shown(value: object) -> str:
    """`value` for a message: short, and never itself the cause of an error."""
    try:
        words = str(value) if isinstance(value, Real) and not isinstance(value, bool) else repr(value)
    except Exception:  # whole numbers of 4,301 digits, and whatever a stranger's __repr__ does
        words = f"a {type(value).__name__} that cannot be shown"
    return words if len(words) <= _MAX_SHOWN else f"{words[: _MAX_SHOWN - 3]}..."
