"""Turns outcomes into one self-contained HTML page with pictures, a CSV and a JSON of every point."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diptych.lab.experiment import ROOF, Experiment, Outcome, Point, Verdict, outcome_json

matplotlib.use("Agg")

COLOURS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#9f1239", "#4b5563", "#a16207")
MARKERS = "osD^vP*X"
WORDS = {Verdict.HOLDS: "the claim holds", Verdict.FAILS: "the claim fails here", Verdict.WITHHELD: "verdict withheld"}
INTRO = (
    "Each experiment states a claim about prefill and decode, tests it here, and shows the prediction beside the measurement. "
    "A measurement is the median over rounds with its 95 % interval; a verdict is withheld when an interval straddles what it "
    "has to decide, or when too many medians never settled."
)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--line:#8884;--soft:#777}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}}
section{{border-top:1px solid var(--line);padding:1rem 0}} img{{max-width:100%;background:#fff;border-radius:6px}}
table{{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}}
td,th{{padding:.15rem .7rem;text-align:right;border-bottom:1px solid var(--line)}}
td:first-child,th:first-child{{text-align:left}} .claim{{font-style:italic}} .note,li{{color:var(--soft);font-size:.9rem}}
.verdict{{display:inline-block;padding:.1rem .6rem;border-radius:1rem;color:#fff;font-size:.85rem;white-space:nowrap}}
.holds{{background:#15803d}} .fails{{background:#b91c1c}} .withheld{{background:#6b7280}}
</style><h1>{title}</h1><p>{intro}</p><table>{facts}</table><h2>Verdicts</h2><table>{summary}</table>{sections}</html>
"""
COLUMNS = ("experiment", "series", "x", "x_name", "measured", "low", "high", "predicted", "unit", "spread", "rounds")


def write_report(
    folder: Path, results: Sequence[tuple[Experiment, Outcome]], *, title: str, facts: Mapping[str, str]
) -> Path:
    """Write report.html, points.csv and results.json into `folder`; returns the page's path."""
    page = folder / "report.html"
    page.write_text(
        PAGE.format(
            title=html.escape(title),
            intro=INTRO,
            facts="".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}" for k, v in facts.items()),
            summary=_summary(results),
            sections="".join(_section(experiment, outcome) for experiment, outcome in results),
        ),
        encoding="utf-8",
    )
    with (folder / "points.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for experiment, outcome in results:
            for p in outcome.points:
                x_name = _x_name(outcome, p.x)
                writer.writerow([experiment.name, p.series, p.x, x_name, p.measured, p.low, p.high, p.predicted, p.unit,
                                 f"{p.spread:.4f}", p.samples])  # fmt: skip
    everything = {"facts": dict(facts), "experiments": {e.name: outcome_json(o) for e, o in results}}
    (folder / "results.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return page


def prediction_text(experiment: Experiment, outcome: Outcome) -> str | None:
    """How measurement and prediction agree, in words; None without predictions."""
    errors = outcome.prediction_errors
    if not errors:
        return None
    if experiment.predicts == ROOF:
        shares = sorted(1.0 + error for error in errors)
        return f"measured over {experiment.predicts}: {shares[0]:.0%} to {shares[-1]:.0%}"
    worst = max(errors, key=abs)
    return f"measured over predicted: median error {statistics.median(abs(e) for e in errors):.0%}, worst {worst:+.0%}"


def _summary(results: Sequence[tuple[Experiment, Outcome]]) -> str:
    rows = ["<tr><th>experiment<th>verdict<th>prediction<th>noise"]
    for experiment, outcome in results:
        rows.append(
            f'<tr><td><a href="#{experiment.name}">{html.escape(experiment.title)}</a>'
            f'<td><span class="verdict {outcome.verdict.value}">{WORDS[outcome.verdict]}</span>'
            f"<td>{html.escape(prediction_text(experiment, outcome) or '')}<td>{html.escape(outcome.noise)}"
        )
    return "".join(rows)


def _section(experiment: Experiment, outcome: Outcome) -> str:
    lines = [*(f"checked: {check}" for check in outcome.checks), *outcome.notes]
    notes = "".join(f"<li>{html.escape(line)}" for line in lines)
    picture = table = ""
    if outcome.points:
        encoded = base64.b64encode(picture_png(experiment, outcome)).decode()
        picture = f'<img alt="{html.escape(experiment.title)}" src="data:image/png;base64,{encoded}">'
        agreement = " · ".join(filter(None, (prediction_text(experiment, outcome), outcome.noise)))
        picture += f'<p class="note">{html.escape(agreement)}</p>'
        table = f"<details><summary>the points</summary>{_table(experiment, outcome)}</details>"
    return (
        f'<section id="{experiment.name}"><h2>{html.escape(experiment.title)}</h2>'
        f'<p class="claim">Claim: {html.escape(experiment.claim)}.</p>'
        f'<p><span class="verdict {outcome.verdict.value}">{WORDS[outcome.verdict]}</span> {html.escape(outcome.finding)}.</p>'
        f"{picture}<ul>{notes}</ul>{table}</section>"
    )


def _x_name(outcome: Outcome, x: float) -> str:
    return outcome.x_names[int(x)] if outcome.x_names else ""


def _table(experiment: Experiment, outcome: Outcome) -> str:
    labels = (
        "series",
        experiment.x_label,
        "measured",
        "95 % interval",
        experiment.predicts,
        "unit",
        "spread",
        "rounds",
    )
    rows = ["<tr>" + "".join(f"<th>{html.escape(label)}" for label in labels)]
    for p in outcome.points:
        predicted = "" if p.predicted is None else f"{p.predicted:.4g}"
        cells = (p.series, _x_name(outcome, p.x) or f"{p.x:g}", f"{p.measured:.4g}", f"{p.low:.4g} to {p.high:.4g}",
                 predicted, p.unit, f"{p.spread:.0%}", str(p.samples))  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells))
    return f"<table>{''.join(rows)}</table>"


