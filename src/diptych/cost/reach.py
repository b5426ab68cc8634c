"""How far an answer stands from the rows behind its constants, and how much wider its interval is for it.

Every axis on which a question leaves the measured rows is a `Gap`. Its spread is how far predictions went wrong when rows
were held back along that axis (`cost/fitting/held_out.py`), in natural-log units at 80 %; the spreads of several gaps and the
residual of the fit add as squares.

>>> from diptych.cost.calibration import Coverage
>>> from diptych.cost.tables import device_spec, model_spec
>>> rows = Coverage(devices=("a100-80gb-sxm",), formats=("bf16",), widths={"device": 0.3})
>>> [gap.axis for gap in gaps_of(rows, model_spec("llama-3.1-8b"), device_spec("l40s"), "bf16", dtype="bf16", tp=1)]
['device']
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from diptych.cost.calibration import Coverage, Residual
from diptych.cost.tables import device_spec
from diptych.ground.specs import HardwareSpec
from diptych.models.spec import ModelSpec

# An interval is never narrower than this: published rows of one setup repeat no better.
LEAST_SPREAD = 0.05
# The least that a step along an axis counts where the software has too few rows to be held back along it.
# software: constants of another one, as no row of the one asked for has this phase; judged by the running services.
ASSUMED = {
    "software": 0.4,
    "device": 0.2,
    "vendor": 0.35,
    "format": 0.15,
    "mixture": 0.15,
    "batch": 0.08,
    "split": 0.1,
    "length": 0.06,
}
AXES = tuple(ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One way in which a question leaves the rows: in words, and what it adds to the interval."""

    axis: str
    text: str
    spread: float


def gaps_of(
    coverage: Coverage, model: ModelSpec, hardware: HardwareSpec, weights: str, *, dtype: str, tp: int
) -> tuple[Gap, ...]:
    """What is known before the step is: device, format, mixture, split. dtype: what the matrices are multiplied in."""
    found: list[Gap] = []

    def add(axis: str, text: str, steps: float = 1.0) -> None:
        found.append(Gap(axis=axis, text=text, spread=width_of(coverage, axis) * steps))

    if coverage.borrowed_from is not None:
        add("software", f"no row of this software in this phase; the constants are those of {coverage.borrowed_from}")
    if hardware.name not in coverage.devices:
        if vendor_of(hardware) in {vendor_of(device_spec(name)) for name in coverage.devices}:
            add("device", f"no row of {hardware.name}; the rows are of {_listed(coverage.devices)}")
        else:
            add("vendor", f"no row of any {vendor_of(hardware)} device; the rows are of {_listed(coverage.devices)}")
    if weights not in coverage.formats:
        add("format", f"no row with {weights} weights; the rows have {_listed(coverage.formats)}")
    if model.moe is not None and dtype not in coverage.mixtures:
        measured = f"; those measured multiply in {_listed(coverage.mixtures)}" if coverage.mixtures else ""
        add("mixture", f"no row of a mixture of experts that multiplies in {dtype}{measured}")
    steps = min((abs(math.log2(tp / split)) for split in coverage.splits), default=0.0)
    if steps:
        add("split", f"no row over {tp} devices; the rows are over {_listed(map(str, coverage.splits))}", steps)
    return tuple(found)


def load_gaps(coverage: Coverage, *, batch: int, tokens: int) -> tuple[Gap, ...]:
    """What the step adds: more sequences than any row had, or longer prompts or contexts."""
    found: list[Gap] = []
    for axis, value, largest, what in (
        ("batch", batch, coverage.largest_batch, "sequences"),
        ("length", tokens, coverage.longest_tokens, "tokens of one sequence"),
    ):
        if value > largest:
            steps = math.log2(value / largest)
            text = f"{value:,} {what}; the rows go up to {largest:,}"
            found.append(Gap(axis=axis, text=text, spread=width_of(coverage, axis) * math.sqrt(steps)))
    return tuple(found)


def load_spread_squared(coverage: Coverage, *, batch: int, tokens: int) -> float:
    """The sum of squares of `load_gaps`, without building them: a predictor asks for it at every step."""
    found = 0.0
    if batch > coverage.largest_batch:
        found += width_of(coverage, "batch") ** 2 * math.log2(batch / coverage.largest_batch)
    if tokens > coverage.longest_tokens:
        found += width_of(coverage, "length") ** 2 * math.log2(tokens / coverage.longest_tokens)
    return found


def width_of(coverage: Coverage, axis: str) -> float:
    """Spread of one step along an axis, as held-back rows showed it, or assumed."""
    return coverage.widths.get(axis, ASSUMED[axis])


def squared(gaps: Iterable[Gap]) -> float:
    """Sum of squares of the spreads."""
    return sum(gap.spread**2 for gap in gaps)


def interval(residual: Residual, spread_squared: float) -> tuple[float, float]:
    """(low, high) factors on a prediction: the residual of the fit and the gaps, joined as squares."""
    low = math.sqrt(math.log1p(residual.low) ** 2 + spread_squared) if residual.low < 0 else math.sqrt(spread_squared)
    high = (
        math.sqrt(math.log1p(residual.high) ** 2 + spread_squared) if residual.high > 0 else math.sqrt(spread_squared)
    )
    return math.exp(-max(low, LEAST_SPREAD)), math.exp(max(high, LEAST_SPREAD))


def vendor_of(hardware: HardwareSpec) -> str:
    """The first word of a device's title."""
    return hardware.title.partition(" ")[0]


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    shown = ", ".join(known[:3])
    return shown if len(known) <= 3 else f"{shown} and {len(known) - 3} more"
