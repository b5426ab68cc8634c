"""A batch's numbers on a device: what the ops of a step gather and scatter by.

Legend: T packed tokens, S sequences, R logits rows, M block table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """All int64."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    logits_rows_R: torch.Tensor
    table_SM: torch.Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, block_tokens: int, device: torch.device) -> StepNumbers:
        """One copy to the device for all of them."""
        return cls(*on_device(cls.arrays(batch, block_tokens), device))

    @staticmethod
    def arrays(batch: ForwardBatch, block_tokens: int) -> list[np.ndarray]:
        """The same before they are on a device, in the order of the fields."""
        return [
            batch.token_ids_T, batch.positions_T, batch.slots_T(block_tokens), batch.logits_rows_R, batch.block_table_SM,
        ]  # fmt: skip


def on_device(
    arrays: Sequence[np.ndarray], device: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The arrays as int64 tensors, parts of one that is copied at once; `into` has its place for it on the device."""
    flat = torch.from_numpy(np.concatenate([array.reshape(-1).astype(np.int64) for array in arrays]))
    flat = flat.to(device) if into is None else into.copy_(flat)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
