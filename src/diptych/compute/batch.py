"""The one batch type of compute: a step's tokens as integers, before any device is involved.

Legend: T packed tokens of the step, S sequences, M block table width, R logits rows, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlaces:
    """Where the states of a step's sequences lie in a KVStore, of models that have states. All arrays int32, C-contiguous.

    reads_S   the place that a sequence's state is read from, -1: it begins with nothing
    writes_S  the place that it is left in; no other sequence of the step reads or writes there
    saves_N3  (sequence, rows, place): behind so many of its rows, from 1 on, the state is left in a place of its own, too;
        sequences ascend, and so do the rows of one
    """

    reads_S: np.ndarray
    writes_S: np.ndarray
    saves_N3: np.ndarray

    @classmethod
    def of(cls, reads_S: np.ndarray, writes_S: np.ndarray) -> StatePlaces:
        """With nothing left on the way."""
        reads_S, writes_S = (np.ascontiguousarray(one, dtype=np.int32) for one in (reads_S, writes_S))
        return cls(reads_S=reads_S, writes_S=writes_S, saves_N3=np.zeros((0, 3), dtype=np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step. All arrays int32, C-contiguous; sequence s owns rows [query_start_S1[s], query_start_S1[s + 1]) of T.

    token_ids_T   what is computed
    query_start_S1  begins at 0, ends at T, each sequence has at least one row
    context_tokens_S  tokens of the sequence with this step's included, which are its last
    block_table_SM  blocks of each sequence in order; what lies behind its context is some block of the pool
    logits_rows_R   rows of T whose logits are wanted, in the order wanted (may be empty)
    adapters_S  number of each sequence's adapter (`Model.add_adapter`), -1 without one; None: no sequence has one
    both_ways_S  1 where each token of a sequence, which is here whole, attends to all of it, 0 where to those before it and
        to itself; None: no sequence attends both ways. A layer's window then reaches so many positions to either side
    second_S  the position at which the second text of a pair begins, whose tokens are of another type, or one that the sequence
        does not reach; None: all tokens are of the first. Of models that tell types apart (`ModelSpec.n_token_types` above 1)
    states  of models with states, and None of all others
    """

    token_ids_T: np.ndarray
    query_start_S1: np.ndarray
    context_tokens_S: np.ndarray
    block_table_SM: np.ndarray
    logits_rows_R: np.ndarray
    adapters_S: np.ndarray | None = None
    both_ways_S: np.ndarray | None = None
    second_S: np.ndarray | None = None
    states: StatePlaces | None = None

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.token_ids_T)

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.context_tokens_S)

    @property
    def positions_T(self) -> np.ndarray:
        """Where each token stands in its sequence [T]; made anew at each call."""
        lens_S = np.diff(self.query_start_S1)
        first_S = self.context_tokens_S - self.query_start_S1[1:]
        return np.arange(self.n_tokens, dtype=np.int32) + np.repeat(first_S, lens_S)

    @property
    def types_T(self) -> np.ndarray:
        """0, or 1 of tokens of a second text [T]; made anew at each call."""
        if self.second_S is None:
            return np.zeros(self.n_tokens, dtype=np.int32)
        return (self.positions_T >= np.repeat(self.second_S, np.diff(self.query_start_S1))).astype(np.int32)

    def slots_T(self, block_tokens: int) -> np.ndarray:
        """Where the KV of each token goes, block * P + offset [T]; made anew at each call."""
        seq_T = np.repeat(np.arange(self.n_sequences), np.diff(self.query_start_S1))
        positions_T = self.positions_T
        return self.block_table_SM[seq_T, positions_T // block_tokens] * block_tokens + positions_T % block_tokens
