"""Against what nobody here found: waits of one place and of two by the recursion of Kiefer and Wolfowitz (Lindley's, of one),
and its means by formulas.

A simulated request takes longer than a thousand steps of the recursion. So some are simulated and wait exactly as long as it
says of the same arrivals, and it goes on alone until there are enough for the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heapreplace

import pytest

from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.shape import StepShape
from diptych.metrics import Limits
from diptych.sim.cluster import Cluster, Group
from diptych.sim.load import OpenLoad
from diptych.sim.tally import Tally
from diptych.workload import LengthRange, WorkloadSpec, items_of

SIMULATED = 1_000  # requests, of those that the formulas are held against


def seconds(shape: StepShape) -> float:
    """10 ms a step and 0.1 ms a row."""
    return 0.01 + 1e-4 * shape.n_tokens


def mean_queue_s(spec: WorkloadSpec, *, n_engines: int = 1) -> float:
    config = SchedulerConfig(max_running_sequences=1, enable_prefix_cache=False)
    group = Group(n_engines=n_engines, config=config, blocks=BlockConfig(n_blocks=100), predict_s=seconds)
    tally = Tally(Limits())
    Cluster([group], tally=tally).run(OpenLoad(spec, shares_prefixes=False))
    found = tally.queue_s.distribution()
    assert found is not None
    assert found.n == spec.n_requests
    return found.mean


def right_queue_s(spec: WorkloadSpec, service_s: Callable[[int], float], *, n_engines: int = 1) -> float:
    """Mean wait in seconds of whoever is served in order of arrival by the engine that is free first; service_s: of an answer
    of so many tokens.
    """
    free_s = [0.0] * n_engines
    total_s = 0.0
    for item in items_of(spec):
        begin_s = max(item.at_s, free_s[0])
        total_s += begin_s - item.at_s
        heapreplace(free_s, begin_s + service_s(item.output_tokens))
    return total_s / spec.n_requests


def check(spec: WorkloadSpec, service_s: Callable[[int], float], mean_s: float) -> None:
    """The simulation is the recursion, and the recursion has the mean of the formula."""
    few = replace(spec, n_requests=SIMULATED)
    assert mean_queue_s(few) == pytest.approx(right_queue_s(few, service_s), rel=1e-9)
    assert right_queue_s(spec, service_s) == pytest.approx(mean_s, rel=0.12)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_place_with_equal_requests_is_m_d_1(load: float) -> None:
    """Pollaczek and Khinchine with equal services: W = rho D / (2 (1 - rho)). Prompts of 100, one token: D = 20 ms."""
    service_s = 0.02
    spec = WorkloadSpec(
        n_requests=12_000,
        prompt=LengthRange(low=100, high=100),
        output=LengthRange(low=1, high=1),
        rate_per_s=load / service_s,
        seed=11,
    )
    check(spec, lambda tokens: service_s, load * service_s / (2.0 * (1.0 - load)))


def test_a_place_with_unequal_requests_is_m_g_1() -> None:
    """W = rate E[S^2] / (2 (1 - rho)): answers of 1 to 9 tokens behind prompts of 100, each after the first 10.1 ms."""
    services_s = [0.02 + 0.0101 * (tokens - 1) for tokens in range(1, 10)]
    mean_s, square = sum(services_s) / 9, sum(one * one for one in services_s) / 9
    rate = 0.6 / mean_s
    spec = WorkloadSpec(
        n_requests=6_000,
        prompt=LengthRange(low=100, high=100),
        output=LengthRange(low=1, high=9),
        rate_per_s=rate,
        seed=11,
    )
    check(spec, lambda tokens: services_s[tokens - 1], rate * square / (2.0 * (1.0 - 0.6)))


def test_two_places_wait_less_than_half_as_long() -> None:
    """Pooling: at the same load per engine the second one helps whoever would have waited."""
    lengths = {"prompt": LengthRange(low=100, high=100), "output": LengthRange(low=1, high=1)}
    one, two = (WorkloadSpec(n_requests=4_000, rate_per_s=rate, seed=3, **lengths) for rate in (35.0, 70.0))
    right_s = right_queue_s(two, lambda tokens: 0.02, n_engines=2)
    assert right_s < 0.6 * right_queue_s(one, lambda tokens: 0.02)
    few = replace(two, n_requests=SIMULATED)
    assert mean_queue_s(few, n_engines=2) == pytest.approx(
        right_queue_s(few, lambda tokens: 0.02, n_engines=2), rel=1e-9
    )
