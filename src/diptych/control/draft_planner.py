"""Drafts in a plan: which guesses a step verifies, and how many the executor is asked for behind it.

The scheduler plans decode and prefill; what they leave of rows and blocks is here given to guesses. Blocks of drafts are
private to their sequence and go back after the step.
"""

from __future__ import annotations

from collections.abc import Mapping

from diptych.control.blocks import BlockPool
from diptych.control.sequence import Sequence
from diptych.control.speculation import NO_GUESS, Depths, Guesser, Priced, Speculation, Wanted
from diptych.control.state_keeper import StateKeeper
from diptych.control.step_draft import StepDraft
from diptych.ground.config import MOST_DRAFT_ROWS, SchedulerConfig
from diptych.ground.shape import StepShape

Found = tuple[int, Sequence, Speculation]  # a decode chunk by its place, whose sequence has drafters


class DraftPlanner:
    """See the module. Only `Scheduler` calls it."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        states: StateKeeper | None,
        *,
        depths: Depths,
        guesser: Guesser,
    ) -> None:
        self.depths = depths
        self.guesser = guesser
        self._config = config
        self._pool = pool
        self._states = states
        self.is_needed = False  # some sequence in decode has drafters
        # Steps to come of as many sequences in which nobody guesses or is asked, and those that passed so: where
        # speculation does not pay, a step of half a millisecond must not notice that it is there.
        self._idle_steps = 0
        self._idle_decodes = 0
        self._n_idled = 0

    def begin(self, seq: Sequence) -> None:
        """Give a sequence its drafters, where it has not got them."""
        self._idle_steps = 0
        if seq.speculation is None:
            seq.speculation = self.guesser.begin(seq.request, self.depths)
        self.is_needed = self.is_needed or seq.speculation is not None

    def wake(self) -> None:
        """Some sequence has drafts at hand that nobody was asked for."""
        self._idle_steps = 0

    def add(self, draft: StepDraft, planned: Mapping[int, Sequence], *, promised_blocks: int) -> None:
        """Lengthen decode chunks by guesses, out of what everybody else has left, and ask the executor for the next ones.

        promised_blocks: of the pool's free blocks, those that others wait for.
        """
        n_decodes = len(draft.decode_request_ids)
        if self._idle_steps > 0 and n_decodes == self._idle_decodes:
            self._idle_steps -= 1
            self._n_idled += 1
            return
        if self._n_idled:
            self.depths.idle(self._n_idled, self._idle_decodes)
            self._n_idled = 0
        found: list[Found] = []
        for i in range(n_decodes):  # decode chunks come first
            seq = planned[draft.chunks[i].seq_id]
            if seq.speculation is not None:
                found.append((i, seq, seq.speculation))
        if not found:
            self.is_needed = False
            return
        plain = draft.shape
        self._send(draft, found, promised_blocks)
        if self.guesser.asks_executor and self.depths.is_asking():
            self._ask(draft, found, plain)
        self._idle_decodes = n_decodes
        is_guessing = any(speculation.is_guessing for _, _, speculation in found)
        self._idle_steps = self.depths.idle_steps(n_decodes, is_guessing=is_guessing)

    def wanted_behind(self, seq: Sequence, end: int) -> Wanted | None:
        """Who of the executor's drafters reads a prefill chunk that ends there, and how many drafts it makes; None: nobody."""
        left = seq.max_output_tokens - seq.output_tokens - 2  # behind a token of this step and one of the next
        if not self.guesser.asks_executor or left <= 0:
            return None
        self.begin(seq)
        if seq.speculation is None:
            return None
        return seq.speculation.wanted_behind(end, left if end == seq.known_tokens else 0)

    def take_back(self, seq: Sequence) -> None:
        """After a step with drafts: blocks behind what is computed go back, as if they had never been taken."""
        n_kept = self._pool.blocks_for(seq.computed_tokens)
        while len(seq.block_ids) > n_kept:
            self._pool.drop(seq.block_ids.pop())
        seq.table_sent = min(seq.table_sent, n_kept)

    def _send(self, draft: StepDraft, speculating: list[Found], promised_blocks: int) -> None:
        n_decodes = len(draft.decode_request_ids)
        is_due = self.depths.is_due(n_decodes)  # where the price said no of late, most steps are not: guesses cost time
        if self.guesser.memory is not None:
            self.guesser.memory.read()
        found: list[tuple[Found, list[int]]] = []
        for one in speculating:
            _, seq, speculation = one
            if is_due or speculation.has_drafts_at_hand:
                guess = speculation.propose(seq.token_ids)
                if guess:
                    found.append((one, guess))
        if not found:
            if is_due:
                self.depths.silent(draft.shape, n_decodes)
            return
        n_free = max(0, self._pool.available_blocks - promised_blocks)
        priced: list[Priced] = [NO_GUESS] * n_decodes
        for (i, seq, speculation), guess in found:
            chunk = draft.chunks[i]
            room = (len(seq.block_ids) + n_free) * self._pool.block_tokens - chunk.end_pos
            n = min(1 + MOST_DRAFT_ROWS // n_decodes, len(guess), room, seq.max_output_tokens - seq.output_tokens - 1)
            if n > 0:
                priced[i] = speculation.priced(n)
        if not any(n for _, n, _ in priced):
            return
        depths = self.depths.choose(
            priced,
            shape=draft.shape,
            most_rows=min(draft.left_tokens, MOST_DRAFT_ROWS),
            limit_s=draft.limit_s,
        )
        if not any(depths):
            return
        for (i, seq, _), guess in found:
            if depths[i]:
                depths[i] = self._lengthen(draft, i, seq, guess[: depths[i]], promised_blocks)
        draft.shape = draft.shape.with_drafts(depths)
        draft.left_tokens -= sum(depths)

    def _lengthen(self, draft: StepDraft, i: int, seq: Sequence, guess: list[int], promised_blocks: int) -> int:
        """Put a guess behind chunk `i`, as far as blocks go; answers its length. Others' drafts may have taken blocks."""
        chunk = draft.chunks[i]
        n_free = max(0, self._pool.available_blocks - promised_blocks)
        del guess[max(0, (len(seq.block_ids) + n_free) * self._pool.block_tokens - chunk.end_pos) :]
        state = chunk.state
        if self._states is not None and state is not None:
            state, n_left = self._states.use_behind(seq, state, len(guess))
            del guess[n_left:]
        n_new = self._pool.blocks_for(chunk.end_pos + len(guess)) - len(seq.block_ids)
        if n_new > 0:
            seq.block_ids.extend(self._pool.take(n_new))
            seq.table_sent = len(seq.block_ids)
        draft.chunks[i] = chunk._replace(
            token_ids=(*chunk.token_ids, *guess),
            new_block_ids=tuple(seq.block_ids[chunk.first_new_block :]),
            state=state,
        )
        return len(guess)

    def _ask(self, draft: StepDraft, speculating: list[Found], plain: StepShape) -> None:
        """Say who of the executor's drafters is to make how many drafts behind each decode chunk: those that would pay most in
        a step like this.

        plain: the step without drafts. A chunk behind which none is wanted is not read by any of them.
        """
        n_decodes = len(draft.decode_request_ids)
        options: list[list[Priced]] = [[] for _ in range(n_decodes)]
        for i, seq, speculation in speculating:
            left = seq.max_output_tokens - seq.output_tokens - 2  # behind a token of this step and one of the next
            options[i] = speculation.askable(max(0, min(1 + MOST_DRAFT_ROWS // n_decodes, left)))
        wanted = self.depths.ask(
            options,
            shape=plain if plain.n_sequences == n_decodes else StepShape(plain.shapes[:n_decodes]),
            most_rows=min(self._config.max_step_tokens - n_decodes, MOST_DRAFT_ROWS),
            limit_s=draft.limit_s,
        )
        for i, (number, n) in enumerate(wanted):
            if n:
                draft.chunks[i] = draft.chunks[i]._replace(wanted_drafts=n, drafter=number)
