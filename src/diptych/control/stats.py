"""The numbers of a core, and of the workers of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """A worker's numbers: gauges of this moment, and counters since it began.

    recomputes: requests of which not everything came that was to come, by why; recomputed_tokens: what was read again for it.
    refused: parcels that were not taken in, by why. lost_ends: prompts of which all came but the word that it was all.
    receiving, reading: requests whose keys and values are on their way here,
    or are computed here for others.
    """

    core: CoreStats
    receiving: int
    reading: int
    sent_tokens: int
    sent_bytes: int
    received_tokens: int
    received_bytes: int
    import_s: float
    export_s: float
    recomputed_tokens: int
    recomputes: Mapping[str, int]
    refused: Mapping[str, int]
    lost_ends: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker of a cluster. counts: None while it is down. deaths: how often it was lost.

    open: requests it has a part in.
    """

    name: str
    pool: str
    node: str
    pid: int
    is_up: bool
    is_draining: bool
    deaths: int
    open: int
    counts: WorkerCounts | None
