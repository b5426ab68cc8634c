"""Runs that verified drafts, run again: text that a grammar forces comes several tokens a step, and so it must again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.compute.sampling.sampler import Sampler
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder
from diptych.control.speculation import Depths, EveryGuess
from diptych.engine.executor import ModelExecutor
from diptych.engine.load import LoadedModel, load
from diptych.ground.clock import VirtualClock
from diptych.ground.config import BlockConfig, ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.request import Request, SamplingParams, StructuredSpec
from diptych.ground.shape import StepShape
from diptych.ground.step import StepPlan, StepResult
from diptych.metrics import EventBook
from diptych.sim.counterfactual import Change, Counterfactual, Drafted, drafts_of, past_of
from diptych.sim.journal import BlockNames, head_line, journal_minutes, request_line, step_line
from diptych.sim.recorded import minutes_of, rerun
from diptych.stepper import Stepper, serve

BLOCKS = BlockConfig(n_blocks=200, block_tokens=16)
FORM = StructuredSpec(
    kind="regex", source="It is forbidden to (lean out|smoke) while the train is moving[.] [a-z]{8} Thank you[.]"
)


def seconds(shape: StepShape) -> float:
    """2 ms a step, 0.1 ms a row."""
    return 2e-3 + 1e-4 * shape.n_tokens


class Timed:
    """A real executor whose steps take `seconds`, so that no machine's mood is in what is compared."""

    def __init__(self, inner: ModelExecutor, clock: VirtualClock) -> None:
        self._inner, self._clock = inner, clock

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        self._clock.advance(seconds(plan.shape))
        return replace(result, device_s=seconds(plan.shape), host_s=0.0)


class Run:
    """A real engine with its core recorded, and the book that a server keeps."""

    def __init__(
        self,
        loaded: LoadedModel,
        requests: Iterable[Request],
        *,
        speculate: str = "lookup",
        step_tokens: int = 128,
        depths: Depths | None = None,
    ) -> None:
        model, clock = loaded.model, VirtualClock()
        self.config = SchedulerConfig(max_step_tokens=step_tokens, max_running_sequences=8, speculate=speculate)
        core = EngineCore(self.config, BLOCKS, model_revision=model.revision, predict_s=seconds, depths=depths)
        self.recorder = Recorder(core)
        self.book = EventBook()
        grammars = GrammarCompiler(loaded.tokenizer, model.spec.vocab_size)
        sampler = Sampler(model.spec.vocab_size, model.device, grammars=grammars, drawing=model)
        kv = model.make_kv(BLOCKS.n_blocks, BLOCKS.block_tokens)
        executor = Timed(ModelExecutor(model, kv, sampler, clock=clock), clock)
        serve(Stepper(self.recorder, executor, clock, fold=self.book.fold), list(requests), wait=clock.advance)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("bundled", EngineConfig(compute=ComputeConfig(threads=1)))


def requests(loaded: LoadedModel) -> list[Request]:
    """Two forms, one of them twice, beside a stream of free text that quotes itself."""

    def one(name: str, text: str, at_s: float, **sampling: object) -> Request:
        params = SamplingParams(**{"max_tokens": 80, "temperature": 0.0} | sampling)
        tokens = tuple(loaded.tokenizer.encode(text))
        return Request(request_id=name, prompt_token_ids=tokens, sampling=params, arrival_s=at_s, eos_token_ids=(0,))

    return [
        one("stream", "One two three four, one two three four, one two", 0.0, ignore_eos=True),
        one("form", "Rules:", 0.01, structured=FORM),
        one("forms", "More rules, each with a reason:", 0.02, structured=FORM, n=2, temperature=0.9, seed=4),
        one("late", "And then", 0.1, ignore_eos=True, max_tokens=12),
    ]


@pytest.mark.parametrize("speculate", ["lookup", "off"])
def test_a_run_under_a_grammar_is_simulated_decision_by_decision(loaded: LoadedModel, speculate: str) -> None:
    """The simulator knew no grammar and no text: from the first forced run on it planned one token where several had come."""
    run = Run(loaded, requests(loaded), speculate=speculate)
    verified = [sum(one.drafted_tokens for one in record.drafts) for record in run.book.records.values()]
    assert (min(verified[:3]) > 10) == (speculate != "off")
    assert rerun(run.recorder.lines(), predict_s=seconds) == []


