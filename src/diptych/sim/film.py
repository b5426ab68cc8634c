"""The first minute of one simulated engine as the live page's feed, frame by frame.

The file is the text that a server's `/live` sends, so the page opens it as it opens a feed that was kept with
`curl -N http://localhost:8000/live > steps.txt`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from typing import Any, TextIO

from diptych.cost.setup import Setup
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import ArrivalEvent, Event, FinishEvent, PreemptEvent, TokenEvent
from diptych.metrics import EventBook, StepRecord
from diptych.sim.engine import SimulatedEngine
from diptych.sim.frames import request_row, step_row, token_counts

FILMED_S = 60.0
FRAME_S = 0.25
EDGES_S = tuple(1e-3 * 2.0**i for i in range(16))


class Film:
    """Told of one engine's events and steps; writes a frame a quarter of a second."""

    def __init__(self, file: TextIO, setup: Setup, engine: SimulatedEngine) -> None:
        self._file = file
        self._engine = engine
        self._open: dict[str, None] = {}
        self._next_s = 0.0
        self._totals = dict.fromkeys(
            ("output_tokens", "computed_tokens", "cached_tokens", "transferred_tokens", "preemptions"), 0
        )
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._ttft, self._itl = _histogram(), _histogram()
        self._last_token_s: dict[str, float] = {}
        self._frame = _empty()
        self._write(_hello(setup, engine.core.config, engine.core.block_config))

    @property
    def is_over(self) -> bool:
        """Whether the minute has passed."""
        return self._engine.clock.now_s() > FILMED_S

    def on_events(self, events: list[Event]) -> None:
        """Before the records of what ended are taken away."""
        for event in events:
            if isinstance(event, ArrivalEvent):
                self._open[event.request_id] = None
            elif isinstance(event, TokenEvent):
                self._token(event)
            elif isinstance(event, PreemptEvent):
                self._frame["preempted"].append(event.request_id)
                self._totals["preemptions"] += 1
            elif isinstance(event, FinishEvent):
                self._open.pop(event.request_id, None)
                self._last_token_s.pop(event.request_id, None)
                self._finished[event.reason.value] += 1
                record = self._book.records[event.request_id]
                self._totals["computed_tokens"] += record.computed_tokens
                self._totals["cached_tokens"] += record.cached_tokens
                self._totals["transferred_tokens"] += record.transferred_tokens
                ended = {"id": event.request_id, "at_s": event.at_s, "reason": event.reason.value}
                self._frame["finished"].append(ended | token_counts(record))

    def on_step(self, step: StepRecord) -> None:
        """A step ended."""
        frame = self._frame
        frame["n_steps"] += 1
        frame["prefill_tokens"] += step.shape.prefill_tokens
        frame["decode_tokens"] += step.decode_tokens
        frame["busy_s"] += step.time_s
        frame["steps"].append(step_row(step))
        self._open |= dict.fromkeys(step.decode_request_ids)  # one that another engine has read came without a word
        if step.end_s >= self._next_s:
            self.close(step.end_s)

    @property
    def _book(self) -> EventBook:
        return self._engine.book

    def _token(self, event: TokenEvent) -> None:
        self._totals["output_tokens"] += 1
        before = self._last_token_s.get(event.request_id)
        record = self._book.records[event.request_id]
        if before is not None:
            _count(self._itl, event.at_s - before)
        elif event.position == 0:
            _count(self._ttft, event.at_s - record.arrival_s)
        self._last_token_s[event.request_id] = event.at_s

    def close(self, now_s: float) -> None:
        """Write what happened since the last frame."""
        stats, records = self._engine.core.stats(), self._book.records
        known = [records[request_id] for request_id in self._open if request_id in records]
        self._write(
            {
                "kind": "frame",
                "now_s": now_s,
                "running": stats.running,
                "waiting": stats.waiting,
                "waiting_tokens": stats.waiting_tokens,
                "blocks": [stats.blocks_in_use, stats.blocks_cached, stats.blocks_free],
                "is_draining": False,
                **self._frame,
                "requests": [request_row(one) for one in known],
                "ttft_s": self._ttft,
                "itl_s": self._itl,
                "totals": self._totals | {"finished": self._finished, "refused": 0, "rejected": 0},
            }
        )
        self._frame = _empty()
        self._next_s = (math.floor(now_s / FRAME_S) + 1) * FRAME_S

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n")


def _hello(setup: Setup, config: SchedulerConfig, blocks: BlockConfig) -> dict[str, Any]:
    return {
        "kind": "hello",
        "model": setup.model.name,
        "backend": f"simulated, {setup.hardware.name}",
        "weights": setup.quant.name,
        "kv": setup.kv.name,
        "version": "simulated",
        "parameters": None,
        "blocks": blocks.n_blocks,
        "block_tokens": blocks.block_tokens,
        "context_tokens": config.max_context_tokens,
        "load_s": None,
        "ceilings": None,
        "max_running": config.max_running_sequences,
        "max_step_tokens": config.max_step_tokens,
        "stall_budget_s": config.stall_budget_s,
        "now_s": 0.0,
    }


def _empty() -> dict[str, Any]:
    counts: dict[str, Any] = {"n_steps": 0, "prefill_tokens": 0, "decode_tokens": 0, "busy_s": 0.0}
    return counts | {"preempted": [], "steps": [], "finished": []}


def _histogram() -> dict[str, Any]:
    return {"edges": EDGES_S, "counts": [0] * (len(EDGES_S) + 1), "sum": 0.0}


def _count(histogram: dict[str, Any], value: float) -> None:
    histogram["counts"][bisect_left(EDGES_S, value)] += 1
    histogram["sum"] += value
