"""When states of sequences are left for the prefix cache, and who begins with one: the policy over `StatePool`.

A state is kept behind three kinds of blocks: the last whole one of a prompt, so that the next message goes on from there; where
a cached prompt and a new one part that have more in common than any state stands for, so that the third does not read it
again; and the latest whole block of an answer, in place of the one before.
Behind guesses a state is left row by row: the sequence goes on with the one behind those that hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from diptych.control.blocks import PrefixEntry
from diptych.control.sequence import Sequence
from diptych.control.states import StatePool
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.phase import Status
from diptych.ground.step import Chunk, StateUse


def most_running(config: SchedulerConfig, blocks: BlockConfig) -> int:
    """Sequences that run at one time: a running decode always fits into the step, so it never waits for another's turn, and
    each has a place for its state where the model has states.
    """
    most = min(config.max_running_sequences or config.max_step_tokens, config.max_step_tokens)
    return min(most, blocks.n_places) if blocks.n_places else most


class StateKeeper:
    """Only `Scheduler` and `EngineCore` call it. is_caching: prefixes may be found again."""

    def __init__(self, pool: StatePool, *, block_tokens: int, is_caching: bool) -> None:
        self.pool = pool
        self._block_tokens = block_tokens
        self._is_caching = is_caching
        self._begins: dict[int, int] = {}  # sequence -> the place that its first chunk reads
        self._came: set[int] = set()  # sequences that have begun with nothing yet but a state from another engine

    @classmethod
    def of(cls, config: SchedulerConfig, blocks: BlockConfig) -> StateKeeper | None:
        """For an engine; None where its model has no states."""
        if not blocks.n_places:
            return None
        running = most_running(config, blocks)
        pool = StatePool(blocks.n_places, running)
        return cls(pool, block_tokens=blocks.block_tokens, is_caching=config.enable_prefix_cache)

    def reach(self, found: list[PrefixEntry]) -> int:
        """How many blocks of a cached prefix a sequence could begin behind."""
        return self.pool.longest([entry.serial for entry in found])

    def usable(self, seq: Sequence, found: list[PrefixEntry]) -> list[PrefixEntry]:
        """The part of a cached prefix that has a state behind it; how far the rest goes is remembered."""
        n = self.reach(found)
        seq.branch_tokens = len(found) * self._block_tokens if n < len(found) else 0
        return found[:n]

    def begin(self, seq: Sequence, hits: list[PrefixEntry]) -> bool:
        """It runs from here on, behind these blocks or from nothing; False where it has to wait for a place."""
        if seq.place is not None:
            return True  # its state has come from another engine
        found = self.pool.begin(hits[-1].serial if hits else None)
        if found is None:
            return False
        self._begins[seq.seq_id], seq.place = found
        return True

    def expect(self, seq: Sequence) -> bool:
        """A place for the state that another engine sends it; False where there is none now."""
        found = self.pool.begin(None)
        if found is not None:
            seq.place = found[1]
            self._came.add(seq.seq_id)
        return found is not None

    def use(self, seq: Sequence, start: int, end: int) -> StateUse:
        """For a chunk of tokens [start, end)."""
        assert seq.place is not None, seq.seq_id
        reads = self._begins.pop(seq.seq_id, seq.place)
        if seq.seq_id in self._came:
            self._keep_what_came(seq, start)
        saves = []
        for tokens in self._wanted(seq, start, end) if self._is_caching else ():
            place = self.pool.take_coming()
            if place is None:
                break
            saves.append((tokens - start, place))
            seq.coming.append((tokens, place))
        assert seq.place is not None, seq.seq_id
        return StateUse(reads, seq.place, tuple(saves))

    def _keep_what_came(self, seq: Sequence, start: int) -> None:
        """The state that the first chunk reads stays for others, where there is a place for the sequence to go on in."""
        self._came.discard(seq.seq_id)
        own = self.pool.take_coming() if self._is_caching else None
        if own is not None:
            assert seq.place is not None, seq.seq_id
            seq.coming.append((start, seq.place))
            seq.place = own

    def use_behind(self, seq: Sequence, use: StateUse, n_drafts: int) -> tuple[StateUse, int]:
        """For a decode chunk of one token and guesses behind it, as many as there are places for."""
        saves = list(use.saves)
        for rows in range(1, n_drafts + 1):
            place = self.pool.take_coming()
            if place is None:
                n_drafts = rows - 1
                break
            saves.append((rows, place))
            seq.drafted.append((rows, place))
        return use._replace(saves=tuple(sorted(saves))), n_drafts

    def verified(self, seq: Sequence, chunk: Chunk, n_held: int) -> None:
        """Of the chunk's rows the first n_held hold: the sequence goes on from there."""
        start, n_rows = chunk.start_pos, len(chunk.token_ids)
        for rows, place in seq.drafted:
            if rows == n_held < n_rows:
                assert seq.place is not None, seq.seq_id
                self.pool.swap(seq.place)
                seq.place = place
            elif self._is_caching and rows < n_held and (start + rows) % self._block_tokens == 0:
                seq.coming.append((start + rows, place))
            else:
                self.pool.keep(place, None)
        seq.drafted.clear()

    def arrived(self, seq: Sequence) -> None:
        """What the step was to leave is there, and its blocks are in the index."""
        for tokens, place in seq.coming:
            n = tokens // self._block_tokens
            serial = seq.serials[n - 1] if n <= len(seq.serials) else None
            if self.pool.keep(place, serial) and seq.status is Status.DECODE:
                if seq.rolling is not None:
                    self.pool.forget(seq.rolling)
                seq.rolling = serial
        seq.coming.clear()

    def release(self, seq: Sequence) -> None:
        """It runs no more, or what it was to leave did not come."""
        self._begins.pop(seq.seq_id, None)
        self._came.discard(seq.seq_id)
        for _, place in (*seq.coming, *seq.drafted):
            self.pool.keep(place, None)
        seq.coming.clear()
        seq.drafted.clear()
        if seq.place is not None:
            self.pool.drop(seq.place)
            seq.place = None

    def check(self, alive: Iterable[Sequence]) -> None:
        """Raise BlockLeak unless every place is accounted for."""
        sequences = list(alive)
        held = [seq.place for seq in sequences if seq.place is not None]
        self.pool.check(held, [place for seq in sequences for _, place in (*seq.coming, *seq.drafted)])

    def _wanted(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Behind how many tokens of the sequence, whole blocks, the chunk is to leave its state."""
        size = self._block_tokens
        if seq.status is Status.DECODE:
            return [end] if end % size == 0 else []
        of_prompt = (seq.known_tokens - 1) // size * size
        return sorted({tokens for tokens in (seq.branch_tokens, of_prompt) if start < tokens <= end})
