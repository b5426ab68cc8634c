"""The search for a number of devices: estimates and bisections that move the way they must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.control.ahead import ForeseeingCore
from diptych.cost.setup import setup_of
from diptych.ground.errors import ConfigError
from diptych.ground.handoff import HandOff
from diptych.metrics import Limits
from diptych.sim.capacity import Ask, Bisection, Fit, Trial, engines_for, fluid_users, paced, uncached, with_engines
from diptych.sim.cluster import Cluster
from diptych.sim.link import Link
from diptych.sim.pools import Pool, Service
from diptych.sim.service import Report, simulate
from diptych.sim.tally import Tally
from diptych.workload import LengthRange

H100 = Pool.of(setup_of("llama-3.1-8b", "h100-80gb-sxm"))
L40S = Pool.of(setup_of("llama-3.1-8b", "l40s"))
ASK = Ask(
    n_users=60,
    think_s=2.0,
    turns=3,
    message=LengthRange(low=400, high=900),
    output=LengthRange(low=4, high=24),
    limits=Limits(ttft_s=0.4, tpot_s=0.06),
    system_tokens=100,
)


def test_the_fluid_model_moves_the_right_way() -> None:
    """A faster device, looser limits, shorter messages, longer thinking and a cache hold more users; never fewer."""
    base = fluid_users(L40S, ASK)
    assert base > 0.0
    assert fluid_users(H100, ASK) > base
    assert fluid_users(L40S, replace(ASK, limits=Limits(ttft_s=0.4, tpot_s=0.12))) >= base
    assert fluid_users(L40S, replace(ASK, message=LengthRange(low=4000, high=9000))) < base
    assert fluid_users(L40S, replace(ASK, think_s=20.0)) > base
    assert fluid_users(uncached(Service(pool=L40S)).pool, ASK) < base
    assert fluid_users(L40S, ASK, reads=False) > base
    assert fluid_users(L40S, replace(ASK, limits=Limits(ttft_s=1e-6, tpot_s=0.06))) == 0.0
    far = replace(L40S.setup, calibration=replace(L40S.setup.calibration, request_s=0.5))
    assert fluid_users(replace(L40S, setup=far), ASK) == 0.0, (
        "half a second to the scheduler, and 0.4 to the first token"
    )


def bisected(service: Service, ask: Ask = ASK) -> int:
    guess = fluid_users(service.pool, ask)
    return Bisection(service=service, ask=ask, guess=guess, n_requests=80, close=0.15, most=2000).run()


def test_a_bisection_ends_where_limits_break() -> None:
    """What it answers holds and a quarter more does not; slower steps hold fewer, quicker ones more."""
    service = Service(pool=L40S)
    users = bisected(service)
    assert Trial(service=service, ask=ASK, n_users=users, n_requests=80).run_if_good()
    assert not Trial(service=service, ask=ASK, n_users=users * 5 // 4 + 1, n_requests=80).run_if_good()
    assert bisected(paced(service, 1.6)) < users < bisected(paced(service, 0.6))
    assert bisected(service, replace(ASK, limits=Limits(ttft_s=1e-4, tpot_s=0.06))) == 0


def test_a_bisection_tries_the_most_that_is_asked_for() -> None:
    """From a guess a little below it ended within 15 %: 19 of 20 users, for whom another engine was bought."""
    for guess in (1, 10, 15, 17, 19, 20, 90):
        found = Bisection(service=Service(pool=H100), ask=ASK, guess=guess, n_requests=80, close=0.15, most=20).run()
        assert found == 20, guess


def test_half_of_the_requests_are_counted_however_soon_they_come() -> None:
    """Where limits were loose the count began when all had come, and nobody was good: no device held a single user."""
    for think_s, n_users in ((2.0, 20), (0.0, 20), (0.0, 200)):
        ask = replace(ASK, think_s=think_s, limits=Limits(ttft_s=60.0, tpot_s=30.0))
        trial = Trial(service=Service(pool=H100), ask=ask, n_users=n_users, n_requests=80)
        report = trial.run()
        assert 40 <= report.n_requests <= 80, "of 200 who come at once, all that are served"
        assert report.n_complete == report.n_requests
        assert report.good_share == 1.0
        assert trial.holds()


def test_giving_up_early_changes_no_answer() -> None:
    """A simulation that stops once it must fail says what the whole one says, and stops before its end."""
    kept = lost = 0
    for users in (5, 60, 150, 300, 600):
        trial = Trial(service=Service(pool=L40S), ask=ASK, n_users=users, n_requests=80)
        whole, short = trial.run(), trial.run_if_good()
        assert (short is None) == (whole.good_share < ASK.good_share), users
        kept, lost = kept + (short is not None), lost + (short is None)
        if short is not None:
            assert (short.ttft_s, short.tpot_s, short.n_steps) == (whole.ttft_s, whole.tpot_s, whole.n_steps)
    assert kept
    assert lost
    load, tally = ASK.load(600, 80), Tally(ASK.limits)
    cluster = Cluster(Service(pool=L40S).groups(), tally=tally)
    cluster.run(load, good_share=ASK.good_share)
    assert tally.n_bad < 5  # of 80, 4 might be bad; others have waited too long already
    assert cluster.n_over < 40


def test_a_simulation_that_only_asks_whether_ends_as_soon_as_it_knows() -> None:
    """Of requests most of which must be good, the last ones were waited for; the answer is that of all of them."""
    for users, share in ((5, 0.95), (60, 0.5), (60, 0.95), (150, 0.95), (300, 0.95), (300, 0.3), (600, 0.5)):
        ask = replace(ASK, good_share=share)
        trial = Trial(service=Service(pool=L40S), ask=ask, n_users=users, n_requests=80)
        assert trial.holds() == (trial.run().good_share >= share), (users, share)
    load, tally = ASK.load(5, 80), Tally(ASK.limits)
    cluster = Cluster(Service(pool=L40S).groups(), tally=tally)
    cluster.run(load, good_share=0.5, is_won_enough=True)
    assert 40 <= tally.n_good < 45
    pools = Service(pool=H100, readers=L40S, link=Link(bytes_per_s=50e9))
    for users in (60, 200, 600):
        trial = Trial(service=pools, ask=ASK, n_users=users, n_requests=80)
        assert trial.holds() == (trial.run().good_share >= ASK.good_share), users


def test_blocks_grow_with_conversations() -> None:
    """Those of 140,000 tokens had 4,400 blocks, each of which cost time whenever it was taken, filled or looked for."""
    assert ASK.block_tokens == 32
    long = replace(ASK, turns=2, message=LengthRange(low=100, high=70_000), output=LengthRange(low=4, high=16))
    assert long.conversation_tokens(70_000, 16) == 140_132
    assert long.block_tokens == 256
    assert replace(ASK, turns=1, message=LengthRange(low=1, high=32_644)).block_tokens == 32
    assert replace(ASK, turns=1, message=LengthRange(low=1, high=32_645)).block_tokens == 64


def test_a_prompt_is_not_looked_at_again_while_no_room_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every step of the engine that was to answer it a prompt was asked for again, with all of its tokens."""
    tried: list[tuple[str, tuple[int, ...]]] = []
    reserve = ForeseeingCore.reserve

    def noted(core: ForeseeingCore, hand_off: HandOff) -> int | None:
        found = reserve(core, hand_off)
        if found is None:
            tried.append((hand_off.request.request_id, core.room))
        return found

    monkeypatch.setattr(ForeseeingCore, "reserve", noted)
    few = replace(H100, blocks=replace(H100.blocks, n_blocks=120))
    pools = Service(pool=few, readers=L40S, link=Link(bytes_per_s=50e9), local_prefill_s=0.0)
    Trial(service=pools, ask=ASK, n_users=60, n_requests=80).run()
    assert len(tried) > 5
    assert len(tried) == len(set(tried))


