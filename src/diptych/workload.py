"""Seeded load: when requests arrive, how long they are, what prefixes they share; and readers of published traces.

    spec = WorkloadSpec(n_requests=32, prompt=LengthRange.parse("64:512"), output=LengthRange.parse("64:128"),
                        rate_per_s=2.0, seed=1)
    requests = requests_of(spec, vocab_size=32000)      # or, item by item:
    for item in make_workload(spec):
        token_ids = token_ids_of(item, vocab_size=32000, seed=1)

Arrivals are a true Poisson process (exponential gaps), or gamma gaps of the same mean; the schedule is never rescaled to
end at n / rate, which would make it less bursty than the process it claims to be. Arrivals, prompt lengths, output
lengths and prefixes draw from separate streams, so changing one leaves the others as they are.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from diptych.ground.bounds import Bound, shown, whole
from diptych.ground.config import at_least
from diptych.ground.errors import ConfigError
from diptych.ground.request import AdapterRef, Request, SamplingParams

Row = TypeVar("Row")

MOONCAKE_BLOCK_TOKENS = 512  # tokens that one hash id of a mooncake trace stands for
MOST_TOKENS = 2**31 - 1  # of one prompt or answer in a trace: more is a damaged line
# beyond these, gaps are drawn for ever, are all 0, or are no times
RATE = Bound(float, 1e-9, 1e9, "requests per second", is_optional=True)
BURSTINESS = Bound(float, 1e-3, 1e6, "shape of the gaps")
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FORMATS = f"a trace is CSV with the columns {','.join(_COLUMNS)}, or one JSON object a line"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRange:
    """Whole numbers from `low` to `high`, both included, all equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        at_least("shortest length", self.low, 1)
        at_least("longest length", self.high, self.low)

    @staticmethod
    def parse(text: str, name: str = "length range") -> LengthRange:
        """A range from "64:512", or from "64" for one length. ConfigError for anything else, told of `name`: an option's."""
        parts = text.split(":")
        are_numbers = len(parts) <= 2 and all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts)
        if not are_numbers or not 1 <= int(parts[0]) <= int(parts[-1]):
            raise ConfigError(f"{name} is {shown(text)}; it must be N or LOW:HIGH with 1 <= LOW <= HIGH, as in 64:512")
        return LengthRange(low=int(parts[0]), high=int(parts[-1]))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadItem:
    """One request to send: due at `at_s` after the start.

    The prompt begins with the content of `prefix_ids`, `prefix_block_tokens` tokens each (the last one perhaps cut);
    items with the same leading ids share those tokens. What is left is the item's own. adapter: that answers it.
    """

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A synthetic load. rate_per_s None: everything is due at once.

    burstiness: shape of the gamma gaps, as in vLLM's option; 1 is Poisson, below 1 burstier, above 1 more regular.
    shared_prefix_tokens are put before each prompt (on top of its own length), drawn among `n_prefixes` equally.
    """

    n_requests: int
    prompt: LengthRange
    output: LengthRange
    rate_per_s: float | None = None
    burstiness: float = 1.0
    shared_prefix_tokens: int = 0
    n_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        at_least("n_requests", self.n_requests, 1)
        at_least("shared_prefix_tokens", self.shared_prefix_tokens, 0)
        at_least("n_prefixes", self.n_prefixes, 1)
        RATE.take("rate_per_s", self.rate_per_s, ConfigError)
        BURSTINESS.take("burstiness", self.burstiness, ConfigError)


def arrivals(rate_per_s: float | None, *, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Instants after the start, without end: cumulated exponential or gamma gaps with mean 1 / rate_per_s.

    The first one comes after a gap too, as in the process itself. rate_per_s None: all at 0.
    """
    rng = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        if rate_per_s is not None and burstiness == 1.0:
            at_s += rng.expovariate(rate_per_s)
        elif rate_per_s is not None:
            # the mean of a gamma gap is shape * scale
            at_s += rng.gammavariate(burstiness, 1.0 / (burstiness * rate_per_s))
        yield at_s


def make_workload(spec: WorkloadSpec) -> tuple[WorkloadItem, ...]:
    """The load of a spec; the same spec gives the same load on every machine."""
    return tuple(items_of(spec))


