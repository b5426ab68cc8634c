"""ExLlamaV3's matrices (EXL3): walks through a trellis, between Hadamard rotations of both sides.

`trellis` int16 [k / 16, n / 16, 16 b]: tiles of 16 inputs by 16 outputs, whose 256 steps of b bits run in a ring. A value is
what a step makes of the 16 bits that end with it, by one of three rules: that of `mcg` or of `mul1` where a tensor of that name
has its multiplier, else the first. Runs of 128 inputs, and of 128 outputs, are rotated by Hadamard matrices over the root of
128, then multiplied by `suh` [k] and `svh` [n]. Both sides are filled up to 128.
Sources: exllamav3 1.4 (`modules/quant/exl3.py`, `exllamav3_ext/quant/codebook.cuh`, `quant/exl3_dq.cuh`), arXiv:2406.11235.

Legend: n outputs, k inputs, b bits of a step.
"""

from __future__ import annotations

from functools import cache

import scipy.linalg
import torch

from diptych.compute.formats.matrices import Dequantised, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, all_bytes, finite, require
from diptych.ground.errors import LoadError

TILE, RUN, STATES = 16, 128, 1 << 16
TOGETHER = 4 * RUN  # outputs that are made at one time
MOST_BITS = 8
# of the rules: what a state is multiplied by, and what is added
MULTIPLIERS = {"3inst": 89_226_354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
ADDED, MASK, SIGNS = 64_248_484, 0x8FFF8FFF, 0x3B603B60
BYTES_FIRST, BYTES_SCALE, BYTES_MIDDLE = (
    0x6400,
    0x1EEE,
    0xC931,
)  # fp16 of 1024, and what sums of bytes are made values by


class TrellisMatrix(Dequantised):
    """What each step makes of its bits, rotated on both sides, in fp32."""

    why = "no kernel has a trellis"

    def __init__(self, raw: RawTensors, prefix: str, shape: tuple[int, int], rule: str, bits: int) -> None:
        self._raw, self._prefix, self._shape, self._rule = raw, prefix, shape, rule
        self.label, self.stored_bytes = f"exl3-{bits}", all_bytes(raw, prefix)

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite."""
        n, k = self._shape
        own = range(n)[rows]
        found = torch.empty(len(own), k)
        inputs, outputs = (finite(self._raw, f"{self._prefix}.{one}").float() for one in ("suh", "svh"))
        trellis, at = self._raw.stored(f"{self._prefix}.trellis"), torch.tensor(own)
        for begin in range(0, n, TOGETHER):
            mine = (at >= begin) & (at < begin + TOGETHER)
            if bool(mine.any()):
                made = self._made(trellis[:, begin // TILE : (begin + TOGETHER) // TILE]) * inputs
                turned = _turned(made.T).T * outputs[begin : begin + TOGETHER, None]
                found[mine] = turned[at[mine] - begin, :k]
        return found

    def _made(self, tiles: torch.Tensor) -> torch.Tensor:
        """fp32 [outputs, inputs] of some tiles, inputs rotated."""
        values = _book(self._rule).index_select(0, _states(tiles).flatten())
        square = values.view(*tiles.shape[:2], TILE, TILE)  # inputs, outputs, input, output
        return _turned(square.permute(1, 3, 0, 2).reshape(tiles.shape[1] * TILE, tiles.shape[0] * TILE))


def open_exl3(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> TrellisMatrix | None:
    """The matrix under `prefix`, checked against the shape that the config gives; None where it has no codes."""
    trellis = f"{prefix}.trellis"
    if not raw.holds(trellis):
        return None
    found = raw.header(trellis)[0]
    bits = found[-1] // TILE if found else 0
    if not 1 <= bits <= MOST_BITS:
        raise LoadError(
            f"tensor {trellis} has shape {list(found)}; steps of 1 to {MOST_BITS} bits are expected", hint=CONTRADICTION
        )
    n, k = (-(-side // RUN) * RUN for side in shape)
    require(raw, trellis, (k // TILE, n // TILE, TILE * bits), "I16")
    for name, size in (("suh", k), ("svh", n)):
        require(raw, f"{prefix}.{name}", (size,), "F16")
    rule = next((one for one in ("mcg", "mul1") if raw.holds(f"{prefix}.{one}")), "3inst")
    if rule != "3inst":
        require(raw, f"{prefix}.{rule}", raw.header(f"{prefix}.{rule}")[0], "I32")
        multiplier = raw.stored(f"{prefix}.{rule}").flatten().tolist()
        if [one & 0xFFFFFFFF for one in multiplier] != [MULTIPLIERS[rule]]:
            raise LoadError(
                f"{prefix}.{rule} is {multiplier}; {MULTIPLIERS[rule]:#x} can be read",
                hint="the file is damaged, or newer than this version knows",
            )
    return TrellisMatrix(raw, prefix, shape, rule, bits)


def _states(tiles: torch.Tensor) -> torch.Tensor:
    """int32 [.., 256]: of each place in a tile, inputs by outputs, the 16 bits that end with its step.

    Pairs of words lie the higher one behind the other.
    """
    words = (tiles.to(torch.int32) & STATES - 1).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    n_words = words.shape[-1]
    begins = ((_steps() + 1) * (n_words // TILE) - 16) % (16 * n_words)
    at, shift = begins // 16, (begins % 16).to(torch.int32)
    first, second = words.index_select(-1, at), words.index_select(-1, (at + 1) % n_words)
    return (first << shift | second >> 16 - shift) & STATES - 1


@cache
def _book(rule: str) -> torch.Tensor:
    """fp32 [65536]: the value of each state, rounded as fp16."""
    mixed = torch.arange(STATES, dtype=torch.int64) * MULTIPLIERS[rule] + (ADDED if rule == "3inst" else 0)
    if rule == "mul1":
        total = BYTES_FIRST + (mixed & 255) + (mixed >> 8 & 255) + (mixed >> 16 & 255) + (mixed >> 24 & 255)
        scale, middle = _halves(torch.tensor([BYTES_SCALE, BYTES_MIDDLE])).double()
        return (_halves(total).double() * scale + middle).half().float()
    both = mixed & MASK ^ SIGNS
    return (_halves(both & STATES - 1) + _halves(both >> 16 & STATES - 1)).float()


def _halves(bits: torch.Tensor) -> torch.Tensor:
    """fp16 of these bits."""
    signed = torch.where(bits >= STATES // 2, bits - STATES, bits)
    return signed.to(torch.int16).view(torch.float16)


@cache
def _steps() -> torch.Tensor:
    """Which step makes the value of each place in a tile, inputs by outputs: as a GPU's tensor cores take them."""
    thread, step = torch.arange(TILE * TILE).view(32, 8), torch.arange(8)
    lane = thread[:, :1] // 8
    inputs = 2 * (lane % 4) + step % 2 + 8 * (step // 2 % 2)
    return torch.argsort((inputs * TILE + lane // 4 + 8 * (step // 4)).flatten())


@cache
def _rotation() -> torch.Tensor:
    return torch.from_numpy(scipy.linalg.hadamard(RUN)).float() * RUN**-0.5


def _turned(values: torch.Tensor) -> torch.Tensor:
    """Each run of columns rotated."""
    return (values.reshape(-1, RUN) @ _rotation()).view(values.shape)
