"""The cheapest setup that meets a service level at a traffic, with a reason for each number.

Steady state of one instance with prefills and decodes in one pool, at arrival rate r: prefills take a share r t_pf of
the time, so a token takes t_dec(B) / (1 - r t_pf), and Little's law gives B = r OSL TPOT. Time to first token is one
prefill, half a decode step, and the wait behind other prefills (M/D/1; the 95th percentile is three mean waits).
A verdict is given only when the whole interval of the prediction lies on one side of the limit.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.memory import capacity_of
from diptych.cost.roofline import compute_dtype
from diptych.cost.setup import Setup
from diptych.ground.bounds import shown
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.ground.specs import Flag, StepCost
from diptych.models.spec import ModelSpec

TRIED_TP = (1, 2, 4, 8)
MAX_INSTANCES = 64
MAX_LOAD = 0.9  # share of time in prefills beyond which the queue is not stable in practice
MAX_BATCH = 4096  # sequences of one instance
MAX_ROUNDS = 40
MOST_TOKENS = 10**9  # of a prompt or an answer: no context is as long
TAIL_WAITS = 3.0  # 95th percentile of an exponential tail, in mean waits


class Judgement(Enum):
    """Whether a setup meets the limits."""

    MEETS = "meets"
    UNDECIDED = "undecided"
    MISSES = "misses"


class End(Enum):
    """Which end of a predicted interval to reckon with."""

    FAST = "low_s"
    MIDDLE = "total_s"
    SLOW = "high_s"

    def of(self, cost: StepCost) -> float:
        """Seconds of a step at this end."""
        return float(getattr(cost, self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A service level and a traffic. ttft_s is the 95th percentile, tpot_s the mean."""

    ttft_s: float
    tpot_s: float
    requests_per_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The steady state of one instance."""

    batch: float
    ttft_s: float
    tpot_s: float
    prefill_s: float
    prefill_share: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """`instances` copies of a setup against the limits. usd_per_hour None: no price known."""

    setup: Setup
    instances: int
    devices: int
    usd_per_hour: float | None
    verdict: Judgement
    reason: str
    low: Load | None
    middle: Load | None
    high: Load | None
    max_batch: int

    @property
    def rank(self) -> tuple[float, int, float]:
        """Cheapest first; without prices, fewest devices; then the most precise weights."""
        price = math.inf if self.usd_per_hour is None else self.usd_per_hour
        return price, self.devices, -self.setup.quant.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The cheapest setup that surely meets the limits, cheaper ones that might, and why the others do not."""

    ask: Ask
    best: Candidate | None
    best_unquantised: Candidate | None
    undecided: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    unmeasured: tuple[str, ...]


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def parse_ask(text: str) -> Ask:
    """Read ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200. ConfigError names the part that is wrong."""
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (word.strip().lower() for word in part.partition("="))
        if key not in ("ttft", "tpot", "rate", "in", "out") or not value:
            raise ConfigError(
                f"cannot read {part.strip()!r} in --ask",
                hint="for example ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200",
            )
        if key in parts:
            raise ConfigError(f"--ask says {key} twice: {parts[key]} and {value}", hint="give one of them")
        parts[key] = value
    missing = [key for key in ("ttft", "tpot", "rate", "in", "out") if key not in parts]
    if missing:
        raise ConfigError(f"--ask does not say {', '.join(missing)}")
    return Ask(
        ttft_s=_duration_s(parts["ttft"], "ttft"),
        tpot_s=_duration_s(parts["tpot"], "tpot"),
        requests_per_s=parse_rate(parts["rate"]),
        input_tokens=_count(parts["in"], "in"),
        output_tokens=_count(parts["out"], "out"),
    )


def parse_duration_s(text: str, what: str) -> float:
    """Seconds from 500ms, 0.5s or 2min. ConfigError when it is none of these or not positive."""
    return _duration_s(text.strip().lower(), what)


def _duration_s(text: str, what: str) -> float:
    # a bare number would be read as milliseconds by one half of its writers and as seconds by the other
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min)", text)
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0.0 < value < math.inf:
        raise ConfigError(
            f"{what} is {shown(text)}; it must be a positive number with its unit (us, ms, s or min), such as 500ms"
        )
    return value


