"""Drafters and depths: what is guessed, and how many guesses are worth their rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder, replay
from diptych.control.speculation import MOST_DRAFTS, Lookup, Speculation, choose_depths
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.events import TokenEvent
from diptych.ground.step import StepPlan, StepResult

from .counting import CountingList, operations
from .toy import VOCAB, ToyExecutor, greedy, request


def test_lookup_goes_on_with_what_followed_the_last_tokens():
    """The latest place where the last three tokens stood, else the last two; nothing where neither stood before."""
    assert Lookup().propose([1, 2, 3, 4, 5, 9, 2, 3, 7, 7, 1, 2, 3], 3) == [4, 5, 9]
    assert Lookup().propose([1, 2, 3, 4, 2, 3, 8, 9, 0, 2, 3], 2) == [8, 9]
    assert Lookup().propose([1, 2, 3, 4], 2) == []
    assert Lookup().propose([1], 2) == []


def test_lookup_repeats_a_loop_as_far_as_it_is_asked():
    """A text that has begun to repeat itself is guessed beyond its own end."""
    assert Lookup().propose([5, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]


def test_lookup_stays_with_a_source_that_goes_on_being_right():
    """A long match would be left for a later place that shares three tokens only."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 0, 4, 5, 6, 9, 0, 1, 2, 3]
    lookup = Lookup()
    assert lookup.propose(tokens, 2) == [4, 5]
    assert lookup.propose([*tokens, 4, 5, 6], 2) == [7, 8]
    assert lookup.propose([*tokens, 4, 5, 6, 0], 2) == [], "the source was wrong, and (6, 0) never stood before"


def test_lookup_reads_each_token_once():
    """Work per token does not grow with the context: an index is extended, no text is searched."""
    rng = random.Random(3)

    def cost(context_tokens: int) -> int:
        tokens = CountingList(rng.randrange(500) for _ in range(context_tokens))
        lookup = Lookup()
        for _ in range(20):
            lookup.propose(tokens, 4)  # long prompts are read in parts
        total = 0
        for _ in range(50):
            tokens.append(rng.randrange(500))
            total += operations(lambda: lookup.propose(tokens, 4))[1]
        return total

    assert cost(30_000) < 1.5 * cost(300)


def test_chances_fall_with_depth_and_follow_what_came():
    """A guess is judged whether or not it was sent, so that a bad time ends by itself; and one token deeper than it held."""
    speculation = Speculation(Lookup())
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    first = speculation.chances(MOST_DRAFTS)
    assert first == sorted(first, reverse=True)
    assert speculation.propose(tokens)[:3] == [4, 5, 6]
    speculation.learn((4, 5, 0))
    assert speculation.chances(2) > first[:2]
    assert speculation.chances(3)[2] < first[2] * 1.2
    for _ in range(40):
        speculation.propose(tokens)
        speculation.learn((0,))
    assert speculation.chances(MOST_DRAFTS) == [], "hopeless"
    for _ in range(6):
        speculation.propose(tokens)
        speculation.learn((4,))
    assert speculation.chances(1)[0] > 0.5


def test_depth_is_bought_while_it_pays():
    """Rows for nothing are all taken, rows at full price never, and the likelier sequence gets them first."""
    sure, unsure = [0.9**k for k in range(1, 9)], [0.3**k for k in range(1, 9)]
    choose = {"n_sure": 2, "most_rows": 100}
    assert choose_depths([sure, unsure], price_s=lambda depths: 1.0, **choose) == [8, 8]
    assert choose_depths([sure, unsure], price_s=lambda depths: 2.0 + sum(depths), **choose) == [0, 0]
    depths = choose_depths([sure, unsure], price_s=lambda depths: 1.0 + 0.1 * sum(depths), **choose)
    assert depths[0] > depths[1]
    assert choose_depths([sure, unsure], price_s=lambda depths: 1.0, n_sure=2, most_rows=3) == [3, 0]
    over = {"price_s": lambda depths: 1.0 + 0.01 * sum(depths), "limit_s": 1.05}
    assert sum(choose_depths([sure, unsure], **choose, **over)) == 4
    assert choose_depths([[], []], price_s=None, **choose) == [0, 0]
    assert choose_depths([sure, unsure], price_s=None, **choose) == [6, 0], "unpriced: only what is likely"


def test_speculate_is_one_of_the_known_names():
    """A misspelled drafter would silently be none."""
    with pytest.raises(ConfigError, match="speculate is 'lokup'; it must be one of off, lookup"):
        SchedulerConfig(speculate="lokup")


