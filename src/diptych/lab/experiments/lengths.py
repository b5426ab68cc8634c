"""Experiments on length: how each phase grows with the tokens it reads and writes."""

from __future__ import annotations

import numpy as np

from diptych.cost.workload import ChunkShape, Workload
from diptych.lab.experiment import Experiment, Outcome, Point, Stage, Verdict, point, polynomial
from diptych.lab.probe import Measured

LENGTHS = (10, 30, 100, 300, 1000, 2000, 4000, 10_000)
CHUNK_TOKENS = 2048


def _prompt_works(n_tokens: int) -> list[Workload]:
    shapes = []
    for start in range(0, n_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, n_tokens - start)
        shapes.append(ChunkShape(new_tokens=size, start_pos=start, samples=start + size == n_tokens))
    return [Workload(shapes=(shape,)) for shape in shapes]


def predicted_prompt_s(stage: Stage, n_tokens: int) -> float | None:
    """The predicted time of a whole prompt, chunk by chunk as the engine reads it."""
    times = [stage.predicted_s(work) for work in _prompt_works(n_tokens)]
    return None if None in times else sum(time for time in times if time is not None)


def _prefill_length(stage: Stage) -> Outcome:
    lengths = stage.lengths(LENGTHS)
    probe = stage.probe(max(lengths))
    points, times = [], []
    for n in lengths:
        stage.progress(f"prompt of {n} tokens")
        measured = probe.time_prompt(n, chunk_tokens=CHUNK_TOKENS, repeats=stage.repeats)
        times.append(measured)
        points.append(point("prefill", n, measured, predicted_prompt_s(stage, n)))
    a, b, c = polynomial(lengths, [one.median_s for one in times], 2)
    knee = b / c if c > 0 else float("inf")
    spec = stage.view.spec
    linear_flops = stage.view.cost(Workload.prefill(batch=1, new_tokens=1)).component("mlp").flops or 1.0
    longest = lengths[-1]
    share = max(c, 0.0) * longest**2 / (a + b * longest + max(c, 0.0) * longest**2)
    residual = float(np.max(np.abs((a + b * np.array(lengths) + c * np.array(lengths) ** 2)
                                   / [one.median_s for one in times] - 1.0)))  # fmt: skip
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if residual < 0.3 and b > 0 else Verdict.FAILS,
        finding=(
            f"prefill takes {1e3 * a:.2f} ms + {1e6 * b:.2f} us per token + {1e9 * c:.3f} ns per token squared: "
            f"linear until about {knee:,.0f} tokens, where attention has become as long as everything else; "
            f"at {longest:,} tokens the squared part is {share:.0%} of the time"
        ),
        notes=(
            f"the fit misses no point by more than {residual:.0%}",
            f"by arithmetic alone the parts would be equal at about {_equal_work_tokens(stage):,.0f} tokens",
            f"{spec.n_layers} layers, {linear_flops / 1e6:.2f} MFLOP per token in the MLPs",
        ),
    ).withheld_if_noisy(times)


def _equal_work_tokens(stage: Stage) -> float:
    """Prompt length at which attention's FLOPs equal those of the linear layers."""
    long = stage.view.cost(Workload.prefill(batch=1, new_tokens=4096))
    attention = long.component("scores").flops + long.component("values").flops
    linear = long.flops - attention - long.component("head").flops
    return 4096 * linear / attention


def _decode_position(stage: Stage) -> Outcome:
    positions = stage.lengths((64, 256, 512, 1024, 2048, 4096, 8192))
    probe = stage.probe(max(positions))
    points, times = [], []
    for position in positions:
        stage.progress(f"one token at position {position}")
        work = Workload.decode(batch=1, context_tokens=position)
        measured = probe.time(work, repeats=4 * stage.repeats)
        times.append(measured)
        points.append(point("decode", position, measured, stage.predicted_s(work)))
    intercept, slope = polynomial(positions, [one.median_s for one in times], 1)
    one, far = (stage.view.cost(Workload.decode(batch=1, context_tokens=n)) for n in (1, 1001))
    kv_bytes_per_token = (far.kv_bytes - one.kv_bytes) / 1000
    notes = [f"the weights read per token, {one.weight_bytes / 1e6:.1f} MB, need "
             f"{1e3 * one.weight_bytes / stage.ceilings.read_bytes_per_s:.3f} ms at the measured ceiling"]  # fmt: skip
    if slope > 0:
        kv_rate = kv_bytes_per_token / slope
        notes.append(
            f"the slope means KV is read at {kv_rate / 1e9:.1f} GB/s, {kv_rate / stage.ceilings.read_bytes_per_s:.0%} of it"
        )
    fitted = intercept + slope * np.array(positions)
    residual = float(np.max(np.abs(fitted / [one.median_s for one in times] - 1.0)))
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if slope > 0 and residual < 0.2 else Verdict.FAILS,
        finding=(
            f"a token costs {1e3 * intercept:.3f} ms (weights and launch) + {1e9 * slope:.1f} ns per token of context (KV): "
            f"a straight line within {residual:.0%}"
        ),
        notes=tuple(notes),
    ).withheld_if_noisy(times)


