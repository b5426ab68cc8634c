"""What the numbers mean: every metric, derived from the event log of `ground/events.py` and from nothing else.

    book = EventBook()
    book.fold(events)                         # as they come, in order
    record = book.records["request-1"]        # RequestRecord: usage(), timings(), sample()
    summary = summarize([record.sample()], limits=Limits(ttft_s=0.5))

Definitions, all on the one clock of the events (`ground/definitions.py` has the names other tools use):

    arrival            the ArrivalEvent's instant, before any queueing
    queue_s            arrival to the first chunk of the request being planned
    prefill_s          from there to its first token (waiting after a preemption included), less transfer_s
    transfer_s         where another engine read the prompt: from the end of its part until its keys and values were here
    decode_s           from the first token to the last choice's end
    ttft_s             arrival to first token handed out          = queue_s + prefill_s + transfer_s
    e2e_s              arrival to the end of the last choice      = queue_s + prefill_s + transfer_s + decode_s
    itl_s              gaps between neighbouring tokens of one choice; tokens of one step have gap 0
    tpot_s             (last token - first token) / (tokens - 1), pooled over the choices of a request
    stall_s            over the decode steps in which other requests' prefill ran: the step's time less the median time
                       of this request's decode steps without such prefill, where positive; when it had none, the
                       step's time times the others' prefill share of its tokens. A step's time is begin to commit.

A request that ended before a phase began has 0 in it; its last phase then ends with the request.
Percentiles interpolate linearly between ranks (numpy's default, as vLLM does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.ground.events import (
    ArrivalEvent,
    DraftEvent,
    Event,
    FinishEvent,
    PreemptEvent,
    ScheduledEvent,
    StepBeginEvent,
    StepEndEvent,
    Timings,
    TokenEvent,
    TransferEvent,
    Usage,
)
from diptych.ground.phase import FinishReason
from diptych.ground.shape import StepShape


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (0 .. 100), interpolated linearly between ranks; None of nothing."""
    assert 0.0 <= q <= 100.0, q
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(slots=True)
class StepNote:
    """One step as its requests saw it. prefills: (request id, tokens, cached tokens) of every prefill chunk in it.

    Without the shape: the records of many requests are kept, and each would keep every chunk of its steps.
    """

    step_id: int
    begin_s: float
    predicted_s: float | None
    prefill_tokens: int
    decode_tokens: int
    prefills: list[tuple[str, int, int]] = field(default_factory=list)


class ChunkNote(NamedTuple):
    """Prompt tokens [start, end) of choice 0 were planned in `step`; is_recompute: after a preemption."""

    step: StepNote
    start: int
    end: int
    is_recompute: bool


class SharedStep(NamedTuple):
    """A decode step in which other requests' prefill ran: `others_share` of its tokens. It ended at end_s."""

    step: StepNote
    end_s: float
    others_share: float


class DraftNote(NamedTuple):
    """Guesses of one choice that a step verified, and how many of them were handed out."""

    step_id: int
    index: int  # type: ignore[assignment]  # in place of tuple.index
    at_s: float
    drafted_tokens: int
    accepted_tokens: int


class TransferNote(NamedTuple):
    """Prompt tokens [start, end) came from another engine at at_s; it had read them for read_s, transfer_s before.
    predicted_s: what was expected of the steps it read in.
    """

    at_s: float
    start: int
    end: int
    read_s: float
    transfer_s: float
    predicted_s: float | None = None


