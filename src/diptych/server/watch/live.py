"""The feed of the live page: one SSE stream of frames, four a second, made only while somebody watches.

A watcher hangs a listener on the engine's events; without watchers there is none, so a step costs nothing more.
One frame serves all watchers. Times in frames are seconds of the engine's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from diptych.compute.ceilings import Ceilings
from diptych.control.stats import WorkerStats
from diptych.engine.cost_view import CostView
from diptych.ground.events import Event, PreemptEvent
from diptych.ground.shape import StepShape
from diptych.insight.segments import TokenWork
from diptych.metrics import RequestRecord, StepRecord
from diptych.server.desk import Desk
from diptych.server.http.errors import ApiError
from diptych.server.http.sse import event as sse_event
from diptych.server.watch.metrics_export import ServedModel
from diptych.server.watch.telemetry import LiveHistogram
from diptych.sim.frames import request_row, step_row, token_counts

FRAME_S = 0.25
MAX_FRAME_STEPS = 48  # drawn steps of a frame; of what comes behind them, decode of the same sequences is drawn as one
MAX_WATCHERS = 32
MAX_LISTED_REQUESTS = 64


class Frame:
    """What happened since the last frame. Written on the engine's thread, taken on the event loop."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.finished: list[dict[str, Any]] = []
        self.n_steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.busy_s = 0.0
        self.preempted: list[str] = []


