"""The textbook example of the two phases, and the paged definition held against the dense one."""

from __future__ import annotations

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops import reference
from diptych.compute.ops.contract import AttentionSpec


def heads(rows: list[list[float]]) -> torch.Tensor:
    """[T, d] numbers as [B=1, H=1, T, d]."""
    return torch.tensor(rows)[None, None]


def test_prefill_of_the_textbook_example() -> None:
    """Position 1 sees positions 0 and 1 only; the third key would win otherwise (scores over sqrt(2))."""
    q = heads([[9.0, 9.0], [2.0, 0.0], [9.0, 9.0]])
    k = heads([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    v = heads([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    out, weights = reference.attention_prefill_dense(q, k, v)
    # exactly 0.19557 and 0.80443; the textbook cuts the first and gives the rest to the second
    torch.testing.assert_close(weights[0, 0, 1], torch.tensor([0.195, 0.805, 0.0]), atol=6e-4, rtol=0)
    assert weights[0, 0, 1, 2] == 0.0
    torch.testing.assert_close(out[0, 0, 1], weights[0, 0, 1, :2])


def test_decode_of_the_textbook_example() -> None:
    """One query over three cached keys, no mask: 2, 3, 2 over sqrt(2)."""
    q = heads([[2.0, 1.0]])
    k = heads([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    _, weights = reference.attention_decode_dense(q, k, k)
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([0.248, 0.504, 0.248]), atol=6e-4, rtol=0)


def test_decode_is_the_last_row_of_prefill() -> None:
    """The cache is lossless: one new token against cached keys gives what recomputing the whole sequence gives."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 8, generator=generator) for _ in range(3))
    whole, _ = reference.attention_prefill_dense(q, k, v)
    for t in range(7):
        step, _ = reference.attention_decode_dense(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        torch.testing.assert_close(step[:, :, 0], whole[:, :, t])


def test_paged_definition_equals_the_dense_one() -> None:
    """The definition that backends are tested against must itself be right, scattered blocks and all."""
    generator = torch.Generator().manual_seed(1)
    n_tokens, n_heads, d, block_tokens = 21, 2, 8, 4
    q, k, v = (torch.randn(n_tokens, n_heads, d, generator=generator) for _ in range(3))
    table = np.array([[5, 0, 3, 6, 1, 2]], dtype=np.int32)
    positions = np.arange(n_tokens, dtype=np.int32)
    slots = table[0, positions // block_tokens] * block_tokens + positions % block_tokens
    keys, values = torch.full((7 * block_tokens, n_heads, d), 99.0), torch.full((7 * block_tokens, n_heads, d), 99.0)
    keys[slots], values[slots] = k, v
    batch = ForwardBatch(
        token_ids_T=positions, query_start_S1=np.array([0, n_tokens], dtype=np.int32),
        context_tokens_S=np.array([n_tokens], dtype=np.int32), block_table_SM=table, logits_rows_R=positions,
    )  # fmt: skip
    spec = AttentionSpec(layer=0, n_heads=n_heads, n_kv_heads=n_heads, head_dim=d, scale=d**-0.5)
    shape = (7, block_tokens, n_heads, d)
    paged = reference.attention_paged(q, keys.view(shape), values.view(shape), batch, spec)
    dense, _ = reference.attention_prefill_dense(*(x.transpose(0, 1)[None] for x in (q, k, v)))
    torch.testing.assert_close(paged, dense[0].transpose(0, 1))
