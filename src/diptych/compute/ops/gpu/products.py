"""Products of rows and weights, of one matrix and of a mixture's experts.

Legend: M rows, N outputs, K inputs; T tokens, E experts, k of them to a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.launch import cdiv, launch
from diptych.models.gates import CLAMPED
from diptych.models.spec import Activation

FEW, SOME = 16, 64  # rows of the smallest tiles
BUSY = 70  # programs that keep a GPU of some 130 multiprocessors busy

COUNTED = 2048  # choices that are placed by counting for each those before it; beyond, sorting takes less time
PLAIN = 0
# what a kernel makes of its sums: of two matrices, and of one
GATES: dict[Activation, int] = {Activation.SILU: 1, Activation.GELU_TANH: 2, Activation.CLAMPED: 3}
CURVES: dict[Activation, int] = {Activation.SQUARED_RELU: 4}

_ALPHA, _LIMIT = tl.constexpr(CLAMPED.alpha), tl.constexpr(CLAMPED.limit)


@triton.jit
def _sums(
    x_ptrs, is_row, w_ptr, b_ptr, n, N, K,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """act of x W^T + b [BM, BN], for columns n of W [N or 2 N, K]."""
    IS_GATE: tl.constexpr = KIND > 0 and KIND < 4
    k = tl.arange(0, BK)
    # columns beyond the last repeat it, which costs no mask, and so do rows of large tiles; they are not stored. In small
    # tiles most rows may be nobody's, and reading one row for all of them from every program takes longer than the weights.
    w_ptrs = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    up_ptrs = w_ptrs
    if IS_GATE:  # never of one output, which would be no tensor here
        up_ptrs += N.to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, BK):
        if IS_EVEN:
            x = tl.load(x_ptrs + begin) if BM > 64 else tl.load(x_ptrs + begin, mask=is_row[:, None], other=0.0)
            acc = tl.dot(x, tl.load(w_ptrs + begin), acc)
            if IS_GATE:
                up = tl.dot(x, tl.load(up_ptrs + begin), up)
        else:
            is_in = k < K - begin
            x = tl.load(x_ptrs + begin, mask=is_row[:, None] & is_in[None, :], other=0.0)
            acc = tl.dot(x, tl.load(w_ptrs + begin, mask=is_in[:, None], other=0.0), acc)
            if IS_GATE:
                up = tl.dot(x, tl.load(up_ptrs + begin, mask=is_in[:, None], other=0.0), up)
    if b_ptr is not None:
        acc += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if IS_GATE:
            up += tl.load(b_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if KIND == 1:
        acc = acc * tl.sigmoid(acc) * up
    if KIND == 2:
        inner = 0.7978845608028654 * (acc + 0.044715 * acc * acc * acc)
        acc = acc * tl.sigmoid(2.0 * inner) * up  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    if KIND == 3:
        acc, up = tl.minimum(acc, _LIMIT), tl.maximum(tl.minimum(up, _LIMIT), -_LIMIT)
        acc = acc * tl.sigmoid(acc * _ALPHA) * (up + 1.0)
    if KIND == 4:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    return acc


@triton.jit(do_not_specialize=["M"])
def _multiply(
    x_ptr, w_ptr, b_ptr, added_ptr, y_ptr, M, N, K, x_stride,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # programs that run together share rows and columns, which then lie in the L2
    pid, n_m, n_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * n_n) * GROUP
    size = tl.minimum(n_m - first, GROUP)
    within = pid % (GROUP * n_n)
    m = (first + within % size) * BM + tl.arange(0, BM)
    n = within // size * BN + tl.arange(0, BN)
    x_ptrs = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride + tl.arange(0, BK)[None, :]
    acc = _sums(x_ptrs, m < M, w_ptr, b_ptr, n, N, K, KIND, BM, BN, BK, IS_EVEN)
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    is_in = (m < M)[:, None] & (n < N)[None, :]
    if added_ptr is not None:
        acc += tl.load(added_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=is_in)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: int = PLAIN,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x W^T + b [M, N], x [M, K] and W [N, K] in 16 bits. Of a gate, W is [2 N, K]: act(x W0^T + b0) * (x W1^T + b1).

    added [M, N] is added before the one rounding, to `dtype` or that of x.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    added = None if added is None else added.contiguous()
    rows, k = x.shape
    n = _n_outputs(weight, kind)
    y = torch.empty((rows, n), dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return y
    bm, bn, bk, warps, stages = tile_of(rows, n, k, is_gate=kind in GATES.values())
    launch(
        _multiply,
        (cdiv(rows, bm) * cdiv(n, bn), 1, 1),
        (x, weight, bias, added, y),
        (rows, n, k, x.stride(0)),
        {"KIND": kind, "BM": bm, "BN": bn, "BK": bk, "IS_EVEN": k % bk == 0, "GROUP": 8},
        num_warps=warps,
        num_stages=stages,
    )
    return y


def tile_of(rows: int, n: int, k: int, *, is_gate: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns and inputs of a tile, its warps and the tiles that are read ahead: speed alone depends on it (LAB.md)."""
    if rows <= FEW:
        if n >= 64 * BUSY:
            return FEW, 64, 128, 4, 5
        return (FEW, 32, 256, 4, 4) if k >= 2048 else (FEW, 32, 128, 4, 5)
    if rows <= SOME:
        bn = next((bn for bn in (64, 32) if n >= bn * BUSY), 16)
        return SOME, bn, 128, 4, 4 if bn == 64 else 5
    large = () if is_gate else ((256, 128, 64, 8, 3),)
    for tile in (*large, (128, 128, 64, 8, 4), (128, 64, 64, 4, 5), (SOME, 64, 128, 4, 4)):
        if cdiv(rows, tile[0]) * cdiv(n, tile[1]) >= BUSY:
            return tile
    return SOME, 32, 128, 4, 5