def _phase_shares(stage: Stage) -> Outcome:
    points, times, lines = [], [], []
    new_tokens = min(200, stage.longest_tokens // 4)
    for prompt in stage.lengths((10, 1000, 10_000)):
        prompt = min(prompt, stage.longest_tokens - new_tokens)
        stage.progress(f"{prompt} in, {new_tokens} out")
        probe = stage.probe(prompt + new_tokens)
        prefill = probe.time_prompt(prompt, chunk_tokens=CHUNK_TOKENS, repeats=stage.repeats)
        step = Workload.decode(batch=1, context_tokens=prompt + new_tokens // 2)
        decode = probe.time(step, repeats=4 * stage.repeats)
        times += [prefill, decode]
        whole = _scaled(decode, new_tokens)
        predicted = stage.predicted_s(step)
        points.append(point("prefill", prompt, prefill, predicted_prompt_s(stage, prompt)))
        points.append(point("decode", prompt, whole, None if predicted is None else predicted * new_tokens))
        share = whole.median_s / (whole.median_s + prefill.median_s)
        lines.append(f"{prompt:,} in / {new_tokens} out: decode is {share:.0%} of the time")
    ordered = [p.measured for p in points if p.series == "prefill"]
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if ordered == sorted(ordered) else Verdict.FAILS,
        finding="; ".join(lines),
        notes=("decode is the time of its middle step times the number of steps",),
    ).withheld_if_noisy(times)


def _scaled(one: Measured, factor: int) -> Measured:
    return Measured(
        median_s=one.median_s * factor,
        low_s=one.low_s * factor,
        high_s=one.high_s * factor,
        spread=one.spread,
        repeats=one.repeats,
    )


def _kv_cache(stage: Stage) -> Outcome:
    lengths = stage.lengths((16, 64, 256, 1024, 2048))
    probe = stage.probe(max(lengths))
    points: list[Point] = []
    times: list[Measured] = []
    for n in lengths:
        stage.progress(f"token {n} with and without the cache")
        work = Workload.decode(batch=1, context_tokens=n)
        cached = probe.time(work, repeats=2 * stage.repeats)
        naive = probe.time_prompt(n, chunk_tokens=CHUNK_TOKENS, repeats=stage.repeats)
        times += [cached, naive]
        points.append(point("with the cache", n, cached, stage.predicted_s(work)))
        points.append(point("recomputing everything", n, naive, predicted_prompt_s(stage, n)))
    first, last = times[1].median_s / times[0].median_s, times[-1].median_s / times[-2].median_s
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if last > 4 * max(1.0, first / 4) else Verdict.FAILS,
        finding=(
            f"at {lengths[-1]:,} tokens a token from the cache costs {1e3 * times[-2].median_s:.2f} ms, recomputing the "
            f"sequence {1e3 * times[-1].median_s:.1f} ms: {last:.0f} times as much ({first:.1f} times at {lengths[0]})"
        ),
    ).withheld_if_noisy(times)


PREFILL_LENGTH = Experiment(
    name="prefill-length",
    title="Prefill time against prompt length",
    claim="prefill is linear in the prompt until attention's squared part catches up",
    x_label="prompt tokens",
    y_label="prefill, ms",
    run=_prefill_length,
    is_log_x=True,
    is_log_y=True,
)
DECODE_POSITION = Experiment(
    name="decode-position",
    title="Time per token against position",
    claim="a decode step reads all weights once and the KV of its context: a straight line",
    x_label="position of the token",
    y_label="one token, ms",
    run=_decode_position,
)
PHASE_SHARES = Experiment(
    name="phase-shares",
    title="Short prompt, long answer; long prompt, short answer",
    claim="which phase dominates depends on the shape of the request, not on the model",
    x_label="prompt tokens",
    y_label="time of the phase, ms",
    run=_phase_shares,
    is_log_x=True,
    is_log_y=True,
)
KV_CACHE = Experiment(
    name="kv-cache",
    title="With and without the KV cache",
    claim="without a cache each token costs a whole prefill",
    x_label="tokens so far",
    y_label="next token, ms",
    run=_kv_cache,
    is_log_x=True,
    is_log_y=True,
)
