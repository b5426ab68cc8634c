"""HQQ's matrices: codes W_q with a scale and a zero point of each group, and numbers beside them that say how they lie.

A matrix [n, k] is taken as one row of n * k values. With axis 1 each `group` of them in order share a scale, and W_q has a row
of codes for each; with axis 0 it has `group` rows, and a scale for each column. Rows lie in bytes or words by parts: of 4 bits
the first half of them in the upper bits, the second below; `view_as_float`: those bytes or words are seen as floats of another
size. Source: hqq 0.2.8 (`core/quantize.py`, `core/bitpack.py`).
"""

from __future__ import annotations

import math

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, Dequantised, RawTensors
from diptych.compute.formats.tensors import finite
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import HINT
from diptych.models.quantised.hqq import BITS, HELD_BITS

SCALES = {"F16": 2, "BF16": 2, "F32": 4}  # bytes of each
# which hqq writes into no safetensors file, or reads from none: of its own class alone, or of scales quantised themselves
UNREAD = ("zero_scale", "scale_q", "zero_q", "meta_scale", "meta_zero", "meta")
WORDS_OF_3 = 10  # codes of 3 bits in a word of 32
CONTRADICTION = "config.json contradicts the weights; they must come from the same model"


class FlatMatrix(Dequantised):
    """A matrix whose groups do not lie within its rows: value = scale * (code - zero), in fp32."""

    why = "no kernel has groups across rows"

    def __init__(self, hqq: HqqTensors, stored_bytes: int) -> None:
        self._hqq, self.label, self.stored_bytes = hqq, hqq.label, stored_bytes

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        hqq = self._hqq
        values = hqq.scale() * (hqq.unpacked().float() - hqq.zero())
        return values.view(hqq.shape)[rows]


