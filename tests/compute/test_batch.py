"""What follows from a batch without being stored in it."""

from __future__ import annotations

import numpy as np

from diptych.compute.batch import ForwardBatch


def test_positions_and_slots_follow_from_contexts_and_tables() -> None:
    """A key written to another slot than the one read later gives fluent nonsense; here every number is by hand."""
    batch = ForwardBatch(
        token_ids_T=np.array([7, 8, 9, 5, 3, 4], dtype=np.int32),
        query_start_S1=np.array([0, 3, 4, 6], dtype=np.int32),
        context_tokens_S=np.array([3, 10, 6], dtype=np.int32),
        block_table_SM=np.array([[6, 0, 0], [2, 9, 4], [1, 5, 0]], dtype=np.int32),
        logits_rows_R=np.array([2, 3, 5], dtype=np.int32),
    )
    assert batch.positions_T.tolist() == [0, 1, 2, 9, 4, 5]
    assert batch.positions_T.dtype == np.int32
    assert batch.slots_T(4).tolist() == [24, 25, 26, 17, 20, 21]
