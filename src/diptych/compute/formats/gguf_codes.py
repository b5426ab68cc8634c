"""Blocks of GGUF that a kernel holds as they are: their codes, scales and minima, taken apart without arithmetic that rounds.

The layouts are those of ggml (`ggml-common.h`, `gguf/quants.py`): blocks of 32 inputs, or of 256 with eight groups of 32 or
sixteen of 16.
Which they are is `GGUF_KEPT` in `ground.formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from diptych.compute.formats.gguf_lattices import LATTICES, codes_of_lattice
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.formats import NESTED_INPUTS


def codes_of(blocks: torch.Tensor, kind: str) -> Codes:
    """Rows of blocks [n, bytes] uint8 as codes of GGUF_KEPT[kind]."""
    if kind in LATTICES:
        return codes_of_lattice(blocks, kind)
    if kind == "NVFP4":
        return _floats_of_four(blocks.view(len(blocks), -1, 36))
    if kind in FEW_BITS:
        return _few_bits(blocks, FEW_BITS[kind])
    if kind in SUPER_BLOCKS:
        size, taken_apart = SUPER_BLOCKS[kind]
        return taken_apart(blocks.view(len(blocks), -1, size))
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18, "MXFP4": 17}
    blocks = blocks.view(len(blocks), -1, sizes[kind])
    n_values = 32 if kind == "Q8_0" else 16
    values = blocks[..., -n_values:]
    codes = values ^ 128 if kind == "Q8_0" else torch.cat((values & 15, values >> 4), -1)
    if kind in ("Q5_0", "Q5_1"):
        high = _bits(blocks[..., -20:-16])
        codes = codes + (high << 4)
    scales = blocks[..., 0] if kind == "MXFP4" else _halves(blocks[..., :2])
    minima = _halves(blocks[..., 2:4]) if kind in ("Q4_1", "Q5_1") else None
    return Codes(codes=codes.flatten(1), scales=scales, offsets=minima)


def values_of(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows of blocks [n, bytes] uint8 of a type of FEW_BITS as fp32 [n, values]; exact."""
    codes = codes_of(blocks, kind)
    levels = codes.codes.float() - 2
    by_block = levels.view(len(blocks), codes.scales.shape[1], -1) * codes.scales.float()[..., None]
    return by_block.flatten(1)


def _few_bits(blocks: torch.Tensor, bits: int) -> Codes:
    """d (fp16) and 16 bytes of codes, the lowest bits first: of 1 bit -1 and 1; of 2 bits -1 to 2, or 1 to -2 times -d."""
    each = blocks.view(len(blocks), -1, 18)
    stored = each[..., 2:, None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & (1 << bits) - 1
    codes, d = stored.flatten(1), _halves(each[..., :2])
    return Codes(codes=2 * codes + 1 if bits == 1 else 3 - codes, scales=d if bits == 1 else -d)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.float16).squeeze(-1)


def _bits(stored: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] -> their 32 bits, the lowest first."""
    return ((stored[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _floats_of_four(blocks: torch.Tensor) -> Codes:
    """4 bytes of E4M3 without signs, of 16 inputs each, 32 of nibbles: of 16 inputs the first eight below the last."""
    nibbles = blocks[..., 4:].unflatten(-1, (4, 8))
    codes = torch.cat((nibbles & 15, nibbles >> 4), -1).flatten(1)
    scales = (blocks[..., :4] & 127).flatten(1)
    factors = torch.full((len(blocks), -(-codes.shape[1] // NESTED_INPUTS)), 0.5)  # the levels are twice E2M1's
    return Codes(codes=codes, scales=torch.where(scales == 127, 0, scales), factors=factors)


def _fours_and_fives(blocks: torch.Tensor, *, is_fifth: bool) -> Codes:
    """d, dmin (fp16), 12 bytes of eight scales and minima of 6 bits, of Q5_K 32 bytes of fifth bits, 128 bytes of nibbles."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    nibbles = blocks[..., -128:].unflatten(-1, (4, 32))
    codes = torch.stack((nibbles & 15, nibbles >> 4), -2).flatten(-3, -2)  # [n, blocks, 8, 32]
    if is_fifth:
        fifth = blocks[..., 16:48][..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]
        codes = codes + ((fifth & 1) << 4)
    return _nested(codes, blocks[..., :2], scales, blocks[..., 2:4], minima)