class HqqTensors:
    """The tensors of one matrix, checked against the shape that the config gives."""

    def __init__(self, raw: RawTensors, prefix: str, shape: tuple[int, int]) -> None:
        self.raw, self.prefix, self.shape = raw, prefix, shape
        bits = next((one for one in BITS if abs(one - self._number("nbits", "F32")) < 0.01), None)
        self.group, axis = int(self._number("group_size")), int(self._number("axis"))
        if bits is None or axis not in (0, 1) or self.group < 1:
            raise LoadError(
                f"{prefix} names codes of {self._number('nbits', 'F32'):g} bits in groups of {self.group} on axis {axis}; "
                f"{', '.join(map(str, BITS))} bits on axis 0 or 1 are read"
            )
        for name in ("quant_scale", "quant_zero"):
            if raw.holds(f"{prefix}.{name}") and self._number(name):
                raise LoadError(
                    f"{prefix}.{name} is set, and scales that are quantised themselves are not read", hint=HINT
                )
        for name in UNREAD:
            if raw.holds(f"{prefix}.{name}"):
                raise LoadError(f"{prefix}.{name} is there, and scales in such a form are not read", hint=HINT)
        self.bits, self.axis, n_values = bits, axis, shape[0] * shape[1]
        if n_values % self.group:
            raise LoadError(f"{prefix} has {n_values} values, which groups of {self.group} do not divide")
        n_groups = n_values // self.group
        self.sides = (n_groups, self.group) if axis == 1 else (self.group, n_groups)
        self.per_item = WORDS_OF_3 if bits == 3 else {8: 1, 6: 1, 5: 1, 4: 2, 2: 4, 1.58: 4, 1: 8}[bits]
        rows = math.ceil(self.sides[0] / self.per_item)
        if bits != 3 and self.sides[0] % self.per_item:
            raise LoadError(f"{prefix} has {self.sides[0]} rows of codes, of which bytes hold {self.per_item} each")
        self._require_codes(rows)
        for name in ("scale", "zero"):
            self._require(name, (n_groups, 1) if axis == 1 else (1, n_groups), *SCALES)
        if raw.holds(f"{prefix}.shape"):
            self._require("shape", (2,), "I64", "I32")
            if raw.stored(f"{prefix}.shape").tolist() != list(shape):
                raise LoadError(
                    f"{prefix}.shape is {raw.stored(f'{prefix}.shape').tolist()}; config.json calls for {list(shape)}",
                    hint=CONTRADICTION,
                )

    def _require_codes(self, rows: int) -> None:
        name, item = f"{self.prefix}.W_q", 4 if self.bits == 3 else 1
        is_viewed = self.raw.holds(f"{self.prefix}.view_as_float") and bool(self._number("view_as_float"))
        seen = SCALES.get(self.raw.header(name)[1], item) if is_viewed else item
        if self.sides[1] * item % seen:
            raise LoadError(
                f"{name} has floats of {seen} bytes, which {self.sides[1] * item} bytes of a row are not",
                hint=CONTRADICTION,
            )
        dtypes = tuple(SCALES) if is_viewed else ("I32" if item == 4 else "U8",)
        self._require("W_q", (rows, self.sides[1] * item // seen), *dtypes)

    @property
    def label(self) -> str:
        """Of the layout."""
        return f"hqq-{self.bits:g}"

    def _number(self, name: str, *dtypes: str) -> float:
        """A tensor of one number, whole or of one of `dtypes`."""
        self._require(name, (), "I32", "U8", "I64", *dtypes)
        return float(self.raw.stored(f"{self.prefix}.{name}"))

    def _require(self, name: str, shape: tuple[int, ...], *dtypes: str) -> None:
        name = f"{self.prefix}.{name}"
        if not self.raw.holds(name):
            raise LoadError(f"tensor {name} is missing beside HQQ's codes", hint="the checkpoint is incomplete")
        found, dtype = self.raw.header(name)
        if found != shape or dtype not in dtypes:
            raise LoadError(
                f"tensor {name} is {dtype} {list(found)}; {' or '.join(dtypes)} {list(shape)} is expected",
                hint=CONTRADICTION,
            )

    def unpacked(self) -> torch.Tensor:
        """u8, of axis 1 [groups, group], of axis 0 [group, groups]. LoadError for codes of more bits than there are."""
        stored, bits = self.raw.stored(f"{self.prefix}.W_q"), 2 if self.bits == 1.58 else int(self.bits)
        stored = stored.contiguous().view(torch.int32 if bits == 3 else torch.uint8)
        if self.per_item == 1:
            if int(stored.max()) >> bits:
                raise LoadError(
                    f"{self.prefix}.W_q has a code of {int(stored.max())}; {bits} bits are named",
                    hint="the checkpoint is damaged; download it again",
                )
            return stored
        shifts = [bits * (self.per_item - 1 - part) for part in range(self.per_item)]
        codes = torch.cat([(stored >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])
        return codes[: self.sides[0]]

    def scale(self) -> torch.Tensor:
        """fp32. LoadError for one that is not finite."""
        return finite(self.raw, f"{self.prefix}.scale").float()

    def zero(self) -> torch.Tensor:
        """fp32, in units of codes. LoadError for one that is not finite."""
        return finite(self.raw, f"{self.prefix}.zero").float()

    def parts(self) -> CodedParts:
        """Of groups within rows. Zero points are fractions of codes."""
        n = self.shape[0]
        scales = finite(self.raw, f"{self.prefix}.scale").view(n, -1)
        return CodedParts(scales=scales, zeros=self.zero().view(n, -1), group=self.group)


def open_hqq(
    raw: RawTensors, prefix: str, shape: tuple[int, int], stored_bytes: int
) -> CodedMatrix | FlatMatrix | None:
    """The matrix under `prefix`; None where there is none in codes."""
    if not raw.holds(f"{prefix}.W_q"):
        return None
    hqq = HqqTensors(raw, prefix, shape)
    if hqq.axis == 0 or shape[1] % hqq.group:
        return FlatMatrix(hqq, stored_bytes)
    held = HELD_BITS.get(hqq.bits, int(hqq.bits))
    return CodedMatrix(prefix, shape, held, hqq.label, lambda: hqq.unpacked().view(shape), hqq.parts, stored_bytes)
