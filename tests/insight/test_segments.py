from __future__ import annotations

import itertools

import pytest

from diptych.ground.request import Segment
from diptych.insight.segments import ChunkTime, TokenWork, cover, segment_costs

WORK = TokenWork(linear=100.0, attention=1.0)


def seg(name: str, start: int, end: int) -> Segment:
    return Segment(name=name, start=start, end=end)


def test_charges_add_up_to_the_measured_time_for_any_cut_of_the_prompt() -> None:
    """The whole point of the account: nothing of TTFT is lost between the segments."""
    segments = [seg("system", 0, 10), seg("turn 1 user", 10, 25), seg("new message", 25, 40)]
    for cuts in ([0, 40], [0, 7, 40], [0, 10, 11, 39, 40], list(range(41))):
        chunks = [ChunkTime(start=a, end=b, seconds=0.5 + a) for a, b in itertools.pairwise(cuts)]
        costs = segment_costs(segments, chunks, n_tokens=40, cached_tokens=0, work=WORK)
        assert sum(cost.prefill_s for cost in costs) == pytest.approx(sum(chunk.seconds for chunk in chunks))


def test_attention_makes_late_tokens_dearer_than_early_ones() -> None:
    """Two halves of one chunk: the second sees more context; the shares follow linear + attention * position."""
    segments = [seg("first", 0, 50), seg("second", 50, 100)]
    costs = segment_costs(
        segments, [ChunkTime(start=0, end=100, seconds=1.0)], n_tokens=100, cached_tokens=0, work=WORK
    )
    first = sum(100 + position + 1 for position in range(50))
    second = sum(100 + position + 1 for position in range(50, 100))
    assert costs[0].prefill_s == pytest.approx(first / (first + second))
    assert costs[1].prefill_s == pytest.approx(second / (first + second))


def test_cached_tokens_are_counted_where_they_stand_and_charged_nothing() -> None:
    segments = [seg("system", 0, 32), seg("new message", 32, 48)]
    costs = segment_costs(
        segments, [ChunkTime(start=40, end=48, seconds=2.0)], n_tokens=48, cached_tokens=40, work=WORK
    )
    assert [(cost.name, cost.cached_tokens, cost.prefill_s) for cost in costs] == [
        ("system", 32, 0.0),
        ("new message", 8, 2.0),
    ]


def test_tokens_that_no_segment_claims_are_the_scaffold() -> None:
    covered = cover([seg("a", 2, 4), seg("b", 6, 8)], 10)
    assert [(one.name, one.start, one.end) for one in covered] == [
        ("scaffold", 0, 2),
        ("a", 2, 4),
        ("scaffold", 4, 6),
        ("b", 6, 8),
        ("scaffold", 8, 10),
    ]
    assert [one.name for one in cover([], 5)] == ["prompt"]


def test_a_recomputed_chunk_is_charged_again() -> None:
    """After a preemption the client waited for those tokens twice, and the account says so."""
    chunks = [ChunkTime(start=0, end=10, seconds=1.0), ChunkTime(start=0, end=20, seconds=3.0)]
    costs = segment_costs([seg("a", 0, 10), seg("b", 10, 20)], chunks, n_tokens=20, cached_tokens=0, work=WORK)
    assert sum(cost.prefill_s for cost in costs) == pytest.approx(4.0)
    assert costs[0].prefill_s > 2.0
