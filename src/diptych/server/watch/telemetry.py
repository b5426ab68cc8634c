"""Counts and distributions of a running server, folded from the engine's events and from finished requests.

When the engine has nothing to do, they balance: prompt tokens = computed + cached + transferred + dropped; requests
taken = finished + aborted + failed; blocks in use = 0.

Owns the numbers that `/metrics` shows. `on_events` runs on the engine's thread, `on_finished` on the event loop; each
field is written by one of the two only, so nothing is locked. Durations come from `diptych.metrics` or from event times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from diptych.ground.events import (
    ArrivalEvent,
    DraftEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    ScheduledEvent,
    StateEvent,
    StepBeginEvent,
    Timings,
    TokenEvent,
    TransferEvent,
)
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request
from diptych.metrics import EventBook, RequestRecord, StepRecord

# vLLM's edges, with finer ones below, because a small model on a CPU answers within a millisecond
TTFT_EDGES_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_EDGES_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_EDGES_S = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
LAG_EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
STEP_TOKEN_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_EDGES = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip


class LiveHistogram:
    """A histogram: counts between fixed edges, their number and their sum."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(float(edge) for edge in edges)
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value; a value equal to an edge belongs below it."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    @property
    def n_values(self) -> int:
        """How many values were added."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Average of the values; 0 for none."""
        n_values = self.n_values
        return self.total / n_values if n_values else 0.0


