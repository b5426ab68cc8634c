"""One engine: the control core, the executor and the text of every open request, stepped by whoever owns the thread.

`LLM` steps it inline, `AsyncLLM` on a thread of its own. Nothing here blocks, waits or knows about asyncio.

    request -> submit -> [step: begin_step -> execute -> end_step -> tokens become text] -> OutputDelta ... -> finished
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from diptych.compute.sampling.structured import CompiledGrammar, GrammarCompiler
from diptych.control.loop import EngineCore
from diptych.control.stats import CoreStats
from diptych.engine.adapters import AdapterCounts, Adapters
from diptych.engine.prompts import Prompt, prompt_ids
from diptych.engine.text.detokenizer import TextDelta, TextStream
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.bounds import ids
from diptych.ground.clock import Clock
from diptych.ground.errors import EngineError, RequestError
from diptych.ground.events import (
    ArrivalEvent,
    DraftEvent,
    Event,
    FinishEvent,
    PromptLogprobsEvent,
    StateEvent,
    StepBeginEvent,
    StepEndEvent,
    TokenEvent,
)
from diptych.ground.phase import FinishReason
from diptych.ground.request import AdapterRef, Pooling, Request, SamplingParams
from diptych.ground.step import Executor, TokenLogprobs
from diptych.metrics import EventBook, RequestRecord
from diptych.stepper import Observe, Stepper

logger = logging.getLogger("diptych.engine")

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What one step added to one choice. `text` is valid UTF-8; token_ids may be ahead of it while bytes are incomplete.

    stop_reason: the stop string or stop token id that ended the choice, when one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    at_s: float


@dataclass(slots=True)
class Choice:
    """Text side of one of a request's n sequences. Owned by the engine's thread."""

    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    stop_string: str | None = None
    tail: str = ""  # what the stream held back to the end
    is_finished: bool = False

    def read_end(self, reason: FinishReason) -> None:
        """Take what the stream still holds; it may end with a stop string, which is why the text ends then."""
        if self.stop_string is None:
            last = self.stream.finish()
            self.tail += last.text
            if reason in _OWN_ENDS:
                self.stop_string = last.stop_string


def ignore_delta(_: OutputDelta) -> None:
    """Takes the deltas of a request that is over, or whose caller has left."""


class OpenRequest:
    """Everything the engine holds of one request beyond control's ledger. Owned by the engine's thread."""

    def __init__(
        self, request: Request, *, tokenizer: Tokenizer, on_delta: Callable[[OutputDelta], None], follows_text: bool
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.on_delta = on_delta
        self.record: RequestRecord | None = None  # the book's, from the arrival event on
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.choices = [
            Choice(
                stream=TextStream(
                    tokenizer,
                    sampling.stop,
                    sampling.include_stop_str_in_output,
                    follows_text=follows_text,
                    min_tokens=sampling.min_tokens,
                )
            )
            for _ in range(sampling.n)
        ]
        self.state: bytes | None = None  # [D] fp32, of a request that wants no tokens
        self.error: EngineError | None = None
        self.grammar: CompiledGrammar | None = None  # held, so that the sampler finds it compiled whenever it starts

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_finished for choice in self.choices)


class _Steps:
    """Events as if every token had come alone: what a step gave behind a stop string was never said.

    A step of a sequence that speculates gives several tokens, and only their text tells which is its last; and whether the
    last that the limit allows is an end of the text's own.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._n_handed: dict[tuple[str, int], int] = {}  # in this step

    def keep(self, event: Event, open_requests: Mapping[str, OpenRequest]) -> Event | None:
        """`event` as it counts; None where it stands behind a stop string. Ask before the next event is dealt with."""
        if isinstance(event, TokenEvent | DraftEvent | FinishEvent) and event.request_id in open_requests:
            kept = self._of_choice(event, open_requests[event.request_id].choices[event.index])
            if kept is None:
                return None
            event = kept
        elif isinstance(event, StepEndEvent):
            self._n_handed.clear()
        self.events.append(event)
        return event

    def _of_choice(self, event: TokenEvent | DraftEvent | FinishEvent, choice: Choice) -> Event | None:
        key = event.request_id, event.index
        if isinstance(event, TokenEvent):
            if choice.stop_string is not None:
                return None
            self._n_handed[key] = self._n_handed.get(key, 0) + 1
        elif isinstance(event, DraftEvent):
            if choice.stop_string is not None and key not in self._n_handed:
                return None  # a step more, of a worker that had not heard of the stop
            return event._replace(accepted_tokens=min(event.accepted_tokens, self._n_handed.get(key, 0)))
        elif event.reason in _OWN_ENDS:
            choice.read_end(event.reason)
            if choice.stop_string is not None:
                n_tokens = len(choice.token_ids)
                return replace(event, reason=FinishReason.STOP, output_tokens=n_tokens, stop_token_id=None)
        return event


