"""How right services are: every published service that states its load, run by the real scheduler, and constants for it
that were fitted without its model, or without its device.

    errors = held_out_errors(rows)          # rows of `cost/services.py`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Calibration, Constants
from diptych.cost.fit import NO_RESIDUAL, Free, gauss_newton, with_values
from diptych.cost.memory import capacity_of
from diptych.cost.services import MeasuredService
from diptych.cost.setup import Setup, find_model
from diptych.cost.tables import device_spec, kv_spec, quant_spec
from diptych.sim.closed import ClosedLoop, Schedule, schedule_of
from diptych.workload import LengthRange

MEASURES = ("ttft", "tpot", "throughput")
# requests of each stream that are simulated, of the ten that published runs have: fewer where all write much
PER_STREAM = 4
PER_LONG_STREAM = 2
LONG_TOKENS = 200_000  # of all streams at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceForm:
    """How one software's services are modelled: constants of both phases.

    A path is "both.X" for one value in both phases, "prefill.X" or "decode.X" for one phase, or "request_s": what passes
    between a client and the scheduler, seconds per request, all of it before the first token.
    """

    stack: str
    fixed: Constants
    free: tuple[Free, ...]


@dataclass(frozen=True, slots=True)
class ServiceConstants:
    """What a form was fitted to."""

    prefill: Constants
    decode: Constants
    request_s: float


def put_in(form: ServiceForm, values: Sequence[float]) -> ServiceConstants:
    """A form with its free constants."""
    prefill, decode, request_s = form.fixed, form.fixed, 0.0
    for entry, value in zip(form.free, values, strict=True):
        where, _, path = entry.path.partition(".")
        if where == "request_s":
            request_s = value
            continue
        one = (replace(entry, path=path),)
        if where in ("both", "prefill"):
            prefill = with_values(prefill, one, (value,))
        if where in ("both", "decode"):
            decode = with_values(decode, one, (value,))
    return ServiceConstants(prefill, decode, request_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row with what the scheduler does under its load."""

    row: MeasuredService
    setup: Setup
    schedule: Schedule


def case_of(row: MeasuredService) -> Case:
    """ConfigError where the model does not fit the device, or cannot be split so."""
    load = row.load
    setup = _setup(row.model, row.device, row.quant, row.kv, row.tp)
    longest = load.input_tokens + load.output_tokens
    pool = capacity_of(setup, context_tokens=longest, batch=1).kv_tokens
    is_short = load.streams * load.output_tokens <= LONG_TOKENS
    loop = ClosedLoop(
        streams=load.streams,
        input=_lengths(load.input_tokens, load.spread),
        output=_lengths(load.output_tokens, load.spread),
        n_requests=max(load.streams * (PER_STREAM if is_short else PER_LONG_STREAM), 12),
        max_step_tokens=load.step_tokens,
        kv_tokens=_rounded(pool) if pool < load.streams * longest else None,
    )
    return Case(row=row, setup=setup, schedule=schedule_of(loop))


def _rounded(tokens: int) -> int:
    """Down to a tenth more than the next smaller one: pools of nearly one size share a schedule."""
    return int(1.1 ** math.floor(math.log(max(tokens, 1), 1.1)))


def _lengths(tokens: int, spread: float) -> LengthRange:
    return LengthRange(low=max(int(tokens * spread), 1), high=tokens)


@lru_cache(maxsize=1024)
def _setup(model: str, device: str, quant: str, kv: str, tp: int) -> Setup:
    return Setup(
        model=find_model(model),
        hardware=device_spec(device),
        quant=quant_spec(quant),
        kv=kv_spec(kv),
        tp=tp,
        calibration=Calibration(
            name="services", prefill=Constants(), decode=Constants(), prefill_residual=NO_RESIDUAL,
            decode_residual=NO_RESIDUAL, source="fit",
        ),
    )  # fmt: skip


def measured_of(row: MeasuredService) -> dict[str, float]:
    """What a row has of MEASURES."""
    found = {"ttft": row.ttft_s, "tpot": row.tpot_s, "throughput": row.output_tokens_per_s}
    return {name: value for name, value in found.items() if value is not None}


def predicted_of(case: Case, constants: ServiceConstants) -> dict[str, float]:
    """What these constants say about a row, by measure."""
    calibration = replace(case.setup.calibration, prefill=constants.prefill, decode=constants.decode)
    setup = case.setup
    predictor = CalibratedModel(
        setup.model, setup.hardware, setup.quant, calibration=calibration, kv=setup.kv, tp=setup.tp
    )
    times = case.schedule.times(predictor.predict_s)
    return {
        "ttft": times.ttft_s + constants.request_s,
        "tpot": times.tpot_s,
        "throughput": times.output_tokens_per_s,
    }


def fit_services(form: ServiceForm, cases: Sequence[Case], start: Sequence[float] | None = None) -> list[float]:
    """Logs of the free constants that fit these rows best."""

    def residuals(logs: Sequence[float]) -> list[float]:
        constants = put_in(form, [math.exp(log) for log in logs])
        found = []
        for case in cases:
            said = predicted_of(case, constants)
            found += [math.log(said[name] / value) for name, value in measured_of(case.row).items()]
        return found

    return gauss_newton(form.free, residuals, start=start)
