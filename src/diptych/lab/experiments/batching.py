"""Experiments on sharing a step: batch size in both phases, chunked prefill beside running streams, continuous batching."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from diptych.cost.workload import Workload
from diptych.engine.load import Machinery, make_machinery
from diptych.ground.clock import MonotonicClock
from diptych.ground.events import Event, FinishEvent, TokenEvent
from diptych.ground.request import Request, SamplingParams
from diptych.lab.experiment import Experiment, Outcome, Point, Stage, Verdict, point
from diptych.lab.probe import Measured

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128
PROMPT = 64


def _batch_size(stage: Stage) -> Outcome:
    probe = stage.probe(max(BATCHES) * (CONTEXT + 32))
    points, times = [], []
    rates: dict[str, list[float]] = {"decode": [], "prefill": []}
    for batch in BATCHES:
        stage.progress(f"batch {batch}")
        for name, work in (
            ("decode", Workload.decode(batch=batch, context_tokens=CONTEXT)),
            ("prefill", Workload.prefill(batch=batch, new_tokens=PROMPT)),
        ):
            measured = probe.time(work, repeats=2 * stage.repeats)
            times.append(measured)
            points.append(point(name, batch, measured, stage.predicted_s(work)))
            rates[name].append(work.n_tokens / measured.median_s)
    decode_gain, prefill_gain = (rates[name][-1] / rates[name][0] for name in ("decode", "prefill"))
    crossing = next(
        (b for b, rate in zip(BATCHES, rates["decode"], strict=True) if rate > 0.5 * max(rates["prefill"])), None
    )
    reached = (
        f"decode passes half of prefill's rate at batch {crossing}" if crossing else "decode stays below half of it"
    )
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if decode_gain > 2 * prefill_gain else Verdict.FAILS,
        finding=(
            f"from batch 1 to {BATCHES[-1]} decode goes from {rates['decode'][0]:,.0f} to {rates['decode'][-1]:,.0f} tok/s "
            f"({decode_gain:.1f}x), prefill from {rates['prefill'][0]:,.0f} to {rates['prefill'][-1]:,.0f} "
            f"({prefill_gain:.1f}x); {reached}"
        ),
        notes=(f"decode at a context of {CONTEXT}, prompts of {PROMPT} tokens",),
    ).withheld_if_noisy(times)


class _Driver:
    """Steps a scheduler and executor by hand and keeps every token's time."""

    def __init__(self, machinery: Machinery) -> None:
        self.machinery = machinery
        self.clock = MonotonicClock()
        self.token_s: dict[str, list[float]] = {}
        self.n_open = 0
        self._random = random.Random(1)

    def submit(self, name: str, *, prompt_tokens: int, new_tokens: int, vocab: int) -> None:
        """Put a request with a random prompt in line."""
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(self._random.randrange(vocab) for _ in range(prompt_tokens)),
            sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
            arrival_s=self.clock.now_s(),
        )
        self.token_s[name] = []
        self.n_open += 1
        self.machinery.core.submit(request)

    def step(self) -> None:
        """One step; times of its tokens are noted."""
        plan, _ = self.machinery.core.begin_step(self.clock.now_s())
        assert plan is not None, "nothing to do with requests open"
        result = self.machinery.executor.execute(plan)
        self.machinery.step_time.observe(plan, result.device_s + result.host_s)
        events: list[Event] = self.machinery.core.end_step(plan, result, self.clock.now_s())
        for event in events:
            if isinstance(event, TokenEvent):
                self.token_s[event.request_id].append(event.at_s)
            self.n_open -= isinstance(event, FinishEvent)

    def run(self) -> None:
        """Step until everything has finished."""
        while self.n_open:
            self.step()


def _machinery(
    stage: Stage, *, max_step_tokens: int, stall_budget_s: float | None, context: int, slots: int = 16
) -> Machinery:
    scheduler = replace(
        stage.config.scheduler,
        max_step_tokens=max_step_tokens,
        stall_budget_s=stall_budget_s,
        max_running_sequences=slots,
        enable_prefix_cache=False,
    )
    config = replace(stage.config, scheduler=scheduler, max_context_tokens=context)
    return make_machinery(stage.model, config, clock=MonotonicClock())


