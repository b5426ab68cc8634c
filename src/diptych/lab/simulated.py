"""The engine and its simulation under nine loads: the same decisions, and times as near as the machine's calibration.

    for one in compare(model, predictor, rounds=6): print(one.situation.name, one.error("ttft_p50"))

A run of each load is recorded, and the simulation given its step times must make the same decisions. Then rounds, in turns over
all loads: ladder, engine, ladder, engine, ladder, both runs with the same requests, the next round's with others. The ladder of
steps (`lab/ladder.py`) right before a run and right behind it says what this machine takes in this minute, and the load is
simulated with step times so predicted, scattered as the ladder's were, from the same clients, so that a closed loop's next
request follows the simulated answer. A simulation is held against the run of its own requests, and what counts is the median of
these ratios over all runs, with the interval of that median. How far two runs of the same requests stand apart, right behind
one another, is what no single prediction can be held to: it makes the interval wide, and more rounds make it narrow. A miss
whose interval reaches the goal is not judged.
A round during which other programs (or other guests of the host) used the cores is set aside and run again.

Two things can be wrong, the steps' prices and what is made of them, so the prices are judged alone, too, by their parts
(`lab/parts.py`); and each load is simulated a second time by the profile alone, as old as it is: what the two differ by is the
machine's drift since then and the profile's form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from diptych.compute.runner import Model
from diptych.control.scheduler import Predict
from diptych.cost.calibrated import CalibratedModel
from diptych.ground.clock import sleep_s
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.events import ArrivalEvent, Event, FinishEvent
from diptych.ground.request import Request
from diptych.lab.experiment import Verdict
from diptych.lab.ladder import Climb, Form, Ladder
from diptych.lab.parts import Parts, parts_of
from diptych.lab.rounds import DISTURBED, LEAST_QUIET, Estimate, Others
from diptych.lab.served import WITH_PROMPTS, RequestsHost, Served, drive, undisturbed
from diptych.metrics import EventBook, Sample, percentile
from diptych.sim.engine import SimulatedEngine
from diptych.sim.recorded import rerun
from diptych.workload import LengthRange, WorkloadSpec, requests_of

ROOMY = BlockConfig(n_blocks=2048, block_tokens=16)
USUAL_PROMPT, USUAL_OUTPUT = LengthRange(low=32, high=320), LengthRange(low=16, high=64)
MEDIAN_LIMIT, P99_LIMIT = 0.05, 0.15
MEASURES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
DRAWS = 9  # simulations of a run, each with a scatter of its own


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


def run_on_engine(
    model: Model, situation: Situation, requests: Sequence[Request], predict_s: Predict, *, is_recorded: bool = False
) -> Served:
    """Serve the load on the real engine."""
    run = Served(model, situation.config(), situation.blocks, predict_s, is_recorded=is_recorded)
    with undisturbed():
        drive(run.stepper, run.clock, requests, run.ended, users=situation.users, wait=sleep_s)
    return run


def simulate(
    situation: Situation,
    requests: Sequence[Request],
    predict_s: Predict,
    *,
    time_s: Predict | None = None,
    wake_s: float,
    requests_s: RequestsHost = WITH_PROMPTS,
) -> EventBook:
    """Serve it on a virtual clock. time_s: how long steps take, where that is not what the scheduler is told; wake_s: and the
    first behind a time without work longer; requests_s: what requests take between steps.
    """
    ended: list[str] = []

    def note(events: list[Event]) -> None:
        n_come = sum(isinstance(event, ArrivalEvent) for event in events)
        over = [event.request_id for event in events if isinstance(event, FinishEvent)]
        ended.extend(over)
        engine.clock.advance(n_come * requests_s.come_s + len(over) * requests_s.end_s)

    engine = SimulatedEngine(
        situation.config(),
        situation.blocks,
        predict_s=predict_s,
        time_s=time_s,
        wake_s=wake_s,
        on_events=note,
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run and its simulations, by measure: with times of the ladder right before it, and of the profile alone; the parts of
    its steps beside both. seed: of its requests. others: share of the cores that went to others meanwhile.
    """

    seed: int
    measured: dict[str, float]
    simulated: dict[str, float]
    by_profile: dict[str, float]
    parts: Parts = field(default_factory=Parts)
    profile_parts: Parts = field(default_factory=Parts)
    others: float = 0.0


