"""Against formulas that nobody here wrote: one place, one server."""

from __future__ import annotations

import pytest

from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.shape import StepShape
from diptych.metrics import Limits
from diptych.sim.cluster import Cluster, Group
from diptych.sim.load import OpenLoad
from diptych.sim.tally import Tally
from diptych.workload import LengthRange, WorkloadSpec


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
    assert mean_queue_s(spec) == pytest.approx(load * service_s / (2.0 * (1.0 - load)), rel=0.12)


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
    assert mean_queue_s(spec) == pytest.approx(rate * square / (2.0 * (1.0 - 0.6)), rel=0.12)


def test_two_places_wait_less_than_half_as_long() -> None:
    """Pooling: at the same load per engine the second one helps whoever would have waited."""
    lengths = {"prompt": LengthRange(low=100, high=100), "output": LengthRange(low=1, high=1)}
    one = mean_queue_s(WorkloadSpec(n_requests=4_000, rate_per_s=35.0, seed=3, **lengths))
    two = mean_queue_s(WorkloadSpec(n_requests=4_000, rate_per_s=70.0, seed=3, **lengths), n_engines=2)
    assert two < 0.6 * one
