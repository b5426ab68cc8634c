"""Experiments on sharing a step: batch size in both phases, chunked prefill beside running streams, continuous batching."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from diptych.ground.shape import StepShape
from diptych.lab.drive import Driver
from diptych.lab.experiment import Check, Experiment, Outcome, Point, Stage, cannot, conclude, point, quantity

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128
PROMPT = 64
STREAMS = 8
SLOTS = 8


def _batch_size(stage: Stage) -> Outcome:
    probe = stage.probe(max(BATCHES) * (CONTEXT + 32))
    works = [("decode", b, StepShape.decode(batch=b, context_tokens=CONTEXT)) for b in BATCHES]
    works += [("prefill", b, StepShape.prefill(batch=b, new_tokens=PROMPT)) for b in BATCHES]
    rounds = stage.measure([probe.sampler(work) for _, _, work in works])
    m = len(BATCHES)
    points: list[Point] = []
    predicted_rates: list[float | None] = []
    for i, (phase, batch, work) in enumerate(works):
        predicted_s = stage.predicted_s(work)
        predicted_rate = None if predicted_s is None else work.n_tokens / predicted_s
        rate = rounds.rate(i, work.n_tokens)
        predicted_rates.append(predicted_rate)
        points.append(point(f"{phase} step", batch, rounds.point(i), predicted_s))
        points.append(quantity(phase, batch, rate, "tokens per second", predicted=predicted_rate))
    rates = [p.measured for p in points if p.unit != "ms"]
    decode_gain = rounds.of(lambda t: BATCHES[-1] * t[0] / t[m - 1])
    prefill_gain = rounds.of(lambda t: BATCHES[-1] * t[m] / t[2 * m - 1])
    advantage = rounds.of(lambda t: (t[0] / t[m - 1]) / (t[m] / t[2 * m - 1]))
    balance = stage.ceilings.flops_per_s * stage.view.quant.weight_bytes / (2 * stage.ceilings.roof_bytes_per_s)
    notes = [
        f"decode at a context of {CONTEXT}, prompts of {PROMPT} tokens",
        f"measured: {_half_rate(rates[:m], rates[m:])}",
        f"by the two ceilings the linear layers turn from memory to arithmetic at {balance:.0f} rows"
        + stage.cached_weights,
    ]
    if stage.predictor is not None:
        decode, prefill = ([rate or 0.0 for rate in part] for part in (predicted_rates[:m], predicted_rates[m:]))
        notes.insert(2, f"predicted: {_half_rate(decode, prefill)}")
    return conclude(
        points,
        [
            Check(what="decode's gain over prefill's", estimate=advantage, limit=2.0),
            Check(what=f"decode's gain from batch 1 to {BATCHES[-1]}", estimate=decode_gain, limit=2.0),
        ],
        rounds,
        finding=(
            f"from batch 1 to {BATCHES[-1]} decode goes from {rates[0]:,.0f} to {rates[m - 1]:,.0f} tok/s "
            f"({decode_gain.value:.1f}x) while its step grows from {1e3 * rounds.point(0).value:.2f} to "
            f"{1e3 * rounds.point(m - 1).value:.2f} ms; prefill goes from {rates[m]:,.0f} to {rates[-1]:,.0f} "
            f"({prefill_gain.value:.1f}x)"
        ),
        notes=notes,
    )


def _half_rate(decode: Sequence[float], prefill: Sequence[float]) -> str:
    """Where decode comes near prefill's rate. The curves need not cross: decode reads KV on top of the same weights."""
    reached = next((b for b, rate in zip(BATCHES, decode, strict=True) if rate > 0.5 * max(prefill)), None)
    if reached is None:
        return f"decode stays below half of prefill's highest rate up to batch {BATCHES[-1]}"
    return f"decode reaches half of prefill's highest rate at batch {reached}"


