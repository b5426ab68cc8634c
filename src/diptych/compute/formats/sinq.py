"""SINQ's matrices: groups of codes with a scale and a zero point each, as HQQ has them, and a scale of each input.

A matrix [n, k] is taken as R rows of one group each. `W_q` has their codes, in bytes or words by parts: of 4 bits the first
half of the rows in the upper bits, the second below. Scales and zero points are `meta.scale` and `meta.zero` [R, 1], or whole
numbers of 8 bits themselves, `.x` [a, b], that stand for x * s + m, with `.s` and `.m` [1, b]. `meta.scale2` [1, k] is of
inputs, and has taken in what A-SINQ scales by (`meta.awq_scale`).
Source: sinq 0.2 (`quantizer.py`, `bitpack.py`, `sinqlinear_hf.py`).
"""

from __future__ import annotations

import math

import torch

from diptych.compute.formats.matrices import Dequantised, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, all_bytes, finite, require
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation

PER_ITEM = {8: 1, 6: 5, 5: 6, 4: 2, 3: 10, 2: 4, 1: 8}  # codes by bits; of 3, 5 and 6 in words of 32


class SinqMatrix(Dequantised):
    """value = scale * (code - zero) * the input's scale, in fp32."""

    why = "no kernel has scales of single inputs"

    def __init__(self, raw: RawTensors, prefix: str, shape: tuple[int, int], bits: int) -> None:
        self._raw, self._prefix, self._shape, self._bits = raw, prefix, shape, bits
        self.label, self.stored_bytes = f"sinq-{bits}", all_bytes(raw, prefix)
        n_values, n_groups = shape[0] * shape[1], self._count("zero")
        if n_groups < 1 or n_values % n_groups or self._count("scale") != n_groups:
            raise LoadError(
                f"{prefix} has {self._count('scale')} scales and {n_groups} zero points for {n_values} values, which must "
                "be in groups of one size",
                hint=CONTRADICTION,
            )
        self._sides = (n_groups, n_values // n_groups)
        rows = math.ceil(n_groups / PER_ITEM[bits])
        require(raw, f"{prefix}.W_q", (rows, self._sides[1]), "U8" if 8 % bits == 0 else "I32")
        if raw.holds(f"{prefix}.meta.scale2"):
            require(raw, f"{prefix}.meta.scale2", (1, shape[1]), *FLOATS)

    def _count(self, part: str) -> int:
        """How many there are of scales or zero points. LoadError where they lie otherwise."""
        raw, name = self._raw, f"{self._prefix}.meta.{part}"
        if raw.holds(f"{name}.x"):
            found = raw.header(f"{name}.x")[0]
            require(raw, f"{name}.x", found if len(found) == 2 else (1, 1), "U8")
            for one in ("s", "m"):
                require(raw, f"{name}.{one}", (1, found[1]), *FLOATS)
            return math.prod(found)
        found = raw.header(name)[0] if raw.holds(name) else (0, 1)
        require(raw, name, (found[0] if found else 0, 1), *FLOATS)
        return found[0]

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite."""
        stored, bits, parts = self._raw.stored(f"{self._prefix}.W_q"), self._bits, PER_ITEM[self._bits]
        each = [stored >> bits * (parts - 1 - part) & (1 << bits) - 1 for part in range(parts)]
        codes = torch.cat(each)[: self._sides[0]].float()
        values = ((codes - self._floats("zero")) * self._floats("scale")).view(self._shape)[rows]
        name = f"{self._prefix}.meta.scale2"
        return values * finite(self._raw, name).float() if self._raw.holds(name) else values

    def _floats(self, part: str) -> torch.Tensor:
        """[R, 1]."""
        name = f"{self._prefix}.meta.{part}"
        if not self._raw.holds(f"{name}.x"):
            return finite(self._raw, name).float()
        whole = self._raw.stored(f"{name}.x").float()
        return (whole * finite(self._raw, f"{name}.s").float() + finite(self._raw, f"{name}.m").float()).view(-1, 1)


def open_sinq(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> SinqMatrix | None:
    """The matrix under `prefix`; None where there is none in codes."""
    return SinqMatrix(raw, prefix, shape, how.bits or 4) if raw.holds(f"{prefix}.W_q") else None
