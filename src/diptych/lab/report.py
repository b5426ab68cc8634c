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
from matplotlib.ticker import MaxNLocator

from diptych.lab.experiment import ROOF, Experiment, Outcome, Point, Roof, Verdict, outcome_json
from diptych.lab.style import GREY, colours_of, label_dots, linear_axis, log_axis, log_ticks, plain

matplotlib.use("Agg")

MARKERS = "osD^vP*X"
WORDS = {Verdict.HOLDS: "the claim holds", Verdict.FAILS: "the claim fails here", Verdict.WITHHELD: "verdict withheld"}
INTRO = (
    "Each experiment states a claim about prefill and decode, tests it here, and shows the prediction beside the measurement. "
    "A measurement is the median over rounds with its 95 % interval; a verdict is withheld when an interval straddles what it "
    "has to decide, or when too many medians never settled."
)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--line:#8886;--soft:light-dark(#555,#b8b8b8)}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}}
section{{border-top:1px solid var(--line);padding:1rem 0}} img{{max-width:100%;background:#fff;border-radius:6px}}
table{{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}}
td,th{{padding:.15rem .7rem;text-align:right;border-bottom:1px solid var(--line)}}
td:first-child,th:first-child,.facts td,.verdicts :is(td,th){{text-align:left}}
.claim{{font-style:italic}} .note,li{{color:var(--soft);font-size:.9rem}}
.verdict{{display:inline-block;padding:.1rem .6rem;border-radius:1rem;color:#fff;font-size:.85rem;white-space:nowrap}}
.picture{{overflow-x:auto}}
@media(max-width:40rem){{.picture img{{max-width:none;height:19rem}}
.verdicts tr{{display:grid;padding:.4rem 0;border-bottom:1px solid var(--line)}}
.verdicts td{{border:0;text-align:left;padding:.1rem 0}} .verdicts tr:first-child{{display:none}}}}
.holds{{background:#15803d}} .fails{{background:#b91c1c}} .withheld{{background:#6b7280}}
</style><h1>{title}</h1><p>{intro}</p><table class="facts">{facts}</table>
<h2>Verdicts</h2><table class="verdicts">{summary}</table>{sections}</html>
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
    plot = table = ""
    if outcome.points:
        encoded = base64.b64encode(picture_png(experiment, outcome)).decode()
        image = f'<img alt="{html.escape(experiment.title)}" src="data:image/png;base64,{encoded}">'
        plot = f'<div class="picture">{image}</div>'
        agreement = " · ".join(filter(None, (prediction_text(experiment, outcome), outcome.noise)))
        plot += f'<p class="note">{html.escape(agreement)}</p>'
        table = f"<details><summary>the points</summary>{_table(experiment, outcome)}</details>"
    return (
        f'<section id="{experiment.name}"><h2>{html.escape(experiment.title)}</h2>'
        f'<p class="claim">Claim: {html.escape(experiment.claim)}.</p>'
        f'<p><span class="verdict {outcome.verdict.value}">{WORDS[outcome.verdict]}</span> {html.escape(outcome.finding)}.</p>'
        f"{plot}<ul>{notes}</ul>{table}</section>"
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
    """One experiment's plot."""
    buffer = io.BytesIO()
    picture(experiment, outcome).savefig(buffer, format="png")
    return buffer.getvalue()


def picture(experiment: Experiment, outcome: Outcome) -> Figure:
    """A panel per unit, or per request: what has an interval is measured, what is dashed or hollow predicted."""
    units = list(dict.fromkeys(p.unit for p in outcome.points))
    figure = Figure(figsize=(8 if len(units) == 1 else 12, 4.4), dpi=110, layout="constrained")
    if experiment.is_timeline:
        _timelines(figure, experiment, outcome.points)
        return figure
    for number, unit in enumerate(units):
        axes = figure.add_subplot(1, len(units), number + 1)
        own = [p for p in outcome.points if p.unit == unit]
        if experiment.predicts == ROOF:
            _under_roof(axes, own, outcome.roofs)
        elif outcome.x_names:
            _bars(axes, experiment, outcome, own)
        else:
            _curves(axes, experiment, own)
        if experiment.is_log_y:
            log_axis(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
            linear_axis(axes.yaxis)
        axes.set_xlabel(experiment.x_label)
        axes.set_ylabel(f"{experiment.y_label}, {unit}" if len(units) == 1 and experiment.y_label else unit)
        axes.grid(visible=True, alpha=0.25)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize=8)
    return figure


def _timelines(figure: Figure, experiment: Experiment, points: Sequence[Point]) -> None:
    """A bar of time for each request, phase after phase, each on an axis of its own: what one waits for, and how long."""
    requests = list(dict.fromkeys(p.x for p in points))
    colours = colours_of(p.series for p in points)
    for number, x in enumerate(requests):
        axes = figure.add_subplot(len(requests), 1, number + 1)
        own = [p for p in points if p.x == x]
        total = sum(p.measured for p in own)
        unit, scale = ("s", 1e-3) if total >= 1000 else ("ms", 1.0)
        end = predicted_end = 0.0
        for p in own:
            length = scale * p.measured
            axes.barh(0, length, left=end, height=0.6, color=colours[p.series], label=p.series)
            end += length
            predicted_end += scale * (p.predicted or 0.0)
            if p.predicted is not None:
                mark = f"end of the phase, {experiment.predicts}" if p is own[-1] else None
                axes.plot(predicted_end, 0, "D", color="black", markerfacecolor="white", markersize=7, label=mark)
        parts = ", ".join(f"{p.series} {_milliseconds(p.measured)} = {_share(p.measured / total)}" for p in own)
        axes.set_title(f"{x:,g} {experiment.x_label}, {own[0].label}: {parts}", fontsize=10, loc="left")
        axes.set_yticks([])
        axes.set_xlim(0, 1.03 * max(end, predicted_end))
        axes.set_ylim(-0.5, 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        linear_axis(axes.xaxis)
        axes.grid(visible=True, axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"{unit} {experiment.y_label}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)


def _milliseconds(value: float) -> str:
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def _share(value: float) -> str:
    return f"{value:.0%}" if 0.01 <= value <= 0.99 else f"{value:.1%}"


def _curves(axes: Axes, experiment: Experiment, points: Sequence[Point]) -> None:
    colours = colours_of(p.series for p in points)
    for number, (series, colour) in enumerate(colours.items()):
        own = sorted((p for p in points if p.series == series), key=lambda p: p.x)
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
    if experiment.is_log_x:
        log_axis(axes.xaxis, log_ticks(p.x for p in points))
    else:
        linear_axis(axes.xaxis, [p.x for p in points])


def _under_roof(axes: Axes, points: Sequence[Point], roofs: Sequence[Roof]) -> None:
    """Dots in the colour of their phase and the shape of their part, under the measured roofs; steps say their batch."""
    shown = [*(p.x for p in points), *(roof.flat / roof.slope for roof in roofs)]
    least, most = min(shown) / 1.5, max(shown) * 1.8
    for roof, line in zip(roofs, ("-", "--", ":"), strict=False):
        ends = least, roof.flat / roof.slope, most
        axes.plot(
            ends, [roof.slope * least, roof.flat, roof.flat], line, color="black", lw=1, label=f"roof: {roof.name}"
        )
    phases = colours_of(p.series.partition(": ")[0] for p in points)
    parts = list(dict.fromkeys(p.series.partition(": ")[2] for p in points))
    for p in points:
        phase, _, part = p.series.partition(": ")
        axes.errorbar(p.x, p.measured, yerr=[[p.measured - p.low], [p.high - p.measured]], capsize=2,
                      markersize=5 if part else 8, fmt=MARKERS[parts.index(part)], color=phases[phase],
                      alpha=0.85, markerfacecolor="none" if part else phases[phase])  # fmt: skip
    whole = [p for p in points if p.label]
    label_dots(axes, [p.x for p in whole], [p.measured for p in whole], [p.label for p in whole])
    for phase, colour in phases.items():
        axes.plot([], [], MARKERS[0], color=colour, markersize=8, label=phase)
    for number, part in enumerate(parts):
        if part:
            axes.plot([], [], MARKERS[number], color=GREY, markerfacecolor="none", label=part)
    log_axis(axes.xaxis)


def _bars(axes: Axes, experiment: Experiment, outcome: Outcome, points: Sequence[Point]) -> None:
    xs = [p.x for p in points]
    ranges = [[p.measured - p.low for p in points], [p.high - p.measured for p in points]]
    # a time that is one phase's has its colour
    colour = next(iter(colours_of(f"{p.series} {experiment.y_label}" for p in points).values()))
    ys = [p.measured for p in points]
    above = 7 if experiment.is_log_y else 3  # points: a dot is larger than a narrow interval
    if experiment.is_log_y:  # a bar's length says nothing on a logarithmic axis
        axes.errorbar(xs, ys, yerr=ranges, fmt="o", markersize=9, color=colour, capsize=3, label="measured")
        axes.set_xlim(-0.5, len(outcome.x_names) - 0.5)
    else:
        axes.bar(xs, ys, yerr=ranges, width=0.5, color=colour, capsize=3, label="measured")
    axes.margins(y=0.15)
    for p in points:
        text = _milliseconds(p.measured) if p.unit == "ms" else plain(float(f"{p.measured:.3g}"))
        axes.annotate(
            text, (p.x, p.high), xytext=(0, above), textcoords="offset points", ha="center", va="bottom", fontsize=9
        )
    predicted = [(p.x, p.predicted) for p in points if p.predicted is not None]
    if predicted:
        xs, ys = (list(values) for values in zip(*predicted, strict=True))
        axes.plot(xs, ys, "D", color="black", markerfacecolor="none", markersize=9, label=experiment.predicts)
    axes.set_xticks(range(len(outcome.x_names)), outcome.x_names)
