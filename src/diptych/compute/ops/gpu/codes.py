"""Weights that are held as codes (`ops.torch.device_codes`), as the 16 bits that they are dequantised to: in the registers of
a product, or written out for one of many rows.

Every value is made as it is where a file is read as 16 bits: in fp32, operation by operation, and rounded once. So a product
that meets it has the bits that it has over those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.launch import cdiv, launch
from diptych.compute.ops.torch.device_codes import CodedWeight
from diptych.ground.formats import DEVICE_MIDDLES, DeviceFormat

SIGNED, ZEROS, MINIMA, E2M1, E4M3 = 0, 1, 2, 3, 4
GRIDS = {"signed": SIGNED, "zeros": ZEROS, "minima": MINIMA, "e2m1": E2M1, "e4m3": E4M3}
# what a head is: a scale of fp32; with an offset behind it in halves of fp16 or of bf16, or in another of fp32; two groups' in
# halves, nested or in 16 bits
ALONE, HALVES, BRAINS, WIDE, NESTED, NESTED_MINIMA, TWO_HALVES, TWO_BRAINS = range(8)
HEADS = {"f32": (ALONE, WIDE), "f16": (TWO_HALVES, HALVES), "bf16": (TWO_BRAINS, BRAINS), "s8": (NESTED, NESTED_MINIMA)}

_MIDDLE4, _MIDDLE8 = tl.constexpr(float(DEVICE_MIDDLES[4])), tl.constexpr(float(DEVICE_MIDDLES[8]))
# a whole number below 2^23 in the last bits of this is a float that much above 2^23: exact, and cheaper than a conversion
_BITS_OF_2_23, _2_23 = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)


@dataclass(frozen=True, slots=True)
class CodeForm:
    """What a kernel is compiled for: bits of a code (16: there are none, but values), inputs of a group (0: all)."""

    bits: int = 16
    grid: int = SIGNED
    head: int = ALONE
    group: int = 0


VALUES = CodeForm()


@cache
def constants_of(form: CodeForm) -> dict[str, int]:
    """Those of a kernel, in the order of its arguments."""
    return {"BITS": form.bits, "GRID": form.grid, "HEAD": form.head, "G": form.group}


@cache
def _form_of(form: DeviceFormat) -> CodeForm:
    return CodeForm(form.bits, GRIDS[form.grid], HEADS[form.scale][form.has_offsets], form.group)


@dataclass(frozen=True, slots=True)
class Held:
    """A weight as kernels take it: words or values, heads, more of them, how long rows of those lie apart, and the form."""

    words: torch.Tensor
    heads: torch.Tensor | None
    more: torch.Tensor | None
    n_words: int
    form: CodeForm

    @classmethod
    def of(cls, weight: torch.Tensor | CodedWeight) -> Held:
        """Of either kind."""
        if isinstance(weight, torch.Tensor):
            return cls(weight, None, None, weight.shape[-1], VALUES)
        return cls(weight.words, weight.heads, weight.more, weight.words.shape[-1], _form_of(weight.format))

    @property
    def strides(self) -> tuple[int, int]:
        """Of heads, and of more, from a matrix of several to the next."""
        strides = [0 if one is None else one.stride(0) for one in (self.heads, self.more)]
        return strides[0], strides[1]


@triton.jit
def _half(word, UPPER: tl.constexpr, IS_BRAIN: tl.constexpr):
    """The fp16 or bf16 in the lower or the upper half, in fp32."""
    if IS_BRAIN:
        return (((word >> 16) << 16) if UPPER else (word << 16)).to(tl.float32, bitcast=True)
    bits = (word >> 16) if UPPER else (word & 0xFFFF)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_offset(s_ptr, o_ptr, n, is_in, n_rows, begin, AT: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr):
    """Of outputs n, in fp32, for the inputs from AT on of the block that begins at `begin`."""
    GROUP: tl.constexpr = AT // G if G > 0 else 0
    UPPER: tl.constexpr = GROUP % 2 == 1
    if G == 0:
        row = 0
    elif HEAD >= 4:
        row = begin // (2 * G) + GROUP // 2
    else:
        row = begin // G + GROUP
    word = tl.load(s_ptr + row * n_rows + n, mask=is_in, other=0)
    scale, offset = word, word
    if HEAD == 1 or HEAD == 2:
        scale, offset = _half(word, False, HEAD == 2), _half(word, True, HEAD == 2)
    if HEAD == 3:
        offset = tl.load(o_ptr + row * n_rows + n, mask=is_in, other=0)
    if HEAD == 4 or HEAD == 5:
        shared = tl.load(o_ptr + begin // 256 * n_rows + n, mask=is_in, other=0)
        nested = (word >> 16) if UPPER else ((word << 16) >> 16)
        scale = ((nested << 24) >> 24).to(tl.float32)
        if HEAD == 5:
            scale, offset = (
                scale * _half(shared, False, False),
                (nested >> 8).to(tl.float32) * _half(shared, True, False),
            )
        else:
            scale = scale * shared
    if HEAD >= 6:
        scale = _half(word, UPPER, HEAD == 7)
    return scale, offset


@triton.jit
def values_of(words, scale, offset, AT: tl.constexpr, BITS: tl.constexpr, GRID: tl.constexpr):
    """In fp32, of the inputs from AT on of a block, whose words those are; scale and offset in a shape that broadcasts."""
    codes = (words >> (AT // 32 * BITS)) & ((1 << BITS) - 1)
    if GRID == 3:  # a float of 16 bits has the same mantissa and more exponent, biased by 14 more; scales are halved
        half = ((codes & 8) << 12) | ((codes & 7) << 9)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 32768.0 * scale
    if GRID == 4:
        half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale
    above = (codes | _BITS_OF_2_23).to(tl.float32, bitcast=True)
    if GRID == 0:
        return (above - (_2_23 + (_MIDDLE4 if BITS == 4 else _MIDDLE8))) * scale
    if GRID == 1:
        return (above - (offset + _2_23)) * scale
    return (above - _2_23) * scale + offset


@triton.jit
def _write_values(
    w_ptr, s_ptr, o_ptr, y_ptr, first, N, K, n_rows, W, w_stride, s_stride, o_stride,
    BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = 1024 // BITS
    J: tl.constexpr = 16 if G == 16 else 32
    matrix, begin = tl.program_id(2).to(tl.int64), tl.program_id(1) * P
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    is_in, n, j = row < N, first + row, tl.arange(0, J)
    w_ptr += matrix * w_stride
    if s_ptr is not None:
        s_ptr += matrix * s_stride
    if o_ptr is not None:
        o_ptr += matrix * o_stride
    w_ptrs = w_ptr + (n.to(tl.int64) * W)[None, :] + begin // P * 32 + j[:, None]
    y_ptrs = y_ptr + (matrix * N * K + row.to(tl.int64) * K + begin)[None, :] + j[:, None]
    for half in tl.static_range(32 // J):
        words = tl.load(w_ptrs + half * J, mask=is_in[None, :], other=0)
        for i in tl.static_range(32 // BITS):
            scale, offset = scale_and_offset(s_ptr, o_ptr, n, is_in, n_rows, begin, i * 32 + half * J, HEAD, G)
            values = values_of(words, scale[None, :], offset[None, :], i * 32 + half * J, BITS, GRID)
            is_stored = is_in[None, :] & (j < K - begin - i * 32 - half * J)[:, None]
            tl.store(y_ptrs + i * 32 + half * J, values.to(y_ptr.dtype.element_ty), mask=is_stored)


def write_values(weight: CodedWeight, first: int, y: torch.Tensor) -> None:
    """Of outputs from `first` on to y [N, K], or of several matrices to y [E, N, K], which is contiguous."""
    held, (n, k) = Held.of(weight), y.shape[-2:]
    n_matrices = len(y) if y.ndim == 3 else 1
    w_stride, strides = (held.words.stride(0), held.strides) if y.ndim == 3 else (0, (0, 0))
    launch(
        _write_values,
        (cdiv(n, 64), cdiv(k, 1024 // held.form.bits), n_matrices),
        (held.words, held.heads, held.more, y),
        (first, n, k, held.words.shape[-2], held.n_words, w_stride, *strides),
        {**constants_of(held.form), "BN": 64},
        num_warps=4,
    )
