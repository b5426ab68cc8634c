"""Whether tensors hold numbers alone, by one pass over them."""

from __future__ import annotations

import math

import torch


def are_finite(values: torch.Tensor) -> bool:
    """No infinity, no NaN. The least and the greatest tell: `isfinite` writes a tensor as large four times to say so."""
    return values.numel() == 0 or all(math.isfinite(float(one)) for one in torch.aminmax(values))
