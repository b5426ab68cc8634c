"""Drafters and depths: what is guessed, and how many guesses are worth their rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diptych.control.drafters import FOLLOWED, FRESH, LIKELY, AnswerMemory, Lookup, Prediction
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder, replay
from diptych.control.speculation import EveryGuess, Guesser
from diptych.cost.drafts.drafter_trials import DrafterCost
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.events import TokenEvent
from diptych.ground.phase import Phase
from diptych.ground.request import StructuredSpec
from diptych.ground.shape import StepShape
from diptych.ground.step import ChunkResult, StepPlan, StepResult

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


def test_speculate_is_one_of_the_known_names():
    """A misspelled drafter would silently be none."""
    with pytest.raises(
        ConfigError, match="speculate is 'lokup'; it must be one of off, lookup, draft, medusa, eagle, auto"
    ):
        SchedulerConfig(speculate="lokup")


def run(prompt: list[int], *, n_tokens: int = 30, **core_settings) -> tuple[list[int], int, Recorder]:
    """One request: its text, the steps it took, and the recording."""
    speculate = core_settings.pop("speculate", "off")
    asked = core_settings.pop("asked", {})
    core = EngineCore(
        SchedulerConfig(speculate=speculate, max_step_tokens=256),
        BlockConfig(n_blocks=256, block_tokens=8),
        model_revision="toy",
        predict_s=lambda shape: 1.0,
        **core_settings,
    )
    recorder, executor = Recorder(core), ToyExecutor(256, 8)
    wanted = request(tuple(prompt), max_tokens=n_tokens)
    recorder.submit(replace(wanted, sampling=replace(wanted.sampling, **asked.pop("sampling", {})), **asked))
    text, n_steps = [], 0
    while core.has_work:
        plan, _ = recorder.begin_step(0.0)
        n_steps += 1
        events = recorder.end_step(plan, executor.execute(plan), 0.0)
        text += [event.token_id for event in events if isinstance(event, TokenEvent)]
        core.check()
    return text, n_steps, recorder


def free() -> DraftPrices:
    """Rows that cost nothing."""
    return DraftPrices(lambda shape: 1.0)


def test_a_run_that_looks_up_its_drafts_replays():
    """Drafts follow from the tokens alone, so a recording made with speculation gives the same plans again."""
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(1500)]
    text, _, recorder = run(prompt, speculate="lookup", depths=free())
    assert text == greedy(tuple(prompt), 30)
    lines = recorder.lines()
    assert any('"phase": {"type": "Phase", "value": "decode"}' in line for line in lines)
    assert replay(lines, predict_s=lambda shape: 1.0, depths=free()) == []
    assert replay(lines, predict_s=lambda shape: 1.0, depths=EveryGuess(rows=0)) != [], "nothing was drafted"


PROMPT = list(range(40))
ANSWER = greedy(tuple(PROMPT), 30)


class Oracle:
    """Knows the answer."""

    confidence = LIKELY

    def propose(self, token_ids, n):
        return ANSWER[len(token_ids) - len(PROMPT) :][:n]


def oracle(request):
    return Oracle()


def test_right_guesses_save_steps():
    """Thirty tokens in a few steps when every guess is right, and the same thirty."""
    assert run(PROMPT, drafters={"oracle": oracle}, depths=free())[:2] == (ANSWER, 4)
    assert run(PROMPT)[:2] == (ANSWER, 30)


@pytest.mark.parametrize(("most", "n_steps"), [(0, 30), (1, 16), (2, 11), (None, 4)])
def test_a_request_says_how_far_it_is_guessed_ahead(most, n_steps):
    """0 is none at all: the request decodes as if nobody speculated."""
    asked = {"sampling": {"max_draft_tokens": most}}
    assert run(PROMPT, drafters={"oracle": oracle}, depths=free(), asked=asked)[:2] == (ANSWER, n_steps)


def test_a_prediction_is_followed_whoever_else_guesses():
    """OpenAI's predicted outputs: the answer with a token changed, one left out and one put in, found again each time."""
    edited = [*ANSWER[:5], 1, *ANSWER[6:14], *ANSWER[15:20], 2, *ANSWER[20:]]
    text, n_steps, _ = run(PROMPT, depths=free(), asked={"prediction_token_ids": tuple(edited)})
    assert text == ANSWER
    assert n_steps <= 9


def faulty(behaviour):
    class Faulty:
        confidence = FRESH

        def propose(self, token_ids, n):
            return behaviour(n)

    return lambda request: Faulty()


