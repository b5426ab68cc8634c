"""The engine and its simulation under nine loads: the same decisions, and times as near as the machine's calibration.

    for one in compare(model, predict_s, rounds=5): print(one.situation.name, one.ttft_p50)

Each round records a run of the real engine and simulates the same load with predicted step times: from the same clients, so
that a closed loop's next request follows the simulated answer. Rounds alternate over all loads, and what counts is the median
of rounds; how far the rounds stand apart tells how far the machine can be trusted.

Two things can be wrong, the steps' prices and what is made of them, so the prices are judged alone, too; and each load is
simulated a second time at the machine's pace: the profile's prices times what the steps of the run before took against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diptych.compute.runner import Model
from diptych.compute.sampler import Sampler
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder
from diptych.control.scheduler import Predict
from diptych.engine.executor import ModelExecutor
from diptych.ground.clock import Clock, MonotonicClock, sleep_s
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import Event, FinishEvent
from diptych.ground.phase import Phase
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.metrics import EventBook, Sample, percentile
from diptych.sim.counterfactual import times_of
from diptych.sim.engine import SimulatedEngine
from diptych.sim.executor import PredictedExecutor
from diptych.sim.recorded import rerun
from diptych.stepper import Stepper, serve
from diptych.workload import LengthRange, WorkloadSpec, requests_of

ROOMY = BlockConfig(n_blocks=2048, block_tokens=16)
USUAL_PROMPT, USUAL_OUTPUT = LengthRange(low=32, high=320), LengthRange(low=16, high=64)
MEDIAN_LIMIT, P99_LIMIT = 0.05, 0.15
Wait = Callable[[float], object]
MEASURES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
Steps = list[tuple[float, float, StepShape]]  # begin, end, what it held
LEAST_STEPS = 5  # of a phase, whose median is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One load.

    users: of a closed loop, each sending one request after the other. of_capacity: else, the arrival rate as a share of what
    the engine serves at most; None: everything at once.

    n_streams: long answers that run before anything else comes.
    """

    name: str
    users: int | None = None
    of_capacity: float | None = None
    prompt: LengthRange = USUAL_PROMPT
    output: LengthRange = USUAL_OUTPUT
    shared_prefix_tokens: int = 0
    n_streams: int = 0
    blocks: BlockConfig = ROOMY
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self) -> SchedulerConfig:
        """Of the engine."""
        return SchedulerConfig(**{"max_step_tokens": 256, "max_running_sequences": 16} | dict(self.settings))

    def requests(self, n_requests: int, *, capacity_per_s: float, vocab_size: int, seed: int) -> list[Request]:
        """In order of arrival, from 0 on."""
        rate = None if self.of_capacity is None else self.of_capacity * capacity_per_s
        spec = WorkloadSpec(
            n_requests=n_requests,
            prompt=self.prompt,
            output=self.output,
            rate_per_s=rate,
            shared_prefix_tokens=self.shared_prefix_tokens,
            n_prefixes=3,
            seed=seed,
        )
        requests = requests_of(spec, vocab_size=vocab_size)
        longest = LengthRange(low=8 * self.output.high, high=8 * self.output.high)
        streams = WorkloadSpec(n_requests=max(self.n_streams, 1), prompt=LengthRange(low=16, high=16), output=longest)
        running = requests_of(streams, vocab_size=vocab_size, token_seed=1, name="stream") if self.n_streams else []
        return [*running, *requests]


SITUATIONS = (
    Situation(name="closed loop of 1", users=1),
    Situation(name="closed loop of 4", users=4),
    Situation(name="closed loop of 16", users=16),
    Situation(name="open loop at 0.5", of_capacity=0.5),
    Situation(name="open loop at 0.9", of_capacity=0.9),
    Situation(name="open loop at 1.5", of_capacity=1.5),
    Situation(
        name="long prompts beside streams",
        of_capacity=0.1,
        prompt=LengthRange(low=600, high=1200),
        n_streams=4,
        settings=(("stall_budget_s", 0.02), ("max_step_tokens", 1024)),
    ),
    Situation(name="shared prefix", of_capacity=0.5, shared_prefix_tokens=256),
    Situation(
        name="preemption",
        prompt=LengthRange(low=32, high=128),
        output=LengthRange(low=64, high=128),
        blocks=BlockConfig(n_blocks=48, block_tokens=16),
    ),
)