def run(speculate: str, prompt: list[int], *, predict_s=lambda shape: 1.0) -> tuple[list[int], int, Recorder]:
    """One request: its text, the steps it took, and the recording."""
    config = SchedulerConfig(speculate=speculate, max_step_tokens=256)
    core = EngineCore(config, BlockConfig(n_blocks=256, block_tokens=8), model_revision="toy", predict_s=predict_s)
    recorder, executor = Recorder(core), ToyExecutor(256, 8)
    recorder.submit(request(tuple(prompt), max_tokens=30))
    text, n_steps = [], 0
    while core.has_work:
        plan, _ = recorder.begin_step(0.0)
        n_steps += 1
        events = recorder.end_step(plan, executor.execute(plan), 0.0)
        text += [event.token_id for event in events if isinstance(event, TokenEvent)]
        core.check()
    return text, n_steps, recorder


def test_a_run_that_looks_up_its_drafts_replays():
    """Drafts follow from the tokens alone, so a recording made with speculation gives the same plans again."""
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(1500)]
    text, _, recorder = run("lookup", prompt)
    assert text == greedy(tuple(prompt), 30)
    lines = recorder.lines()
    assert any('"phase": {"type": "Phase", "value": "decode"}' in line for line in lines)
    assert replay(lines, predict_s=lambda shape: 1.0) == []
    assert replay(lines, predict_s=None) != [], "nothing was drafted"


def test_right_guesses_save_steps(monkeypatch):
    """Thirty tokens in a few steps when every guess is right, and the same thirty."""
    prompt = list(range(40))
    answer = greedy(tuple(prompt), 30)

    class Oracle:
        def propose(self, token_ids, n):
            return answer[len(token_ids) - len(prompt) :][:n]

    monkeypatch.setattr("diptych.control.scheduler.DRAFTERS", {"lookup": Oracle})
    assert run("lookup", prompt)[:2] == (answer, 4)
    assert run("off", prompt)[:2] == (answer, 30)


class Handing(ToyExecutor):
    """A toy model whose drafter knows the answer: it hands guesses up, as many as the chunk wants."""

    def __init__(self, n_blocks: int, block_tokens: int, text: list[int], *, lies: bool) -> None:
        super().__init__(n_blocks, block_tokens)
        self.text, self.lies = text, lies
        self.wanted: list[int | None] = []

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        handed = []
        for chunk, one in zip(plan.chunks, result.results, strict=True):
            known = chunk.end_pos - len(chunk.draft_token_ids) + len(one.token_ids)
            self.wanted.append(chunk.wanted_drafts)
            wanted = chunk.wanted_drafts or 0
            drafts = (3,) * wanted if self.lies else tuple(self.text[known : known + wanted])
            handed.append(replace(one, draft_token_ids=drafts))
        return replace(result, results=tuple(handed))


@pytest.mark.parametrize("lies", [False, True])
def test_drafts_of_the_executor_come_up_and_go_down(lies):
    """Asked for in a chunk, handed up in its result, verified in the next chunk: right ones save steps, lies change nothing."""
    prompt = tuple(range(40))
    answer = greedy(prompt, 60)
    config = SchedulerConfig(speculate="draft", max_step_tokens=16, max_draft_tokens=5)
    core = EngineCore(
        config, BlockConfig(n_blocks=64, block_tokens=8), model_revision="toy", predict_s=lambda shape: 1.0
    )
    recorder, executor = Recorder(core), Handing(64, 8, [*prompt, *answer], lies=lies)
    recorder.submit(request(prompt, max_tokens=60))
    text, n_steps, n_drafted = [], 0, 0
    while core.has_work:
        plan, _ = recorder.begin_step(0.0)
        n_steps += 1
        n_drafted += sum(len(chunk.draft_token_ids) for chunk in plan.chunks)
        events = recorder.end_step(plan, executor.execute(plan), 0.0)
        text += [event.token_id for event in events if isinstance(event, TokenEvent)]
        core.check()
    assert text == answer
    assert executor.wanted[:3] == [0, 0, 3], "it keeps up with a prompt that comes in parts, and is asked at its end"
    assert max(filter(None, executor.wanted)) == 5
    assert n_drafted > 0
    if lies:
        assert sum(filter(None, executor.wanted[-20:])) <= 1, (
            "a drafter that is always wrong is asked no more, but probed"
        )
    else:
        assert n_steps < 20
    assert replay(recorder.lines(), predict_s=lambda shape: 1.0) == []


def test_a_drafter_that_costs_more_than_it_gives_is_not_asked():
    """The drafter's own time enters the choice of the depth."""
    prompt = tuple(range(40))
    answer = greedy(prompt, 60)

    def asked(draft_s: float) -> int:
        core = EngineCore(
            SchedulerConfig(speculate="draft"),
            BlockConfig(n_blocks=64, block_tokens=8),
            model_revision="toy",
            predict_s=lambda shape: 1.0,
            draft_price_s=lambda shape, depths: draft_s * max(depths),
        )
        executor = Handing(64, 8, [*prompt, *answer], lies=False)
        core.submit(request(prompt, max_tokens=60))
        while core.has_work:
            plan, _ = core.begin_step(0.0)
            core.end_step(plan, executor.execute(plan), 0.0)
        return sum(filter(None, executor.wanted))

    assert asked(0.0) > 30 > asked(2.0)
