"""Runs of steps at once, cells and processes: they save time and change no number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cost.setup import setup_of
from diptych.metrics import Limits
from diptych.sim.cluster import Cluster
from diptych.sim.link import Link
from diptych.sim.load import Load, OpenLoad, UsersLoad, UsersSpec
from diptych.sim.pools import Service
from diptych.sim.service import simulate
from diptych.sim.tally import Tally
from diptych.workload import LengthRange, WorkloadSpec

H100 = setup_of("llama-3.1-8b", "h100-80gb-sxm")
GEMMA = setup_of("gemma-3-4b", "a100-80gb-sxm")
USERS = UsersSpec(
    n_users=20,
    n_requests=120,
    think_s=1.0,
    turns=4,
    message=LengthRange(low=50, high=300),
    output=LengthRange(low=20, high=190),
    system_tokens=200,
    seed=2,
)
OPEN = WorkloadSpec(
    n_requests=200,
    prompt=LengthRange(low=50, high=900),
    output=LengthRange(low=5, high=180),
    rate_per_s=20.0,
    seed=4,
    shared_prefix_tokens=100,
    n_prefixes=4,
)


def users(spec: UsersSpec = USERS) -> Load:
    return UsersLoad(spec)


def stream(rate_per_s: float = 20.0) -> Load:
    return OpenLoad(replace(OPEN, rate_per_s=rate_per_s), shares_prefixes=True)


@pytest.mark.parametrize(
    ("service", "load"),
    [
        (Service.of(H100), users),
        (Service.of(H100), lambda: users(replace(USERS, n_users=1, think_s=0.0))),
        (Service.of(H100, n_engines=3), users),
        (Service.of(H100, n_engines=2, kv_tokens=4000), users),
        (Service.of(H100), lambda: users(replace(USERS, is_midway=True))),
        (Service.of(H100, n_engines=2, kv_tokens=4000), stream),
        (Service.of(H100, enable_prefix_cache=False, kv_tokens=6000), stream),
        (Service.of(H100, max_running_sequences=16, stall_budget_s=0.02), lambda: stream(90.0)),
        (Service.of(GEMMA, max_running_sequences=8), stream),
        (Service.of(H100, prefills_alone=True), stream),
    ],
    ids=[
        "users",
        "one who asks on",
        "three",
        "tight",
        "midway",
        "tight stream",
        "no cache",
        "full",
        "windows",
        "alone",
    ],
)
def test_leaps_change_nothing(service: Service, load: object) -> None:
    """Every latency to the last bit, idle engines woken too; sums over several engines are added in another order."""
    seen, groups = [], [replace(one, wake_s=3e-3) for one in service.groups()]
    for leaps in (False, True):
        tally = Tally(Limits())
        cluster = Cluster(groups, tally=tally, router=service.router, leaps=leaps)
        cluster.run(load())  # type: ignore[operator]
        for member in cluster.members:
            member.engine.core.check()
        streams = [tally.ttft_s, tally.itl_s, tally.tpot_s, tally.queue_s, tally.e2e_s]
        work = tally.work[0]
        exact = [one.distribution() for one in streams], work.n_steps, tally.output_tokens, tally.cached_tokens
        seen.append((exact, work.kv_peak, work.waiting_peak, work.step_s, work.kv_share_s, tally.timeline.bin_s))
    assert seen[0][:3] == seen[1][:3]
    assert seen[0][3:] == pytest.approx(seen[1][3:])


def test_the_number_of_processes_changes_nothing() -> None:
    """Cells are added in their order, whoever simulated them; each has its share of requests."""
    service = Service.of(H100, n_engines=4)
    load = OpenLoad(OPEN, shares_prefixes=True)
    one = simulate(service, load, cells=2)
    assert one == simulate(service, load, cells=2, processes=2)
    assert one.n_requests == one.n_complete == 200
    assert one.output_tokens == simulate(service, load).output_tokens
    closed = simulate(service, UsersLoad(USERS), cells=4)
    assert closed.n_complete == 120


def test_users_in_mid_conversation_find_their_history() -> None:
    """Else the first minute of a simulated afternoon would read every history anew."""
    spec = replace(USERS, is_midway=True, n_requests=20)
    warm = simulate(Service.of(H100), UsersLoad(spec))
    cold = simulate(Service.of(H100), UsersLoad(replace(spec, is_midway=False)))
    assert warm.cached_tokens > 0.4 * warm.prompt_tokens
    assert warm.prompt_tokens > 1.5 * cold.prompt_tokens


@pytest.mark.parametrize("has_readers", [False, True])
def test_a_conversation_goes_on_from_a_state_as_from_blocks(has_readers: bool) -> None:
    """With as many places as sequences nobody found anything: places that running sequences may need are not given away."""
    found = []
    for name in ("qwen3-8b", "qwen3.5-9b"):
        setup = setup_of(name, "h100-80gb-sxm")
        service = Service.of(setup)
        if has_readers:
            service = replace(
                service, readers=service.pool, link=Link(bytes_per_s=50e9, latency_s=1e-5), local_prefill_s=0.0
            )
        result = simulate(service, UsersLoad(USERS))
        assert result.n_complete == 120
        found.append(result.cached_tokens / result.prompt_tokens)
    # what all users share was read elsewhere, so that no state of it is left where answers are written
    assert found[1] > (0.85 if has_readers else 0.98) * found[0] > 0.4
