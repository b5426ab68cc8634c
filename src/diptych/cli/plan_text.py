"""The planner's answers as readable tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from diptych.cli.tables import amount, duration, page, plain_table
from diptych.cost.advice import MOST_BATCH, ChunkAdvice, PoolAdvice, SpeculationAdvice, WhatIf
from diptych.cost.parameters import parameter_count
from diptych.cost.planner import ComponentLine, PhasePlan, Plan, roof_of
from diptych.cost.sizing import Answer, Candidate, Load
from diptych.cost.stacks import stack_names
from diptych.cost.tables import device_names, device_spec, model_names, model_spec
from diptych.ground.formats import KV_FORMATS, QUANTS
from diptych.ground.phase import Phase
from diptych.ground.specs import Bottleneck, HardwareSpec
from diptych.metrics import percentile

if TYPE_CHECKING:  # the fits behind it are needed by `plan accuracy` alone
    from diptych.cost.fitting.accuracy import ErrorSummary, ServiceError
    from diptych.cost.fitting.held_out import Holding


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def show_plan(
    plan: Plan,
    *,
    what_if: Sequence[WhatIf],
    speculation: SpeculationAdvice,
    chunk: ChunkAdvice,
    pools: PoolAdvice,
) -> None:
    """The whole page for one setup."""
    console = page()
    _head(console, plan)
    _phases(console, plan)
    _components(console, plan)
    _decode_split(console, plan)
    _limits(console, plan)
    _what_ifs(console, what_if)
    _speculation(console, speculation)
    console.print(_chunk_words(plan, chunk))
    console.print(_pool_words(pools))
    for note in plan.notes:
        console.print(f"note: {escape(note)}")
    _distance(console, plan)


def _head(console: Console, plan: Plan) -> None:
    setup = plan.setup
    hardware = setup.hardware
    roof = roof_of(setup)
    cached = (
        f", {amount(roof.memory_bytes_per_s)}B/s from the cache that holds the weights" if roof is not hardware else ""
    )
    console.print(f"[bold]{escape(setup.label)}[/bold], KV {setup.kv.name}: {escape(hardware.title)}")
    console.print(
        f"{_billions(plan.parameters)} parameters, {_billions(plan.active_parameters)} active per token; "
        f"KV {plan.kv_bytes_per_token:,.0f} B/token; "
        f"{amount(hardware.flops_per_s[plan.compute_dtype])}FLOP/s {plan.compute_dtype}, "
        f"{amount(hardware.memory_bytes_per_s)}B/s{cached}: balance {plan.prefill.balance:.0f} FLOP/B"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.4g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def _phases(console: Console, plan: Plan) -> None:
    table = plain_table("one step of each phase; FLOP and bytes of one device", "", "prefill", "decode")
    reports = (plan.prefill, plan.decode)
    lines: tuple[tuple[str, Callable[[PhasePlan], str]], ...] = (
        ("work", _work),
        ("FLOP", lambda report: amount(report.flops)),
        (
            "bytes: weights + KV",
            lambda report: f"{amount(report.weight_bytes)} + {amount(report.kv_bytes)}".replace("  ", " "),
        ),
        ("FLOP per byte", lambda report: f"{_ratio(report.intensity)} (balance {report.balance:.0f})"),
        ("bound by", lambda report: report.bound.value),
        ("roofline (a bound)", lambda report: duration(report.bound_s)),
        ("predicted", lambda report: f"[bold]{duration(report.predicted_s)}[/bold]"),
        ("10th to 90th percentile", lambda report: f"{duration(report.low_s)} to {duration(report.high_s)}"),
        ("rate", lambda report: f"{report.tokens_per_s:,.0f} tok/s"),
    )
    for name, cell in lines:
        table.add_row(name, *(cell(report) for report in reports))
    console.print(table)
    for report in reports:
        _print_crossing(console, report)
    question = plan.question
    each = f", {question.batch} prompts together" if question.batch > 1 else ""
    console.print(
        f"time to first token, {question.prompt_tokens} prompt tokens{each}: "
        f"[bold]{duration(plan.prefill.predicted_s)}[/bold]; "
        f"time per output token at context {plan.decode.context_tokens}, batch {question.batch}: "
        f"[bold]{duration(plan.decode.predicted_s)}[/bold] "
        f"({1.0 / plan.decode.predicted_s:,.1f} tok/s per stream)"
    )


def _print_crossing(console: Console, report: PhasePlan) -> None:
    """A line where what binds the predicted step is not what would at the machine's peaks."""
    if report.bound not in (Bottleneck.COMPUTE, Bottleneck.MEMORY):
        return
    of_peaks = Bottleneck.COMPUTE if report.intensity >= report.balance else Bottleneck.MEMORY
    if report.bound is not of_peaks:
        console.print(
            f"{report.phase.value} is bound by {report.bound.value} as predicted: {report.bound.value} reaches less of "
            f"its peak than {of_peaks.value}, by which it would be bound if both reached theirs"
        )


