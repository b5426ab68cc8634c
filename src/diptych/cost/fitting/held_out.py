"""What leaving the measured rows costs: predictions of rows that were held back along one axis, and what they teach.

Rows are held back by device, weight format, mixture, batch, split and length; the constants are fitted to the rest, and
how far the held-back rows fall outside the residual of the fit is the width of a step along that axis (`cost/reach.py`).
`check` then asks whether the intervals hold: each group of rows is judged by widths that never saw the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from diptych.cost.calibration import Constants, Coverage, Residual
from diptych.cost.fitting.fit import SHARE, StackForm, fit, predicted_s, quantile, rank, residual_of
from diptych.cost.fitting.forms import FORMS
from diptych.cost.fitting.rows import PublishedRow
from diptych.cost.reach import ASSUMED, AXES, Gap, gaps_of, interval, load_gaps, squared, width_of
from diptych.cost.roofline import compute_dtype
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.phase import Phase

FormKey = tuple[str, Phase, tuple[str, ...]]
NEAR = "model"  # held back by model (or device) only: what the residual of the fit is made of
OWN_ROWS = 8  # held-back rows from which on a form has a width of its own; with fewer it takes one from all others
OTHERS_SHARE = (
    0.7  # of the other software that this width is to cover: at half, too few rows of unseen mixtures are held
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """A row, along which axis it was held back, and how wrong the prediction without it was: ln(measured / predicted).

    gaps: from the rows that were left, with spreads in steps along each axis.
    """

    row: PublishedRow
    form: StackForm
    axis: str
    error: float
    gaps: tuple[Gap, ...] = ()

    @property
    def group(self) -> tuple[str, str, str]:
        """Rows that are judged, and left out, together."""
        return self.row.stack, self.row.device, self.row.model

    @property
    def pool(self) -> tuple[FormKey, str | None]:
        """The rows whose residual is one: a form, on one device where the form has constants for each."""
        return _key(self.form), self.row.device if self.form.per_device else None


def coverage_of(rows: Sequence[PublishedRow], widths: Mapping[str, float]) -> Coverage:
    """What a set of rows covers."""
    mixtures = {_dtype(row) for row in rows if model_spec(row.model).moe is not None}
    return Coverage(
        devices=tuple(sorted({row.device for row in rows})),
        formats=tuple(sorted({row.quant for row in rows})),
        mixtures=tuple(sorted(mixtures)),
        splits=tuple(sorted({row.tp for row in rows})),
        largest_batch=max(row.work.n_sequences for row in rows),
        longest_tokens=max(_tokens(row) for row in rows),
        widths=MappingProxyType(dict(widths)),
    )


def hold_back(rows: Sequence[PublishedRow], *, forms: Sequence[StackForm] = FORMS) -> list[HeldRow]:
    """Every row that can be held back along an axis, predicted by constants fitted to the rest."""
    found: list[HeldRow] = []
    one_step = dict.fromkeys(AXES, 1.0)
    for form in forms:
        members = [row for row in rows if form.covers(row)]
        for axis, is_held in _cuts(members):
            kept = [row for row in members if not is_held(row)]
            if len(kept) < 2:
                continue
            coverage, constants = coverage_of(kept, one_step), fit(form, kept)
            found += [_held(form, row, coverage, constants, axis) for row in members if is_held(row)]
    return [entry for entry in found if any(gap.axis == entry.axis for gap in entry.gaps)]


def _held(form: StackForm, row: PublishedRow, coverage: Coverage, constants: Constants, axis: str) -> HeldRow:
    device = device_spec(row.device)
    gaps = gaps_of(coverage, model_spec(row.model), device, row.quant, dtype=_dtype(row), tp=row.tp)
    gaps += load_gaps(coverage, batch=row.work.n_sequences, tokens=_tokens(row))
    error = math.log(row.measured_s / predicted_s(row, constants))
    is_abroad = axis == "device" and any(gap.axis == "vendor" for gap in gaps)
    return HeldRow(row=row, form=form, axis="vendor" if is_abroad else axis, error=error, gaps=gaps)


def _cuts(members: Sequence[PublishedRow]) -> Iterator[tuple[str, Callable[[PublishedRow], bool]]]:
    """Ways to hold back a part of the rows."""
    for device in sorted({row.device for row in members}):
        yield "device", partial(_has, "device", device)
    for weights in sorted({row.quant for row in members}):
        yield "format", partial(_has, "quant", weights)
    yield "mixture", lambda row: model_spec(row.model).moe is not None
    for axis, value in (("batch", _batch), ("split", _split), ("length", _tokens)):
        limits = sorted({value(row) for row in members})[:-1]
        for limit in dict.fromkeys(limits[i] for i in (0, len(limits) // 2, -1) if limits):
            yield axis, partial(_exceeds, value, limit)


def _has(field: str, value: str, row: PublishedRow) -> bool:
    return bool(getattr(row, field) == value)


def _exceeds(value: Callable[[PublishedRow], int], limit: int, row: PublishedRow) -> bool:
    return value(row) > limit


def _batch(row: PublishedRow) -> int:
    return row.work.n_sequences


def _split(row: PublishedRow) -> int:
    return row.tp


# by axis and form: what each held-back row needs beyond the residual of its fit, in steps along the axis
Needs = Mapping[str, Mapping[FormKey, Sequence[float]]]


def needs_of(held: Iterable[HeldRow], residuals: Mapping[object, Residual]) -> Needs:
    """What held-back rows need along each axis, of all forms."""
    needs: dict[str, dict[FormKey, list[float]]] = {}
    for entry in held:
        residual = residuals.get(entry.pool)
        if residual is None:
            continue
        low, high = interval(residual, 0.0)
        base = math.log(high) if entry.error > 0 else -math.log(low)
        steps = math.sqrt(squared(gap for gap in entry.gaps if gap.axis == entry.axis))
        need = math.sqrt(max(entry.error**2 - base**2, 0.0)) / steps
        needs.setdefault(entry.axis, {}).setdefault(_key(entry.form), []).append(need)
    return needs


def widths_of(needs: Needs, form: StackForm) -> dict[str, float]:
    """Spread of one step along each axis: what 80 % of the held-back rows need beyond the residual of their fit.

    Its own rows where there are enough, else what covers most of the software in this phase (or in both), but at least
    `reach.ASSUMED`: what other software shows is no proof for this one.
    """
    return {axis: round(_width(axis, of_forms, _key(form)), 4) for axis, of_forms in needs.items()}


def _key(form: StackForm) -> FormKey:
    return form.stack, form.phase, form.architectures


def _width(axis: str, needs: Mapping[FormKey, Sequence[float]], form: FormKey) -> float:
    own = needs.get(form, ())
    if len(own) >= OWN_ROWS:
        return max(rank(own, SHARE), ASSUMED[axis] / 2.0)  # forms were chosen while watching these rows
    phase = [rank(values, SHARE) for owner, values in needs.items() if owner[1] is form[1]]
    # over the software, not its rows: the one with the most (44 of Apple's chips) is not to speak for all
    others = quantile(phase or [rank(values, SHARE) for values in needs.values()], OTHERS_SHARE)
    return max(others, ASSUMED[axis])


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How many rows of a group their 80 % intervals held."""

    group: str
    rows: int
    held: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.held / self.rows


