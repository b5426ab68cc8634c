"""Turns outcomes into one self-contained HTML page with pictures, a CSV and a JSON of every point."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from diptych.lab.experiment import Experiment, Outcome, Point, Verdict, outcome_json

matplotlib.use("Agg")

COLOURS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed")
WORDS = {Verdict.HOLDS: "the claim holds", Verdict.FAILS: "the claim fails here", Verdict.WITHHELD: "verdict withheld"}
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--line:#8884;--soft:#888}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
section{{border-top:1px solid var(--line);padding:1rem 0}} img{{max-width:100%;background:#fff;border-radius:6px}}
table{{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}}
td,th{{padding:.15rem .7rem;text-align:right;border-bottom:1px solid var(--line)}}
td:first-child,th:first-child{{text-align:left}} .claim{{font-style:italic}} .note{{color:var(--soft);font-size:.9rem}}
.verdict{{display:inline-block;padding:.1rem .6rem;border-radius:1rem;color:#fff;font-size:.85rem}}
.holds{{background:#15803d}} .fails{{background:#b91c1c}} .withheld{{background:#6b7280}}
</style><h1>{title}</h1><p>{intro}</p><table>{facts}</table>{sections}</html>
"""


def write_report(
    folder: Path, results: Sequence[tuple[Experiment, Outcome]], *, title: str, facts: Mapping[str, str]
) -> Path:
    """Write report.html, points.csv and results.json into `folder`; returns the page's path."""
    sections = "".join(_section(experiment, outcome) for experiment, outcome in results)
    rows = "".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}" for k, v in facts.items())
    intro = (
        "Each experiment states a claim about prefill and decode, tests it here, and shows the prediction beside it."
    )
    page = folder / "report.html"
    page.write_text(PAGE.format(title=html.escape(title), intro=intro, facts=rows, sections=sections), encoding="utf-8")
    with (folder / "points.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["experiment", "series", "x", "measured", "low", "high", "predicted", "unit"])
        for experiment, outcome in results:
            for p in outcome.points:
                writer.writerow(
                    [experiment.name, p.series, p.x, p.measured, p.low, p.high, p.predicted, experiment.y_label]
                )
    everything = {"facts": dict(facts), "experiments": {e.name: outcome_json(o) for e, o in results}}
    (folder / "results.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return page


def _section(experiment: Experiment, outcome: Outcome) -> str:
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in outcome.notes)
    picture = table = ""
    if outcome.points:
        encoded = base64.b64encode(picture_png(experiment, outcome.points)).decode()
        picture = f'<img alt="{html.escape(experiment.title)}" src="data:image/png;base64,{encoded}">'
        table = _table(experiment, outcome.points)
    return (
        f'<section id="{experiment.name}"><h2>{html.escape(experiment.title)}</h2>'
        f'<p class="claim">Claim: {html.escape(experiment.claim)}.</p>'
        f'<p><span class="verdict {outcome.verdict.value}">{WORDS[outcome.verdict]}</span> {html.escape(outcome.finding)}.</p>'
        f"{picture}{notes}<details><summary>the points</summary>{table}</details></section>"
    )


def _table(experiment: Experiment, points: Sequence[Point]) -> str:
    labels = ("series", experiment.x_label, experiment.y_label, "low", "high", "predicted")
    head = "<tr>" + "".join(f"<th>{html.escape(label)}" for label in labels)
    rows = []
    for p in points:
        predicted = "" if p.predicted is None else f"{p.predicted:.4g}"
        rows.append(
            f"<tr><td>{html.escape(p.series)}<td>{p.x:g}<td>{p.measured:.4g}<td>{p.low:.4g}<td>{p.high:.4g}<td>{predicted}"
        )
    return f"<table>{head}{''.join(rows)}</table>"


def picture_png(experiment: Experiment, points: Sequence[Point]) -> bytes:
    """One experiment's plot: dots with their range are measured, dashed lines predicted."""
    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, series in enumerate(dict.fromkeys(p.series for p in points)):
        own = sorted((p for p in points if p.series == series), key=lambda p: p.x)
        colour = COLOURS[number % len(COLOURS)]
        xs, ys = [p.x for p in own], [p.measured for p in own]
        ranges = [[p.measured - p.low for p in own], [p.high - p.measured for p in own]]
        axes.errorbar(xs, ys, yerr=ranges, fmt="o-", color=colour, capsize=2, markersize=4, linewidth=1, label=series)
        predicted = [(p.x, p.predicted) for p in own if p.predicted is not None]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), "--", color=colour, alpha=0.6, label=f"{series}, predicted")
    if experiment.is_log_x:
        axes.set_xscale("log")
    if experiment.is_log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(experiment.x_label)
    axes.set_ylabel(experiment.y_label)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