@triton.jit(do_not_specialize=["n"])
def _place(experts_ptr, order_ptr, starts_ptr, n, E, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    # a choice comes behind those of lower experts and those of its own before it, an expert begins behind those of lower ones
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = at - tl.cdiv(n, BLOCK) * BLOCK
    own = tl.where(at < n, tl.load(experts_ptr + at, mask=at < n, other=0).to(tl.int32), expert)
    i = tl.where(at < n, at, -1)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, n, SPAN):
        j = begin + tl.arange(0, SPAN)
        other = tl.load(experts_ptr + j, mask=j < n, other=E + 1).to(tl.int32)
        is_same = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        before += tl.sum(((other[None, :] < own[:, None]) | is_same).to(tl.int32), 1)
    tl.store(order_ptr + before, at, mask=at < n)
    tl.store(starts_ptr + expert, before, mask=(expert >= 0) & (expert <= E))


def place(experts: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices [n] in the order of their experts [n], and where each expert's begin and the last one's end [E + 1], int32."""
    n, block = len(experts), 64
    if n > COUNTED:
        by_expert, order = experts.sort(stable=True)
        starts = torch.searchsorted(by_expert, torch.arange(n_experts + 1, device=experts.device))
        return order.int(), starts.int()
    order = torch.empty(n, dtype=torch.int32, device=experts.device)
    starts = torch.empty(n_experts + 1, dtype=torch.int32, device=experts.device)
    grid = (cdiv(n, block) + cdiv(n_experts + 1, block), 1, 1)
    launch(_place, grid, (experts, order, starts), (n, n_experts), {"BLOCK": block, "SPAN": 128}, num_warps=4)
    return order, starts


@triton.jit
def _multiply_experts(
    x_ptr, w_ptr, b_ptr, y_ptr, order_ptr, starts_ptr, N, K,
    KIND: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    expert = tl.program_id(2)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * BM
    end = tl.load(starts_ptr + expert + 1)
    if first >= end:
        return
    place = first + tl.arange(0, BM)
    is_row = place < end
    choice = tl.load(order_ptr + place, mask=is_row, other=0)
    row, target = (choice // TOP, place) if TOP > 0 else (place, choice)
    x_ptrs = x_ptr + tl.where(is_row, row, 0).to(tl.int64)[:, None] * K + tl.arange(0, BK)[None, :]
    IS_GATE: tl.constexpr = KIND > 0 and KIND < 4
    n_rows = 2 * N if IS_GATE else N
    w_ptr += expert.to(tl.int64) * n_rows * K
    if b_ptr is not None:
        b_ptr += expert * n_rows
    acc = _sums(x_ptrs, is_row, w_ptr, b_ptr, n, N, K, KIND, BM, BN, BK, IS_EVEN)
    at = target.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


@triton.jit
def _combine(y_ptr, weights_ptr, out_ptr, D, TOP: tl.constexpr, BLOCK: tl.constexpr):
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP):
        y = tl.load(y_ptr + (token * TOP + i) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + token * TOP + i)
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def mix(
    x: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor | None],
    second: tuple[torch.Tensor, torch.Tensor | None],
    chosen: torch.Tensor,
    weights: torch.Tensor,
    *,
    kind: int,
) -> torch.Tensor:
    """The weighed sum of the chosen experts [T, D]. first and second: W [E, N, K] and b [E, N] of all experts; chosen and their
    weights, in fp32, [T, k]; x [T, D], or of each choice a row of its own [T k, D].
    """
    x, (n_tokens, top) = x.contiguous(), chosen.shape
    # the rows of an expert stand together, in the order of tokens; none has more than one of a token
    order, starts = place(chosen.flatten(), len(first[0]))
    inner = _of_experts(x, first, order, starts, top if len(x) == n_tokens else 1, n_tokens, kind)
    y = _of_experts(inner, second, order, starts, 0, n_tokens, PLAIN)
    out = torch.empty((n_tokens, y.shape[1]), dtype=x.dtype, device=x.device)
    grid = (n_tokens, cdiv(y.shape[1], 1024), 1)
    launch(_combine, grid, (y, weights, out), (y.shape[1],), {"TOP": top, "BLOCK": 1024}, num_warps=4)
    return out


def _of_experts(
    x: torch.Tensor,
    of_experts: tuple[torch.Tensor, torch.Tensor | None],
    order: torch.Tensor,
    starts: torch.Tensor,
    top: int,
    most: int,
    kind: int,
) -> torch.Tensor:
    """Of each choice a row [T k, N]: in the order of experts, or where x is (top 0), in that of tokens.

    most: rows that an expert may have; programs beyond its own end at once.
    """
    weight, bias = of_experts
    n_experts, k, n = len(weight), weight.shape[2], _n_outputs(weight[0], kind)
    y = torch.empty((len(order), n), dtype=x.dtype, device=x.device)
    usual = cdiv(len(order), n_experts)
    bm, bn, bk, warps, stages = expert_tile(usual)
    launch(
        _multiply_experts,
        (cdiv(n, bn), cdiv(most, bm), n_experts),
        (x, weight, bias, y, order, starts),
        (n, k),
        {"KIND": kind, "TOP": top, "BM": bm, "BN": bn, "BK": bk, "IS_EVEN": k % bk == 0},
        num_warps=warps,
        num_stages=stages,
    )
    return y


def expert_tile(rows: int) -> tuple[int, int, int, int, int]:
    """As `tile_of`, for experts that have so many rows each."""
    if rows <= FEW:
        return FEW, 64, 128, 4, 4
    return (SOME, 128, 64, 4, 4) if rows <= SOME else (128, 128, 64, 8, 3)


def _n_outputs(weight: torch.Tensor, kind: int) -> int:
    return len(weight) // 2 if kind in GATES.values() else len(weight)