class Recorded:
    """One run of the real engine with its core recorded."""

    def __init__(self, model: Model, situation: Situation, predict_s: Predict) -> None:
        blocks = situation.blocks
        self.clock = MonotonicClock()
        self.steps: Steps = []
        self.book = EventBook(on_step=lambda one: self.steps.append((one.begin_s, one.end_s, one.shape)))
        self.ended: list[str] = []
        core = EngineCore(situation.config(), blocks, model_revision=model.revision, predict_s=predict_s)
        self.recorder = Recorder(core)
        kv = model.make_kv(blocks.n_blocks, blocks.block_tokens)
        sampler = Sampler(model.spec.vocab_size, model.device, drawing=model)
        executor = ModelExecutor(model, kv, sampler, clock=self.clock)
        self.stepper = Stepper(self.recorder, executor, self.clock, fold=self._fold)

    def _fold(self, events: list[Event]) -> None:
        self.book.fold(events)
        self.ended += [event.request_id for event in events if isinstance(event, FinishEvent)]


def drive(
    stepper: Stepper, clock: Clock, requests: Sequence[Request], ended: list[str], *, users: int | None, wait: Wait
) -> None:
    """Put requests through: when they are due, or one after the other for each user as answers come."""
    begin_s = clock.now_s()
    if users is None:
        serve(stepper, [replace(one, arrival_s=begin_s + one.arrival_s) for one in requests], wait=wait)
        return
    coming = iter(requests)

    def send(n: int) -> None:
        for _ in range(n):
            request = next(coming, None)
            if request is not None:
                stepper.submit(replace(request, arrival_s=clock.now_s()))

    send(users)
    n_seen = len(ended)
    while stepper.step():
        send(len(ended) - n_seen)
        n_seen = len(ended)


def record(model: Model, situation: Situation, requests: Sequence[Request], predict_s: Predict) -> Recorded:
    """Serve the load on the real engine."""
    run = Recorded(model, situation, predict_s)
    drive(run.stepper, run.clock, requests, run.ended, users=situation.users, wait=sleep_s)
    return run


class Pace:
    """How many times the predicted time steps took lately, by phase: what `compare` learns from one run for the next."""

    def __init__(self, predict_s: Predict) -> None:
        self._predict_s = predict_s
        self.times = dict.fromkeys(Phase, 1.0)

    def learn(self, steps: Steps) -> dict[Phase, float]:
        """From a run; returns what it alone says. A phase of which it had few steps keeps its pace."""
        ratios: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        for shape, time_s in times_of(steps):
            ratios[shape.phase].append(time_s / self._predict_s(shape))
        found = {phase: percentile(each, 50.0) or 1.0 for phase, each in ratios.items() if len(each) >= LEAST_STEPS}
        self.times |= found
        return found

    def predict_s(self, shape: StepShape) -> float:
        """Seconds of a step."""
        return self._predict_s(shape) * self.times[shape.phase]


def simulate(
    situation: Situation, requests: Sequence[Request], predict_s: Predict, *, time_s: Predict | None = None
) -> EventBook:
    """Serve it on a virtual clock. time_s: how long steps take, where that is not what the scheduler is told."""
    ended: list[str] = []

    def note(events: list[Event]) -> None:
        ended.extend(event.request_id for event in events if isinstance(event, FinishEvent))

    engine = SimulatedEngine(situation.config(), situation.blocks, predict_s=predict_s, on_events=note)
    if time_s is not None:
        engine.stepper.executor = PredictedExecutor(time_s, engine.clock)
    drive(engine.stepper, engine.clock, requests, ended, users=situation.users, wait=engine.clock.advance)
    return engine.book


def numbers(book: EventBook) -> dict[str, float]:
    """MEASURES of a run, in seconds."""
    samples: list[Sample] = [record.sample() for record in book.records.values()]
    ttft = [one.ttft_s for one in samples if one.ttft_s is not None]
    tpot = [one.tpot_s for one in samples if one.tpot_s is not None]
    return {
        f"{name}_p{q}": percentile(values, float(q)) or 0.0
        for name, values in (("ttft", ttft), ("tpot", tpot))
        for q in (50, 99)
    }


