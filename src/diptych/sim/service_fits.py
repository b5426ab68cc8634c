"""The constants that published services ask for, as `cost/data/service_calibrations.json` has them for simulations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from diptych.cost.fitting.accuracy import constants_as_json
from diptych.cost.fitting.service_forms import SERVICE_FORMS, put_in
from diptych.cost.roofline import compute_dtype
from diptych.ground.phase import Phase
from diptych.sim.truth import Case, Judged, bounds_of, few_of, fit_services

# Errors of the first token stand for prompts, those of the others for decode.
MEASURES = {Phase.PREFILL: "ttft", Phase.DECODE: "tpot"}


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
        of_requests = {"request_s": float(f"{constants.request_s:.5g}")}
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
