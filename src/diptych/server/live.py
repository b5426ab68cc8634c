"""The feed of the live page: one SSE stream of frames, four a second, made only while somebody watches.

A watcher hangs a listener on the engine's events; without watchers there is none, so a step costs nothing more.
One frame serves all watchers. Times in frames are seconds of the engine's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from diptych.ground.events import Event, FinishEvent, PreemptEvent, ScheduledEvent, StepBeginEvent, StepEndEvent
from diptych.server.errors import ApiError
from diptych.server.sse import event as sse_event
from diptych.server.telemetry import Distribution, RequestLog

if TYPE_CHECKING:
    from diptych.server.state import ServerState

FRAME_S = 0.25
MAX_FRAME_STEPS = 48  # drawn steps of a frame; the rest are counted in its totals
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

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._watchers: set[asyncio.Queue[bytes | None]] = set()
        self._frame = Frame()
        self._step: dict[str, Any] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._is_closed = False

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one watcher: first what stays (`hello`), then frames until it leaves or the server ends."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(503, f"{MAX_WATCHERS} pages watch already", code="overloaded", retry_after_s=10)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)
        self._watchers.add(queue)
        if self._unsubscribe is None:
            self._frame = Frame()
            self._unsubscribe = self._state.engine.subscribe(self._on_events)
            self._state.spawn(self._tick())
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
            self._unsubscribe = None

    def _hello(self) -> dict[str, Any]:
        model, config = self._state.model, self._state.engine.config.scheduler
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
            "max_running": config.max_running_sequences,
            "max_step_tokens": config.max_step_tokens,
            "stall_budget_s": config.stall_budget_s,
            "now_s": self._state.now_s(),
        }

    def _ceilings(self) -> dict[str, float] | None:
        """Tokens per second of each phase that the machine would allow: prefill by arithmetic, decode by reading.

        The decode figure is for one sequence; with a batch of B it is up to B times that.
        """
        ceilings = self._state.ceilings
        if ceilings is None:
            return None
        return {
            "prefill_tokens_per_s": ceilings.flops_per_s / self._state.work.linear,
            "decode_steps_per_s": ceilings.read_bytes_per_s / self._state.model.weight_bytes,
        }

    def _encode(self, frame: Frame) -> dict[str, Any]:
        telemetry, counts = self._state.telemetry, self._state.engine.stats()
        steps = frame.steps
        return {
            "kind": "frame",
            "now_s": self._state.now_s(),
            "running": counts.running,
            "waiting": counts.waiting,
            "waiting_tokens": counts.waiting_tokens,
            "blocks": [counts.blocks_in_use, counts.blocks_cached, counts.blocks_free],
            "is_draining": self._state.engine.is_draining,
            "n_steps": frame.n_steps,
            "prefill_tokens": frame.prefill_tokens,
            "decode_tokens": frame.decode_tokens,
            "busy_s": frame.busy_s,
            "preempted": frame.preempted,
            "steps": steps,
            "requests": self._open_requests(),
            "finished": frame.finished[-MAX_LISTED_REQUESTS:],
            "ttft_s": _distribution(telemetry.ttft_s),
            "itl_s": _distribution(telemetry.itl_s),
            "totals": {
                "output_tokens": telemetry.output_tokens,
                "computed_tokens": telemetry.computed_tokens,
                "cached_tokens": telemetry.cached_tokens,
                "preemptions": telemetry.preemptions,
                "finished": dict(telemetry.finished),
                "refused": sum(telemetry.refused.values()),
            },
        }

    def _open_requests(self) -> list[dict[str, Any]]:
        logs = list(self._state.telemetry.logs.values())
        return [
            {
                "id": log.request_id,
                "arrival_s": log.arrival_s,
                "prompt_tokens": log.prompt_tokens,
                "computed_to": log.chunks[-1].end if log.chunks else 0,
                "output_tokens": sum(len(times) for times in list(log.token_s.values())),
                "preemptions": len(log.preempted_s),
            }
            for log in logs[:MAX_LISTED_REQUESTS]
        ]

    def _on_events(self, events: list[Event]) -> None:
        frame = self._frame
        for event in events:
            if isinstance(event, ScheduledEvent):
                self._note_chunk(event)
            elif isinstance(event, StepBeginEvent):
                self._step = {
                    "t": event.at_s,
                    "p": event.prefill_tokens,
                    "d": event.decode_tokens,
                    "chunks": [],
                    "seqs": list(event.decode_request_ids),
                }
            elif isinstance(event, StepEndEvent):
                self._note_step(frame, event)
            elif isinstance(event, PreemptEvent):
                frame.preempted.append(event.request_id)
            elif isinstance(event, FinishEvent):
                frame.finished.append({"id": event.request_id, "at_s": event.at_s, "reason": event.reason.value})

    def _note_chunk(self, event: ScheduledEvent) -> None:
        if self._step is not None:
            self._step["chunks"].append([event.request_id, event.chunk_tokens, event.cached_tokens])

    def _note_step(self, frame: Frame, event: StepEndEvent) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step["s"] = event.at_s - step["t"]
        frame.n_steps += 1
        frame.prefill_tokens += step["p"]
        frame.decode_tokens += step["d"]
        frame.busy_s += step["s"]
        # steps with prefill are the story; plain decode steps are drawn while there is room
        if len(frame.steps) < (MAX_FRAME_STEPS if not step["p"] else 2 * MAX_FRAME_STEPS):
            frame.steps.append(step)


def _distribution(distribution: Distribution) -> dict[str, Any]:
    return {"edges": distribution.edges, "counts": distribution.counts, "sum": distribution.total}


def timeline_json(log: RequestLog, *, now_s: float) -> dict[str, Any]:
    """A request's life in the order it happened; times in milliseconds since it arrived."""

    def ms(at_s: float) -> float:
        return round((at_s - log.arrival_s) * 1e3, 3)

    tokens = {str(index): [ms(at_s) for at_s in times] for index, times in sorted(log.token_s.items())}
    return {
        "id": log.request_id,
        "object": "request.timeline",
        "is_finished": log.end_s is not None,
        "prompt_tokens": log.prompt_tokens,
        "age_ms": ms(now_s),
        "end_ms": None if log.end_s is None else ms(log.end_s),
        "prefill_chunks": [
            {
                "step": chunk.step.step_id,
                "at_ms": ms(chunk.step.begin_s),
                "start": chunk.start,
                "end": chunk.end,
                "is_recompute": chunk.is_recompute,
                "step_prefill_tokens": chunk.step.prefill_tokens,
                "step_decode_tokens": chunk.step.decode_tokens,
            }
            for chunk in log.chunks
        ],
        "tokens_ms": tokens,
        "preempted_ms": [ms(at_s) for at_s in log.preempted_s],
        "shared_steps": [
            {
                "step": step.step_id,
                "at_ms": ms(step.begin_s),
                "duration_ms": round((end_s - step.begin_s) * 1e3, 3),
                "prefill_tokens": step.prefill_tokens,
                "caused_by": [name for name, _ in step.prefills if name != log.request_id],
            }
            for step, end_s in log.shared_steps
        ],
    }
