"""The roofline experiment: both phases, whole and in parts, under a roof that is measured in every round beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from diptych.compute.ceilings import CACHED, Ceilings, attention_dtype, machine_ceilings
from diptych.cost.phase_cost import PhaseCost
from diptych.ground.shape import StepShape
from diptych.lab.experiment import ROOF, Check, Experiment, Outcome, Roof, Stage, conclude, quantity
from diptych.lab.probe import StepParts
from diptych.lab.rounds import Estimate, Rounds, Sampler

PREFILL_ROWS = 512
CONTEXT = 512
BATCHES = (4, 16, 64)
# (name, kinds of operation counted by the cpu backend, components of the cost model)
PARTS = (
    ("QKV", ("qkv",), ("qkv",)),
    ("attention", ("attention",), ("scores", "values", "index")),
    ("O", ("o",), ("o",)),
    ("MLP", ("gate_up", "down"), ("mlp",)),
    ("experts", ("moe",), ("router", "experts", "shared_experts")),
    ("head", ("head",), ("head",)),
)
REST = ("embed", "norm", "rope")
PER_BYTE, PER_FLOP, PER_ATTENTION_FLOP, PER_CACHED_BYTE = range(4)  # the columns of the roof


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    """One point of the picture and the column in which its time stands."""

    series: str
    label: str
    flops: float
    bytes: float
    column: int
    peak: int = PER_FLOP

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def least_s(self, times_N: np.ndarray) -> float:
        """The time that the roof of this round allows: that of the cache where it is faster than the memory."""
        per_byte = min(times_N[PER_BYTE], times_N[PER_CACHED_BYTE])
        return float(max(self.bytes * per_byte, self.flops * times_N[self.peak]))

    def memory_share(self, times_N: np.ndarray) -> float:
        """What the memory alone would need, over the time taken: above 1 a cache has helped."""
        return float(self.bytes * times_N[PER_BYTE] / times_N[self.column])


class _Roof:
    """Samplers of the ceilings, as seconds per byte and per FLOP."""

    def __init__(self, stage: Stage) -> None:
        self._model = stage.model
        self._last: Ceilings = stage.ceilings

    def samplers(self) -> list[Sampler]:
        """In the order of the roof's columns."""
        per_flop = lambda: 1.0 / self._last.flops_per_s  # noqa: E731
        return [self._per_byte, per_flop, self._per_attention_flop, self._per_cached_byte]

    def _per_byte(self) -> float:
        self._last = machine_ceilings(self._model)
        return 1.0 / self._last.read_bytes_per_s

    def _per_cached_byte(self) -> float:
        """Of a buffer as large as the weights: at the memory's rate where no cache holds them."""
        return 1.0 / self._last.roof_bytes_per_s

    def _per_attention_flop(self) -> float:
        return 1.0 / (self._last.attention_flops_per_s or self._last.flops_per_s)