class Telemetry:
    """Everything counted since the server started, and the record of every open request.

    book: the engine's, which has folded a batch of events before `on_events` gets it.
    """

    def __init__(self, book: EventBook) -> None:
        self._book = book
        book.on_step.append(self._on_step)
        # written on the engine's thread
        self.output_tokens = 0
        self.states = 0  # prompts read for an embedding or a score
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.transferred_tokens = 0
        self.dropped_tokens = 0  # of prompts whose request ended before they were read
        self.prompt_tokens = 0
        self.requests_taken = 0
        self.outcomes = {"finished": 0, "aborted": 0, "failed": 0}
        self.finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self.request_prompt_tokens = LiveHistogram(TOKEN_EDGES)
        self.request_output_tokens = LiveHistogram(TOKEN_EDGES)
        self.request_max_tokens = LiveHistogram(TOKEN_EDGES)
        self.request_longest_tokens = LiveHistogram(TOKEN_EDGES)
        self.preemptions = 0
        self.drafts = 0  # decode chunks that carried guesses
        self.drafted_tokens = 0
        self.accepted_by_depth: list[int] = []
        self.steps = 0
        self.step_device_s = 0.0
        self.step_host_s = 0.0
        self.step_tokens = LiveHistogram(STEP_TOKEN_EDGES)
        self.step_s = {kind: LiveHistogram(ITL_EDGES_S) for kind in ("prefill", "decode", "mixed")}
        self.ttft_s = LiveHistogram(TTFT_EDGES_S)
        self.itl_s = LiveHistogram(ITL_EDGES_S)
        self.unread_tokens = 0  # of open requests' prompts: not cached and not yet in any step
        self.step_end_s: float | None = None  # when the running step should end
        self.records: dict[str, RequestRecord] = {}
        self.watches: dict[str, Callable[[ScheduledEvent], None]] = {}  # of requests whose client wants progress
        self.on_record: list[
            Callable[[RequestRecord], None]
        ] = []  # called on the engine's thread with each that is over
        # written on the event loop
        self.refused: dict[str, int] = {}
        self.requests = {
            name: LiveHistogram(REQUEST_EDGES_S)
            for name in ("e2e", "queue", "prefill", "transfer", "decode", "inference", "tpot", "stall")
        }
        self.reasoning_tokens = 0
        self.loop_lag_s = LiveHistogram(LAG_EDGES_S)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ArrivalEvent: self._on_arrival,
            ScheduledEvent: self._on_scheduled,
            StepBeginEvent: self._on_step_begin,
            PreemptEvent: self._on_preempt,
            TokenEvent: self._on_token,
            DraftEvent: self._on_draft,
            StateEvent: self._on_state,
            TransferEvent: self._on_transfer,
        }

    def on_events(self, events: list[Event]) -> None:
        """Count one batch. Called on the engine's thread, less than a microsecond per event."""
        handlers = self._handlers
        ended: list[str] = []
        for event in events:
            handler = handlers.get(type(event))
            if handler is not None:
                handler(event)
            elif isinstance(event, FinishEvent):
                self.finished[event.reason.value] += 1
                ended.append(event.request_id)
        for request_id in ended:  # last: the records are ahead of the events, and one batch may end several choices
            self._close(request_id)

    def on_taken(self, request: Request) -> None:
        """Count what a request asks for. Called on the engine's thread."""
        self.request_max_tokens.add(request.sampling.max_tokens)

    def on_finished(
        self,
        timings: Timings,
        reasons: Sequence[FinishReason],
        *,
        reasoning_tokens: int = 0,
    ) -> None:
        """Count what a reader knows of a request whose last choice has ended. Called on the event loop.

        One whose client left on the way to the engine has no reader.
        """
        self.reasoning_tokens += reasoning_tokens
        if FinishReason.ABORT in reasons or FinishReason.ERROR in reasons:
            return  # durations of requests that were cut short would pull the distributions down
        requests = self.requests
        requests["e2e"].add(timings.e2e_s)
        requests["queue"].add(timings.queue_s)
        requests["prefill"].add(timings.prefill_s)
        if timings.transfer_s > 0.0:
            requests["transfer"].add(timings.transfer_s)
        requests["decode"].add(timings.decode_s)
        requests["inference"].add(timings.prefill_s + timings.transfer_s + timings.decode_s)
        requests["stall"].add(timings.stall_s)
        if timings.tpot_s is not None:
            requests["tpot"].add(timings.tpot_s)

    def on_refused(self, status: int) -> None:
        """Count a request that got an error instead of an answer."""
        self.refused[str(status)] = self.refused.get(str(status), 0) + 1

    def _on_arrival(self, event: ArrivalEvent) -> None:
        record = self._book.records.get(event.request_id)
        if record is not None:
            self.records[event.request_id] = record
        self.requests_taken += 1
        self.prompt_tokens += event.prompt_tokens
        self.unread_tokens += event.prompt_tokens

    def _on_scheduled(self, event: ScheduledEvent) -> None:
        if event.is_recompute:
            self.recomputed_tokens += event.chunk_tokens + event.cached_tokens
            return
        record = self.records.get(event.request_id)
        watch = self.watches.get(event.request_id)
        if watch is not None and event.index == 0:
            watch(event)
        if record is not None and event.index == 0:
            computed_tokens = record.prompt_part(event)
            self.computed_tokens += computed_tokens
            self.cached_tokens += event.cached_tokens
            self.unread_tokens -= computed_tokens + event.cached_tokens

    def _on_transfer(self, event: TransferEvent) -> None:
        self.recomputed_tokens += event.recomputed_tokens
        if event.request_id in self.records:
            self.cached_tokens += event.cached_tokens
            self.transferred_tokens += event.transferred_tokens
            self.unread_tokens -= event.cached_tokens + event.transferred_tokens

    def _on_step_begin(self, event: StepBeginEvent) -> None:
        self.steps += 1
        self.step_tokens.add(event.shape.n_tokens)
        self.step_end_s = None if event.predicted_s is None else event.at_s + event.predicted_s

    def _on_step(self, step: StepRecord) -> None:
        self.step_end_s = None
        self.step_device_s += step.device_s
        self.step_host_s += step.host_s
        shape = step.shape
        kind = "decode" if not shape.prefill_tokens else "mixed" if shape.decode_tokens else "prefill"
        self.step_s[kind].add(step.time_s)

    def _on_preempt(self, event: PreemptEvent) -> None:
        self.preemptions += 1

    def _on_token(self, event: TokenEvent) -> None:
        self.output_tokens += 1
        record = self.records.get(event.request_id)
        if record is None:
            return
        if event.position > 0:
            self.itl_s.add(event.at_s - record.choices[event.index].token_times_s[event.position - 1])
        elif event.index == record.first_index:
            self.ttft_s.add(event.at_s - record.arrival_s)

    def _on_state(self, event: StateEvent) -> None:
        self.states += 1

    def _on_draft(self, event: DraftEvent) -> None:
        self.drafts += 1
        self.drafted_tokens += event.drafted_tokens
        counts = self.accepted_by_depth
        counts += [0] * (event.accepted_tokens - len(counts))
        for depth in range(event.accepted_tokens):
            counts[depth] += 1

    def _close(self, request_id: str) -> None:
        record = self.records.get(request_id)
        if record is None or not record.is_over:
            return
        del self.records[request_id]
        usage = record.usage()
        self.unread_tokens -= usage.remaining_tokens
        self.dropped_tokens += usage.remaining_tokens
        self.request_prompt_tokens.add(usage.prompt_tokens)
        self.request_output_tokens.add(usage.output_tokens)
        self.outcomes[_outcome(record.reasons)] += 1
        self.request_longest_tokens.add(max(len(choice.token_times_s) for choice in record.choices.values()))
        for listener in self.on_record:
            listener(record)


def _outcome(reasons: Sequence[FinishReason | None]) -> str:
    """What its client got."""
    if FinishReason.ERROR in reasons:
        return "failed"
    return "aborted" if FinishReason.ABORT in reasons else "finished"
