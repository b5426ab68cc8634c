"""What a simulated service answered a load: `simulate(service, load)`.

A service may be divided into cells, equal parts that each have a router and every so-manieth request or user of the load.
Cells are simulated one by one or in several processes; what they saw is added in their order, so that nothing depends on
how many processes there were.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from diptych.ground.errors import ConfigError
from diptych.metrics import Distribution, Limits
from diptych.sim.cluster import Cluster
from diptych.sim.film import Film
from diptych.sim.load import Load
from diptych.sim.pools import Pool, Service
from diptych.sim.statistics import Timeline
from diptych.sim.tally import Tally, Work
from diptych.sim.workers import workers

__all__ = ["Pool", "PoolReport", "Report", "Service", "simulate"]

OBJECTS_BETWEEN_COLLECTIONS = 100_000

Told = Callable[[int, float], object]  # requests that are over, seconds simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What one pool did. busy: shares of the time of its engines by what a step held; they add up to 1.

    Weighted by time in steps: sequences_per_step, kv_share (of a KV pool). Peaks are of one engine.
    """

    busy: Mapping[str, float]  # prefill, decode, mixed, idle
    n_steps: int
    sequences_per_step: float
    kv_share: float
    kv_peak: float
    waiting_peak: int
    preemptions: int
    prefill_share: float  # of the time of its engines that prefill took, what it added to mixed steps included


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a load. Rates are over duration_s, from the first arrival to the last end.

    Latencies are of the requests that completed, percentiles within half a percent. pools: as in the service, the one that
    decodes first; the same numbers over all engines stand beside it. late_share: of what completed, by the limit missed.
    sent_*: prompts read in one pool and answered in another; hand_off_s: from their last chunk to their last byte's arrival.
    usd_per_million_tokens: of output tokens and of all; None where no price is known.
    """

    service: Service
    limits: Limits
    duration_s: float
    n_requests: int
    n_complete: int
    n_failed: int
    refused: Mapping[str, int]
    requests_per_s: float
    goodput_requests_per_s: float
    good_share: float
    late_share: Mapping[str, float]  # ttft, tpot, e2e
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    queue_s: Distribution | None
    e2e_s: Distribution | None
    hand_off_s: Distribution | None
    n_sent: int
    sent_bytes: float
    busy: Mapping[str, float]
    n_steps: int
    sequences_per_step: float
    kv_share: float
    kv_peak: float
    waiting_peak: int
    preemptions: int
    pools: tuple[PoolReport, ...]
    prefix_query_tokens: int
    prefix_hit_tokens: int
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    usd_per_million_tokens: float | None
    timeline: Timeline
    curves: Mapping[str, list[tuple[float, float]]]  # (seconds, share of values at or below) of ttft, tpot, itl, queue


_Part = tuple[Service, Load, Limits, float, int]


@dataclass(slots=True)
class _Seen:
    """What one cell saw, or several."""

    tally: Tally
    refused: Counter[str]
    preemptions: list[int]  # by pool
    query_tokens: int
    hit_tokens: int

    def take(self, other: _Seen) -> None:
        self.tally.take(other.tally)
        self.refused += other.refused
        self.preemptions = [a + b for a, b in zip(self.preemptions, other.preemptions, strict=True)]
        self.query_tokens += other.query_tokens
        self.hit_tokens += other.hit_tokens


def simulate(
    service: Service,
    load: Load,
    *,
    limits: Limits | None = None,
    usd_per_hour: float | None = None,
    seed: int = 0,
    from_s: float = 0.0,
    cells: int = 1,
    processes: int = 1,
    film: TextIO | None = None,
    progress: Told | None = None,
) -> Report:
    """Serve the load. usd_per_hour: of one device; None: the devices' own prices. Same arguments, same report.

    from_s: requests that come before are served and not counted, half of the load's at most.
    film: gets the first minute of the first engine, see `sim.film`.
    cells: independent equal parts of the service, see the module. processes: run at one time; it changes no number.
    """
    if not 1 <= cells <= load.n_parts:
        raise ConfigError(f"the load cannot be dealt to {cells} cells; it must be between 1 and {load.n_parts}")
    limits = Limits() if limits is None else limits
    parts = [(service.part(i, cells), load.part(i, cells), limits, from_s, seed + i) for i in range(cells)]
    if cells > 1 and film is not None:
        raise ConfigError(
            f"the service has {cells} cells; steps are written of one alone", hint="leave --steps or --cells out"
        )
    if cells > 1:
        first, *others = _run_all(parts, processes, progress)
    else:
        first, others = _run(*parts[0], progress=progress, film=film), []
    for other in others:
        first.take(other)
    return _report(service, first, service.usd_per_hour(usd_per_hour))


def simulate_if_good(
    service: Service, load: Load, *, limits: Limits, good_share: float, from_s: float = 0.0, seed: int = 0
) -> Report | None:
    """As `simulate`, or None where less than this share of requests is good, given up as soon as that is certain."""
    seen = _run(service, load, limits, from_s, seed, good_share=good_share)
    report = _report(service, seen, service.usd_per_hour(None))
    return report if report.good_share >= good_share else None


def is_good(
    service: Service, load: Load, *, limits: Limits, good_share: float, from_s: float = 0.0, seed: int = 0
) -> bool:
    """Whether at least this share of requests is good; simulated until that is certain."""
    seen = _run(service, load, limits, from_s, seed, good_share=good_share, is_won_enough=True)
    return seen.tally.good_share >= good_share


def _run(
    service: Service,
    load: Load,
    limits: Limits,
    from_s: float,
    seed: int,
    *,
    progress: Told | None = None,
    film: TextIO | None = None,
    good_share: float = 0.0,
    is_won_enough: bool = False,
) -> _Seen:
    tally = Tally(limits, n_groups=len(service.pools), from_s=from_s, n_requests=load.n_requests)
    cluster = Cluster(
        service.groups(),
        tally=tally,
        router=service.router,
        wire=service.wire(),
        seed=seed,
        request_s=service.request_s,
    )
    filmed = cluster.members[0]
    if film is not None:
        filmed.film = Film(film, service.pool.setup, filmed.engine)
    with _rare_collections():
        cluster.run(load, progress=progress, good_share=good_share, is_won_enough=is_won_enough)
    if filmed.film is not None:  # it was over before the minute was
        filmed.film.close(filmed.engine.clock.now_s())
    cores = [member.engine.core.stats() for member in cluster.members]
    n_decoders = service.pool.n_engines
    return _Seen(
        tally=tally,
        refused=cluster.refused,
        preemptions=[sum(one.preemptions for one in part) for part in (cores[:n_decoders], cores[n_decoders:])],
        # engines that only read look for a prompt that was looked for where it is answered
        query_tokens=sum(one.prefix_queries_tokens for one in cores[:n_decoders]),
        hit_tokens=sum(one.prefix_hits_tokens for one in cores[:n_decoders]),
    )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A simulation makes millions of small objects and no circle of them: looking for circles takes a tenth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run_part(part: _Part) -> _Seen:
    return _run(*part)


def _run_all(parts: list[_Part], processes: int, progress: Told | None) -> list[_Seen]:
    """In order, each told of when it is done."""
    seen: list[_Seen] = []
    n_over = 0
    with workers(processes) as mapped:
        for one in mapped(_run_part, parts):
            seen.append(one)
            n_over += one.tally.n_arrived
            if progress is not None:
                progress(n_over, one.tally.last_end_s)
    return seen


def _report(service: Service, seen: _Seen, usd_per_hour: float | None) -> Report:
    tally = seen.tally
    duration_s = max(0.0, tally.last_end_s - tally.first_arrival_s)
    per_s = 1.0 / duration_s if duration_s else 0.0
    tokens = tally.prompt_tokens + tally.output_tokens
    usd = None if usd_per_hour is None else usd_per_hour * duration_s / 3600.0
    pools = tuple(
        _pool(work, pool.n_engines * tally.steps_s, n)
        for work, pool, n in zip(tally.work, service.pools, seen.preemptions, strict=False)
    )
    whole = Work()
    for work in tally.work:
        whole.take(work)
    all_of_it = _pool(whole, service.n_engines * tally.steps_s, sum(seen.preemptions))
    late = {"ttft": tally.n_late_ttft, "tpot": tally.n_late_tpot, "e2e": tally.n_late_e2e}
    return Report(
        service=service,
        limits=tally.limits,
        duration_s=duration_s,
        n_requests=tally.n_arrived,
        n_complete=tally.n_complete,
        n_failed=tally.n_failed,
        refused=dict(sorted(seen.refused.items())),
        requests_per_s=tally.n_complete * per_s,
        goodput_requests_per_s=tally.n_good * per_s,
        good_share=tally.good_share,
        late_share={name: n / tally.n_complete if tally.n_complete else 0.0 for name, n in late.items()},
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        recomputed_tokens=tally.recomputed_tokens,
        output_tokens_per_s=tally.output_tokens * per_s,
        total_tokens_per_s=tokens * per_s,
        ttft_s=tally.ttft_s.distribution(),
        tpot_s=tally.tpot_s.distribution(),
        itl_s=tally.itl_s.distribution(),
        queue_s=tally.queue_s.distribution(),
        e2e_s=tally.e2e_s.distribution(),
        hand_off_s=tally.hand_off_s.distribution(),
        n_sent=tally.n_sent,
        sent_bytes=tally.sent_bytes,
        busy=all_of_it.busy,
        n_steps=all_of_it.n_steps,
        sequences_per_step=all_of_it.sequences_per_step,
        kv_share=all_of_it.kv_share,
        kv_peak=all_of_it.kv_peak,
        waiting_peak=all_of_it.waiting_peak,
        preemptions=all_of_it.preemptions,
        pools=pools,
        prefix_query_tokens=seen.query_tokens,
        prefix_hit_tokens=seen.hit_tokens,
        usd_per_hour=usd_per_hour,
        usd_per_million_output_tokens=_per_million(usd, tally.output_tokens),
        usd_per_million_tokens=_per_million(usd, tokens),
        timeline=whole.timeline,
        curves={name: getattr(tally, f"{name}_s").shares() for name in ("ttft", "tpot", "itl", "queue")},
    )


def _pool(work: Work, all_s: float, preemptions: int) -> PoolReport:
    step_s = work.step_s
    spent_s = {"prefill": work.prefill_s, "decode": work.decode_s, "mixed": work.mixed_s}
    return PoolReport(
        busy={name: s / all_s if all_s else 0.0 for name, s in spent_s.items()}
        | {"idle": max(0.0, 1.0 - step_s / all_s) if all_s else 1.0},
        n_steps=work.n_steps,
        sequences_per_step=work.running_s / step_s if step_s else 0.0,
        kv_share=work.kv_share_s / step_s if step_s else 0.0,
        kv_peak=work.kv_peak,
        waiting_peak=work.waiting_peak,
        preemptions=preemptions,
        prefill_share=(work.prefill_s + work.mixed_prefill_s) / all_s if all_s else 0.0,
    )


def _per_million(usd: float | None, tokens: int) -> float | None:
    return None if usd is None or not tokens else usd / tokens * 1e6
