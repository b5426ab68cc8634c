"""What an experiment is: a claim about the two phases, a way to test it, and an honest verdict.

An experiment gets a `Stage` (the model, its cost, a predictor) and returns an `Outcome`: points with a prediction beside
each measurement, and a verdict. The verdict rests on `Check`s: inequalities over estimates with intervals. An interval
that straddles its limit, or too many points that never settled, withhold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from diptych.compute.ceilings import Ceilings, machine_ceilings
from diptych.compute.runner import Model, random_model
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.profile import load_profile
from diptych.engine.cost_view import CostView
from diptych.engine.load import LoadedModel
from diptych.engine.model_profile import local_predictor, profile_gap, profile_kind
from diptych.engine.pool_size import size_pool
from diptych.ground.config import EngineConfig
from diptych.ground.shape import StepShape
from diptych.lab.drive import Engines
from diptych.lab.probe import StepProbe, prompt_works
from diptych.lab.rounds import Effort, Estimate, Rounds, Sampler, measure

Progress = Callable[[str], None]

ROOF = "the roof"  # what `Experiment.predicts` says when predictions are a bound
UNSETTLED = 0.15  # spread, and half the 95 % interval over the median, beyond which a point proves nothing


class Verdict(Enum):
    """What the measurement says about the claim."""

    HOLDS = "holds"
    FAILS = "fails"
    WITHHELD = "withheld"  # too noisy, or not measurable with this model on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: median, its 95 % interval, the spread of the samples, and what the cost model said before it.

    unit: of measured, low, high and predicted; points of different units are drawn in panels of their own. label: what a
    picture writes beside the dot.
    """

    series: str
    x: float
    measured: float
    low: float
    high: float
    spread: float
    samples: int
    unit: str = "ms"
    predicted: float | None = None
    label: str = ""

    @property
    def is_unsettled(self) -> bool:
        """Whether the machine was too unsteady to conclude anything from this point."""
        # with few rounds the interval is the range, which one odd sample can stretch: the middle half must be wide, too
        return self.spread > UNSETTLED and (self.high - self.low) / (2.0 * self.measured) > UNSETTLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One inequality that a claim stands on: the estimate of `what` lies above `limit`."""

    what: str
    estimate: Estimate
    limit: float
    pattern: str = "{:.2f}"

    @property
    def verdict(self) -> Verdict:
        """WITHHELD when the interval straddles the limit."""
        if self.estimate.low > self.limit:
            return Verdict.HOLDS
        return Verdict.FAILS if self.estimate.high <= self.limit else Verdict.WITHHELD

    def text(self) -> str:
        """The inequality in words."""
        return (
            f"{self.what}: {self.estimate.text(self.pattern)}, to be above {self.limit:g}: "
            f"{'undecided' if self.verdict is Verdict.WITHHELD else self.verdict.value}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A line that a rate cannot pass: `slope` times x until `flat`. Drawn in the unit of the points."""

    name: str
    slope: float
    flat: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an experiment. `finding` says in a sentence or two what the numbers mean; notes are further facts.

    x_names: words for x = 0, 1, ... when x is no quantity. noise: how steady the machine was, in words.
    roofs: over a roofline's dots.
    """

    points: tuple[Point, ...]
    verdict: Verdict
    finding: str
    checks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_noisy: bool = False
    x_names: tuple[str, ...] = ()
    noise: str = ""
    roofs: tuple[Roof, ...] = ()

    @property
    def prediction_errors(self) -> list[float]:
        """Measured over predicted minus 1, for the points that have a prediction."""
        return [point.measured / point.predicted - 1.0 for point in self.points if point.predicted]


def conclude(
    points: Sequence[Point],
    checks: Sequence[Check],
    rounds: Rounds,
    *,
    finding: str,
    notes: Sequence[str] = (),
    x_names: Sequence[str] = (),
    roofs: Sequence[Roof] = (),
) -> Outcome:
    """The outcome with its verdict: fails when a check fails, holds when all hold, else withheld.

    Withheld, too, when more than half of the points never settled, or no round was quiet.
    """
    unsettled = sum(point.is_unsettled for point in points)
    verdicts = {check.verdict for check in checks}
    outcome = Outcome(
        points=tuple(points),
        verdict=Verdict.FAILS if Verdict.FAILS in verdicts else Verdict.HOLDS,
        finding=finding,
        checks=tuple(check.text() for check in checks),
        notes=tuple(notes),
        x_names=tuple(x_names),
        roofs=tuple(roofs),
        noise=_noise(points, rounds),
    )
    if rounds.is_disturbed:
        reason = (
            "other processes used the cores in nearly every round: the times are shown, and decide nothing; "
            "factors are medians of each round's own, which such times need not multiply to"
        )
    elif 2 * unsettled > len(points):
        reason = f"{unsettled} of {len(points)} medians are known to no better than {UNSETTLED:.0%}: the machine was not quiet"
    elif Verdict.WITHHELD in verdicts and Verdict.FAILS not in verdicts:
        reason = "the interval of a check straddles its limit: more rounds or a quieter machine would settle it"
    else:
        return outcome
    return replace(outcome, verdict=Verdict.WITHHELD, is_noisy=True, notes=(*outcome.notes, reason))


def _noise(points: Sequence[Point], rounds: Rounds) -> str:
    """How far repeated samples lay apart and what else ran, in words."""
    spreads = sorted(point.spread for point in points)
    text = (
        f"spread median {spreads[len(spreads) // 2]:.0%}, widest {spreads[-1]:.0%} over {len(rounds.times_RN)} rounds"
    )
    if rounds.set_aside:
        text += f" ({rounds.set_aside} more set aside as disturbed)"
    return f"{text}; others took {rounds.others:.0%} of the cores"


def cannot(reason: str) -> Outcome:
    """The outcome of an experiment that this model or machine does not allow."""
    return Outcome(points=(), verdict=Verdict.WITHHELD, finding=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A named claim and the function that tests it. predicts: what `Point.predicted` holds, for the reader.

    is_timeline: each x is a request, whose series follow one another in time.
    """

    name: str
    title: str
    claim: str
    x_label: str
    y_label: str
    run: Callable[[Stage], Outcome]
    is_log_x: bool = False
    is_log_y: bool = False
    is_timeline: bool = False
    predicts: str = "predicted"


