"""The picture of a load run: when each request ran, how latencies are distributed, how fast tokens came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diptych.ground.bounds import counted
from diptych.lab.load import SentRequest
from diptych.lab.pictures import write_picture
from diptych.lab.style import DECODE, FAILED, PREFILL, linear_axis, log_axis

WAIT, STREAM = PREFILL, DECODE


def draw(outcomes: Sequence[SentRequest], summary: dict[str, Any], path: Path) -> None:
    """Write the picture; the ending of the name chooses the format. Raises ConfigError when it cannot be written."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    (runs, rate), (first, between) = figure.subplots(2, 2)
    _draw_runs(runs, outcomes)
    draw_rate(rate, outcomes)
    answered = [one for one in outcomes if one.error is None]
    _draw_share(first, [one.ttft_s for one in answered if one.ttft_s is not None], "time to first token, ms", WAIT)
    gaps = [b - a for one in answered for a, b in zip(one.event_s, one.event_s[1:], strict=False)]
    _draw_share(between, gaps, "inter-token latency, ms", STREAM)
    n_failed = len(outcomes) - len(answered)
    figure.suptitle(
        f"{counted(len(outcomes), 'request')}, {n_failed} failed, {summary['output_tokens_per_s'] or 0:.0f} output tokens/s",
        fontsize=11,
    )
    write_picture(figure, path, dpi=110)


def _draw_runs(axes: Axes, outcomes: Sequence[SentRequest]) -> None:
    for one in outcomes:
        if one.error is not None:
            axes.plot([one.due_s], [one.number], marker="x", color=FAILED, markersize=4)
            continue
        first_s = one.event_s[0] if one.event_s else one.end_s
        axes.hlines(one.number, one.due_s, first_s, color=WAIT, linewidth=1.5)
        axes.hlines(one.number, first_s, one.end_s, color=STREAM, linewidth=1.5)
    axes.set(title="each request: due to first token, then decode", xlabel="s", ylabel="request")


def draw_rate(axes: Axes, outcomes: Sequence[SentRequest]) -> None:
    """Events per second from the start of the load to the last of them, as bars whose areas are the numbers of events."""
    moments = [moment for one in outcomes for moment in one.event_s]
    last_s = max(moments, default=0.0)
    if last_s > 0:
        bins = max(10, min(60, int(last_s)))  # narrower ones would show single steps of a large batch
        axes.hist(moments, bins=bins, range=(0.0, last_s), weights=[bins / last_s] * len(moments), color=STREAM)
    axes.set(title="output events per second", xlabel="s", ylabel="events/s")


def _draw_share(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    ordered = sorted(values)
    if ordered:
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        axes.plot([value * 1e3 for value in ordered], shares, color=colour)
        for share, side in ((0.5, "center"), (0.95, "top"), (0.99, "bottom")):  # the last two would lie on each other
            axes.axhline(share, color="#999999", linewidth=0.5)
            at = ("axes fraction", "data")
            axes.annotate(f" p{100 * share:.0f}", (1.0, share), xycoords=at, fontsize=7, va=side)
        if ordered[-1] > 20 * max(ordered[0], 1e-6):
            log_axis(axes.xaxis)
        else:
            linear_axis(axes.xaxis)
    axes.set(title="share of values at or below", xlabel=label, ylim=(0, 1.02))