def parse_rate(text: str) -> float:
    """Requests per second from 3/s, 40/min or 900/h; a bare number is per second. ConfigError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(s|min|h))?", text)
    value = float(found[1]) / {"s": 1.0, "min": 60.0, "h": 3600.0}[found[2] or "s"] if found else 0.0
    if not 0.0 < value < math.inf:
        raise ConfigError(
            f"rate is {shown(text)}; it must be a positive number without an exponent: 3/s, 40/min or 900/h"
        )
    return value


def _count(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) <= MOST_TOKENS:
        raise ConfigError(f"{what} is {shown(text)}; it must be a whole number of tokens, 1 to {MOST_TOKENS:,}")
    return int(text)


def size(
    setups: Iterable[Setup], ask: Ask, *, prices: Mapping[str, float], budget_usd_per_hour: float | None = None
) -> Answer:
    """Judge every setup at its smallest sufficient number of instances and pick the cheapest.

    ConfigError where no model of theirs has a context that long: no device would change that.
    """
    setups = list(setups)
    _refuse_beyond_context([setup.model for setup in setups], ask)
    candidates = [candidate for setup in setups for candidate in judge(setup, ask, prices=prices)]
    if budget_usd_per_hour is not None:
        candidates = [_within(candidate, budget_usd_per_hour) for candidate in candidates]
    meeting = sorted((c for c in candidates if c.verdict is Judgement.MEETS), key=lambda c: c.rank)
    best = meeting[0] if meeting else None
    plain = [c for c in meeting if c.setup.quant.weight_bytes >= 2.0]
    undecided = sorted((c for c in candidates if c.verdict is Judgement.UNDECIDED), key=lambda c: c.rank)
    if best is not None:
        undecided = [c for c in undecided if c.rank < best.rank]
    return Answer(
        ask=ask,
        best=best,
        best_unquantised=plain[0] if plain and plain[0] is not best else None,
        undecided=tuple(undecided[:5]),
        rejected=tuple(c for c in candidates if c.verdict is Judgement.MISSES),
        unmeasured=unmeasured(best or (undecided[0] if undecided else None), ask, prices),
    )


def _refuse_beyond_context(models: Sequence[ModelSpec], ask: Ask) -> None:
    tokens = ask.input_tokens + ask.output_tokens
    longest = max(models, key=lambda model: model.max_context_tokens, default=None)
    if longest is not None and tokens > longest.max_context_tokens:
        raise ConfigError(
            f"a prompt and its answer are {tokens} tokens; {longest.name} accepts at most {longest.max_context_tokens}",
            hint="lower in or out of --ask",
        )


def _within(candidate: Candidate, budget: float) -> Candidate:
    price = candidate.usd_per_hour
    if price is None or price <= budget or candidate.verdict is Judgement.MISSES:
        return candidate
    return replace(candidate, verdict=Judgement.MISSES, reason=f"costs {price:.2f} USD/h; the budget is {budget:.2f}")


def judge(setup: Setup, ask: Ask, *, prices: Mapping[str, float]) -> list[Candidate]:
    """The fewest instances that surely meet the limits, and fewer that might."""
    context = ask.input_tokens + ask.output_tokens
    limit = setup.model.max_context_tokens
    if limit is not None and context > limit:
        return [_rejected(setup, prices, f"{context} tokens exceed the model's context of {limit}")]
    max_batch = capacity_of(setup, context_tokens=context, batch=1).max_batch
    if max_batch < 1:
        return [_rejected(setup, prices, "the weights and one sequence do not fit in memory")]
    predictor = setup.model_of_time()

    def evaluate(instances: int) -> Candidate:
        return _evaluate(setup, ask, predictor, instances=instances, max_batch=max_batch, prices=prices)

    def is_met(instances: int, end: End) -> bool:
        return _meets(steady_state(predictor, _share(ask, instances), end=end), ask, max_batch)

    least = _least_instances(predictor, ask)
    possible = _first(least, lambda n: is_met(n, End.FAST))
    if possible is None:
        if least <= MAX_INSTANCES and _is_hopeless(predictor, ask):
            return [evaluate(least)]
        return [_rejected(setup, prices, f"more than {MAX_INSTANCES} instances would be needed")]
    sure = _first(possible, lambda n: is_met(n, End.SLOW))
    counts = [possible] if sure in (possible, None) else [possible, sure]
    return [evaluate(n) for n in counts if n is not None]


def _least_instances(predictor: CalibratedModel, ask: Ask) -> int:
    """What the prefills alone need at their fastest: with fewer, nothing meets the limits."""
    prefill_s = End.FAST.of(predictor.predict(StepShape.prefill(batch=1, new_tokens=ask.input_tokens)))
    return max(math.ceil(ask.requests_per_s * prefill_s / MAX_LOAD), 1)


def _first(least: int, is_met: Callable[[int], bool]) -> int | None:
    """The smallest number of instances from `least` on for which it holds; more instances never make it worse."""
    low, high, stride = least - 1, least, 1
    while high < MAX_INSTANCES and not is_met(high):
        low, high, stride = high, min(high + stride, MAX_INSTANCES), 2 * stride
    if high > MAX_INSTANCES or (high == MAX_INSTANCES and not is_met(high)):
        return None
    return low + 1 + bisect_left(range(low + 1, high), True, key=is_met)


def _share(ask: Ask, instances: int) -> Ask:
    return replace(ask, requests_per_s=ask.requests_per_s / instances)


def _is_hopeless(predictor: CalibratedModel, ask: Ask) -> bool:
    """Even an idle instance is surely too slow, so more of them do not help."""
    idle = steady_state(predictor, replace(ask, requests_per_s=1e-6), end=End.FAST)
    return idle is None or idle.ttft_s > ask.ttft_s or idle.tpot_s > ask.tpot_s


def _evaluate(
    setup: Setup, ask: Ask, predictor: CalibratedModel, *, instances: int, max_batch: int, prices: Mapping[str, float]
) -> Candidate:
    share = _share(ask, instances)
    low, middle, high = (steady_state(predictor, share, end=end) for end in End)
    if _meets(high, ask, max_batch):
        verdict = Judgement.MEETS
    elif _meets(low, ask, max_batch):
        verdict = Judgement.UNDECIDED
    else:
        verdict = Judgement.MISSES
    return Candidate(
        setup=setup,
        instances=instances,
        devices=instances * setup.n_devices,
        usd_per_hour=_price(setup, instances, prices),
        verdict=verdict,
        reason=_reason(verdict, high if verdict is not Judgement.MISSES else low, ask, max_batch),
        low=low,
        middle=middle,
        high=high,
        max_batch=max_batch,
    )


def _price(setup: Setup, instances: int, prices: Mapping[str, float]) -> float | None:
    each = prices.get(setup.hardware.name, setup.hardware.usd_per_hour)
    return None if each is None else each * instances * setup.n_devices


def steady_state(predictor: CalibratedModel, ask: Ask, *, end: End) -> Load | None:
    """The load of one instance at one end of the predicted interval, or None when it cannot keep up."""
    context = ask.input_tokens + ask.output_tokens // 2

    def decode_s(batch: int) -> float:
        return end.of(predictor.predict(StepShape.decode(batch=batch, context_tokens=context)))

    prefill_s = end.of(predictor.predict(StepShape.prefill(batch=1, new_tokens=ask.input_tokens)))
    share = ask.requests_per_s * prefill_s
    if share > MAX_LOAD:
        return None
    stretch = 1.0 / (1.0 - share)
    batch = _batch_in_flight(decode_s, ask.requests_per_s * ask.output_tokens * stretch)
    if batch is None:
        return None
    tpot_s = _at(decode_s, batch) * stretch
    step_s = tpot_s * (1.0 - share)
    wait_s = share * prefill_s / (2.0 * (1.0 - share))
    ttft_s = prefill_s + 0.5 * step_s + TAIL_WAITS * wait_s
    return Load(batch=batch, ttft_s=ttft_s, tpot_s=tpot_s, prefill_s=prefill_s, prefill_share=share, wait_s=wait_s)


def _batch_in_flight(decode_s: Callable[[int], float], pace: float) -> float | None:
    """The batch B with B = pace t_dec(B), at least 1, by Newton's method; None when there is none below the limit."""
    batch = 1.0
    for _ in range(MAX_ROUNDS):
        low = max(int(batch), 1)
        low_s = decode_s(low)
        slope = decode_s(low + 1) - low_s
        growth = pace * slope
        # at growth 1 steps lengthen as fast as they drain: only a much larger batch could balance
        wanted = 2.0 * batch if growth >= 1.0 else max(pace * (low_s - slope * low) / (1.0 - growth), 1.0)
        if wanted > MAX_BATCH:
            return None
        if abs(wanted - batch) < 1e-4 * batch:
            return wanted
        batch = wanted
    return None


