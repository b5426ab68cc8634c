"""What the lab draws and says of its points: ticks where something was measured, words beside dots, findings of any times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from diptych.lab.experiment import Outcome, Roof, Verdict, quantity
from diptych.lab.experiments import lengths
from diptych.lab.report import picture
from diptych.lab.rounds import Rounds
from diptych.lab.session import choose
from diptych.lab.style import label_dots, log_ticks


def drawn(name: str, points: dict[float, float], **more: Any) -> Figure:
    """An experiment's picture of points {x: y} with narrow intervals."""
    steady = Rounds(np.array([list(points.values())] * 5))
    own = tuple(quantity("measured", x, steady.point(i), "ms") for i, x in enumerate(points))
    figure = picture(choose([name])[0], Outcome(points=own, verdict=Verdict.HOLDS, finding="x", **more))
    figure.canvas.draw()
    return figure


@pytest.mark.parametrize(
    ("name", "points", "ticks"),
    [
        ("chunked-prefill", {72: 30.0, 136: 40.0, 264: 50.0}, ["72", "136", "264"]),  # 100 and 200
        ("head-sharing", {1: 2.0, 2: 3.0, 4: 5.0}, ["1", "2", "3", "4"]),  # 1.5 heads, 2.5 and 3.5, too
        ("prefix-cache", {0: 30.0, 0.25: 20.0, 0.95: 5.0}, ["0", "0.2", "0.4", "0.6", "0.8"]),
    ],
)
def test_an_axis_has_ticks_where_something_was_measured(
    name: str, points: dict[float, float], ticks: list[str]
) -> None:
    """A reader could not tell at which chunk a dot stood."""
    axes = drawn(name, points).axes[0]
    low, high = axes.get_xlim()
    assert [tick.get_text() for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high] == ticks


def test_ticks_leave_room_for_their_numbers() -> None:
    """All points of a sweep have one, except where two would stand on one another."""
    assert log_ticks([10, 30, 100, 300, 1000, 2000, 4000, 10_000]) == [10, 30, 100, 300, 1000, 2000, 4000, 10_000]
    assert log_ticks([10, 100, 105, 10_000]) == [10, 100, 10_000]
    assert log_ticks([8]) == [8]


def test_words_of_dots_that_meet_stand_on_different_sides() -> None:
    """Decode of 64 sequences lies where prefill of 16 tokens does, and the roofline had one number on the other."""
    axes = Figure().add_subplot()
    label_dots(axes, [1.0, 12.0, 12.5, 400.0], [1.0, 8.0, 8.1, 9.0], ["1", "16", "64", "512"])
    offsets = [text.xyann for text in axes.texts]
    assert offsets[0] == offsets[1] == offsets[3] != offsets[2]


def test_parts_of_steps_have_a_panel_without_words() -> None:
    """A lab ended at its roofline: the panel of parts has no word beside its dots, and the farthest of none was asked for."""
    steady = Rounds(np.array([[1.0, 2.0]] * 5))
    units = ("Gop/s, whole steps", "Gop/s, parts of a step")
    own = (
        replace(quantity("decode", 1.0, steady.point(0), units[0]), label="1"),
        quantity("decode: MLP", 1.0, steady.point(1), units[1]),
    )
    roofs = (Roof(name="memory", slope=6.0, flat=12.0),)
    outcome = Outcome(points=own, verdict=Verdict.HOLDS, finding="x", roofs=roofs)
    figure = picture(choose(["roofline"])[0], outcome)
    figure.canvas.draw()
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["1"], []]


@pytest.mark.parametrize("ridge", [0.2, 2.0, 20.0])
def test_a_roof_rises_to_its_ridge_and_is_flat_behind(ridge: float) -> None:
    """One whose ridge lay left of all dots was drawn back and down to it, from above."""
    steady = Rounds(np.array([[1.0, 2.0]] * 5))
    own = tuple(replace(quantity("decode", x, steady.point(i), "Gop/s"), label="1") for i, x in enumerate((1.0, 10.0)))
    roofs = (Roof(name="memory", slope=12.0 / ridge, flat=12.0),)
    axes = picture(choose(["roofline"])[0], Outcome(points=own, verdict=Verdict.HOLDS, finding="x", roofs=roofs)).axes[
        0
    ]
    (roof,) = (line for line in axes.lines if line.get_label() == "roof: memory")
    xs, ys = roof.get_data()
    assert list(xs) == sorted(xs)
    assert list(ys) == [pytest.approx(min(12.0, x * 12.0 / ridge)) for x in xs]


def test_a_number_stands_above_its_dot() -> None:
    """A cold start's "11.1 s" was written across its dot, whose interval was narrower than the dot."""
    figure = drawn("cold-start", {0: 11100.0, 1: 207.0, 2: 7.5}, x_names=("a", "b", "c"))
    axes = figure.axes[0]
    for text, y in zip(axes.texts, (11100.0, 207.0, 7.5), strict=True):
        dot_top = axes.transData.transform((0.0, y))[1] + 4.5 / 72 * figure.dpi  # of nine points
        assert text.get_window_extent().y0 >= dot_top


def finding(run: Callable[[Any], Outcome], xs: list[int], times: list[float]) -> str:
    """What an experiment says of these seconds at these lengths."""
    cost = SimpleNamespace(kv_bytes=1.0, weight_bytes=1e6)
    stage = SimpleNamespace(
        lengths=lambda _: xs,
        probe=lambda _: SimpleNamespace(prompt_sampler=lambda _: None, sampler=lambda _: None),
        measure=lambda _: Rounds(np.array([times] * 5)),
        predicted_prompt_s=lambda _: None,
        predicted_s=lambda _: None,
        view=SimpleNamespace(cost=lambda _: cost),
        ceilings=SimpleNamespace(roof="memory", roof_bytes_per_s=1e10),
        cut=None,
        cached_weights="",
    )
    return run(stage).finding


def test_times_that_fall_are_no_sum_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine prefill was "linear until about -944 tokens", with 105 % of its time in the squared part."""
    monkeypatch.setattr(lengths, "_equal_work_tokens", lambda _: 1.0)
    xs = [100, 200, 300, 512]
    falls = finding(lengths._prefill_length, xs, [0.09, 0.04, 0.035, 0.04])
    assert "+ -" not in falls
    assert "are no such sum" in falls
    rises = finding(lengths._prefill_length, xs, [1e-3 * n + 1e-6 * n * n for n in xs])
    assert "1000.00 us per token + 1000.000 ns per token squared: linear until about 1,000 tokens" in rises
    assert "at 512 tokens the squared part is 34% of the time" in rises
    falls = finding(lengths._decode_position, xs[:2], [0.07, 0.05])
    assert falls == (
        "a token costs 90.000 ms (weights and launch) - 200000.0 ns per token of context (KV): "
        "no part of a step takes less than no time, so these times are no such sum"
    )
