"""A seeded mixed load, offline: requests of many lengths, all at once or at a Poisson rate, through the whole scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from diptych.compute.ceilings import Ceilings, machine_ceilings
from diptych.compute.runner import Model
from diptych.engine.load import LoadedModel, Machinery, make_machinery
from diptych.ground.clock import Clock, MonotonicClock, sleep_s
from diptych.ground.config import EngineConfig
from diptych.ground.request import Request
from diptych.lab.bench import Spread
from diptych.metrics import EventBook, Sample, Summary, percentile, summarize
from diptych.stepper import Stepper, serve
from diptych.workload import WorkloadSpec, requests_of

QUANTILES = (50.0, 95.0, 99.0)


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


def run_mix(
    model: Model,
    config: EngineConfig,
    spec: WorkloadSpec,
    *,
    name: str,
    repeats: int,
    progress: Callable[[str], None],
    loaded: LoadedModel | None = None,
) -> MixReport:
    """Run the same load `repeats` times; latencies are pooled over the repeats, rates are medians of them.

    loaded: where the model came with its words and its folder, which drafters are found by.
    """
    longest = spec.prompt.high + spec.shared_prefix_tokens + spec.output.high
    scheduler = replace(
        config.scheduler,
        max_running_sequences=min(spec.n_requests, config.scheduler.max_running_sequences or spec.n_requests),
    )
    clock = MonotonicClock()
    config = replace(config, max_context_tokens=longest, scheduler=scheduler)
    machinery = make_machinery(model, config, clock=clock, loaded=loaded)
    samples: list[Sample] = []
    summaries: list[Summary] = []
    for number in range(repeats):
        progress(f"repeat {number + 1} of {repeats}")
        machinery.core.reset_prefix_cache()
        requests = requests_of(spec, vocab_size=model.spec.vocab_size, token_seed=number, name=f"mix-{number}")
        samples += (run := _run(machinery, clock, requests))
        summaries.append(summarize(run))
    return MixReport(
        output_tokens_per_s=Spread.of([one.output_tokens_per_s for one in summaries]),
        total_tokens_per_s=Spread.of([one.total_tokens_per_s for one in summaries]),
        ttft_s=_quantiles([one.ttft_s for one in samples if one.ttft_s is not None]),
        itl_s=_quantiles([gap for one in samples for gap in one.itl_s]),
        wall_s=Spread.of([one.duration_s for one in summaries]).median,
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


def _run(machinery: Machinery, clock: Clock, requests: list[Request]) -> list[Sample]:
    book = EventBook()
    stepper = Stepper(machinery.core, machinery.executor, clock, fold=book.fold, observe=machinery.observe)
    begin_s = clock.now_s()
    serve(stepper, [replace(one, arrival_s=begin_s + one.arrival_s) for one in requests], wait=sleep_s)
    return [record.sample() for record in book.records.values()]