class _Intrusion:
    """Streams decode; a long prompt arrives. Their longest gap until it has its first token, and its TTFT."""

    def __init__(self, driver: Driver, *, prompt_tokens: int, new_tokens: int) -> None:
        self._driver = driver
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self.gaps_s: list[float] = []
        self._ttft_s = 0.0

    def longest_gap_s(self) -> float:
        """Run it once."""
        driver = self._driver
        names = [f"stream-{i}" for i in range(STREAMS)]
        for name in names:
            driver.submit(name, driver.prompt(16), new_tokens=self._new_tokens)
        for _ in range(16):  # all streams run, and the step times have been learnt
            driver.step()
        arrival_s = driver.submit("long", driver.prompt(self._prompt_tokens), new_tokens=1)
        while not driver.token_s["long"]:
            driver.step()
        self._ttft_s = driver.token_s["long"][0] - arrival_s
        self.gaps_s = []
        for name in names:
            self.gaps_s += [b - a for a, b in pairwise(driver.token_s[name]) if b >= arrival_s]
            driver.cancel(name)
        return max(self.gaps_s)

    def share_over(self, limit_s: float) -> float:
        """Share of the gaps longer than this, in the same run."""
        return sum(gap_s > limit_s for gap_s in self.gaps_s) / len(self.gaps_s)

    def ttft_s(self) -> float:
        """Of the long prompt, in the same run."""
        return self._ttft_s


