"""A whole simulated service: what it counts must add up, agree with theory, and be the same every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.cost.setup import setup_of
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.request import Request, SamplingParams
from diptych.metrics import Limits, summarize
from diptych.sim.cluster import Cluster, Group
from diptych.sim.engine import SimulatedEngine
from diptych.sim.load import OpenLoad, UsersLoad, UsersSpec, request_of
from diptych.sim.recorded import RecordedLoad
from diptych.sim.service import Report, Service, simulate
from diptych.sim.tally import Tally
from diptych.workload import LengthRange, WorkloadSpec, items_of
from simulated import USERS, seconds

H100 = setup_of("llama-3.1-8b", "h100-80gb-sxm")
SPEC = WorkloadSpec(
    n_requests=120, prompt=LengthRange(low=50, high=900), output=LengthRange(low=5, high=80), rate_per_s=20.0, seed=4
)


def open_load(spec: WorkloadSpec = SPEC, *, speed: float = 1.0) -> OpenLoad:
    shares = spec.shared_prefix_tokens > 0
    return OpenLoad(spec, shares_prefixes=shares, speed=speed)


def cluster_of(n_engines: int, **settings: object) -> tuple[Cluster, Tally]:
    config = SchedulerConfig(**{"max_running_sequences": 8} | settings)
    tally = Tally(Limits())
    blocks = BlockConfig(n_blocks=400, block_tokens=16)
    group = Group(n_engines=n_engines, config=config, blocks=blocks, predict_s=seconds)
    return Cluster([group], tally=tally, router="round-robin"), tally


def test_a_cluster_of_one_is_the_engine_alone() -> None:
    """The heap, the router and the streamed numbers may not change what the one loop of the stepper gives."""
    engine = SimulatedEngine(
        SchedulerConfig(max_running_sequences=8), BlockConfig(n_blocks=400, block_tokens=16), predict_s=seconds
    )
    engine.serve([request_of(item, item.at_s) for item in items_of(SPEC)])
    known = summarize([record.sample() for record in engine.book.records.values()])
    cluster, tally = cluster_of(1)
    cluster.run(open_load())
    assert (
        (tally.n_complete, tally.output_tokens) == (known.n_complete, known.output_tokens) == (120, tally.output_tokens)
    )
    for stream, exact in ((tally.ttft_s, known.ttft_s), (tally.itl_s, known.itl_s), (tally.e2e_s, known.e2e_s)):
        found = stream.distribution()
        assert found is not None
        assert exact is not None
        assert found.n == exact.n
        assert found.mean == pytest.approx(exact.mean)
        assert (found.min, found.max) == (exact.min, exact.max)
        assert found.p50 == pytest.approx(exact.p50, rel=0.03)
    cluster.members[0].engine.core.check()
    assert not cluster.members[0].engine.book.records, "records are let go, or a day would not fit into memory"


@pytest.mark.parametrize("router", ["least-delay", "longest-prefix", "round-robin"])
def test_the_same_load_gives_the_same_report(router: str) -> None:
    """Two runs that differ would make every comparison of two services worthless; another seed must differ."""

    def run(seed: int) -> Report:
        return simulate(Service.of(H100, n_engines=3, router=router), UsersLoad(replace(USERS, seed=seed)))

    first = run(2)
    assert first == run(2)
    assert first.e2e_s != run(3).e2e_s


def test_what_passes_between_client_and_scheduler_is_in_every_first_token() -> None:
    """Services answer 15 ms later than their steps say: who left that out said TTFT of published ones a tenth too short."""
    far = replace(H100, calibration=replace(H100.calibration, request_s=0.25))
    near, later = (
        simulate(Service.of(setup, n_engines=2), open_load(), limits=Limits(ttft_s=0.25), from_s=1.0)
        for setup in (H100, far)
    )
    assert (near.good_share, later.good_share) == (1.0, 0.0)
    assert near.n_requests == later.n_requests < 120
    for name in ("ttft_s", "queue_s", "e2e_s"):
        assert getattr(later, name).mean == pytest.approx(getattr(near, name).mean + 0.25), name
    assert later.tpot_s.mean == pytest.approx(near.tpot_s.mean)
    assert later.duration_s == pytest.approx(near.duration_s + 0.25)


def test_a_user_waits_for_the_way_of_every_message() -> None:
    """Nobody sends before the answer is there, so ten messages that follow one another wait for it ten times."""
    spec = UsersSpec(
        n_users=1, n_requests=10, think_s=0.0, turns=1, message=LengthRange(low=64, high=64),
        output=LengthRange(low=8, high=8),
    )  # fmt: skip
    far = replace(H100, calibration=replace(H100.calibration, request_s=0.25))
    near, later = (simulate(Service.of(setup), UsersLoad(spec)) for setup in (H100, far))
    assert later.duration_s == pytest.approx(near.duration_s + 10 * 0.25)


def test_requests_tokens_and_time_add_up() -> None:
    """Nothing is lost between arrival and report, and every second of every engine is in exactly one share."""
    report = simulate(Service.of(H100, n_engines=2), open_load())
    items = list(items_of(SPEC))
    assert report.n_requests == report.n_complete == 120
    assert report.prompt_tokens == sum(item.prompt_tokens for item in items)
    assert report.output_tokens == sum(item.output_tokens for item in items)
    assert sum(report.busy.values()) == pytest.approx(1.0)
    assert min(report.busy.values()) >= 0.0
    bins = report.timeline.bins
    assert sum(one.arrivals for one in bins) == 120
    assert sum(one.output_tokens for one in bins) == report.output_tokens
    spent_s = sum(one.prefill_s + one.decode_s + one.mixed_s for one in bins)
    assert spent_s == pytest.approx((1.0 - report.busy["idle"]) * 2 * report.duration_s)


def test_littles_law_holds() -> None:
    """Sequences in the house on average are arrivals per second times the seconds each stays."""
    cluster, tally = cluster_of(2, max_running_sequences=64)
    cluster.run(open_load(replace(SPEC, n_requests=800)))
    stay = tally.e2e_s.distribution()
    assert stay is not None
    in_house = sum(one.running_s + one.waiting_s for one in tally.timeline.bins) / tally.last_end_s
    assert in_house == pytest.approx(800 / tally.last_end_s * stay.mean, rel=0.05)


@pytest.mark.parametrize("output_tokens", [1, 2, 9])
def test_choices_that_end_in_one_step_end_their_request_once(output_tokens: int) -> None:
    """A recording of requests with several answers ended in a KeyError: all choices are as long, and end together."""
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(range(100, 300 + i)),
            sampling=SamplingParams(max_tokens=output_tokens, n=3, ignore_eos=True),
            arrival_s=0.01 * i,
        )
        for i in range(20)
    ]
    for service in (Service.of(H100), Service.of(H100, n_engines=3)):
        report = simulate(service, RecordedLoad([(one.arrival_s, one) for one in requests]))
        assert (report.n_requests, report.n_complete) == (20, 20)
        assert report.output_tokens == 20 * 3 * output_tokens
        assert sum(one.output_tokens for one in report.timeline.bins) == report.output_tokens


def test_users_wait_for_their_answers_and_find_their_history_cached() -> None:
    """A closed loop has at most one request per user in the house; its history must hit, and only with the cache on."""
    report = simulate(Service.of(H100), UsersLoad(USERS))
    assert report.n_complete == 80
    assert report.waiting_peak < 12
    assert report.cached_tokens == report.prefix_hit_tokens > 0.5 * report.prompt_tokens
    without = simulate(Service.of(H100, enable_prefix_cache=False), UsersLoad(USERS))
    assert without.cached_tokens == 0
    assert without.n_complete == 80


def test_the_router_that_looks_for_prefixes_finds_more_of_them() -> None:
    """In turn over three engines a conversation finds its history at every third place only."""
    found = {
        router: simulate(Service.of(H100, n_engines=3, router=router), UsersLoad(USERS)).cached_tokens
        for router in ("round-robin", "least-delay", "longest-prefix")
    }
    assert found["longest-prefix"] >= found["least-delay"] > found["round-robin"]


def test_more_engines_and_looser_limits_give_more_goodput() -> None:
    """At 60 times the traffic one engine queues; the limits then separate good from late."""
    limits = Limits(ttft_s=0.2, tpot_s=0.05)

    def good(n_engines: int, wanted: Limits = limits) -> float:
        spec = replace(SPEC, n_requests=400)
        return simulate(Service.of(H100, n_engines=n_engines), open_load(spec, speed=60.0), limits=wanted).good_share

    assert good(1) < 0.5 < good(8)
    assert good(1, Limits()) == 1.0


def test_a_price_becomes_a_price_per_token() -> None:
    """By hand: USD per hour of all devices, times hours, over tokens."""
    service = Service.of(replace(H100, tp=2), n_engines=3)
    report = simulate(service, open_load(), usd_per_hour=4.0)
    assert report.usd_per_hour == 24.0
    assert report.usd_per_million_output_tokens == pytest.approx(
        24.0 * report.duration_s / 3600 / report.output_tokens * 1e6
    )


def test_a_small_pool_preempts_and_refuses() -> None:
    """Prompts beyond the pool are refused and counted by reason; the others all complete."""
    report = simulate(Service.of(H100, kv_tokens=800), open_load())
    longer = sum(item.prompt_tokens >= 800 for item in items_of(SPEC))
    assert longer > 0
    assert report.refused == {"PromptTooLong": longer}
    assert report.n_complete == 120 - longer
    assert report.kv_peak > 0.9
    late = simulate(Service.of(H100, kv_tokens=800), open_load(), from_s=3.0)
    assert late.n_complete + late.refused["PromptTooLong"] == late.n_requests < 120, "the same requests are counted"
    crowded = simulate(Service.of(H100, max_waiting_tokens=2000), open_load(speed=1000.0))
    assert crowded.refused["CapacityError"] == 120 - crowded.n_complete > 0
    tight = replace(SPEC, prompt=LengthRange(low=50, high=90), output=LengthRange(low=200, high=400))
    assert simulate(Service.of(H100, kv_tokens=1200), open_load(tight)).preemptions > 0


def test_users_come_as_often_to_the_end() -> None:
    """Messages counted when their writer began to think of them: the last of each came one by one to an idle service, half of
    all where there were two for each user, and what was late among the others was diluted.
    """
    spec = UsersSpec(
        n_users=100, n_requests=200, think_s=30.0, turns=4, message=LengthRange(low=64, high=64),
        output=LengthRange(low=8, high=8),
    )  # fmt: skip
    report = simulate(Service.of(H100), UsersLoad(spec))
    assert report.n_requests == report.n_complete == 200
    assert report.duration_s == pytest.approx(200 / 100 * 30.0, rel=0.25)
    parts = simulate(Service.of(H100, n_engines=2), UsersLoad(spec), cells=2)
    assert parts.n_requests == 200


def test_a_user_who_is_refused_begins_anew() -> None:
    """History beyond the pool would be refused for ever; a new conversation goes on."""
    report = simulate(Service.of(H100, kv_tokens=1024), UsersLoad(replace(USERS, turns=50)))
    assert report.refused["PromptTooLong"] > 0
    assert report.n_complete + report.refused["PromptTooLong"] == 80


def test_what_cannot_be_is_refused() -> None:
    """What, the number, the limit."""
    with pytest.raises(ConfigError, match=r"leaves room for 0 tokens of KV: of 85.52 GB, weights take 141"):
        Service.of(setup_of("llama-3.1-70b", "h100-80gb-sxm"))
    with pytest.raises(ConfigError, match=r"engines is 100000"):
        Service.of(H100, n_engines=100_000)
    with pytest.raises(ConfigError, match=r"router is 'luck'"):
        simulate(Service.of(H100, router="luck"), open_load())
    with pytest.raises(ConfigError, match=r"think time is -1"):
        replace(USERS, think_s=-1.0)