def _work(report: PhasePlan) -> str:
    if report.phase is Phase.DECODE:
        return f"{report.batch} x context {report.context_tokens}"
    cached = report.context_tokens - report.new_tokens
    return f"{report.batch} x {report.new_tokens} tokens" + (f" + {cached} cached" if cached else "")


def _components(console: Console, plan: Plan) -> None:
    cells = ("FLOP", "bytes", "FLOP/B", "share")
    table = plain_table("components at the machine's peak: prefill left, decode right", "component", *cells, *cells)
    decode = {line.name: line for line in plan.decode.components}
    for line in plan.prefill.components:
        table.add_row(line.name, *_component_cells(line), *_component_cells(decode[line.name]))
    console.print(table)


def _component_cells(line: ComponentLine) -> tuple[str, ...]:
    intensity = "-" if line.intensity is None else f"{amount(line.intensity).strip()} {line.bound.value[0]}"
    return amount(line.flops), amount(line.bytes), intensity, f"{line.share:.1%}"


def _decode_split(console: Console, plan: Plan) -> None:
    total = plan.decode.predicted_s
    parts = (
        ("weights", plan.weights_s),
        ("KV", plan.kv_s),
        ("launch and host", plan.decode.launch_s),
        ("link", plan.decode.link_s),
        ("adapters", plan.decode.adapters_s),
    )
    words = ", ".join(f"{name} {duration(part)} ({_percent(part, total)})" for name, part in parts if part > 0)
    console.print(f"where a decode step's time goes: {words}")
    sensitivity = plan.sensitivity
    console.print(
        f"one percent more FLOP/s: TTFT {sensitivity.ttft_by_flops:+.2f} %, TPOT {sensitivity.tpot_by_flops:+.2f} %; "
        f"one percent more bandwidth: TTFT {sensitivity.ttft_by_bandwidth:+.2f} %, "
        f"TPOT {sensitivity.tpot_by_bandwidth:+.2f} %"
    )


def _limits(console: Console, plan: Plan) -> None:
    capacity, context = plan.capacity, plan.decode.context_tokens
    linear = plan.compute_bound_batch
    words = "beyond 65536" if linear is None else f"{linear:.0f}"
    quadratic = plan.quadratic_prompt_tokens
    attention = (
        "no layer attends"
        if quadratic is None
        else f"attention equals linear FLOPs at a prompt of {quadratic:,.0f} tokens"
    )
    console.print(
        f"linear layers turn compute bound at batch [bold]{words}[/bold]; KV traffic equals weight traffic at batch "
        f"[bold]{plan.kv_equals_weights_batch:.0f}[/bold] (context {context}); "
        f"{attention}"
    )
    console.print(
        f"memory of one device: {amount(capacity.memory_bytes)}B, weights {amount(capacity.weight_bytes)}B, "
        f"KV pool {amount(capacity.free_kv_bytes)}B; largest batch at context {context}: "
        f"[bold]{capacity.max_batch:,}[/bold]; "
        f"longest context at batch {plan.question.batch}: [bold]{capacity.max_context_tokens:,}[/bold]"
    )
    if not capacity.is_fitting:
        console.print("[bold]this does not fit in memory[/bold]: the times above are what it would take if it did")