def _at(decode_s: Callable[[int], float], batch: float) -> float:
    """Step time at a mean batch that need not be whole."""
    low = max(int(batch), 1)
    low_s = decode_s(low)
    return low_s + (decode_s(low + 1) - low_s) * (max(batch, 1.0) - low)


def _meets(load: Load | None, ask: Ask, max_batch: int) -> bool:
    return (
        load is not None and load.ttft_s <= ask.ttft_s and load.tpot_s <= ask.tpot_s and _peak_batch(load) <= max_batch
    )


def _peak_batch(load: Load) -> float:
    """Sequences held at the busiest 5 % of moments: mean plus two Poisson deviations."""
    return load.batch + 2.0 * math.sqrt(load.batch)


def _reason(verdict: Judgement, load: Load | None, ask: Ask, max_batch: int) -> str:
    if verdict is Judgement.MEETS:
        return "the whole interval is inside both limits"
    end = "slow" if verdict is Judgement.UNDECIDED else "fast"
    if load is None:
        return f"prefills or decodes cannot keep up at the {end} end of the interval"
    if load.ttft_s > ask.ttft_s:
        return (
            f"TTFT is {load.ttft_s * 1e3:.0f} ms at the {end} end of the interval; the limit is {ask.ttft_s * 1e3:g} ms"
        )
    if load.tpot_s > ask.tpot_s:
        return (
            f"TPOT is {load.tpot_s * 1e3:.1f} ms at the {end} end of the interval; the limit is {ask.tpot_s * 1e3:g} ms"
        )
    return f"{_peak_batch(load):.0f} sequences at the {end} end of the interval; {max_batch} fit in memory"


