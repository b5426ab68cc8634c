"""Kernels for GPUs, in Triton: products, norms, rotation and paged attention whose bits do not depend on the batch.

A row's result is made of the same operations in the same order whatever stands beside it: products add along K in steps of
one matrix instruction, into one sum; attention adds tile by tile from multiples of TILE, into a sum for every SPLIT positions,
and those in their order. Tiles of few rows (`mma.sync`) and of many (`wgmma`) were found to give the same bits on Hopper
(LAB.md), and no kernel lets the compiler fuse a product and a sum, which it would do here and not there.

Legend: M rows, N outputs, K inputs of a product; T tokens, S sequences, H query heads, G of them to a kv head, d head dim,
P tokens of a block of the cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

SPLIT = 512  # positions whose sum is made apart: decode has a program for each
LOG2_E = tl.constexpr(math.log2(math.e))
TILE = 64  # positions that are attended together
LARGEST_HEAD = 256  # beyond it a tile of keys and values does not fit beside another

PLAIN, SILU, GELU_TANH = 0, 1, 2  # what `multiply` does with a gate
FEW = 16  # rows of the smallest tile: from there on a tile's rows are a power of two
SOME_PROGRAMS = 256  # by which a GPU is busy: two for each of Hopper's 132 multiprocessors, nearly


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x_ptr, w_ptr, b_ptr, added_ptr, y_ptr, M, N, K, x_stride,
    GATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # programs that run together share rows and columns, which then lie in the L2
    pid, n_m, n_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * n_n) * GROUP
    size = tl.minimum(n_m - first, GROUP)
    within = pid % (GROUP * n_n)
    m = (first + within % size) * BM + tl.arange(0, BM)
    n = within // size * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # rows and columns beyond the last repeat it, which costs no mask; they are not stored
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    up_ptrs = w_ptrs + N.to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, BK):
        if IS_EVEN:
            x = tl.load(x_ptrs + begin)
            acc = tl.dot(x, tl.load(w_ptrs + begin), acc)
            if GATE:
                up = tl.dot(x, tl.load(up_ptrs + begin), up)
        else:
            is_in = k < K - begin
            x = tl.load(x_ptrs + begin, mask=is_in[None, :], other=0.0)
            acc = tl.dot(x, tl.load(w_ptrs + begin, mask=is_in[:, None], other=0.0), acc)
            if GATE:
                up = tl.dot(x, tl.load(up_ptrs + begin, mask=is_in[:, None], other=0.0), up)
    is_n = n < N
    if b_ptr is not None:
        acc += tl.load(b_ptr + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
        if GATE:
            up += tl.load(b_ptr + N + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
    if GATE == 1:
        acc = acc * tl.sigmoid(acc) * up
    if GATE == 2:
        inner = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
        acc = acc * tl.sigmoid(2.0 * inner) * up  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    is_in = (m < M)[:, None] & is_n[None, :]
    if added_ptr is not None:
        acc += tl.load(added_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=is_in)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: int = PLAIN,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x W^T + b [M, N], x [M, K] and W [N, K] in 16 bits. Of a gate, W is [2 N, K]: act(x W0^T + b0) * (x W1^T + b1).

    added [M, N] is added before the one rounding, to `dtype` or that of x.
    """
    rows, k = x.shape
    n = len(weight) if gate == PLAIN else len(weight) // 2
    y = torch.empty((rows, n), dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return y
    bm, bn, bk, warps, stages = tile_of(rows, n, gate != PLAIN)
    _multiply[(triton.cdiv(rows, bm) * triton.cdiv(n, bn),)](
        x, weight, bias, added, y, rows, n, k, x.stride(0),
        GATE=gate, BM=bm, BN=bn, BK=bk, IS_EVEN=k % bk == 0, GROUP=8,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def tile_of(rows: int, n: int, is_gate: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns and inputs of a tile, its warps and the tiles that are read ahead: speed alone depends on it."""
    if rows > 64:
        return (128, 128, 64, 8, 3) if is_gate or rows <= 128 or n < 4096 else (128, 256, 64, 8, 3)
    bm = max(FEW, triton.next_power_of_2(rows))
    if bm == 64:
        return bm, 64, 64, 4, 4
    if n >= 64 * SOME_PROGRAMS // (2 if is_gate else 1):
        return bm, 32 if is_gate else 64, 128, 4, 4
    return (bm, 32, 128, 4, 4) if n >= 32 * SOME_PROGRAMS else (bm, 16, 256, 2, 4)


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, D, eps, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    y = x * scale * tl.load(w_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + row * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight [M, D], weight fp32 [D]."""
    y = torch.empty_like(x)
    if len(x):
        block = triton.next_power_of_2(x.shape[1])
        warps = min(16, max(1, block // 256))
        _norm[(len(x),)](x, weight, y, x.shape[1], eps, BLOCK=block, num_warps=warps, enable_fp_fusion=False)
    return y


@triton.jit
def _rotate(
    qkv_ptr, qkv_stride, q_ptr, k_ptr, v_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    t, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DP)
    is_in = d < D
    row_ptr = qkv_ptr + t * qkv_stride + head * D
    x = tl.load(row_ptr + d, mask=is_in, other=0.0).to(tl.float32)
    if head < H + K:  # a query or a key
        other = tl.where(d < HALF, d + HALF, d - HALF)
        is_turned = d < 2 * HALF
        beside = tl.load(row_ptr + other, mask=is_turned, other=0.0).to(tl.float32)
        if q_norm_ptr is not None and not IS_TURNED:
            norm_ptr = q_norm_ptr if head < H else k_norm_ptr
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
            x = x * scale * tl.load(norm_ptr + d, mask=is_in, other=0.0)
            beside = beside * scale * tl.load(norm_ptr + other, mask=is_turned, other=0.0)
        if HALF > 0:
            at = t * HALF + tl.where(d < HALF, d, d - HALF)
            cos = tl.load(cos_ptr + at, mask=is_turned, other=1.0)
            sin = tl.load(sin_ptr + at, mask=is_turned, other=0.0)
            x = x * cos + tl.where(d < HALF, -beside, beside) * sin
        if q_norm_ptr is not None and IS_TURNED:
            norm_ptr = q_norm_ptr if head < H else k_norm_ptr
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
            x = x * scale * tl.load(norm_ptr + d, mask=is_in, other=0.0)
    if head < H:
        tl.store(q_ptr + (t * H + head) * D + d, x.to(q_ptr.dtype.element_ty), mask=is_in)
    else:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        is_in = is_in & (slot + d >= d)  # a block, as every mask
        if head < H + K:
            tl.store(k_ptr + (slot * K + head - H) * D + d, x.to(k_ptr.dtype.element_ty), mask=is_in)
        else:
            tl.store(v_ptr + (slot * K + head - H - K) * D + d, x.to(v_ptr.dtype.element_ty), mask=is_in)


def rotate_and_cache(
    qkv: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    n_heads: int,
    head_dim: int,
    owns_kv: bool,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    is_turned_first: bool,
    eps: float,
) -> torch.Tensor:
    """q [T, H, d]; k and v of qkv [T, (H + 2 K) d] go to their slots of keys and values [slots, K, d].

    slots [T]: below 0 nothing is written. turn: cos and sin [T, turned / 2] fp32. norms: weights [d] fp32 of q and k, applied
    before they are turned, or behind.
    """
    n_kv_heads = keys.shape[1]
    q = torch.empty((len(qkv), n_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = turn or (None, None)
    q_norm, k_norm = norms or (None, None)
    _rotate[(len(qkv), n_heads + (2 * n_kv_heads if owns_kv else 0))](
        qkv, qkv.stride(0), q, keys, values, slots, cos, sin, q_norm, k_norm, eps,
        H=n_heads, K=n_kv_heads, D=head_dim, DP=triton.next_power_of_2(head_dim),
        HALF=0 if cos is None else cos.shape[-1], IS_TURNED=is_turned_first, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return q


@triton.jit
def _fold(m_all, l_all, acc_all, m, l, acc):
    """Sums of exponentials, and what they weigh, of two ranges of positions."""
    most = tl.maximum(m_all, m)
    base = tl.where(most == float("-inf"), 0.0, most)
    a, b = tl.exp2(m_all - base), tl.exp2(m - base)
    return most, l_all * a + l * b, acc_all * a[:, None] + acc * b[:, None]


@triton.jit
def _finish(sinks_ptr, heads, is_head, m, l, acc):
    """What attention gives: the weighed sum over the sum of weights, a sink's among them."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        m, l, acc = _fold(m, l, acc, sink, tl.full(l.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32))
    return acc / tl.where(l == 0.0, 1.0, l)[:, None]


@triton.jit
def _item(items_ptr, item):
    """Sequence, first row, tokens, first position."""
    at = items_ptr + 4 * item
    sequence, row = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
    return sequence, row, tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr):
    if WINDOW == 0:
        first = position * 0
    elif IS_CHUNKED:
        first = position - position % WINDOW
    else:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit(do_not_specialize=["table_stride", "n_splits"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, sinks_ptr, items_ptr, table_ptr, table_stride, scale, n_splits,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // K
    item, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, row, n_tokens, position = _item(items_ptr, item)
    # the query heads of a kv head stand side by side: no key is read twice for them
    r, c, d = tl.arange(0, BM), tl.arange(0, TILE), tl.arange(0, DP)
    token, head = r // G, kv_head * G + r % G
    is_row = token < tl.minimum(n_tokens, BM // G)
    q_ptrs = q_ptr + (row + token).to(tl.int64)[:, None] * (H * D) + head[:, None] * D + d[None, :]
    q = tl.load(q_ptrs, mask=is_row[:, None] & (d < D)[None, :], other=0.0)
    at = position + token
    first = _first_seen(at, WINDOW, IS_CHUNKED)
    begin = _first_seen(position, WINDOW, IS_CHUNKED)
    end = position + n_tokens
    if IS_SPLIT:
        split = begin // SPLIT + tl.program_id(2)
        end = tl.minimum(end, (split + 1) * SPLIT)
        begin = tl.maximum(begin, split * SPLIT)
        if begin >= end:
            return
    m, l, acc = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, DP), tl.float32)
    m_all, l_all, acc_all = m, l, acc
    for start in range(begin // TILE * TILE, end, TILE):
        if not IS_SPLIT:
            if start % SPLIT == 0:
                m_all, l_all, acc_all = _fold(m_all, l_all, acc_all, m, l, acc)
                m = tl.full((BM,), float("-inf"), tl.float32)
                l = tl.zeros((BM,), tl.float32)
                acc = tl.zeros((BM, DP), tl.float32)
        key = start + c
        is_key = key < end
        block = tl.load(table_ptr + sequence * table_stride + key // P, mask=is_key, other=0).to(tl.int64)
        offset = ((block * P + key % P) * K + kv_head) * D
        k = tl.load(k_ptr + offset[None, :] + d[:, None], mask=is_key[None, :] & (d < D)[:, None], other=0.0)
        s = tl.dot(q, k.to(q.dtype)) * scale
        if SOFTCAP > 0.0:
            s = SOFTCAP * (2.0 * tl.sigmoid(2.0 * s / SOFTCAP) - 1.0)
        is_seen = (key[None, :] <= at[:, None]) & (key[None, :] >= first[:, None])
        s = tl.where(is_seen, s * LOG2_E, float("-inf"))
        most = tl.maximum(m, tl.max(s, 1))
        base = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=is_key[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None])
        m = most
    if not IS_SPLIT:
        m, l, acc = _fold(m_all, l_all, acc_all, m, l, acc)
        out = _finish(sinks_ptr, head, is_row, m, l, acc)
        out_ptrs = out_ptr + (row + token).to(tl.int64)[:, None] * (H * D) + head[:, None] * D + d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (d < D)[None, :])
    else:  # of one token: what `_gather` folds
        part = (item.to(tl.int64) * n_splits + tl.program_id(2)) * H + head
        tl.store(out_ptr + part[:, None] * D + d[None, :], acc, mask=is_row[:, None] & (d < D)[None, :])
        tl.store(stats_ptr + part * 2, m, mask=is_row)
        tl.store(stats_ptr + part * 2 + 1, l, mask=is_row)


@triton.jit(do_not_specialize=["n_places"])
def _gather(
    part_ptr, stats_ptr, out_ptr, sinks_ptr, items_ptr, n_places,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    item, head, d = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1), tl.arange(0, DP)
    _, row, n_tokens, position = _item(items_ptr, item)
    end = position + n_tokens
    n_splits = tl.cdiv(end, SPLIT) - _first_seen(position, WINDOW, IS_CHUNKED) // SPLIT
    m, l, acc = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32), tl.zeros((1, DP), tl.float32)
    for split in range(0, n_splits):
        part = (item.to(tl.int64) * n_places + split) * H + head
        one = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        m, l, acc = _fold(m, l, acc, tl.load(stats_ptr + part * 2), tl.load(stats_ptr + part * 2 + 1), one)
    out = _finish(sinks_ptr, head, head < H, m, l, acc)
    is_in = (d < n_tokens * D)[None, :]  # nothing, where there is no token
    tl.store(
        out_ptr + (row.to(tl.int64) * H + head)[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=is_in
    )


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    items: torch.Tensor,
    table: torch.Tensor,
    *,
    block_tokens: int,
    most_rows: int,
    most_tokens: int,
    scale: float,
    window: int | None,
    is_chunked: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of items, written to their rows of out [T, H d]. q [T, H, d], keys and values [slots, K, d] by the block table
    [S, M] int32.

    items int32 [I, 4]: a sequence, the first of its rows in T, how many tokens (at most `item_tokens`; 0: nothing is done) and
    the position of the first. most_rows: tokens of the largest item; most_tokens: of the longest context, where that is 1.
    """
    n_heads, head_dim = q.shape[1:]
    n_kv_heads, group = keys.shape[1], n_heads // keys.shape[1]
    padded = triton.next_power_of_2(head_dim)
    n_splits = 0
    if most_rows == 1:
        span = most_tokens if window is None else min(most_tokens, window + SPLIT)
        n_splits = triton.cdiv(span, SPLIT)
    if n_splits > 1:
        part = torch.empty((len(items), n_splits, n_heads, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((len(items), n_splits, n_heads, 2), dtype=torch.float32, device=q.device)
    else:
        n_splits, part, stats = 0, out, None
    bm = FEW if most_rows * group <= FEW else rows_of_item(head_dim)
    shape = {"H": n_heads, "D": head_dim, "DP": max(16, padded), "WINDOW": window or 0}
    shape |= {"IS_CHUNKED": is_chunked, "SPLIT": SPLIT}
    _attend[(len(items), n_kv_heads, max(1, n_splits))](
        q, keys, values, part, stats, sinks, items, table, table.stride(0), scale, n_splits,
        K=n_kv_heads, P=block_tokens, SOFTCAP=softcap or 0.0, BM=bm, TILE=TILE, IS_SPLIT=n_splits > 0, **shape,
        num_warps=8 if bm == 128 else 4, num_stages=2 if padded > 128 else 3, enable_fp_fusion=False,
    )  # fmt: skip
    if n_splits:
        _gather[(len(items), n_heads)](
            part, stats, out, sinks, items, n_splits, **shape, num_warps=1, enable_fp_fusion=False
        )


def rows_of_item(head_dim: int) -> int:
    """Most rows, tokens times query heads of a kv head, that a program attends."""
    return 128 if head_dim <= 128 else 64


def item_tokens(head_dim: int, group: int) -> int:
    """Most tokens of an item; 0: none, as the heads of one token are too many."""
    return rows_of_item(head_dim) // group
