"""Plans one step: decode chunks first, then prefill with what the token budget and the stall budget leave.

Owns which sequences wait, prefill and decode, and every block they hold. `EngineCore` (loop.py) tells it what came of a
step. A plan costs O(chunks + chunk tokens + new blocks): nothing here walks a context or the waiting line.

Stall budget: when the step holds decode chunks, prefill chunks are as long as predict_s(shape) <= stall_budget_s allows, the
budget being shortened by as much as such steps lately took longer than predicted (`Lateness` in policy.py).
Where even the smallest does not fit, the first prefill in line still gets MIN_PREFILL_TOKENS, so it ends.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.control.blocks import BlockPool, PrefixEntry, root_digest
from diptych.control.draft_planner import DraftPlanner
from diptych.control.policy import MIN_PREFILL_TOKENS, Lateness, RankedList, longest_within
from diptych.control.sequence import Sequence
from diptych.control.speculation import Depths, Guesser
from diptych.control.state_keeper import StateKeeper
from diptych.control.step_draft import StepDraft
from diptych.ground.config import SchedulerConfig
from diptych.ground.events import Event, PreemptEvent, ScheduledEvent, StepBeginEvent
from diptych.ground.phase import Phase, Status
from diptych.ground.request import CacheScope
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.step import BlockCopy, Chunk, SequenceStart, StepPlan

Predict = Callable[[StepShape], float]
_new = tuple.__new__  # of a NamedTuple, in half the time: two are made with every token


class Scheduler:
    """See the module. Only `EngineCore` calls it."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        states: StateKeeper | None = None,
        *,
        max_running: int,
        model_revision: str,
        predict_s: Predict | None,
        depths: Depths,
        guesser: Guesser,
    ) -> None:
        self.config = config
        self.pool = pool
        self.predict_s = predict_s
        self.states = states
        self.drafts = DraftPlanner(config, pool, states, depths=depths, guesser=guesser)
        self.waiting = RankedList()
        self.prefilling = RankedList()
        self.decoding = RankedList()
        self.forked = RankedList()  # waiting, yet holding the blocks shared by their parent
        self.planned: dict[int, Sequence] = {}  # sequences of the last plan's chunks
        self.waiting_tokens = 0
        self.n_preemptions = 0
        self.query_tokens = 0  # prompt tokens looked up in the prefix index for the first time, and those found
        self.hit_tokens = 0
        self.max_running = max_running
        self._model_revision = model_revision
        self._promised_blocks = 0
        self._has_made_way = False  # the last step left decode out
        self._lateness = Lateness()
        self._predicted_s: float | None = None  # of the last plan, where it mixes the phases

    @property
    def promised_blocks(self) -> int:
        """Blocks that prompts being read will still take."""
        return self._promised_blocks

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
        self._promise(seq, 0)

    def release(self, seq: Sequence) -> None:
        """Give back its blocks, the last first, so that the head of a shared prefix stays cached longest."""
        if self.states is not None:
            self.states.release(seq)
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
        self.drafts.begin(seq)
        self.prefilling.remove(seq)
        self.decoding.add(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a waiting child hold the parent's prompt blocks; it computes the last prompt token itself.

        Where sequences have states it begins with what is cached of the prompt: what it reads then was read before.
        """
        if self.states is not None:
            child.peak_computed_tokens = parent.prompt_tokens - 1
            self.enqueue(child)
            return
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
        if seq.is_whole:
            return
        end = seq.computed_tokens // self.pool.block_tokens
        if end > len(seq.serials):
            self.register(seq, end)
        if self.states is not None:
            self.states.arrived(seq)

    def register(self, seq: Sequence, end: int) -> None:
        """Offer its blocks up to number `end`, all of them computed, that were not offered yet."""
        scope = seq.request.cache_scope
        self.pool.register(
            seq.block_ids,
            end,
            serials=seq.serials,
            token_ids=seq.token_ids,
            salt=scope,
            digests=seq.digests,
            root=self.root_of(scope),
        )

    def root_of(self, salt: CacheScope) -> bytes:
        """The start of the digest chain for this model and salt."""
        return root_digest(self._model_revision, salt)

    # Planning

    def plan(
        self, *, step_id: int, now_s: float, ended_seq_ids: tuple[int, ...]
    ) -> tuple[StepPlan | None, list[Event]]:
        """The next step and its events, or None when nothing can run."""
        budget_s = self.config.stall_budget_s
        limit_s = None if budget_s is None else budget_s / self._lateness.factor
        draft = StepDraft(step_id=step_id, now_s=now_s, budget_tokens=self.config.max_step_tokens, limit_s=limit_s)
        self.planned = {}
        if self.states is not None:
            self.states.pool.unpin()
        self._has_made_way = not self._has_made_way and self._must_make_way()
        if self.config.prefills_alone or self._has_made_way:
            self._plan_one_phase(draft)
        else:
            self._plan_decodes(draft)
            if self.waiting or self.prefilling:
                self._plan_prefills(draft)
        if self.drafts.is_needed and draft.decode_request_ids:
            self.drafts.add(draft, self.planned, promised_blocks=self._promised_blocks)
        if not draft.shape.n_tokens:
            return None, draft.preempted
        plan = StepPlan(
            step_id=step_id,
            chunks=tuple(draft.chunks),
            copies=tuple(draft.copies),
            starts=tuple(draft.starts),
            ended_seq_ids=ended_seq_ids,
            known_shape=draft.shape,
        )
        predicted_s = None if self.predict_s is None else self.predict_s(draft.shape)
        is_mixed = draft.shape.prefill_tokens > 0 and draft.shape.decode_tokens > 0
        self._predicted_s = predicted_s if is_mixed else None
        begin = StepBeginEvent(
            step_id=step_id,
            at_s=now_s,
            shape=draft.shape,
            decode_request_ids=tuple(draft.decode_request_ids),
            predicted_s=predicted_s,
        )
        return plan, [*draft.preempted, begin, *draft.scheduled]

    def took(self, measured_s: float) -> None:
        """The planned step did."""
        if self._predicted_s is not None:
            self._lateness.observe(self._predicted_s, measured_s)

    def _must_make_way(self) -> bool:
        """Whether the first in line cannot be cut and never finds room beside decode. It gets every other step, then."""
        head = self.waiting.first
        if head is None or not head.is_whole or self.prefilling:
            return False
        return head.known_tokens > self.config.max_step_tokens - len(self.decoding)

    def _plan_one_phase(self, draft: StepDraft) -> None:
        """Prompts while there are any to read and room for them, else decode."""
        if self.waiting or self.prefilling:
            self._plan_prefills(draft)
        if not draft.shape.n_tokens:
            self._plan_decodes(draft)

    def _plan_decodes(self, draft: StepDraft) -> None:
        """One token for every decoding sequence. Nearly all only write into a block that they hold: keep that way short."""
        block_tokens, references, decode = self.pool.block_tokens, self.pool.references, Phase.DECODE
        shapes: list[ChunkShape] = []
        context, is_adapted = 0, False
        chunks, request_ids, planned = draft.chunks, draft.decode_request_ids, self.planned
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
            seq_id = seq.seq_id
            state = None if self.states is None else self.states.use(seq, start, start + 1)
            chunks.append(
                _new(
                    Chunk, (seq_id, decode, start, (seq.token_ids[-1],), first_new, new_block_ids, True, None, 0, state)
                )
            )
            shapes.append(_new(ChunkShape, (decode, 1, start, True, 1, seq.adapter, False)))
            context += start + 1
            is_adapted = is_adapted or seq.adapter is not None
            request_ids.append(seq.request.request_id)
            seq.is_in_flight = True
            planned[seq_id] = seq
        if shapes:
            draft.left_tokens -= len(shapes)
            draft.shape = StepShape(shapes) if is_adapted else StepShape.tokens(shapes, context)

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
        hits = [] if seq.block_ids else self.lookup(seq)
        if not self.has_blocks_for(seq, hits):
            if self.n_running > 0:
                seq.parked_at_drops = self.pool.n_drops
                return False
            self._reclaim_forked(draft)
            hits = [] if seq.block_ids else self.lookup(seq)
            if not self.has_blocks_for(seq, hits):
                return False  # what is being sent or received holds them
        start = seq.computed_tokens + len(hits) * self.pool.block_tokens
        n_tokens = self._fit(seq, start, seq.known_tokens - start, draft)
        if n_tokens == 0 or (self.states is not None and not self.states.begin(seq, hits)):
            return False
        self._leave_line(seq)
        seq.move(Status.PREFILL)
        self.prefilling.add(seq)
        self._take_hits(seq, hits)
        self._promise(seq, self._missing_blocks(seq, seq.known_tokens))
        self._add_prefill(seq, n_tokens, draft, hit_tokens=len(hits) * self.pool.block_tokens)
        return True

    def has_blocks_for(self, seq: Sequence, hits: list[PrefixEntry]) -> bool:
        """Whether all its known tokens would find blocks now, beside what is promised to others."""
        held = len(seq.block_ids) + len(hits)
        needed = self.pool.blocks_for(seq.known_tokens) - held + self._n_copies(seq, seq.computed_tokens)
        needed += sum(1 for entry in hits if self.pool.is_idle(entry.block_id))
        spare = self.pool.available_blocks - self._promised_blocks
        # A running decode soon wants one block more; admitting into its last one would only preempt it.
        return needed + min(len(self.decoding), self.pool.n_blocks // 8) <= spare

    def lookup(self, seq: Sequence) -> list[PrefixEntry]:
        """The prefix hit a sequence without blocks would start from. Never covers its last known token."""
        found = self.pool.match(
            seq.token_ids,
            salt=seq.request.cache_scope,
            digests=seq.digests,
            root=self.root_of(seq.request.cache_scope),
            max_blocks=seq.findable_tokens // self.pool.block_tokens,
        )
        return found if self.states is None else self.states.usable(seq, found)

    def _take_hits(self, seq: Sequence, hits: list[PrefixEntry]) -> None:
        for entry in hits:
            self.pool.hold(entry.block_id)
            seq.block_ids.append(entry.block_id)
            seq.serials.append(entry.serial)
        seq.computed_tokens += len(hits) * self.pool.block_tokens  # the peak moves at commit, when the chunk has run
        # what `settle` left it was counted there, also where it has lost its blocks since
        if not (seq.has_started or seq.peak_computed_tokens):
            self.count_hits(seq, len(hits))

    def count_hits(self, seq: Sequence, n_blocks: int) -> None:
        """Of a sequence that has not been looked up before."""
        if seq.index == 0 and self.pool.is_caching:
            self.query_tokens += seq.prompt_tokens
            self.hit_tokens += n_blocks * self.pool.block_tokens

    def _fit(self, seq: Sequence, start: int, wanted: int, draft: StepDraft) -> int:
        """The longest prefill chunk from `start`, at most `wanted`, that both budgets allow; 0 for none."""
        limit = min(wanted, draft.left_tokens)
        if seq.is_whole and limit < wanted:
            return 0
        predict_s, limit_s = self.predict_s, draft.limit_s
        if predict_s is None or limit_s is None or not draft.shape.decode_tokens:
            return limit

        def is_within(n_tokens: int) -> bool:
            samples = seq.samples_at(start + n_tokens)
            chunk = ChunkShape(Phase.PREFILL, n_tokens, start, samples, 1, seq.adapter, seq.is_whole)
            return predict_s(draft.shape.plus(chunk)) <= limit_s

        if seq.is_whole:  # the budget cannot be kept by cutting it, only by letting it go alone
            return wanted if draft.shape.prefill_tokens == 0 or is_within(wanted) else 0
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
        wanted = self.drafts.wanted_behind(seq, end)
        chunk = Chunk(
            seq_id=seq.seq_id,
            phase=Phase.PREFILL,
            start_pos=start,
            token_ids=tuple(seq.token_ids[start:end]),
            first_new_block=first_new,
            new_block_ids=tuple(seq.block_ids[first_new:]),
            samples=seq.samples_at(end),
            wanted_drafts=None if wanted is None else wanted[1],
            drafter=0 if wanted is None else wanted[0],
            state=None if self.states is None else self.states.use(seq, start, end),
        )
        draft.chunks.append(chunk)
        shape = ChunkShape(Phase.PREFILL, n_tokens, start, chunk.samples, 1, seq.adapter, seq.is_whole)
        draft.shape = draft.shape.plus(shape)
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
                    adapter=None if seq.request.adapter is None else seq.request.adapter.number,
                    pooling=seq.request.pooling,
                    output_token_ids=tuple(seq.token_ids[seq.prompt_tokens :]),
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
