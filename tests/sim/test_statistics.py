"""Streamed statistics against exact ones."""

from __future__ import annotations

import random

import pytest

from diptych.metrics import distribution
from diptych.sim.statistics import ERROR, N_BINS, Stream, Timeline


@pytest.mark.parametrize(
    "draw", [lambda rng: rng.lognormvariate(-3, 2), lambda rng: rng.uniform(0, 5), lambda rng: 0.25]
)
def test_percentiles_are_within_half_a_percent(draw: object) -> None:
    """Of a value at the rank; with 20,000 values neighbours lie closer than that."""
    rng = random.Random(1)
    values = [draw(rng) for _ in range(20_000)]  # type: ignore[operator]
    stream = Stream()
    stream.add(values)
    found, exact = stream.distribution(), distribution(values)
    assert found is not None
    assert exact is not None
    assert (found.n, found.min, found.max) == (exact.n, exact.min, exact.max)
    assert found.mean == pytest.approx(exact.mean)
    for name in ("p50", "p90", "p95", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1.2 * ERROR), name
    assert len(stream._buckets) < 4000
    assert stream.shares()[-1][1] == 1.0


@pytest.mark.parametrize("n", [1, 2, 3, 20])
def test_few_values_have_the_percentiles_that_a_server_says(n: int) -> None:
    """Of two requests the 99th percentile was the quicker one, and of twenty it stood below the slowest by a rank."""
    values = [0.5 * 1.5**i for i in range(n)]
    stream = Stream()
    stream.add(values)
    found, exact = stream.distribution(), distribution(values)
    assert found is not None
    assert exact is not None
    for name in ("p50", "p90", "p95", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1.2 * ERROR), name


def test_zeros_count_and_nothing_is_none() -> None:
    """Queues are often empty: a logarithm of zero must not be asked for."""
    stream = Stream()
    assert stream.distribution() is None
    stream.add([0.0] * 60 + [1.0] * 40)
    found = stream.distribution()
    assert found is not None
    assert (found.min, found.p50, found.p90) == (0.0, 0.0, pytest.approx(1.0, rel=ERROR))
    assert stream.shares()[0] == (0.0, 0.6)


def test_a_timeline_keeps_its_length_and_loses_nothing() -> None:
    """A day at one second a stretch would be 86,400; joining neighbours keeps every count in its place."""
    timeline = Timeline()
    for at_s in range(0, 86_400, 7):
        timeline.at(float(at_s)).arrivals += 1
    assert len(timeline.bins) <= N_BINS
    assert timeline.bin_s == 256.0
    assert sum(one.arrivals for one in timeline.bins) == len(range(0, 86_400, 7))
    assert {one.arrivals for one in timeline.bins[:-1]} <= {36, 37}