@dataclass(slots=True)
class ChoiceRecord:
    """What one choice of a request did so far."""

    token_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    reason: FinishReason | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request, folded from its events by `EventBook`. Read it at any time; it is final when `is_over`."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    n: int
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_event_s: float = 0.0
    cached_tokens: int = 0
    computed_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: int = 0
    transfers: list[TransferNote] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    choices: dict[int, ChoiceRecord] = field(default_factory=dict)  # those that have a token or an end
    first_index: int | None = None  # the choice that had the first token
    chunks: list[ChunkNote] = field(default_factory=list)
    shared_steps: list[SharedStep] = field(default_factory=list)
    decode_predicted_s: float = 0.0  # what was expected of its decode steps, others' work included
    drafts: list[DraftNote] = field(default_factory=list)
    _own_prefill: tuple[int, int] = (-1, 0)  # (step, prefill tokens of this request in it)
    _calm_steps_s: list[float] = field(default_factory=list)
    _last_decode_step: int = -1

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return self.n_finished == self.n

    @property
    def n_finished(self) -> int:
        """Choices that have ended."""
        return sum(1 for choice in self._choices() if choice.end_s is not None)

    @property
    def end_s(self) -> float | None:
        """When the last choice ended; None while one is open."""
        return max(choice.end_s or 0.0 for choice in self.choices.values()) if self.is_over else None

    @property
    def n_preemptions(self) -> int:
        """How often a choice lost its blocks."""
        return len(self.preempted_s)

    @property
    def reasons(self) -> tuple[FinishReason | None, ...]:
        """Why each choice ended, None while it is open."""
        return tuple(self.choices[i].reason if i in self.choices else None for i in range(self.n))

    @property
    def output_tokens(self) -> int:
        """Tokens handed out over all choices."""
        return sum(len(choice.token_times_s) for choice in self._choices())

    def token_times_s(self, index: int = 0) -> tuple[float, ...]:
        """When each token of a choice was handed out."""
        choice = self.choices.get(index)
        return () if choice is None else tuple(choice.token_times_s)

    def prompt_part(self, event: ScheduledEvent) -> int:
        """Prompt tokens in a chunk: after a preemption it may go on into output tokens, which are not prompt."""
        return max(0, min(event.chunk_tokens, self.prompt_tokens - event.context_tokens))

    def fold(self, event: Event, step: StepNote | None = None) -> None:
        """Take in one event of this request; `step` is the step in flight or just ending."""
        if isinstance(event, TokenEvent):
            self.fold_token(event, step)
            return
        if isinstance(event, ScheduledEvent):
            self._fold_scheduled(event, step)
        elif isinstance(event, PreemptEvent):
            self.preempted_s.append(event.at_s)
        elif isinstance(event, TransferEvent):
            self._fold_transfer(event)
        elif isinstance(event, DraftEvent):
            self.drafts.append(
                DraftNote(event.step_id, event.index, event.at_s, event.drafted_tokens, event.accepted_tokens)
            )
        elif isinstance(event, FinishEvent):
            choice = self.choices.setdefault(event.index, ChoiceRecord())
            choice.end_s, choice.reason = event.at_s, event.reason
        else:
            return
        self.last_event_s = max(self.last_event_s, event.at_s)

    def _fold_scheduled(self, event: ScheduledEvent, step: StepNote | None) -> None:
        if self.first_scheduled_s is None:
            self.first_scheduled_s = event.at_s
        before = self._own_prefill[1] if self._own_prefill[0] == event.step_id else 0
        self._own_prefill = (event.step_id, before + event.chunk_tokens)
        prompt_part = self.prompt_part(event)
        if event.is_recompute:
            self.recomputed_tokens += event.chunk_tokens + event.cached_tokens
        elif event.index == 0:
            self.computed_tokens += prompt_part
            self.cached_tokens += event.cached_tokens
        if event.index == 0 and prompt_part and step is not None:
            start = event.context_tokens
            self.chunks.append(ChunkNote(step, start, start + prompt_part, event.is_recompute))

    def _fold_transfer(self, event: TransferEvent) -> None:
        """What was not heard of the other engine's work counts as transfer: this one waited for it."""
        begin_s = event.at_s if event.begin_s is None else event.begin_s
        planned_s = min(event.at_s, begin_s + (event.queue_s or 0.0))
        read_s = min(event.at_s, planned_s + (event.read_s or 0.0))
        if self.first_scheduled_s is None:
            self.first_scheduled_s = planned_s
        start = self.cached_tokens + event.cached_tokens + self.transferred_tokens
        self.cached_tokens += event.cached_tokens
        self.transferred_tokens += event.transferred_tokens
        self.recomputed_tokens += event.recomputed_tokens
        if self.first_token_s is None:
            end = start + event.transferred_tokens
            note = TransferNote(
                event.at_s, start, end, read_s - planned_s, event.at_s - read_s, predicted_s=event.predicted_s
            )
            self.transfers.append(note)

    def fold_token(self, event: TokenEvent, step: StepNote | None) -> None:
        """As `fold`, of what nearly all events are: its way is short."""
        _, index, at_s, _, position, step_id, _ = event
        if at_s > self.last_event_s:
            self.last_event_s = at_s
        if self.first_token_s is None:
            self.first_token_s, self.first_index = at_s, index
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = ChoiceRecord()
        choice.token_times_s.append(at_s)
        if position == 0 or step is None or step.step_id != step_id or step_id == self._last_decode_step:
            return
        self._last_decode_step = step_id
        self.decode_predicted_s += step.predicted_s or 0.0
        own = self._own_prefill[1] if self._own_prefill[0] == step_id else 0
        others = step.prefill_tokens - own
        if others > 0:
            share = others / (step.prefill_tokens + step.decode_tokens)
            self.shared_steps.append(SharedStep(step, at_s, share))
        elif own == 0:
            self._calm_steps_s.append(at_s - step.begin_s)

    def decoded(self, index: int, ends_s: Sequence[float]) -> None:
        """One token of a choice at each of these instants, for a book that notes no steps."""
        self.choices[index].token_times_s += ends_s
        self.last_event_s = ends_s[-1]

    def usage(self, *, reasoning_tokens: int = 0) -> Usage:
        """Tokens by source so far. reasoning_tokens is what the text side counted; events do not tell."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            remaining_tokens=self.prompt_tokens - self.cached_tokens - self.computed_tokens - self.transferred_tokens,
            transferred_tokens=self.transferred_tokens,
            output_tokens=self.output_tokens,
            recomputed_tokens=self.recomputed_tokens,
            reasoning_tokens=reasoning_tokens,
            drafted_tokens=sum([one.drafted_tokens for one in self.drafts]),
            accepted_tokens=sum([one.accepted_tokens for one in self.drafts]),
        )

    def timings(self, now_s: float | None = None) -> Timings:
        """Durations; while the request is open, up to `now_s` or else to its last event."""
        end_s = self._end_s(now_s)
        scheduled_s = end_s if self.first_scheduled_s is None else self.first_scheduled_s
        token_s = end_s if self.first_token_s is None else self.first_token_s
        gaps = self._gaps_s()
        transfer_s = sum([note.transfer_s for note in self.transfers])
        return Timings(
            queue_s=scheduled_s - self.arrival_s,
            prefill_s=token_s - scheduled_s - transfer_s,
            transfer_s=transfer_s,
            decode_s=end_s - token_s,
            e2e_s=end_s - self.arrival_s,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
            tpot_s=sum(gaps) / len(gaps) if gaps else None,
            itl_s=tuple(gaps),
            stall_s=self._stall_s(),
            n_preemptions=self.n_preemptions,
        )

    def sample(self) -> Sample:
        """This request as one line of a load test; complete when every choice ended with STOP or LENGTH."""
        good = (FinishReason.STOP, FinishReason.LENGTH)
        gaps = self._gaps_s()
        return Sample(
            start_s=self.arrival_s,
            end_s=self._end_s(None),
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
            tpot_s=sum(gaps) / len(gaps) if gaps else None,
            itl_s=tuple(gaps),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            is_complete=all(reason in good for reason in self.reasons),
        )

    def _choices(self) -> list[ChoiceRecord]:
        """Those that have a token or an end: one C call, so the engine's thread cannot change them half-way for a reader."""
        return list(self.choices.values())

    def _gaps_s(self) -> list[float]:
        """Between neighbouring tokens of each choice."""
        return [
            later - earlier
            for choice in self._choices()
            for earlier, later in zip(choice.token_times_s, choice.token_times_s[1:], strict=False)
        ]

    def _end_s(self, now_s: float | None) -> float:
        if self.end_s is not None:
            return self.end_s
        return self.last_event_s if now_s is None else now_s

    def _stall_s(self) -> float:
        calm_s = percentile(self._calm_steps_s, 50.0)
        times = [(shared.end_s - shared.step.begin_s, shared.others_share) for shared in self.shared_steps]
        if calm_s is None:
            return sum(time_s * share for time_s, share in times)
        return sum(max(0.0, time_s - calm_s) for time_s, _ in times)