@dataclass(slots=True)
class Stage:
    """What experiments work with. Built once per lab run; experiments share the weights, never a KV pool.

    loaded: None for a named shape with random weights (experiments about text then withhold their verdict).
    longest_tokens: the longest context to go to; effort: how long to measure.
    """

    model: Model
    name: str
    config: EngineConfig
    loaded: LoadedModel | None
    longest_tokens: int
    effort: Effort
    progress: Progress
    view: CostView = field(init=False)
    ceilings: Ceilings = field(init=False)
    predictor: CalibratedModel | None = field(init=False)
    context_tokens: int = field(init=False)  # prompt and answer together
    cut: str | None = field(init=False, default=None)  # why longest_tokens is less than was asked

    def __post_init__(self) -> None:
        """Measure the ceilings once; the longest context is cut to what the model and the memory hold."""
        context = size_pool(self.model, self.config).context_tokens
        self.context_tokens = context
        if context < self.longest_tokens:
            positions = self.model.spec.max_context_tokens
            limit = "the memory free for KV" if context < positions else f"the model's {positions:,} positions"
            self.cut = f"lengths end at {context:,} tokens, not {self.longest_tokens:,}: {limit} are the limit"
            self.longest_tokens = context
        self.view = CostView(self.model)
        self.ceilings = machine_ceilings(self.model)
        self.predictor = local_predictor(self.model)

    @property
    def predictions(self) -> str:
        """Where the predictions come from."""
        if self.predictor is None:
            return f"none: {profile_gap(self.model)}"
        kind = profile_kind(self.model)
        date = load_profile(kind=kind).get("date", "a date unknown")
        return f"this machine's measured profile{' of its GPU' * (kind == 'gpu')} of {date}"

    @property
    def cached_weights(self) -> str:
        """A word for decode's pace when a cache is measured to hold the weights, else nothing."""
        if self.ceilings.cached_bytes_per_s is None:
            return ""
        return (
            f"; a cache holds this model's weights and is read at {self.ceilings.cached_bytes_per_s / 1e9:.1f} GB/s, "
            f"the memory at {self.ceilings.read_bytes_per_s / 1e9:.1f}"
        )

    def probe(self, max_tokens: int) -> StepProbe:
        """A probe with its own KV pool."""
        return StepProbe(self.model, max_tokens=max_tokens)

    def engines(self, *, context_tokens: int, n_tokens: int) -> Engines:
        """Schedulers over a KV pool of their own."""
        return Engines(
            self.model, self.config, predictor=self.predictor, context_tokens=context_tokens, n_tokens=n_tokens
        )

    def measure(self, samplers: Sequence[Sampler]) -> Rounds:
        """Time points in turns, as long as this run's effort says."""
        return measure(samplers, self.effort, progress=self.progress)

    def predicted_s(self, work: StepShape, model: Model | None = None) -> float | None:
        """What the calibrated model of this machine says of a step's kernels; None when it was never calibrated."""
        predictor = self.predictor if model is None else local_predictor(model)
        return None if predictor is None else _kernels_s(predictor, work)

    def predicted_prompt_s(self, n_tokens: int) -> float | None:
        """The same of a prompt, chunk by chunk as the engine reads it."""
        if self.predictor is None:
            return None
        return sum(_kernels_s(self.predictor, work) for work in prompt_works(n_tokens))

    def predicted_request_s(self, prompt_tokens: int, new_tokens: int) -> tuple[float, float] | None:
        """Of a request alone on the engine, scheduler and sampler included: to its first token, from there to its last."""
        if self.predictor is None:
            return None
        first_s = sum(self.predictor.predict(work).total_s for work in prompt_works(prompt_tokens))
        steps = [StepShape.decode(batch=1, context_tokens=prompt_tokens + 1 + i) for i in range(new_tokens - 1)]
        return first_s, sum(self.predictor.predict(work).total_s for work in steps)

    def other(self, *, changes: dict[str, Any] | None = None, weights: str | None = None) -> Model:
        """A random model of the same shape with some settings changed. The caller closes it."""
        compute = self.config.compute if weights is None else replace(self.config.compute, weights=weights)
        return random_model(self.model.hf_config | (changes or {}), compute, seed=1)

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        """Those of the wanted lengths that fit, and the longest possible one in place of those that do not."""
        fitting = [n for n in wanted if n <= self.longest_tokens]
        if len(fitting) < len(wanted) and (not fitting or self.longest_tokens > 1.1 * fitting[-1]):
            fitting.append(self.longest_tokens)
        return fitting


