"""Tokens per second of a device against tokens per second of a user: what batch limits, splits and pools trade.

Each point is a closed loop: as many users as places, who never think, so that the engine is always full and Little's law
gives its output from how long an answer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diptych.metrics import Limits
from diptych.sim.capacity import Ask, Trial, run_one
from diptych.sim.pools import Pool, Service
from diptych.sim.search import Answer
from diptych.sim.workers import workers

BATCHES = (1, 8, 32, 128)
DEVICES = 2  # kinds whose splits are swept
NO_LIMITS = Limits(ttft_s=1e9, tpot_s=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One layout under one batch limit, full. name: of the line it belongs to."""

    name: str
    is_pools: bool
    batch: int  # sequences of an engine that decodes
    tokens_per_s_of_device: float
    tokens_per_s_of_user: float


def sweep(
    ask: Ask,
    candidates: Sequence[Pool],
    found: Answer,
    *,
    processes: int = 1,
    tell: Callable[[str, int, int], object] | None = None,
) -> list[Point]:
    """Points of the cheapest devices in every split that holds the model, and of the pools that were found."""
    kinds = {layout.service.pool.setup.hardware.name for layout in found.colocated[:DEVICES]}
    lines = [(pool.setup.label, Service(pool=replace(pool, n_engines=1))) for pool in candidates]
    lines = [(name, service) for name, service in lines if service.pool.setup.hardware.name in kinds]
    lines += [(layout.service.label, layout.service) for layout in found.pools]
    named = [(name, batch, _trial(service, batch, ask)) for name, service in lines for batch in BATCHES]
    points: list[Point] = []
    with workers(processes) as mapped:
        for (name, batch, trial), report in zip(named, mapped(run_one, [one for *_, one in named]), strict=True):
            if tell is not None:
                tell("batch limits and splits", len(points), len(named))
            if report.e2e_s is None or report.tpot_s is None:
                continue
            per_s = trial.n_users * report.output_tokens / report.n_complete / report.e2e_s.mean
            points.append(
                Point(
                    name=name,
                    is_pools=trial.service.readers is not None,
                    batch=batch,
                    tokens_per_s_of_device=per_s / trial.service.n_devices,
                    tokens_per_s_of_user=1.0 / report.tpot_s.mean,
                )
            )
    return points


def _trial(service: Service, batch: int, ask: Ask) -> Trial:
    scheduler = replace(service.pool.scheduler, max_running_sequences=batch)
    service = replace(service, pool=replace(service.pool, scheduler=scheduler))
    n_users = batch * service.pool.n_engines
    always = replace(ask, n_users=n_users, think_s=0.0, limits=NO_LIMITS)
    return Trial(service=service, ask=always, n_users=n_users, n_requests=max(16, 3 * n_users), is_warm=False)
