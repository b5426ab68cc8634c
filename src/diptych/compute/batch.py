"""The one batch type of compute: a step's tokens as integers, before any device is involved.

Legend: T packed tokens of the step, S sequences, M block table width, R logits rows, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step. All arrays int32, C-contiguous; sequence s owns rows [query_start_S1[s], query_start_S1[s + 1]) of T.

    token_ids_T   what is computed                      positions_T  where it stands in its sequence
    slots_T       block * P + offset, where its KV goes
    query_start_S1  begins at 0, ends at T, each sequence has at least one row
    context_tokens_S  tokens of the sequence with this step's included; positions of s end at context_tokens_S[s]
    block_table_SM  blocks of each sequence in order, padded with 0
    logits_rows_R   rows of T whose logits are wanted, in the order wanted (may be empty)
    """

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    query_start_S1: np.ndarray
    context_tokens_S: np.ndarray
    block_table_SM: np.ndarray
    logits_rows_R: np.ndarray

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.token_ids_T)

    @property
    def n_sequences(self) -> int:
        """S."""
        return len(self.context_tokens_S)