@pytest.mark.parametrize(
    "behaviour",
    [
        lambda n: 1 // 0,
        lambda n: [VOCAB],
        lambda n: [-1],
        lambda n: [1] * (n + 1),
        lambda n: [1.0],
        lambda n: [True],
        lambda n: "text",
        lambda n: {1: 2},
        lambda n: 3,
        lambda n: [10**30],
    ],
)
def test_a_drafter_that_misbehaves_is_switched_off(behaviour, caplog):
    """An exception in a drafter, or a token outside the vocabulary on its way to the model, ended every request."""
    text, n_steps, recorder = run(PROMPT, drafters={"bad": faulty(behaviour)}, depths=free(), n_vocab=VOCAB)
    assert (text, n_steps) == (ANSWER, 30)
    assert recorder.core.stats().drafter_faults == 1
    assert [line for line in caplog.messages if line.startswith("drafter switched off name=bad")]


def test_a_bad_drafter_leaves_the_others_alone_and_is_forgotten_in_the_end():
    """Eight faults of one name and nobody asks it again; what it did to one sequence it does not do to its neighbour."""
    guesser = Guesser(SchedulerConfig(), drafters={"bad": faulty(lambda n: 1 // 0), "oracle": oracle})
    for n_faults in range(1, 12):
        speculation = guesser.begin(request(tuple(PROMPT)), free())
        assert speculation.propose([*PROMPT, ANSWER[0]]) == ANSWER[1:17]
        assert guesser.n_faults == min(n_faults, 8)


def test_prediction_is_found_again_behind_a_difference():
    """One token for another, tokens put in, tokens left out, and a text that has nothing of it."""
    predicted = list(range(10, 40))

    def after(answer):
        prediction = Prediction(predicted, start=3)
        for i in range(len(answer) + 1):
            drafts = prediction.propose([1, 2, 3, *answer[:i]], 3)
        return drafts, prediction.confidence

    assert after([]) == ([10, 11, 12], FOLLOWED)
    assert after([10, 11]) == ([12, 13, 14], FOLLOWED)
    assert after([10, 11, 99]) == ([13, 14, 15], FRESH), "one token for one"
    assert after([10, 11, 99, 13]) == ([14, 15, 16], FOLLOWED)
    assert after([10, 11, 99, 98, 97, 12]) == ([], FRESH), "lost"
    assert after([10, 11, 99, 98, 97, 12, 13]) == ([14, 15, 16], LIKELY), "found by two tokens"
    assert after([10, 11, 20, 21, 22]) == ([23, 24, 25], FOLLOWED), "left out"
    assert after(list(range(10, 40))) == ([], FOLLOWED), "at its end"


def test_memory_knows_recent_answers_of_one_salt():
    """What one tenant was told is never guessed for another, and the oldest answers make room."""
    memory = AnswerMemory(limit_tokens=20)
    memory.add("a", [1, 2, 3, 4, 5, 6, 7])
    memory.add("b", [1, 2, 3, 9, 9, 9])
    for _ in range(2):
        memory.read()

    def guess(salt):
        return Lookup(memory, salt).propose([50, 1, 2, 3], 3)

    assert (guess("a"), guess("b"), guess(None)) == ([4, 5, 6], [9, 9, 9], [])
    memory.add("b", list(range(100, 114)))  # makes 27: a's answer goes
    memory.read()
    assert (guess("a"), guess("b")) == ([], [9, 9, 9])
    memory.add("b", list(range(100, 200)))
    memory.read()
    assert guess("b") == [], "an answer longer than the memory leaves its end there and nothing else"
    assert Lookup(memory, "b").propose([190, 191, 192], 2) == [193, 194]
    assert memory._n_tokens == 20
    assert set(memory._after) == {"b"}


def test_lookup_says_how_sure_it_is():
    """Two tokens agree, three do, or the last guess was right: each has its own chances."""
    lookup = Lookup()
    text = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3]
    lookup.propose(text, 2)
    assert lookup.confidence == FRESH
    lookup.propose([*text, 4], 2)
    assert lookup.confidence == FOLLOWED
    other = Lookup()
    other.propose([1, 2, 3, 4, 9, 1, 2, 3], 2)
    assert other.confidence == LIKELY


def test_every_guess_fills_the_rows_that_there_are():
    """Without prices: the first draft of everybody, then the second."""
    shape = StepShape.decode(batch=3, context_tokens=10)
    every, one = EveryGuess(rows=8), [(None, 4, 0), (None, 0, 0), (None, 1, 0)]
    assert every.choose(one, shape=shape, most_rows=100, limit_s=None) == [4, 0, 1]
    assert every.choose(one, shape=shape, most_rows=3, limit_s=None) == [2, 0, 1]
    assert EveryGuess(rows=2).choose(one, shape=shape, most_rows=100, limit_s=None) == [0, 0, 0]


def costing(step_s: float, draft_s) -> DraftPrices:
    """Steps that all take as long, and a drafter that the executor runs."""
    return DraftPrices(lambda shape: step_s, drafters=[DrafterCost(draft_s=draft_s)])


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
    core = EngineCore(config, BlockConfig(n_blocks=64, block_tokens=8), model_revision="toy", depths=free())
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
        assert sum(filter(None, executor.wanted[-20:])) <= 2, "what is always wrong is given up, and tried rarely"
        assert executor.wanted[-20:].count(None) >= 18
    else:
        assert n_steps < 20
    assert replay(recorder.lines(), depths=free()) == []


def test_what_a_grammar_forces_comes_up_and_goes_down():
    """It is known without asking anybody, wakes a planner that sleeps, and overrules whoever guesses otherwise."""
    prompt = tuple(range(40))
    text = [*prompt, *greedy(prompt, 200)]

    class Forcing(ToyExecutor):
        """Forces ten tokens of every forty, the first behind the 90th."""

        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            handed = []
            for chunk, one in zip(plan.chunks, result.results, strict=True):
                known = chunk.end_pos - len(chunk.draft_token_ids) + len(one.token_ids)
                n = 10 - known % 40 if known > 90 and known % 40 < 10 else 0
                handed.append(replace(one, forced_token_ids=tuple(text[known : known + n])))
            return replace(result, results=tuple(handed))

    class Wrong:
        confidence = 0

        def propose(self, token_ids, n: int) -> list[int]:
            return [text[len(token_ids)] + 1] * n if len(token_ids) + 1 < len(text) else []

    structured = StructuredSpec(kind="regex", source="a")

    def steps(speculate: str) -> list[tuple[int, ...]]:
        config = SchedulerConfig(speculate=speculate, max_draft_tokens=6)
        blocks = BlockConfig(n_blocks=64, block_tokens=8)
        drafters = {"wrong": lambda request: Wrong()}
        prices = DraftPrices(lambda shape: 1.0 + 0.05 * shape.n_tokens)
        core = EngineCore(config, blocks, model_revision="toy", depths=prices, drafters=drafters)
        recorder, executor = Recorder(core), Forcing(64, 8)
        recorder.submit(request(prompt, max_tokens=200, structured=structured))
        came, drafted = [], []
        while core.has_work:
            plan, _ = recorder.begin_step(0.0)
            drafted += [chunk.draft_token_ids for chunk in plan.chunks if chunk.draft_token_ids]
            events = recorder.end_step(plan, executor.execute(plan), 1.0)
            came += [event.token_id for event in events if isinstance(event, TokenEvent)]
            core.check()
        assert came == text[40:]
        return drafted

    answer = " ".join(map(str, text))
    held = [drafts for drafts in steps("lookup") if " ".join(map(str, drafts)) in answer]
    assert [len(drafts) for drafts in held].count(6) >= 3
    assert sum(map(len, held)) >= 27, "ten are forced three times: six drafts and what is drawn, then three"
    assert all(len(set(drafts)) == 1 for drafts in steps("off")), "off is off"


@pytest.mark.parametrize("junk", [(VOCAB,), (-1,), (1.5,), (0,) * 99, "text", 7, ([],)])
def test_an_executor_that_hands_up_junk_costs_speed_and_no_answer(junk):
    """What comes up is checked before it goes down to the embedding."""

    class Junk(ToyExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            return replace(result, results=tuple(replace(one, draft_token_ids=junk) for one in result.results))

    config = SchedulerConfig(speculate="draft")
    core = EngineCore(
        config, BlockConfig(n_blocks=64, block_tokens=8), model_revision="toy", depths=free(), n_vocab=VOCAB
    )
    executor, text = Junk(64, 8), []
    core.submit(request(tuple(PROMPT), max_tokens=30))
    while core.has_work:
        plan, _ = core.begin_step(0.0)
        assert all(len(chunk.token_ids) == 1 for chunk in plan.chunks if chunk.start_pos >= len(PROMPT))
        text += [
            event.token_id for event in core.end_step(plan, executor.execute(plan), 0.0) if type(event) is TokenEvent
        ]
    assert text == ANSWER
    assert core.stats().drafter_faults == 1


def test_a_drafter_that_costs_more_than_it_gives_is_not_asked():
    """The drafter's own time enters the choice of the depth."""
    prompt = tuple(range(40))
    answer = greedy(prompt, 60)

    def asked(draft_s: float) -> int:
        core = EngineCore(
            SchedulerConfig(speculate="draft"),
            BlockConfig(n_blocks=64, block_tokens=8),
            model_revision="toy",
            depths=costing(1.0, lambda shape, depths: draft_s * max(depths)),
        )
        executor = Handing(64, 8, [*prompt, *answer], lies=False)
        core.submit(request(prompt, max_tokens=60))
        while core.has_work:
            plan, _ = core.begin_step(0.0)
            core.end_step(plan, executor.execute(plan), 0.0)
        return sum(filter(None, executor.wanted))

    assert asked(0.0) > 30 > asked(2.0)


@pytest.mark.parametrize("speculate", ["draft", "lookup"])
def test_steps_do_not_notice_drafters_that_are_silent(speculate):
    """Where nothing paid, each step still asked everybody: a twentieth of a small model's step, at temperature 0.8."""
    calls: list[str] = []

    class Counted(DraftPrices):
        def ask(self, *args, **settings):
            calls.append("ask")
            return super().ask(*args, **settings)

        def is_due(self, n_decodes):
            calls.append("guess")
            return super().is_due(n_decodes)

    n_steps = 600
    prompt = tuple(range(40))
    answer = list(range(1000, 1000 + n_steps))  # nothing in it stands twice
    cost = DrafterCost(draft_s=lambda shape, wanted: 2e-4 * max(wanted))
    depths = Counted(lambda shape: 1e-4, drafters=[cost])
    core = EngineCore(
        SchedulerConfig(speculate=speculate),
        BlockConfig(n_blocks=128, block_tokens=8),
        model_revision="toy",
        depths=depths,
    )
    core.submit(request(prompt, max_tokens=n_steps))
    told = iter(answer)
    while core.has_work:
        plan, _ = core.begin_step(0.0)
        results = [
            ChunkResult(seq_id=one.seq_id, token_ids=(next(told),), draft_token_ids=(3,) * (one.wanted_drafts or 0))
            for one in plan.chunks
        ]
        core.end_step(plan, StepResult(step_id=plan.step_id, results=tuple(results), device_s=0.0, host_s=0.0), 0.0)
        depths.observe(plan.shape, 1e-4)
    assert 0 < calls.count("guess") < n_steps / 4
    assert calls.count("ask") < n_steps / 4
    assert (calls.count("ask") > 0) == (speculate == "draft")


def test_a_text_that_begins_to_quote_after_a_silence_gets_its_drafts():
    """Guesses are made rarely after a long silence; the first that is found ends it."""
    prompt = tuple(range(40))
    answer = [*range(1000, 1100), *range(40), *range(40)]
    core = EngineCore(
        SchedulerConfig(speculate="lookup"),
        BlockConfig(n_blocks=128, block_tokens=8),
        model_revision="toy",
        depths=DraftPrices(lambda shape: 1e-4),
    )
    core.submit(request(prompt, max_tokens=len(answer)))
    text, n_steps = [], 0
    while core.has_work:
        plan, _ = core.begin_step(0.0)
        results = []
        for chunk in plan.chunks:
            drafts, right = chunk.draft_token_ids, answer[len(text) :]
            n = 0
            while n < len(drafts) and drafts[n] == right[n]:
                n += 1
            results.append(ChunkResult(seq_id=chunk.seq_id, token_ids=tuple(right[: n + 1])))
        text += results[0].token_ids
        n_steps += len(text) > 100
        core.end_step(plan, StepResult(step_id=plan.step_id, results=tuple(results), device_s=0.0, host_s=0.0), 0.0)
    assert text == answer
    assert n_steps < 50, "of 80 tokens"


def test_a_new_sequence_ends_the_rest_of_those_before_it():
    """Drafts that came up with its first token would wait until those that were given up are asked again."""
    prompt = tuple(range(40))
    core = EngineCore(
        SchedulerConfig(speculate="draft"),
        BlockConfig(n_blocks=128, block_tokens=8),
        model_revision="toy",
        depths=costing(1.0, lambda shape, wanted: 0.05 * max(wanted)),
    )
    executor = Handing(128, 8, [*prompt, *greedy(prompt, 200)], lies=True)

    def step() -> StepPlan:
        plan, _ = core.begin_step(0.0)
        core.end_step(plan, executor.execute(plan), 0.0)
        return plan

    core.submit(request(prompt, max_tokens=200, request_id="first"))
    while core.stats().waiting or not core._scheduler.drafts._idle_steps:
        step()
    executor.lies = False
    second = request(prompt, max_tokens=60, request_id="second")
    core.submit(replace(second, sampling=replace(second.sampling, temperature=1.0)))
    while not any(chunk.phase is Phase.PREFILL and chunk.samples for chunk in step().chunks):
        pass
    core.cancel("first", 0.0)  # as many sequences as rested
    (chunk,) = step().chunks
    assert chunk.draft_token_ids
