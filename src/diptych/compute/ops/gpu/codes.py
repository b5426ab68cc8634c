"""Tiles of weights that are held as codes (`compute.ops.device_codes`), as the 16 bits that they are dequantised to.

Every value is made as it is where a file is read as 16 bits: in fp32, operation by operation, and rounded once. So a product
that meets it has the bits that it has over those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from diptych.compute.ops.device_codes import CodedWeight
from diptych.ground.formats import DEVICE_MIDDLES

SIGNED, ZEROS, MINIMA, E2M1, E4M3 = 0, 1, 2, 3, 4
GRIDS = {"signed": SIGNED, "zeros": ZEROS, "minima": MINIMA, "e2m1": E2M1, "e4m3": E4M3}
# what stands beside a group: a scale; with an offset in one word, of two fp16 or two bf16; in two of fp32; nested ones
ALONE, HALVES, BRAINS, WIDE, NESTED, NESTED_MINIMA = 0, 1, 2, 3, 4, 5

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

    @classmethod
    def of(cls, weight: CodedWeight) -> CodeForm:
        """Of a weight."""
        form = weight.format
        if form.scale == "s8":
            head = NESTED_MINIMA if form.grid == "minima" else NESTED
        elif form.grid not in ("zeros", "minima"):
            head = ALONE
        else:
            head = {"f16": HALVES, "bf16": BRAINS, "f32": WIDE}[form.scale]
        return cls(form.bits, GRIDS[form.grid], head, form.group)

    @property
    def constants(self) -> dict[str, int]:
        """Those of a kernel, in the order of its arguments."""
        return {"BITS": self.bits, "GRID": self.grid, "HEAD": self.head, "G": self.group}


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
            return cls(weight, None, None, weight.shape[-1], CodeForm())
        return cls(weight.words, weight.heads, weight.more, weight.words.shape[-1], CodeForm.of(weight))


@triton.jit
def _low(pairs, HEAD: tl.constexpr):
    if HEAD == 1:
        return (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pairs, HEAD: tl.constexpr):
    if HEAD == 1:
        return (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return ((pairs >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def coded_tile(  # noqa: ANN201
    w_ptr, s_ptr, o_ptr, n, end, n_rows, n_words, begin,
    BITS: tl.constexpr, GRID: tl.constexpr, HEAD: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Values [BK, BN] in fp32 of inputs from `begin` on of outputs n, of a matrix that has n_rows of them.

    From output `end` on codes are those of the last before it, and scales 0.
    """
    P: tl.constexpr = 1024 // BITS  # inputs of a block of 32 words
    ROWS: tl.constexpr = BK // G if G > 0 and G < BK else 1
    column = tl.minimum(n, end - 1).to(tl.int64)
    # words of 32 bits: of smaller ones Triton would put other inputs into one matrix instruction, which sums in another order
    words = tl.load(w_ptr + column[None, :] * n_words + (begin // P * 32 + tl.arange(0, 32))[:, None])
    shift = tl.arange(0, BK // 32)
    if BK < P:
        shift += begin % P // 32
    codes = (words[None, :, :] >> (shift * BITS)[:, None, None]) & ((1 << BITS) - 1)
    codes = tl.reshape(codes, (ROWS, BK // ROWS, BN))

    row = tl.arange(0, ROWS)
    if G > 0:
        row += begin // G
    is_in = (n < end)[None, :]
    at = row.to(tl.int64)[:, None] * n_rows + n[None, :]
    scale = tl.load(s_ptr + at, mask=is_in, other=0)
    offset = scale
    if HEAD == 1 or HEAD == 2:
        offset, scale = _high(scale, HEAD), _low(scale, HEAD)
    if HEAD == 3:
        offset = tl.load(o_ptr + at, mask=is_in, other=0.0)
    if HEAD >= 4:  # groups of at most 64 inputs, and tiles that 256 are a multiple of
        shared_at = (begin // 256 + tl.arange(0, 1)).to(tl.int64)[:, None] * n_rows + n[None, :]
        shared = tl.load(o_ptr + shared_at, mask=is_in, other=0)
        both = scale.to(tl.int32)
        scale = ((both << 24) >> 24).to(tl.float32)
        if HEAD == 5:
            offset = (both >> 8).to(tl.float32) * _high(shared, 1)
            scale = scale * _low(shared, 1)
        else:
            scale = scale * shared
    scale = scale.to(tl.float32)[:, None, :]

    if GRID == 3:  # a float of 16 bits has the same mantissa and more exponent, biased by 14 more
        half = ((codes & 8) << 12) | ((codes & 7) << 9)
        values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 32768.0 * scale  # scales are halved
    elif GRID == 4:
        half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale
    else:
        above = (codes | _BITS_OF_2_23).to(tl.float32, bitcast=True)
        if GRID == 0:
            values = (above - (_2_23 + (_MIDDLE4 if BITS == 4 else _MIDDLE8))) * scale
        elif GRID == 1:
            values = (above - (offset.to(tl.float32)[:, None, :] + _2_23)) * scale
        else:
            values = (above - _2_23) * scale + offset.to(tl.float32)[:, None, :]
    return tl.reshape(values, (BK, BN))