class _Picture:
    """The columns to measure and the dots they become."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.samplers: list[Sampler] = _Roof(stage).samplers()
        self.dots: list[_Dot] = []
        self.rest: dict[str, tuple[int, int]] = {}  # series: columns of norms etc. and of the whole step
        self._probe = stage.probe(max(BATCHES) * (CONTEXT + 32))

    def add(self, series: str, label: str, work: StepShape) -> None:
        """A whole step."""
        cost = self._stage.view.cost(work)
        self._dot(series, label, cost.flops, cost.bytes, self._probe.sampler(work))

    def add_in_parts(self, series: str, label: str, work: StepShape) -> None:
        """A whole step, and the parts that its backend can time."""
        if self._stage.model.backend_name != "cpu":
            self.add(series, label, work)
            return
        cost, parts = self._stage.view.cost(work), StepParts(self._probe, work)
        self._dot(series, label, cost.flops, cost.bytes, parts.total)
        whole = self.dots[-1].column
        for name, kinds, components in PARTS:
            flops, n_bytes = _work_of(cost, components)
            if flops:
                peak = PER_ATTENTION_FLOP if name == "attention" else PER_FLOP
                self._dot(f"{series}: {name}", "", flops, n_bytes, partial(parts.part, kinds), peak)
        self.rest[series] = len(self.samplers), whole
        self.samplers.append(lambda: parts.part(REST))

    def _dot(
        self, series: str, label: str, flops: float, n_bytes: float, sampler: Sampler, peak: int = PER_FLOP
    ) -> None:
        column = len(self.samplers)
        self.dots.append(_Dot(series=series, label=label, flops=flops, bytes=n_bytes, column=column, peak=peak))
        self.samplers.append(sampler)


def _work_of(cost: PhaseCost, names: tuple[str, ...]) -> tuple[float, float]:
    """FLOPs and bytes read of some components. Writing new keys and values is left out: another operation does it."""
    parts = [cost.component(name) for name in names]
    return sum(p.flops for p in parts), sum(p.weight_bytes + p.kv_read_bytes for p in parts)


def _share_words(dot: _Dot, rounds: Rounds, share: float, of_memory: float, roof_name: str) -> str:
    """What part of which roof was reached."""
    is_arithmetic = dot.flops * rounds.point(dot.peak).value >= dot.least_s(np.median(rounds.times_RN, axis=0))
    words = f"{share:.0%} of {'the roof of the arithmetic' if is_arithmetic else roof_name}"
    if share > 1.0:
        words += ": above it, so that a nearer cache than the one measured has served a part of the bytes"
    if not is_arithmetic and of_memory > 1.0:
        words += f" ({of_memory:.0%} of the memory's)"
    return words


def _roofs(rounds: Rounds, *, has_cache: bool) -> list[Roof]:
    per_byte, per_flop, per_attention_flop, per_cached_byte = (1e-9 * rounds.rate(i, 1.0).value for i in range(4))
    roofs = [Roof(name="memory", slope=per_byte, flat=per_flop)]
    if has_cache:
        roofs.append(Roof(name="cache that holds the weights", slope=per_cached_byte, flat=per_flop))
    if abs(per_attention_flop / per_flop - 1.0) > 0.05:
        fastest = per_cached_byte if has_cache else per_byte
        roofs.append(Roof(name="attention's arithmetic", slope=fastest, flat=per_attention_flop))
    return roofs


def _checks(rounds: Rounds, ridge: Estimate, decode: _Dot, prefill: _Dot) -> list[Check]:
    return [
        Check(
            what="the ridge over decode's FLOP per byte",
            estimate=ridge.times(1.0 / decode.intensity),
            limit=1.0,
            pattern="{:.1f}",
        ),
        Check(
            what="prefill's FLOP per byte over the ridge",
            estimate=rounds.of(lambda t: prefill.intensity * t[PER_FLOP] / t[PER_BYTE]),
            limit=1.0,
            pattern="{:.1f}",
        ),
        Check(
            what="arithmetic achieved in prefill over that in decode",
            estimate=rounds.of(lambda t: (prefill.flops / t[prefill.column]) / (decode.flops / t[decode.column])),
            limit=2.0,
            pattern="{:.1f}",
        ),
    ]


def _roofline(stage: Stage) -> Outcome:
    context, rows = min(CONTEXT, stage.longest_tokens), min(PREFILL_ROWS, stage.longest_tokens)
    picture = _Picture(stage)
    picture.add_in_parts("decode", "batch 1", StepShape.decode(batch=1, context_tokens=context))
    for batch in BATCHES:
        picture.add("decode", f"batch {batch}", StepShape.decode(batch=batch, context_tokens=context))
    for n in (16, 128):
        picture.add("prefill", f"{n} tokens", StepShape.prefill(batch=1, new_tokens=n))
    picture.add_in_parts("prefill", f"{rows} tokens", StepShape.prefill(batch=1, new_tokens=rows))
    rounds = stage.measure(picture.samplers)
    shares = rounds.each(lambda t: np.array([dot.least_s(t) / t[dot.column] for dot in picture.dots]))
    roofs = rounds.each(lambda t: np.array([dot.flops / dot.least_s(t) for dot in picture.dots]))
    of_memory = rounds.each(lambda t: np.array([dot.memory_share(t) for dot in picture.dots]))
    cached = rounds.of(lambda t: t[PER_BYTE] / t[PER_CACHED_BYTE])
    memory, cache = (f"{1e-9 * rounds.rate(column, 1.0).value:.0f} GB/s" for column in (PER_BYTE, PER_CACHED_BYTE))
    has_cache = cached.value > CACHED
    roof_name = "the cache's roof" if has_cache else "the memory's roof"
    points, lines = [], []
    for dot, share, roof, memory_share in zip(picture.dots, shares, roofs, of_memory, strict=True):
        rate = rounds.rate(dot.column, dot.flops)
        unit = "Gop/s, whole steps" if dot.label else "Gop/s, parts of a step"
        here = dot.label.removeprefix("batch ").removesuffix(" tokens")
        points.append(quantity(dot.series, dot.intensity, rate, unit, scale=1e-9, predicted=roof.value, label=here))
        lines.append(
            f"{dot.series}{dot.label and ', ' + dot.label}: {dot.intensity:.3g} FLOP per byte, {1e-9 * rate.value:,.1f} Gop/s, "
            f"{_share_words(dot, rounds, share.value, memory_share.value, roof_name)}"
        )
    for series, (column, whole) in picture.rest.items():
        share_of_step = rounds.point(column).value / rounds.point(whole).value
        lines.append(
            f"{series}: norms, rotary and embedding, which are no matrix work, take {share_of_step:.0%} of the step"
        )
    if not picture.rest:
        lines.append("parts of a step are timed on the cpu backend only")
    ridge = rounds.of(lambda t: t[PER_BYTE] / t[PER_FLOP])
    whole_dots = [dot for dot in picture.dots if dot.label]
    decode, prefill = whole_dots[0], whole_dots[-1]
    return conclude(
        points,
        _checks(rounds, ridge, decode, prefill),
        rounds,
        roofs=_roofs(rounds, has_cache=has_cache),
        finding=(
            f"decode at batch 1 does {decode.intensity:.1f} operations per byte, far under this machine's ridge of "
            f"{ridge.value:.0f}: memory sets its pace; prefill of {rows} tokens does {prefill.intensity:.0f}: arithmetic does"
        ),
        notes=[
            f"decode at a context of {context}; linear layers multiply in {stage.ceilings.compute_dtype}, attention in "
            f"{attention_dtype(stage.model)}" + stage.cached_weights,
            f"the memory is read at {memory}"
            + (
                f"; the weights, {stage.model.weight_bytes / 2**20:.0f} MiB, lie in a cache that is read at {cache}: the roof "
                "drawn beside the memory's"
                if has_cache
                else ""
            ),
            *lines,
        ],
    )


ROOFLINE = Experiment(
    name="roofline",
    title="Both phases under one roof, whole (numbers: sequences of decode, tokens of prefill) and in parts",
    claim="the same weights are memory-bound in decode and arithmetic-bound in prefill",
    x_label="operations per byte",
    y_label="achieved",
    run=_roofline,
    is_log_x=True,
    is_log_y=True,
    predicts=ROOF,
)
