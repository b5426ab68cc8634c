"""Runs of the real engine, simulated once more with their own arrivals and step times: every decision must be the same."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoints import make_checkpoint

from diptych.compute.runner import Model, load_model
from diptych.compute.sampling.sampler import Sampler
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder
from diptych.cost.setup import setup_of
from diptych.engine.executor import ModelExecutor
from diptych.ground.clock import MonotonicClock, VirtualClock, sleep_s
from diptych.ground.config import BlockConfig, ComputeConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, ConfigError, ExecutorError
from diptych.ground.events import Event, FinishEvent
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.ground.step import StepPlan, StepResult
from diptych.lab import served
from diptych.lab.simulated import SITUATIONS, Situation, run_on_engine
from diptych.sim.executor import PredictedExecutor
from diptych.sim.recorded import minutes_of, recorded_load, rerun
from diptych.sim.service import Service, simulate
from diptych.stepper import Stepper, serve
from diptych.workload import LengthRange, WorkloadSpec, requests_of

ROOMY = BlockConfig(n_blocks=400, block_tokens=16)


def seconds(shape: StepShape) -> float:
    """What the stall budget asks: 0.1 ms a row."""
    return 1e-4 * shape.n_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """As small as can be: decisions come of lengths and times, not of what is computed."""
    sizes = {"vocab_size": 1000, "max_position_embeddings": 2048, "num_hidden_layers": 1, "dtype": torch.bfloat16}
    return load_model(make_checkpoint("llama", tmp_path_factory.mktemp("tiny"), **sizes), ComputeConfig(threads=1))


class Run:
    """A real engine with its core recorded."""

    def __init__(self, model: Model, blocks: BlockConfig = ROOMY, **settings: object) -> None:
        config = SchedulerConfig(**{"max_step_tokens": 128, "max_running_sequences": 8} | settings)
        self.clock = MonotonicClock()
        self.core = EngineCore(config, blocks, model_revision=model.revision, predict_s=seconds)
        self.recorder = Recorder(self.core)
        kv = model.make_kv(blocks.n_blocks, blocks.block_tokens)
        sampler = Sampler(model.spec.vocab_size, model.device, drawing=model)
        executor = ModelExecutor(model, kv, sampler, clock=self.clock)
        self.events: list[Event] = []
        self.stepper = Stepper(self.recorder, executor, self.clock, fold=self.events.extend)

    def serve(self, requests: Iterable[Request]) -> None:
        """Each when it is due, on the machine's clock."""
        now_s = self.clock.now_s()
        serve(self.stepper, [replace(one, arrival_s=now_s + one.arrival_s) for one in requests], wait=sleep_s)


def closed_loop(run: Run, n_users: int) -> None:
    """Each user sends three messages, each behind all that was said before, as soon as the answer is there."""
    said = {user: tuple(range(10 + user, 60 + user)) for user in range(n_users)}
    for turn in range(3):
        waiting = set(said)
        for user in sorted(said):
            run.stepper.submit(request(f"{user}.{turn}", said[user], 6 + user, run.clock.now_s()))
        seen = len(run.events)
        while waiting and run.stepper.step():
            for event in run.events[seen:]:
                if isinstance(event, FinishEvent):
                    waiting.discard(int(event.request_id.partition(".")[0]))
            seen = len(run.events)
        said = {user: (*tokens, *range(100, 120 + user)) for user, tokens in said.items()}


def request(name: str, tokens: tuple[int, ...], output_tokens: int, arrival_s: float) -> Request:
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=tokens, sampling=sampling, arrival_s=arrival_s)


def load(**changes: object) -> list[Request]:
    base = WorkloadSpec(
        n_requests=16, prompt=LengthRange(low=10, high=200), output=LengthRange(low=4, high=16), rate_per_s=60.0, seed=5
    )
    return requests_of(replace(base, **changes), vocab_size=1000)


def four_users(model: Model) -> Run:
    run = Run(model)
    closed_loop(run, 4)
    assert run.core.stats().prefix_hits_tokens > 0
    return run