@dataclass(slots=True, kw_only=True)
class Compared:
    """The rounds of a situation. differences: of decisions, in words. set_aside: rounds that were run again, as disturbed."""

    situation: Situation
    rounds: list[Round] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    set_aside: int = 0

    def ratio(self, measure: str, *, by_profile: bool = False) -> Estimate:
        """Simulated / measured, of the rounds that measured any."""
        ratios = [
            (one.by_profile if by_profile else one.simulated)[measure] / one.measured[measure]
            for one in self.rounds
            if one.measured[measure]
        ]
        return Estimate.of(ratios or [1.0])

    def error(self, measure: str, *, by_profile: bool = False) -> float:
        """Simulated / measured - 1: the median of rounds."""
        return self.ratio(measure, by_profile=by_profile).value - 1.0

    def apart(self, measure: str) -> float | None:
        """By how much the engine misses itself: how far two runs of the same requests stand apart, as a share, the median of
        such pairs. None without one.
        """
        pairs = [
            (one.measured[measure], two.measured[measure])
            for one, two in pairwise(self.rounds)
            if one.seed == two.seed and two.measured[measure]
        ]
        return _middle([max(pair) / min(pair) for pair in pairs]) - 1.0 if pairs else None

    def parts(self, *, by_profile: bool = False) -> Parts:
        """Of all rounds."""
        whole = Parts()
        for one in self.rounds:
            whole.add(one.profile_parts if by_profile else one.parts)
        return whole

    @property
    def is_quiet(self) -> bool:
        """Whether enough rounds were undisturbed."""
        return sum(one.others <= DISTURBED for one in self.rounds) >= min(LEAST_QUIET, len(self.rounds))

    def verdict(self, *, by_profile: bool = False) -> Verdict:
        """HOLDS: the same decisions, medians within MEDIAN_LIMIT, 99th percentiles within P99_LIMIT.

        WITHHELD where other programs ran beside nearly every round, or the interval of every median that misses its limit
        reaches it, so that more rounds may find it kept; other decisions fail whatever ran.
        """
        if self.differences:
            return Verdict.FAILS
        missed = {name: self.ratio(name, by_profile=by_profile) for name in MEASURES}
        missed = {name: ratio for name, ratio in missed.items() if abs(ratio.value - 1.0) > limit_of(name)}
        is_sure = any(one.low > 1.0 + limit_of(name) or one.high < 1.0 - limit_of(name) for name, one in missed.items())
        if not self.is_quiet or (missed and not is_sure):
            return Verdict.WITHHELD
        return Verdict.FAILS if missed else Verdict.HOLDS

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.situation.name,
            "verdict": self.verdict().value,
            "verdict_by_profile": self.verdict(by_profile=True).value,
            "parts": _parts_json(self.parts()),
            "parts_by_profile": _parts_json(self.parts(by_profile=True)),
            "differences": self.differences,
            "rounds": len(self.rounds),
            "set_aside": self.set_aside,
            "measures": {
                name: {
                    "measured_s": _middle([one.measured[name] for one in self.rounds]),
                    "simulated_s": _middle([one.simulated[name] for one in self.rounds]),
                    "error": self.error(name),
                    "by_profile": self.error(name, by_profile=True),
                    "low": self.ratio(name).low - 1.0,
                    "high": self.ratio(name).high - 1.0,
                    "apart": self.apart(name),
                }
                for name in MEASURES
            },
        }


def _parts_json(parts: Parts) -> dict[str, Any]:
    return {
        phase.value: {"steps": one.steps, "kernels": asdict(one.kernels), "host": asdict(one.host)}
        for phase, one in parts.phases.items()
    }


def limit_of(measure: str) -> float:
    """The error that a measure may have."""
    return MEDIAN_LIMIT if measure.endswith("50") else P99_LIMIT


def _middle(values: Sequence[float]) -> float:
    return percentile(values, 50.0) or 1.0


def capacity_per_s(model: Model, predict_s: Predict, *, n_requests: int) -> float:
    """Requests a second when all of an open loop's come at once: the median of three bursts, the first thrown away."""
    situation = replace(next(one for one in SITUATIONS if one.of_capacity), of_capacity=None)
    rates = []
    for seed in range(4):
        vocab_size = model.spec.vocab_size
        requests = situation.requests(n_requests, capacity_per_s=1.0, vocab_size=vocab_size, seed=seed)
        run = run_on_engine(model, situation, requests, predict_s)
        samples = [one.sample() for one in run.book.records.values()]
        rates.append(len(samples) / (max(one.end_s for one in samples) - min(one.start_s for one in samples)))
    return percentile(rates[1:], 50.0) or 1.0


