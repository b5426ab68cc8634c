"""Attention over the paged cache, of one token and of many.

Legend: T tokens, S sequences, H query heads, K kv heads, G of the first to one of the second, d head dim, dv that of values,
P tokens of a block of the cache, M blocks of a table.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.launch import cdiv, launch, power_of_two

SPLIT = 256  # positions whose sum is made apart: decode has a program for each
TILE = 64  # positions that are attended together
FEW, ROWS = 16, 64  # of a tile: those of an item, which are its tokens times query heads of a kv head, or some of them
LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)  # as kernels see it
# items of several tokens are taken in parts, too, where programs are fewer than multiprocessors, parts as many as it takes to
# make up for another kernel, and their bytes no more than that
MANY, LEAST_PARTS, MOST_HELD = 128, 4, 2**28


@triton.jit
def fold(m_all, l_all, acc_all, m, l, acc):
    """Sums of exponentials, and what they weigh, of two ranges of positions."""
    most = tl.maximum(m_all, m)
    base = tl.where(most == float("-inf"), 0.0, most)
    a, b = tl.exp2(m_all - base), tl.exp2(m - base)
    return most, l_all * a[:, None] + l * b[:, None], acc_all * a[:, None] + acc * b[:, None]


@triton.jit
def _finish(sinks_ptr, heads, is_head, m, l, acc):
    """What attention gives: the weighed sum over the sum of weights, a sink's among them."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
        m, l, acc = fold(m, l, acc, sink, tl.full(l.shape, 1.0, tl.float32), tl.zeros(acc.shape, tl.float32))
    total = tl.max(l, 1)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def item_of(items_ptr, item):
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


@triton.jit
def weigh(s, factor, m, l, dtype: tl.constexpr):
    """Largest score, sum of weights, how far earlier sums shrink, and a tile's weights of its scores."""
    most = tl.maximum(m, tl.max(s, 1) * factor)
    base = tl.where(most == float("-inf"), 0.0, most)
    p = tl.exp2(tl.fma(s, tl.full(s.shape, 1.0, tl.float32) * factor, tl.zeros(s.shape, tl.float32) - base[:, None]))
    shrink = tl.exp2(m - base)
    # the weights' sum, in every column, by the same instruction: adding them up across threads would depend on the tile's rows
    l = tl.dot(p.to(dtype), tl.full((s.shape[1], l.shape[1]), 1.0, dtype), l * shrink[:, None])
    return most, l, shrink, p.to(dtype)


