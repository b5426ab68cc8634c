"""The door of control: `EngineCore`, the object that engine and simulator share.

    plan, events = core.begin_step(clock.now_s())
    if plan is not None:
        result = executor.execute(plan)
        events += core.end_step(plan, result, clock.now_s())

`diptych.stepper` is the loop around it.
It has no clock and draws no random numbers: the same calls with the same arguments give the same plans and events.
One step is in flight at a time; submit, cancel and finish are legal at any moment (from one thread).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from diptych.control.blocks import BlockPool
from diptych.control.books import Books
from diptych.control.entry import check_prompt
from diptych.control.handoff import reserve, settle, start_sending, state_behind
from diptych.control.scheduler import Predict, Scheduler
from diptych.control.sequence import Sequence
from diptych.control.speculation import Depths, EveryGuess, Guesser, NewDrafter
from diptych.control.state_keeper import StateKeeper, most_running
from diptych.control.stats import CoreStats, WorkerStats
from diptych.ground.config import MODEL_DRAFTERS, BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, EngineError, RequestError
from diptych.ground.events import (
    ArrivalEvent,
    DraftEvent,
    Event,
    PromptLogprobsEvent,
    StateEvent,
    StepEndEvent,
    TokenEvent,
)
from diptych.ground.handoff import HandOff
from diptych.ground.phase import FinishReason, Phase, Status
from diptych.ground.request import CacheScope, Request
from diptych.ground.step import Chunk, ChunkResult, StepPlan, StepResult

_new = tuple.__new__  # of a NamedTuple, in half the time: an event is made with every token


class EngineCore:
    """Requests in, plans down, results up, events out. See the module."""

    due_s: float | None = None  # when something ends though nothing comes and no step runs: never, in one engine

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockConfig,
        *,
        model_revision: str,
        predict_s: Predict | None = None,
        seed: int = 0,
        depths: Depths | None = None,
        n_vocab: int | None = None,
        drafters: dict[str, NewDrafter] | None = None,
        executor_drafters: SequenceOf[str] | None = None,
    ) -> None:
        """depths: what drafts are worth; None: every guess. n_vocab: bound of token ids, for what drafters propose.

        drafters: by name, in place of those that config.speculate names. executor_drafters: those that the executor
        runs, by number; None: the one that config.speculate names, if it is such.
        """
        self.config = config
        self.block_config = blocks
        self.model_revision = model_revision
        self.seed = seed
        self._predict_s = predict_s
        self._depths = EveryGuess() if depths is None else depths
        if executor_drafters is None:
            executor_drafters = [config.speculate] if config.speculate in MODEL_DRAFTERS else []
        self._guesser = Guesser(config, n_vocab=n_vocab, drafters=drafters, executor_drafters=executor_drafters)
        self._scheduler = self._new_scheduler()
        self.pool = self._scheduler.pool
        self._books = self._new_books()
        self._in_flight: dict[int, Sequence] = {}
        self._plan: StepPlan | None = None
        self._next_step_id = 0
        # a call changes the books; seen by another only when an exception cut the first one short
        self._is_torn = False

    @property
    def context_limit_tokens(self) -> int:
        """The longest sequence, prompt and output together: the configured context or the whole pool."""
        return min(self.config.max_context_tokens, self.pool.n_blocks * self.pool.block_tokens)

    @property
    def max_running_sequences(self) -> int:
        """Sequences that run at one time."""
        return self._scheduler.max_running

    @property
    def has_work(self) -> bool:
        """Whether a request is open or a step in flight."""
        return bool(self._books.requests) or self._plan is not None

    def submit(self, request: Request) -> list[Event]:
        """Put a request in line. `n` choices share the prompt that choice 0 reads.

        Raises:
            PromptTooLong: prompt and one output token exceed the context or the KV pool.
            RequestError: the prompt is empty, or the id is that of an open request.
            CapacityError: the waiting line holds too many tokens. A request is always taken when none waits.
        """
        prompt_tokens = len(request.prompt_token_ids)
        self.check_prompt(request)
        output_tokens = min(request.sampling.max_tokens, self.context_limit_tokens - prompt_tokens)
        weight = prompt_tokens + request.sampling.n * output_tokens
        in_line, limit = self._scheduler.waiting_tokens, self.config.max_waiting_tokens
        if in_line > 0 and in_line + weight > limit:
            raise CapacityError(
                f"{in_line} tokens are waiting and this request may need {weight}; at most {limit} may wait",
                hint="try again later, or raise max_waiting_tokens",
            )
        self._is_torn = True
        sequences = self._books.open(HandOff.of(request), context_tokens=self.context_limit_tokens)
        self._scheduler.enqueue(sequences[0])
        self._is_torn = False
        return [
            ArrivalEvent(
                request_id=request.request_id,
                at_s=request.arrival_s,
                prompt_tokens=prompt_tokens,
                n=request.sampling.n,
            )
        ]

    def cancel(
        self,
        request_id: str,
        now_s: float,
        *,
        reason: FinishReason = FinishReason.ABORT,
        error: EngineError | None = None,
    ) -> list[Event]:
        """End every open choice of a request, in any state. An unknown or finished id gives no events."""
        self._is_torn = True
        events = self._books.cancel(request_id, now_s, reason, error)
        self._is_torn = False
        return events

    def finish(
        self, request_id: str, index: int, now_s: float, *, reason: FinishReason, output_tokens: int | None = None
    ) -> list[Event]:
        """End one choice from outside (a stop string was seen), output_tokens: behind so many of its tokens (None: all).

        Unknown or finished: no events.
        """
        self._is_torn = True
        events: list[Event] = []
        for seq in self._books.requests.get(request_id, ()):
            if seq.index == index and seq.status is not Status.FINISHED:
                if output_tokens is not None:
                    del seq.token_ids[seq.prompt_tokens + output_tokens :]
                events.append(self._books.end(seq, now_s, reason))
        self._books.forget_if_over(request_id)
        self._is_torn = False
        return events

    def check_prompt(self, request: Request) -> None:
        """Raise for a prompt that could never be served here; see `submit`."""
        if request.request_id in self._books.requests:
            raise RequestError(f"request id {request.request_id!r} is already open", param="request_id")
        check_prompt(
            request,
            max_context_tokens=self.config.max_context_tokens,
            n_blocks=self.pool.n_blocks,
            block_tokens=self.pool.block_tokens,
            max_step_tokens=self.config.max_step_tokens,
        )

    def submit_prefill(self, request: Request) -> list[Event]:
        """Put a request in line whose prompt alone is read here. With its first token it waits, blocks and all, for `sent`.

        Raises as `submit` does. One whose first token is its last ends here as any other.
        """
        assert request.sampling.n == 1, "choices share the prompt's blocks, so they stay together"
        events = self.submit(request)
        self._books.requests[request.request_id][0].hands_off = True
        return events

    def sent(self, request_id: str) -> None:
        """Another engine has its keys and values: forget the request, without an end, and let its blocks go."""
        self._is_torn = True
        (seq,) = self._books.requests.pop(request_id)
        seq.move(Status.FINISHED)
        self._scheduler.release(seq)
        self._books.ended_seq_ids.append(seq.seq_id)
        self._is_torn = False

    def resume(self, hand_off: HandOff) -> None:
        """Go on where another engine stopped: no token comes again, and what was read there is read here as a recompute.

        Raises as `check_prompt` does; whoever took the request has judged the waiting line.
        """
        self.check_prompt(hand_off.request)
        self._is_torn = True
        sequences = self._books.open(hand_off, context_tokens=self.context_limit_tokens)
        for seq in sequences:
            if not seq.is_unborn:
                self._scheduler.enqueue(seq)
        self._is_torn = False

    def reserve(self, hand_off: HandOff) -> int | None:
        """Hold blocks for a request whose prompt another engine reads; answers how many of its tokens are cached here.

        None: there is no room now. Raises PromptTooLong where there never is.
        """
        assert hand_off.shares_prompt, "choices that have begun are read one by one"
        self.check_prompt(hand_off.request)
        self._is_torn = True
        sequences = self._books.open(hand_off, context_tokens=self.context_limit_tokens)
        cached_tokens = reserve(self._scheduler, sequences[0])
        if cached_tokens is None:
            self._books.withdraw(hand_off.request.request_id)
        self._is_torn = False
        return cached_tokens

    def settle(self, request_id: str, n_tokens: int, now_s: float, *, has_state: bool = False) -> list[Event]:
        """The first n_tokens of a reserved prompt have their keys and values, and no more of them come: read on from there.

        n_tokens: whole blocks. They count as cached as far as they were here, as transferred beyond, and as recomputed
        where the request was read before it came here. has_state: what `places_of` said holds the state behind them.
        """
        self._is_torn = True
        event = settle(self._scheduler, self._books.requests[request_id][0], n_tokens, now_s, has_state=has_state)
        self._is_torn = False
        return [event]

    def blocks_of(self, request_id: str) -> tuple[list[int], int]:
        """The block table of a request's first choice, and how many of its tokens are computed. For hand-offs."""
        seq = self._books.requests[request_id][0]
        return seq.block_ids, seq.computed_tokens

    def places_of(self, request_id: str, n_tokens: int = 0) -> tuple[int | None, int | None]:
        """Its own place for a state, and that of the state behind so many tokens, whole blocks. None: there is none."""
        seq = self._books.requests[request_id][0]
        return seq.place, state_behind(self._scheduler, seq, n_tokens)

    def abort_step(self, now_s: float, *, error: EngineError) -> list[Event]:
        """The step in flight will have no result: end its requests with ERROR, and give their blocks back.

        Nothing happens when no step is in flight. When an exception cut one of this object's own calls short, its books
        cannot be trusted: then every open request ends and the whole pool is free, cached prefixes included.
        """
        if self._is_torn:
            return self._start_anew(now_s, error)
        plan, in_flight = self._plan, self._in_flight
        if plan is None:
            return []
        self._is_torn = True
        self._plan, self._in_flight = None, {}
        self._books.ended_seq_ids[:0] = plan.ended_seq_ids  # perhaps the executor never saw them
        events: list[Event] = []
        for seq in in_flight.values():
            seq.is_in_flight = False
            if seq.status is Status.FINISHED:  # cancelled while the step ran
                self._scheduler.release(seq)
        for request_id in dict.fromkeys(seq.request.request_id for seq in in_flight.values()):
            events += self._books.cancel(request_id, now_s, FinishReason.ERROR, error)
        self._is_torn = False
        return events

    def _start_anew(self, now_s: float, error: EngineError) -> list[Event]:
        """Nothing but requests and started ids is believed any more."""
        events, ended = self._books.write_off(now_s, error)
        if self._plan is not None:
            ended = [*self._plan.ended_seq_ids, *ended]
        before, self._scheduler = self._scheduler, self._new_scheduler()
        self.pool = self._scheduler.pool
        self._scheduler.n_preemptions = before.n_preemptions
        self._scheduler.query_tokens, self._scheduler.hit_tokens = before.query_tokens, before.hit_tokens
        self._books = self._new_books(first_seq_id=self._books.next_seq_id)
        self._books.ended_seq_ids = list(dict.fromkeys(ended))
        self._in_flight, self._plan = {}, None
        self._is_torn = False
        return events

    def _new_books(self, first_seq_id: int = 0) -> Books:
        memory = self._guesser.memory
        return Books(self._scheduler, engine_seed=self.seed, memory=memory, first_seq_id=first_seq_id)

    def _new_scheduler(self, kind: type[Scheduler] = Scheduler) -> Scheduler:
        blocks, config = self.block_config, self.config
        pool = BlockPool(
            n_blocks=blocks.n_blocks, block_tokens=blocks.block_tokens, is_caching=config.enable_prefix_cache
        )
        return kind(
            config,
            pool,
            StateKeeper.of(config, blocks),
            max_running=most_running(config, blocks),
            model_revision=self.model_revision,
            predict_s=self._predict_s,
            depths=self._depths,
            guesser=self._guesser,
        )

    def begin_step(self, now_s: float) -> tuple[StepPlan | None, list[Event]]:
        """Plan the next step; None when there is nothing to do. The plan must come back through `end_step`."""
        assert self._plan is None, "the step before has not ended"
        if not self._books.requests:
            return None, []
        self._is_torn = True
        plan, events = self._scheduler.plan(
            step_id=self._next_step_id, now_s=now_s, ended_seq_ids=tuple(self._books.ended_seq_ids)
        )
        if plan is not None:
            self._plan = plan
            self._in_flight = self._scheduler.planned
            self._next_step_id += 1
            self._books.ended_seq_ids = []
        self._is_torn = False
        return plan, events

    def end_step(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Commit what the step gave: tokens, finishes, forks. Every token's time is `now_s`."""
        assert self._plan is plan, plan.step_id
        assert result.step_id == plan.step_id, (plan.step_id, result.step_id)
        assert len(result.results) == len(plan.chunks), (len(result.results), len(plan.chunks))
        self._is_torn = True
        events: list[Event] = []
        in_flight, self._in_flight, self._plan = self._in_flight, {}, None
        for chunk, chunk_result in zip(plan.chunks, result.results, strict=True):
            assert chunk.seq_id == chunk_result.seq_id, (chunk.seq_id, chunk_result.seq_id)
            seq = in_flight[chunk.seq_id]
            seq.is_in_flight = False
            if seq.status is Status.FINISHED:  # cancelled while the step ran
                self._scheduler.release(seq)
            elif (
                chunk.phase is Phase.DECODE
                and seq.speculation is None
                and len(chunk.token_ids) == 1
                and chunk_result.error is None
            ):
                self._commit_decode(seq, chunk_result, plan.step_id, now_s, events)
            else:
                events += self._commit(seq, chunk, chunk_result, plan.step_id, now_s)
        self._scheduler.took(result.device_s + result.host_s)
        events.append(StepEndEvent(plan.step_id, now_s, result.device_s, result.host_s))
        self._is_torn = False
        return events

    @property
    def waits_for_others(self) -> bool:
        """Whether keys and values are on their way to or from another engine: what waits may wait for their blocks."""
        between = (Status.SENDING, Status.RECEIVING)
        return any(seq.status in between for sequences in self._books.requests.values() for seq in sequences)

    @property
    def running_and_waiting(self) -> tuple[int, int]:
        """How many sequences do: two of the numbers of `stats`."""
        return self._scheduler.n_running, len(self._scheduler.waiting) + self._books.n_unborn

    def stats(self) -> CoreStats:
        """Gauges and counters of this moment."""
        scheduler, pool = self._scheduler, self.pool
        running, waiting = self.running_and_waiting
        return CoreStats(
            running=running,
            waiting=waiting,
            waiting_tokens=scheduler.waiting_tokens,
            blocks_in_use=pool.held_blocks,
            blocks_cached=pool.idle_blocks,
            blocks_free=pool.free_blocks,
            prefix_queries_tokens=scheduler.query_tokens,
            prefix_hits_tokens=scheduler.hit_tokens,
            preemptions=scheduler.n_preemptions,
            drafter_faults=self._guesser.n_faults,
        )

    def worker_stats(self) -> tuple[WorkerStats, ...]:
        """None: this is one engine. A cluster's door has some."""
        return ()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        self.pool.reset_index()
        if self._scheduler.states is not None:
            self._scheduler.states.pool.reset()

    def prefix_match(
        self, token_ids: tuple[int, ...], salt: CacheScope = None, *, digests: list[bytes] | None = None
    ) -> int:
        """Leading tokens of this prompt that a request would find cached now.

        digests: of its leading blocks, as far as they are known; those found on the way are added.
        """
        entries = self.pool.match(
            token_ids,
            salt=salt,
            digests=[] if digests is None else digests,
            root=self._scheduler.root_of(salt),
            max_blocks=max(0, len(token_ids) - 1) // self.pool.block_tokens,
        )
        return (self._scheduler.states.reach if self._scheduler.states else len)(entries) * self.pool.block_tokens

    def check(self) -> None:
        """Raise BlockLeak unless every block is accounted for. For tests and debugging: O(pool)."""
        alive = {seq.seq_id: seq for sequences in self._books.requests.values() for seq in sequences}
        alive.update(self._in_flight)
        self.pool.check([seq.block_ids for seq in alive.values()])
        if self._scheduler.states is not None:
            self._scheduler.states.check(alive.values())

    # Inside

    def _commit_decode(
        self, seq: Sequence, result: ChunkResult, step_id: int, now_s: float, events: list[Event]
    ) -> None:
        """As `_commit`, of a chunk that is the newest token and no draft: nearly all are, so its way is short."""
        (token_id,) = result.token_ids
        known, scheduler, request_id = seq.token_ids, self._scheduler, seq.request.request_id
        computed = len(known)
        seq.advance(computed)
        known.append(token_id)
        n = computed + 1 - seq.prompt_tokens
        logprobs = result.logprobs[0] if result.logprobs else None
        events.append(_new(TokenEvent, (request_id, seq.index, now_s, token_id, n - 1, step_id, logprobs)))
        if computed // scheduler.pool.block_tokens > len(seq.serials):
            scheduler.register_computed(seq)
        if n >= seq.max_output_tokens or token_id in seq.stop_ids or result.is_complete:
            reason, stop_token_id = seq.stop_after(token_id, is_complete=result.is_complete)
            if reason is not None:
                events.append(self._books.end(seq, now_s, reason, stop_token_id=stop_token_id))
                self._books.forget_if_over(request_id)

    def _commit(self, seq: Sequence, chunk: Chunk, result: ChunkResult, step_id: int, now_s: float) -> list[Event]:
        """Move computed forward, hand out tokens, and stop where a token or a limit says so.

        A sequence that failed takes its whole request with it and nothing else. What its chunk wrote stays out of the
        prefix index.
        """
        if result.error is not None:
            return self._books.cancel(seq.request.request_id, now_s, FinishReason.ERROR, result.error)
        known_end = min(chunk.end_pos, seq.known_tokens)
        n_accepted = max(0, len(result.token_ids) - 1)  # drafted tokens of this chunk that hold
        assert bool(result.token_ids) == chunk.samples, chunk.seq_id
        assert known_end + n_accepted <= chunk.end_pos, chunk.seq_id
        seq.advance(known_end + n_accepted)
        if seq.drafted and (states := self._scheduler.states) is not None:
            states.verified(seq, chunk, 1 + n_accepted)
        events = self._prompt_logprobs(seq, chunk, result, now_s)
        if not result.token_ids:
            self._scheduler.register_computed(seq)
            if seq.request.only_reads and seq.computed_tokens == seq.known_tokens:
                is_pooled = seq.request.pooling is not None
                if is_pooled:
                    events.append(StateEvent(seq.request.request_id, now_s, step_id, result.state))
                events.append(self._books.end(seq, now_s, FinishReason.STOP if is_pooled else FinishReason.LENGTH))
                self._books.forget_if_over(seq.request.request_id)
            return events
        if seq.status is Status.PREFILL:
            self._scheduler.register_computed(seq)
            self._books.fork_children(seq)
            if seq.hands_off:
                start_sending(self._scheduler, seq)
            else:
                self._scheduler.start_decode(seq)
        elif seq.speculation is not None and seq.speculation.is_open:
            seq.speculation.learn(result.token_ids)
        n_drafted = len(chunk.token_ids) - 1 if chunk.phase is Phase.DECODE else 0
        for k, token_id in enumerate(result.token_ids):
            seq.token_ids.append(token_id)
            n, logprobs = seq.output_tokens, result.logprobs[k] if result.logprobs else None
            events.append(TokenEvent(seq.request.request_id, seq.index, now_s, token_id, n - 1, step_id, logprobs))
            is_last = k == n_accepted
            reason, stop_token_id = seq.stop_after(token_id, is_complete=is_last and result.is_complete)
            if reason is not None:
                seq.computed_tokens = min(seq.computed_tokens, seq.known_tokens - 1)  # drafts behind the stop
                self._scheduler.register_computed(seq)
                if n_drafted:
                    kept = min(k + 1, n_accepted)
                    events.append(DraftEvent(seq.request.request_id, seq.index, now_s, step_id, n_drafted, kept))
                events.append(self._books.end(seq, now_s, reason, stop_token_id=stop_token_id))
                self._books.forget_if_over(seq.request.request_id)
                return events
        self._scheduler.register_computed(seq)
        speculation = seq.speculation
        if speculation is not None and (result.draft_token_ids or result.forced_token_ids or speculation.is_open):
            speculation.hand(chunk.drafter, result.draft_token_ids, result.forced_token_ids)
            if speculation.has_drafts_at_hand:
                self._scheduler.drafts.wake()
        if n_drafted:
            self._scheduler.drafts.take_back(seq)
            events.append(DraftEvent(seq.request.request_id, seq.index, now_s, step_id, n_drafted, n_accepted))
        return events

    def _prompt_logprobs(self, seq: Sequence, chunk: Chunk, result: ChunkResult, now_s: float) -> list[Event]:
        """Hand out each prompt position once, also when a preemption computes it again; choice 0 speaks for all."""
        if not result.prompt_logprobs or seq.index != 0:
            return []
        first = chunk.start_pos + 1 if chunk.start_pos else 0  # a row judges the token after its own
        start = max(seq.logprobs_tokens, first)
        entries = result.prompt_logprobs[start - first :]
        if not entries:
            return []
        seq.logprobs_tokens = start + len(entries)
        return [PromptLogprobsEvent(request_id=seq.request.request_id, at_s=now_s, start=start, entries=entries)]
