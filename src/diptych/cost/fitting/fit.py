"""Fits the constants of the calibrated model to measured step times, in relative error, with the standard library.

Each free constant is a positive number with a starting value that also serves as a weak prior: a constant that no row
can see stays where it started. Outliers are damped (Huber), so that one odd row does not bend the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Calibration, Constants, Residual
from diptych.cost.fitting.rows import PublishedRow
from diptych.cost.linear import solve
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.phase import Phase

PRIOR_COST = 0.03  # the residual that a constant costs when it stands one `width` away from its start
HUBER = 0.08  # residuals beyond 8 % count linearly, not squared
MAX_ROUNDS = 25
SHARE = 0.8  # of rows that an interval is to hold
TABLES = ("eb", "ef", "expert_ef")  # fields of Constants that are tables by format or dtype
FRACTION, TIME = (0.02, 0.95), (1e-7, 1.0)  # limits of shares of a peak, and of seconds
NO_RESIDUAL = Residual(low=0.0, high=0.0, median_error=0.0, rows=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """A constant to fit. `path` is a field of Constants, or "eb.int8" / "ef.fp8" / "expert_ef.fp8" for one entry of a table.

    limits: the fitted value stays inside. width: how far it may drift from `start` before the prior objects, in
    natural-log units; small where physics or a kernel table already says what the value is.
    """

    path: str
    start: float
    limits: tuple[float, float] = (1e-9, 1e9)
    width: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StackForm:
    """How one software is modelled in one phase: fixed constants and those fitted to its rows."""

    stack: str
    phase: Phase
    fixed: Constants
    free: tuple[Free, ...]
    per_device: bool = False  # constants of their own for each device instead of shared ones
    architectures: tuple[str, ...] = ()  # only these devices; empty: all

    def covers(self, row: PublishedRow) -> bool:
        """Whether this form models the row."""
        if row.stack != self.stack or row.phase is not self.phase:
            return False
        return not self.architectures or device_spec(row.device).architecture in self.architectures


def with_values(fixed: Constants, free: Sequence[Free], values: Sequence[float]) -> Constants:
    """`fixed` with the free constants put in."""
    fields: dict[str, float] = {}
    tables = {name: dict(getattr(fixed, name)) for name in TABLES}
    for entry, value in zip(free, values, strict=True):
        table, _, key = entry.path.partition(".")
        if key:
            tables[table][key] = value
        else:
            fields[entry.path] = value
    frozen = {name: MappingProxyType(table) for name, table in tables.items()}
    return replace(fixed, **frozen, **fields)  # type: ignore[arg-type]


def predicted_s(row: PublishedRow, constants: Constants) -> float:
    """What these constants say about a row."""
    return predicted_each_s([row], constants)[0]


def predicted_each_s(rows: Sequence[PublishedRow], constants: Constants) -> list[float]:
    """The same of many rows; those of one setup share a model, which costs more to build than to ask."""
    calibration = Calibration(
        name="fit",
        prefill=constants,
        decode=constants,
        prefill_residual=NO_RESIDUAL,
        decode_residual=NO_RESIDUAL,
        source="fit",
    )
    models: dict[tuple[str, str, str, int], CalibratedModel] = {}
    times = []
    for row in rows:
        setup = row.model, row.device, row.quant, row.tp
        if setup not in models:
            specs = model_spec(row.model), device_spec(row.device), quant_spec(row.quant)
            models[setup] = CalibratedModel(*specs, calibration=calibration, tp=row.tp)
        times.append(models[setup].predict_s(row.work))
    return times


def fit(form: StackForm, rows: Sequence[PublishedRow]) -> Constants:
    """Constants that fit the rows best."""

    def residuals(logs: Sequence[float]) -> list[float]:
        constants = with_values(form.fixed, form.free, [math.exp(log) for log in logs])
        times = predicted_each_s(rows, constants)
        return [math.log(time / row.measured_s) for time, row in zip(times, rows, strict=True)]

    return with_values(form.fixed, form.free, [math.exp(log) for log in gauss_newton(form.free, residuals)])


Residuals = Callable[[Sequence[float]], list[float]]


def gauss_newton(
    free: Sequence[Free], residuals_of_rows: Residuals, *, prior_cost: float = PRIOR_COST, rounds: int = MAX_ROUNDS
) -> list[float]:
    """Logs of the constants that make the residuals least (damped Gauss-Newton); residuals of rows are log ratios.

    prior_cost: more of it where many rows err together, which say no more than one of them does.
    """

    def residuals_of(logs: Sequence[float]) -> list[float]:
        prior = [
            prior_cost * (log - math.log(entry.start)) / entry.width for entry, log in zip(free, logs, strict=True)
        ]
        return residuals_of_rows(logs) + prior

    logs = [math.log(entry.start) for entry in free]
    damping = 1e-2
    residuals = residuals_of(logs)
    cost = _cost(residuals)
    jacobian = _jacobian(residuals_of, logs, residuals)
    for _ in range(rounds):
        step = _step(jacobian, residuals, damping)
        tried = [_clamp(entry, log + delta) for entry, log, delta in zip(free, logs, step, strict=True)]
        tried_residuals = residuals_of(tried)
        tried_cost = _cost(tried_residuals)
        if tried_cost < cost:
            gain = (cost - tried_cost) / cost
            logs, residuals, cost, damping = tried, tried_residuals, tried_cost, damping * 0.3
            if gain < 1e-4:
                break
            jacobian = _jacobian(residuals_of, logs, residuals)
        else:
            damping *= 8.0
            if damping > 1e6:
                break
    return logs


def _clamp(entry: Free, log: float) -> float:
    return min(max(log, math.log(entry.limits[0])), math.log(entry.limits[1]))


def _weight(residual: float) -> float:
    return 1.0 if abs(residual) <= HUBER else HUBER / abs(residual)


def _cost(residuals: Sequence[float]) -> float:
    return sum(r * r if abs(r) <= HUBER else HUBER * (2.0 * abs(r) - HUBER) for r in residuals)


def _jacobian(residuals_of: Residuals, logs: Sequence[float], residuals: Sequence[float]) -> list[list[float]]:
    """Columns: derivative of every residual by one log constant."""
    columns = []
    for i in range(len(logs)):
        moved = list(logs)
        moved[i] += 1e-4
        columns.append([(new - old) / 1e-4 for new, old in zip(residuals_of(moved), residuals, strict=True)])
    return columns


def _step(columns: Sequence[Sequence[float]], residuals: Sequence[float], damping: float) -> list[float]:
    weights = [_weight(r) for r in residuals]
    size = len(columns)
    matrix = [[0.0] * size for _ in range(size)]
    target = [0.0] * size
    for i in range(size):
        target[i] = -sum(w * d * r for w, d, r in zip(weights, columns[i], residuals, strict=True))
        for j in range(size):
            matrix[i][j] = sum(w * a * b for w, a, b in zip(weights, columns[i], columns[j], strict=True))
        matrix[i][i] = matrix[i][i] * (1.0 + damping) + 1e-9
    return solve(matrix, target)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear-interpolated quantile of a non-empty list."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def rank(values: Sequence[float], share: float) -> float:
    """The quantile that the next value stays under with probability `share`: by ranks of n + 1, at most the largest.

    A plain quantile of few values is too sure of itself.
    """
    return quantile(values, min(max((share * (len(values) + 1) - 1.0) / max(len(values) - 1, 1), 0.0), 1.0))


def residual_of(ratios: Sequence[float]) -> Residual:
    """Residual summary from measured / predicted ratios: the 80 % interval by ranks."""
    errors = [ratio - 1.0 for ratio in ratios]
    return Residual(
        low=round(rank(errors, (1.0 - SHARE) / 2.0), 4),
        high=round(rank(errors, (1.0 + SHARE) / 2.0), 4),
        median_error=round(quantile([abs(1.0 / ratio - 1.0) for ratio in ratios], 0.5), 4),
        rows=len(errors),
    )
