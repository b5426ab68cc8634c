"""What an experiment is: a claim about the two phases, a way to test it, and an honest verdict.

An experiment gets a `Stage` (the model, a probe, a predictor) and returns an `Outcome`: points with a prediction beside
each measurement, and a verdict. When the machine was too unsteady the verdict is withheld, whatever the points say.
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
from diptych.cost.workload import Workload
from diptych.engine.cost_view import CostView
from diptych.engine.load import LoadedModel, local_predictor, size_pool
from diptych.ground.config import EngineConfig
from diptych.lab.probe import Measured, StepProbe

Progress = Callable[[str], None]


class Verdict(Enum):
    """What the measurement says about the claim."""

    HOLDS = "holds"
    FAILS = "fails"
    WITHHELD = "withheld"  # too noisy, or not measurable with this model on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement with its range, and what the cost model said before it."""

    series: str
    x: float
    measured: float
    low: float
    high: float
    predicted: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an experiment. `finding` says in a sentence or two what the numbers mean; notes are further facts."""

    points: tuple[Point, ...]
    verdict: Verdict
    finding: str
    notes: tuple[str, ...] = ()
    is_noisy: bool = False

    def withheld_if_noisy(self, measurements: Sequence[Measured]) -> Outcome:
        """The same outcome, its verdict withheld when more than a quarter of the measurements were unsteady."""
        noisy = sum(one.is_noisy for one in measurements)
        if 4 * noisy <= len(measurements):
            return self
        worst = max(one.spread for one in measurements)
        note = f"{noisy} of {len(measurements)} points spread too much (up to {worst:.0%}): the machine was not quiet"
        return replace(self, verdict=Verdict.WITHHELD, is_noisy=True, notes=(*self.notes, note))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A named claim and the function that tests it."""

    name: str
    title: str
    claim: str
    x_label: str
    y_label: str
    run: Callable[[Stage], Outcome]
    is_log_x: bool = False
    is_log_y: bool = False


@dataclass(slots=True)
class Stage:
    """What experiments work with. Built once per lab run; experiments share the weights, never a KV pool.

    loaded: None for a named shape with random weights (experiments about text then withhold their verdict).
    longest_tokens: the longest context to go to; repeats: timings per point.
    """

    model: Model
    name: str
    config: EngineConfig
    loaded: LoadedModel | None
    longest_tokens: int
    repeats: int
    progress: Progress
    view: CostView = field(init=False)
    ceilings: Ceilings = field(init=False)
    predictor: CalibratedModel | None = field(init=False)

    def __post_init__(self) -> None:
        """Measure the ceilings once; the longest context is cut to what the model and the memory hold."""
        context, _ = size_pool(self.model, self.config)
        self.longest_tokens = min(self.longest_tokens, context)
        self.view = CostView(self.model)
        self.ceilings = machine_ceilings(self.model)
        self.predictor = local_predictor(self.model)

    def probe(self, max_tokens: int) -> StepProbe:
        """A probe with its own KV pool."""
        return StepProbe(self.model, max_tokens=max_tokens)

    def predicted_s(self, work: Workload) -> float | None:
        """What the calibrated model of this machine says; None when it was never calibrated."""
        return None if self.predictor is None else self.predictor.predict(work).total_s

    def other(self, *, changes: dict[str, Any] | None = None, weights: str | None = None) -> Model:
        """A random model of the same shape with some settings changed. The caller closes it."""
        compute = self.config.compute if weights is None else replace(self.config.compute, weights=weights)
        return random_model(self.model.hf_config | (changes or {}), compute, seed=1)

    def lengths(self, wanted: Sequence[int]) -> list[int]:
        """Those of the wanted lengths that fit, and the longest possible one in place of those that do not."""
        fitting = [n for n in wanted if n <= self.longest_tokens]
        if len(fitting) < len(wanted) and self.longest_tokens not in fitting:
            fitting.append(self.longest_tokens)
        return fitting


def point(series: str, x: float, measured: Measured, predicted_s: float | None = None) -> Point:
    """A point in milliseconds from a timing."""
    return Point(
        series=series,
        x=x,
        measured=1e3 * measured.median_s,
        low=1e3 * measured.low_s,
        high=1e3 * measured.high_s,
        predicted=None if predicted_s is None else 1e3 * predicted_s,
    )


def polynomial(x: Sequence[float], y: Sequence[float], degree: int) -> np.ndarray:
    """Coefficients, lowest power first, fitted in relative error (small and large points count alike)."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    powers = np.stack([xs**k for k in range(degree + 1)], axis=1)
    coefficients, *_ = np.linalg.lstsq(powers / ys[:, None], np.ones_like(ys), rcond=None)
    return coefficients


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Plain dicts, enums as words."""
    return asdict(outcome) | {"verdict": outcome.verdict.value}
