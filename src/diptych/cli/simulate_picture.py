"""A simulated service as a picture: what its engines did over time, how full they were, and how latencies are distributed."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from diptych.ground.bounds import counted
from diptych.lab.pictures import write_picture
from diptych.lab.style import DECODE, FAILED, GREY, PREFILL, log_axis
from diptych.sim.service import Report

MIXED = "#8a7a5c"  # steps that hold both phases
HEADROOM = 1.2  # above the highest value, for the legend
SHORTEST = 0.01  # of the shortest other latency, from which on queues are drawn: most of them are next to nothing


def draw(report: Report, path: Path) -> None:
    """Write the picture; the ending of the name chooses the format. Raises ConfigError when it cannot be written."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    (busy, filled), (lines, latency) = figure.subplots(2, 2)
    _busy(busy, report)
    _filled(filled, report)
    _line(lines, report)
    _latency(latency, report)
    figure.suptitle(f"{report.service.label}, {counted(report.n_requests, 'request', ',')}")
    write_picture(figure, path, dpi=120)


def _times(report: Report) -> list[float]:
    return [(i + 0.5) * report.timeline.bin_s for i in range(len(report.timeline.bins))]


def busy_shares(report: Report) -> list[list[float]]:
    """Of each stretch of the engines' time, by what steps held: prefill, both, decode.

    Steps count where they end: what is more than the stretch was spent in the one before.
    """
    bins, whole_s = report.timeline.bins, report.timeline.bin_s * report.service.n_engines
    parts = [[getattr(one, f"{name}_s") / whole_s for one in bins] for name in ("prefill", "mixed", "decode")]
    for place in range(len(bins) - 1, -1, -1):
        kept = min(1.0, 1.0 / max(sum(part[place] for part in parts), 1e-12))
        for part in parts:
            if place > 0:
                part[place - 1] += part[place] * (1.0 - kept)
            part[place] *= kept
    return parts


def _busy(axes: Axes, report: Report) -> None:
    parts = busy_shares(report)
    axes.stackplot(_times(report), parts, colors=(PREFILL, MIXED, DECODE), labels=("prefill", "both", "decode"))
    axes.set(title="the engines' time", xlabel="s", ylim=(0, 1.2), yticks=(0, 0.25, 0.5, 0.75, 1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=8, loc="upper right", ncols=3)


def _filled(axes: Axes, report: Report) -> None:
    bins = report.timeline.bins
    step_s = [max(one.prefill_s + one.decode_s + one.mixed_s, 1e-12) for one in bins]
    shares = [one.kv_share_s / s for one, s in zip(bins, step_s, strict=True)]
    axes.plot(_times(report), shares, color=GREY, lw=1, label="KV in use (left)")
    axes.set(title="KV pool and sequences of an engine", xlabel="s", ylim=(0, max(0.05, *shares) * HEADROOM))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    counts = axes.twinx()
    for name, colour, line in (("running", DECODE, "--"), ("waiting", FAILED, ":")):
        values = [getattr(one, f"{name}_s") / s for one, s in zip(bins, step_s, strict=True)]
        counts.plot(_times(report), values, color=colour, lw=1, ls=line, label=f"{name} (right)")
    counts.set_ylim(0, HEADROOM * counts.dataLim.y1 or 1.0)
    handles = [*axes.get_lines(), *counts.get_lines()]
    axes.legend(handles=handles, fontsize=8, loc="upper right", ncols=3)


def _line(axes: Axes, report: Report) -> None:
    bins, bin_s = report.timeline.bins, report.timeline.bin_s
    axes.plot(
        _times(report), [one.arrivals / bin_s for one in bins], color=PREFILL, lw=1, label="requests per second (left)"
    )
    axes.set(title="load and output", xlabel="s")
    axes.set_ylim(0, HEADROOM * axes.dataLim.y1 or 1.0)
    tokens = axes.twinx()
    rate = [one.output_tokens / bin_s for one in bins]
    tokens.plot(_times(report), rate, color=DECODE, lw=1, ls="--", label="output tokens per second (right)")
    tokens.set_ylim(0, HEADROOM * tokens.dataLim.y1 or 1.0)
    axes.legend(handles=[*axes.get_lines(), *tokens.get_lines()], fontsize=8, loc="upper right", ncols=2)


def _latency(axes: Axes, report: Report) -> None:
    looks = {"ttft": (PREFILL, "-"), "queue": (GREY, ":"), "tpot": (DECODE, "-"), "itl": (DECODE, ":")}
    first_s = min([report.curves[name][0][0] for name in ("ttft", "tpot", "itl") if report.curves[name]], default=0.0)
    for name, (colour, line) in looks.items():
        curve = [(value * 1e3, share) for value, share in report.curves[name] if value > SHORTEST * first_s]
        if curve:
            label = "queue" if name == "queue" else name.upper()
            axes.plot(*zip(*curve, strict=True), color=colour, ls=line, label=label)
    for name, limit_s in (("ttft", report.limits.ttft_s), ("tpot", report.limits.tpot_s)):
        if limit_s is not None:
            label = f"limit on {name.upper()}"
            axes.axvline(limit_s * 1e3, color=looks[name][0], lw=0.8, ls="--", alpha=0.6, label=label)
    axes.set(title="latencies: share of values at or below", xlabel="ms", ylim=(0, 1.02))
    log_axis(axes.xaxis)
    if axes.lines:  # nothing was answered otherwise
        axes.legend(fontsize=8, loc="best")