class Engine:
    """Joins control, executor and text. Not thread-safe: `submit`, `abort` and `step` are called by one thread."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        clock: Clock,
        vocab_size: int,
        grammars: GrammarCompiler,
        observe: Observe | None = None,
        back_memory: Callable[[Callable[[], bool]], None] = lambda wants_stop: None,
        adapters: Adapters,
        writes: bool = True,
        encodes: bool = False,
        drafter_faults: Callable[[], int] = lambda: 0,
    ) -> None:
        """writes: whether the model can write text; encodes: whether states may be asked of it.
        drafter_faults: of the drafter that the executor runs; the core counts those of its own.
        """
        self._writes = writes
        self._encodes = encodes
        self.core = core
        self.adapters = adapters
        self.clock = clock
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = grammars
        self.back_memory = back_memory
        self._drafter_faults = drafter_faults
        self._open: dict[str, OpenRequest] = {}
        self._numbers = count()
        self.book = EventBook()  # of every open request, and of every step
        self._listeners: list[Callable[[list[Event]], None]] = []
        self.on_submit: list[Callable[[OpenRequest], object]] = []  # called with every request that was taken
        self.on_end: list[Callable[[OpenRequest], object]] = []  # and, once, when it is over
        self._untold: deque[tuple[OpenRequest, OutputDelta, bool]] = deque()  # True: the request's last
        self.stepper = Stepper(core, executor, clock, fold=self._fold, observe=observe)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self.core.has_work

    @property
    def due_in_s(self) -> float | None:
        """How soon a step would do something though nothing comes; None: never."""
        due_s = self.core.due_s
        return None if due_s is None else max(0.0, due_s - self.clock.now_s())

    @property
    def n_open(self) -> int:
        """Requests not yet finished."""
        return len(self._open)

    def stats(self) -> CoreStats:
        """Counts of sequences and blocks right now."""
        stats = self.core.stats()
        return replace(stats, drafter_faults=stats.drafter_faults + self._drafter_faults())

    def adapter_counts(self) -> AdapterCounts:
        """Of this moment. On any thread: list() of a dict is one C call."""
        running: dict[str, None] = {}
        waiting: dict[str, None] = {}
        for opened in list(self._open.values()):
            if opened.request.adapter is not None and opened.record is not None:
                (running if opened.record.chunks else waiting)[opened.request.adapter.name] = None
        adapters = self.adapters
        return AdapterCounts(
            loaded=len(adapters.served), most=adapters.max_loras, n_bytes=adapters.n_bytes, running=tuple(running),
            waiting=tuple(waiting),
        )  # fmt: skip

    def listen(self, listener: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Call `listener` with every batch of events, on the engine's thread. Returns the function that ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def make_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        arrival_s: float,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | AdapterRef | None = None,
        pooling: Pooling | None = None,
        trace: str | None = None,
    ) -> Request:
        """Turn a prompt into a Request, and compile its grammar. Safe on any thread; may take up to seconds.

        pooling: its state is wanted, and no tokens.
        Raises RequestError for an empty prompt, ids outside the vocabulary or an adapter that is not loaded, GrammarError for a
        bad constraint.
        """
        self._refuse_other_task(pooling)
        token_ids, segments = prompt_ids(prompt, self.tokenizer, vocab_size=self._vocab_size)
        request = Request(
            request_id=f"req-{next(self._numbers)}" if request_id is None else request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            arrival_s=arrival_s,
            eos_token_ids=tuple(self.tokenizer.eos_token_ids),
            priority=priority,
            cache_salt=cache_salt,
            segments=segments,
            prediction_token_ids=self._prediction_ids(sampling),
            adapter=adapter if adapter is None or isinstance(adapter, AdapterRef) else self.adapters.find(adapter),
            pooling=pooling,
            trace=trace,
        )
        ids("stop_token_ids", sampling.stop_token_ids, RequestError, n_ids=self._vocab_size)
        ids("logit_bias", sampling.logit_bias.keys(), RequestError, n_ids=self._vocab_size)
        if sampling.structured is not None:
            self._grammars.compile(sampling.structured)  # here, off the engine's thread; `submit` finds it cached
        return request

    def _refuse_other_task(self, pooling: Pooling | None) -> None:
        if pooling is None and not self._writes:
            raise RequestError(
                "this model has no output projection: it embeds or scores texts, and writes none",
                hint="ask for embeddings or scores, or load a model that writes",
            )
        if pooling is not None and not self._encodes:
            raise RequestError("this model was loaded to write text", hint="load it with the task embed or score")

    def _prediction_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        prediction = getattr(sampling, "prediction", None)  # of another type: Request says so
        if prediction is None:
            return ()
        self.tokenizer.refuse_endless(prediction, self.core.context_limit_tokens, param="prediction")
        return tuple(self.tokenizer.encode(prediction, add_special_tokens=False))

    def submit(self, request: Request, on_delta: Callable[[OutputDelta], None]) -> OpenRequest:
        """Take a request. Raises PromptTooLong, CapacityError or RequestError and then keeps nothing of it."""
        if request.request_id in self._open:
            raise RequestError(f"request_id {request.request_id!r} is already in use", param="request_id")
        # a chat answer begins a text of its own; anything else continues the prompt's
        opened = OpenRequest(request, tokenizer=self.tokenizer, on_delta=on_delta, follows_text=not request.segments)
        if request.sampling.structured is not None:
            opened.grammar = self._grammars.compile(request.sampling.structured)
        if request.adapter is not None:
            self.adapters.hold(request.adapter)
        try:
            events = self.core.submit(request)
        except BaseException:
            self._let_go(request)
            raise
        self._open[request.request_id] = opened
        self._publish(events)
        for tell in self.on_submit:
            tell(opened)
        return opened

    def abort(
        self, request_id: str, *, reason: FinishReason = FinishReason.ABORT, of: OpenRequest | None = None
    ) -> bool:
        """End a request in any state. False when it is not open (finished, or never seen).

        of: this one only, and none that came later under its name.
        """
        if of is not None and self._open.get(request_id) is not of:
            return False
        is_open = request_id in self._open
        try:
            self._publish(self.core.cancel(request_id, self.clock.now_s(), reason=reason))
        finally:
            self._forget(request_id)
        return is_open

    def _forget(self, request_id: str) -> None:
        opened = self._open.pop(request_id, None)
        self.book.take(request_id)
        if opened is None:
            return
        self._let_go(opened.request)
        for tell in self.on_end:
            tell(opened)

    def _let_go(self, request: Request) -> None:
        if request.adapter is not None:
            self.adapters.let_go(request.adapter)

    def step(self) -> bool:
        """Run one step; False when there was nothing to do. Raises ExecutorError when the device fails.

        Whatever it raises, the requests of the step have ended with ERROR and the next step may follow.
        """
        try:
            return self.stepper.step()
        finally:
            self._tell()

    def end_all(self, reason: FinishReason, error: EngineError | None = None) -> None:
        """End every open request, so that each gets its answer, whatever a listener raises on the way."""
        for request_id, opened in list(self._open.items()):
            opened.error = error or opened.error
            try:
                self.abort(request_id, reason=reason)
            except Exception as fault:
                logger.error("request id=%s could not end in order", request_id, exc_info=fault)
            for index, choice in enumerate(opened.choices):
                end = FinishEvent(
                    request_id=request_id,
                    index=index,
                    at_s=self.clock.now_s(),
                    reason=reason,
                    output_tokens=len(choice.token_ids),
                )
                self._on_finish(opened, end)  # nothing where the choice has ended
        self._tell()

    def _publish(self, events: list[Event]) -> None:
        self._fold(events)
        self._tell()

    def _tell(self) -> None:
        """Hand out deltas, in the order of their steps: who is told one may step this engine for an answer, or raise."""
        while self._untold:
            opened, delta, is_last = self._untold.popleft()
            tell = opened.on_delta
            if is_last:
                opened.on_delta = (
                    ignore_delta  # who is told holds the request: with this the circle is open, and it goes at once
                )
            tell(delta)

    def _fold(self, events: list[Event]) -> None:
        """Fold events into records, turn tokens into text, tell listeners; stop strings may end choices on the way."""
        finishes = {(event.request_id, event.index): event for event in events if isinstance(event, FinishEvent)}
        added: list[Event] = []
        fold = self.book.fold
        # a step with drafts gives a choice several tokens, as several steps of a worker do (`cluster.core`); with ends one may
        # end two ways at once
        kinds = list(map(type, events))
        steps = _Steps() if finishes or DraftEvent in kinds or kinds.count(StepEndEvent) > 1 else None
        if steps is None:
            fold(events)
        for event in events:
            if steps is not None:
                kept = steps.keep(event, self._open)
                if kept is None:
                    continue
                event = kept
                fold((event,))
            if isinstance(event, StepBeginEvent | StepEndEvent):
                continue
            opened = self._open.get(event.request_id)
            if opened is None:
                continue
            if isinstance(event, TokenEvent):
                added += self._on_token(opened, event, finishes.get((event.request_id, event.index)))
            elif isinstance(event, FinishEvent):
                self._on_finish(opened, event)
            elif isinstance(event, PromptLogprobsEvent):
                opened.prompt_logprobs += event.entries
            elif isinstance(event, StateEvent):
                opened.state = event.state
            elif isinstance(event, ArrivalEvent):
                opened.record = self.book.records[event.request_id]
        if steps is not None:
            events = steps.events
        for listener in tuple(self._listeners):
            listener(events)
        if added:
            self._fold(added)

    def _on_token(self, opened: OpenRequest, event: TokenEvent, finish: FinishEvent | None) -> list[Event]:
        choice = opened.choices[event.index]
        if choice.is_finished or choice.stop_string is not None:
            return []
        choice.token_ids.append(event.token_id)
        is_stop_token = finish is not None and finish.stop_token_id == event.token_id
        is_last = finish is not None and event.position == finish.output_tokens - 1
        # an EOS or stop token is counted and reported, but is not part of the text
        delta = (
            TextDelta(text="", is_stopped=False) if is_stop_token and is_last else choice.stream.push(event.token_id)
        )
        if delta.is_stopped:
            choice.stop_string = delta.stop_string
        self._emit(opened, event, delta.text)
        if delta.is_stopped and finish is None:
            return self.core.finish(
                event.request_id,
                event.index,
                event.at_s,
                reason=FinishReason.STOP,
                output_tokens=len(choice.token_ids),
            )
        return []

    def _emit(self, opened: OpenRequest, event: TokenEvent, text: str) -> None:
        delta = OutputDelta(
            index=event.index,
            text=text,
            token_ids=(event.token_id,),
            logprobs=() if event.logprobs is None else (event.logprobs,),
            finish_reason=None,
            stop_reason=None,
            at_s=event.at_s,
        )
        self._untold.append((opened, delta, False))

    def _on_finish(self, opened: OpenRequest, event: FinishEvent) -> None:
        choice = opened.choices[event.index]
        if choice.is_finished:
            return
        choice.is_finished = True
        choice.read_end(event.reason)
        stopped_by_text = choice.stop_string is not None
        delta = OutputDelta(
            index=event.index,
            text=choice.tail,
            token_ids=(),
            logprobs=(),
            finish_reason=FinishReason.STOP if stopped_by_text else event.reason,
            stop_reason=choice.stop_string if stopped_by_text else event.stop_token_id,
            at_s=event.at_s,
        )
        if event.error is not None:
            opened.error = event.error
            logger.warning("request failed id=%s index=%d error=%s", event.request_id, event.index, event.error)
        self._untold.append((opened, delta, opened.is_finished))
        if opened.is_finished:
            self._forget(event.request_id)
