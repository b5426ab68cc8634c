"""The phase report: for prefill and decode the tokens, the time, the rate, the share of the machine's ceiling, and the
prediction; where the time to first token went; the gaps between tokens; what the prefix cache gave.

Built from events alone (`PhaseObserver` listens) and the cost model; no clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from diptych.compute.ceilings import ABOVE, Ceilings
from diptych.cost.calibrated import CalibratedModel
from diptych.engine.cost_view import CostView
from diptych.engine.load import LoadedModel
from diptych.engine.model_profile import faster_backends, faster_kernels, local_predictor, profile_gap
from diptych.ground.bounds import counted
from diptych.ground.events import Event, Timings, Usage
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.metrics import EventBook, StepRecord, percentile


class PhaseObserver:
    """Collects the steps of one run. Use as an engine listener."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._book = EventBook(on_step=self.steps.append)

    def __call__(self, events: list[Event]) -> None:
        """Fold one batch of events."""
        self._book.fold(events)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase of a run. fraction_of_ceiling: what the roofline allows over what it took; bound names the ceiling."""

    phase: str
    tokens: int
    time_s: float
    tokens_per_s: float
    fraction_of_ceiling: float
    bound: str
    predicted_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """What `diptych generate` prints after the text. load_s is None where nobody waited for the model to load.

    kernels: the kernel set, or what torch runs on. faster_kernels: a better set that the processor has too.
    faster_backends: phases in which the profile of this machine knows a faster backend.
    unpredicted: why there is no prediction, where there is none. is_replayed: predictions are of steps that were recorded
    before, as a GPU replays them.
    """

    model: str
    backend: str
    kernels: str
    weights: str
    threads: int
    ceilings: Ceilings
    prefill: PhaseRow
    decode: PhaseRow | None
    load_s: float | None
    queue_s: float
    prefill_s: float
    first_token_s: float
    itl_p50_s: float | None
    itl_p99_s: float | None
    tokens_per_decode_step: float | None  # more than one per sequence where drafts held
    undrafted_s: float | None  # predicted time of the same decode without drafts; None without drafts or prediction
    usage: Usage
    unpredicted: str | None = None
    is_replayed: bool = False
    faster_kernels: str | None = None
    faster_backends: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Plain dicts."""
        return asdict(self)

    def line(self) -> str:
        """One line, for a chat."""
        rows = [row for row in (self.prefill, self.decode) if row is not None]
        parts = [f"{row.phase} {row.tokens} tok {row.tokens_per_s:.0f} tok/s" for row in rows]
        return f"{' · '.join(parts)} · cached {self.usage.cached_tokens}"

    def table(self) -> str:
        """A few aligned lines for a terminal."""
        head = (
            f"phase report · {self.model} · {self.backend} backend ({self.kernels}), {self.weights} weights, "
            f"{counted(self.threads, 'thread')} · "
            f"ceilings {self.ceilings.words()}"
        )
        lines = [head]
        if self.faster_kernels is not None:
            lines.append(
                f"  kernels use {self.kernels}; this processor also has {self.faster_kernels}, which is faster"
            )
        lines.append(f"  {'':<9}{'tokens':>7}{'time':>11}{'rate':>14}  {'of ceiling':<20}{'predicted':>11}")
        rows = [row for row in (self.prefill, self.decode) if row is not None]
        lines += [_row_line(row) for row in rows]
        lines += [f"  {phase}: {words} (diptych lab calibrate)" for phase, words in self.faster_backends.items()]
        lines += [f"  {row.phase} above 100%: {ABOVE[row.bound]}" for row in rows if row.fraction_of_ceiling > 1.0]
        only_reads = not (self.usage.output_tokens or self.usage.remaining_tokens)  # else it was cut off before a token
        name, end = ("read after", "its end") if only_reads else ("TTFT", "first token")
        parts = {"queue": self.queue_s, "prefill": self.prefill_s, end: self.first_token_s}
        start = ""
        if self.load_s is not None:
            parts, start = {"load": self.load_s} | parts, " from a cold start"
        lines.append(
            f"  {name} {_ms(sum(parts.values()))}{start} = "
            + " + ".join(f"{part} {_ms(s)}" for part, s in parts.items())
        )
        if only_reads:
            lines.append("  no decode: the prompt was read, and nothing was written")
        if self.itl_p50_s is not None and self.itl_p99_s is not None:
            lines.append(f"  between tokens p50 {_ms(self.itl_p50_s)}, p99 {_ms(self.itl_p99_s)}")
        usage = self.usage
        if self.unpredicted is not None:
            lines.append(f"  no prediction: {self.unpredicted}")
        elif self.is_replayed:
            lines.append(
                "  predicted: replayed steps; the first ones of their size are recorded, or launched by kernels"
            )
        lines.append(
            f"  prompt {counted(usage.prompt_tokens, 'token')} = {usage.computed_tokens} computed + "
            f"{usage.cached_tokens} cached"
        )
        if usage.drafted_tokens and self.tokens_per_decode_step is not None:
            gained = ""
            if self.undrafted_s is not None and self.decode is not None:
                gain = self.undrafted_s / self.decode.time_s
                gained = f"; {gain:.2f} x the speed predicted without, {_ms(self.undrafted_s)}"
            lines.append(
                f"  speculation {self.tokens_per_decode_step:.2f} tokens per decode step: {usage.accepted_tokens} of "
                f"{usage.drafted_tokens} drafts accepted{gained}"
            )
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10.0 else f"{seconds:.1f} s"


