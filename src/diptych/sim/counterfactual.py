"""What would have been: the minutes around one request run again, as they were and with one thing changed.

    minutes = Minutes(...)                       # a server's last minutes, or a recording (`sim.recorded.minutes_of`)
    asked = Counterfactual(minutes, "req-7")
    asked.outcome(), asked.outcome(Change.parse("chunk=512"))

The same requests come at the same times and write the same tokens, through the same scheduler. A step takes as long as the
minutes' own steps teach, on another device as long as the planner predicts. The outcome without a change: how far it
stands from what was measured says how far the others can be trusted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diptych.control.loop import EngineCore
from diptych.cost.kv_bytes import kv_bytes_of_context
from diptych.cost.setup import Setup, find_hardware
from diptych.cost.sizing import parse_duration_s
from diptych.cost.step_time import StepTimeModel
from diptych.ground.bounds import counted
from diptych.ground.clock import VirtualClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, ConfigError, RequestError
from diptych.ground.phase import Phase
from diptych.ground.request import CacheScope, Request, SamplingParams
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.specs import KVSpec, QuantSpec
from diptych.ground.step import Chunk, ChunkResult, StepPlan, StepResult
from diptych.metrics import EventBook, RequestRecord
from diptych.models.spec import ModelSpec
from diptych.sim.drafts import RecordedDrafts, Verified
from diptych.sim.executor import DRAWN_TOKEN
from diptych.stepper import Stepper

LEAST_STEPS = 12  # of the minutes, for their times to teach anything
_WRONG_TOKEN = 1 << 60  # in place of a draft that did not hold: of no text, nor of a journal
LINK_BYTES_PER_S = 12.5e9  # between pools: 100 Gb/s
KINDS = ("cached", "chunk", "stall-budget", "pools", "device")
USUAL_CHANGES = ("cached", "chunk=512", "stall-budget=20ms", "pools", "device=h100-80gb-sxm")

Predict = Callable[[StepShape], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The one thing that is different. kind: one of KINDS; number: tokens of a chunk, seconds of a budget; name: a device."""

    kind: str
    number: float = 0.0
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Change:
        """From "chunk=512". ConfigError for anything else."""
        kind, _, value = text.strip().partition("=")
        if kind not in KINDS or bool(value) != (kind in ("chunk", "stall-budget", "device")):
            raise ConfigError(f"cannot change {text[:80]!r}", hint=f"one of {', '.join(USUAL_CHANGES)}")
        if kind == "device":
            return cls(kind=kind, name=find_hardware(value)[0].name)
        if kind == "stall-budget":
            return cls(kind=kind, number=parse_duration_s(value, "stall budget"))
        if kind == "chunk":
            if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= 1 << 20:
                raise ConfigError(f"chunk is {value[:40]!r}; it must be a number of tokens, 1 to {1 << 20}")
            return cls(kind=kind, number=int(value))
        return cls(kind=kind)

    def __str__(self) -> str:
        """As `parse` reads it."""
        value = {"chunk": f"{self.number:.0f}", "stall-budget": f"{self.number * 1e3:g}ms", "device": self.name}
        return self.kind + (f"={value[self.kind]}" if self.kind in value else "")

    @property
    def words(self) -> str:
        """For a person."""
        return {
            "cached": "its prompt cached",
            "chunk": f"steps of {self.number:.0f} tokens at most",
            "stall-budget": f"a stall budget of {self.number * 1e3:g} ms",
            "pools": "pools of prefill and decode",
            "device": f"on {self.name}",
        }[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request's times in seconds; None where they did not come to pass."""

    queue_s: float
    prefill_s: float
    ttft_s: float | None
    tpot_s: float | None

    @classmethod
    def of(cls, record: RequestRecord) -> Seen:
        """As its record has them."""
        timings = record.timings()
        return cls(queue_s=timings.queue_s, prefill_s=timings.prefill_s, ttft_s=timings.ttft_s, tpot_s=timings.tpot_s)


class Drafted(NamedTuple):
    """Behind so many tokens of an answer a step verified so many drafts, whoever made them; the first so many held."""

    place: int
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One request of the minutes: the tokens each choice wrote, what the prefix cache had for it, when it was over, its times.

    came_s: to the scheduler, which is later than it came to the service. end_s: None while it is open. cached_tokens: before
    its first chunk. drafts: of each choice; none where nobody guessed, or where the file is of an earlier version.
    """

    request: Request
    came_s: float
    outputs: tuple[tuple[int, ...], ...]
    cached_tokens: int
    end_s: float | None
    seen: Seen
    drafts: tuple[tuple[Drafted, ...], ...] = ()

    def verified(self) -> list[Verified]:
        """What steps verified, for the same request to be run again."""
        drafts = self.drafts or ((),) * len(self.outputs)
        return [
            Verified(
                outputs,
                {
                    place: (*outputs[place : place + accepted], *(_WRONG_TOKEN,) * (drafted - accepted))
                    for place, drafted, accepted in some
                },
            )
            for outputs, some in zip(self.outputs, drafts, strict=False)
        ]


def past_of(request: Request, outputs: Iterable[Sequence[int]], record: RequestRecord, *, came_s: float) -> Past:
    """A request with what its record says so far."""
    return Past(
        request=request,
        came_s=came_s,
        outputs=tuple(tuple(tokens) for tokens in outputs),
        cached_tokens=record.cached_tokens,
        end_s=record.end_s,
        seen=Seen.of(record),
        drafts=drafts_of(record),
    )


def drafts_of(record: RequestRecord) -> tuple[tuple[Drafted, ...], ...]:
    """Of each choice; the tokens of a step have the time at which its drafts were judged."""
    if not record.drafts:
        return ()
    found: list[tuple[Drafted, ...]] = []
    for index in range(record.n):
        times_s = record.token_times_s(index)
        mine = [note for note in record.drafts if note.index == index]
        found.append(
            tuple(Drafted(bisect_left(times_s, one.at_s), one.drafted_tokens, one.accepted_tokens) for one in mine)
        )
    return tuple(found)


def times_of(steps: Iterable[tuple[float, float, StepShape]]) -> tuple[tuple[StepShape, float], ...]:
    """How long each step (begin, end, shape) kept its engine, what the host does before the next one included.

    Where the next step decodes, the engine had work all the while; before a step of prefill alone it may have been idle.
    """
    known = list(steps)
    following = [*known[1:], None][: len(known)]
    return tuple(
        (shape, (after[0] if after is not None and after[2].decode_tokens else end_s) - begin_s)
        for (begin_s, end_s, shape), after in zip(known, following, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What ran, where another device is to be priced."""

    model: ModelSpec
    quant: QuantSpec
    kv: KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Minutes:
    """What is known of an engine's last minutes: requests by arrival, and steps as (shape, seconds), oldest first."""

    config: SchedulerConfig
    blocks: BlockConfig
    requests: tuple[Past, ...]
    steps: tuple[tuple[StepShape, float], ...]
    machine: Machine | None = None
    seed: int = 0

    def find(self, request_id: str) -> Past:
        """ConfigError for one that is not in the minutes."""
        for past in self.requests:
            if past.request.request_id == request_id:
                return past
        raise ConfigError(
            f"no request {request_id[:100]!r} in the recorded minutes, which hold {len(self.requests)}",
            hint="it may be older than what is kept, or not have been taken",
        )

    def around(self, target: Past) -> list[Past]:
        """The requests from the last moment on at which nothing was open before the target came."""
        begin_s = target.request.arrival_s
        for past in reversed(self.requests[: self.requests.index(target)]):
            if past.end_s is None or past.end_s > begin_s:
                begin_s = min(begin_s, past.request.arrival_s)
        first = bisect_left(self.requests, begin_s, key=lambda past: past.request.arrival_s)
        return list(self.requests[first:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The request's times; change: None for the minutes as they were. note: what the reader must know."""

    change: Change | None
    seen: Seen
    cached_tokens: int
    note: str = ""


class Counterfactual:
    """One request of some minutes. ConfigError where they do not tell enough."""

    def __init__(self, minutes: Minutes, request_id: str) -> None:
        self.minutes = minutes
        self.target = minutes.find(request_id)
        if self.target.seen.ttft_s is None:
            raise ConfigError(
                f"request {request_id[:100]!r} has no token yet",
                hint="ask again when it has; an embedding, a score or a prompt alone never has one",
            )
        if len(minutes.steps) < LEAST_STEPS:
            raise ConfigError(
                f"the minutes hold {counted(len(minutes.steps), 'step')}; at least {LEAST_STEPS} tell how long one takes"
            )
        self._learned = StepTimeModel()
        for shape, time_s in minutes.steps:
            self._learned.observe(shape, time_s)

    def outcome(self, change: Change | None = None) -> Outcome:
        """The request's times with one change, or with none. ConfigError for a change that cannot be made here."""
        minutes, target, kind = self.minutes, self.target, None if change is None else change.kind
        config, note, request_s = minutes.config, "", 0.0
        time_s: Predict = self._learned.estimate_s
        budget_s: Predict = self._learned.predict_s
        if change is not None and kind == "chunk":
            config = replace(config, max_step_tokens=int(change.number))
        elif change is not None and kind == "stall-budget":
            config = replace(config, stall_budget_s=change.number)
        elif kind == "cached" and not config.enable_prefix_cache:
            raise ConfigError("the engine ran without a prefix cache; nothing could have been cached")
        elif change is not None and kind == "device":
            there = setup_on(minutes, change.name)
            time_s = budget_s = there.model_of_time().predict_s
            software, request_s = there.calibration.name, there.calibration.request_s
            what = f"{there.model.name} {there.quant.name}"
            note = f"{what}, predicted by the planner for {software}; the KV pool and the places as they were"
            if request_s:  # or its queue is longer there, and nothing says why
                note += f"; its queue has {request_s * 1e3:.3g} ms between client and scheduler that {software} takes"
        elif kind == "pools":
            link_s, note = _link(minutes)
            seen = _pools(minutes, target, time_s, link_s)
            return Outcome(change=change, seen=seen, cached_tokens=target.cached_tokens, note=note)
        around = [_coming_after(past, request_s) for past in minutes.around(target)]
        again = _Again(config, minutes, around, time_s=time_s, budget_s=budget_s)
        record = again.run(target, is_cached=kind == "cached")
        return Outcome(change=change, seen=Seen.of(record), cached_tokens=record.cached_tokens, note=note)


def what_if(minutes: Minutes, request_id: str, changes: Iterable[Change]) -> dict[str, Any]:
    """A request's times as they were measured, as they come out when run again, and with each change, in milliseconds.

    A change that cannot be made says why under `error`.
    """
    asked = Counterfactual(minutes, request_id)
    outcomes: list[dict[str, Any]] = [{"change": None, "words": "run again as it was"} | _outcome_json(asked.outcome())]
    for change in changes:
        head = {"change": str(change), "words": change.words}
        try:
            outcomes.append(head | _outcome_json(asked.outcome(change)))
        except ConfigError as error:
            outcomes.append(head | {"error": error.message})
    return {
        "measured": _seen_json(asked.target.seen) | {"cached_tokens": asked.target.cached_tokens},
        "prompt_tokens": len(asked.target.request.prompt_token_ids),
        "requests": len(minutes.requests),
        "steps": len(minutes.steps),
        "outcomes": outcomes,
    }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return _seen_json(outcome.seen) | {"cached_tokens": outcome.cached_tokens, "note": outcome.note}


def _seen_json(seen: Seen) -> dict[str, float | None]:
    names = {"queue_ms": seen.queue_s, "prefill_ms": seen.prefill_s, "ttft_ms": seen.ttft_s, "tpot_ms": seen.tpot_s}
    return {name: None if seconds is None else round(seconds * 1e3, 3) for name, seconds in names.items()}


def setup_on(minutes: Minutes, device: str) -> Setup:
    """The model that ran, on another device. ConfigError where nobody said which model it was."""
    if minutes.machine is None:
        raise ConfigError("the recording does not say which model ran", hint="name it with --model")
    hardware, calibration = find_hardware(device, of_services=True)
    machine = minutes.machine
    return Setup(
        model=machine.model, hardware=hardware, quant=machine.quant, kv=machine.kv, tp=1, calibration=calibration
    )


class _Again:
    """One engine on a virtual clock that gets recorded requests, draws what they drew and verifies what was verified."""

    def __init__(
        self, config: SchedulerConfig, minutes: Minutes, pasts: Sequence[Past], *, time_s: Predict, budget_s: Predict
    ) -> None:
        self.clock = VirtualClock()
        self.book = EventBook()
        self._blocks = minutes.blocks
        self._pasts = pasts
        drafts = RecordedDrafts()
        for past in pasts:
            drafts.expect(past.request.request_id, past.verified())
        core = EngineCore(
            drafts.configured(config),
            minutes.blocks,
            model_revision="again",
            predict_s=budget_s,
            seed=minutes.seed,
            depths=drafts.depths(budget_s),
            drafters=drafts.drafters(minutes.seed),
        )
        self._executor = _Drawn(time_s, self.clock)
        self.stepper = Stepper(core, self._executor, self.clock, fold=self.book.fold)

    def run(self, target: Past, *, is_cached: bool = False, to_the_end: bool = False) -> RequestRecord:
        """Serve them until the target is over, or all that were taken; its record. ConfigError where it has none."""
        pasts = self._pasts
        begin_s = min(past.request.arrival_s for past in pasts)
        self._executor.is_free = True
        for number, request in enumerate(_warm(pasts, target if is_cached else None, self._blocks.block_tokens)):
            self.submit(replace(request, request_id=f"warm {number}"), ((DRAWN_TOKEN,),))
            while self.stepper.step():
                pass
        self._executor.is_free = False
        coming = iter(sorted(pasts, key=lambda past: past.came_s))
        past = next(coming, None)
        name = target.request.request_id
        while True:
            while past is not None and past.came_s - begin_s <= self.clock.now_s():
                self.submit(_again(past, past.request.arrival_s - begin_s), past.outputs)
                past = next(coming, None)
            if not to_the_end and self._is_over(name):
                break
            if not self.stepper.step():
                if past is None:
                    break
                self.clock.advance(max(0.0, past.came_s - begin_s - self.clock.now_s()))
        if not self._is_over(name):
            raise ConfigError(f"request {name[:100]!r} could not be served with this change")
        return self.book.records[name]

    def _is_over(self, name: str) -> bool:
        record = self.book.records.get(name)
        return record is not None and record.is_over

    def submit(self, request: Request, outputs: tuple[tuple[int, ...], ...]) -> None:
        """Put one in line; one that is refused with this change is left out."""
        try:
            self.stepper.submit(request)
        except (RequestError, CapacityError):
            return
        self._executor.expect(request, outputs)


class _Drawn:
    """An executor whose tokens are the recorded ones. is_free: no time passes."""

    def __init__(self, time_s: Predict, clock: VirtualClock) -> None:
        self.is_free = False
        self._time_s = time_s
        self._clock = clock
        self._written: list[tuple[int, tuple[int, ...]]] = []  # by sequence: prompt tokens, then what was written

    def expect(self, request: Request, outputs: tuple[tuple[int, ...], ...]) -> None:
        """Sequences are numbered in the order of submission, one per choice."""
        written = [*outputs, *((),) * request.sampling.n][: request.sampling.n]
        self._written += [(len(request.prompt_token_ids), tokens) for tokens in written]

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the step's time pass."""
        step_s = 0.0 if self.is_free else self._time_s(plan.shape)
        self._clock.advance(step_s)
        results = tuple(
            [self._draw(chunk) if chunk.samples else ChunkResult(seq_id=chunk.seq_id) for chunk in plan.chunks]
        )
        return StepResult(step_id=plan.step_id, results=results, device_s=step_s, host_s=0.0)

    def _draw(self, chunk: Chunk) -> ChunkResult:
        """Behind its last recorded token a choice ends, whatever ended it: a text, a grammar, its client."""
        prompt_tokens, written = self._written[chunk.seq_id]
        drafts = chunk.draft_token_ids
        place = chunk.end_pos - len(drafts) - prompt_tokens
        drawn: list[int] = []
        for draft in (*drafts, None):
            drawn.append(written[place] if place < len(written) else DRAWN_TOKEN)
            place += 1
            if draft != drawn[-1] or place >= len(written):
                break
        return ChunkResult(seq_id=chunk.seq_id, token_ids=tuple(drawn), is_complete=place >= len(written))


def _coming_after(past: Past, request_s: float) -> Past:
    """The request, coming to the scheduler no sooner than so long after it was sent."""
    came_s = past.request.arrival_s + request_s
    return past if past.came_s >= came_s else replace(past, came_s=came_s)


def _again(past: Past, arrival_s: float) -> Request:
    """The request, writing what it wrote: only that ends it."""
    plain = replace(
        past.request.sampling,
        min_tokens=0,
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
        structured=None,
        prediction=None,
    )
    return replace(past.request, arrival_s=arrival_s, sampling=plain, segments=(), prediction_token_ids=())


def _warm(pasts: Sequence[Past], target: Past | None, block_tokens: int) -> Iterator[Request]:
    """Prompts that put into the prefix cache what stood there before, and all of the target's that it can hold."""
    known: list[tuple[CacheScope, tuple[int, ...]]] = []
    # by their first chunks: one of a higher priority that came later may have read what an earlier one found
    for past in sorted(pasts, key=lambda past: past.request.arrival_s + past.seen.queue_s):
        request, prompt = past.request, past.request.prompt_token_ids
        cached = past.cached_tokens // block_tokens * block_tokens
        if past is target:
            cached = (len(prompt) - 1) // block_tokens * block_tokens
        before = prompt[:cached]
        if cached and not any(salt == request.cache_scope and ids[:cached] == before for salt, ids in known):
            sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            yield replace(request, prompt_token_ids=before, sampling=sampling, segments=(), arrival_s=0.0)
            known.append((request.cache_scope, before))
        known.append((request.cache_scope, prompt + (past.outputs[0] if past.outputs else ())))


def _link(minutes: Minutes) -> tuple[Callable[[int], float], str]:
    """Seconds that a prompt's cache travels, and what to say of it."""
    machine = minutes.machine
    if machine is None:
        return lambda tokens: 0.0, "one engine for each phase; the cache moves at once, as the model is not known"
    rate = f"{LINK_BYTES_PER_S * 8 / 1e9:g} Gb/s"
    return (
        lambda tokens: kv_bytes_of_context(machine.model, machine.kv, tokens, is_ours=True) / LINK_BYTES_PER_S,
        f"one engine for each phase, as large as this one; the cache moves at {rate}",
    )


def _pools(minutes: Minutes, target: Past, time_s: Predict, link_s: Callable[[int], float]) -> Seen:
    """One engine reads prompts, another answers: it reads their last token, and the first one it draws comes from there."""
    around = minutes.around(target)
    begin_s = around[0].request.arrival_s
    readers = [replace(past, outputs=tuple(tokens[:1] for tokens in past.outputs), drafts=()) for past in around]
    reading = _Again(minutes.config, minutes, readers, time_s=time_s, budget_s=time_s)
    record = reading.run(target, to_the_end=True)  # those behind the target decode beside it
    handed: dict[str, Past] = {}
    for past in around:
        done = reading.book.records.get(past.request.request_id)
        if done is not None and done.first_token_s is not None:
            at_s = begin_s + done.first_token_s + link_s(len(past.request.prompt_token_ids))
            request = replace(past.request, arrival_s=at_s)
            handed[request.request_id] = replace(past, request=request, came_s=at_s, cached_tokens=0)
    coming = sorted(handed.values(), key=lambda past: past.came_s)
    config = replace(minutes.config, max_step_tokens=1 << 20, stall_budget_s=None)
    decoding = _Again(config, minutes, coming, time_s=lambda shape: _decode_s(shape, time_s), budget_s=time_s)
    mine = handed[target.request.request_id]
    answer = Seen.of(decoding.run(mine))
    queue_s = record.timings().queue_s
    ttft_s = mine.came_s - target.request.arrival_s + (answer.ttft_s or 0.0)
    return Seen(queue_s=queue_s, prefill_s=ttft_s - queue_s, ttft_s=ttft_s, tpot_s=answer.tpot_s)


def _decode_s(shape: StepShape, time_s: Predict) -> float:
    """The time of the rows that are computed: of what was handed over that of its last token, as its cache is there."""
    rows = tuple(
        chunk if chunk.is_decode else ChunkShape(Phase.DECODE, 1, chunk.end_pos - 1, True, chunk.count)
        for chunk in shape.shapes
        if chunk.is_decode or chunk.samples
    )
    return time_s(StepShape(rows)) if rows else 0.0