@triton.jit
def _step(
    q, k_ptr, v_ptr, blocks_ptr, kv_head, start, end, at, first, factor, m_all, l_all, acc_all, m, l, acc,
    K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """One tile more. IS_MASKED: not every row sees every position of it."""
    DP: tl.constexpr = q.shape[1]
    if not IS_SPLIT:
        if start % SPLIT == 0:
            m_all, l_all, acc_all = fold(m_all, l_all, acc_all, m, l, acc)
            m = tl.full(m.shape, float("-inf"), tl.float32)
            l = tl.zeros(l.shape, tl.float32)
            acc = tl.zeros(acc.shape, tl.float32)
    d, key = tl.arange(0, DP), start + tl.arange(0, TILE)
    if IS_MASKED:
        is_key = key < end
        block = tl.load(blocks_ptr + key // P, mask=is_key, other=0)
        is_in = is_key[None, :] & (d < D)[:, None]
    else:
        block = tl.load(blocks_ptr + key // P)
        is_in = (d < D)[:, None]
    slot = block * P + key % P
    k_ptrs = k_ptr + ((slot * K + kv_head) * D)[None, :] + d[:, None]
    k = tl.load(k_ptrs, mask=is_in, other=0.0) if IS_MASKED or D != DP else tl.load(k_ptrs)
    s = tl.dot(q, k.to(q.dtype))
    if SOFTCAP > 0.0:  # the factor takes the score to it first, and what comes out has that of exp2
        s = SOFTCAP * _LOG2_E * (2.0 * tl.sigmoid(2.0 * (s * factor)) - 1.0)
        factor = 1.0
    if IS_MASKED:
        is_seen = (key[None, :] <= at[:, None]) & (key[None, :] >= first[:, None])
        s = tl.where(is_seen, s, float("-inf"))
    most, l, shrink, p = weigh(s, factor, m, l, q.dtype)
    dv = tl.arange(0, acc.shape[1])
    v_ptrs = v_ptr + ((slot * K + kv_head) * DV)[:, None] + dv[None, :]
    if IS_MASKED:
        v = tl.load(v_ptrs, mask=is_key[:, None] & (dv < DV)[None, :], other=0.0)
    elif acc.shape[1] != DV:
        v = tl.load(v_ptrs, mask=(dv < DV)[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(p, v.to(q.dtype), acc * shrink[:, None])
    return m_all, l_all, acc_all, most, l, acc


@triton.jit(do_not_specialize=["table_stride", "n_splits", "most_rows"])
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr, sinks_ptr, items_ptr, table_ptr, table_stride, factor, n_splits, most_rows,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    P: tl.constexpr, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // K
    item, kv_head, tile = tl.program_id(0), tl.program_id(1) % K, tl.program_id(1) // K
    sequence, row, n_tokens, position = item_of(items_ptr, item)
    first_token, end_token = tile * BM // G, tl.minimum(n_tokens, (tile * BM + BM - 1) // G + 1)
    if first_token >= end_token:
        return
    # the query heads of a kv head stand side by side: no key is read twice for them
    r, d, dv = tile * BM + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, DVP)
    token, head = r // G, kv_head * G + r % G
    is_row = token < end_token
    q_ptrs = q_ptr + (row + token).to(tl.int64)[:, None] * (H * D) + head[:, None] * D + d[None, :]
    q = tl.load(q_ptrs, mask=is_row[:, None] & (d < D)[None, :], other=0.0)
    at = position + token
    first = _first_seen(at, WINDOW, IS_CHUNKED)
    begin = _first_seen(position + first_token, WINDOW, IS_CHUNKED)
    end = position + end_token
    if IS_SPLIT:
        split = _first_seen(position, WINDOW, IS_CHUNKED) // SPLIT + tl.program_id(2)
        end = tl.minimum(end, (split + 1) * SPLIT)
        begin = tl.maximum(begin, split * SPLIT)
        if begin >= end:
            return
    begin = begin // TILE * TILE
    # up to here every row sees all of a tile
    plain_end = begin if WINDOW > 0 else tl.maximum(begin, tl.minimum(end, position + first_token + 1) // TILE * TILE)
    blocks_ptr = table_ptr + sequence * table_stride
    m = tl.full((BM,), float("-inf"), tl.float32)
    l, acc = tl.zeros((BM, 16), tl.float32), tl.zeros((BM, DVP), tl.float32)
    m_all, l_all, acc_all = m, l, acc
    for start in range(begin, plain_end, TILE):
        m_all, l_all, acc_all, m, l, acc = _step(
            q, k_ptr, v_ptr, blocks_ptr, kv_head, start, end, at, first, factor, m_all, l_all, acc_all, m, l, acc,
            K, D, DV, P, SOFTCAP, TILE, SPLIT, IS_SPLIT, False,
        )  # fmt: skip
    for start in range(plain_end, end, TILE):
        m_all, l_all, acc_all, m, l, acc = _step(
            q, k_ptr, v_ptr, blocks_ptr, kv_head, start, end, at, first, factor, m_all, l_all, acc_all, m, l, acc,
            K, D, DV, P, SOFTCAP, TILE, SPLIT, IS_SPLIT, True,
        )  # fmt: skip
    if not IS_SPLIT:
        m, l, acc = fold(m_all, l_all, acc_all, m, l, acc)
        out = _finish(sinks_ptr, head, is_row, m, l, acc)
        out_ptrs = out_ptr + (row + token).to(tl.int64)[:, None] * (H * DV) + head[:, None] * DV + dv[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & (dv < DV)[None, :])
    else:  # what `_gather` folds
        part = ((item.to(tl.int64) * n_splits + tl.program_id(2)) * most_rows + token) * H + head
        tl.store(out_ptr + part[:, None] * DV + dv[None, :], acc, mask=is_row[:, None] & (dv < DV)[None, :])
        tl.store(stats_ptr + part * 2, m, mask=is_row)
        tl.store(stats_ptr + part * 2 + 1, tl.max(l, 1), mask=is_row)


@triton.jit(do_not_specialize=["n_places", "most_rows"])
def _gather(
    part_ptr, stats_ptr, out_ptr, sinks_ptr, items_ptr, n_places, most_rows,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr,
    MOST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    item, token, d = tl.program_id(0), tl.program_id(1) // H, tl.arange(0, DP)
    head = tl.program_id(1) % H + tl.arange(0, 1)
    _, row, n_tokens, position = item_of(items_ptr, item)
    if token >= n_tokens:
        return
    at = position + token
    if MOST > 0:
        at = tl.minimum(at, MOST - 1)
    # of the item's parts, those that hold what this token sees
    before = _first_seen(position, WINDOW, IS_CHUNKED) // SPLIT
    begin, end = _first_seen(at, WINDOW, IS_CHUNKED) // SPLIT - before, at // SPLIT + 1 - before
    m = tl.full((1,), float("-inf"), tl.float32)
    l, acc = tl.zeros((1, 1), tl.float32), tl.zeros((1, DP), tl.float32)
    for place in tl.range(begin, end, num_stages=4):  # read ahead: folding one takes less time than waiting for it
        part = ((item.to(tl.int64) * n_places + place) * most_rows + token) * H + head
        one = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        m_one, l_one = tl.load(stats_ptr + part * 2), tl.load(stats_ptr + part * 2 + 1)
        m, l, acc = fold(m, l, acc, m_one, l_one[:, None], one)
    out = _finish(sinks_ptr, head, head < H, m, l, acc)
    out_ptrs = out_ptr + ((row + token).to(tl.int64) * H + head)[:, None] * D + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(d < D)[None, :])


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
    """Attention of items, written to their rows of out [T, H dv]. q [T, H, d], keys [slots, K, d] and values [slots, K, dv] by
    the block table [S, M].

    items [I, 4]: a sequence, the first of its rows in T, how many tokens (0: nothing is done) and the position of the first.
    most_rows: tokens of the largest item; most_tokens: of the longest context.
    """
    n_heads, head_dim = q.shape[1:]
    n_kv_heads, value_dim = values.shape[1:]
    group = n_heads // n_kv_heads
    padded, wide = padded_width(head_dim), padded_width(value_dim)
    bm = FEW if most_rows * group <= FEW else ROWS
    n_tiles = n_kv_heads * cdiv(most_rows * group, bm)
    span = most_tokens if window is None else min(most_tokens, window + most_rows - 1 + SPLIT)
    n_programs = len(items) * n_tiles if most_rows > 1 else 0
    part, stats, n_splits = parts(out, len(items), span, most_rows, n_heads, value_dim, n_programs)
    seen = {"WINDOW": window or 0, "IS_CHUNKED": is_chunked}
    factor = scale * LOG2_E if softcap is None else scale / softcap
    largest = max(padded, wide)
    launch(
        _attend,
        (len(items), n_tiles, max(1, n_splits)),
        (q, keys, values, part, stats, sinks, items, table),
        (table.stride(0), factor, n_splits, most_rows),
        {"H": n_heads, "K": n_kv_heads, "D": head_dim, "DP": padded, "DV": value_dim, "DVP": wide, "P": block_tokens}
        | seen
        | {"SOFTCAP": softcap or 0.0, "BM": bm, "TILE": TILE, "SPLIT": SPLIT, "IS_SPLIT": n_splits > 0},
        num_warps=2 if bm == FEW and largest <= 64 else 4 if bm == FEW or largest <= 128 else 8,
        num_stages=2,
    )
    if n_splits:
        gather(part, stats, out, items, sinks=sinks, **seen)


def parts(
    out: torch.Tensor, n_items: int, span: int, most_rows: int, n_heads: int, width: int, n_programs: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Where the sums of each part of a context go [I, parts, rows, H, width], their largest scores and sums of weights, and how
    many parts there are; out, None and 0 where no context is taken in parts: there is one, or it would not pay.
    """
    n_splits = cdiv(span, SPLIT)
    shape = (n_items, n_splits, most_rows, n_heads)
    nbytes = n_items * n_splits * most_rows * n_heads * width * 4
    is_worth_it = most_rows == 1 or (n_splits >= LEAST_PARTS and nbytes <= MOST_HELD)
    if n_splits <= 1 or n_programs >= MANY or not is_worth_it:
        return out, None, 0
    part, stats = (torch.empty((*shape, n), dtype=torch.float32, device=out.device) for n in (width, 2))
    return part, stats, n_splits


def gather(
    part: torch.Tensor,
    stats: torch.Tensor | None,
    out: torch.Tensor,
    items: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    most: int = 0,
    **seen: int,
) -> None:
    """What `parts` made room for, folded and written to the items' rows of out. seen: WINDOW and IS_CHUNKED; most: how many
    positions an index chooses, 0: there is none.
    """
    n_items, n_splits, most_rows, n_heads, width = part.shape
    launch(
        _gather,
        (n_items, most_rows * n_heads, 1),
        (part, stats, out, sinks, items),
        (n_splits, most_rows),
        {"H": n_heads, "D": width, "DP": padded_width(width)} | seen | {"MOST": most, "SPLIT": SPLIT},
        num_warps=1,
    )


def padded_width(width: int) -> int:
    """Columns of a tile for so many."""
    return max(16, power_of_two(width))


def item_tokens(group: int) -> int:
    """Tokens of an item that fill a tile; larger items, and those of larger groups, take several."""
    return max(2, ROWS // group)


def few_tokens(group: int) -> int:
    """Most tokens of an item that takes the smallest tile."""
    return max(1, FEW // group)
