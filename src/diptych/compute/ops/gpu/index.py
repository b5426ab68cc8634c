"""What an index chooses for latent attention (DeepSeek Sparse Attention, arXiv:2512.02556): scores of all positions before a
token, and the highest of them.

Legend: T tokens, S sequences, C positions, n heads of the index, d their width, most: how many positions are chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.attention import item_of, padded_width
from diptych.compute.ops.gpu.latents import turn_rows
from diptych.compute.ops.gpu.launch import cdiv, launch

TILE = 64  # positions that are scored together
SORTED = 2**24  # scores at one time


@triton.jit
def _score(
    q_ptr, weights_ptr, key_ptr, scores_ptr, items_ptr, table_ptr, table_stride, C,
    N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROW: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    sequence, row, n_tokens, position = item_of(items_ptr, tl.program_id(0))
    token = tl.program_id(1)
    if token >= n_tokens:
        return
    at, to = position + token, (row + token).to(tl.int64)
    n, d, key = tl.arange(0, NP), tl.arange(0, DP), tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_seen = key <= at
    q = tl.load(q_ptr + to * N * D + n[:, None] * D + d[None, :], mask=(n < N)[:, None] & (d < D)[None, :], other=0.0)
    weights = tl.load(weights_ptr + to * N + n, mask=n < N, other=0.0)
    block = tl.load(table_ptr + sequence * table_stride + key // P, mask=is_seen, other=0)
    k_ptrs = key_ptr + ((block * P + key % P) * ROW)[None, :] + d[:, None]
    k = tl.load(k_ptrs, mask=is_seen[None, :] & (d < D)[:, None], other=0.0)
    # heads are added up across threads, in one order, as a tile has the heads of one token whatever the step
    score = tl.sum(tl.maximum(tl.dot(q, k.to(q.dtype)), 0.0) * weights[:, None], 0)
    tl.store(scores_ptr + to * C + key, tl.where(is_seen, score, float("-inf")), mask=key < C)


def score(
    q: torch.Tensor,
    weights: torch.Tensor,
    latents: torch.Tensor,
    scores: torch.Tensor,
    items: torch.Tensor,
    table: torch.Tensor,
    *,
    begin: int,
    block_tokens: int,
    most_rows: int,
) -> None:
    """Scores [T, C] fp32 of the tokens of items, -inf of positions behind their own. q [T, n, d], weights [T, n] fp32; keys in
    latents [slots, 1, begin + d] from `begin` on, by the block table [S, blocks]. items, most_rows: as `attention.attend` has
    them.
    """
    n_heads, width = q.shape[1:]
    n_seen = scores.shape[1]
    launch(
        _score,
        (len(items), most_rows, cdiv(n_seen, TILE)),
        (q, weights, latents[..., begin:], scores, items, table),
        (table.stride(0), n_seen),
        {"N": n_heads, "NP": padded_width(n_heads), "D": width, "DP": padded_width(width), "ROW": latents.stride(0)}
        | {"P": block_tokens, "TILE": TILE},
        num_warps=4,
        num_stages=2,
    )


def highest(scores: torch.Tensor, most: int) -> torch.Tensor:
    """The positions [T, most] int32 of the highest scores [T, C], the lower of equals, ascending. Where a token sees no more
    than `most` they begin with all that it sees.
    """
    chosen = torch.empty((len(scores), most), dtype=torch.int32, device=scores.device)
    at_once = max(1, SORTED // scores.shape[1])
    for rows, into in zip(scores.split(at_once), chosen.split(at_once), strict=True):
        best = rows.sort(dim=1, descending=True, stable=True).indices[:, :most]
        into.copy_(best.int().sort(dim=1).values)
    return chosen


@triton.jit
def _cache_key(
    k_ptr, key_ptr, slots_ptr, cos_ptr, sin_ptr,
    D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, EP: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:
        return
    d, row_ptr, to_ptr = tl.arange(0, DP), k_ptr + t * D, key_ptr + slot * ROW
    is_still = (d >= 2 * HALF) & (d < D)
    tl.store(to_ptr + d, tl.load(row_ptr + d, mask=is_still, other=0.0).to(key_ptr.dtype.element_ty), mask=is_still)
    one, turn = tl.arange(0, 1)[:, None], t * HALF
    turn_rows(row_ptr + one, to_ptr + one, cos_ptr + turn + one, sin_ptr + turn + one, tl.arange(0, EP), one == 0, HALF)


def cache_keys(
    k: torch.Tensor, slots: torch.Tensor, latents: torch.Tensor, *, begin: int, turn: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """k [T, d], the first of each turned by cos and sin [T, p / 2] fp32, to slots [T] of latents [slots, 1, begin + d] from
    `begin` on; below 0 nothing is written.
    """
    k, (cos, sin) = k.contiguous(), turn
    width, half = k.shape[1], cos.shape[1]
    launch(
        _cache_key,
        (len(k), 1, 1),
        (k, latents[..., begin:], slots, cos, sin),
        (),
        {"D": width, "DP": padded_width(width), "HALF": half, "EP": padded_width(2 * half), "ROW": latents.stride(0)},
        num_warps=1,
    )
