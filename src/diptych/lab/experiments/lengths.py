"""Experiments on length: how each phase grows with the tokens it reads and writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from diptych.ground.shape import StepShape
from diptych.lab.drive import Driver
from diptych.lab.experiment import (
    Check,
    Experiment,
    Outcome,
    Point,
    Stage,
    cannot,
    conclude,
    point,
    polynomial,
    quantity,
)

LENGTHS = (10, 30, 100, 300, 1000, 2000, 4000, 10_000)
FIT_FROM = 100
NO_SUM = "no part of a step takes less than no time, so these times are no such sum"
POSITIONS = (64, 256, 512, 1024, 2048, 4096, 8192)


def _cut(stage: Stage) -> list[str]:
    return [stage.cut] if stage.cut else []


def _signed(value: float, digits: int = 2) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):.{digits}f}"


def _closeness(fitted: np.ndarray, times: np.ndarray) -> float:
    """1 for a perfect fit; 0.8 when the worst point is missed by a fifth."""
    ratio = fitted / times
    return float(np.min(np.minimum(ratio, 1.0 / ratio))) if np.all(fitted > 0) else 0.0


def _prefill_length(stage: Stage) -> Outcome:
    lengths = stage.lengths(LENGTHS)
    if len(lengths) < 3:
        return cannot(f"a square needs three lengths; {lengths[-1]} tokens is the longest here")
    probe = stage.probe(max(lengths))
    rounds = stage.measure([probe.prompt_sampler(n) for n in lengths])
    points = [point("prefill", n, rounds.point(i), stage.predicted_prompt_s(n)) for i, n in enumerate(lengths)]
    # below some hundred tokens reading the weights sets the pace, as in decode
    n_floor = sum(n < FIT_FROM for n in lengths[:-3])
    fitted = np.array(lengths[n_floor:], dtype=float)
    powers_3N = np.array([np.ones(len(fitted)), fitted, fitted**2])
    fits = rounds.each(lambda t: polynomial(fitted, t[n_floor:], 2))
    close = rounds.of(lambda t: _closeness(polynomial(fitted, t[n_floor:], 2) @ powers_3N, t[n_floor:]))
    a, b, c = (fit.value for fit in fits)
    longest = lengths[-1]
    if b > 0 and c > 0:
        squared_share = c * longest**2 / (a + b * longest + c * longest**2)
        meaning = (
            f"linear until about {b / c:,.0f} tokens, where attention has become as long as the rest; "
            f"at {longest:,} tokens the squared part is {squared_share:.0%} of the time"
        )
    else:
        meaning = f"linear to {longest:,} tokens" if b > 0 else NO_SUM
    return conclude(
        points,
        [
            Check(
                what=f"closeness of a + b n + c n^2 to every length from {fitted[0]:.0f} tokens on",
                estimate=close,
                limit=0.7,
            ),
            Check(what="us per token", estimate=fits[1].times(1e6), limit=0.0, pattern="{:.3g}"),
            Check(what="ns per token squared", estimate=fits[2].times(1e9), limit=0.0, pattern="{:.3g}"),
        ],
        rounds,
        finding=(
            f"prefill takes {1e3 * a:.2f} ms {_signed(1e6 * b)} us per token {_signed(1e9 * c, 3)} ns per token squared: "
            + meaning
        ),
        notes=[
            *_cut(stage),
            f"by arithmetic alone the two parts would be equal at about {_equal_work_tokens(stage):,.0f} tokens",
        ],
    )


def _equal_work_tokens(stage: Stage) -> float:
    """Prompt length at which attention's FLOPs equal those of the linear layers."""
    long = stage.view.cost(StepShape.prefill(batch=1, new_tokens=4096))
    attention = long.component("scores").flops + long.component("values").flops
    linear = long.flops - attention - long.component("head").flops
    return 4096 * linear / attention


