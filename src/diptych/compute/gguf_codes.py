"""Blocks of GGUF that a kernel holds as they are: their codes, scales and minima, taken apart without arithmetic that rounds.

The layouts are those of ggml (`ggml-common.h`, `gguf/quants.py`): blocks of 32 inputs, or of 256 with eight groups of 32.
Which they are is `GGUF_KEPT` in `ground.formats`.
"""

from __future__ import annotations

import torch

from diptych.compute.ops.contract import Codes


def codes_of(blocks: torch.Tensor, kind: str) -> Codes:
    """Rows of blocks [n, bytes] uint8 as codes of GGUF_KEPT[kind]."""
    if kind in ("Q4_K", "Q5_K"):
        return _super_blocks(blocks.view(len(blocks), -1, 144 if kind == "Q4_K" else 176), kind == "Q5_K")
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18, "MXFP4": 17}
    blocks = blocks.view(len(blocks), -1, sizes[kind])
    n_values = 32 if kind == "Q8_0" else 16
    values = blocks[..., -n_values:]
    codes = values ^ 128 if kind == "Q8_0" else torch.cat((values & 15, values >> 4), -1)
    if kind in ("Q5_0", "Q5_1"):
        high = _bits(blocks[..., -20:-16])
        codes = codes + (high << 4) + (112 if kind == "Q5_0" else 128)  # 128 + (q - 16), 128 + q
    scales = _powers(blocks[..., 0]) if kind == "MXFP4" else _halves(blocks[..., :2])
    minima = _halves(blocks[..., 2:4]).float() if kind in ("Q4_1", "Q5_1") else None
    return Codes(codes=codes.flatten(1), scales=scales, offsets=minima)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.float16).squeeze(-1)


def _bits(stored: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4] -> their 32 bits, the lowest first."""
    return ((stored[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 128), half of what E8M0 says: the levels are twice E2M1's."""
    wide = exponents.to(torch.int32)
    small = torch.tensor(0x20, dtype=torch.int32) << wide.clamp(max=1)
    return torch.where(wide < 2, small, (wide - 1) << 7).to(torch.int16).view(torch.bfloat16)


def _super_blocks(blocks: torch.Tensor, is_fifth: bool) -> Codes:
    """d, dmin (fp16), 12 bytes of eight scales and minima of 6 bits, of Q5_K 32 bytes of fifth bits, 128 bytes of nibbles."""
    d, dmin = (_halves(blocks[..., at : at + 2]).float()[..., None] for at in (0, 2))
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    nibbles = blocks[..., -128:].unflatten(-1, (4, 32))
    codes = torch.stack((nibbles & 15, nibbles >> 4), -2).flatten(-3, -2)  # [n, blocks, 8, 32]
    if is_fifth:
        fifth = blocks[..., 16:48][..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]
        codes = codes + ((fifth & 1) << 4) + 128
    return Codes(
        codes=codes.flatten(1), scales=(d * scales.float()).flatten(1), offsets=-(dmin * minima.float()).flatten(1)
    )
