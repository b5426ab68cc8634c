"""optimum-quanto's matrices, as `QuantizedModelForCausalLM.save_pretrained` writes them.

Of 8 bits `weight._data` int8 or fp8 [n, k] and `weight._scale` [n, 1]. Of 2 and 4 bits the matrix is taken as rows of
one group each, R of g values: `weight._data._data` u8 [R * bits / 8, g], the first part of the rows in the lowest bits, and
`weight._scale` and `weight._shift` [R, 1], a zero point where that is whole, else what is taken off. Source: optimum-quanto
0.2.7 (`tensor/packed.py`, `tensor/qbits.py`, `tensor/qbytes.py`, `nn/qmodule.py`).

Legend: n outputs, k inputs.
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, Dequantised, Matrix, RawTensors, ScaledMatrix
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, all_bytes, finite, require
from diptych.compute.loading.finite import are_finite
from diptych.ground.errors import LoadError

OTHER_FP8 = ("F8_E5M2", "F8_E4M3FNUZ")


class ScaledRows(Dequantised):
    """fp8 of a type that no kernel has, times a scale of each row, in fp32."""

    why = "the kernels' fp8 is E4M3"
    label = "quanto-fp8"

    def __init__(self, raw: RawTensors, codes: str, scale: str, stored_bytes: int) -> None:
        self._raw, self._codes, self._scale, self.stored_bytes = raw, codes, scale, stored_bytes

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite."""
        stored = self._raw.stored(self._codes)[rows].float()
        if not are_finite(stored):
            raise LoadError(
                f"{self._codes} has a number that is not finite", hint="the checkpoint is damaged; download it again"
            )
        return stored * finite(self._raw, self._scale)[rows].float()


def open_quanto(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> Matrix | None:
    """The matrix under `prefix`, checked against the shape that the config gives; None where it has no codes."""
    codes = f"{prefix}.weight._data"
    if raw.holds(f"{codes}._data"):
        return _bits(raw, prefix, shape)
    if not raw.holds(codes):
        return None
    scale, nbytes = f"{prefix}.weight._scale", all_bytes(raw, prefix)
    require(raw, codes, shape, "I8", "F8_E4M3", *OTHER_FP8)
    require(raw, scale, (shape[0], 1), *FLOATS)
    if raw.header(codes)[1] == "F8_E4M3":
        return ScaledMatrix(codes, raw, scale, None, "quanto-fp8", nbytes)

    if raw.header(codes)[1] in OTHER_FP8:
        return ScaledRows(raw, codes, scale, nbytes)

    def parts() -> CodedParts:
        return CodedParts(scales=raw.stored(scale).contiguous(), zeros=None, group=shape[1])

    return CodedMatrix(prefix, shape, 8, "quanto-8", lambda: raw.stored(codes).view(torch.uint8) ^ 128, parts, nbytes)


def _bits(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> CodedMatrix:
    (n, k), codes_name = shape, f"{prefix}.weight._data._data"
    scale, shift = f"{prefix}.weight._scale", f"{prefix}.weight._shift"
    n_groups = raw.header(scale)[0][0] if raw.holds(scale) and raw.header(scale)[0] else n
    if n_groups < n or n_groups % n or k % (n_groups // n):
        raise LoadError(
            f"tensor {scale} has {n_groups} scales; as many for each of {n} rows of {k} inputs are expected",
            hint=CONTRADICTION,
        )
    group, found = k * n // n_groups, raw.header(codes_name)[0]
    bits = 2 if found == (-(-n_groups // 4), group) else 4
    per_byte = 8 // bits
    require(raw, codes_name, (-(-n_groups // per_byte), group), "U8")
    require(raw, scale, (n_groups, 1), *FLOATS)
    require(raw, shift, (n_groups, 1), *FLOATS, "I8", "U8")

    def codes() -> torch.Tensor:
        stored = raw.stored(codes_name)
        parts = [stored >> bits * part & (1 << bits) - 1 for part in range(per_byte)]
        return torch.cat(parts)[:n_groups].reshape(n, k)

    def parts() -> CodedParts:
        scales, offsets = (raw.stored(name).view(n, -1) for name in (scale, shift))
        if offsets.is_floating_point():
            return CodedParts(scales=scales, zeros=None, group=group, minima=-offsets)
        return CodedParts(scales=scales, zeros=offsets.to(torch.int32), group=group)

    return CodedMatrix(prefix, shape, bits, f"quanto-{bits}", codes, parts, all_bytes(raw, prefix))
