"""EngineCore from the outside: prompts that are read, and of which nothing is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.control.recording import Recorder, replay
from diptych.ground.errors import PromptTooLong
from diptych.ground.events import FinishEvent, StateEvent
from diptych.ground.phase import FinishReason
from diptych.ground.request import Pool, Pooling

from .test_loop import make, run, texts
from .toy import request


def pooled(pool=Pool.LAST, first=0, **fields):
    return replace(request(**fields), pooling=Pooling(pool=pool, first=first))


def test_a_prompt_read_for_its_state_is_never_decoded():
    """An embedding is a prefill without a decode: no token, no decode step, and its blocks go back with its last chunk."""
    core, executor = make(n_blocks=8, max_step_tokens=5, max_context_tokens=32)
    core.submit(pooled(prompt=32, max_tokens=1))  # the whole context: no room is left for an answer, and none is needed
    events = run(core, executor)
    assert texts(events) == {}
    assert [type(event) for event in events if isinstance(event, StateEvent | FinishEvent)] == [StateEvent, FinishEvent]
    assert core.stats().blocks_in_use == 0
    with pytest.raises(PromptTooLong, match="takes at most 32"):
        core.submit(pooled(prompt=33, max_tokens=1, request_id="longer"))
    with pytest.raises(PromptTooLong, match="one being left"):
        core.submit(request(prompt=32, max_tokens=1, request_id="answered"))


@pytest.mark.parametrize("n", [1, 3])
def test_where_no_token_is_asked_for_none_is_written(n):
    """One was, and whoever counted it had to know that nobody had asked for it."""
    core, executor = make(n_blocks=8, max_step_tokens=5, max_context_tokens=32)
    core.submit(request(prompt=32, max_tokens=0, n=n))  # no room is left for an answer
    events = run(core, executor)
    assert texts(events) == {}
    ends = [event for event in events if isinstance(event, FinishEvent)]
    assert [(one.index, one.reason, one.output_tokens) for one in ends] == [
        (i, FinishReason.LENGTH, 0) for i in range(n)
    ]
    assert not [event for event in events if isinstance(event, StateEvent)]
    assert core.stats().blocks_in_use == 0
    core.check()


def test_a_mean_is_taken_of_computed_tokens_only():
    """A token found in the cache has no state, so only what stands before the mean may come from there."""
    core, executor = make(n_blocks=32, max_step_tokens=64, max_context_tokens=64)
    core.submit(pooled(prompt=22, max_tokens=1))
    run(core, executor)
    found = {}
    for name, how in (("last", {}), ("mean", {"pool": Pool.MEAN}), ("behind", {"pool": Pool.MEAN, "first": 9})):
        core.submit(pooled(prompt=22, max_tokens=1, request_id=name, **how))
        found[name] = [e.cached_tokens for e in run(core, executor) if type(e).__name__ == "ScheduledEvent"]
    assert found == {"last": [20], "mean": [0], "behind": [8]}


def test_states_are_recorded_and_replayed():
    """A recording that lost `pooling` would decode what was never decoded."""
    core, executor = make(max_step_tokens=8, max_context_tokens=64)
    recorder = Recorder(core)
    recorder.submit(pooled(prompt=20, max_tokens=1))
    recorder.submit(request(prompt=5, max_tokens=6, request_id="b"))
    now_s = 0.0
    while core.has_work:
        now_s += 1.0
        plan, _ = recorder.begin_step(now_s)
        result = executor.execute(plan)
        results = tuple(replace(one, state=b"1234") if not one.token_ids else one for one in result.results)
        recorder.end_step(plan, replace(result, results=results), now_s + 0.5)
    assert replay(recorder.lines()) == []
