"""How long a step takes, learned from the engine's own steps: the `predict_s` of the stall budget until a cost model is there.

    model = StepTimeModel()
    core = EngineCore(..., predict_s=model.predict_s)
    model.observe(plan.shape, measured_s)  # after every step

The time is linear in five quantities of the step: 1 (launch), rows (projections), sampled rows (the output head), query-key
pairs of prefill chunks, and context tokens read by decode chunks. The coefficients are never negative and minimise the
squared *relative* error over past steps, older ones forgotten at a rate of 1/300 per step, with four safeguards:

* a slow imagined machine is mixed in as a few observations, so predictions are too long, not too short, before real ones;
* what may be the launch's or the sampled rows' is the launch's;
* a step that took far longer than expected (the machine was busy elsewhere) counts less, by Huber's weight;
* `predict_s` adds the mean relative error seen so far, starting at 100 %; `estimate_s` does not.

A shape carries these sums, and the normal equations have five unknowns: every call costs a constant.
"""

from __future__ import annotations

from diptych.cost.linear import solve
from diptych.ground.shape import StepShape

# Units of the five features, so that coefficients are seconds of comparable size.
_UNITS = (1.0, 100.0, 10.0, 1e5, 1e4)
_N = len(_UNITS)
# (1, rows, sampled rows, pairs, context tokens) -> seconds on a machine slower than any we know: 2 ms a row and a 1B model.
_IMAGINED = (
    ((1.0, 1.0, 1.0, 0.0, 0.0), 0.1),
    ((1.0, 512.0, 1.0, 131_328.0, 0.0), 2.0),
    ((1.0, 8.0, 8.0, 0.0, 8_192.0), 0.3),
    ((1.0, 512.0, 1.0, 2_000_000.0, 0.0), 4.0),
    ((1.0, 64.0, 64.0, 0.0, 262_144.0), 2.0),
)
_IMAGINED_WEIGHT = 0.02
# one user's steps all sample one row, so nothing tells what a step costs from what a sampled row does; as the row's, a chunk
# that samples none would cost no step, and chunks of any size the same
_SAMPLED, _PREFER_LAUNCH = 2, 1e-4
_FORGET = 1.0 - 1.0 / 300.0
_HUBER = 0.5  # relative error from which an observation counts less
_MARGIN_RATE = 0.05
_EAGER_STEPS = 32  # fit after each of the first steps, then after every eighth
_FIT_EVERY = 8


def features_of(shape: StepShape) -> tuple[float, float, float, float, float]:
    """(1, rows, sampled rows, prefill query-key pairs, decode context tokens) of a step."""
    return (
        1.0,
        float(shape.n_tokens),
        float(shape.n_logits_rows),
        float(shape.prefill_pairs),
        float(shape.decode_context_tokens),
    )


class StepTimeModel:
    """Recursive weighted least squares over `features_of`. Owns its sums; no clock, no randomness."""

    def __init__(self) -> None:
        self.n_observed = 0
        self.margin = 1.0  # mean relative error, forgetting
        self._xx = [[0.0] * _N for _ in range(_N)]
        self._xy = [0.0] * _N
        self._coefficients = [0.0] * _N
        self._seconds = (0.0,) * _N  # the coefficients per feature instead of per unit
        self._prior_xx = [[0.0] * _N for _ in range(_N)]
        self._prior_xy = [0.0] * _N
        for features, seconds in _IMAGINED:
            x = _scaled(features)
            _add(self._prior_xx, self._prior_xy, x, seconds, _IMAGINED_WEIGHT / seconds**2)
        self._fit()

    def observe(self, shape: StepShape, measured_s: float) -> None:
        """Learn from a step that took `measured_s` (> 0; anything else is ignored)."""
        if not 0.0 < measured_s < float("inf"):
            return
        x = _scaled(features_of(shape))
        expected_s = _dot(self._coefficients, x)
        error = abs(expected_s - measured_s) / measured_s
        excess = (measured_s - expected_s) / expected_s if expected_s > 0.0 else 0.0
        # Only a step that took too long can be an accident, and only a model with experience may say so.
        huber = min(1.0, _HUBER / excess) if self.n_observed >= _EAGER_STEPS and excess > 0.0 else 1.0
        for row in range(_N):
            self._xy[row] *= _FORGET
            for column in range(_N):
                self._xx[row][column] *= _FORGET
        _add(self._xx, self._xy, x, measured_s, huber / measured_s**2)
        self.n_observed += 1
        if self.n_observed > _N:
            rate = max(_MARGIN_RATE, 1.0 / (self.n_observed - _N + 1))
            self.margin += rate * (min(error, 1.0) - self.margin)
        if self.n_observed <= _EAGER_STEPS or self.n_observed % _FIT_EVERY == 0:
            self._fit()

    def predict_s(self, shape: StepShape) -> float:
        """A careful figure in seconds: the estimate and the usual error on top. For budgets."""
        return self.estimate_s(shape) * (1.0 + self.margin)

    def estimate_s(self, shape: StepShape) -> float:
        """The expected time in seconds. For reports."""
        launch_s, row_s, sample_s, pair_s, context_s = self._seconds
        seconds = launch_s + shape.n_tokens * row_s + shape.n_logits_rows * sample_s
        return seconds + shape.prefill_pairs * pair_s + shape.decode_context_tokens * context_s

    def _fit(self) -> None:
        """Solve the normal equations with non-negative coefficients: drop the most negative one and solve again."""
        xx = [[self._xx[i][j] + self._prior_xx[i][j] for j in range(_N)] for i in range(_N)]
        xy = [self._xy[i] + self._prior_xy[i] for i in range(_N)]
        xx[_SAMPLED][_SAMPLED] *= 1.0 + _PREFER_LAUNCH
        active = list(range(_N))
        while active:
            solution = _solve([[xx[i][j] for j in active] for i in active], [xy[i] for i in active])
            worst = min(range(len(active)), key=lambda k: solution[k])
            if solution[worst] >= 0.0:
                break
            del active[worst]
        self._coefficients = [0.0] * _N
        for k, i in enumerate(active):
            self._coefficients[i] = solution[k]
        self._seconds = tuple(value / unit for value, unit in zip(self._coefficients, _UNITS, strict=True))


def _scaled(features: tuple[float, ...]) -> list[float]:
    return [value / unit for value, unit in zip(features, _UNITS, strict=True)]


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _add(xx: list[list[float]], xy: list[float], x: list[float], seconds: float, weight: float) -> None:
    for i in range(_N):
        xy[i] += weight * x[i] * seconds
        for j in range(_N):
            xx[i][j] += weight * x[i] * x[j]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a positive semi-definite matrix, made definite by a trace of its diagonal."""
    rows = [list(row) for row in matrix]
    for i, row in enumerate(rows):
        row[i] += 1e-9 * row[i] + 1e-300
    return solve(rows, right)