def test_a_fit_ends_at_engines_that_hold() -> None:
    """From too many it goes down, from too few up, and says which numbers they are."""
    each = bisected(Service(pool=L40S))
    ask = replace(ASK, n_users=3 * each)
    many, few = (
        Fit(service=with_engines(Service(pool=L40S), n), ask=ask, n_requests=120, price=1.0).run() for n in (6, 2)
    )
    assert many.good_share >= ask.good_share
    assert few.good_share >= ask.good_share
    assert many.service.n_engines < 6
    assert few.service.n_engines > 2
    pools = Service(pool=replace(H100, n_engines=2), readers=replace(L40S, n_engines=4), link=Link(bytes_per_s=50e9))
    found = Fit(service=pools, ask=ASK, n_requests=80, price=2.9, reader_price=1.1).run()
    assert found.good_share >= ASK.good_share
    assert found.service.n_engines < 6


def test_a_fit_pays_for_every_device_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices at 1.1 are more than one at 1.9: the pool that reads is the first to lose an engine, and costs more."""
    pair = replace(L40S, setup=replace(L40S.setup, tp=2))
    pools = Service(pool=replace(H100, n_engines=2), readers=replace(pair, n_engines=2), link=Link(bytes_per_s=50e9))
    tried: list[tuple[int, int]] = []

    def run(trial: Trial) -> Report:
        tried.append((trial.service.pools[0].n_engines, trial.service.pools[1].n_engines))
        return replace(report, service=trial.service)

    report = simulate(pools, ASK.load(4, 20))
    monkeypatch.setattr(Trial, "run", run)
    monkeypatch.setattr(Trial, "run_if_good", lambda trial: run(trial) if tried[-1] != (2, 1) else None)
    found = Fit(service=pools, ask=ASK, n_requests=20, price=1.9, reader_price=1.1).run()
    assert tried[:2] == [(2, 2), (2, 1)]
    assert sum(pool.n_engines for pool in found.service.pools) < 4


def test_what_cannot_be_asked_is_refused() -> None:
    """What, the number, the limit."""
    with pytest.raises(ConfigError, match="limits on both phases"):
        replace(ASK, limits=Limits(ttft_s=1.0))
    with pytest.raises(ConfigError, match="share that must be good is 1"):
        replace(ASK, good_share=1.0)
    with pytest.raises(ConfigError, match="more than 1024 engines of this kind, of which one holds 2"):
        engines_for(1_000_000, 2)
    with pytest.raises(ConfigError, match="more than 1024 engines"):
        engines_for(5, 0)


def test_histories_beyond_the_pool_are_no_users() -> None:
    """What a sequence is beyond the pool counted as cached tokens below none: "cached_tokens is -29232"."""
    long = replace(ASK, turns=1000, message=LengthRange(low=1000, high=1000), limits=Limits(ttft_s=9.0, tpot_s=0.5))
    assert long.history_tokens > H100.kv_tokens
    assert fluid_users(H100, long) == 0.0


def test_long_prompts_with_short_answers_have_users() -> None:
    """The fluid model has a sequence decode at every moment: with answers of a token or two nobody was within limits."""
    brief = replace(ASK, message=LengthRange(low=7000, high=9000), output=LengthRange(low=1, high=2), think_s=20.0)
    brief = replace(brief, limits=Limits(ttft_s=2.0, tpot_s=0.5))
    pool = replace(H100, blocks=replace(H100.blocks, n_blocks=405_376 // H100.blocks.block_tokens))
    users = fluid_users(pool, brief)
    assert 10.0 < users < 200.0
    assert fluid_users(pool, replace(brief, think_s=40.0)) > users
    assert bisected(Service(pool=pool), brief) > users / 2
    assert fluid_users(pool, replace(brief, limits=Limits(ttft_s=2.0, tpot_s=1e-4))) == 0.0
