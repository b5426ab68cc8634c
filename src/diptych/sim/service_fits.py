"""The constants that published services ask for, as `cost/data/service_calibrations.json` has them for simulations.

The fit takes minutes, so no test repeats it. The file holds what it was made of instead (`made_of`), which a test makes again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from diptych.cost.fitting.accuracy import constants_as_json
from diptych.cost.fitting.service_forms import SERVICE_FORMS, ServiceConstants, ServiceForm, put_in
from diptych.cost.fitting.services import MeasuredService
from diptych.cost.roofline import compute_dtype
from diptych.cost.stacks import constants_of
from diptych.ground.phase import Phase
from diptych.sim.truth import (
    FIT_ROWS,
    PRIOR_COST,
    ROUNDS,
    Case,
    Judged,
    bounds_of,
    few_of,
    fit_services,
    measured_of,
    predicted_of,
)

# Errors of the first token stand for prompts, those of the others for decode.
MEASURES = {Phase.PREFILL: "ttft", Phase.DECODE: "tpot"}
CHECKED_TOKENS = 2_600  # of all streams' answers: services that the scheduler runs in no time


def refit_services(cases: Sequence[Case], judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Of each software constants on rows of all its services, and residuals of those that were left out by model."""
    entries = []
    for form in SERVICE_FORMS:
        mine = [case for case in cases if case.row.stack == form.stack]
        errors = [one for one in judged if one.case.row.stack == form.stack]
        if not mine or not errors:
            continue
        constants = put_in(form, [math.exp(log) for log in fit_services(form, few_of(mine))])
        rows = sorted({case.row.source for case in mine})
        constants = _as_written(constants)
        of_requests = {"request_s": constants.request_s, "made_of": made_of(form, constants, mine)}
        for phase, of_phase, more in (
            (Phase.PREFILL, constants.prefill, of_requests), (Phase.DECODE, constants.decode, {})
        ):  # fmt: skip
            entries.append(
                {"stack": form.stack, "phase": phase.value, "architectures": [], "device": None}
                | _coverage(mine)
                | more
                | {
                    "constants": constants_as_json(of_phase),
                    "residual": _residual([one for one in errors if one.measure == MEASURES[phase]]),
                    "source": "; ".join(rows),
                }
            )
    return entries


def made_of(form: ServiceForm, constants: ServiceConstants, cases: Sequence[Case]) -> dict[str, Any]:
    """What would be another if the form, the rows or what constants say about them were: the median of the sizes of errors, by
    measure, over the smallest services.
    """
    fit = form, FIT_ROWS, PRIOR_COST, ROUNDS
    small = [case for case in cases if is_checked(case.row)]
    errors: dict[str, list[float]] = {}
    for case in small:
        said = predicted_of(case, constants)
        for measure, seen in measured_of(case.row).items():
            errors.setdefault(measure, []).append(abs(said[measure] / seen - 1.0))
    medians = {measure: float(f"{statistics.median(sizes):.5g}") for measure, sizes in sorted(errors.items())}
    return {"fit": sha256(repr(fit).encode()).hexdigest()[:16], "services": len(small)} | medians


def is_checked(row: MeasuredService) -> bool:
    """Whether it is among the smallest."""
    return row.load.streams * row.load.output_tokens <= CHECKED_TOKENS


def _as_written(constants: ServiceConstants) -> ServiceConstants:
    """As the file has them, in five digits."""
    prefill, decode = (constants_of(constants_as_json(of_phase)) for of_phase in (constants.prefill, constants.decode))
    return ServiceConstants(prefill, decode, float(f"{constants.request_s:.5g}"))


def _coverage(cases: Sequence[Case]) -> dict[str, Any]:
    rows = [case.row for case in cases]
    devices = sorted({row.device for row in rows})
    mixtures = {
        compute_dtype(one.setup.hardware, one.setup.quant.compute) for one in cases if one.setup.model.moe is not None
    }
    return {
        "seen": {device: sorted({row.quant for row in rows if row.device == device}) for device in devices},
        "mixtures": sorted(mixtures),
        "splits": sorted({row.tp for row in rows}),
        "largest_batch": max(row.load.streams for row in rows),
        "longest_tokens": max(row.load.input_tokens + row.load.output_tokens for row in rows),
        "widths": {},
        "models": sorted({row.model for row in rows}),
    }


def _residual(errors: Sequence[Judged]) -> dict[str, float | int]:
    ratios: dict[str, list[float]] = {}
    for one in errors:
        ratios.setdefault(one.case.row.model, []).append(one.measured / one.predicted)
    low, high = bounds_of(list(ratios.values()))
    return {
        "low": round(low - 1.0, 4),
        "high": round(high - 1.0, 4),
        "median_error": round(statistics.median(abs(one.error) for one in errors), 4),
        "rows": len(errors),
    }
