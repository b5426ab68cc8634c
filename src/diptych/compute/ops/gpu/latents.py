"""Latent attention in its absorbed form: what lies in the cache is met by the queries of all heads, as key and as value.

Legend: T tokens, S sequences, H heads, r width of a latent, p of the rotary part, N outputs and K inputs of a head, M rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.attention import (
    FEW,
    LOG2_E,
    ROWS,
    SPLIT,
    TILE,
    fold,
    gather,
    item_of,
    padded_width,
    parts,
    weigh,
)
from diptych.compute.ops.gpu.launch import cdiv, launch

SOME = 32


@triton.jit
def _step(
    q, q_turned, kv_ptr, blocks_ptr, chosen_ptr, start, end, at, factor, m, l, acc,
    R: tl.constexpr, E: tl.constexpr, ROW: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """One tile more. IS_MASKED: not every row sees every position of it."""
    d, e, key = tl.arange(0, q.shape[1]), tl.arange(0, q_turned.shape[1]), start + tl.arange(0, TILE)
    is_key = key < end
    if chosen_ptr is not None:
        key = tl.load(chosen_ptr + key, mask=is_key, other=0) if IS_MASKED else tl.load(chosen_ptr + key)
    block = tl.load(blocks_ptr + key // P, mask=is_key, other=0) if IS_MASKED else tl.load(blocks_ptr + key // P)
    row_ptrs = kv_ptr + ((block * P + key % P) * ROW)[:, None]
    # a latent is read once, as key and as value
    latent = _part(row_ptrs, d, R, is_key, IS_MASKED, d.shape[0] == R)
    turned = _part(row_ptrs + R, e, E, is_key, IS_MASKED, e.shape[0] == E)
    s = tl.dot(q_turned, tl.trans(turned).to(q.dtype), tl.dot(q, tl.trans(latent).to(q.dtype)))
    if IS_MASKED:
        is_seen = is_key[None, :] if chosen_ptr is not None else key[None, :] <= at[:, None]
        s = tl.where(is_seen, s, float("-inf"))
    m, l, shrink, p = weigh(s, factor, m, l, q.dtype)
    acc = tl.dot(p, latent.to(q.dtype), acc * shrink[:, None])
    return m, l, acc


@triton.jit
def _part(row_ptrs, d, WIDTH: tl.constexpr, is_key, IS_MASKED: tl.constexpr, IS_WHOLE: tl.constexpr):
    if IS_MASKED:
        part = tl.load(row_ptrs + d[None, :], mask=is_key[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif IS_WHOLE:
        part = tl.load(row_ptrs + d[None, :])
    else:
        part = tl.load(row_ptrs + d[None, :], mask=(d < WIDTH)[None, :], other=0.0)
    return part


@triton.jit
def _sums(
    q, q_turned, kv_ptr, blocks_ptr, chosen_ptr, begin, end, at, all_see, factor,
    R: tl.constexpr, E: tl.constexpr, ROW: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighed sum over positions, or places in a choice of them, from `begin`, a multiple of
    TILE, to `end`. all_see: so far every row sees every one.
    """
    BM: tl.constexpr = q.shape[0]
    m = tl.full((BM,), float("-inf"), tl.float32)
    l, acc = tl.zeros((BM, 16), tl.float32), tl.zeros((BM, q.shape[1]), tl.float32)
    plain_end = tl.maximum(begin, tl.minimum(end, all_see) // TILE * TILE)
    for start in range(begin, plain_end, TILE):
        m, l, acc = _step(
            q, q_turned, kv_ptr, blocks_ptr, chosen_ptr, start, end, at, factor, m, l, acc, R, E, ROW, P, TILE, False
        )
    for start in range(plain_end, end, TILE):
        m, l, acc = _step(
            q, q_turned, kv_ptr, blocks_ptr, chosen_ptr, start, end, at, factor, m, l, acc, R, E, ROW, P, TILE, True
        )
    return m, l, acc


@triton.jit(do_not_specialize=["table_stride", "n_splits", "most_rows"])
def _attend_latents(
    q_ptr, kv_ptr, out_ptr, stats_ptr, items_ptr, table_ptr, chosen_ptr, table_stride, factor, n_splits, most_rows,
    MOST: tl.constexpr, H: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    ROW: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    item, tile = tl.program_id(0), tl.program_id(1)
    sequence, row, n_tokens, position = item_of(items_ptr, item)
    if chosen_ptr is None:
        first_row = tile * BM
        first_token, end_token = first_row // H, tl.minimum(n_tokens, (first_row + BM - 1) // H + 1)
        end = position + end_token
        all_see = position + first_token + 1
    else:  # of one token, as each has a choice of its own
        first_token = tile // ((H + BM - 1) // BM)
        first_row = first_token * H + tile % ((H + BM - 1) // BM) * BM
        end_token = tl.minimum(n_tokens, first_token + 1)
        end = tl.minimum(position + end_token, MOST)
        all_see = end
        chosen_ptr += (row + first_token).to(tl.int64) * MOST
    begin = tl.program_id(2) * SPLIT
    if first_token >= end_token or begin >= end:
        return
    r, d, e = first_row + tl.arange(0, BM), tl.arange(0, RP), tl.arange(0, EP)
    token, head = r // H, r % H
    is_row = token < end_token
    at_row = (row + token).to(tl.int64) * H + head
    q_ptrs = q_ptr + (at_row * (R + E))[:, None]
    q = tl.load(q_ptrs + d[None, :], mask=is_row[:, None] & (d < R)[None, :], other=0.0)
    q_turned = tl.load(q_ptrs + R + e[None, :], mask=is_row[:, None] & (e < E)[None, :], other=0.0)
    at = position + token
    blocks_ptr = table_ptr + sequence * table_stride
    is_in = is_row[:, None] & (d < R)[None, :]
    if IS_SPLIT:  # what `gather` folds
        end = tl.minimum(end, begin + SPLIT)
        m, l, acc = _sums(
            q, q_turned, kv_ptr, blocks_ptr, chosen_ptr, begin, end, at, all_see, factor, R, E, ROW, P, TILE
        )
        part = ((item.to(tl.int64) * n_splits + tl.program_id(2)) * most_rows + token) * H + head
        tl.store(out_ptr + part[:, None] * R + d[None, :], acc, mask=is_in)
        tl.store(stats_ptr + part * 2, m, mask=is_row)
        tl.store(stats_ptr + part * 2 + 1, tl.max(l, 1), mask=is_row)
    else:
        m_all = tl.full((BM,), float("-inf"), tl.float32)
        l_all, acc_all = tl.zeros((BM, 16), tl.float32), tl.zeros((BM, RP), tl.float32)
        for first in range(0, end, SPLIT):
            until = tl.minimum(end, first + SPLIT)
            m, l, acc = _sums(
                q, q_turned, kv_ptr, blocks_ptr, chosen_ptr, first, until, at, all_see, factor, R, E, ROW, P, TILE
            )
            m_all, l_all, acc_all = fold(m_all, l_all, acc_all, m, l, acc)
        total = tl.max(l_all, 1)
        out = acc_all / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + at_row[:, None] * R + d[None, :], out.to(out_ptr.dtype.element_ty), mask=is_in)


def attend_latents(
    q: torch.Tensor,
    latents: torch.Tensor,
    out: torch.Tensor,
    items: torch.Tensor,
    table: torch.Tensor,
    *,
    rank: int,
    block_tokens: int,
    most_rows: int,
    most_tokens: int,
    scale: float,
    chosen: torch.Tensor | None = None,
) -> None:
    """Attention of items, written to their rows of out [T, H r]. q [T, H, r + p]; latents [slots, 1, r + p or more], the values
    in their first r, by the block table [S, blocks]. items, most_rows and most_tokens: as `attention.attend` has them.
    chosen [T, most] int32: the positions that each token attends to, ascending, as many as it sees; None: all that it sees.
    """
    n_heads, turned = q.shape[1], q.shape[2] - rank
    most = 0 if chosen is None else chosen.shape[1]
    rows = n_heads if most else most_rows * n_heads
    bm = next((bm for bm in (FEW, SOME) if rows <= bm), ROWS)
    n_tiles = cdiv(rows, bm) * (most_rows if most else 1)
    most_tokens = min(most_tokens, most or most_tokens)
    # decode, too: what a part leaves is nearly as large as what it reads
    part, stats, n_splits = parts(out, len(items), most_tokens, most_rows, n_heads, rank, len(items) * n_tiles)
    launch(
        _attend_latents,
        (len(items), n_tiles, max(1, n_splits)),
        (q, latents, part, stats, items, table, chosen),
        (table.stride(0), scale * LOG2_E, n_splits, most_rows),
        {"MOST": most, "H": n_heads, "R": rank, "RP": padded_width(rank), "E": turned, "EP": padded_width(turned)}
        | {
            "ROW": latents.stride(0),
            "P": block_tokens,
            "BM": bm,
            "TILE": TILE,
            "SPLIT": SPLIT,
            "IS_SPLIT": n_splits > 0,
        },
        num_warps=8,
        num_stages=2,
    )
    if n_splits:
        gather(part, stats, out, items, most=most, WINDOW=0, IS_CHUNKED=False)


@triton.jit
def turn_rows(x_ptrs, y_ptrs, cos_ptrs, sin_ptrs, e, is_in, HALF: tl.constexpr):
    """Rows [M, 2 HALF] turned. cos and sin: where those of a row begin [M, 1]."""
    is_in = is_in & (e < 2 * HALF)[None, :]
    other, at = tl.where(e < HALF, e + HALF, e - HALF), tl.where(e < HALF, e, e - HALF)
    x = tl.load(x_ptrs + e[None, :], mask=is_in, other=0.0).to(tl.float32)
    beside = tl.load(x_ptrs + other[None, :], mask=is_in, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptrs + at[None, :], mask=is_in, other=0.0)
    sin = tl.load(sin_ptrs + at[None, :], mask=is_in, other=0.0)
    y = x * cos + tl.where(e < HALF, -1.0, 1.0)[None, :] * beside * sin
    tl.store(y_ptrs + e[None, :], y.to(y_ptrs.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["M"])
def _multiply_heads(
    x_ptr, w_ptr, y_ptr, cos_ptr, sin_ptr, M, x_stride, y_stride, X: tl.constexpr, Y: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    m, head = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2)
    at = tl.minimum(m, M - 1).to(tl.int64)
    is_row = (m < M)[:, None]
    x_ptrs, y_ptrs = x_ptr + (at * x_stride + head * X)[:, None], y_ptr + (at * y_stride + head * Y)[:, None]
    N_TILES: tl.constexpr = (N + BN - 1) // BN
    if HALF > 0:
        if tl.program_id(0) == N_TILES:
            turn = (at * HALF)[:, None]
            turn_rows(x_ptrs + K, y_ptrs + N, cos_ptr + turn, sin_ptr + turn, tl.arange(0, EP), is_row, HALF)
            return
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    w_ptrs = w_ptr + head.to(tl.int64) * N * K + tl.minimum(n, N - 1)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, BK):
        if K % BK == 0:
            x, w = tl.load(x_ptrs + begin + k[None, :], mask=is_row, other=0.0), tl.load(w_ptrs + begin)
        else:
            is_in = k < K - begin
            x = tl.load(x_ptrs + begin + k[None, :], mask=is_row & is_in[None, :], other=0.0)
            w = tl.load(w_ptrs + begin, mask=is_in[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
    tl.store(y_ptrs + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=is_row & (n < N)[None, :])


def multiply_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    turn: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Each head's x W^T [T, H, N], x [T, H, K or more] and W [H, N, K] in 16 bits. turn: cos and sin [T, p / 2] fp32, by which
    p numbers behind a head's K are turned, which then stand behind its N.
    """
    n_heads, n, k = weight.shape
    n_tokens, half = len(x), 0 if turn is None else turn[0].shape[1]
    y = torch.empty((n_tokens, n_heads, n + 2 * half), dtype=x.dtype, device=x.device)
    if not n_tokens:
        return y
    bm, bn, bk, warps, stages = heads_tile(n_tokens, n, k)
    cos, sin = turn or (None, None)
    launch(
        _multiply_heads,
        (cdiv(n, bn) + (half > 0), cdiv(n_tokens, bm), n_heads),
        (x, weight, y, cos, sin),
        (n_tokens, x.stride(0), y.stride(0)),
        {"X": x.stride(1), "Y": y.stride(1), "N": n, "K": k, "HALF": half, "EP": padded_width(2 * half or 1)}
        | {"BM": bm, "BN": bn, "BK": bk},
        num_warps=warps,
        num_stages=stages,
    )
    return y


def heads_tile(rows: int, n: int, k: int) -> tuple[int, int, int, int, int]:
    """As `products.tile_of`."""
    if rows <= FEW:
        return FEW, 32, 128, 4, 3
    bn, bk = (64 if rows <= ROWS or n < 128 else 128), 64
    return (ROWS, bn, bk, 4, 3) if rows <= ROWS else (128, bn, bk, 8, 3)


@triton.jit
def _cache(
    rows_ptr, w_ptr, kv_ptr, slots_ptr, cos_ptr, sin_ptr, rows_stride, eps,
    R: tl.constexpr, RP: tl.constexpr, HALF: tl.constexpr, EP: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:
        return
    d, row_ptr, to_ptr = tl.arange(0, RP), rows_ptr + t * rows_stride, kv_ptr + slot * ROW
    x = tl.load(row_ptr + d, mask=d < R, other=0.0).to(tl.float32)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / R + eps)) * tl.load(w_ptr + d, mask=d < R, other=0.0)
    tl.store(to_ptr + d, x.to(kv_ptr.dtype.element_ty), mask=d < R)
    one, turn = tl.arange(0, 1)[:, None], t * HALF
    turn_rows(
        row_ptr + R + one,
        to_ptr + R + one,
        cos_ptr + turn + one,
        sin_ptr + turn + one,
        tl.arange(0, EP),
        one == 0,
        HALF,
    )


def cache_latents(
    rows: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    *,
    weight: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> None:
    """Rows [T, r + p], their latents normed by a weight [r] fp32 and the rest turned, to slots [T] of latents [slots, 1, r + p
    or more]; below 0 nothing is written. turn: cos and sin [T, p / 2] fp32.
    """
    rank, (cos, sin) = len(weight), turn
    half = cos.shape[1]
    launch(
        _cache,
        (len(rows), 1, 1),
        (rows, weight, latents, slots, cos, sin),
        (rows.stride(0), eps),
        {"R": rank, "RP": padded_width(rank), "HALF": half, "EP": padded_width(2 * half), "ROW": latents.stride(0)},
        num_warps=1,
    )