def stall_budget(model: Model) -> Run:
    """Long prompts beside running streams are cut by the budget: at most 40 rows."""
    run = Run(model, stall_budget_s=0.004)
    run.serve(load(prompt=LengthRange(low=300, high=600), n_requests=6))
    return run


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name.replace(" ", "_"))
def test_a_real_run_is_simulated_decision_by_decision(model: Model, situation: Situation) -> None:
    """The simulator is the engine's scheduler and no second one: with the same times it must do the same.

    The nine loads are those that `diptych lab simulated` takes the times of.
    """
    n_requests = 4 if situation.n_streams else 12
    requests = situation.requests(n_requests, capacity_per_s=200.0, vocab_size=1000, seed=5)
    run = run_on_engine(model, situation, requests, seconds, is_recorded=True)
    stats = run.core.stats()
    assert len(run.book.records) == len(requests)
    assert (stats.preemptions > 0) == (situation.name == "preemption")
    assert (stats.prefix_hits_tokens > 0) >= (situation.shared_prefix_tokens > 0)
    assert rerun(run.lines(), predict_s=seconds) == []


@pytest.mark.parametrize(("n_frozen", "calls"), [(0, ["collect", "freeze", "unfreeze"]), (9, ["collect"])])
def test_what_others_froze_stays_frozen(monkeypatch: pytest.MonkeyPatch, n_frozen: int, calls: list[str]) -> None:
    """All that a process had set aside was unfrozen, and walked by each collection from then on."""
    seen: list[str] = []
    names = ("collect", "freeze", "unfreeze")
    asked = {name: partial(seen.append, name) for name in names} | {"get_freeze_count": lambda: n_frozen}
    monkeypatch.setattr(served, "gc", SimpleNamespace(**asked))
    with served.undisturbed():
        pass
    assert seen == calls


def test_histories_that_grow_are_simulated_decision_by_decision(model: Model) -> None:
    assert rerun(four_users(model).recorder.lines(), predict_s=seconds) == []


def test_another_decision_is_told(model: Model) -> None:
    """Were the comparison blind, the test above could not fail: a smaller step must show, and a missing budget too."""
    lines = stall_budget(model).recorder.lines()
    smaller = [lines[0].replace('"max_step_tokens": 128', '"max_step_tokens": 100'), *lines[1:]]
    assert rerun(smaller, predict_s=seconds)[0].startswith("recorded ")
    assert rerun(lines, predict_s=None)[0].startswith("recorded ")
    first = next(i for i, line in enumerate(lines) if '"submit"' in line)
    assert rerun(lines[:first] + lines[first + 1 :], predict_s=seconds)[0].startswith("recorded ")


def test_a_run_ended_from_outside_is_refused(model: Model) -> None:
    """A cancelled request is no decision of the scheduler; the simulation would drift without a word."""
    run = Run(model)
    run.stepper.submit(request("a", (1, 2, 3), 5, run.clock.now_s()))
    run.recorder.cancel("a", run.clock.now_s(), reason=FinishReason.ABORT)
    with pytest.raises(ConfigError, match="calls of cancel"):
        rerun(run.recorder.lines())


