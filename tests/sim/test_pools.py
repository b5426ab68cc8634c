"""Two pools: nothing is lost between them, and what a link costs is what its bytes and its latency say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from diptych.control.router import Place, Route, Router
from diptych.cost.parameters import kv_bytes_stored
from diptych.cost.setup import setup_of
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.request import Request, SamplingParams
from diptych.metrics import Limits
from diptych.sim.cluster import Cluster, Group, Wire
from diptych.sim.link import Link, parse_link
from diptych.sim.load import OpenLoad, UsersLoad, usual_context
from diptych.sim.pools import Pool, Service
from diptych.sim.service import Report, simulate
from diptych.sim.tally import Tally
from diptych.workload import LengthRange, WorkloadItem, WorkloadSpec, items_of
from simulated import USERS, seconds

H100 = setup_of("llama-3.1-8b", "h100-80gb-sxm")
L40S = setup_of("llama-3.1-8b", "l40s")
WIDE = Link(bytes_per_s=float("inf"))
SPEC = WorkloadSpec(
    n_requests=120, prompt=LengthRange(low=50, high=5000), output=LengthRange(low=1, high=80), rate_per_s=8.0, seed=4
)


def pools(link: Link, *, local_prefill_s: float = 0.0, decoders: int = 2, **settings: int) -> Service:
    decoder = Pool.of(L40S, n_engines=decoders, **settings)
    return Service(pool=decoder, readers=Pool.of(H100, n_engines=2), link=link, local_prefill_s=local_prefill_s)


def run(service: Service, spec: WorkloadSpec = SPEC) -> Report:
    return simulate(service, OpenLoad(spec, shares_prefixes=False))


def by_hand(link: Link, kv_bytes: Callable[[int], float], *items: WorkloadItem) -> Tally:
    """One engine of each kind, chunks of 128 tokens."""
    config = SchedulerConfig(max_step_tokens=128, max_running_sequences=8, enable_prefix_cache=False)
    blocks = BlockConfig(n_blocks=400, block_tokens=16)
    groups = [
        Group(n_engines=1, config=config, blocks=blocks, predict_s=seconds, decodes=decodes)
        for decodes in (True, False)
    ]
    tally = Tally(Limits(), n_groups=2)
    cluster = Cluster(groups, tally=tally, wire=Wire(link=link, kv_bytes=kv_bytes))
    cluster.run(OpenLoad(items, shares_prefixes=False))
    for member in cluster.members:
        member.engine.core.check()
        assert member.engine.core.pool.free_blocks == 400, "blocks stay held for nobody"
    return tally


def test_pieces_travel_while_later_chunks_are_computed() -> None:
    """By hand: 300 tokens are 18 blocks, read in chunks of 128, 128 and 33, and 12 tokens for the other engine. At 1 kB a token
    and 100 kB/s the second piece waits for the first.
    """
    item = WorkloadItem(index=0, at_s=0.0, prompt_tokens=300, output_tokens=3)
    tally = by_hand(Link(bytes_per_s=1e5, latency_s=0.5), lambda tokens: 1e3 * tokens, item)
    first_s, read_s = 0.0228, 2 * 0.0228 + 0.0133
    sent_s = first_s + 2.88  # the port is busy from the first chunk's end to the last byte
    ttft, itl, hand_off = (one.distribution() for one in (tally.ttft_s, tally.itl_s, tally.hand_off_s))
    assert ttft is not None
    assert itl is not None
    assert hand_off is not None
    assert ttft.mean == pytest.approx(sent_s + 0.5 + 0.0112), "the first token is drawn where the answer is written"
    assert hand_off.mean == pytest.approx(sent_s + 0.5 - read_s)
    assert (itl.min, itl.max) == pytest.approx((0.0101, 0.0101))
    assert tally.sent_bytes == 288e3


def test_requests_tokens_and_bytes_are_conserved() -> None:
    """Every prompt goes over once, in whole blocks; answers are as long as without pools."""
    items = list(items_of(SPEC))
    assert min(item.output_tokens for item in items) == 1, "one ends with its first token"
    for link in (WIDE, Link(bytes_per_s=5e9, latency_s=1e-3)):
        report = run(pools(link))
        assert report.n_complete == len(items)
        assert report.n_sent == len(items)
        assert report.prompt_tokens == sum(item.prompt_tokens for item in items)
        assert report.output_tokens == sum(item.output_tokens for item in items)
        size = pools(WIDE).pool.blocks.block_tokens
        blocks = [(item.prompt_tokens - 1) // size * size for item in items]
        assert report.sent_bytes == sum(kv_bytes_stored(H100.model, H100.kv, tokens) for tokens in blocks)
        decode, prefill = report.pools
        assert prefill.busy["decode"] == 0.0
        assert 0.0 < decode.prefill_share < 0.1, "what fills no block"
        for pool in report.pools:
            assert sum(pool.busy.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("shared", [0, 2048])
def test_what_was_sent_was_not_found_in_a_cache(shared: int) -> None:
    """Also where a prompt lost its blocks before a step had it: it was looked up once more, and found what had been sent."""
    spec = replace(
        SPEC,
        n_requests=200,
        prompt=LengthRange(low=50, high=2500),
        output=LengthRange(low=1, high=900),
        rate_per_s=40.0,
        shared_prefix_tokens=shared,
    )
    service = pools(Link(bytes_per_s=1e9, latency_s=0.1), kv_tokens=12_000)
    report = simulate(service, OpenLoad(spec, shares_prefixes=True))
    assert report.pools[0].preemptions > 0
    assert report.n_sent == report.n_complete == spec.n_requests
    assert report.prefix_query_tokens == report.prompt_tokens
    assert report.prefix_hit_tokens == report.cached_tokens
    assert (report.prefix_hit_tokens > 0) == (shared > 0)


def test_pools_of_one_device_and_an_endless_link_write_what_one_pool_writes() -> None:
    """The split may move time, never tokens: and nobody waits for keys and values."""
    reader = Pool.of(H100, n_engines=2)
    report = run(Service(pool=reader, readers=reader, link=WIDE, local_prefill_s=0.0))
    one = run(Service(pool=replace(reader, n_engines=4)))
    assert (report.n_complete, report.output_tokens) == (one.n_complete, one.output_tokens)
    assert report.hand_off_s is not None
    assert report.hand_off_s.max == pytest.approx(0.0, abs=1e-9)
    assert report.itl_s is not None
    assert one.itl_s is not None
    assert report.itl_s.max < one.itl_s.max, "no decode waits for a prefill"


def test_a_slower_link_never_hands_over_sooner() -> None:
    """Monotonic in bandwidth and in latency."""
    waits = []
    for rate, latency_s in ((50e9, 0.0), (50e9, 0.01), (5e9, 0.01), (5e9, 0.1), (1e9, 0.1)):
        report = run(pools(Link(bytes_per_s=rate, latency_s=latency_s)))
        assert report.hand_off_s is not None
        waits.append(report.hand_off_s.mean)
    assert waits == sorted(waits)


def test_a_full_decode_pool_makes_prompts_wait_and_loses_none() -> None:
    """Nobody reads what there is no room for; whoever waits there already goes first."""
    report, ample = run(pools(WIDE, kv_tokens=9000)), run(pools(WIDE))
    assert report.n_complete == ample.n_complete == 120
    assert report.pools[0].kv_peak > 0.9
    assert report.ttft_s is not None
    assert ample.ttft_s is not None
    assert report.ttft_s.max > ample.ttft_s.max + 0.1


def test_a_short_suffix_is_read_where_it_is_answered() -> None:
    """A conversation's next message is short and its history is there: sending would cost more than reading."""
    all_sent = simulate(pools(WIDE), UsersLoad(USERS))
    some = simulate(pools(WIDE, local_prefill_s=0.05), UsersLoad(USERS))
    none = simulate(pools(WIDE, local_prefill_s=60.0), UsersLoad(USERS))
    assert all_sent.n_sent == 80 > some.n_sent >= none.n_sent == 0
    assert all_sent.n_complete == some.n_complete == none.n_complete == 80
    whole = kv_bytes_stored(H100.model, H100.kv, all_sent.prompt_tokens)
    assert all_sent.sent_bytes < 0.6 * whole, "what the decode engine has cached is not sent"


