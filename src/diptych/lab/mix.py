"""A seeded mixed load, offline: requests of many lengths, all at once or at a Poisson rate, through the whole scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from diptych.compute.ceilings import Ceilings, machine_ceilings
from diptych.compute.runner import Model
from diptych.engine.load import Machinery, make_machinery
from diptych.ground.clock import Clock, MonotonicClock, sleep_s
from diptych.ground.config import EngineConfig
from diptych.ground.events import Event, FinishEvent
from diptych.ground.request import Request, SamplingParams
from diptych.lab.bench import Spread
from diptych.metrics import EventBook, percentile

QUANTILES = (50.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSpec:
    """What arrives: lengths are uniform in [low, high]; rate_per_s None means all at once."""

    n_requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    rate_per_s: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixReport:
    """What `diptych bench mix --json` prints. Rates over the wall time from the first arrival to the last token."""

    output_tokens_per_s: Spread
    total_tokens_per_s: Spread
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    wall_s: float
    requests: int
    model: str
    backend: str
    weights: str
    threads: int
    repeats: int
    ceilings: Ceilings

    def as_json(self) -> dict[str, object]:
        """Plain dicts and lists."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeat:
    wall_s: float
    output_tokens: int
    prompt_tokens: int
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]


def run_mix(
    model: Model, config: EngineConfig, spec: MixSpec, *, name: str, repeats: int, progress: Callable[[str], None]
) -> MixReport:
    """Run the same load `repeats` times; latencies are pooled over the repeats, rates are medians of them."""
    longest = spec.prompt_tokens[1] + spec.new_tokens[1]
    scheduler = replace(
        config.scheduler,
        max_running_sequences=min(spec.n_requests, config.scheduler.max_running_sequences or spec.n_requests),
    )
    clock = MonotonicClock()
    machinery = make_machinery(model, replace(config, max_context_tokens=longest, scheduler=scheduler), clock=clock)
    runs = []
    for number in range(repeats):
        progress(f"repeat {number + 1} of {repeats}")
        machinery.core.reset_prefix_cache()
        runs.append(_MixRun(machinery, clock, spec, model.spec.vocab_size, number).run())
    return MixReport(
        output_tokens_per_s=Spread.of([run.output_tokens / run.wall_s for run in runs]),
        total_tokens_per_s=Spread.of([(run.output_tokens + run.prompt_tokens) / run.wall_s for run in runs]),
        ttft_s=_quantiles([value for run in runs for value in run.ttft_s]),
        itl_s=_quantiles([value for run in runs for value in run.itl_s]),
        wall_s=Spread.of([run.wall_s for run in runs]).median,
        requests=spec.n_requests,
        model=name,
        backend=model.backend_name,
        weights=model.weights_format,
        threads=model.threads,
        repeats=repeats,
        ceilings=machine_ceilings(model),
    )


def _quantiles(values: list[float]) -> dict[str, float]:
    found = {f"p{q:g}": percentile(values, q) for q in QUANTILES}
    return {name: value for name, value in found.items() if value is not None}


class _MixRun:
    """One repetition: submits what has arrived, steps, keeps a record per request."""

    def __init__(self, machinery: Machinery, clock: Clock, spec: MixSpec, vocab: int, number: int) -> None:
        self._core, self._executor = machinery.core, machinery.executor
        self._step_time = machinery.step_time
        self._clock = clock
        self._book = EventBook()
        self._n_open = spec.n_requests
        self._arrivals = arrivals(spec, vocab, number)
        self._arrivals.reverse()  # popped from the end

    def run(self) -> _Repeat:
        begin_s = self._clock.now_s()
        while self._n_open:
            now_s = self._clock.now_s()
            while self._arrivals and begin_s + self._arrivals[-1].arrival_s <= now_s:
                request = self._arrivals.pop()
                request = replace(request, arrival_s=begin_s + request.arrival_s)
                self._fold(self._core.submit(request))
            plan, events = self._core.begin_step(now_s)
            self._fold(events)
            if plan is None:
                sleep_s(max(0.0, begin_s + self._arrivals[-1].arrival_s - self._clock.now_s()))
                continue
            result = self._executor.execute(plan)
            self._step_time.observe(plan, result.device_s + result.host_s)
            self._fold(self._core.end_step(plan, result, self._clock.now_s()))
        wall_s = self._clock.now_s() - begin_s
        records = list(self._book.records.values())
        timings = [record.timings() for record in records]
        usages = [record.usage() for record in records]
        return _Repeat(
            wall_s=wall_s,
            output_tokens=sum(usage.output_tokens for usage in usages),
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            ttft_s=tuple(one.ttft_s for one in timings if one.ttft_s is not None),
            itl_s=tuple(gap for one in timings for gap in one.itl_s),
        )

    def _fold(self, events: list[Event]) -> None:
        self._book.fold(events)
        self._n_open -= sum(isinstance(event, FinishEvent) for event in events)


def arrivals(spec: MixSpec, vocab: int, number: int) -> list[Request]:
    """The same lengths, times and tokens for the same seed; another repeat number gives other tokens only."""
    shape = random.Random(spec.seed)
    words = random.Random(f"{spec.seed}/{number}")
    at_s = 0.0
    requests = []
    for i in range(spec.n_requests):
        prompt_tokens, new_tokens = shape.randint(*spec.prompt_tokens), shape.randint(*spec.new_tokens)
        if spec.rate_per_s is not None:
            at_s += shape.expovariate(spec.rate_per_s)
        requests.append(
            Request(
                request_id=f"mix-{number}-{i}",
                prompt_token_ids=tuple(words.randrange(vocab) for _ in range(prompt_tokens)),
                sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
                arrival_s=at_s,
            )
        )
    return requests