def _row_line(row: PhaseRow) -> str:
    predicted = "-" if row.predicted_s is None else _ms(row.predicted_s)
    ceiling = f"{row.fraction_of_ceiling:.0%} ({row.bound})"
    return f"  {row.phase:<9}{row.tokens:>7}{_ms(row.time_s):>11}{row.tokens_per_s:>8.0f} tok/s  {ceiling:<20}{predicted:>11}"


def phase_report(
    loaded: LoadedModel,
    observer: PhaseObserver,
    *,
    ceilings: Ceilings,
    usage: Usage,
    timings: Timings,
    is_cold: bool = True,
) -> PhaseReport:
    """The report of one finished request that ran alone while `observer` listened. is_cold: it waited for the loading."""
    view, predictor = CostView(loaded.model), local_predictor(loaded.model)
    prefill_steps = [step for step in observer.steps if step.shape.phase is Phase.PREFILL]
    decode_steps = [step for step in observer.steps if step.shape.phase is Phase.DECODE]
    first_token_s = prefill_steps[-1].time_s - prefill_steps[-1].device_s if prefill_steps else 0.0
    itl = timings.itl_s
    decode = _phase_row(Phase.DECODE, decode_steps, view, ceilings, predictor) if decode_steps else None
    if decode is not None and usage.drafted_tokens:  # rows of rejected drafts were computed and handed out nothing
        n_tokens = sum(step.decode_tokens for step in decode_steps)
        decode = replace(decode, tokens=n_tokens, tokens_per_s=n_tokens / decode.time_s)
    return PhaseReport(
        model=loaded.name,
        backend=loaded.model.backend_name,
        kernels=loaded.model.instruction_set,
        weights=loaded.model.weights_format,
        threads=loaded.model.threads,
        ceilings=ceilings,
        prefill=_phase_row(Phase.PREFILL, prefill_steps, view, ceilings, predictor),
        decode=decode,
        load_s=loaded.load_s if is_cold else None,
        queue_s=timings.queue_s,
        prefill_s=max(0.0, timings.prefill_s - first_token_s),
        first_token_s=first_token_s,
        itl_p50_s=percentile(itl, 50.0),
        itl_p99_s=percentile(itl, 99.0),
        tokens_per_decode_step=None if decode is None else decode.tokens / len(decode_steps),
        undrafted_s=None if not usage.drafted_tokens else _undrafted_s(decode_steps, predictor),
        usage=usage,
        unpredicted=profile_gap(loaded.model),
        is_replayed=loaded.model.device.type != "cpu" and loaded.model.keeps_bits,
        faster_kernels=faster_kernels(loaded.model),
        faster_backends=faster_backends(loaded.model),
    )


def _undrafted_s(steps: list[StepRecord], predictor: CalibratedModel | None) -> float | None:
    """Predicted time of decode steps that hand out the same tokens without drafts: as many as each one's tokens stand for."""
    if predictor is None:
        return None
    total_s = 0.0
    for step in steps:
        plain = StepShape([shape._replace(new_tokens=1) for shape in step.shape.shapes])
        total_s += step.decode_tokens / plain.n_sequences * predictor.predict_s(plain)
    return total_s


def _phase_row(
    phase: Phase, steps: list[StepRecord], view: CostView, ceilings: Ceilings, predictor: CalibratedModel | None
) -> PhaseRow:
    tokens = sum(step.shape.n_tokens for step in steps)
    time_s = sum(step.time_s for step in steps) or 1e-9
    bound_s = memory_s = compute_s = 0.0
    for step in steps:
        step_memory_s, step_compute_s = view.parts_s(step.shape, ceilings)
        bound_s += max(step_memory_s, step_compute_s)
        memory_s += step_memory_s
        compute_s += step_compute_s
    return PhaseRow(
        phase=phase.value,
        tokens=tokens,
        time_s=time_s,
        tokens_per_s=tokens / time_s,
        fraction_of_ceiling=bound_s / time_s,
        bound=ceilings.roof if memory_s >= compute_s else "arithmetic",
        predicted_s=None if predictor is None else sum(predictor.predict(step.shape).total_s for step in steps),
    )
