"""The numbers of a core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """Gauges of this moment, and counters since the start (prefix_*_tokens, preemptions, drafter_faults).

    running and waiting count sequences; blocks_in_use are held, blocks_cached idle (kept for the prefix index only).
    prefix_queries_tokens: prompt tokens looked up; prefix_hits_tokens: those found. A recompute counts in neither.
    """

    running: int
    waiting: int
    waiting_tokens: int
    blocks_in_use: int
    blocks_cached: int
    blocks_free: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    drafter_faults: int = 0
