"""How wrong the bound and the calibrated model are on published rows that the fit did not see.

For every row the constants are fitted again without its model (on the row's device, or on all devices of that software
where other models remain); where a device was published with one model only, without the device's rows at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Constants
from diptych.cost.components import cost_of
from diptych.cost.fitting.fit import StackForm, fit, predicted_s, quantile
from diptych.cost.fitting.forms import FORMS
from diptych.cost.fitting.held_out import NEAR, HeldRow, coverage_of, needs_of, residuals_of, widths_of
from diptych.cost.fitting.rows import PublishedRow, ServiceRow
from diptych.cost.roofline import roofline
from diptych.cost.stacks import calibration_for
from diptych.cost.tables import device_spec, model_spec, quant_spec
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.ground.specs import KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RowError:
    """One row: the bound, the prediction of a fit that did not see it, and how it was held out."""

    row: PublishedRow
    bound_s: float
    predicted_s: float
    held_out: str  # "model" | "device" | "unfitted": no other rows, starting constants

    @property
    def bound_error(self) -> float:
        """Bound / measured - 1."""
        return self.bound_s / self.row.measured_s - 1.0

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.row.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Errors of a group of rows, as sizes (0.08 is 8 %)."""

    group: str
    rows: int
    bound_median: float
    median: float
    p90: float
    worst: float
    worst_label: str


def bound_s(row: PublishedRow) -> float:
    """The plain roofline of a row."""
    quant = quant_spec(row.quant)
    cost = cost_of(model_spec(row.model), row.work, quant=quant, kv=KVSpec(), tp=row.tp)
    return roofline(cost, device_spec(row.device), quant).total_s


def leave_one_model_out(
    rows: Sequence[PublishedRow],
    *,
    auxiliary: Sequence[PublishedRow] = (),
    forms: Sequence[StackForm] = FORMS,
) -> list[RowError]:
    """The error of every row under constants fitted without it. Auxiliary rows only help to fit."""
    found: list[RowError] = []
    for form in forms:
        targets = [row for row in rows if form.covers(row)]
        members = targets + [row for row in auxiliary if form.covers(row)]
        fitted: dict[tuple[str, str], tuple[Constants, str]] = {}
        for row in targets:
            key = (row.device, row.model)
            if key not in fitted:
                fitted[key] = _fit_without(form, members, row)
            constants, held_out = fitted[key]
            predicted = predicted_s(row, constants)
            found.append(RowError(row=row, bound_s=bound_s(row), predicted_s=predicted, held_out=held_out))
    return found


def _fit_without(form: StackForm, members: Sequence[PublishedRow], row: PublishedRow) -> tuple[Constants, str]:
    if form.per_device:
        members = [other for other in members if other.device == row.device]
    kept = [other for other in members if other.model != row.model]
    if any(other.device == row.device for other in kept):
        return fit(form, kept), "model"
    kept = [other for other in members if other.device != row.device]
    if kept:
        return fit(form, kept), "device"
    return fit(form, []), "unfitted"


def summarise(errors: Iterable[RowError]) -> list[ErrorSummary]:
    """Medians by phase, and by phase and device, in that order."""
    errors = list(errors)
    groups: dict[str, list[RowError]] = {}
    for phase in Phase:
        members = [error for error in errors if error.row.phase is phase]
        groups[phase.value] = members
        for device in sorted({error.row.device for error in members}):
            groups[f"{phase.value} {device}"] = [error for error in members if error.row.device == device]
    return [_summary(name, members) for name, members in groups.items() if members]


