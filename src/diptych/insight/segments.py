"""Time to first token by part of the prompt: which segment cost what, and what the cache saved.

A chunk's measured time is charged to its tokens: a linear part, equal for every token, and an attention part that grows
with the context before the token. Cached tokens are charged nothing. The charges add up to the measured prefill time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.ground.request import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Arithmetic of one prompt token at position p: linear + attention * (p + 1) FLOPs."""

    linear: float
    attention: float

    def of_range(self, start: int, end: int) -> float:
        """Work of the tokens at positions [start, end)."""
        n_tokens = end - start
        return self.linear * n_tokens + self.attention * (n_tokens * (start + end + 1) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Prompt tokens [start, end) were computed in `seconds` of measured prefill time."""

    start: int
    end: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """One segment's tokens and its part of the prefill time."""

    name: str
    start: int
    end: int
    cached_tokens: int
    prefill_s: float


def cover(segments: Sequence[Segment], n_tokens: int) -> list[Segment]:
    """Segments that cover [0, n_tokens) without a hole: what no segment claims is the template's scaffold."""
    covered: list[Segment] = []
    position = 0
    for segment in segments:
        start, end = max(position, min(segment.start, n_tokens)), min(segment.end, n_tokens)
        if start > position:
            covered.append(Segment(name="scaffold", start=position, end=start))
        if end > start:
            covered.append(Segment(name=segment.name, start=start, end=end))
            position = end
    if position < n_tokens:
        name = "scaffold" if covered else "prompt"
        covered.append(Segment(name=name, start=position, end=n_tokens))
    return covered


def segment_costs(
    segments: Sequence[Segment], chunks: Sequence[ChunkTime], *, n_tokens: int, cached_tokens: int, work: TokenWork
) -> list[SegmentCost]:
    """Charge every chunk's seconds to the segments its tokens belong to.

    A token computed twice (after a preemption) is charged twice. Tokens [0, cached_tokens) were never computed.
    """
    covered = cover(segments, n_tokens)
    charged = [0.0] * len(covered)
    for chunk in chunks:
        total = work.of_range(chunk.start, chunk.end)
        if total <= 0.0:
            continue
        for number, segment in enumerate(covered):
            start, end = max(segment.start, chunk.start), min(segment.end, chunk.end)
            if end > start:
                charged[number] += chunk.seconds * work.of_range(start, end) / total
    return [
        SegmentCost(
            name=segment.name,
            start=segment.start,
            end=segment.end,
            cached_tokens=max(0, min(segment.end, cached_tokens) - segment.start),
            prefill_s=seconds,
        )
        for segment, seconds in zip(covered, charged, strict=True)
    ]
