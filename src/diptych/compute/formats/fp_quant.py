"""FP-Quant's matrices: MXFP4 or NVFP4 of W H, which x H meets, H a small rotation along the inputs; or W H in floats.

`qweight` u8 [n, k / 2], the lower nibble first, and `scales` u8 [n, k / 32], exponents, or [n, k / 16], E4M3, both maybe filled
up to 128 rows and four columns, over `weight_global_scale` [1], which divides. `dqweight` [n, k] in their place has the values
(pseudoquantization). `forward_hadamard_matrix` [h, h] is H.
Sources: fp-quant 0.3 (`module/linear.py`, `module/pseudoquant_linear_fns.py`), QuTLASS (`tests/mxfp4_test.py`).
"""

from __future__ import annotations

from functools import partial

import torch

from diptych.compute.formats.matrices import Dequantised, Fp4Matrix, Matrix, RawTensors
from diptych.compute.formats.rotations import PlainFloats, Rotated, Turn
from diptych.compute.formats.tensors import (
    CONTRADICTION,
    FLOATS,
    Made,
    Overlaid,
    all_bytes,
    finite,
    require,
    require_groups,
)
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation

SIDES = (16, 32, 64, 128)  # of H
PADDED = (128, 4)  # scales are filled up to multiples of


class Divided(Dequantised):
    """Another matrix over one number, in fp32."""

    why = "no kernel has MXFP4 with a scale of the matrix"

    def __init__(self, raw: RawTensors, name: str, matrix: Matrix) -> None:
        self._raw, self._name, self._matrix = raw, name, matrix
        self.label, self.stored_bytes = matrix.label, matrix.stored_bytes

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a scale that is none."""
        scale = float(finite(self._raw, self._name))
        if not scale > 0:
            raise LoadError(f"{self._name} is {scale}; a number greater than 0 is expected", hint=CONTRADICTION)
        return self._matrix.values(rows) / scale


def open_fp_quant(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Matrix | None:
    """The matrix under `prefix`, checked against the shape that the config gives; None where it has no codes."""
    codes, values, whole = (f"{prefix}.{one}" for one in ("qweight", "dqweight", "weight_global_scale"))
    has_codes = raw.holds(codes) and raw.header(codes)[0] != (0,)  # transformers leaves an empty one beside the other
    if not has_codes and not (raw.holds(values) and raw.header(values)[0] != (0,)):
        return None
    if not has_codes:
        return _turned(raw, prefix, shape, PlainFloats(raw, values, shape), how)
    (n, k), group, nbytes = shape, how.group or 32, all_bytes(raw, prefix)
    require_groups(prefix, k, group)
    require(raw, codes, (n, k // 2), "U8")
    require(raw, whole, (1,), *FLOATS)
    rows = _without_padding(raw, f"{prefix}.scales", (n, k // group), group)
    is_nvfp4 = group == 16  # whose scale of the matrix a kernel has
    matrix: Matrix = Fp4Matrix(
        prefix,
        rows,
        codes,
        f"{prefix}.scales",
        whole if is_nvfp4 else None,
        divides=True,
        stored_bytes=nbytes,
        group=group,
    )
    if not is_nvfp4 and float(raw.stored(whole)) != 1:
        matrix = Divided(raw, whole, matrix)
    return _turned(raw, prefix, shape, matrix, how)


def _without_padding(raw: RawTensors, name: str, shape: tuple[int, int], group: int) -> RawTensors:
    """The tensors with scales of the matrix alone. LoadError where they are of another."""
    n, groups = shape
    padded = -(-n // PADDED[0]) * PADDED[0], -(-groups // PADDED[1]) * PADDED[1]
    dtypes = ("U8", "F8_E8M0" if group == 32 else "F8_E4M3")
    if not raw.holds(name) or raw.header(name)[0] != padded:
        require(raw, name, shape, *dtypes)
        return raw
    require(raw, name, padded, *dtypes)
    return Overlaid(
        raw, {name: Made(shape, "U8", lambda: raw.stored(name).view(torch.uint8)[:n, :groups].contiguous())}
    )


def _turned(raw: RawTensors, prefix: str, shape: tuple[int, int], matrix: Matrix, how: Quantisation) -> Matrix:
    """With H multiplied in, unless that is 1."""
    name = f"{prefix}.forward_hadamard_matrix"
    found = raw.header(name)[0] if raw.holds(name) else ()
    sides = next((one for one in SIDES if found == (one, one)), SIDES[1])
    require(raw, name, (sides, sides), *FLOATS)
    if shape[1] % sides:
        raise LoadError(f"{prefix} has {shape[1]} inputs, which rotations of {sides} do not divide", hint=CONTRADICTION)
    if torch.equal(finite(raw, name).float(), torch.eye(sides)):
        return matrix
    return Rotated(matrix, Turn(sides, partial(_read, raw, name)), None)


def _read(raw: RawTensors, name: str) -> torch.Tensor:
    return finite(raw, name).double()
