"""What engines trade, as a picture: tokens per second of a device against tokens per second of a user."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, groupby
from pathlib import Path

from matplotlib.figure import Figure

from diptych.lab.pictures import write_picture
from diptych.lab.style import GREY, OTHERS, log_axis
from diptych.sim.pareto import Point
from diptych.sim.search import Answer

MARKS = "osD^vPX*<>"  # as many as have no divisor in common with the colours


def draw(found: Answer, points: Sequence[Point], path: Path) -> None:
    """Write the picture; the ending of the name chooses the format. Raises ConfigError when it cannot be written."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    axes = figure.subplots()
    looks = zip(cycle(OTHERS), cycle(MARKS), strict=False)  # no line is known by its colour alone
    for (name, group), (colour, mark) in zip(groupby(points, key=lambda point: point.name), looks, strict=False):
        line = list(group)
        style = "--" if line[0].is_pools else "-"
        xs = [point.tokens_per_s_of_user for point in line]
        ys = [point.tokens_per_s_of_device for point in line]
        axes.plot(xs, ys, color=colour, ls=style, marker=mark, ms=5, lw=1.4, label=name)
        for point in line:
            axes.annotate(
                str(point.batch),
                (point.tokens_per_s_of_user, point.tokens_per_s_of_device),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize=7,
                color=GREY,
            )
    ask = found.ask
    if ask.limits.tpot_s is not None:
        axes.axvline(1.0 / ask.limits.tpot_s, color=GREY, lw=0.9, ls=":")
        axes.text(
            1.0 / ask.limits.tpot_s,
            0.01,
            " limit on TPOT",
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            color=GREY,
        )
    axes.set(
        title=f"{found.best.service.pool.setup.model.name}: full engines, by sequences at one time (numbers at the points)",
        xlabel="output tokens per second of a user",
        ylabel="output tokens per second of a device",
    )
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    title = "solid: both phases in one engine, dashed: two pools"
    figure.legend(fontsize=8, loc="outside lower center", ncols=2, title=title, title_fontsize=8)
    write_picture(figure, path, dpi=120)