def _rejected(setup: Setup, prices: Mapping[str, float], reason: str) -> Candidate:
    return Candidate(
        setup=setup,
        instances=1,
        devices=setup.n_devices,
        usd_per_hour=_price(setup, 1, prices),
        verdict=Judgement.MISSES,
        reason=reason,
        low=None,
        middle=None,
        high=None,
        max_batch=0,
    )


def distance_of(candidate: Candidate, ask: Ask) -> tuple[str, ...]:
    """How far a candidate's load stands from the measured rows, in words: phase, axis, what."""
    load = candidate.middle
    if load is None:
        return ()
    context = ask.input_tokens + ask.output_tokens // 2
    predictor = candidate.setup.model_of_time()
    steps = (
        (Phase.PREFILL, StepShape.prefill(batch=1, new_tokens=ask.input_tokens)),
        (Phase.DECODE, StepShape.decode(batch=max(round(load.batch), 1), context_tokens=context)),
    )
    return tuple(f"{phase.value}, {gap.axis}: {gap.text}" for phase, work in steps for gap in predictor.gaps(work))


def unmeasured(candidate: Candidate | None, ask: Ask, prices: Mapping[str, float]) -> tuple[str, ...]:
    """What the answer rests on that nobody measured."""
    if candidate is None:
        return ()
    setup = candidate.setup
    hardware = setup.hardware
    found = list(distance_of(candidate, ask))
    dtype = compute_dtype(hardware, setup.quant.compute)
    fields = [("memory_bytes_per_s", "memory bandwidth"), (f"flops_{dtype}", f"{dtype} peak")]
    if setup.n_devices > 1:
        fields.append(("link_bytes_per_s", "link rate"))
    found += [
        f"the {text} of {hardware.name} is {Flag.UNVERIFIED.value}"
        for field, text in fields
        if hardware.flag_of(field) is Flag.UNVERIFIED
    ]
    if hardware.name not in prices and hardware.usd_per_hour is not None:
        found.append(f"the price of {hardware.name} is unverified; give yours with --price {hardware.name}=USD")
    if candidate.usd_per_hour is None:
        found.append(f"no price of {hardware.name} is known; it is ranked behind priced devices")
    found.append("arrivals: Poisson with fixed lengths; burstier traffic waits longer")
    return tuple(found)