def _what_ifs(console: Console, entries: Sequence[WhatIf]) -> None:
    table = plain_table("what if", "change", "TTFT", "TPOT", "tok/s all streams", "largest batch", "weights", "fits")
    impossible: dict[str, list[str]] = {}
    for entry in entries:
        if entry.ttft_s is None or entry.tokens_per_s is None or entry.weight_bytes is None:
            impossible.setdefault(entry.obstacle or "not possible", []).append(entry.change)
            continue
        table.add_row(
            entry.change,
            duration(entry.ttft_s),
            duration(entry.tpot_s),
            f"{entry.tokens_per_s:,.0f}",
            f"{entry.max_batch:,}",
            f"{amount(entry.weight_bytes)}B",
            "no" if entry.obstacle else "yes",
        )
    console.print(table)
    for reason, changes in impossible.items():
        console.print(f"not possible: {', '.join(changes)}: {escape(reason)}")


def _speculation(console: Console, advice: SpeculationAdvice) -> None:
    entry = advice.asked
    console.print(
        f"speculation, {entry.draft_tokens} drafted at acceptance {entry.acceptance:g}: "
        f"{entry.accepted_tokens:.2f} tokens per verify step of {duration(entry.verify_s)} "
        f"+ {duration(entry.draft_s)} drafting: TPOT {duration(entry.tpot_s)}, {entry.speedup:.2f} x; {_pays(advice)}"
    )
    each = "; ".join(
        f"batch {one.batch}: {one.speedup:.2f} x, "
        + (f"{one.best_speedup:.2f} x with {one.depth:.1f}" if one.depth else "none is better")
        for one in advice.table
    )
    console.print(f"  and with as many as the engine would choose: {each}")


def _pays(advice: SpeculationAdvice) -> str:
    if advice.most_batch is None:
        return f"it still pays at batch {MOST_BATCH}"
    return f"it pays up to batch {advice.most_batch}" if advice.most_batch else "it pays at no batch"


def _chunk_words(plan: Plan, entry: ChunkAdvice) -> str:
    budget = duration(entry.stall_budget_s)
    streams = plan.question.batch
    if not entry.chunk_tokens:
        return f"stall budget {budget}: no chunk fits; a decode step alone takes {duration(entry.decode_only_s)}"
    return (
        f"stall budget {budget} with {streams} stream{'s' if streams > 1 else ''} decoding: chunks of "
        f"[bold]{entry.chunk_tokens}[/bold] tokens (step {duration(entry.step_s)}; whole prompt at once "
        f"{duration(entry.whole_step_s)}), TTFT {duration(entry.ttft_s)}, KV read again {amount(entry.kv_reread_bytes)}B"
    )


def _pool_words(entry: PoolAdvice) -> str:
    link = "" if entry.link_s is None else f", {duration(entry.link_s)} over the device link"
    return (
        f"pools at {entry.requests_per_s:g} req/s: {entry.prefill_instances:.2f} instances busy with prefill, "
        f"{entry.decode_instances:.2f} with decode at batch {entry.decode_batch} "
        f"(ratio {entry.ratio:.2f} : 1); a prompt's cache is {amount(entry.kv_bytes)}B, "
        f"{duration(entry.network_s)} over 400 Gb/s{link}. {entry.advice}"
    )


def _distance(console: Console, plan: Plan) -> None:
    """How far both answers stand from the rows behind them; the intervals above are as much wider."""
    if plan.setup.calibration.is_local:
        return
    for report in (plan.prefill, plan.decode):
        if not report.distance:
            console.print(f"{report.phase.value} stands inside the measured rows")
        for gap in report.distance:
            console.print(f"{report.phase.value} leaves the measured rows by {gap}")