@dataclass(slots=True, kw_only=True)
class Compared:
    """All rounds of a situation: measured and simulated, by measure; differences: of decisions, in words.

    paced: simulated at the machine's pace. steps: of each round, measured over predicted time of its steps by phase.
    """

    situation: Situation
    measured: list[dict[str, float]] = field(default_factory=list)
    simulated: list[dict[str, float]] = field(default_factory=list)
    paced: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[Phase, float]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def middle(self, measure: str) -> tuple[float, float]:
        """(measured, simulated), each the median of its rounds."""
        return _median(self.measured, measure), _median(self.simulated, measure)

    def error(self, measure: str, *, is_paced: bool = False) -> float:
        """Simulated / measured - 1."""
        measured, simulated = (
            _median(self.measured, measure),
            _median(self.paced if is_paced else self.simulated, measure),
        )
        return simulated / measured - 1.0 if measured else 0.0

    def step_error(self, phase: Phase) -> float | None:
        """The same of single steps of a phase: the profile's part in all other errors. None where there were too few."""
        ratios = [one[phase] for one in self.steps if phase in one]
        return 1.0 / (percentile(ratios, 50.0) or 1.0) - 1.0 if ratios else None

    def spread(self, measure: str) -> float:
        """How far measured rounds stand apart, as a share of their median: no prediction can be held to less."""
        values = [one[measure] for one in self.measured]
        middle = percentile(values, 50.0) or 1.0
        return (max(values) - min(values)) / middle if middle else 0.0

    @property
    def holds(self) -> bool:
        """Same decisions; medians within MEDIAN_LIMIT, 99th percentiles within P99_LIMIT."""
        return self._holds(is_paced=False)

    @property
    def holds_paced(self) -> bool:
        """The same at the machine's pace."""
        return self._holds(is_paced=True)

    def _holds(self, *, is_paced: bool) -> bool:
        limits = {measure: MEDIAN_LIMIT if measure.endswith("50") else P99_LIMIT for measure in MEASURES}
        errors = {name: abs(self.error(name, is_paced=is_paced)) for name in MEASURES}
        return not self.differences and all(errors[name] <= limit for name, limit in limits.items())

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.situation.name,
            "holds": self.holds,
            "holds_paced": self.holds_paced,
            "step_errors": {phase.value: self.step_error(phase) for phase in Phase},
            "differences": self.differences,
            "measures": {
                name: dict(zip(("measured_s", "simulated_s"), self.middle(name), strict=True))
                | {"error": self.error(name), "paced": self.error(name, is_paced=True), "spread": self.spread(name)}
                for name in MEASURES
            },
        }


def _median(rounds: list[dict[str, float]], measure: str) -> float:
    return percentile([one[measure] for one in rounds], 50.0) or 0.0


def capacity_per_s(model: Model, predict_s: Predict, *, n_requests: int, pace: Pace) -> float:
    """Requests a second when all of an open loop's come at once: the median of three bursts, the first thrown away."""
    situation = replace(next(one for one in SITUATIONS if one.of_capacity), of_capacity=None)
    rates = []
    for seed in range(4):
        vocab_size = model.spec.vocab_size
        requests = situation.requests(n_requests, capacity_per_s=1.0, vocab_size=vocab_size, seed=seed)
        run = record(model, situation, requests, predict_s)
        samples = [one.sample() for one in run.book.records.values()]
        pace.learn(run.steps)
        rates.append(len(samples) / (max(one.end_s for one in samples) - min(one.start_s for one in samples)))
    return percentile(rates[1:], 50.0) or 1.0


def compare(
    model: Model,
    predict_s: Predict,
    *,
    n_requests: int = 48,
    rounds: int = 5,
    situations: Iterable[Situation] = SITUATIONS,
    told: Callable[[str], object] = lambda run: None,
) -> Iterator[Compared]:
    """Every situation after its last round. predict_s: of this machine; the stall budget asks it too. told: of each run."""
    vocab_size = model.spec.vocab_size
    pace = Pace(predict_s)
    rate = capacity_per_s(model, predict_s, n_requests=n_requests, pace=pace)
    found = [Compared(situation=situation) for situation in situations]
    for number in range(rounds):
        for one in found:
            told(one.situation.name)
            requests = one.situation.requests(n_requests, capacity_per_s=rate, vocab_size=vocab_size, seed=number)
            run = record(model, one.situation, requests, predict_s)
            one.differences += rerun(run.recorder.lines(), predict_s=predict_s)
            one.measured.append(numbers(run.book))
            one.simulated.append(numbers(simulate(one.situation, requests, predict_s)))
            one.paced.append(numbers(simulate(one.situation, requests, predict_s, time_s=pace.predict_s)))
            one.steps.append(pace.learn(run.steps))
            if number == rounds - 1:
                yield one
