"""Weights made of a checkpoint's values when it is loaded, in blocks with scales of their own, as a GGUF file has them.

Rows of activations have a scale for each 32 inputs beside them, so that channels that are always large (as trained models have
them) take the levels of their own group alone; `int8` and `int4` have one for the whole row, and are faster.

    parts, weights_format = made_parts(parts, "q8_0")
"""

from __future__ import annotations

from dataclasses import replace

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from diptych.compute.formats.gguf_codes import codes_of
from diptych.compute.loading.finite import are_finite
from diptych.compute.ops.contract_parts import Codes, LinearParts, WeightTensor
from diptych.ground.errors import LoadError
from diptych.ground.formats import MADE_WEIGHTS

PIECE_VALUES = 2**20  # quantised at one time, as fp32 in a core's cache
# read at one time: codes of another program are taken out of their words whole, however few rows are asked for
READ_PIECES = 16


class MadeTensor(WeightTensor):
    """A matrix in blocks of that format (`MADE_WEIGHTS`), quantised by the `gguf` package when its codes are read."""

    def __init__(self, plain: WeightTensor, weights_format: str) -> None:
        self.plain = plain
        self.name = plain.name
        self.shape = plain.shape
        self.dtype = plain.dtype
        self.random_seed = plain.random_seed
        self.row_order = plain.row_order
        self.kept = MADE_WEIGHTS[weights_format]
        self._kind = weights_format.upper()

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What the checkpoint holds."""
        return self.plain.stored

    def read(self) -> torch.Tensor:
        """The checkpoint's values, before they are rounded."""
        return self.plain.read()

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """Of those."""
        return self.plain.part(rows, n_columns)

    def codes(self) -> Codes:
        """LoadError for a value that is not finite: its block would hide it."""
        n, k = self.shape
        step = max(1, PIECE_VALUES // k)
        pieces: list[Codes] = []
        for begin in range(0, n, READ_PIECES * step):
            values = self.plain.part(slice(begin, begin + READ_PIECES * step), k).detach()
            pieces += map(self._codes_of, values.split(step))
        offsets = [one.offsets for one in pieces if one.offsets is not None]
        return Codes(
            codes=torch.cat([one.codes for one in pieces]),
            scales=torch.cat([one.scales for one in pieces]),
            offsets=torch.cat(offsets) if offsets else None,
        )

    def _codes_of(self, rows: torch.Tensor) -> Codes:
        values = rows.to(torch.float32)
        if not are_finite(values):
            raise LoadError(
                f"tensor {self.name} has a weight that is not finite; {self._kind.lower()} cannot hold it",
                hint="the checkpoint is damaged; download it again",
            )
        return codes_of(
            torch.from_numpy(quantize(values.contiguous().numpy(), GGMLQuantizationType[self._kind])), self._kind
        )


def made_parts(parts: LinearParts, weights_format: str) -> tuple[LinearParts, str]:
    """The projection in such blocks, where that is asked for; in bf16 where its inputs are no whole blocks."""
    if weights_format not in MADE_WEIGHTS:
        return parts, weights_format
    if parts.n_inputs % MADE_WEIGHTS[weights_format].group != 0:
        return parts, "bf16"
    return replace(parts, weights=tuple(MadeTensor(one, weights_format) for one in parts.weights)), weights_format
