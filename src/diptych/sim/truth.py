"""How right services are: every published service that states its load, run by the real scheduler, and constants for it
that were fitted without its model, or without its device.

    cases = [case for case in cases_of(rows) if case is not None]    # rows of `cost/fitting/services.py`
    judged = judge(possible(cases), [], held_out="model")
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, compress
from types import MappingProxyType

from diptych.cost.calibration import Calibration, Constants
from diptych.cost.fitting.fit import NO_RESIDUAL, SHARE, gauss_newton, quantile
from diptych.cost.fitting.service_forms import (
    ATTENTION_CALL_S,
    SERVICE_FORMS,
    TRITON_EXPERTS_S,
    ServiceConstants,
    ServiceForm,
    put_in,
)
from diptych.cost.fitting.services import MeasuredService, ServiceLoad
from diptych.cost.layout import Layout
from diptych.cost.memory import capacity_of
from diptych.cost.setup import Setup, find_model
from diptych.cost.tables import device_spec, kv_spec, quant_spec
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.sim.closed import ClosedLoop, Schedule, schedule_of
from diptych.sim.workers import Mapped
from diptych.workload import LengthRange

FIT_ROWS = 6  # of each model, device and format
# Rows of one model and device err together: what matters is how many such groups there are, some ten for each software, for
# twenty constants. So the prior is to weigh about as much as a group does.
PRIOR_COST = 3.0
ROUNDS = 8
# of a group that nobody has seen, beside one that was: tried from none on. At a quarter of all groups nothing seen lies beyond
OWN_WEIGHTS = tuple(step / 20.0 for step in range(41))
# requests of each stream that are simulated, of the ten that published runs have: fewer where all write much. Those who come
# few at once need all of them to find their places among the steps
PER_SPREAD_STREAM = 10
PER_STREAM = 4
PER_LONG_STREAM = 2
LONG_TOKENS = 200_000  # of all streams at one time
MOST_IMPOSSIBLE = 0.1  # of a series that is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row with what the scheduler does under its load."""

    row: MeasuredService
    setup: Setup
    schedule: Schedule
    is_short_of_kv: bool = False


def case_of(row: MeasuredService) -> Case:
    """ConfigError where the model does not fit the device, or cannot be split so."""
    load = row.load
    setup = _setup(row.model, row.device, row.quant, row.kv, row.tp, row.layout)
    longest = load.input_tokens + load.output_tokens
    pool = capacity_of(setup, context_tokens=longest, batch=1, rule=row.memory).kv_tokens
    mean = longest * (1.0 + load.spread) / 2.0
    is_short_of_kv = pool < load.streams * mean
    scheduling = load.scheduling
    if is_short_of_kv and scheduling.reserves_answers:
        places = max(int(_rounded(pool) / mean), 1)
        scheduling = replace(scheduling, max_running=min(places, scheduling.max_running or places))
    is_short = load.streams * load.output_tokens <= LONG_TOKENS
    per_stream = PER_STREAM if is_short else PER_LONG_STREAM
    if scheduling.at_once is not None and is_short:
        per_stream = PER_SPREAD_STREAM
    loop = ClosedLoop(
        streams=load.streams,
        input=_lengths(load.input_tokens, load.spread),
        output=_lengths(load.output_tokens, load.spread),
        n_requests=max(load.streams * per_stream, 12),
        scheduling=scheduling,
        kv_tokens=_rounded(pool) if is_short_of_kv and not scheduling.reserves_answers else None,
    )
    return Case(row=row, setup=setup, schedule=schedule_of(loop), is_short_of_kv=is_short_of_kv)


def _rounded(tokens: int) -> int:
    """Down to a tenth more than the next smaller one: pools of nearly one size share a schedule."""
    return int(1.1 ** math.floor(math.log(max(tokens, 1), 1.1)))


def _lengths(tokens: int, spread: float) -> LengthRange:
    return LengthRange(low=max(int(tokens * spread), 1), high=tokens)