def test_drafts_beside_a_long_prompt_are_simulated(loaded: LoadedModel) -> None:
    """Rows of the prompt were counted among those of drafts: beside one of 256 tokens and more nothing was verified."""
    stream, form = requests(loaded)[:2]
    long = replace(stream, request_id="long", prompt_token_ids=tuple(range(9, 1509)), arrival_s=0.011)
    run = Run(loaded, [form, long], step_tokens=512, depths=EveryGuess(rows=1024))
    tokens = {note.step.step_id: note.end - note.start for note in run.book.records["long"].chunks}
    assert max(tokens.get(note.step_id, 0) for note in run.book.records["form"].drafts) > 256
    assert rerun(run.recorder.lines(), predict_s=seconds) == []


def test_a_prediction_is_not_guessed_twice(loaded: LoadedModel) -> None:
    """It guessed beside the drafts of the run, and further than the run had verified."""
    stream = replace(requests(loaded)[0], prediction_token_ids=tuple(loaded.tokenizer.encode(" three four" * 20)))
    run = Run(loaded, [stream], speculate="off")
    assert run.book.records["stream"].drafts
    assert rerun(run.recorder.lines(), predict_s=seconds) == []


def test_what_if_verifies_what_was_verified(loaded: LoadedModel) -> None:
    """One token a step was what came out, two to four times the time per token that was measured."""
    run = Run(loaded, requests(loaded))
    minutes = minutes_of(iter(run.recorder.lines()))
    for name, record in run.book.records.items():
        past, asked = minutes.find(name), Counterfactual(minutes, name)
        again = asked.outcome()
        assert again.seen.tpot_s == pytest.approx(record.timings().tpot_s, rel=0.05), name
        assert sum(map(len, past.drafts)) == len(record.drafts)
    form = Counterfactual(minutes, "form")
    assert form.outcome(Change.parse("pools")).seen.tpot_s < 1.5 * minutes.find("form").seen.tpot_s
    assert form.outcome(Change.parse("chunk=4")).seen.tpot_s > form.outcome().seen.tpot_s  # no room for long drafts


def test_a_server_and_its_journal_tell_the_same_drafts(loaded: LoadedModel, tmp_path: Path) -> None:
    """A recording of the core has the drafts themselves; a server's records and its journal count them."""
    run = Run(loaded, requests(loaded))
    minutes = minutes_of(iter(run.recorder.lines()))
    names, lines, steps = BlockNames(b"k" * 32, BLOCKS.block_tokens), [head_line(run.config, BLOCKS)], minutes.steps
    begin_s = 0.0
    for shape, time_s in steps:
        lines.append(step_line(begin_s, begin_s + time_s, shape))
        begin_s += time_s
    for past in minutes.requests:
        record = run.book.records[past.request.request_id]
        assert [one[:2] for some in drafts_of(record) for one in some] == [
            one[:2] for some in past.drafts for one in some
        ]
        told = past_of(past.request, past.outputs, record, came_s=past.came_s)
        lines.append(request_line(told, names))
    path = tmp_path / "j.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    for past in minutes.requests:
        found, name = journal_minutes(path, past.request.request_id)
        again = Counterfactual(found, name).outcome().seen
        if past.request.sampling.n == 1:  # the tokens of choices do not stand in a journal
            assert again.tpot_s == pytest.approx(past.seen.tpot_s, rel=0.1), past.request.request_id
    lines = [line if '"drafts"' not in line else _without_drafts(line) for line in lines]
    path.write_text(
        "\n".join(lines) + "\n", "utf-8"
    )  # of an earlier version: nobody guesses, least of all from equal tokens
    found, name = journal_minutes(path, "form")
    assert Counterfactual(found, name).outcome().seen.tpot_s > 1.5 * minutes.find("form").seen.tpot_s


def _without_drafts(line: str) -> str:
    entry = json.loads(line)
    del entry["request"]["drafts"]
    return json.dumps(entry)


def test_drafts_stand_behind_the_tokens_that_were_written_before_them(loaded: LoadedModel) -> None:
    run = Run(loaded, requests(loaded))
    record = run.book.records["form"]
    (drafts,) = drafts_of(record)
    times_s = record.token_times_s()
    for one, note in zip(drafts, record.drafts, strict=True):
        assert isinstance(one, Drafted)
        assert times_s[one.place] == note.at_s > times_s[one.place - 1]
        assert times_s.count(note.at_s) in (one.n_accepted, one.n_accepted + 1)
