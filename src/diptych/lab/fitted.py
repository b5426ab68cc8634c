"""A profile's constants from timed steps: what makes the calibrated model say what was measured."""

from __future__ import annotations

from collections.abc import Container, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.fitting.fit import residual_of
from diptych.cost.profile import read_profile
from diptych.engine.cost_view import CostView
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab.rounds import Estimate

# Shares of a measured rate that a kernel may be fitted to. Rates drift while they are measured, so one may seem to pass its
# ceiling; beyond these the steps it was fitted to told nothing of it.
LEAST_SHARE, MOST_SHARE = 0.02, 1.5
STEPS = 40  # of a fit

NO_RESIDUALS = {phase.value: {"low": 0.0, "high": 0.0, "median_error": 0.0, "rows": 0} for phase in Phase}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One timed step of one model, and how fast memory was read then: a virtual machine's has more than one pace."""

    view: CostView
    work: StepShape
    measured: Estimate
    read_bytes_per_s: float

    @property
    def phase(self) -> Phase:
        """Which of the profile's residuals it belongs to."""
        return self.work.phase


def fit(profile: dict[str, Any], samples: Sequence[TimedStep]) -> dict[str, Any]:
    """Damped Gauss-Newton on log ratios, with a weak pull to the start so that an unseen constant stays put."""
    places = _places(profile)
    start = np.log([table[key] for table, key in _cells(profile, places)])
    lowest, highest = start - 4.0, start + 4.0
    is_share = np.array([len(place) > 1 and place[-1] != "layer_s" and place[0] != "groups" for place in places])
    lowest[is_share], highest[is_share] = np.log(LEAST_SHARE), np.log(MOST_SHARE)
    lowest[places.index(("p",))] = 0.0  # nothing takes longer than one behind the other
    logs = start.copy()

    def residuals(values: np.ndarray) -> np.ndarray:
        for (table, key), value in zip(_cells(profile, places), np.exp(values), strict=True):
            table[key] = float(value)
        ratios = [
            said / sample.measured.value for said, sample in zip(_predicted_s(profile, samples), samples, strict=True)
        ]
        return np.concatenate([np.log(ratios), 0.02 * (values - start)])

    def jacobian_at(logs: np.ndarray, current: np.ndarray) -> np.ndarray:
        return np.stack([(residuals(logs + step) - current) / 1e-4 for step in 1e-4 * np.eye(len(logs))], axis=1)

    damping, current = 1e-2, residuals(logs)
    jacobian = jacobian_at(logs, current)
    for _ in range(STEPS):
        weight = np.minimum(1.0, 0.1 / np.maximum(np.abs(current), 1e-12))  # Huber: one odd point bends nothing
        normal = jacobian.T @ (weight[:, None] * jacobian)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ (weight * current))
        tried = np.clip(logs + step, lowest, highest)
        found = residuals(tried)
        if np.sum(weight * found**2) < np.sum(weight * current**2):
            logs, current, damping = tried, found, damping * 0.3
            jacobian = jacobian_at(logs, current)
        else:
            damping *= 8.0
    residuals(logs)
    cache = profile.get("cache")
    if cache is not None:  # which is never slower than the memory behind it, though a few short steps may say so
        for weights, share in profile["eb"].items():
            least = share * profile["memory_bytes_per_s"] / cache["bytes_per_s"]
            cache["eb"][weights] = max(cache["eb"][weights], least)
    profile["residuals"] = _residuals(samples, _predicted_s(profile, samples))
    return profile


def fit_held_out(profile: dict[str, Any], samples: Sequence[TimedStep], *, kept: Container[CostView]) -> dict[str, Any]:
    """As `fit`; the residuals are of models that the fit did not see: each model's steps, by a fit to those of all others.

    kept: views of models that are in every fit, and in no residual.
    """
    start, said = deepcopy(profile), dict[int, float]()
    for number in {id(sample.view) for sample in samples if sample.view not in kept}:
        others = fit(deepcopy(start), [sample for sample in samples if id(sample.view) != number])
        held = [sample for sample in samples if id(sample.view) == number]
        said |= zip(map(id, held), _predicted_s(others, held), strict=True)
    profile = fit(profile, samples)
    held = [sample for sample in samples if id(sample) in said]
    return profile | {"residuals": _residuals(held, [said[id(sample)] for sample in held])}


def _residuals(samples: Sequence[TimedStep], predicted_s: Sequence[float]) -> dict[str, dict[str, float]]:
    found = {}
    for phase in Phase:
        pairs = zip(samples, predicted_s, strict=True)
        summary = residual_of([sample.measured.value / said for sample, said in pairs if sample.phase is phase])
        found[phase.value] = {
            "low": summary.low, "high": summary.high, "median_error": summary.median_error, "rows": summary.rows
        }  # fmt: skip
    return found


def _places(profile: dict[str, Any]) -> list[tuple[str, ...]]:
    tables: list[tuple[str, ...]] = [(name, key) for name in ("eb", "ef") for key in profile[name]]
    for key, value in profile["attention"].items():
        tables += [("attention", key, one) for one in value] if isinstance(value, dict) else [("attention", key)]
    if "cache" in profile:
        tables += [("cache", "kv_eb"), *(("cache", "eb", key) for key in profile["cache"]["eb"])]
    if "experts" in profile:
        tables += [("experts", "layer_s"), *(("experts", "ef", key) for key in profile["experts"]["ef"])]
    tables += [(name, key) for name in ("latents", "groups") for key in profile.get(name, {})]
    rates = [("activation_bytes_per_s",)] if "activation_bytes_per_s" in profile else []
    return [("t0_s",), ("layer_s",), ("sequence_s",), ("p",), *rates, *tables]


def _cells(profile: dict[str, Any], places: Sequence[tuple[str, ...]]) -> list[tuple[dict[str, float], str]]:
    cells = []
    for *parents, key in places:
        table: dict[str, Any] = profile
        for name in parents:
            table = table[name]
        cells.append((table, key))
    return cells


def _predicted_s(profile: dict[str, Any], samples: Sequence[TimedStep]) -> list[float]:
    models = _models(profile, samples)
    return [models[id(sample.view)].predict_s(sample.work) for sample in samples]


def _models(profile: dict[str, Any], samples: Sequence[TimedStep]) -> dict[int, CalibratedModel]:
    """By view, of which there are few: making one takes as long as pricing a hundred steps. Each of the memory's pace of then,
    or shares of it would differ between formats by what the machine did while one of them was measured.
    """
    hardware, calibration = read_profile(profile)
    firsts = {id(sample.view): sample for sample in reversed(samples)}
    return {
        number: CalibratedModel(
            sample.view.spec,
            replace(hardware, memory_bytes_per_s=sample.read_bytes_per_s),
            sample.view.quant,
            calibration=calibration,
            kv=sample.view.kv,
        )
        for number, sample in firsts.items()
    }