@lru_cache(maxsize=1024)
def _setup(model: str, device: str, quant: str, kv: str, tp: int, layout: Layout) -> Setup:
    return Setup(
        model=find_model(model),
        hardware=device_spec(device),
        quant=quant_spec(quant),
        kv=kv_spec(kv),
        tp=tp,
        layout=layout,
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
    times = case.schedule.times(_priced(case, constants), request_s=constants.request_s)
    load, unseen = case.row.load, case.row.shown_tokens - 1
    tokens = load.output_tokens * (1.0 + load.spread) / 2.0 - 1.0
    return {
        "ttft": times.ttft_s + unseen * times.tpot_s,
        # clients divide by all tokens but one, however many of them come with the first
        "tpot": times.tpot_s * (1.0 - unseen / tokens if unseen else 1.0),
        "throughput": times.output_tokens_per_s,
    }


def _priced(case: Case, constants: ServiceConstants) -> Callable[[StepShape], float]:
    """Seconds of a step; of one with prompts that is replayed from graphs, launches take what decode's do, but attention's."""
    prefill, decode, limit = constants.prefill, constants.decode, case.row.graph_tokens
    if case.row.has_triton_experts:
        prefill = replace(prefill, moe_layer_s=TRITON_EXPERTS_S["prefill"])
        decode = replace(decode, moe_layer_s=TRITON_EXPERTS_S["decode"])

    def with_prompts(found: Constants) -> Callable[[StepShape], float]:
        calibration = replace(case.setup.calibration, prefill=found, decode=decode)
        return replace(case.setup, calibration=calibration).model_of_time().predict_s

    launched = with_prompts(prefill)
    if not limit:
        return launched
    replayed = with_prompts(
        replace(
            prefill,
            layer_s=decode.layer_s + ATTENTION_CALL_S,
            moe_layer_s=decode.moe_layer_s,
            latent_layer_s=decode.latent_layer_s,
            allreduce_s=decode.allreduce_s,
        )
    )
    return lambda shape: replayed(shape) if shape.n_tokens <= limit else launched(shape)


def possible(cases: Sequence[Case]) -> list[Case]:
    """Without those that no such devices could have served, at all their peaks, and without series of which a tenth is such.

    Prompts were cached then, or there were more copies than the row says, and the rest of the series was no different. A series
    is what one software and version was measured with on one model, format and device.
    """
    impossible = [_is_impossible(case) for case in cases]
    n_of, n_impossible = Counter(map(_series, cases)), Counter(map(_series, compress(cases, impossible)))
    return [
        case
        for case, is_impossible in zip(cases, impossible, strict=True)
        if not is_impossible and n_impossible[_series(case)] <= MOST_IMPOSSIBLE * n_of[_series(case)]
    ]


def _series(case: Case) -> tuple[object, ...]:
    row = case.row
    return row.stack, row.version, row.model, row.quant, row.device, row.load.spread


def _is_impossible(case: Case) -> bool:
    row, said = case.row, predicted_of(case, _PERFECT)
    if row.output_tokens_per_s is not None and row.output_tokens_per_s > said["throughput"]:
        return True
    if row.ttft_s is None or row.tpot_s is None:
        return False
    tokens = row.load.output_tokens * (1.0 + row.load.spread) / 2.0 - 1.0
    return row.ttft_s + tokens * row.tpot_s < said["ttft"] + tokens * said["tpot"]


_PEAKS = Constants(
    eb=MappingProxyType({"other": 1.0}),
    ef=MappingProxyType({"other": 1.0}),
    p=64.0,
    kv_eb=1.0,
    attention_ef=1.0,
    link_fraction=1.0,
    expert_ef=MappingProxyType(dict.fromkeys(("fp32", "bf16", "fp8", "int8", "fp4"), 1.0)),
)
_PERFECT = ServiceConstants(prefill=_PEAKS, decode=_PEAKS, request_s=0.0)


def fit_services(form: ServiceForm, cases: Sequence[Case]) -> list[float]:
    """Logs of the free constants that fit these rows best."""

    def residuals(logs: Sequence[float]) -> list[float]:
        constants = put_in(form, [math.exp(log) for log in logs])
        found = []
        for case in cases:
            said = predicted_of(case, constants)
            found += [math.log(said[name] / value) for name, value in measured_of(case.row).items()]
        return found

    return gauss_newton(form.free, residuals, prior_cost=PRIOR_COST, rounds=ROUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One number of one service beside what constants say that were fitted without its model, or its device.

    low, high: of the 80 % interval, from what other models' (or devices') rows of that software needed.
    """

    case: Case
    measure: str
    held_out: str  # model | device
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1.0

    @property
    def is_held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low <= self.measured <= self.high

    def group(self, by: str) -> str:
        """The value of a field that rows are grouped by."""
        row = self.case.row
        load = row.load
        return {
            "software": row.stack,
            "device": row.device,
            "model": row.model,
            "weights": row.quant,
            "measure": self.measure,
            "layout": row.layout.words or "tensor parallel",
            "streams": _streams(load.streams),
            "lengths": f"{load.input_tokens} in, {load.output_tokens} out",
            "pool": "requests wait for KV" if self.case.is_short_of_kv else "all fit",
        }[by]


def _streams(streams: int) -> str:
    bounds = (4, 16, 64, 128)
    return next((f"up to {bound}" for bound in bounds if streams <= bound), f"over {bounds[-1]}")


def cases_of(
    rows: Sequence[MeasuredService], *, mapped: Mapped = map, told: Callable[[int, int], object] = lambda done, of: None
) -> list[Case | None]:
    """Of every row, in their order; None where `case_of` refuses. Rows of one load are worked on together.

    told: tokens of the loads that are done, of so many. The largest go first, so that no process is left alone with one.
    """
    places: dict[ServiceLoad, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.load, []).append(place)
    loads = sorted(places, key=_size, reverse=True)
    found: list[Case | None] = [None] * len(rows)
    done, of = 0, sum(map(_size, loads))
    groups = mapped(_cases_of_one_load, [[rows[place] for place in places[load]] for load in loads])
    for load, cases in zip(loads, groups, strict=True):
        for place, case in zip(places[load], cases, strict=True):
            found[place] = case
        done += _size(load)
        told(done, of)
    return found


def _size(load: ServiceLoad) -> int:
    return load.streams * load.output_tokens


def _cases_of_one_load(rows: Sequence[MeasuredService]) -> list[Case | None]:
    """For a map over processes: its loads' schedules are shared."""
    found: list[Case | None] = []
    for row in rows:
        try:
            found.append(case_of(row))
        except ConfigError:
            found.append(None)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fold:
    """A fit to make, and the cases to judge by it."""

    form: ServiceForm
    kept: list[Case]
    wanted: list[Case]

    def run(self) -> list[dict[str, float]]:
        """What it says about each."""
        constants = put_in(self.form, [math.exp(log) for log in fit_services(self.form, self.kept)])
        return [predicted_of(case, constants) for case in self.wanted]


def _run_fold(fold: _Fold) -> list[dict[str, float]]:
    """For a map over processes."""
    return fold.run()


def judge(
    targets: Sequence[Case],
    others: Sequence[Case],
    *,
    held_out: str,
    told: Callable[[str, int, int], object] = lambda words, done, of: None,
    mapped: Mapped = map,
) -> list[Judged]:
    """Every number of the targets by a fit that saw nothing of its model (or device), on the rows that are left of all cases.

    told: of each fit when it is done, and how many of its software's are. mapped: fits at one time; it changes no number.
    Software without a form is left out, and so is what no other model (or device) was measured with.
    """
    found: list[Judged] = []
    everything = [*targets, *others]
    for form in SERVICE_FORMS:
        mine = [case for case in everything if case.row.stack == form.stack]
        wanted = [case for case in targets if case.row.stack == form.stack]
        if not wanted:
            continue
        raw: list[tuple[Case, str, float, float]] = []
        values = sorted({_field(case, held_out) for case in wanted})
        left = {value: [case for case in mine if _field(case, held_out) != value] for value in values}
        folds = [
            _Fold(
                form=form,
                kept=few_of(left[value]),
                wanted=[case for case in wanted if _field(case, held_out) == value],
            )
            for value in values
            if left[value]
        ]
        for number, (fold, said) in enumerate(zip(folds, mapped(_run_fold, folds), strict=True), start=1):
            told(f"{form.stack} without {_field(fold.wanted[0], held_out)}", number, len(folds))
            for case, numbers in zip(fold.wanted, said, strict=True):
                raw += [(case, name, seen, numbers[name]) for name, seen in measured_of(case.row).items()]
        found += _with_intervals(raw, held_out)
    return found


def _field(case: Case, held_out: str) -> str:
    return case.row.model if held_out == "model" else case.row.device


def _with_intervals(raw: Sequence[tuple[Case, str, float, float]], held_out: str) -> list[Judged]:
    """A row's interval is made of the errors of all other models' (devices') rows."""
    found: list[Judged] = []
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    for case, measure, measured, predicted in raw:
        own = _field(case, held_out)
        if (own, measure) not in bounds:
            ratios: dict[str, list[float]] = {}
            for other, name, seen, said in raw:
                if name == measure and _field(other, held_out) != own:
                    ratios.setdefault(_field(other, held_out), []).append(seen / said)
            bounds[own, measure] = bounds_of(list(ratios.values()))
        low, high = bounds[own, measure]
        found.append(
            Judged(
                case=case, measure=measure, held_out=held_out, measured=measured, predicted=predicted,
                low=predicted * low, high=predicted * high,
            )
        )  # fmt: skip
    return found


def bounds_of(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """What SHARE of the ratios of a group that is not among these lies between.

    Rows of one model (device) err together, so each of the groups weighs the same, however many rows it has; and some weight of
    another, the row's own, lies beyond what was seen, half of it at either end: the least with which the others hold SHARE of
    each of these groups, left out in turn, on the average. So how far models (devices) stand apart is what widens it.
    """
    if not groups:
        return 1.0, 1.0
    if len(groups) == 1:
        return min(groups[0]), max(groups[0])
    left = [(one, _Weighed([*groups[:i], *groups[i + 1 :]])) for i, one in enumerate(groups)]
    everything = _Weighed(groups)
    for weight in OWN_WEIGHTS:
        held = 0.0
        for one, others in left:
            low, high = others.bounds(weight)
            held += sum(low <= ratio <= high for ratio in one) / len(one)
        if held >= SHARE * len(groups):
            break
    return everything.bounds(weight)


class _Weighed:
    """Ratios of some groups in order, with what they weigh together up to each from either end."""

    def __init__(self, groups: Sequence[Sequence[float]]) -> None:
        self._n_groups = len(groups)
        seen = sorted((ratio, 1.0 / len(group)) for group in groups for ratio in group)
        self._ends = [
            ([ratio for ratio, _ in ordered], [*accumulate(weight for _, weight in ordered)])
            for ordered in (seen, seen[::-1])
        ]

    def bounds(self, own_weight: float) -> tuple[float, float]:
        """Beyond which lies an equal share of all weight, with so much of it unseen."""
        within = 0.5 * (1.0 - SHARE) * (self._n_groups + own_weight) - 0.5 * own_weight
        low, high = (
            ratios[min(bisect_left(come, within * (1.0 - 1e-9)), len(ratios) - 1)] for ratios, come in self._ends
        )
        return low, high


def few_of(cases: Iterable[Case]) -> list[Case]:
    """At most FIT_ROWS of each model, device and format, from all over their loads: they weigh alike, and a fit ends."""
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.row.model, case.row.device, case.row.quant), []).append(case)
    kept: list[Case] = []
    for _, members in sorted(groups.items()):
        members.sort(key=lambda case: repr((case.row.tp, case.row.load)))
        random.Random(len(members)).shuffle(members)
        kept += members[:FIT_ROWS]
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupError:
    """Errors of a group as sizes, and the share of rows that their intervals hold."""

    by: str
    group: str
    rows: int
    median: float
    p90: float
    bias: float  # median of the signed errors
    held: float


def summarise_services(judged: Sequence[Judged], *, by: Sequence[str]) -> list[GroupError]:
    """Of all rows, then by each field."""
    found = [_group("all", "all", judged)]
    for field in by:
        groups: dict[str, list[Judged]] = {}
        for one in judged:
            groups.setdefault(one.group(field), []).append(one)
        found += [_group(field, name, members) for name, members in sorted(groups.items())]
    return found


def _group(by: str, name: str, members: Sequence[Judged]) -> GroupError:
    sizes = [abs(one.error) for one in members]
    return GroupError(
        by=by,
        group=name,
        rows=len(members),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        bias=quantile([one.error for one in members], 0.5),
        held=sum(one.is_held for one in members) / len(members),
    )