def items_of(spec: WorkloadSpec) -> Iterator[WorkloadItem]:
    """The same one after the other: a load of millions needs no memory."""
    prompts = random.Random(f"prompts {spec.seed}")
    outputs = random.Random(f"outputs {spec.seed}")
    prefixes = random.Random(f"prefixes {spec.seed}")
    times_s = arrivals(spec.rate_per_s, burstiness=spec.burstiness, seed=spec.seed)
    for index, at_s in enumerate(islice(times_s, spec.n_requests)):
        yield WorkloadItem(
            index=index,
            at_s=at_s,
            prompt_tokens=spec.prompt.draw(prompts) + spec.shared_prefix_tokens,
            output_tokens=spec.output.draw(outputs),
            prefix_ids=(prefixes.randrange(spec.n_prefixes),) if spec.shared_prefix_tokens else (),
            prefix_block_tokens=spec.shared_prefix_tokens,
        )


def token_ids_of(item: WorkloadItem, *, vocab_size: int, seed: int = 0, low_id: int = 0) -> tuple[int, ...]:
    """A prompt of random tokens in [low_id, vocab_size) with the item's length and shared prefixes."""
    token_ids: list[int] = []
    for prefix_id in item.prefix_ids:
        token_ids += _drawn(f"prefix {seed} {prefix_id}", item.prefix_block_tokens, low_id, vocab_size)
    del token_ids[item.prompt_tokens :]
    rng = random.Random(f"prompt {seed} {item.index}")  # of nobody else, so not kept
    token_ids.extend(rng.randrange(low_id, vocab_size) for _ in range(item.prompt_tokens - len(token_ids)))
    return tuple(token_ids)


@lru_cache(maxsize=64)
def _drawn(seed: str, n_tokens: int, low_id: int, vocab_size: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(low_id, vocab_size) for _ in range(n_tokens))


def requests_of(spec: WorkloadSpec, *, vocab_size: int, token_seed: int = 0, name: str = "load") -> list[Request]:
    """The load as greedy requests of exactly the drawn lengths, in order of arrival_s, which counts from 0.

    Another token_seed gives the same arrivals and lengths with other tokens.
    """
    return [
        Request(
            request_id=f"{name}-{item.index}",
            prompt_token_ids=token_ids_of(item, vocab_size=vocab_size, seed=token_seed),
            sampling=SamplingParams(max_tokens=item.output_tokens, temperature=0.0, ignore_eos=True),
            arrival_s=item.at_s,
        )
        for item in make_workload(spec)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace file that was read through once, so every line of it is sound. Iterating reads it again, one item at a time.

    shares_prefixes: some prompt names its blocks. is_spread: requests are spread over their tick (`spread_ticks`), as those of
    JSON lines are. in_memory: the items themselves, where the file has them out of order.
    """

    path: Path
    n_requests: int
    shares_prefixes: bool
    is_spread: bool = False
    first_s: float = 0.0
    in_memory: tuple[WorkloadItem, ...] | None = None

    def __iter__(self) -> Iterator[WorkloadItem]:
        """In order of time, the first at 0."""
        items = self.in_memory
        return islice(self._streamed() if items is None else items, self.n_requests)

    def _streamed(self) -> Iterator[WorkloadItem]:
        items = _items(_entries(self.path), self.first_s)
        return spread_ticks(items) if self.is_spread else items


def open_trace(path: Path, *, limit: int | None = None) -> Trace:
    """A trace of any format known here, told by its first line. limit: only the first so many of its requests.

    Raises ConfigError for another format, with the line for one that cannot be read, and for a trace without requests.
    """
    n, last_s, first_s, is_in_order, shares = 0, -math.inf, math.inf, True, False
    if path.is_file() and path.stat().st_size == 0:
        raise ConfigError(f"{path.name} is empty; {_FORMATS}")
    for entry in _entries(path):
        n += 1
        first_s = min(first_s, entry.at_s)
        is_in_order = is_in_order and entry.at_s >= last_s
        last_s = entry.at_s
        shares = shares or bool(entry.hash_ids)
    if not n:
        raise ConfigError(f"{path.name} has 0 requests; a trace needs at least 1")
    is_spread, items = _is_mooncake(path), None
    if not is_in_order:
        entries = _items(sorted(_entries(path), key=lambda entry: entry.at_s), first_s)
        items = tuple(spread_ticks(entries) if is_spread else entries)
    n = n if limit is None else min(n, limit)
    return Trace(path=path, n_requests=n, shares_prefixes=shares, is_spread=is_spread, first_s=first_s, in_memory=items)


def _is_mooncake(path: Path) -> bool:
    return _head(path).startswith("{")


def _head(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        return next((line.lstrip() for line in file if line.strip()), "")


def _entries(path: Path) -> Iterator[_Entry]:
    try:
        yield from _mooncake_entries(path) if _is_mooncake(path) else _azure_entries(path)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the trace {path}: it is no UTF-8 text ({error})") from None


def spread_ticks(items: Iterable[WorkloadItem]) -> Iterator[WorkloadItem]:
    """Requests of one instant spread evenly until the next instant: mooncake's times are ticks of about 3 s.

    The last instant's keep their time.
    """
    groups = ((at_s, list(group)) for at_s, group in groupby(items, key=lambda item: item.at_s))
    group = next(groups, None)
    while group is not None:
        (at_s, tick), group = group, next(groups, None)
        gap_s = 0.0 if group is None else (group[0] - at_s) / len(tick)
        yield from (replace(item, at_s=at_s + k * gap_s) for k, item in enumerate(tick))


def _azure_entries(path: Path) -> Iterator[_Entry]:
    """The Azure LLM inference traces: columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restval="")  # so that a cell that is not there is none that can be read
        try:
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise ConfigError(f"{path.name} has no column {', '.join(sorted(missing))}", hint=_FORMATS)
            yield from _parsed(path, ((reader.line_num, row) for row in reader), _azure_entry)
        except csv.Error as error:
            words = f"{path.name} line {reader.line_num + 1} cannot be read: {error}"
            raise ConfigError(words, hint=_FORMATS) from error