def _chunked_prefill(stage: Stage) -> Outcome:
    if stage.context_tokens < 64:
        return cannot(f"streams need 64 tokens; the context holds {stage.context_tokens}")
    prompt = min(3000, stage.context_tokens // 2)
    sizes = [n for n in (64, 128, 256, 512, 1024) if n < prompt] + [prompt + STREAMS]
    # a stream writes one token per step, and the smallest chunks take the most steps
    new_tokens = min(stage.context_tokens - 16, 32 + 2 * prompt // max(1, sizes[0] - STREAMS))
    context = max(prompt + 2, 16 + new_tokens)
    engines = stage.engines(context_tokens=context, n_tokens=prompt + 2 + STREAMS * (16 + new_tokens))

    def intrusion(driver: Driver) -> _Intrusion:
        return _Intrusion(driver, prompt_tokens=prompt, new_tokens=new_tokens)

    def settings(rows: int, stall_budget_s: float | None = None) -> dict[str, Any]:
        return {"max_step_tokens": rows, "stall_budget_s": stall_budget_s, "enable_prefix_cache": False}

    runs = [intrusion(engines.driver(**settings(size))) for size in sizes]
    samplers: list[Callable[[], float]] = []
    for run in runs:
        samplers += [run.longest_gap_s, run.ttft_s]
    rounds = stage.measure(samplers)
    points: list[Point] = []
    for i, size in enumerate(sizes):
        rehearsal = engines.rehearsal(**settings(size))
        gap_s = ttft_s = None
        if rehearsal is not None:
            rehearsed = intrusion(rehearsal)
            gap_s, ttft_s = rehearsed.longest_gap_s(), rehearsed.ttft_s()
        points.append(point("longest gap of a running stream", size, rounds.point(2 * i), gap_s))
        points.append(point("TTFT of the long prompt", size, rounds.point(2 * i + 1), ttft_s))
    whole, small = rounds.point(2 * len(sizes) - 2), rounds.point(0)
    budget_s = 0.5 * (whole.value + small.value)
    kept = intrusion(engines.driver(**settings(prompt + STREAMS, budget_s)))
    budgeted = stage.measure([kept.longest_gap_s, kept.ttft_s, lambda: kept.share_over(1.15 * budget_s)])
    return conclude(
        points,
        [
            Check(
                what="longest gap with the prompt read at once, over that with the smallest chunks",
                estimate=rounds.of(lambda t: t[-2] / t[0]),
                limit=1.5,
            ),
            Check(
                what="TTFT of the long prompt with the smallest chunks, over that at once",
                estimate=rounds.of(lambda t: t[1] / t[-1]),
                limit=1.0,
            ),
        ],
        rounds,
        finding=(
            f"a prompt of {prompt:,} tokens read at once stalls {STREAMS} running streams for {1e3 * whole.value:.0f} ms; in "
            f"steps of {sizes[0]} rows for {1e3 * small.value:.0f} ms; with a stall budget of {1e3 * budget_s:.1f} ms the "
            f"longest gap is {1e3 * budgeted.point(0).value:.1f} ms ({budgeted.times_RN[:, 2].mean():.1%} of all gaps are more "
            f"than 15 % over) and TTFT {1e3 * budgeted.point(1).value:.0f} ms"
        ),
        notes=["a chunk shares its step with one row of each stream"],
    )


def _continuous_batching(stage: Stage) -> Outcome:
    n_requests = 32
    lengths = random.Random(4)
    context = min(256, stage.context_tokens)
    sizes = [(lengths.randint(8, 64), lengths.choice((8, 16, 32, 128))) for _ in range(n_requests)]
    sizes = [(prompt, min(new, context - prompt)) for prompt, new in sizes]
    groups = [sizes[i : i + SLOTS] for i in range(0, n_requests, SLOTS)]
    engines = stage.engines(context_tokens=context, n_tokens=SLOTS * context)
    settings = {"max_running_sequences": SLOTS, "enable_prefix_cache": False}
    driver, rehearsal = engines.driver(**settings), engines.rehearsal(**settings)
    rounds = stage.measure([lambda: _serve(driver, [sizes]), lambda: _serve(driver, groups)])
    gain = rounds.of(lambda t: t[1] / t[0])
    n_steps = sum(max(new for _, new in group) for group in groups)
    points = [
        point(name, i, rounds.point(i), None if rehearsal is None else _serve(rehearsal, work))
        for i, (name, work) in enumerate((("continuous", [sizes]), ("static", groups)))
    ]
    return conclude(
        points,
        [Check(what="static over continuous", estimate=gain, limit=1.1)],
        rounds,
        finding=(
            f"{n_requests} requests of uneven length on {SLOTS} slots: continuous batching takes "
            f"{rounds.point(0).value:.2f} s, waiting for each batch to finish {rounds.point(1).value:.2f} s ({gain.value:.2f}x)"
        ),
        notes=[
            f"{sum(new for _, new in sizes):,} tokens; static batches need {n_steps} steps, {SLOTS} full slots would need "
            f"{sum(new for _, new in sizes) // SLOTS}"
        ],
        x_names=("continuous", "static"),
    )


def _serve(driver: Driver, groups: Sequence[Sequence[tuple[int, int]]]) -> float:
    """Seconds to answer the groups one after another, each continuously batched within itself."""
    begin_s = driver.clock.now_s()
    for number, group in enumerate(groups):
        for i, (prompt_tokens, new_tokens) in enumerate(group):
            driver.submit(f"{number}-{i}", driver.prompt(prompt_tokens), new_tokens=new_tokens)
        driver.run()
    return driver.clock.now_s() - begin_s


BATCH_SIZE = Experiment(
    name="batch-size",
    title="Batch size against throughput and latency in each phase",
    claim="batching multiplies decode's rate, which shares the weights' traffic, and hardly prefill's",
    x_label="sequences in the batch",
    y_label="one step; rate",
    run=_batch_size,
    is_log_x=True,
    is_log_y=True,
)
CHUNKED_PREFILL = Experiment(
    name="chunked-prefill",
    title="Chunked prefill beside running streams",
    claim="small chunks keep running streams smooth and cost the long prompt time",
    x_label="most rows of a step",
    y_label="gap, TTFT",
    run=_chunked_prefill,
    is_log_x=True,
    is_log_y=True,
)
CONTINUOUS_BATCHING = Experiment(
    name="continuous-batching",
    title="Continuous against static batching",
    claim="filling a slot as soon as it is free beats waiting for the slowest of a batch",
    x_label="",
    y_label="all requests",
    run=_continuous_batching,
)