def _kernels_s(predictor: CalibratedModel, work: StepShape) -> float:
    return predictor.predict(work).total_s - predictor.calibration.host.time_s(work)


def point(series: str, x: float, estimate: Estimate, predicted_s: float | None = None) -> Point:
    """A point in milliseconds from an estimate in seconds."""
    return quantity(series, x, estimate, "ms", scale=1e3, predicted=predicted_s)


def quantity(
    series: str,
    x: float,
    estimate: Estimate,
    unit: str,
    *,
    scale: float = 1.0,
    predicted: float | None = None,
    label: str = "",
) -> Point:
    """A point of any unit; estimate and prediction are multiplied by `scale`."""
    scaled = estimate.times(scale)
    return Point(
        series=series,
        x=x,
        measured=scaled.value,
        low=scaled.low,
        high=scaled.high,
        spread=estimate.spread,
        samples=estimate.samples,
        unit=unit,
        predicted=None if predicted is None else scale * predicted,
        label=label,
    )


def polynomial(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, degree: int) -> np.ndarray:
    """Coefficients, lowest power first, fitted in relative error (small and large points count alike)."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    powers = np.stack([xs**k for k in range(degree + 1)], axis=1)
    coefficients, *_ = np.linalg.lstsq(powers / ys[:, None], np.ones_like(ys), rcond=None)
    return coefficients


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Plain dicts, enums as words."""
    return asdict(outcome) | {"verdict": outcome.verdict.value}