def chosen(names: Sequence[str]) -> list[Situation]:
    """The situations of these names, or parts of names; all of them without any. ConfigError for one that nothing has."""
    for name in names:
        if not any(name in one.name for one in SITUATIONS):
            known = ", ".join(one.name for one in SITUATIONS)
            raise ConfigError(f"no load is called {name!r}", hint=f"there are: {known}")
    return [one for one in SITUATIONS if not names or any(name in one.name for name in names)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The engine's. climbs: of the ladder, around it and the other run of the same requests."""

    seed: int
    requests: Sequence[Request]
    served: Served
    climbs: Sequence[Climb]
    others: float


class _Machine:
    """The engine and the ladder on one model, in turns."""

    def __init__(self, model: Model, predictor: CalibratedModel) -> None:
        self._model, self._predict_s = model, predictor.predict_s
        self._ladder, self._others = Ladder(model, predictor), Others()
        self._ladder.climb()  # for the first time
        self.climbs: list[Climb] = []

    def climb(self) -> Climb:
        self.climbs.append(self._ladder.climb())
        return self.climbs[-1]

    def runs(self, situation: Situation, requests: Sequence[Request], *, seed: int) -> list[_Run]:
        """Two of the same requests, behind one another."""
        made, climbs = [], [self.climb()]
        for _ in range(2):
            self._others.share()
            served = run_on_engine(self._model, situation, requests, self._predict_s)
            share = self._others.share()
            climbs.append(self.climb())
            made.append(_Run(seed=seed, requests=requests, served=served, climbs=climbs, others=share))
        return made


def compare(
    model: Model,
    predictor: CalibratedModel,
    *,
    n_requests: int = 48,
    rounds: int = 5,
    situations: Iterable[Situation] = SITUATIONS,
    told: Callable[[str], object] = lambda run: None,
) -> Iterator[Compared]:
    """Every situation, when all have run. predictor: of this machine; the stall budget asks it too. told: of each round."""
    predict_s, vocab_size = predictor.predict_s, model.spec.vocab_size
    machine = _Machine(model, predictor)
    rate = capacity_per_s(model, predict_s, n_requests=n_requests)

    def requests_of_round(one: Compared, seed: int) -> list[Request]:
        return one.situation.requests(n_requests, capacity_per_s=rate, vocab_size=vocab_size, seed=seed)

    found = [Compared(situation=situation) for situation in situations]
    for one in found:
        told(f"decisions: {one.situation.name}")
        run = run_on_engine(model, one.situation, requests_of_round(one, 0), predict_s, is_recorded=True)
        one.differences += rerun(run.lines(), predict_s=predict_s)
    runs: list[list[_Run]] = [[] for _ in found]
    for seed in range(rounds):
        for one, mine in zip(found, runs, strict=True):
            told(one.situation.name)
            requests = requests_of_round(one, seed)
            pair = machine.runs(one.situation, requests, seed=seed)
            if any(run.others > DISTURBED for run in pair):
                one.set_aside += 1
                pair = machine.runs(one.situation, requests, seed=seed)
            mine += pair
    form = Form(predictor, machine.climbs)
    for one, mine in zip(found, runs, strict=True):
        told(f"simulating: {one.situation.name}")
        one.rounds += [_judged(one.situation, run, form, predictor) for run in mine]
        yield one


def _judged(situation: Situation, run: _Run, form: Form, predictor: CalibratedModel) -> Round:
    """A run beside its simulations: the median of DRAWS by the climbs around it, and one by the profile alone."""
    predict_s, host = predictor.predict_s, predictor.calibration.host
    level, served = form.at(run.climbs), run.served

    def drawn(draw: int) -> EventBook:
        time_s, wake_s = level.drawn(draw), form.host.wake_s
        return simulate(situation, run.requests, predict_s, time_s=time_s, wake_s=wake_s, requests_s=form.requests_s)

    draws = [numbers(drawn(draw)) for draw in range(DRAWS)]
    return Round(
        seed=run.seed,
        measured=numbers(served.book),
        simulated={name: _middle([one[name] for one in draws]) for name in MEASURES},
        by_profile=numbers(simulate(situation, run.requests, predict_s, wake_s=host.wake_s)),
        parts=parts_of(served, level.expected(), level.host(), form.requests_s),
        profile_parts=parts_of(served, predict_s, host.time_s),
        others=run.others,
    )