def picture_png(experiment: Experiment, outcome: Outcome) -> bytes:
    """One experiment's plot, a panel per unit: dots with their interval are measured, what is dashed or hollow predicted."""
    units = list(dict.fromkeys(p.unit for p in outcome.points))
    figure = Figure(figsize=(8 if len(units) == 1 else 12, 4.4), dpi=110, layout="constrained")
    for number, unit in enumerate(units):
        axes = figure.add_subplot(1, len(units), number + 1)
        own = [p for p in outcome.points if p.unit == unit]
        if experiment.predicts == ROOF:
            _under_roof(axes, own)
        elif outcome.x_names:
            _bars(axes, experiment, outcome, own)
        else:
            _curves(axes, experiment, own)
        if experiment.is_log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(experiment.x_label)
        axes.set_ylabel(f"{experiment.y_label}, {unit}" if len(units) == 1 and experiment.y_label else unit)
        axes.grid(visible=True, alpha=0.25)
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curves(axes: Axes, experiment: Experiment, points: Sequence[Point]) -> None:
    if experiment.is_log_x:
        axes.set_xscale("log")
    for number, series in enumerate(dict.fromkeys(p.series for p in points)):
        own = sorted((p for p in points if p.series == series), key=lambda p: p.x)
        colour = COLOURS[number % len(COLOURS)]
        xs, ys = [p.x for p in own], [p.measured for p in own]
        ranges = [[p.measured - p.low for p in own], [p.high - p.measured for p in own]]
        marker = MARKERS[number % len(MARKERS)]
        axes.errorbar(
            xs, ys, yerr=ranges, fmt=f"{marker}-", color=colour, capsize=2, markersize=4, linewidth=1, label=series
        )
        predicted = [(p.x, p.predicted) for p in own if p.predicted is not None]
        if predicted:
            axes.plot(
                *zip(*predicted, strict=True), "--", color=colour, alpha=0.6, label=f"{series}, {experiment.predicts}"
            )


def _under_roof(axes: Axes, points: Sequence[Point]) -> None:
    """Dots in the colour of their phase and the shape of their part, under the measured roof."""
    axes.set_xscale("log")
    limits = [(p.x, p.predicted) for p in points if p.predicted is not None]
    slope, flat = max(roof / x for x, roof in limits), max(roof for _, roof in limits)
    ends = min(x for x, _ in limits) / 1.5, flat / slope, max(max(x for x, _ in limits), flat / slope) * 1.5
    axes.plot(ends, [slope * ends[0], flat, flat], color="black", linewidth=1, label="the roof: memory, arithmetic")
    phases = list(dict.fromkeys(p.series.partition(": ")[0] for p in points))
    parts = list(dict.fromkeys(p.series.partition(": ")[2] for p in points))
    for p in points:
        phase, _, part = p.series.partition(": ")
        axes.errorbar(p.x, p.measured, yerr=[[p.measured - p.low], [p.high - p.measured]], capsize=2, markersize=6,
                      fmt=MARKERS[parts.index(part)], color=COLOURS[phases.index(phase)], alpha=0.85)  # fmt: skip
    for number, phase in enumerate(phases):
        axes.plot([], [], "s", color=COLOURS[number], label=phase)
    for number, part in enumerate(parts):
        if part:
            axes.plot([], [], MARKERS[number], color="grey", label=part)


def _bars(axes: Axes, experiment: Experiment, outcome: Outcome, points: Sequence[Point]) -> None:
    xs = [p.x for p in points]
    ranges = [[p.measured - p.low for p in points], [p.high - p.measured for p in points]]
    axes.bar(xs, [p.measured for p in points], yerr=ranges, width=0.5, color=COLOURS[0], capsize=3, label="measured")
    predicted = [(p.x, p.predicted) for p in points if p.predicted is not None]
    if predicted:
        xs_predicted, ys = zip(*predicted, strict=True)
        axes.plot(
            xs_predicted, ys, "D", color=COLOURS[1], markerfacecolor="none", markersize=9, label=experiment.predicts
        )
    axes.set_xticks(range(len(outcome.x_names)), outcome.x_names)