class _Cached:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def prefix_match(self, token_ids: tuple[int, ...], salt: str | None = None, *, digests: object = None) -> int:
        return self.tokens


class _PerToken:
    """1 us for a token read, 10 us for one written."""

    def prefill_us(self, new_tokens: int, cached_tokens: int) -> int:
        return new_tokens

    def decode_us(self, context_tokens: int, output_tokens: int) -> int:
        return 10 * output_tokens


def test_the_router_counts_work_where_it_is_done() -> None:
    """By hand: a read prompt is no longer the reader's; an answer that is over is nobody's."""
    places = [Place(cache=_Cached(0), price=_PerToken(), decodes=decodes) for decodes in (True, False, False)]
    router = Router(places, local_prefill_us=100)

    def choose(name: str, prompt_tokens: int) -> Route:
        prompt, sampling = (1,) * prompt_tokens, SamplingParams(max_tokens=5)
        return router.choose(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))

    assert choose("long", 900) == Route(1, 0)
    assert choose("next", 500) == Route(2, 0)
    assert choose("third", 300) == Route(2, 0), "900 us wait on the other one"
    router.handed_off("long")
    assert choose("fourth", 700) == Route(1, 0)
    assert choose("short", 100) == Route(0, 0)
    router.forget("short")
    router.began("fourth")
    assert router.open_work_us(decodes=False) == 800, "of the next and the third"
    with pytest.raises(ConfigError, match="none of 1 engines decodes"):
        Router(places[1:2])