class StepRecord(NamedTuple):
    """One step that ended. What it held is its shape; device_s and host_s are the executor's."""

    step_id: int
    begin_s: float
    end_s: float
    shape: StepShape
    predicted_s: float | None
    prefills: list[tuple[str, int, int]]  # (request id, tokens, cached tokens) of every prefill chunk
    decode_request_ids: tuple[str, ...]
    device_s: float
    host_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def decode_tokens(self) -> int:
        """Tokens that its decode handed out: its rows without those of rejected drafts."""
        return self.shape.decode_tokens - self.drafted_tokens + self.accepted_tokens

    @property
    def time_s(self) -> float:
        """Begin to commit."""
        return self.end_s - self.begin_s


class EventBook:
    """Folds the event log of an engine into one record per request and, for `on_step`, one per step.

    on_step: those that are called with every step that ends. Nobody in it: no StepRecord is made.
    notes_steps: whether records keep what steps a request's tokens came from, which its stall is told by.
    """

    def __init__(self, *, on_step: Callable[[StepRecord], object] | None = None, notes_steps: bool = True) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.device_s = 0.0  # the executor's, over all steps
        self.on_step = [] if on_step is None else [on_step]
        self._begin: StepBeginEvent | None = None
        self._step: StepNote | None = None
        self._notes_steps = notes_steps
        self._noted: StepNote | None = None  # the same, where tokens are to know it
        self._drafted_tokens = self._accepted_tokens = 0  # of the step in flight

    def fold(self, events: Iterable[Event]) -> None:
        """Take in events in the order in which control gave them."""
        records = self.records
        for event in events:
            if isinstance(event, TokenEvent):
                record = records.get(event.request_id)
                if record is not None:
                    record.fold_token(event, self._noted)
            elif isinstance(event, StepBeginEvent):
                self._begin = event
                self._step = StepNote(
                    event.step_id, event.at_s, event.predicted_s, event.prefill_tokens, event.decode_tokens
                )
                self._noted = self._step if self._notes_steps else None
            elif isinstance(event, StepEndEvent):
                self._end_step(event)
            elif isinstance(event, ArrivalEvent):
                records[event.request_id] = RequestRecord(
                    request_id=event.request_id,
                    arrival_s=event.at_s,
                    prompt_tokens=event.prompt_tokens,
                    n=event.n,
                    last_event_s=event.at_s,
                )
            else:
                if isinstance(event, ScheduledEvent) and self._step is not None:
                    self._step.prefills.append((event.request_id, event.chunk_tokens, event.cached_tokens))
                elif isinstance(event, DraftEvent):
                    self._drafted_tokens += event.drafted_tokens
                    self._accepted_tokens += event.accepted_tokens
                record = records.get(event.request_id)
                if record is not None:
                    record.fold(event, self._step)

    def take(self, request_id: str) -> RequestRecord | None:
        """Remove a record and hand it over (a server would grow for ever otherwise); None when unknown."""
        return self.records.pop(request_id, None)

    def _end_step(self, event: StepEndEvent) -> None:
        begin, step = self._begin, self._step
        drafted_tokens, accepted_tokens = self._drafted_tokens, self._accepted_tokens
        self._drafted_tokens = self._accepted_tokens = 0
        if begin is None or step is None or begin.step_id != event.step_id:
            return  # the log began in the middle of this step
        self.device_s += event.device_s
        if self.on_step:
            record = StepRecord(
                step_id=begin.step_id,
                begin_s=begin.at_s,
                end_s=event.at_s,
                shape=begin.shape,
                predicted_s=begin.predicted_s,
                prefills=step.prefills,
                decode_request_ids=begin.decode_request_ids,
                device_s=event.device_s,
                host_s=event.host_s,
                drafted_tokens=drafted_tokens,
                accepted_tokens=accepted_tokens,
            )
            for tell in tuple(self.on_step):
                tell(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request of a load test, as an engine or a client saw it.

    start_s: when it was due to be sent (not when it was: a late client must not hide its own delay).
    """

    start_s: float
    end_s: float
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    is_complete: bool

    @property
    def e2e_s(self) -> float:
        """From due to the end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Service-level limits; None is no limit. A request is good when it completes and meets all of them."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def are_met(self, sample: Sample) -> bool:
        """Whether this request counts for goodput. One token alone has no TPOT and cannot miss it."""
        if not sample.is_complete or sample.ttft_s is None:
            return False
        measured = ((sample.ttft_s, self.ttft_s), (sample.tpot_s, self.tpot_s), (sample.e2e_s, self.e2e_s))
        return all(limit is None or value is None or value <= limit for value, limit in measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A sample of durations in seconds."""

    n: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """Mean, extremes and percentiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)  # to sort it once more is one look at each
    p50, p90, p95, p99 = (percentile(ordered, q) or 0.0 for q in (50.0, 90.0, 95.0, 99.0))
    mean = sum(values) / len(values)
    return Distribution(n=len(values), mean=mean, min=ordered[0], p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A load test in numbers. Rates are over duration_s, start and drain included. itl_s is pooled over requests.

    Distributions hold the requests that completed; the failed ones only lower the goodput.
    """

    n_complete: int
    n_failed: int
    duration_s: float
    requests_per_s: float
    goodput_requests_per_s: float
    good_share: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None


def summarize(samples: Sequence[Sample], *, limits: Limits | None = None, duration_s: float | None = None) -> Summary:
    """Numbers of a load test. duration_s None: from the first request being due to the last one's end."""
    wanted = Limits() if limits is None else limits
    done = [sample for sample in samples if sample.is_complete]
    if duration_s is None:
        duration_s = max(s.end_s for s in samples) - min(s.start_s for s in samples) if samples else 0.0
    n_good = sum(1 for sample in samples if wanted.are_met(sample))
    prompt_tokens = sum(sample.prompt_tokens for sample in done)
    output_tokens = sum(sample.output_tokens for sample in done)
    per_s = 1.0 / duration_s if duration_s > 0.0 else 0.0
    return Summary(
        n_complete=len(done),
        n_failed=len(samples) - len(done),
        duration_s=duration_s,
        requests_per_s=len(done) * per_s,
        goodput_requests_per_s=n_good * per_s,
        good_share=n_good / len(samples) if samples else 0.0,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_s=distribution([s.ttft_s for s in done if s.ttft_s is not None]),
        tpot_s=distribution([s.tpot_s for s in done if s.tpot_s is not None]),
        itl_s=distribution([gap for s in done for gap in s.itl_s]),
        e2e_s=distribution([s.e2e_s for s in done]),
    )