def show_answer(answer: Answer, not_tried: Mapping[str, Sequence[str]]) -> None:
    """The cheapest fitting setup and why, what might be cheaper, and why the others fall out."""
    console = page()
    ask = answer.ask
    console.print(
        f"asked: TTFT p95 <= {duration(ask.ttft_s)}, TPOT <= {duration(ask.tpot_s)}, {ask.requests_per_s:g} req/s, "
        f"{ask.input_tokens} in, {ask.output_tokens} out"
    )
    if answer.best is None:
        words = "undecided" if answer.undecided else "no setup tried meets it"
        console.print(f"[bold]no verdict: {words}[/bold]")
    else:
        console.print(f"[bold]cheapest that surely meets it: {_name(answer.best)}[/bold]")
        _reasons(console, answer.best)
    if answer.best_unquantised is not None:
        console.print(f"cheapest with 16-bit weights: {_name(answer.best_unquantised)}")
    for candidate in answer.undecided:
        console.print(f"cheaper but undecided: {_name(candidate)}: {escape(candidate.reason)}")
    if answer.undecided:
        console.print("one measurement settles an undecided one: its TTFT and TPOT at this load on one instance")
    if answer.rejected:
        table = plain_table("not possible or too slow", "setup", "why")
        for candidate in sorted(answer.rejected, key=lambda entry: entry.rank)[:8]:
            table.add_row(escape(candidate.setup.label), escape(candidate.reason))
        table.columns[1].justify = "left"
        console.print(table)
        if len(answer.rejected) > 8:
            console.print(f"and {len(answer.rejected) - 8} more (--json lists all)")
    for reason, labels in not_tried.items():
        console.print(escape(f"not tried: {', '.join(labels)}: {reason}"))
    for note in answer.unmeasured:
        console.print(f"depends on something unmeasured: {escape(note)}")


def _name(candidate: Candidate) -> str:
    price = "no price known" if candidate.usd_per_hour is None else f"{candidate.usd_per_hour:.2f} USD/h"
    copies = f"{candidate.instances} x " if candidate.instances > 1 else ""
    label = escape(candidate.setup.label)
    return f"{copies}({label}), {price}" if copies else f"{label}, {price}"


def _reasons(console: Console, candidate: Candidate) -> None:
    low, middle, high = candidate.low, candidate.middle, candidate.high
    if low is None or middle is None or high is None:
        return

    def spread(name: str) -> str:
        values = [getattr(load, name) for load in (low, middle, high)]
        return f"{duration(values[1])} ({duration(values[0])} to {duration(values[2])})"

    console.print(f"  TTFT p95 {spread('ttft_s')}: {_ttft_words(middle)}")
    console.print(
        f"  TPOT {spread('tpot_s')}: {middle.batch:.1f} sequences in flight (Little's law), "
        f"prefills take {middle.prefill_share:.0%} of the time"
    )
    console.print(f"  memory: {candidate.max_batch:,} sequences fit; {candidate.reason}")
    console.print(f"  times: {escape(candidate.setup.calibration.source)}")


def _ttft_words(load: Load) -> str:
    return f"prefill {duration(load.prefill_s)}, mean wait behind other prefills {duration(load.wait_s)}"


def show_comparison(plans: Iterable[Plan]) -> None:
    """Several models or devices in one table."""
    console = page()
    plans = list(plans)
    question = plans[0].question
    title = f"{question.prompt_tokens} prompt tokens, context {question.decode_context_tokens}"
    table = plain_table(
        title,
        "setup",
        "batch",
        "prefill",
        "decode step",
        "tok/s, all streams",
        "largest batch",
        "KV = weights at batch",
    )
    for plan in plans:
        table.add_row(
            escape(plan.setup.label),
            f"{plan.question.batch:,}",
            _spread(plan.prefill),
            _spread(plan.decode),
            f"{plan.decode.tokens_per_s:,.0f}",
            f"{plan.capacity.max_batch:,}" if plan.capacity.is_fitting else "does not fit",
            f"{plan.kv_equals_weights_batch:.0f}",
        )
    console.print(table)
    console.print("in brackets: 10th to 90th percentile")
    notes: dict[str, list[str]] = {}  # each said once, with the setups that it is about
    has_batches = len({plan.question.batch for plan in plans}) > 1
    for plan in plans:
        label = f"{plan.setup.label}, batch {plan.question.batch}" if has_batches else plan.setup.label
        for note in (
            *plan.notes,
            *(f"{r.phase.value}, {gap}" for r in (plan.prefill, plan.decode) for gap in r.distance),
        ):
            notes.setdefault(note, []).append(label)
    for note, labels in notes.items():
        owners = "" if len(labels) == len(plans) else f" ({'; '.join(labels)})"
        console.print(escape(f"note{owners}: {note}"))