def _decode_position(stage: Stage) -> Outcome:
    positions = stage.lengths(POSITIONS)
    if len(positions) < 2:
        return cannot(f"a line needs two positions; {positions[-1]} tokens is the longest here")
    probe = stage.probe(max(positions))
    works = [StepShape.decode(batch=1, context_tokens=n) for n in positions]
    rounds = stage.measure([probe.sampler(work) for work in works])
    points = [
        point("decode", n, rounds.point(i), stage.predicted_s(work))
        for i, (n, work) in enumerate(zip(positions, works, strict=True))
    ]
    ones_2N = np.array([np.ones(len(positions)), positions])
    intercept, slope = rounds.each(lambda t: polynomial(positions, t, 1))
    close = rounds.of(lambda t: _closeness(polynomial(positions, t, 1) @ ones_2N, t))
    one, far = (stage.view.cost(StepShape.decode(batch=1, context_tokens=n)) for n in (1, 1001))
    kv_bytes_per_token = (far.kv_bytes - one.kv_bytes) / 1000
    ceiling = stage.ceilings.roof_bytes_per_s
    notes = [
        *_cut(stage),
        f"the weights read per token, {one.weight_bytes / 1e6:.1f} MB, need {1e3 * one.weight_bytes / ceiling:.3f} ms at the "
        f"measured ceiling of the {stage.ceilings.roof}, {ceiling / 1e9:.1f} GB/s" + stage.cached_weights,
    ]
    meaning = NO_SUM
    if slope.value > 0:
        meaning = f"a straight line that misses no position by more than {1 - close.value:.0%}"
        rate = kv_bytes_per_token / slope.value
        notes.append(f"the slope means that KV is read at {rate / 1e9:.1f} GB/s, {rate / ceiling:.0%} of that ceiling")
    return conclude(
        points,
        [
            Check(what="ns per token of context", estimate=slope.times(1e9), limit=0.0, pattern="{:.1f}"),
            Check(what="closeness of the straight line to every position", estimate=close, limit=0.8),
        ],
        rounds,
        finding=(
            f"a token costs {1e3 * intercept.value:.3f} ms (weights and launch) {_signed(1e9 * slope.value, 1)} ns per token "
            f"of context (KV): {meaning}"
        ),
        notes=notes,
    )