class LiveFeed:
    """Frames for any number of watchers. `watch` is used on one event loop."""

    def __init__(
        self,
        desk: Desk,
        model: ServedModel,
        *,
        work: TokenWork,
        view: CostView | None,
        ceilings: Ceilings | None,
        keeps_minutes: bool,
    ) -> None:
        """keeps_minutes: what would have been can be asked."""
        self._keeps_minutes = keeps_minutes
        self._desk = desk
        self._model = model
        self._work = work
        self._view = view
        self._machine = ceilings
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._frame = Frame()
        self._unsubscribe: Callable[[], None] | None = None
        self._is_closed = False

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one watcher: first what stays (`hello`), then frames until it leaves or the server ends.

        Raises ApiError 503 for one too many, before anything is answered.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(503, f"{MAX_WATCHERS} pages watch already", code="overloaded", retry_after_s=10)
        return self._frames()

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)
        self._watchers.add(queue)
        if self._unsubscribe is None:
            self._frame = Frame()
            self._unsubscribe = self._desk.engine.subscribe(self._on_events)
            self._desk.engine.engine.book.on_step.append(self._on_step)
            self._desk.telemetry.on_record.append(self._on_record)
            self._desk.spawn(self._tick())
        try:
            yield sse_event(self._hello())
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            self._watchers.discard(queue)

    def close(self) -> None:
        """End every stream (the server is going down)."""
        self._is_closed = True
        for queue in self._watchers:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _tick(self) -> None:
        while self._watchers and not self._is_closed:
            await asyncio.sleep(FRAME_S)
            frame, self._frame = self._frame, Frame()
            encoded = sse_event(self._encode(frame))
            for queue in self._watchers:
                if not queue.full():  # a slow watcher misses frames, nobody waits for it
                    queue.put_nowait(encoded)
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._desk.engine.engine.book.on_step.remove(self._on_step)
            self._desk.telemetry.on_record.remove(self._on_record)
            self._unsubscribe = None

    def _hello(self) -> dict[str, Any]:
        model, config = self._model, self._desk.engine.config.scheduler
        return {
            "kind": "hello",
            "model": model.name,
            "backend": model.backend,
            "weights": model.weights,
            "kv": model.kv,
            "version": model.version,
            "parameters": model.n_parameters,
            "blocks": model.n_blocks,
            "block_tokens": model.block_tokens,
            "context_tokens": model.max_context_tokens,
            "load_s": model.load_s,
            "ceilings": self._ceilings(),
            "max_running": self._desk.engine.engine.core.max_running_sequences,
            "max_step_tokens": config.max_step_tokens,
            "stall_budget_s": config.stall_budget_s,
            "keeps_minutes": self._keeps_minutes,
            "now_s": self._desk.now_s(),
            **self._distributions(),
        }

    def _ceilings(self) -> dict[str, float] | None:
        """Tokens per second of each phase that the machine would allow: prefill by arithmetic, decode by reading.

        The decode figure is for one sequence; with a batch of B it is up to B times that. Of experts it reads those that are
        chosen, and of weights that layers share all for each of them.
        """
        ceilings = self._machine
        if ceilings is None or self._view is None:
            return None
        weight_bytes = self._view.cost(StepShape.decode(batch=1, context_tokens=1)).weight_bytes
        return {
            "prefill_tokens_per_s": ceilings.flops_per_s / self._work.linear,
            "decode_steps_per_s": ceilings.roof_bytes_per_s / weight_bytes,
        }

    def _encode(self, frame: Frame) -> dict[str, Any]:
        telemetry, counts = self._desk.telemetry, self._desk.engine.stats()
        steps = frame.steps
        return {
            "kind": "frame",
            "now_s": self._desk.now_s(),
            "running": counts.running,
            "waiting": counts.waiting,
            "waiting_tokens": counts.waiting_tokens,
            "blocks": [counts.blocks_in_use, counts.blocks_cached, counts.blocks_free],
            "is_draining": self._desk.engine.is_draining,
            "workers": [_worker(one) for one in self._desk.engine.workers()],
            "n_steps": frame.n_steps,
            "prefill_tokens": frame.prefill_tokens,
            "decode_tokens": frame.decode_tokens,
            "busy_s": frame.busy_s,
            "preempted": frame.preempted,
            "steps": steps,
            "n_requests": len(telemetry.records),
            "requests": self._open_requests(),
            "finished": frame.finished[-MAX_LISTED_REQUESTS:],
            **self._distributions(),
            "totals": {
                "output_tokens": telemetry.output_tokens,
                "computed_tokens": telemetry.computed_tokens,
                "cached_tokens": telemetry.cached_tokens,
                "transferred_tokens": telemetry.transferred_tokens,
                "preemptions": telemetry.preemptions,
                "finished": dict(telemetry.finished),
                "refused": telemetry.refused.get("503", 0),
                "rejected": sum(n for status, n in telemetry.refused.items() if status.startswith("4")),
            },
        }

    def _distributions(self) -> dict[str, Any]:
        """Since the server's start; in `hello`, what a page takes off for its own time."""
        telemetry = self._desk.telemetry
        return {"ttft_s": _distribution(telemetry.ttft_s), "itl_s": _distribution(telemetry.itl_s)}

    def _open_requests(self) -> list[dict[str, Any]]:
        records = list(self._desk.telemetry.records.values())
        return [request_row(one) for one in records[:MAX_LISTED_REQUESTS]]

    def _on_events(self, events: list[Event]) -> None:
        self._frame.preempted += [event.request_id for event in events if isinstance(event, PreemptEvent)]

    def _on_record(self, record: RequestRecord) -> None:
        """A request is over, with all its choices."""
        reasons = ", ".join(dict.fromkeys(reason.value for reason in record.reasons if reason is not None))
        ended = {"id": record.request_id, "at_s": record.end_s, "reason": reasons}
        self._frame.finished.append(ended | token_counts(record))

    def _on_step(self, step: StepRecord) -> None:
        frame, shape = self._frame, step.shape
        frame.n_steps += 1
        frame.prefill_tokens += shape.prefill_tokens
        frame.decode_tokens += step.decode_tokens
        frame.busy_s += step.time_s
        last = frame.steps[-1] if len(frame.steps) >= MAX_FRAME_STEPS else None
        if last is not None and not shape.prefill_tokens and not last["p"] and last["seqs"] == step.decode_request_ids:
            last["n"] += 1
            last["s"] = step.end_s - last["t"]
            last["d"] += step.decode_tokens
            last["g"] = [last["g"][0] + step.drafted_tokens, last["g"][1] + step.accepted_tokens]
        elif len(frame.steps) < 2 * MAX_FRAME_STEPS:
            frame.steps.append({"n": 1} | step_row(step))


def _worker(one: WorkerStats) -> dict[str, Any]:
    row = {"name": one.name, "pool": one.pool, "is_up": one.is_up, "is_draining": one.is_draining, "deaths": one.deaths}
    if one.counts is None:
        return row | {"is_up": False, "sent_bytes": 0, "received_bytes": 0}
    core = one.counts.core
    return row | {
        "running": core.running,
        "waiting": core.waiting,
        "kv_use": core.blocks_in_use / max(1, core.blocks_in_use + core.blocks_cached + core.blocks_free),
        "reading": one.counts.reading,
        "receiving": one.counts.receiving,
        "sent_bytes": one.counts.sent_bytes,
        "received_bytes": one.counts.received_bytes,
        "recomputed_tokens": one.counts.recomputed_tokens,
    }


def _distribution(distribution: LiveHistogram) -> dict[str, Any]:
    return {"edges": distribution.edges, "counts": distribution.counts, "sum": distribution.total}