def _gaps_during_prompt(stage: Stage, machinery: Machinery, prompt: int) -> tuple[list[float], float]:
    """Eight streams decode; a long prompt arrives. Their gaps until it has its first token, and its TTFT."""
    driver, vocab = _Driver(machinery), stage.model.spec.vocab_size
    for i in range(8):
        driver.submit(f"stream-{i}", prompt_tokens=16, new_tokens=stage.longest_tokens // 2, vocab=vocab)
    for _ in range(16):  # all streams run, and the step times have been learnt
        driver.step()
    arrival_s = driver.clock.now_s()
    driver.submit("long", prompt_tokens=prompt, new_tokens=1, vocab=vocab)
    while not driver.token_s["long"]:
        driver.step()
    ttft_s = driver.token_s["long"][0] - arrival_s
    gaps = []
    for i in range(8):
        times = driver.token_s[f"stream-{i}"]
        gaps += [b - a for a, b in pairwise(times) if b >= arrival_s]
    for i in range(8):
        machinery.core.cancel(f"stream-{i}", driver.clock.now_s())
    return gaps, ttft_s


def _chunked_prefill(stage: Stage) -> Outcome:
    prompt = min(3000, stage.longest_tokens // 2)
    points, lines = [], []
    worst: dict[str, float] = {}
    sizes = [n for n in (64, 128, 256, 512, 1024) if n < prompt] + [prompt + 64]
    for size in sizes:
        stage.progress(f"chunks of {size}")
        gaps, ttft_s = _gaps_during_prompt(
            stage, _machinery(stage, max_step_tokens=size, stall_budget_s=None, context=stage.longest_tokens), prompt
        )
        points += _gap_points("longest gap of a stream", "TTFT of the long prompt", size, gaps, ttft_s)
        worst[str(size)] = max(gaps)
    largest, smallest = worst[str(sizes[-1])], worst[str(sizes[0])]
    budget_s = 0.5 * (largest + smallest)
    machinery = _machinery(stage, max_step_tokens=prompt + 64, stall_budget_s=budget_s, context=stage.longest_tokens)
    gaps, ttft_s = _gaps_during_prompt(stage, machinery, prompt)
    over = sum(gap > 1.15 * budget_s for gap in gaps)
    lines.append(
        f"with a stall budget of {1e3 * budget_s:.1f} ms the longest gap was {1e3 * max(gaps):.1f} ms "
        f"({over} of {len(gaps)} gaps more than 15 % over) and TTFT {1e3 * ttft_s:.0f} ms"
    )
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if largest > 1.5 * smallest else Verdict.FAILS,
        finding=(
            f"a prompt of {prompt:,} tokens read at once stalls running streams for {1e3 * largest:.0f} ms; in chunks of "
            f"{sizes[0]} for {1e3 * smallest:.0f} ms; " + lines[0]
        ),
        notes=("eight streams decode while the prompt arrives; a step's time is what the engine has learnt so far",),
    )


def _gap_points(gap_name: str, ttft_name: str, x: float, gaps: Sequence[float], ttft_s: float) -> list[Point]:
    ordered = sorted(gaps)
    middle = ordered[len(ordered) // 2]
    return [
        Point(series=gap_name, x=x, measured=1e3 * ordered[-1], low=1e3 * middle, high=1e3 * ordered[-1]),
        Point(series=ttft_name, x=x, measured=1e3 * ttft_s, low=1e3 * ttft_s, high=1e3 * ttft_s),
    ]


def _continuous_batching(stage: Stage) -> Outcome:
    slots, n_requests = 8, 32
    lengths = random.Random(4)
    sizes = [(lengths.randint(8, 64), lengths.choice((8, 16, 32, 128))) for _ in range(n_requests)]
    context = 256 if stage.longest_tokens >= 256 else stage.longest_tokens
    times: dict[str, list[float]] = {"continuous": [], "static": []}
    for repeat in range(stage.repeats):
        stage.progress(f"repeat {repeat + 1}: continuous, then static")
        times["continuous"].append(_serve(stage, [sizes], slots, context))
        groups = [sizes[i : i + slots] for i in range(0, n_requests, slots)]
        times["static"].append(_serve(stage, groups, slots, context))
    measured = {name: Measured.of(values) for name, values in times.items()}
    gain = measured["static"].median_s / measured["continuous"].median_s
    return Outcome(
        points=tuple(point(name, i, one) for i, (name, one) in enumerate(measured.items())),
        verdict=Verdict.HOLDS if gain > 1.1 else Verdict.FAILS,
        finding=(
            f"{n_requests} requests of uneven length on {slots} slots: continuous batching takes "
            f"{measured['continuous'].median_s:.2f} s, waiting for each batch to finish {measured['static'].median_s:.2f} s "
            f"({gain:.2f}x)"
        ),
    ).withheld_if_noisy(list(measured.values()))


def _serve(stage: Stage, groups: Sequence[Sequence[tuple[int, int]]], slots: int, context: int) -> float:
    """Seconds to answer the groups one after another, each continuously batched within itself."""
    machinery = _machinery(stage, max_step_tokens=2048, stall_budget_s=None, context=context, slots=slots)
    driver = _Driver(machinery)
    begin_s = driver.clock.now_s()
    for number, group in enumerate(groups):
        for i, (prompt_tokens, new_tokens) in enumerate(group):
            driver.submit(
                f"{number}-{i}",
                prompt_tokens=prompt_tokens,
                new_tokens=min(new_tokens, context - prompt_tokens),
                vocab=stage.model.spec.vocab_size,
            )
        driver.run()
    return driver.clock.now_s() - begin_s


BATCH_SIZE = Experiment(
    name="batch-size",
    title="Batch size against throughput in each phase",
    claim="batching multiplies decode's rate, which shares the weights' traffic, and hardly prefill's",
    x_label="sequences in the batch",
    y_label="one step, ms",
    run=_batch_size,
    is_log_x=True,
    is_log_y=True,
)
CHUNKED_PREFILL = Experiment(
    name="chunked-prefill",
    title="Chunked prefill beside running streams",
    claim="small chunks keep running streams smooth and cost the long prompt time",
    x_label="chunk, tokens",
    y_label="ms",
    run=_chunked_prefill,
    is_log_x=True,
    is_log_y=True,
)
CONTINUOUS_BATCHING = Experiment(
    name="continuous-batching",
    title="Continuous against static batching",
    claim="filling a slot as soon as it is free beats waiting for the slowest of a batch",
    x_label="0: continuous, 1: static",
    y_label="all requests, ms",
    run=_continuous_batching,
)