def _phase_shares(stage: Stage) -> Outcome:
    """Whole requests through the scheduler and the sampler, one at a time."""
    new_tokens = min(200, stage.context_tokens // 4)
    most = min(stage.longest_tokens, stage.context_tokens - new_tokens)
    wanted = (10, 1000, 10_000)
    prompts = [n for n in wanted if n <= most] + ([] if most in wanted or most > wanted[-1] else [most])
    engines = stage.engines(context_tokens=stage.context_tokens, n_tokens=prompts[-1] + new_tokens)
    settings = {"max_running_sequences": 1, "enable_prefix_cache": False}
    driver = engines.driver(**settings)
    samplers: list[Callable[[], float]] = []
    points: list[Point] = []
    for n in prompts:
        request = _Request(driver, n, new_tokens)
        samplers += [request.prefill_s, request.decode_s]
    rounds = stage.measure(samplers)
    rehearsal = engines.rehearsal(**settings)
    shares = rounds.each(lambda t: t[1::2] / (t[0::2] + t[1::2]))
    lines = []
    for i, n in enumerate(prompts):
        prefill_s = decode_s = None
        if rehearsal is not None:
            request = _Request(rehearsal, n, new_tokens)
            prefill_s, decode_s = request.prefill_s(), request.decode_s()
        for j, (phase, predicted_s) in enumerate((("prefill", prefill_s), ("decode", decode_s))):
            measured = rounds.point(2 * i + j)
            label = f"{new_tokens} new"
            points.append(quantity(phase, n, measured, "ms", scale=1e3, predicted=predicted_s, label=label))
        lines.append(f"{n:,} in / {new_tokens} out: decode is {shares[i].value:.0%} of the time")
    cut = [] if prompts[-1] == wanted[-1] else [f"the longest prompt is {prompts[-1]:,} tokens, not {wanted[-1]:,}"]
    return conclude(
        points,
        [
            Check(what="decode's share of the shortest prompt's time", estimate=shares[0], limit=0.5),
            Check(
                what="prefill's share of the longest prompt's time",
                estimate=rounds.of(lambda t: t[-2] / (t[-2] + t[-1])),
                limit=0.5,
            ),
        ],
        rounds,
        finding="; ".join(lines),
        notes=[*cut, *_cut(stage), f"whole requests of {new_tokens} new tokens: scheduler, sampler and kernels"],
    )


class _Request:
    """One request on an otherwise idle engine: the time to its first token, and from there to its last."""

    def __init__(self, driver: Driver, prompt_tokens: int, new_tokens: int) -> None:
        self._driver = driver
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self._last_decode_s = 0.0

    def prefill_s(self) -> float:
        """Run it; seconds to the first token."""
        driver = self._driver
        arrival_s = driver.submit("one", driver.prompt(self._prompt_tokens), new_tokens=self._new_tokens)
        driver.run()
        times_s = driver.token_s["one"]
        self._last_decode_s = times_s[-1] - times_s[0]
        return times_s[0] - arrival_s

    def decode_s(self) -> float:
        """Seconds from the first token to the last, of the same run."""
        return self._last_decode_s


def _kv_cache(stage: Stage) -> Outcome:
    lengths = stage.lengths((16, 64, 256, 1024, 2048))
    probe = stage.probe(max(lengths))
    works = [StepShape.decode(batch=1, context_tokens=n) for n in lengths]
    rounds = stage.measure([probe.sampler(work) for work in works] + [probe.prompt_sampler(n) for n in lengths])
    points: list[Point] = []
    m = len(lengths)
    for i, (n, work) in enumerate(zip(lengths, works, strict=True)):
        points.append(point("with the cache", n, rounds.point(i), stage.predicted_s(work)))
        points.append(point("recomputing everything", n, rounds.point(m + i), stage.predicted_prompt_s(n)))
    first, last = rounds.of(lambda t: t[m] / t[0]), rounds.of(lambda t: t[2 * m - 1] / t[m - 1])
    growth = rounds.of(lambda t: (t[2 * m - 1] / t[m - 1]) / (t[m] / t[0]))
    return conclude(
        points,
        [
            Check(what=f"times as long without the cache at {lengths[-1]:,} tokens", estimate=last, limit=4.0),
            Check(what=f"growth of that factor from {lengths[0]} tokens on", estimate=growth, limit=2.0),
        ],
        rounds,
        finding=(
            f"at {lengths[-1]:,} tokens a token from the cache costs {1e3 * rounds.point(m - 1).value:.2f} ms, recomputing the "
            f"sequence {1e3 * rounds.point(2 * m - 1).value:.1f} ms: {last.value:.0f} times as much "
            f"({first.value:.1f} times at {lengths[0]})"
        ),
        notes=_cut(stage),
    )


PREFILL_LENGTH = Experiment(
    name="prefill-length",
    title="Prefill time against prompt length",
    claim="prefill is linear in the prompt until attention's squared part catches up",
    x_label="prompt tokens",
    y_label="prefill",
    run=_prefill_length,
    is_log_x=True,
    is_log_y=True,
)
DECODE_POSITION = Experiment(
    name="decode-position",
    title="Time per token against position",
    claim="a decode step reads all weights once and the KV of its context: a straight line",
    x_label="position of the token",
    y_label="one token",
    run=_decode_position,
)
PHASE_SHARES = Experiment(
    name="phase-shares",
    title="Short prompt, long answer; long prompt, short answer",
    claim="the shape of the request decides which phase one waits for: decode for a short prompt, prefill for a long one",
    x_label="prompt tokens",
    y_label="since the request came",
    run=_phase_shares,
    is_timeline=True,
)
KV_CACHE = Experiment(
    name="kv-cache",
    title="With and without the KV cache",
    claim="without a cache each token costs a whole prefill",
    x_label="tokens so far",
    y_label="next token",
    run=_kv_cache,
    is_log_x=True,
    is_log_y=True,
)
