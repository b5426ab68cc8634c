"""A drafter's own KV store over the target's block ids.

Control owns block ids and knows of one store. So a drafter's keys and values lie in blocks of the same numbers: prefix hits,
forks, preemption and copies hold for both. What control promises of the target's blocks need not hold of the drafter's, as it
may not have run when they were written: this store notes how many tokens of each block the drafter has written. Being wrong
about that costs accepted drafts and nothing else.

    # [0, held)   blocks that the sequence holds after the step: what is written there of known tokens stays
    # [held, ..)  behind them, for the newest token and drafts: scratch blocks, lost with the step

Legend: P tokens per block, M table width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.compute.kv_store import KVStore
from diptych.compute.model import Model
from diptych.ground.step import Chunk


class DraftStore:
    """The bytes, and for each block of the pool how many of its tokens the drafter has written."""

    def __init__(
        self, model: Model, *, n_blocks: int, block_tokens: int, most_sequences: int, most_drafts: int
    ) -> None:
        self.block_tokens = block_tokens
        self.most_sequences = most_sequences
        self._scratch_blocks = scratch_blocks(block_tokens, most_drafts)
        self._n_blocks = n_blocks
        self.kv: KVStore = model.make_kv(n_blocks + most_sequences * self._scratch_blocks, block_tokens)
        self._written = [0] * n_blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy on write, here too."""
        self.kv.copy_blocks(pairs)
        for source, target in pairs:
            self._written[target] = self._written[source]

    def take_over(self, chunk: Chunk) -> None:
        """Blocks that are new to a sequence hold nothing of it, unless they stand before the chunk: found cached, or copied."""
        n_kept = -(-chunk.start_pos // self.block_tokens)
        for block_id in chunk.new_block_ids[max(0, n_kept - chunk.first_new_block) :]:
            self._written[block_id] = 0

    def covered(self, table_M: np.ndarray, start_pos: int) -> int:
        """How many of the first `start_pos` tokens of a sequence the drafter has written, without a gap."""
        covered = 0
        while covered < start_pos:
            block_id = int(table_M[covered // self.block_tokens])
            n = min(self._written[block_id], start_pos - covered)
            covered += n
            if n < self.block_tokens:
                self._written[block_id] = n  # others may have gone on from here with tokens of their own
                break
        return covered

    def note(self, table_M: np.ndarray, begin: int, end: int) -> None:
        """Known tokens at [begin, end) of a sequence have been written to blocks that it holds."""
        for i in range(begin // self.block_tokens, -(-end // self.block_tokens)):
            self._written[int(table_M[i])] = min(self.block_tokens, end - i * self.block_tokens)

    def table(self, place: int, table_M: np.ndarray, n_held: int, width: int) -> np.ndarray:
        """A table of `width` blocks: those that the sequence holds, then scratch of the place-th sequence of the step."""
        table = np.zeros(width, dtype=np.int32)
        table[:n_held] = table_M[:n_held]
        first = self._n_blocks + place * self._scratch_blocks
        n_scratch = min(self._scratch_blocks, width - n_held)
        table[n_held : n_held + n_scratch] = range(first, first + n_scratch)
        return table


def scratch_blocks(block_tokens: int, most_drafts: int) -> int:
    """Blocks that a sequence's newest token and all drafts but the last may lie in, from a block's beginning on."""
    return -(-most_drafts // block_tokens)