def _summary(name: str, members: Sequence[RowError]) -> ErrorSummary:
    sizes = [abs(error.error) for error in members]
    worst = max(members, key=lambda error: abs(error.error))
    return ErrorSummary(
        group=name,
        rows=len(members),
        bound_median=quantile([abs(error.bound_error) for error in members], 0.5),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        worst=worst.error,
        worst_label=f"{worst.row.stack}: {worst.row.label}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceError:
    """One service row beside what the shipped constants of both phases say, with the interval (low is the smaller number)."""

    row: ServiceRow
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.row.measured - 1.0

    @property
    def is_held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low <= self.row.measured <= self.high


def service_errors(rows: Iterable[ServiceRow]) -> list[ServiceError]:
    """TTFT, TPOT and throughput of running services: TPOT = t_dec(B, T) + (B / OSL) t_pf(ISL), the prefill tax."""
    return [_service(row) for row in rows]


def _service(row: ServiceRow) -> ServiceError:
    hardware = device_spec(row.device)
    calibration = calibration_for(hardware, stack=row.stack)
    predictor = CalibratedModel(
        model_spec(row.model), hardware, quant_spec(row.quant), calibration=calibration, tp=row.tp
    )
    context = row.input_tokens + row.output_tokens // 2
    prefill = predictor.predict(StepShape.prefill(batch=1, new_tokens=row.input_tokens))
    decode = predictor.predict(StepShape.decode(batch=row.batch, context_tokens=context))

    def value(prefill_s: float, decode_s: float) -> float:
        tpot_s = decode_s + row.batch / row.output_tokens * prefill_s
        return {"ttft": prefill_s, "tpot": tpot_s, "throughput": row.batch / tpot_s}[row.measure]

    ends = sorted((value(prefill.low_s, decode.low_s), value(prefill.high_s, decode.high_s)))
    return ServiceError(row=row, predicted=value(prefill.total_s, decode.total_s), low=ends[0], high=ends[1])


def uncovered(rows: Iterable[PublishedRow]) -> list[PublishedRow]:
    """Rows of software that has no fitted form."""
    return [row for row in rows if not any(form.covers(row) for form in FORMS)]


def near_rows(errors: Iterable[RowError], *, forms: Sequence[StackForm] = FORMS) -> list[HeldRow]:
    """The errors of `leave_one_model_out` as rows held back, to be set beside those of `held_out.hold_back`."""
    found: list[HeldRow] = []
    for entry in errors:
        form = next(form for form in forms if form.covers(entry.row))
        error = math.log(entry.row.measured_s / entry.predicted_s)
        found.append(HeldRow(row=entry.row, form=form, axis=NEAR, error=error))
    return found


def refit(near: Sequence[HeldRow], far: Sequence[HeldRow]) -> list[dict[str, Any]]:
    """The entries of `data/calibrations.json`: constants on all rows, residuals and widths on rows held back."""
    residuals = residuals_of(near)
    needs = needs_of(far, residuals)
    entries: list[dict[str, Any]] = []
    for form in FORMS:
        members = [entry.row for entry in near if form.covers(entry.row)]
        pools = dict.fromkeys(entry.pool for entry in near if form.covers(entry.row))
        widths = widths_of(needs, form)
        for pool in pools:
            device = pool[1]
            group = [row for row in members if device is None or row.device == device]
            coverage = coverage_of(group, widths)
            entries.append(
                {
                    "stack": form.stack,
                    "phase": form.phase.value,
                    "architectures": list(form.architectures),
                    "device": device,
                    "seen": _seen(group),
                    "mixtures": list(coverage.mixtures),
                    "splits": list(coverage.splits),
                    "largest_batch": coverage.largest_batch,
                    "longest_tokens": coverage.longest_tokens,
                    "widths": widths,
                    "models": sorted({row.model for row in group}),
                    "constants": constants_as_json(fit(form, group)),
                    "residual": asdict(residuals[pool]),
                    "source": "; ".join(sorted({row.source for row in group})),
                }
            )
    return entries


def _seen(rows: Sequence[PublishedRow]) -> dict[str, list[str]]:
    """Weight formats measured on each device."""
    devices = sorted({row.device for row in rows})
    return {device: sorted({row.quant for row in rows if row.device == device}) for device in devices}


def constants_as_json(constants: Constants) -> dict[str, Any]:
    """As the files of calibrations have them."""
    fields: dict[str, Any] = {}
    for name in Constants.__dataclass_fields__:
        value = getattr(constants, name)
        if isinstance(value, Mapping):
            fields[name] = {key: _short(entry) for key, entry in value.items()}
        elif value is not None:  # a term that this fit has not
            fields[name] = _short(value)
    return fields


def _short(value: float) -> float:
    return float(f"{value:.5g}")
