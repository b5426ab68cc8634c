"""One look for every picture: a colour for each phase wherever it is drawn, plain numbers on axes, dots that say what they are.

Matplotlib only, no engine: the planner's picture uses it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

PREFILL, DECODE = "#c77d1a", "#2f78b7"  # those of the live page, too
FAILED, GREY = "#b91c1c", "#777777"
OTHERS = ("#047857", "#7c3aed", "#0e7490", "#be185d", "#4d7c0f", "#475569", "#a16207")
# words of a series that is one phase's time: what waits for a prompt, and what runs beside it
PHASE_WORDS = (
    ("prefill", PREFILL),
    ("ttft", PREFILL),
    ("decode", DECODE),
    ("running stream", DECODE),
    ("tpot", DECODE),
    ("with the cache", DECODE),  # a token from the cache is a decode step, one without it a prefill of all before it
    ("recomputing", PREFILL),
)
TICK_SHARE, LABEL_SHARE = 0.05, 0.1  # of a logarithmic axis: what a tick's number takes, and a dot's word
LABEL_SIDES = (("left", (5, -9)), ("right", (-5, 5)), ("left", (5, 5)), ("right", (-5, -9)))  # of a dot, in points
PARTS = {"linear": "#64748b", "attention": "#a16207", "launch": "#cbd5e1", "link": "#0e7490"}  # of a step: no phase


def colours_of(series: Iterable[str]) -> dict[str, str]:
    """A colour for each series: the phase's where the name tells one, else one of its own."""
    found: dict[str, str] = {}
    free = iter(OTHERS * 3)
    for name in dict.fromkeys(series):
        phase = next((colour for word, colour in PHASE_WORDS if word in name.lower()), None)
        found[name] = phase or next(free)
    return found


def plain(value: float, _: object = None) -> str:
    """A number as a reader would write it: 0.5, 20, 1,024, 20k."""
    if value >= 10_000:
        for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def log_axis(axis: Axis, values: Sequence[float] = ()) -> None:
    """A logarithmic axis with plain ticks: at `values` (powers of two of a batch), else at 1, 2, 5 or whole decades."""
    axes: Any = axis.axes
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    if values:
        axis.set_major_locator(FixedLocator(list(values)))
    else:
        low, high = sorted(axis.get_view_interval())
        decades = high / max(low, 1e-30)
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2e3 else (1.0,), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(plain))


def log_ticks(values: Iterable[float]) -> list[float]:
    """Of measured values (above 0) those that have room for a tick of their own on a logarithmic axis over all of them."""
    ordered = sorted(set(values))
    room = (ordered[-1] / ordered[0]) ** TICK_SHARE
    ticks = ordered[:1]
    for value in ordered[1:]:
        if value > ticks[-1] * room:
            ticks.append(value)
    return ticks


def linear_axis(axis: Axis, values: Sequence[float] = ()) -> None:
    """A linear axis with the same plain numbers; ticks stand at whole ones where all `values` are whole."""
    if values and all(value == int(value) for value in values):
        axis.set_major_locator(MaxNLocator("auto", integer=True))
    axis.set_major_formatter(FuncFormatter(plain))


def label_dots(axes: Axes, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str], **style: Any) -> None:
    """A small word beside each dot, of positive x and y on logarithmic axes: of two that nearly meet, each on another side."""
    if not xs:
        return
    x_room, y_room = ((max(values) / min(values)) ** LABEL_SHARE for values in (xs, ys))
    for number, (x, y, text) in enumerate(zip(xs, ys, texts, strict=True)):
        near = sum(
            max(x, other_x) <= x_room * min(x, other_x) and max(y, other_y) <= y_room * min(y, other_y)
            for other_x, other_y in zip(xs[:number], ys[:number], strict=True)
        )
        side, offset = LABEL_SIDES[near % len(LABEL_SIDES)]
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", ha=side, fontsize=7.5, **style)
