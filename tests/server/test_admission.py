"""Admission: what is predicted, who is refused, and that a flood leaves the wait of the admitted short. No real time."""

from __future__ import annotations

import math
import random
import resource
from contextlib import suppress

import pytest

from diptych.ground.errors import ConfigError
from diptych.server.admission import BURST_S, MAX_RETRY_S, MIN_QUEUE_S, OVERLOAD_S, Admission, Backlog
from diptych.server.config import FILES_KEPT, MOST_OPEN_REQUESTS, open_requests_limit
from diptych.server.http.errors import ApiError


def backlog(**changes: float) -> Backlog:
    return Backlog(**{"max_running": 64, **changes})  # type: ignore[arg-type]


def admission(**changes: float) -> Admission:
    made = Admission(**{"max_queue_s": None, "max_open_requests": 1000, **changes})  # type: ignore[arg-type]
    made.observe(10_000, 10.0)  # a millisecond per prompt token
    return made


def takes(one: Admission, stands: Backlog, *, now_s: float, prompt_tokens: int = 10) -> bool:
    try:
        one.check(stands, prompt_tokens=prompt_tokens, now_s=now_s)
    except ApiError:
        return False
    return True


def test_wait_is_the_running_step_the_prompts_before_it_and_the_places_that_must_become_free() -> None:
    one = admission()
    assert one.predicted_wait_s(backlog(unread_tokens=300, step_left_s=0.2)) == pytest.approx(0.5)
    one.opened()
    one.closed(service_s=6.4)
    assert one.predicted_wait_s(backlog(unread_tokens=50, sequences=63)) == pytest.approx(0.05)
    assert one.predicted_wait_s(backlog(unread_tokens=50, sequences=65)) == pytest.approx(0.2)
    assert one.predicted_wait_s(backlog(oldest_s=7.0)) == 7.0


def test_few_prefill_tokens_say_nothing_about_the_rate() -> None:
    """One short prompt takes a whole step; its time per token would predict minutes for a long one."""
    one = Admission(max_queue_s=None, max_open_requests=8)
    one.observe(5, 0.1)
    assert one.predicted_wait_s(backlog(unread_tokens=10_000)) == 0.0


def test_the_bound_is_two_usual_prompts_or_the_own_one() -> None:
    """A fixed number of seconds would refuse everybody on a slow model and nobody on a fast one."""
    one = admission()
    assert one.bound_s(backlog(), 10) == pytest.approx(MIN_QUEUE_S)
    for _ in range(3):
        one.check(backlog(), prompt_tokens=200, now_s=0.0)
    assert one.bound_s(backlog(), 10) == pytest.approx(0.4)
    assert one.bound_s(backlog(decode_step_s=0.1), 3000) == pytest.approx(3.1)
    assert admission(max_queue_s=0.7).bound_s(backlog(decode_step_s=0.1), 3000) == 0.7


def test_clients_that_start_together_all_get_in_and_may_come_again() -> None:
    """A closed loop of as many clients as places is no overload, however long its prompts take."""
    one = admission()
    for number in range(64):
        assert takes(one, backlog(sequences=number, unread_tokens=100 * number), now_s=BURST_S * number / 64)
    for round_s in (5.0, 10.0, 100.0):
        assert takes(one, backlog(sequences=63, unread_tokens=5000), now_s=round_s)
    assert not takes(one, backlog(sequences=64, unread_tokens=5000), now_s=101.0)


def test_a_line_that_stands_is_refused_until_nobody_was_for_a_while() -> None:
    one = admission()
    assert takes(one, backlog(sequences=3, unread_tokens=500), now_s=0.0)
    late_s = 2 * BURST_S
    assert not takes(one, backlog(sequences=4, unread_tokens=500), now_s=late_s)
    assert one.outlook(backlog(), now_s=late_s).is_overloaded
    # now no burst is trusted, but a short line is
    assert not takes(one, backlog(sequences=3, unread_tokens=500), now_s=late_s + OVERLOAD_S / 2)
    assert takes(one, backlog(sequences=5), now_s=late_s + OVERLOAD_S)
    after_s = late_s + 3 * OVERLOAD_S
    assert not one.outlook(backlog(), now_s=after_s).is_overloaded
    assert takes(one, backlog(sequences=5, unread_tokens=500), now_s=after_s)


def test_an_engine_with_nothing_to_do_is_not_overloaded() -> None:
    """A closed loop that began within a second after a flood was refused until it paused, with the engine all but idle."""
    one = admission()
    assert not takes(one, backlog(sequences=64), now_s=10.0)
    assert not takes(one, backlog(sequences=1, unread_tokens=500), now_s=10.2)
    for number in range(64):
        assert takes(one, backlog(sequences=number, unread_tokens=100 * number), now_s=10.3), number


def test_waiting_for_a_place_is_only_for_those_who_gave_a_bound() -> None:
    """Places that fill in a second become free in the next one: six waited 0.5 s where 15 ms were predicted."""
    full = backlog(sequences=64)
    assert not takes(admission(), full, now_s=0.0)
    patient = admission(max_queue_s=0.5)
    patient.opened()
    patient.closed(service_s=6.4)
    assert takes(patient, full, now_s=0.0)
    assert not takes(patient, backlog(sequences=69), now_s=0.0)


def told_s(one: Admission, stands: Backlog, *, prompt_tokens: int, n: int) -> list[float]:
    """What `n` clients are told that come at the same moment and are all sent away."""
    told = []
    for _ in range(n):
        with pytest.raises(ApiError) as caught:
            one.check(stands, prompt_tokens=prompt_tokens, now_s=50.0)
        told.append(caught.value.retry_after_s or 0.0)
    return told