def _azure_entry(row: Mapping[str | Any, str | Any]) -> _Entry:
    if any(more := row.get(None, ())):  # cells that no column has a name for
        raise ValueError(f"it has {len(more)} more cells than the first line has columns")
    return _Entry(
        at_s=_timestamp_s(row["TIMESTAMP"]),
        prompt_tokens=_cell(row, "ContextTokens"),
        output_tokens=_cell(row, "GeneratedTokens"),
    )


def _cell(row: Mapping[str | Any, str | Any], name: str) -> int:
    text = row[name].strip()
    return _whole(name, int(text) if text.isdecimal() and len(text) < 20 else text)


def _mooncake_entries(path: Path) -> Iterator[_Entry]:
    """Mooncake traces: one JSON object a line with timestamp (ms), input_length, output_length and hash_ids.

    A hash id stands for 512 prompt tokens, shared by all requests that have it.
    """
    with path.open(encoding="utf-8-sig") as file:
        rows = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        yield from _parsed(path, rows, _mooncake_entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One line of a trace, before times are shifted to start at 0. ValueError when it is impossible."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_s) and self.at_s >= 0.0):
            raise ValueError(f"its time is {self.at_s:g} s; it must be 0 or later")
        for name, tokens in (("prompt", self.prompt_tokens), ("answer", self.output_tokens)):
            if not 0 <= tokens <= MOST_TOKENS:
                raise ValueError(f"its {name} has {tokens} tokens; it must be from 0 to {MOST_TOKENS}")


def _parsed(path: Path, rows: Iterable[tuple[int, Row]], parse: Callable[[Row], _Entry]) -> Iterator[_Entry]:
    for number, row in rows:
        try:
            yield parse(row)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            words = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path.name} line {number} cannot be read: {words}") from error


def _mooncake_entry(line: str) -> _Entry:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    return _Entry(
        at_s=_milliseconds(row["timestamp"]) / 1000.0,
        prompt_tokens=_whole("input_length", row["input_length"]),
        output_tokens=_whole("output_length", row["output_length"]),
        hash_ids=_hash_ids(row.get("hash_ids")),
    )


def _whole(name: str, value: object) -> int:
    """ValueError for what is no whole number: 12.7 tokens, or true, are of a damaged line."""
    number = whole(value)
    if number is None:
        raise ValueError(f"its {name} is {shown(value)}; it must be a whole number")
    return number


def _milliseconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"its timestamp is {shown(value)}; it must be a number of milliseconds")
    return float(value)


def _hash_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | None):
        raise ValueError(f"its hash_ids is {shown(value)}; it must be a list of whole numbers")
    return tuple(_whole("hash id", one) for one in value or ())


def _timestamp_s(text: str) -> float:
    """Seconds since the epoch of an ISO instant with any number of fractional digits (Azure writes seven), in UTC where it
    names no zone.
    """
    head, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(head + rest[len(digits) :])
    fraction_s = float(f"0.{digits}") if dot and digits else 0.0
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.timestamp() + fraction_s


def _items(entries: Iterable[_Entry], first_s: float) -> Iterator[WorkloadItem]:
    """Entries in order as items, the first at 0; those without prompt or output (they exist) count as one token."""
    for index, entry in enumerate(entries):
        yield WorkloadItem(
            index=index,
            at_s=entry.at_s - first_s,
            prompt_tokens=max(1, entry.prompt_tokens),
            output_tokens=max(1, entry.output_tokens),
            prefix_ids=entry.hash_ids,
            prefix_block_tokens=MOONCAKE_BLOCK_TOKENS if entry.hash_ids else 0,
        )
