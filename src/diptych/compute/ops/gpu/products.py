"""Products of rows and weights, of one matrix and of a mixture's experts.

Weights are values in 16 bits, or codes (`codes`): few rows meet values that are made in registers, many those that were
written out, a part of the weight at a time that lies in the L2.

Legend: M rows, N outputs, K inputs; T tokens, E experts, k of them to a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.codes import Held, constants_of, scale_and_offset, values_of, write_values
from diptych.compute.ops.gpu.launch import cdiv, launch
from diptych.compute.ops.torch.device_codes import CodedWeight, JoinedWeight, Weight
from diptych.compute.ops.torch.loader import Stacked
from diptych.models.gates import CLAMPED
from diptych.models.gpu_kernels import GATES

FEW, SOME = 16, 64  # rows of the smallest tiles
BUSY = 70  # programs that keep a GPU of some 130 multiprocessors busy

COUNTED = 2048  # choices that are placed by counting for each those before it; beyond, sorting takes less time
CODED_ROWS = 32  # of an expert; of more, codes are written out
WRITTEN_BYTES = 2**25  # of values of codes, at a time
PLAIN = 0  # sums as they are; what else is made of them: models.gpu_kernels

_ALPHA, _LIMIT = tl.constexpr(CLAMPED.alpha), tl.constexpr(CLAMPED.limit)


@triton.jit
def _add_coded(
    acc, x, words, s_ptr, o_ptr, n, is_in, n_rows, begin,
    AT: tl.constexpr, BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    scale, offset = scale_and_offset(s_ptr, o_ptr, n, is_in, n_rows, begin, AT, HEAD, G)
    values = values_of(words, scale[None, :], offset[None, :], AT, BITS, GRID)
    return tl.dot(x, values.to(x.dtype), acc)


@triton.jit
def _coded_sums(
    x_rows, is_row, w_ptr, s_ptr, o_ptr, n, N, K, W,
    IS_GATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, IS_EVEN: tl.constexpr,
    BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """As `_plain_sums`, over the values of codes. Words, not bytes: of smaller ones Triton would put other inputs into one
    matrix instruction, which sums in another order. Of a group's inputs at a time, as a part of a tile can not be taken out.
    """
    P: tl.constexpr = 1024 // BITS  # inputs of a block of 32 words
    J: tl.constexpr = 16 if G == 16 else 32
    j = tl.arange(0, J)
    n_rows = 2 * N if IS_GATE else N
    x_ptrs = x_rows[:, None] + j[None, :]
    w_ptrs = w_ptr + (tl.minimum(n, N - 1).to(tl.int64) * W)[None, :] + j[:, None]
    up_ptrs = w_ptrs
    if IS_GATE:
        up_ptrs += N.to(tl.int64) * W
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, P):
        at = begin // P * 32
        words = tl.load(w_ptrs + at)
        words_b = tl.load(w_ptrs + at + 16) if J == 16 else words
        if IS_GATE:
            up_words = tl.load(up_ptrs + at)
            up_b = tl.load(up_ptrs + at + 16) if J == 16 else up_words
        for AT in tl.static_range(0, P, J):
            is_in = is_row[:, None] if IS_EVEN else is_row[:, None] & (j < K - begin - AT)[None, :]
            x = tl.load(x_ptrs + begin + AT, mask=is_in, other=0.0)
            own = words if AT % 32 == 0 else words_b
            acc = _add_coded(acc, x, own, s_ptr, o_ptr, n, n < N, n_rows, begin, AT, BITS, GRID, HEAD, G)
            if IS_GATE:
                own = up_words if AT % 32 == 0 else up_b
                up = _add_coded(up, x, own, s_ptr, o_ptr, n + N, n < N, n_rows, begin, AT, BITS, GRID, HEAD, G)
    return acc, up


@triton.jit
def _plain_sums(
    x_rows, is_row, w_ptr, n, N, K,
    IS_GATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """x W^T [BM, BN], and of a gate x U^T, for columns n of W [N or 2 N, K]."""
    k = tl.arange(0, BK)
    x_ptrs = x_rows[:, None] + k[None, :]
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
    return acc, up


@triton.jit
def _sums(
    x_rows, is_row, w_ptr, s_ptr, o_ptr, b_ptr, n, N, K, W,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
    BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """act of x W^T + b [BM, BN], for columns n of W [N or 2 N, K]."""
    IS_GATE: tl.constexpr = KIND > 0 and KIND < 4
    if BITS == 16:
        acc, up = _plain_sums(x_rows, is_row, w_ptr, n, N, K, IS_GATE, BM, BN, BK, IS_EVEN)
    else:
        acc, up = _coded_sums(
            x_rows, is_row, w_ptr, s_ptr, o_ptr, n, N, K, W, IS_GATE, BM, BN, IS_EVEN, BITS, GRID, HEAD, G
        )
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
    x_ptr, w_ptr, s_ptr, o_ptr, b_ptr, added_ptr, y_ptr, M, N, K, W, x_stride, added_stride, y_stride,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
    BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # programs that run together share rows and columns, which then lie in the L2
    pid, n_m, n_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * n_n) * GROUP
    size = tl.minimum(n_m - first, GROUP)
    within = pid % (GROUP * n_n)
    m = (first + within % size) * BM + tl.arange(0, BM)
    n = within // size * BN + tl.arange(0, BN)
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * x_stride
    acc = _sums(x_rows, m < M, w_ptr, s_ptr, o_ptr, b_ptr, n, N, K, W, KIND, BM, BN, BK, IS_EVEN, BITS, GRID, HEAD, G)
    at = m.to(tl.int64)[:, None]
    is_in = (m < M)[:, None] & (n < N)[None, :]
    if added_ptr is not None:
        acc += tl.load(added_ptr + at * added_stride + n[None, :], mask=is_in, other=0.0).to(tl.float32)
    tl.store(y_ptr + at * y_stride + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=is_in)


def multiply(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    kind: int = PLAIN,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x W^T + b [M, N], x [M, K] and W [N, K] in 16 bits. Of a gate, W is [2 N, K]: act(x W0^T + b0) * (x W1^T + b1).

    added [M, N] is added before the one rounding, to `dtype` or that of x. Joined weights are no gates'.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    added = None if added is None else added.contiguous()
    y = torch.empty((len(x), _n_outputs(weight, kind)), dtype=dtype or x.dtype, device=x.device)
    if not len(x):
        return y
    if not isinstance(weight, JoinedWeight):
        _multiply_by(_Product(y, x, weight, bias, kind, added))
        return y
    assert kind not in GATES.values(), "gate and up lie in one format"
    end = 0
    for piece in weight.pieces:
        begin, end = end, end + len(piece)
        _multiply_by(_Product(y, x, piece, bias, kind, added).part(begin, end, piece))
    return y


@dataclass(frozen=True, slots=True)
class _Product:
    """y [M, N] of `multiply`, to be written, and what it is made of."""

    y: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor | CodedWeight
    bias: torch.Tensor | None
    kind: int
    added: torch.Tensor | None

    @property
    def n_matrices(self) -> int:
        return 2 if self.kind in GATES.values() else 1

    def part(self, begin: int, end: int, weight: torch.Tensor | CodedWeight) -> _Product:
        """Of the outputs [begin, end) alone, which are those of `weight`."""
        n, bias, added = self.y.shape[1], self.bias, self.added
        return _Product(
            y=self.y[:, begin:end],
            x=self.x,
            weight=weight,
            bias=None if bias is None else bias.view(self.n_matrices, n)[:, begin:end].flatten(),
            kind=self.kind,
            added=None if added is None else added[:, begin:end],
        )


def _multiply_by(product: _Product) -> None:
    """By a weight, or of one in codes by its values, as many at a time as are written where rows are many."""
    x, weight = product.x, product.weight
    if isinstance(weight, torch.Tensor) or len(x) <= SOME:
        _multiply_into(product)
        return
    n, k, n_matrices = product.y.shape[1], weight.n_inputs, product.n_matrices
    step = max(128, WRITTEN_BYTES // (2 * k * n_matrices) // 128 * 128)
    for begin in range(0, n, step):
        end = min(n, begin + step)
        values = torch.empty((n_matrices, end - begin, k), dtype=x.dtype, device=x.device)
        for i in range(n_matrices):
            write_values(weight, i * n + begin, values[i])
        _multiply_into(product.part(begin, end, values.flatten(0, 1)))


def _multiply_into(product: _Product) -> None:
    x, y, added, kind = product.x, product.y, product.added, product.kind
    (rows, n), k, held = y.shape, x.shape[1], Held.of(product.weight)
    bits = held.form.bits
    tile = coded_tile_of(rows, bits) if bits < 16 else tile_of(rows, n, k, is_gate=kind in GATES.values())
    bm, bn, bk, warps, stages = tile
    launch(
        _multiply,
        (cdiv(rows, bm) * cdiv(n, bn), 1, 1),
        (x, held.words, held.heads, held.more, product.bias, added, y),
        (rows, n, k, held.n_words, x.stride(0), 0 if added is None else added.stride(0), y.stride(0)),
        {"KIND": kind, "BM": bm, "BN": bn, "BK": bk, "IS_EVEN": k % bk == 0, **constants_of(held.form), "GROUP": 8},
        num_warps=warps,
        num_stages=stages,
    )


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


def coded_tile_of(rows: int, bits: int) -> tuple[int, int, int, int, int]:
    """As `tile_of`, for at most SOME rows over codes, of whose words a block is taken at a time."""
    return (2 * FEW if rows > FEW else FEW), (64 if rows > FEW else 32), 1024 // bits, 4, 4


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
    x_ptr, w_ptr, s_ptr, o_ptr, b_ptr, y_ptr, order_ptr, starts_ptr, N, K, W, s_stride, o_stride,
    KIND: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr,
    BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr,
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
    x_rows = x_ptr + tl.where(is_row, row, 0).to(tl.int64) * K
    IS_GATE: tl.constexpr = KIND > 0 and KIND < 4
    n_rows = 2 * N if IS_GATE else N
    w_ptr += expert.to(tl.int64) * n_rows * W
    if s_ptr is not None:
        s_ptr += expert.to(tl.int64) * s_stride
    if o_ptr is not None:
        o_ptr += expert.to(tl.int64) * o_stride
    if b_ptr is not None:
        b_ptr += expert * n_rows
    acc = _sums(x_rows, is_row, w_ptr, s_ptr, o_ptr, b_ptr, n, N, K, W, KIND, BM, BN, BK, IS_EVEN, BITS, GRID, HEAD, G)
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
    first: Stacked,
    second: Stacked,
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
    inner = _of_experts(_Choices(x, order, starts, top if len(x) == n_tokens else 1, n_tokens, kind), first)
    y = _of_experts(_Choices(inner, order, starts, 0, n_tokens, PLAIN), second)
    out = torch.empty((n_tokens, y.shape[1]), dtype=x.dtype, device=x.device)
    grid = (n_tokens, cdiv(y.shape[1], 1024), 1)
    launch(_combine, grid, (y, weights, out), (y.shape[1],), {"TOP": top, "BLOCK": 1024}, num_warps=4)
    return out


@dataclass(frozen=True, slots=True)
class _Choices:
    """Rows x and whose experts' they are, as `place` has them.

    top: choices of a row; 0: rows lie in the order of experts. most: rows that an expert may have; programs beyond its own end
    at once.
    """

    x: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    top: int
    most: int
    kind: int


def _of_experts(choices: _Choices, of_experts: Stacked) -> torch.Tensor:
    """Of each choice a row [T k, N]: in the order of experts, or where x is (top 0), in that of tokens."""
    (weight, bias), x, order = of_experts, choices.x, choices.order
    n_experts, k, n = len(weight), weight.shape[2], _n_outputs(weight[0], choices.kind)
    y = torch.empty((len(order), n), dtype=x.dtype, device=x.device)
    usual = cdiv(len(order), n_experts)
    if isinstance(weight, CodedWeight) and usual > CODED_ROWS:
        step = max(1, WRITTEN_BYTES // (2 * len(weight[0]) * k))
        for begin in range(0, n_experts, step):
            end = min(n_experts, begin + step)
            values = torch.empty((end - begin, len(weight[0]), k), dtype=x.dtype, device=x.device)
            write_values(weight[begin:end], 0, values)
            own = values, None if bias is None else bias[begin:end]
            _multiply_by_experts(y, replace(choices, starts=choices.starts[begin : end + 1]), own, usual)
    else:
        _multiply_by_experts(y, choices, of_experts, usual)
    return y


def _multiply_by_experts(y: torch.Tensor, choices: _Choices, of_experts: Stacked, usual: int) -> None:
    """Those of the choices whose experts these are, of which each has some `usual` rows."""
    weight, bias = of_experts
    held, n, k = Held.of(weight), y.shape[1], weight.shape[2]
    bm, bn, bk, warps, stages = expert_tile(usual, held.form.bits)
    launch(
        _multiply_experts,
        (cdiv(n, bn), cdiv(choices.most, bm), len(weight)),
        (choices.x, held.words, held.heads, held.more, bias, y, choices.order, choices.starts),
        (n, k, held.n_words, *held.strides),
        {
            "KIND": choices.kind,
            "TOP": choices.top,
            "BM": bm,
            "BN": bn,
            "BK": bk,
            "IS_EVEN": k % bk == 0,
            **constants_of(held.form),
        },
        num_warps=warps,
        num_stages=stages,
    )


def expert_tile(rows: int, bits: int) -> tuple[int, int, int, int, int]:
    """As `tile_of`, for experts that have so many rows each."""
    if bits < 16:
        return coded_tile_of(rows, bits)
    if rows <= FEW:
        return FEW, 64, 128, 4, 4
    return (SOME, 128, 64, 4, 4) if rows <= SOME else (128, 128, 64, 8, 3)


def _n_outputs(weight: Weight, kind: int) -> int:
    return len(weight) // 2 if kind in GATES.values() else len(weight)
