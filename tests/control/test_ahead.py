"""A run of steps at once must leave the core exactly where the steps would have left it: plans that follow are equal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diptych.control.ahead import ForeseeingCore
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import Event, StepBeginEvent, TokenEvent
from diptych.ground.phase import Phase
from diptych.ground.request import Request, SamplingParams
from diptych.ground.step import ChunkResult, StepPlan, StepResult


def core_of(n_blocks: int, **settings: object) -> ForeseeingCore:
    config = SchedulerConfig(**{"max_step_tokens": 64, "max_running_sequences": 6} | settings)
    return ForeseeingCore(config, BlockConfig(n_blocks=n_blocks, block_tokens=4), model_revision="m")


def request(rng: random.Random, number: int) -> Request:
    prompt = (7,) * rng.choice((0, 8, 12)) + tuple(rng.randrange(1, 9) for _ in range(rng.randint(1, 30)))
    sampling = SamplingParams(max_tokens=rng.randint(1, 40), temperature=0.0, ignore_eos=True)
    return Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, arrival_s=float(number))


def step(core: ForeseeingCore) -> StepPlan | None:
    plan, _ = core.begin_step(0.0)
    if plan is not None:
        results = [ChunkResult(seq_id=one.seq_id, token_ids=(0,) if one.samples else ()) for one in plan.chunks]
        core.end_step(plan, StepResult(step_id=plan.step_id, results=tuple(results), device_s=0.0, host_s=0.0), 0.0)
    return plan


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("n_blocks", "caching"), [(400, True), (30, True), (30, False)])
def test_a_run_leaves_what_its_steps_leave(seed: int, n_blocks: int, *, caching: bool) -> None:
    """Random requests in random moments, roomy and tight: every plan after a run, with its blocks and hits, is the same."""
    rng = random.Random(seed)
    slow, quick = (core_of(n_blocks, enable_prefix_cache=caching) for _ in range(2))
    n_skipped = 0
    for number in range(20):
        coming = request(rng, number)
        for core in (slow, quick):
            core.submit(coming)
        for _ in range(rng.randint(1, 30)):
            run = quick.foreseen(token_id=0, limit=rng.randint(1, 20))
            if run is not None:
                n = rng.randint(1, run.n_steps)
                quick.commit_run(n, token_id=0)
                n_skipped += n
                for later in range(n):
                    plan = step(slow)
                    assert plan is not None
                    assert plan.shape == run.shape.later(later)
                    assert sum(len(chunk.new_block_ids) for chunk in plan.chunks) == run.new_blocks[later]
            left, right = step(slow), step(quick)
            if run is not None and left is not None and right is not None:  # the run's first step told of earlier ends
                assert left.chunks == right.chunks
            else:
                assert left == right
            assert slow.stats() == quick.stats()
    quick.check()
    assert n_skipped > 20


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("n_blocks", "caching"), [(400, True), (30, True), (30, False)])
@pytest.mark.parametrize("alone", [False, True])
def test_steps_in_rows_leave_what_steps_leave(seed: int, n_blocks: int, *, caching: bool, alone: bool) -> None:
    """The same prompts, copies, preemptions, ends and blocks; every token that has no chunk and no event is told of."""
    rng = random.Random(seed)
    plain, quick = (core_of(n_blocks, enable_prefix_cache=caching, prefills_alone=alone) for _ in range(2))
    told: list[tuple[str, int, float]] = []
    quick.draw_in_rows(0, lambda rows, at_s: told.extend((seq.request.request_id, seq.index, at_s) for seq in rows))
    n_told = 0
    for number in range(25):
        coming = request(rng, number)
        if not number % 5:
            coming = replace(
                coming, sampling=replace(coming.sampling, stop_token_ids=(0,), max_tokens=9, min_tokens=3, n=2)
            )
        for core in (plain, quick):
            core.submit(coming)
        for now in range(rng.randint(1, 30)):
            (left, begun), (right, begun_too) = (core.begin_step(float(now)) for core in (plain, quick))
            begins = StepBeginEvent
            assert [one for one in begun if type(one) is not begins] == [
                one for one in begun_too if type(one) is not begins
            ]
            if left is None or right is None:
                assert left is right
                break
            assert left.shape == right.shape
            prompts = tuple(chunk for chunk in left.chunks if chunk.phase is Phase.PREFILL)
            assert replace(left, chunks=prompts, known_shape=left.shape) == right
            ended, ended_too = end_of(plain, left, now), end_of(quick, right, now)
            decoded = {chunk.seq_id for chunk in left.chunks} - {chunk.seq_id for chunk in prompts}
            n_told += len(decoded)
            tokens = [one for one in ended if type(one) is TokenEvent][: len(decoded)]
            assert [(one.request_id, one.index, one.at_s) for one in tokens] == told
            assert [one for one in ended if one not in tokens] == ended_too
            told.clear()
            assert plain.stats() == quick.stats()
    quick.check()
    assert n_told > 100


def end_of(core: ForeseeingCore, plan: StepPlan, now: int) -> list[Event]:
    results = [ChunkResult(seq_id=one.seq_id, token_ids=(0,) if one.samples else ()) for one in plan.chunks]
    result = StepResult(step_id=plan.step_id, results=tuple(results), device_s=0.0, host_s=0.0)
    return core.end_step(plan, result, now + 0.5)


def test_nothing_is_foreseen_where_something_is_to_be_decided() -> None:
    """A prompt to read, somebody who could be admitted, an end: real steps."""
    core = core_of(100)
    assert core.foreseen(token_id=0, limit=9) is None
    rng = random.Random(1)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    core.submit(Request(request_id="first", prompt_token_ids=(1, 2, 3), sampling=sampling, arrival_s=0.0))
    assert core.foreseen(token_id=0, limit=9) is None
    while core.foreseen(token_id=0, limit=9) is None:
        assert step(core) is not None
    core.submit(request(rng, 1))
    assert core.foreseen(token_id=0, limit=9) is None
    stopping = core_of(100)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(0,))
    stopping.submit(Request(request_id="s", prompt_token_ids=(1, 2), sampling=sampling, arrival_s=0.0))
    step(stopping)
    assert stopping.foreseen(token_id=0, limit=9) is None


def test_a_warm_prefix_is_found() -> None:
    """And belongs to nobody: it is evicted as any other, and one that does not fit is left out."""
    core = core_of(10)
    core.warm((5,) * 18)
    assert core.prefix_match((5,) * 18) == 16
    core.warm((6,) * 400)
    assert core.prefix_match((6,) * 400) == 0
    core.check()
    assert core.stats().blocks_cached == 4
