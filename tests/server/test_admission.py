from __future__ import annotations

import pytest

from diptych.server.admission import Admission, Backlog
from diptych.server.errors import ApiError


def backlog(**changes: float) -> Backlog:
    values = {"waiting": 5, "waiting_prompt_tokens": 1000, "oldest_s": 0.0, "running": 64, "max_running": 64}
    return Backlog(**{**values, **changes})  # type: ignore[arg-type]


def test_an_idle_or_unmeasured_engine_refuses_nothing() -> None:
    """A burst on a fresh server must not be refused by a guess."""
    admission = Admission(max_queue_s=1.0, max_open_requests=8)
    admission.check(backlog())
    admission.observe(10_000, 10.0)
    admission.check(backlog(waiting=0, waiting_prompt_tokens=0))


def test_wait_is_the_prompts_before_it_and_the_places_that_must_become_free() -> None:
    admission = Admission(max_queue_s=1.0, max_open_requests=8)
    admission.observe(10_000, 5.0)  # half a millisecond per token
    assert admission.predicted_wait_s(backlog()) == pytest.approx(0.5)
    admission.opened()
    admission.closed(service_s=6.4)
    assert admission.predicted_wait_s(backlog(running=59)) == pytest.approx(0.5)
    assert admission.predicted_wait_s(backlog(running=64)) == pytest.approx(0.6)
    assert admission.predicted_wait_s(backlog(oldest_s=7.0)) == 7.0


def test_a_refusal_tells_when_to_come_back() -> None:
    admission = Admission(max_queue_s=1.0, max_open_requests=8)
    admission.observe(10_000, 50.0)
    with pytest.raises(ApiError, match=r"about 5\.0 s .* allows 1 s") as caught:
        admission.check(backlog())
    assert caught.value.status == 503
    assert caught.value.retry_after_s == pytest.approx(5.0)
    Admission(max_queue_s=None, max_open_requests=8).check(backlog(oldest_s=100.0))


def test_open_requests_are_bounded() -> None:
    admission = Admission(max_queue_s=None, max_open_requests=2)
    admission.opened()
    admission.check(backlog())
    admission.opened()
    with pytest.raises(ApiError, match="2 requests are open"):
        admission.check(backlog())
    admission.closed(service_s=None)
    admission.check(backlog())


def test_no_more_clients_than_places_are_never_refused() -> None:
    """64 clients that start together wait for each other's prompts; that is what the places are for."""
    admission = Admission(max_queue_s=1.0, max_open_requests=80)
    admission.observe(10_000, 50.0)
    admission.check(backlog(running=1, waiting=62, waiting_prompt_tokens=60_000, oldest_s=20.0))
    with pytest.raises(ApiError):
        admission.check(backlog(running=1, waiting=63, waiting_prompt_tokens=60_000, oldest_s=20.0))


def test_few_prefill_tokens_say_nothing_about_the_rate() -> None:
    """One short prompt takes a whole step; its time per token would predict minutes for a long one."""
    admission = Admission(max_queue_s=1.0, max_open_requests=8)
    admission.observe(5, 0.1)
    assert admission.predicted_wait_s(backlog()) == 0.0