def check(near: Sequence[HeldRow], far: Sequence[HeldRow]) -> list[Holding]:
    """Shares of rows inside their intervals, by phase and axis; a group's intervals come from all other groups' rows."""
    counts: dict[str, list[bool]] = {}
    for group in dict.fromkeys(entry.group for entry in [*near, *far]):
        others = [entry for entry in near if entry.group != group]
        residuals = residuals_of(others)
        needs = needs_of((entry for entry in far if entry.group != group), residuals)
        widths: dict[int, Mapping[str, float]] = {}
        for entry in (entry for entry in [*near, *far] if entry.group == group):
            residual = residuals.get(entry.pool)
            if residual is None:
                continue
            if id(entry.form) not in widths:
                widths[id(entry.form)] = widths_of(needs, entry.form)
            known = Coverage(widths=MappingProxyType(dict(widths[id(entry.form)])))
            is_held = _is_inside(entry, residual, known)
            counts.setdefault(f"{entry.row.phase.value}, {entry.axis}", []).append(is_held)
    return [Holding(group=name, rows=len(held), held=sum(held)) for name, held in sorted(counts.items())]


def residuals_of(near: Iterable[HeldRow]) -> dict[object, Residual]:
    """The residual of every pool."""
    pools: dict[object, list[float]] = {}
    for entry in near:
        pools.setdefault(entry.pool, []).append(entry.error)
    return {pool: residual_of([math.exp(error) for error in errors]) for pool, errors in pools.items()}


def _is_inside(entry: HeldRow, residual: Residual, known: Coverage) -> bool:
    spread = sum((gap.spread * width_of(known, gap.axis)) ** 2 for gap in entry.gaps)
    low, high = interval(residual, spread)
    return math.log(low) <= entry.error <= math.log(high)


def _dtype(row: PublishedRow) -> str:
    return compute_dtype(device_spec(row.device), quant_spec(row.quant).compute)


def _tokens(row: PublishedRow) -> int:
    return max(shape.start_pos + shape.new_tokens for shape in row.work.shapes)