def _spread(report: PhasePlan) -> str:
    scale, unit = (1.0, "s") if report.predicted_s >= 1.0 else (1e3, "ms")
    low, middle, high = (_ratio(value * scale) for value in (report.low_s, report.predicted_s, report.high_s))
    return f"[bold]{middle} {unit}[/bold] ({low}-{high})"


def show_accuracy(
    summaries: Iterable[ErrorSummary],
    service: Sequence[ServiceError],
    holding: Sequence[Holding],
    *,
    uncovered: int,
    left_out: int,
) -> None:
    """Errors by phase and by device."""
    console = page()
    table = plain_table(
        "error on rows the fit did not see (leave one model out)",
        "rows of",
        "rows",
        "bound, median",
        "calibrated, median",
        "p90",
        "worst",
        "worst row",
    )
    for entry in summaries:
        name = entry.group if " " in entry.group else f"[bold]{entry.group}[/bold]"
        table.add_row(
            name,
            str(entry.rows),
            f"{entry.bound_median:.1%}",
            f"[bold]{entry.median:.1%}[/bold]",
            f"{entry.p90:.1%}",
            f"{entry.worst:+.0%}",
            escape(entry.worst_label),
        )
    console.print(table)
    if holding:
        held = plain_table("80 % intervals: rows held back that they hold", "phase, held back by", "rows", "held")
        for group in holding:
            held.add_row(group.group, str(group.rows), f"{group.share:.0%}")
        console.print(held)
    if service:
        _service_table(console, service)
    if uncovered:
        console.print(f"{uncovered} rows are of software without fitted constants")
    if left_out:
        console.print(f"{left_out} rows do not describe one timed step of a known model on a known device")


def _service_table(console: Console, service: Sequence[ServiceError]) -> None:
    title = "running services, both phases together; in no fit (input/output tokens x streams)"
    table = plain_table(title, "service", "device", "", "measured", "predicted", "error", "interval")
    for entry in service:
        row = entry.row
        is_rate = row.measure == "throughput"
        cells = [f"{v:,.0f} tok/s" if is_rate else duration(v) for v in (row.measured, entry.predicted)]
        table.add_row(
            escape(row.label),
            row.device,
            row.measure,
            *cells,
            f"{entry.error:+.0%}",
            "holds" if entry.is_held else "no",
        )
    console.print(table)
    median = percentile([abs(entry.error) for entry in service], 50)
    held = sum(entry.is_held for entry in service)
    console.print(f"median {median:.0%} over {len(service)} rows; the 80 % interval holds {held} of them")


def show_list() -> None:
    """Names of models, devices, formats and software."""
    console = page()
    models = plain_table("models", "name", "parameters", "context")
    for name in model_names():
        spec = model_spec(name)
        models.add_row(name, f"{parameter_count(spec):,}", str(spec.max_context_tokens or "-"))
    console.print(models)
    devices = plain_table("devices", "name", "16-bit TFLOP/s", "GB/s", "GB", "FLOP/B", "peak / memory flag")
    for name in device_names():
        hardware = device_spec(name)
        rate = hardware.flops_per_s.get("bf16", hardware.flops_per_s.get("fp32", 0.0))
        devices.add_row(
            name,
            f"{rate / 1e12:,.4g}",
            f"{hardware.memory_bytes_per_s / 1e9:,.4g}",
            f"{hardware.memory_bytes / 1e9:,.0f}",
            f"{rate / hardware.memory_bytes_per_s:.0f}",
            _flags(hardware),
        )
    console.print(devices)
    console.print(f"weights: {', '.join(QUANTS)}")
    console.print(f"kv: {', '.join(KV_FORMATS)}")
    console.print(f"software (--stack): {', '.join(stack_names())}")


def _flags(hardware: HardwareSpec) -> str:
    peak = hardware.flag_of("flops_bf16").value
    memory = hardware.flag_of("memory_bytes_per_s").value
    return peak if peak == memory else f"{peak} / {memory}"