def _sixes(blocks: torch.Tensor) -> Codes:
    """128 bytes of low nibbles, 64 of two high bits, 16 scales of 8 bits, d (fp16); 32 is the middle. In each half of 128
    inputs the nibbles of the first 64 lie under those of the last, and the high bits of 32 together.
    """
    low, high = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    nibbles = torch.cat((low & 15, low >> 4), -2).flatten(-2)  # [n, blocks, 2, 128]
    twos = _shifted(high, 2).flatten(-2)
    return _nested(nibbles + (twos << 4), blocks[..., 208:], blocks[..., 192:208])  # 32 + (q - 32)


def _threes(blocks: torch.Tensor) -> Codes:
    """32 bytes of third bits, 64 of two low bits, 12 of sixteen scales of 6 bits, d (fp16); 32 is the scales' middle,
    4 the codes'.
    """
    third = ((blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1).flatten(-2)
    twos = _shifted(blocks[..., 32:96].unflatten(-1, (2, 1, 32)), 2).flatten(-3)
    codes = twos + (third << 2)
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    sixes = torch.cat((low & 15, low >> 4), -1) | (_shifted(high[..., None, :], 2).flatten(-2) << 4)
    return _nested(codes, blocks[..., 108:], sixes - 32)


def _twos(blocks: torch.Tensor) -> Codes:
    """16 bytes of a scale and a minimum of 4 bits each, 64 bytes of codes, d and dmin (fp16)."""
    codes = _shifted(blocks[..., 16:80].unflatten(-1, (2, 1, 32)), 2)
    return _nested(codes, blocks[..., 80:82], blocks[..., :16] & 15, blocks[..., 82:84], blocks[..., :16] >> 4)


def _tables(blocks: torch.Tensor) -> Codes:
    """d (fp16), 2 bytes of eight scales' high bits, 4 of their low ones, 128 of nibbles; 32 is the scales' middle."""
    high, low = blocks[..., 2:4], blocks[..., 4:8]
    fours = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    twos = ((high[..., None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3).flatten(-2)
    nibbles = blocks[..., 8:].unflatten(-1, (8, 16))
    codes = torch.cat((nibbles & 15, nibbles >> 4), -1)
    return _nested(codes, blocks[..., :2], (fours | (twos << 4)) - 32)


def _nested(
    codes: torch.Tensor,
    d: torch.Tensor,
    scales: torch.Tensor,
    dmin: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
) -> Codes:
    """Of blocks of 256: whole numbers, uint8 that may be signed, times d, and others times -dmin (fp16 of two bytes)."""
    factor = _halves(d)
    factors = factor.float() if dmin is None else torch.stack((factor, -_halves(dmin)), -1).flatten(1)
    return Codes(
        codes=codes.flatten(1),
        scales=scales.contiguous().view(torch.int8).flatten(1),
        offsets=None if minima is None else minima.contiguous().view(torch.int8).flatten(1),
        factors=factors,
    )


def _shifted(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., 1, m] -> [..., 8 / bits, m]: the lowest bits of all bytes, then the next."""
    return (stored >> torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]) & ((1 << bits) - 1)


FEW_BITS = {"Q1_0": 1, "Q2_0": 2}  # of a code, of types that the gguf package does not dequantise
SUPER_BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], Codes]]] = {  # bytes of 256 values
    "Q2_K": (84, _twos),
    "Q3_K": (110, _threes),
    "Q4_K": (144, partial(_fours_and_fives, is_fifth=False)),
    "Q5_K": (176, partial(_fours_and_fives, is_fifth=True)),
    "Q6_K": (210, _sixes),
    "IQ4_XS": (136, _tables),
}
