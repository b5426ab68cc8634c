"""Blocks of GGUF taken apart stand for the very values of the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from diptych.compute.formats.gguf import dequantised
from diptych.compute.formats.gguf_codes import FEW_BITS, codes_of
from diptych.compute.formats.gguf_lattices import LEVELS as LATTICE_LEVELS
from diptych.compute.ops.torch.device_codes import halved_powers
from diptych.ground.formats import GGUF_KEPT as KEPT
from diptych.models.gguf.file import BLOCK_TYPES

TABLES = {
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]),
    "e2m1": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]),
    **{grid: np.array(levels) for grid, levels in LATTICE_LEVELS.items() if grid != "signed"},
}
# where a block's fp16 numbers lie
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": (), "NVFP4": (), "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,),
          "Q2_K": (80, 82)}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KEPT if kind not in FEW_BITS])
def test_codes_are_the_values_of_the_gguf_package(kind: str) -> None:
    """Random blocks: every bit of a block decides some value. A half of a block in the other's place looks like noise."""
    number = GGMLQuantizationType[kind]
    elements, nbytes = GGML_QUANT_SIZES[number]
    random = np.random.default_rng(len(kind))
    blocks = random.integers(0, 256, (6, 4, nbytes), dtype=np.uint8)
    for half in HALVES.get(kind, (0,)):
        scales = random.uniform(-2, 2, (6, 4)).astype(np.float16)
        blocks[..., half : half + 2] = scales[..., None].view(np.uint8)
    if kind == "IQ1_M":  # d in the upper bits of the last four numbers of 16
        words = np.ascontiguousarray(blocks[..., -8:]).view("<u2")
        pieces = random.uniform(-2, 2, (6, 4)).astype(np.float16).view(np.uint16)[..., None] >> np.arange(0, 16, 4) & 15
        blocks[..., -8:] = (words & 0x0FFF | (pieces << 12).astype(np.uint16)).view(np.uint8)
    if kind == "NVFP4":
        blocks[..., :4] &= 127  # no signs
        blocks[0, 0, :4] = (0, 1, 126, 127)  # the least, the largest, and what is none
    if kind == "MXFP4":
        blocks[0, :, 0] = (0, 1, 2, 250)  # the smallest have no exponent left in bf16
    raw = blocks.reshape(6, -1)
    expected = dequantize(raw, number)
    kept, codes = KEPT[kind], codes_of(torch.from_numpy(raw), kind)
    assert codes.codes.shape == (6, 4 * elements)
    dtypes = {"f16": torch.float16, "e8m0": torch.uint8, "s8": torch.int8, "e4m3": torch.uint8}
    assert codes.scales.dtype == dtypes[kept.scale]
    stored = codes.codes.numpy()
    bits = int(kept.kind.removeprefix("group"))
    assert stored.max() < 2**bits
    middle = 2 ** (bits - 1) if kept.grid == "signed" else 0
    levels = TABLES[kept.grid][stored] if kept.grid in TABLES else stored.astype(np.int64) - middle
    stored_scales = codes.scales.view(torch.float8_e4m3fn) if kept.scale == "e4m3" else codes.scales
    stored_scales = halved_powers(codes.scales) if kept.scale == "e8m0" else stored_scales
    scales, minima = stored_scales.float(), None if codes.offsets is None else codes.offsets.float()
    assert (codes.factors is not None) == (kept.scale in ("s8", "e4m3"))
    if codes.factors is not None:
        by_block = codes.factors.float().view(6, codes.codes.shape[1] // 256, -1)
        by_group = by_block.repeat_interleave(256 // kept.group, 1)
        scales, minima = scales * by_group[..., 0], None if minima is None else minima * by_group[..., 1]
    values = scales.numpy().repeat(kept.group, 1) * levels.astype(np.float32)
    assert (minima is not None) == (kept.grid in ("minima", "minima16"))
    assert codes.offsets is None or codes.offsets.dtype == dtypes[kept.scale]
    if minima is not None:
        values = values + minima.numpy().repeat(kept.group, 1)
    assert np.array_equal(values, expected)


FROM_LLAMA_CPP = Path(__file__).parent.parent / "data" / "gguf_blocks.json"


@pytest.mark.parametrize("kind", FEW_BITS)
def test_blocks_of_one_and_two_bits_are_what_llama_cpp_makes_of_them(kind: str) -> None:
    """Blocks and values are of its own C code (`quantize_row_q1_0_ref`, `dequantize_row_q1_0` and those of Q2_0 in
    `ggml-quants.c`, as llama-cpp-python 0.3.36 ships it), four in a row, a scale below 0 among them.
    """
    found = json.loads(FROM_LLAMA_CPP.read_text())[kind]
    raw = torch.tensor(list(bytes.fromhex(found["blocks"])), dtype=torch.uint8).view(2, -1)
    expected = torch.tensor(found["values"]).view(2, -1)
    number, block = next((number, one) for number, one in BLOCK_TYPES.items() if one.name == kind)
    assert (number, block.elements, block.nbytes) == (
        41 if kind == "Q1_0" else 42,
        expected.numel() // 4,
        raw.numel() // 4,
    )
    assert torch.equal(dequantised(raw, block, torch.float32), expected)
    kept, codes = KEPT[kind], codes_of(raw, kind)
    assert (kept.group, codes.scales.dtype) == (block.elements, torch.float16)
    assert int(codes.codes.max()) <= 3
    levels = (codes.codes.float() - 2).view(2, -1, kept.group)
    assert torch.equal((levels * codes.scales.float()[..., None]).flatten(1), expected)