def test_a_stream_that_has_begun_keeps_nobody_waiting_but_whoever_reads_keeps_it() -> None:
    """By hand: 128 tokens of 10 us stand for an answer that is not known, until its first one comes."""
    home, other = _Cached(800), _Cached(0)
    router = Router([Place(cache=home, price=_PerToken()), Place(cache=other, price=_PerToken())])

    def choose(name: str) -> int:
        request = Request(
            request_id=name, prompt_token_ids=(1,) * 1000, sampling=SamplingParams(max_tokens=5), arrival_s=0.0
        )
        return router.choose(request).decode

    assert choose("first") == 0, "200 us against 1,000"
    assert choose("beside") == 1, "it has not begun: 1,480 + 2 * 200 us against 1,000"
    router.began("first")
    router.began("first")
    assert choose("behind") == 0, "2 * 200 us, as it shares its steps"
    router.began("beside")
    router.began("behind")
    for name in "abc":
        assert choose(name) == 0, "up to 5 * 200 us against 2 * 1,000"
        router.began(name)
    home.tokens = 0
    assert choose("cold") == 1, "6 * 1,000 us against 2 * 1,000"
    for name in ("first", "beside", "behind", *"abc", "cold"):
        router.forget(name)
    assert router.open_work_us(decodes=True) == 0


def test_what_pools_cannot_be_is_refused() -> None:
    """What, the number, the limit."""
    pool = Pool.of(H100)
    with pytest.raises(ConfigError, match="two pools need a link"):
        Service(pool=pool, readers=pool)
    with pytest.raises(ConfigError, match="a link joins two pools; this service has one"):
        Service(pool=pool, link=WIDE)
    with pytest.raises(ConfigError, match=r"holds llama-3.1-8b .* the other qwen3-8b"):
        Service(pool=Pool.of(setup_of("qwen3-8b", "l40s")), readers=pool, link=WIDE)
    with pytest.raises(ConfigError, match="blocks of 32 tokens, the other of 16"):
        Service(pool=Pool.of(L40S, block_tokens=16), readers=pool, link=WIDE)
    with pytest.raises(ConfigError, match="carries 0 bytes a second"):
        Link(bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="latency is -1"):
        Link(bytes_per_s=1.0, latency_s=-1.0)
    assert parse_link("50GB/s,10us") == Link(bytes_per_s=50e9, latency_s=1e-5)
    for text in ("50", "50Gb/s", "-1GB/s", "1GB/s,", "1GB/s,3"):
        with pytest.raises(ConfigError, match="cannot read the link"):
            parse_link(text)


def test_a_prompt_that_the_decode_engine_cannot_hold_is_refused_at_the_door() -> None:
    """And not after it was read."""
    report = run(pools(WIDE, kv_tokens=3200))
    too_long = sum(item.prompt_tokens >= 3200 for item in items_of(SPEC))
    assert report.refused == {"PromptTooLong": too_long}
    assert report.n_complete == 120 - too_long


def test_a_pool_of_windowed_layers_is_as_large_as_its_sequences_make_it() -> None:
    """Short ones keep all of themselves in every layer, long ones a window of most; without windows a token is a token."""
    gemma = setup_of("gemma-3-27b", "h200-141gb-sxm")
    short, long = (Pool.of(gemma, context_tokens=tokens).kv_tokens for tokens in (500, 50_000))
    assert long > 4 * short
    assert Pool.of(H100, context_tokens=500).kv_tokens == Pool.of(H100).kv_tokens


def test_a_load_says_how_long_its_sequences_are() -> None:
    """At their end: of requests that come by themselves the mean, of people their conversations half-way."""
    loads = OpenLoad(SPEC, shares_prefixes=False), OpenLoad(tuple(items_of(SPEC)), shares_prefixes=False)
    ends = [item.prompt_tokens + item.output_tokens for item in items_of(SPEC)]
    assert {usual_context(load) for load in loads} == {sum(ends) // len(ends)}
    users = UsersLoad(USERS)
    middle = USERS.system_tokens + (USERS.turns + 1) / 2 * (
        (USERS.message.low + USERS.message.high) / 2 + (USERS.output.low + USERS.output.high) / 2
    )
    assert usual_context(users) == int(middle)
    assert next(users.start())[0] == next(UsersLoad(USERS).start())[0], "asking does not begin it"
