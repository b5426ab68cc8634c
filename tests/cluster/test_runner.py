"""A worker on its own thread: what it says before it fails is said, and then what it failed of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.conftest import tiny_config

from diptych.cluster.messages import Batch, Cancel, Submit
from diptych.cluster.runner import WorkerRunner
from diptych.cluster.worker import Worker
from diptych.engine.load import Machinery, load, make_machinery
from diptych.ground.clock import MonotonicClock
from diptych.ground.errors import ExecutorError
from diptych.ground.events import FinishEvent, TokenEvent
from diptych.ground.handoff import HandOff
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request, SamplingParams

pytestmark = pytest.mark.native
CLOCK = MonotonicClock()


@pytest.fixture
def machinery(tiny_dir: Path) -> Machinery:
    config = tiny_config("cpu")
    return make_machinery(load(str(tiny_dir), config).model, config, clock=CLOCK)


@pytest.fixture
def runner(machinery: Machinery) -> Iterator[WorkerRunner]:
    worker = Worker("decode-0", machinery, clock=CLOCK, send=lambda name, message: None)
    running = WorkerRunner(worker, clock=CLOCK)
    yield running
    running.stop()


def submit(request_id: str, max_tokens: int = 5) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = Request(request_id=request_id, prompt_token_ids=(5, 6, 7), sampling=sampling, arrival_s=CLOCK.now_s())
    return Submit(hand_off=HandOff.of(request))


def fetch_for_ever(runner: WorkerRunner) -> None:
    while True:
        runner.fetch(5.0)


def fetch_until_end(runner: WorkerRunner) -> list[object]:
    events: list[object] = []
    while not any(isinstance(event, FinishEvent) for event in events):
        batch = runner.fetch(5.0)
        assert isinstance(batch, Batch), "nothing is said in five seconds"
        events += batch.events
    return events


def test_events_come_once_and_in_order(runner: WorkerRunner) -> None:
    """A token that comes twice would be said twice."""
    runner.post(submit("a"))
    tokens = [event for event in fetch_until_end(runner) if isinstance(event, TokenEvent)]
    assert [token.position for token in tokens] == [0, 1, 2, 3, 4]
    while runner.fetch(0.05) is not None:
        pass
    assert runner.fetch(0.01) is None, "nothing is left"


def test_an_abort_is_told_in_numbers(runner: WorkerRunner) -> None:
    """An abort has no events; who looks at blocks must still see them come back."""
    runner.post(submit("a", max_tokens=200))
    while not (batch := runner.fetch(5.0)) or not batch.counts.core.blocks_in_use:
        pass
    runner.post(Cancel(request_id="a"))
    while not (batch := runner.fetch(5.0)) or batch.counts.core.blocks_in_use:
        assert batch is not None
    assert batch.counts.core.running == 0


def test_a_failed_step_is_told_and_then_raised(
    machinery: Machinery, runner: WorkerRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door must hear of the requests that the step took with it before it hears that the worker is gone."""

    def fail(plan: object) -> None:
        raise ExecutorError("the device is gone")

    monkeypatch.setattr(machinery.executor, "execute", fail)
    runner.post(submit("a"))
    ends = [event for event in fetch_until_end(runner) if isinstance(event, FinishEvent)]
    assert [end.reason for end in ends] == [FinishReason.ERROR]
    with pytest.raises(ExecutorError, match="the device is gone"):
        fetch_for_ever(runner)  # what it said before comes first
    assert runner.has_failed


def test_a_loss_that_no_step_sees_is_raised_all_the_same(runner: WorkerRunner) -> None:
    """An idle worker whose rank had died looked well until the next request, which then had to move."""
    runner.fail(ExecutorError("rank 1 is gone"))
    with pytest.raises(ExecutorError, match="rank 1 is gone"):
        fetch_for_ever(runner)
    assert runner.has_failed