def test_those_sent_away_are_told_different_times() -> None:
    """All coming again in the same second would be the next overload."""
    one = admission(max_queue_s=0.1)
    told = told_s(one, backlog(sequences=64, unread_tokens=500), prompt_tokens=1000, n=100)
    assert told[:3] == pytest.approx([1.5, 2.5, 3.5])
    assert max(told) <= MAX_RETRY_S
    assert len(set(told)) == 29  # 1.5 to 29.5, and again from the beginning


def test_a_burst_is_told_to_come_when_the_places_have_turned_over() -> None:
    """Three hundred clients on 64 places that turn over in two seconds were told 30 s, and nothing was left to do after 2."""
    one = admission()
    one.opened()
    one.closed(service_s=2.0)
    told = told_s(one, backlog(sequences=64), prompt_tokens=5, n=300)
    assert max(told) <= 2.1
    assert max(told) > 1.9
    assert min(told) == pytest.approx(2.0 / 64, rel=0.1) or min(told) < 0.1
    assert all(told.count(one_s) <= 6 for one_s in told)


def test_never_refusing_still_bounds_open_requests() -> None:
    one = admission(max_queue_s=math.inf, max_open_requests=2)
    one.opened()
    assert takes(one, backlog(sequences=500, oldest_s=100.0), now_s=0.0)
    one.opened()
    with pytest.raises(ApiError, match="2 requests are open; this server takes at most 2"):
        one.check(backlog(), prompt_tokens=1, now_s=0.0)
    one.closed(service_s=None)
    assert takes(one, backlog(), now_s=0.0)
    with pytest.raises(ApiError, match="1 requests are open"):
        one.check(backlog(), prompt_tokens=1, now_s=0.0, n_requests=2)
    one.closed(service_s=None)
    one.check(backlog(), prompt_tokens=1, now_s=0.0, n_requests=3)  # or it would never be taken


def test_a_request_on_its_way_counts_as_open_until_the_engine_has_taken_or_refused_it() -> None:
    one = admission(max_open_requests=1)
    with suppress(KeyError), one.enter("a", 50):
        assert one.entering == {"a": 50}
        assert not takes(one, backlog(), now_s=0.0)
        raise KeyError
    assert one.entering == {}
    assert takes(one, backlog(), now_s=0.0)


class World:
    """An engine that reads one prompt after the other, `tokens_per_s` of them, and then holds a place for `service_s`."""

    def __init__(self, one: Admission, *, prompt_tokens: int, tokens_per_s: float, service_s: float) -> None:
        self.one, self.prompt_tokens = one, prompt_tokens
        self.read_s, self.service_s = prompt_tokens / tokens_per_s, service_s
        self.ends_s: list[float] = []
        self.free_s = 0.0
        self.waits_s: list[float] = []
        one.observe(10_000, 10_000 / tokens_per_s)

    def arrive(self, now_s: float) -> bool:
        running = [end_s for end_s in self.ends_s if end_s > now_s]
        line_s = max(0.0, self.free_s - now_s)
        stands = backlog(sequences=len(running), unread_tokens=int(line_s / self.read_s * self.prompt_tokens))
        if not takes(self.one, stands, now_s=now_s, prompt_tokens=self.prompt_tokens):
            return False
        begin_s = max(now_s, self.free_s)
        if len(running) >= 64:
            begin_s = max(begin_s, sorted(running)[-64])
        self.free_s = begin_s + self.read_s
        self.ends_s = [*running, self.free_s + self.service_s]
        self.waits_s.append(begin_s - now_s)
        return True


@pytest.mark.parametrize("tokens_per_s", [900.0, 20_000.0], ids=["slow", "fast"])
@pytest.mark.parametrize("service_reads", [2.0, 200.0], ids=["prompts bind", "places bind"])
def test_a_flood_costs_one_burst_and_then_the_admitted_wait_as_at_normal_load(
    tokens_per_s: float, service_reads: float
) -> None:
    """The promise of the contract, on an engine of arithmetic: within twice the p99 of half load, and the engine is busy."""
    read_s = 128 / tokens_per_s
    capacity_per_s = 1.0 / max(read_s, (1 + service_reads) * read_s / 64)

    def run(share: float, n_requests: int) -> tuple[list[float], float]:
        """(waits of the admitted until their prompt is read, seconds)"""
        world = World(admission(), prompt_tokens=128, tokens_per_s=tokens_per_s, service_s=service_reads * read_s)
        noise, now_s = random.Random(7), 0.0
        for _ in range(n_requests):
            now_s += noise.expovariate(share * capacity_per_s)
            world.arrive(now_s)
        return sorted(wait_s + read_s for wait_s in world.waits_s), now_s

    normal_s, _ = run(0.5, 4000)
    assert len(normal_s) >= 3980
    flooded_s, lasted_s = run(5.0, 20_000)
    assert 0.8 * lasted_s * capacity_per_s <= len(flooded_s) <= 10_000
    limit_s = max(2.0 * normal_s[len(normal_s) * 99 // 100], MIN_QUEUE_S + read_s)
    assert sum(wait_s > limit_s for wait_s in flooded_s) <= 64 + BURST_S * capacity_per_s


def test_no_more_requests_are_open_than_there_are_files_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 150 files the 136th stream was reset without a word, and so was /health."""
    limits, raised = [(256, 512)], []

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        raised.append(wanted)
        limits[0] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert open_requests_limit(100) == 100
    assert raised == []
    assert open_requests_limit(300) == 300
    assert open_requests_limit(None) == 512 - FILES_KEPT
    assert raised == [(428, 512), (512, 512)]
    with pytest.raises(
        ConfigError, match=r"max_open_requests is 1000; this process may open 512 files, enough for 384"
    ):
        open_requests_limit(1000)
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert open_requests_limit(None) == MOST_OPEN_REQUESTS
