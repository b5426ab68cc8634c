"""Ternary matrices of BitNet: values -1, 0 and 1 times one scale of the whole matrix, packed, beside a scale, or made at load.

transformers has them in `integrations/bitnet.py`: `BitLinear` divides its sums by the scale, `AutoBitLinear` multiplies them by
it, or rounds floats whenever it runs. Held as codes of 2 bits, which lose nothing.

Legend: n outputs, k inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from diptych.compute.formats.matrices import SCALE_TYPES, RawTensors
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.errors import LoadError
from diptych.ground.formats import KeptFormat, group_held

PER_BYTE = 4  # rows of a packed matrix: row r of byte row i lies in its bits 2 j and 2 j + 1, j = r // (n / 4)
LEAST_MEAN = 1e-5  # of the sizes that a scale is made of
GROUP = group_held(128) or 0  # inputs of the kernels' groups, which all have the one scale

Read = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class TernaryMatrix:
    """value = scale * t. read: t [n, k] of any type, and the scale, one number."""

    order: torch.Tensor | None = None
    why = ""

    def __init__(self, label: str, stored_bytes: int, scale: torch.dtype, read: Read) -> None:
        self.label, self.stored_bytes, self._read = label, stored_bytes, read
        self.kept: KeptFormat | None = KeptFormat(kind="group2", group=GROUP, scale=SCALE_TYPES[scale])

    def codes(self) -> Codes:
        """Of which 2 stands for 0."""
        found, scale = self._read()
        n, k = found.shape
        return Codes(codes=(found + 2).to(torch.uint8), scales=scale.expand(n, -(-k // GROUP)).contiguous())

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        found, scale = self._read()
        return found[rows].float() * scale.float()


def packed(raw: RawTensors, name: str, scale: str, *, divides: bool) -> Read:
    """Four rows to a byte, t + 1 of each. LoadError for a byte that holds a 3."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        stored = raw.stored(name)
        found = torch.cat([stored >> shift & 3 for shift in range(0, 2 * PER_BYTE, 2)])
        if bool((found == 3).any()):
            raise LoadError(
                f"{name} has codes of 3; 0, 1 and 2 stand for -1, 0 and 1",
                hint="the checkpoint is damaged; download it again",
            )
        return found.to(torch.int8) - 1, _scale(raw, scale, divides=divides)

    return read


def unpacked(raw: RawTensors, name: str, scale: str, *, divides: bool) -> Read:
    """Floats, as transformers saves what it has unpacked. LoadError for one that is none of the three."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        stored = raw.stored(name)
        found = stored.to(torch.int8)
        if not bool(((found == stored) & (found.abs() <= 1)).all()):
            raise LoadError(f"{name} has values other than -1, 0 and 1 beside a scale of the whole matrix")
        return found, _scale(raw, scale, divides=divides)

    return read


def rounded(raw: RawTensors, name: str) -> Read:
    """Floats that the model rounds whenever it runs, by the mean of their sizes. LoadError for one that is not finite."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        stored = raw.stored(name)
        wide = stored.float()
        per_mean = 1.0 / wide.abs().mean().clamp(min=LEAST_MEAN)
        if not bool(torch.isfinite(per_mean)) or float(per_mean) == 0.0:
            raise LoadError(
                f"{name} has a number that is not finite", hint="the checkpoint is damaged; download it again"
            )
        return (wide * per_mean).round().clamp(-1, 1).to(torch.int8), (1.0 / per_mean).to(stored.dtype)

    return read


def _scale(raw: RawTensors, name: str, *, divides: bool) -> torch.Tensor:
    """By which values are multiplied. LoadError for one that is not finite, or divides by 0."""
    stored = raw.stored(name).reshape(())
    found = 1.0 / stored.float() if divides else stored
    if not bool(torch.isfinite(found)):
        what = "divides" if divides else "multiplies"
        raise LoadError(
            f"{name} is {float(stored)}, which {what} a whole matrix",
            hint="the checkpoint is damaged; download it again",
        )
    return found
