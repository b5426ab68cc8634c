"""Plans one step: decode chunks first, then prefill with what the token budget and the stall budget leave.

Owns which sequences wait, prefill and decode, and every block they hold. `EngineCore` (loop.py) tells it what came of a
step. A plan costs O(chunks + chunk tokens + new blocks): nothing here walks a context or the waiting line.

Stall budget: when the step holds decode chunks, prefill chunks are as long as predict_s(shape) <= stall_budget_s allows.
Where even the smallest does not fit, the first prefill in line still gets MIN_PREFILL_TOKENS (policy.py), so it ends.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.control.blocks import BlockPool, PrefixEntry, root_digest
from diptych.control.policy import MIN_PREFILL_TOKENS, RankedList, longest_within
from diptych.control.sequence import Sequence
from diptych.control.speculation import FIRST_DRAFTS, NO_GUESS, Depths, Guesser, Priced, Speculation
from diptych.ground.config import MOST_DRAFT_ROWS, SchedulerConfig
from diptych.ground.events import Event, PreemptEvent, ScheduledEvent, StepBeginEvent
from diptych.ground.phase import Phase, Status
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.step import BlockCopy, Chunk, SequenceStart, StepPlan

Predict = Callable[[StepShape], float]


NOTHING = StepShape(())


class StepDraft:
    """A plan in the making; lives for one call of `Scheduler.plan`."""

    def __init__(self, *, step_id: int, now_s: float, budget_tokens: int) -> None:
        self.step_id = step_id
        self.now_s = now_s
        self.left_tokens = budget_tokens
        self.shape = NOTHING
        self.chunks: list[Chunk] = []
        self.copies: list[BlockCopy] = []
        self.starts: list[SequenceStart] = []
        self.preempted: list[Event] = []
        self.scheduled: list[Event] = []
        self.decode_request_ids: list[str] = []
        self.speculations: list[tuple[int, Speculation]] = []  # of decode chunks that have drafters, by chunk


class Scheduler:
    """See the module. Only `EngineCore` calls it."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        model_revision: str,
        predict_s: Predict | None,
        depths: Depths,
        guesser: Guesser,
    ) -> None:
        self.config = config
        self.pool = pool
        self.predict_s = predict_s
        self.depths = depths
        self.guesser = guesser
        self.waiting = RankedList()
        self.prefilling = RankedList()
        self.decoding = RankedList()
        self.forked = RankedList()  # waiting, yet holding the blocks shared by their parent
        self.received = RankedList()  # keys and values came from another engine; to decode when there is a place
        self.planned: dict[int, Sequence] = {}  # sequences of the last plan's chunks
        self.waiting_tokens = 0
        self.n_preemptions = 0
        self.query_tokens = 0  # prompt tokens looked up in the prefix index for the first time, and those found
        self.hit_tokens = 0
        # A running decode always fits into the step, so it never waits for another's turn.
        self.max_running = min(config.max_running_sequences or config.max_step_tokens, config.max_step_tokens)
        self._model_revision = model_revision
        self._promised_blocks = 0

    @property
    def n_running(self) -> int:
        """Sequences in prefill or decode."""
        return len(self.prefilling) + len(self.decoding)

    # Coming and going

    def enqueue(self, seq: Sequence) -> None:
        """Put a waiting sequence in line; one that holds blocks keeps them while nobody needs them more."""
        assert seq.status is Status.WAITING, seq.status
        seq.parked_at_drops = None
        self.waiting.add(seq)
        self.waiting_tokens += seq.waiting_tokens
        if seq.block_ids:
            self.forked.add(seq)

    def detach(self, seq: Sequence) -> None:
        """Take a sequence out of every list; its blocks stay."""
        if self.waiting.holds(seq):
            self._leave_line(seq)
        elif self.prefilling.holds(seq):
            self.prefilling.remove(seq)
        elif self.decoding.holds(seq):
            self.decoding.remove(seq)
        elif self.received.holds(seq):
            self.received.remove(seq)
        self._promise(seq, 0)

    def release(self, seq: Sequence) -> None:
        """Give back its blocks, the last first, so that the head of a shared prefix stays cached longest."""
        for block_id in reversed(seq.block_ids):
            self.pool.drop(block_id)
        seq.block_ids = []
        seq.table_sent = 0
        seq.serials = []
        seq.computed_tokens = 0

    def start_decode(self, seq: Sequence) -> None:
        """Its prompt is computed and its first new token known."""
        seq.move(Status.DECODE)
        assert seq.promised_blocks == 0, seq.promised_blocks
        if seq.speculation is None:
            seq.speculation = self.guesser.begin(seq.request, self.depths)
        self.prefilling.remove(seq)
        self.decoding.add(seq)

    # Between two engines: one reads the prompt and keeps its blocks while they are sent, the other holds as many for them

    def start_sending(self, seq: Sequence) -> None:
        """Its prompt is computed, and somebody else will decode it."""
        seq.move(Status.SENDING)
        self.prefilling.remove(seq)

    def reserve(self, seq: Sequence) -> int | None:
        """Hold blocks for a prompt that another engine reads; answers how many of its tokens are here. None: no room."""
        hits = self._lookup(seq)
        if self.waiting or not self._has_blocks_for(seq, hits):
            return None  # who was here before goes first
        seq.move(Status.RECEIVING)
        for entry in hits:
            self.pool.hold(entry.block_id)
            seq.block_ids.append(entry.block_id)
            seq.serials.append(entry.serial)
        seq.block_ids += self.pool.take(self.pool.blocks_for(seq.prompt_tokens) - len(hits))
        return len(hits) * self.pool.block_tokens

    def receive(self, seq: Sequence, token_id: int) -> None:
        """Keys and values of its prompt are in its blocks, and this is the token that followed."""
        seq.advance(seq.prompt_tokens)
        self.register_computed(seq)
        seq.token_ids.append(token_id)
        seq.table_sent = len(seq.block_ids)
        self.received.add(seq)

    def _start_received(self) -> None:
        while self.received.first is not None and self.n_running < self.max_running:
            seq = self.received.first
            self.received.remove(seq)
            seq.move(Status.DECODE)
            self.decoding.add(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a waiting child hold the parent's prompt blocks; it computes the last prompt token itself."""
        n_shared = self.pool.blocks_for(parent.prompt_tokens)
        n_intact = (parent.prompt_tokens - 1) // self.pool.block_tokens
        child.block_ids = parent.block_ids[:n_shared]
        for block_id in child.block_ids:
            self.pool.hold(block_id)
        child.digests = parent.digests[:n_intact]
        child.serials = parent.serials[:n_intact]
        child.advance(parent.prompt_tokens - 1)
        self.enqueue(child)

    def register_computed(self, seq: Sequence) -> None:
        """Offer every newly completed block of the sequence to the prefix index."""
        while (len(seq.serials) + 1) * self.pool.block_tokens <= seq.computed_tokens:
            self.register_next(seq)

    def register_next(self, seq: Sequence) -> None:
        """Offer the first completed block that was not offered yet."""
        i = len(seq.serials)
        serial = self.pool.register(
            seq.block_ids[i],
            i,
            token_ids=seq.token_ids,
            salt=seq.request.cache_salt,
            digests=seq.digests,
            root=self.root_of(seq.request.cache_salt),
            previous_serial=seq.serials[-1] if seq.serials else 0,
        )
        seq.serials.append(serial)

    def root_of(self, salt: str | None) -> bytes:
        """The start of the digest chain for this model and salt."""
        return root_digest(self._model_revision, salt)

    # Planning

    def plan(
        self, *, step_id: int, now_s: float, ended_seq_ids: tuple[int, ...]
    ) -> tuple[StepPlan | None, list[Event]]:
        """The next step and its events, or None when nothing can run."""
        draft = StepDraft(step_id=step_id, now_s=now_s, budget_tokens=self.config.max_step_tokens)
        self.planned = {}
        if self.received:
            self._start_received()
        self._plan_decodes(draft)
        if self.waiting or self.prefilling:
            self._plan_prefills(draft)
        if draft.speculations:
            plain = draft.shape
            self._add_drafts(draft)
            if self.guesser.executor_drafter is not None:
                self._ask_drafts(draft, plain)
        if not draft.chunks:
            return None, draft.preempted
        plan = StepPlan(
            step_id=step_id,
            chunks=tuple(draft.chunks),
            copies=tuple(draft.copies),
            starts=tuple(draft.starts),
            ended_seq_ids=ended_seq_ids,
            known_shape=draft.shape,
        )
        begin = StepBeginEvent(
            step_id=step_id,
            at_s=now_s,
            shape=draft.shape,
            decode_request_ids=tuple(draft.decode_request_ids),
            predicted_s=None if self.predict_s is None else self.predict_s(draft.shape),
        )
        return plan, [*draft.preempted, begin, *draft.scheduled]

    def _plan_decodes(self, draft: StepDraft) -> None:
        """One token for every decoding sequence. Nearly all only write into a block that they hold: keep that way short."""
        block_tokens, references, decode = self.pool.block_tokens, self.pool.references, Phase.DECODE
        shapes: list[ChunkShape] = []
        for seq in tuple(self.decoding):
            if seq.status is not Status.DECODE:
                continue  # preempted for an earlier one
            start, block_ids = seq.computed_tokens, seq.block_ids
            i = start // block_tokens
            first_new = len(block_ids)
            new_block_ids: tuple[int, ...] = ()
            if i >= first_new or references(block_ids[i]) > 1:
                if not self._make_room(seq, draft):
                    continue
                first_new = self._take_blocks(seq, start, start + 1, draft)
                new_block_ids = tuple(seq.block_ids[first_new:])
                seq.table_sent = len(seq.block_ids)
            draft.chunks.append(Chunk(seq.seq_id, decode, start, (seq.token_ids[-1],), first_new, new_block_ids, True))
            shapes.append(ChunkShape(decode, 1, start, True))
            if seq.speculation is not None:
                draft.speculations.append((len(shapes) - 1, seq.speculation))
            draft.decode_request_ids.append(seq.request.request_id)
            seq.is_in_flight = True
            self.planned[seq.seq_id] = seq
        if shapes:
            draft.left_tokens -= len(shapes)
            draft.shape = StepShape(shapes)

    def _add_drafts(self, draft: StepDraft) -> None:
        """Lengthen decode chunks by guesses, out of the rows and blocks that everybody else has left."""
        n_decodes = len(draft.decode_request_ids)
        is_due = self.depths.is_due(n_decodes)
        n_free = max(0, self.pool.available_blocks - self._promised_blocks)
        guesses: dict[int, list[int]] = {}
        priced: list[Priced] = [NO_GUESS] * n_decodes
        if self.guesser.memory is not None:
            self.guesser.memory.read()
        for i, speculation in draft.speculations:
            if not is_due and not speculation.has_drafts_at_hand:
                continue  # the price said no of late, and guesses cost time
            chunk = draft.chunks[i]
            seq = self.planned[chunk.seq_id]
            guess = speculation.propose(seq.token_ids)
            room = (len(seq.block_ids) + n_free) * self.pool.block_tokens - chunk.end_pos
            n = min(1 + MOST_DRAFT_ROWS // n_decodes, len(guess), room, seq.max_output_tokens - seq.output_tokens - 1)
            if n > 0:
                guesses[i], priced[i] = guess, speculation.priced(n)
        if not guesses:
            return
        depths = self.depths.choose(
            priced,
            shape=draft.shape,
            most_rows=min(draft.left_tokens, MOST_DRAFT_ROWS),
            limit_s=self.config.stall_budget_s,
        )
        if not any(depths):
            return
        depths = [self._send_drafts(draft, i, guesses[i][:depth]) if depth else 0 for i, depth in enumerate(depths)]
        draft.shape = draft.shape.with_drafts(depths)
        draft.left_tokens -= sum(depths)

    def _ask_drafts(self, draft: StepDraft, plain: StepShape) -> None:
        """Say how many drafts the executor is to make behind each decode chunk: as many as would pay in a step like this.

        plain: the step without drafts.
        """
        n_decodes = len(draft.decode_request_ids)
        priced: list[Priced] = [NO_GUESS] * n_decodes
        for i, speculation in draft.speculations:
            seq = self.planned[draft.chunks[i].seq_id]
            left = seq.max_output_tokens - seq.output_tokens - 2  # behind a token of this step and one of the next
            priced[i] = speculation.askable(max(0, min(1 + MOST_DRAFT_ROWS // n_decodes, left)))
        wanted = self.depths.ask(
            priced,
            shape=StepShape(plain.shapes[:n_decodes]),
            most_rows=min(self.config.max_step_tokens - n_decodes, MOST_DRAFT_ROWS),
            limit_s=self.config.stall_budget_s,
        )
        for i, _ in draft.speculations:
            draft.chunks[i] = draft.chunks[i]._replace(wanted_drafts=wanted[i])

    def _first_wanted(self, seq: Sequence, end: int) -> int | None:
        """How many drafts to ask of the executor behind a prefill chunk that ends there."""
        most = self.guesser.most_drafts(seq.request)
        if self.guesser.executor_drafter is None or not most:
            return None
        if end < seq.known_tokens:
            return 0
        return max(0, min(FIRST_DRAFTS, most, seq.max_output_tokens - seq.output_tokens - 2))

    def _send_drafts(self, draft: StepDraft, i: int, guess: list[int]) -> int:
        """Put a guess behind chunk `i`, as far as blocks go; answers its length. Others' drafts may have taken blocks."""
        chunk = draft.chunks[i]
        seq = self.planned[chunk.seq_id]
        n_free = max(0, self.pool.available_blocks - self._promised_blocks)
        del guess[max(0, (len(seq.block_ids) + n_free) * self.pool.block_tokens - chunk.end_pos) :]
        n_new = self.pool.blocks_for(chunk.end_pos + len(guess)) - len(seq.block_ids)
        if n_new > 0:
            seq.block_ids.extend(self.pool.take(n_new))
            seq.table_sent = len(seq.block_ids)
        draft.chunks[i] = chunk._replace(
            token_ids=(*chunk.token_ids, *guess), new_block_ids=tuple(seq.block_ids[chunk.first_new_block :])
        )
        return len(guess)

    def take_back_drafts(self, seq: Sequence) -> None:
        """After a step with drafts: blocks behind what is computed go back, as if they had never been taken."""
        n_kept = self.pool.blocks_for(seq.computed_tokens)
        while len(seq.block_ids) > n_kept:
            self.pool.drop(seq.block_ids.pop())
        seq.table_sent = min(seq.table_sent, n_kept)

    def _make_room(self, seq: Sequence, draft: StepDraft) -> bool:
        """Preempt until the next token of this decoding sequence finds a block; False when it had to go itself."""
        while self._missing_blocks(seq, seq.known_tokens) > self.pool.available_blocks:
            victim = self._worst_running()
            self._preempt(victim, draft)
            if victim is seq:
                return False
        return True

    def _plan_prefills(self, draft: StepDraft) -> None:
        """Serve prefilling and waiting sequences in one order of rank until a budget is spent."""
        may_admit = True
        key: tuple[float, int] | None = None
        while draft.left_tokens > 0:
            running = self.prefilling.after(key)
            # A step that preempts admits nobody, or the victim would come straight back.
            may_admit = may_admit and not draft.preempted and self.n_running < self.max_running
            head = self.waiting.first if may_admit else None
            if head is not None and (running is None or head.key < running.key):
                if self._admit(head, draft):
                    key = head.key
                    continue
                may_admit = False
            elif running is not None:
                key = running.key
                if not self._continue_prefill(running, draft):
                    return
            else:
                return

    def _continue_prefill(self, seq: Sequence, draft: StepDraft) -> bool:
        """Plan its next chunk; False when a budget or the pool is spent."""
        while self._reach(seq) <= seq.computed_tokens:
            victim = self.forked.last or self.prefilling.last
            if victim is None or (victim.key <= seq.key and victim.status is Status.PREFILL):
                return False
            self._preempt(victim, draft)
        wanted = min(seq.known_tokens, self._reach(seq)) - seq.computed_tokens
        n_tokens = self._fit(seq, seq.computed_tokens, wanted, draft)
        if n_tokens == 0:
            return False
        self._add_prefill(seq, n_tokens, draft)
        return True

    def _admit(self, seq: Sequence, draft: StepDraft) -> bool:
        """Start a waiting sequence if its whole prefill finds blocks and its first chunk finds time."""
        if seq.parked_at_drops == self.pool.n_drops and self.n_running > 0:
            return False  # no block came back since it last failed
        hits = [] if seq.block_ids else self._lookup(seq)
        if not self._has_blocks_for(seq, hits):
            if self.n_running > 0:
                seq.parked_at_drops = self.pool.n_drops
                return False
            self._reclaim_forked(draft)
            hits = [] if seq.block_ids else self._lookup(seq)
            if not self._has_blocks_for(seq, hits):
                return False  # what is being sent or received holds them
        start = seq.computed_tokens + len(hits) * self.pool.block_tokens
        n_tokens = self._fit(seq, start, seq.known_tokens - start, draft)
        if n_tokens == 0:
            return False
        self._leave_line(seq)
        seq.move(Status.PREFILL)
        self.prefilling.add(seq)
        self._take_hits(seq, hits)
        self._promise(seq, self._missing_blocks(seq, seq.known_tokens))
        self._add_prefill(seq, n_tokens, draft, hit_tokens=len(hits) * self.pool.block_tokens)
        return True

    def _has_blocks_for(self, seq: Sequence, hits: list[PrefixEntry]) -> bool:
        held = len(seq.block_ids) + len(hits)
        needed = self.pool.blocks_for(seq.known_tokens) - held + self._n_copies(seq, seq.computed_tokens)
        needed += sum(1 for entry in hits if self.pool.is_idle(entry.block_id))
        spare = self.pool.available_blocks - self._promised_blocks
        # A running decode soon wants one block more; admitting into its last one would only preempt it.
        return needed + min(len(self.decoding), self.pool.n_blocks // 8) <= spare

    def _lookup(self, seq: Sequence) -> list[PrefixEntry]:
        """The prefix hit a sequence without blocks would start from. Never covers its last known token."""
        salt = seq.request.cache_salt
        return self.pool.match(
            seq.token_ids,
            salt=salt,
            digests=seq.digests,
            root=self.root_of(salt),
            max_blocks=seq.findable_tokens // self.pool.block_tokens,
        )

    def _take_hits(self, seq: Sequence, hits: list[PrefixEntry]) -> None:
        for entry in hits:
            self.pool.hold(entry.block_id)
            seq.block_ids.append(entry.block_id)
            seq.serials.append(entry.serial)
        seq.computed_tokens += len(hits) * self.pool.block_tokens  # the peak moves at commit, when the chunk has run
        if not seq.has_started and seq.index == 0 and self.pool.is_caching:
            self.query_tokens += seq.prompt_tokens
            self.hit_tokens += len(hits) * self.pool.block_tokens

    def _fit(self, seq: Sequence, start: int, wanted: int, draft: StepDraft) -> int:
        """The longest prefill chunk from `start`, at most `wanted`, that both budgets allow; 0 for none."""
        limit = min(wanted, draft.left_tokens)
        predict_s, budget_s = self.predict_s, self.config.stall_budget_s
        if predict_s is None or budget_s is None or not draft.shape.decode_tokens:
            return limit

        def is_within(n_tokens: int) -> bool:
            chunk = ChunkShape(Phase.PREFILL, n_tokens, start, seq.samples_at(start + n_tokens))
            return predict_s(draft.shape.plus(chunk)) <= budget_s

        n_tokens = longest_within(limit=limit, quantum=MIN_PREFILL_TOKENS, is_within=is_within)
        if n_tokens == 0 and draft.shape.prefill_tokens == 0:
            return min(limit, MIN_PREFILL_TOKENS)
        return n_tokens

    def _add_prefill(self, seq: Sequence, n_tokens: int, draft: StepDraft, *, hit_tokens: int = 0) -> None:
        """Give the chunk its blocks and write it into the draft."""
        start = seq.computed_tokens
        end = start + n_tokens
        held, copied = len(seq.block_ids), len(draft.copies)
        first_new = self._take_blocks(seq, start, end, draft)
        taken = len(seq.block_ids) - held + len(draft.copies) - copied
        self._promise(seq, seq.promised_blocks - taken)
        chunk = Chunk(
            seq_id=seq.seq_id,
            phase=Phase.PREFILL,
            start_pos=start,
            token_ids=tuple(seq.token_ids[start:end]),
            first_new_block=first_new,
            new_block_ids=tuple(seq.block_ids[first_new:]),
            samples=seq.samples_at(end),
            wanted_drafts=self._first_wanted(seq, end),
        )
        draft.chunks.append(chunk)
        draft.shape = draft.shape.plus(chunk.shape)
        draft.left_tokens -= n_tokens
        seq.table_sent = len(seq.block_ids)
        seq.is_in_flight = True
        self.planned[seq.seq_id] = seq
        if not seq.has_started:
            seq.has_started = True
            draft.starts.append(
                SequenceStart(
                    seq_id=seq.seq_id,
                    prompt_token_ids=seq.request.prompt_token_ids,
                    sampling=seq.request.sampling,
                    seed=seq.seed,
                    eos_token_ids=seq.request.eos_token_ids,
                    pooling=seq.request.pooling,
                )
            )
        draft.scheduled.extend(self._scheduled_events(seq, start, end, hit_tokens, draft))

    def _take_blocks(self, seq: Sequence, start: int, end: int, draft: StepDraft) -> int:
        """Append blocks up to `end`, copy the first written one if it is shared; answers the first new table entry."""
        first_new = seq.table_sent
        if self._n_copies(seq, start):
            i = start // self.pool.block_tokens
            source, (target,) = seq.block_ids[i], self.pool.take(1)
            draft.copies.append(BlockCopy(source_block_id=source, target_block_id=target))
            self.pool.drop(source)  # others hold it still, so nobody can take it before the copy is made
            seq.block_ids[i] = target
            first_new = min(first_new, i)
        n_new = self.pool.blocks_for(end) - len(seq.block_ids)
        if n_new:
            seq.block_ids.extend(self.pool.take(n_new))
        return first_new

    def _scheduled_events(self, seq: Sequence, start: int, end: int, hit_tokens: int, draft: StepDraft) -> list[Event]:
        """One event, or two where the chunk goes on from a recompute into new tokens."""
        peak, hit_start = seq.peak_computed_tokens, start - hit_tokens
        if peak <= hit_start:  # nothing of it was ever computed before
            new = (start, end - start, hit_tokens)
            return [self._scheduled(seq, draft, new, is_recompute=False)]
        again_end = min(max(peak, start), end)
        again_hit = min(max(peak, hit_start), start) - hit_start
        events: list[Event] = []
        if again_end > start or again_hit > 0:
            events.append(self._scheduled(seq, draft, (start, again_end - start, again_hit), is_recompute=True))
        if end > again_end or hit_tokens > again_hit:
            new = (again_end, end - again_end, hit_tokens - again_hit)
            events.append(self._scheduled(seq, draft, new, is_recompute=False))
        return events

    def _scheduled(self, seq: Sequence, draft: StepDraft, part: tuple[int, int, int], *, is_recompute: bool) -> Event:
        """The event of one part of a chunk: (tokens before it, its tokens, tokens found cached)."""
        context_tokens, chunk_tokens, cached_tokens = part
        return ScheduledEvent(
            request_id=seq.request.request_id,
            index=seq.index,
            step_id=draft.step_id,
            at_s=draft.now_s,
            chunk_tokens=chunk_tokens,
            cached_tokens=cached_tokens,
            context_tokens=context_tokens,
            is_recompute=is_recompute,
        )

    # Blocks

    def _n_copies(self, seq: Sequence, start: int) -> int:
        """1 when position `start` lies in a block that others read too, so that writing needs a copy.

        The last holder may write in the very step in which the others copy: copies are made before chunks run.
        """
        i = start // self.pool.block_tokens
        return int(i < len(seq.block_ids) and self.pool.references(seq.block_ids[i]) > 1)

    def _missing_blocks(self, seq: Sequence, end: int) -> int:
        """Blocks to take before the chunk [computed_tokens, end) can run."""
        return self.pool.blocks_for(end) - len(seq.block_ids) + self._n_copies(seq, seq.computed_tokens)

    def _reach(self, seq: Sequence) -> int:
        """How far its computed tokens could go in the blocks that can be had now."""
        blocks = self.pool.available_blocks - self._n_copies(seq, seq.computed_tokens)
        return (len(seq.block_ids) + blocks) * self.pool.block_tokens if blocks >= 0 else seq.computed_tokens

    def _worst_running(self) -> Sequence:
        """Whom to preempt: idle holders first, then the last in rank of all that run."""
        if self.forked.last is not None:
            return self.forked.last
        candidates = [seq for seq in (self.decoding.last, self.prefilling.last) if seq is not None]
        return max(candidates, key=lambda seq: seq.key)

    def _reclaim_forked(self, draft: StepDraft) -> None:
        """Nothing runs and the first in line lacks blocks, so only waiting holders can have them."""
        while self.forked.last is not None:
            self._preempt(self.forked.last, draft)

    def _preempt(self, seq: Sequence, draft: StepDraft) -> None:
        """Take a sequence's blocks; it waits and is computed again later."""
        self.n_preemptions += 1
        draft.preempted.append(
            PreemptEvent(
                request_id=seq.request.request_id,
                index=seq.index,
                at_s=draft.now_s,
                computed_tokens=seq.computed_tokens,
            )
        )
        self.detach(seq)
        self.release(seq)
        if seq.status is not Status.WAITING:
            seq.move(Status.WAITING)
        self.enqueue(seq)

    def _leave_line(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.waiting_tokens -= seq.waiting_tokens
        if self.forked.holds(seq):
            self.forked.remove(seq)

    def _promise(self, seq: Sequence, n_blocks: int) -> None:
        self._promised_blocks += n_blocks - seq.promised_blocks
        seq.promised_blocks = n_blocks
