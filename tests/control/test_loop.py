"""EngineCore from the outside: what a request sees."""

from __future__ import annotations

from diptych.control.loop import EngineCore
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import FinishEvent, TokenEvent

from .toy import ToyExecutor, greedy, request


def make(n_blocks=64, block_tokens=4, **config):
    core = EngineCore(
        SchedulerConfig(**config), BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens), model_revision="toy"
    )
    return core, ToyExecutor(n_blocks, block_tokens)


def run(core, executor, *, now_s=0.0, max_steps=2000):
    events = []
    for _ in range(max_steps):
        if not core.has_work:
            return events
        now_s += 1.0
        plan, begun = core.begin_step(now_s)
        events += begun
        assert plan is not None, "open requests, yet nothing planned"
        core.check()
        events += core.end_step(plan, executor.execute(plan), now_s + 0.5)
        core.check()
    raise AssertionError("did not end")


def texts(events):
    out = {}
    for event in events:
        if isinstance(event, TokenEvent):
            out.setdefault((event.request_id, event.index), []).append(event.token_id)
    return out


def test_requests_of_every_length_answer_as_if_alone():
    """Continuous batching may change nothing but the time."""
    core, executor = make(n_blocks=24, max_step_tokens=16, max_context_tokens=80)
    for i in range(10):
        core.submit(request(prompt=3 + 5 * i, max_tokens=4 + i, request_id=f"r{i}", arrival_s=0.1 * i))
    events = run(core, executor)
    assert texts(events) == {(f"r{i}", 0): greedy(tuple(range(100, 103 + 5 * i)), 4 + i) for i in range(10)}
    assert sum(isinstance(event, FinishEvent) for event in events) == 10


def test_choices_share_the_prompt_and_answer_alike():
    """Greedy n = 4 gives four equal answers from one prefill."""
    for prompt in (11, 12, 13):
        core, executor = make()
        core.submit(request(prompt=prompt, max_tokens=6, n=4))
        answers = texts(run(core, executor))
        assert list(answers) == [("r", i) for i in range(4)]
        assert all(text == greedy(tuple(range(100, 100 + prompt)), 6) for text in answers.values())
