"""Blocks of ggml's lattices and of its types of three values, as codes that a kernel holds: no value is rounded.

A lattice type stores which entry of a table of 8 or 4 magnitudes comes next, and signs. Whatever the table, a value is one of
at most 16 whole numbers, of the smaller types 6 or 4, times a group's scale, which is a whole number times the block's d: 4, 3
or 2 bits a weight and the scale hold it. The entries come from the `gguf` package, by its own dequantisation of blocks whose d
is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch

from diptych.compute.ops.contract_parts import Codes
from diptych.ground.formats import GGUF_KEPT

BLOCK = 256
ONE = np.array([1.0], dtype=np.float16).view(np.uint8)

Bytes = np.ndarray  # uint8 [n, blocks, bytes of a block]


@dataclass(frozen=True, slots=True)
class Lattice:
    """nbytes of a block; d_at: of its d, fp16 (None: in four pieces); numbers: of its groups; eighths: of d that one is worth.

    A group's scale is 2 s + 1 times so many eighths of d, with s from `numbers`; where there are none it is -d, so that codes
    of two bits reach from -1 to 2, which is what a block of TQ2_0 can say.
    """

    nbytes: int
    d_at: int | None
    eighths: int
    numbers: Callable[[Bytes], Bytes] | None


def codes_of_lattice(blocks: torch.Tensor, kind: str) -> Codes:
    """Rows of blocks [n, bytes] uint8 as codes of GGUF_KEPT[kind]."""
    lattice, kept = LATTICES[kind], GGUF_KEPT[kind]
    stored = blocks.numpy().reshape(len(blocks), -1, lattice.nbytes)
    plain, d = (_without_d if lattice.d_at is not None else _without_pieces)(stored, lattice)
    values = _dequantised(plain, kind).reshape(len(blocks), -1, BLOCK // kept.group, kept.group)
    shape = values.shape[:3]
    numbers = np.zeros(shape, np.uint8) if lattice.numbers is None else lattice.numbers(plain)
    scales = np.full(shape, -1, np.int8) if lattice.numbers is None else (2 * numbers + 1).astype(np.int8)
    unit = np.float32(lattice.eighths / 8)
    levels = values / (scales * unit)[..., None]  # whole numbers, exactly
    codes = _CODES[kept.grid][levels.astype(np.int16) + 128]
    return Codes(
        codes=torch.from_numpy(codes.reshape(len(blocks), -1)),
        scales=torch.from_numpy(scales.reshape(len(blocks), -1)),
        factors=torch.from_numpy(d.astype(np.float32)) * float(unit),
    )


def _dequantised(blocks: Bytes, kind: str) -> np.ndarray:
    types = import_module("gguf.constants").GGMLQuantizationType
    values: np.ndarray = import_module("gguf.quants").dequantize(blocks.reshape(len(blocks), -1), types[kind])
    return values


def _without_d(stored: Bytes, lattice: Lattice) -> tuple[Bytes, np.ndarray]:
    at = lattice.d_at
    assert at is not None
    plain = stored.copy()
    plain[..., at : at + 2] = ONE
    return plain, np.ascontiguousarray(stored[..., at : at + 2]).view(np.float16)[..., 0]


def _without_pieces(stored: Bytes, lattice: Lattice) -> tuple[Bytes, np.ndarray]:
    """IQ1_M: the upper four bits of the last four numbers of 16, the lowest piece first."""
    plain = stored.copy()
    high = stored[..., -7::2] >> 4
    pieces = np.stack((high[..., 0] | high[..., 1] << 4, high[..., 2] | high[..., 3] << 4), -1)
    one = np.array([0, 0, ONE[1] & 15, ONE[1] >> 4], np.uint8)
    plain[..., -7::2] = (stored[..., -7::2] & 15) | one << 4
    return plain, np.ascontiguousarray(pieces).view(np.float16)[..., 0]


def _nibbles(stored: Bytes) -> Bytes:
    return np.stack((stored & 15, stored >> 4), -1).reshape(*stored.shape[:-1], -1)


def _threes(stored: Bytes) -> Bytes:
    """Of each number of 16 bits the lowest four threes of bits."""
    words = np.ascontiguousarray(stored).view("<u2")
    return (words[..., None] >> np.arange(0, 12, 3) & 7).astype(np.uint8).reshape(*words.shape[:-1], -1)


LATTICES: dict[str, Lattice] = {
    "IQ2_XXS": Lattice(66, 0, 1, lambda block: block[..., 9::8] >> 4),
    "IQ2_XS": Lattice(74, 0, 1, lambda block: _nibbles(block[..., 66:])),
    "IQ2_S": Lattice(82, 0, 1, lambda block: _nibbles(block[..., 74:])),
    "IQ3_XXS": Lattice(98, 0, 2, lambda block: block[..., 69::4] >> 4),
    "IQ3_S": Lattice(110, 0, 8, lambda block: _nibbles(block[..., 106:])),
    "IQ1_S": Lattice(50, 0, 1, lambda block: block[..., 35::2] >> 4 & 7),
    "IQ1_M": Lattice(56, None, 1, lambda block: _threes(block[..., 48:])),
    "TQ1_0": Lattice(54, 52, 8, None),
    "TQ2_0": Lattice(66, 64, 8, None),
}

LEVELS: dict[str, tuple[int, ...]] = {  # of the kernels' tables, by code; where two codes have one level, either
    "signed": tuple(range(-2, 2)),
    "iq2": (8, 25, 43, 0, -8, -25, -43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15),
    "iq1": (-7, 1, 9, 0, -9, -1, 7),
}


def _codes_by_level(levels: tuple[int, ...]) -> Bytes:
    codes = np.full(256, 255, np.uint8)
    for code, level in enumerate(levels):
        codes[level + 128] = code
    return codes


_CODES = {grid: _codes_by_level(levels) for grid, levels in LEVELS.items()}