class Failing(PredictedExecutor):
    """Its third step is none."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 2:
            raise ExecutorError("a broken step")
        return super().execute(plan)


def recording_with_a_broken_step() -> list[str]:
    clock = VirtualClock()
    recorder = Recorder(EngineCore(SchedulerConfig(), ROOMY, model_revision="x", predict_s=seconds))
    stepper = Stepper(recorder, Failing(lambda shape: 0.01, clock), clock, fold=lambda events: None)
    stepper.submit(request("ends with it", tuple(range(20)), 9, 0.0))
    while clock.now_s() < 0.02:
        stepper.step()
    with suppress(ExecutorError):
        stepper.step()
    for name, n in (("a", 3), ("b", 5)):
        stepper.submit(request(name, tuple(range(30)), n, clock.now_s()))
    while stepper.step():
        pass
    return recorder.lines()


def test_a_step_that_broke_is_no_step(tmp_path: Path) -> None:
    """Every result behind it was taken for that of the plan before: other answers, or a traceback."""
    lines = recording_with_a_broken_step()
    assert any('"abort_step"' in line for line in lines)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    assert [one.sampling.max_tokens for _, one in recorded_load(path).start()] == [2, 3, 5]
    pasts = minutes_of(iter(lines)).requests
    assert [len(past.outputs[0]) for past in pasts] == [2, 3, 5]


def test_one_that_was_refused_wrote_nothing(tmp_path: Path) -> None:
    """Its prompt came again and was taken: what that wrote was put down to the refused one."""
    clock = VirtualClock()
    core = EngineCore(SchedulerConfig(max_waiting_tokens=60), ROOMY, model_revision="x", predict_s=seconds)
    recorder = Recorder(core)
    stepper = Stepper(recorder, PredictedExecutor(lambda shape: 0.01, clock), clock, fold=lambda events: None)
    stepper.submit(request("first", tuple(range(30)), 20, 0.0))
    with pytest.raises(CapacityError):
        stepper.submit(request("refused", tuple(range(40)), 5, 0.0))
    stepper.step()
    stepper.submit(request("again", tuple(range(40)), 5, clock.now_s()))
    while stepper.step():
        pass
    lines = recorder.lines()
    assert [(past.request.request_id, len(past.outputs[0])) for past in minutes_of(iter(lines)).requests] == [
        ("first", 20),
        ("again", 5),
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    assert [one.sampling.max_tokens for _, one in recorded_load(path).start()] == [20, 1, 5]
    earlier = [line.replace('"is_refused": false', "").replace('"is_refused": true', "") for line in lines]
    assert len(minutes_of(iter(earlier)).requests) == 2


@pytest.mark.parametrize(
    ("call", "changed", "words"),
    [
        ("end_step", None, "before the one before it ended"),
        ("end_step", ('"step_id": 0', '"step_id": 7'), "the result of step 7 follows no plan of it"),
        ("end_step", ('"seq_id": 0', '"seq_id": 3'), "the result of step 0 follows no plan of it"),
        ("begin_step", None, "the result of step 0 follows no plan of it"),
        ("begin_step", ("[0.0]", '["soon"]'), "the step's begin is 'soon'; it must be a number"),
        ("submit", ('"args": [', '"args": [7, '), "it has 7 in the place of a Request"),
        ("submit", ('"args"', '"args": ' + "[" * 100_000 + ', "x"'), "line 2 cannot be read"),
    ],
)
def test_a_damaged_recording_is_told_with_its_line(call: str, changed: tuple[str, str] | None, words: str) -> None:
    lines = recording_with_a_broken_step()
    place = next(i for i, line in enumerate(lines) if f'"{call}"' in line)
    lines[place : place + 1] = [] if changed is None else [lines[place].replace(*changed)]
    with pytest.raises(ConfigError, match=r"the recording line \d+ cannot be read: ") as told:
        minutes_of(iter(lines))
    assert words in str(told.value)


def test_a_recording_is_a_load(model: Model, tmp_path: Path) -> None:
    """The same requests, as long as they were, can be put to another service."""
    run = four_users(model)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(run.recorder.lines()), "utf-8")
    found = list(recorded_load(path).start())
    finished = {event.request_id: event.output_tokens for event in run.events if isinstance(event, FinishEvent)}
    assert sorted(one.sampling.max_tokens for _, one in found) == sorted(finished.values())
    assert found[0][0] == 0.0
    report = simulate(Service.of(setup_of("llama-3.1-8b", "h100-80gb-sxm")), recorded_load(path, speed=2.0))
    assert (report.n_complete, report.output_tokens) == (12, sum(finished.values()))
    assert report.prefix_hit_tokens > 0
    path.write_text("\n".join([run.recorder.lines()[0], "{]"]), "utf-8")
    with pytest.raises(ConfigError, match=r"run.jsonl line 2 cannot be read"):
        recorded_load(path)
