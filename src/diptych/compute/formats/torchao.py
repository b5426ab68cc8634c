"""torchao's whole numbers: codes in bytes, also those of fewer bits, with a scale and a zero point of each group.

`_weight_qdata` int8 [n, k], `_weight_scale` and `_weight_zero_point` [n, G], or [1, 1]. Packed int4 has scales and zero points
[G, n], the latter in units of values, and two codes to a byte, [n, k / 2], or the tiles of a kernel, padded: int32
[n / 8, k / 128, 32, 4] and `_weight_scale_and_zero` [G, n, 2]. Sources: torchao 0.18 (`quantization/quantize_/workflows`;
`prototype/safetensors`), FBGEMM (`experimental/gemm/quantize.py`), PyTorch (`aten/src/ATen/native/cuda/int4mm.cu`:
`matrix_to_m16n8k16_Bint4_layout`).
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, Dequantised, Matrix, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION as HINT
from diptych.compute.formats.tensors import FLOATS, Made, Overlaid, finite
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation

TILE_ROWS, TILE_INPUTS = 8, 128
PADDED_INPUTS = 1024  # to a multiple of which tiles are filled up
BLOCK_ROWS, BLOCK_SCALES = 128, 4  # of scales as a GPU's tensor cores take them


class InputScaled(Dequantised):
    """Another matrix, whose inputs are multiplied by numbers of their own first (AWQ, SmoothQuant): in fp32."""

    why = "no kernel has scales of single inputs"

    def __init__(self, raw: RawTensors, name: str, matrix: Matrix) -> None:
        self._raw, self._name, self._matrix = raw, name, matrix
        self.label, self.stored_bytes = f"{matrix.label}-scaled", matrix.stored_bytes

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite."""
        return self._matrix.values(rows) * finite(self._raw, self._name).float().view(1, -1)


def with_inputs_scaled(raw: RawTensors, prefix: str, shape: tuple[int, int], matrix: Matrix) -> Matrix:
    """The matrix, or where `_weight_act_pre_scale` [k] or [1, k] lies beside it, its values times that."""
    name = f"{prefix}._weight_act_pre_scale"
    if not raw.holds(name):
        return matrix
    _require(raw, name, (1, shape[1]) if len(raw.header(name)[0]) == 2 else shape[1:], *FLOATS)
    return InputScaled(raw, name, matrix)


def open_integers(
    raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation, stored_bytes: int
) -> CodedMatrix:
    """The matrix under `prefix`, checked against the shape that the config gives."""
    (n, k), codes_name = shape, f"{prefix}._weight_qdata"
    found, dtype = raw.header(codes_name)
    if dtype == "I32":
        return _tiles(raw, prefix, shape, stored_bytes)
    if found == (n, k // 2) and k > 1:
        return _pairs(raw, prefix, shape, stored_bytes)
    return _bytes(raw, prefix, shape, how, stored_bytes)


def _bytes(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation, stored_bytes: int) -> CodedMatrix:
    (n, k), bits = shape, how.bits or 8
    codes_name, scale, zero = (f"{prefix}._weight_{one}" for one in ("qdata", "scale", "zero_point"))
    _require(raw, codes_name, shape, "I8")
    groups = raw.header(scale)[0][-1] if raw.holds(scale) and len(raw.header(scale)[0]) == 2 else 1
    if groups < 1 or k % groups:
        raise LoadError(f"tensor {scale} has {groups} scales a row, which {k} inputs are not", hint=HINT)
    rows = 1 if groups == 1 and raw.holds(scale) and raw.header(scale)[0] == (1, 1) else n  # one of all
    _require(raw, scale, (rows, groups), *FLOATS)
    if raw.holds(zero):
        _require(raw, zero, (rows, groups), "I8", "I32")
    middle = 1 << bits - 1

    def codes() -> torch.Tensor:
        stored = raw.stored(codes_name)
        low, high = int(stored.min()), int(stored.max())
        if low < -middle or high >= middle:
            raise LoadError(f"{codes_name} has codes from {low} to {high}; config.json names {bits} bits", hint=HINT)
        return (stored.to(torch.int16) + middle).to(torch.uint8)

    def parts() -> CodedParts:
        zeros = raw.stored(zero).to(torch.int32) + middle if raw.holds(zero) else None
        if zeros is not None and (int(zeros.min()) < 0 or int(zeros.max()) + 1 > 2 * middle):
            raise LoadError(
                f"{zero} has zero points from {int(zeros.min()) - middle} to {int(zeros.max()) - middle}; codes of {bits} bits "
                f"go from {-middle} to {middle - 1}",
                hint=HINT,
            )
        scales = raw.stored(scale).expand(n, groups).contiguous()
        return CodedParts(scales=scales, zeros=None if zeros is None else zeros.expand(n, groups), group=k // groups)

    label = f"torchao-int{bits}"
    return CodedMatrix(prefix, shape, bits, label, codes, parts, stored_bytes, meets_int8_rows=how.meets_int8_rows)


def _pairs(raw: RawTensors, prefix: str, shape: tuple[int, int], stored_bytes: int) -> CodedMatrix:
    """Signed codes, the first in the lower bits: value = scale * code + zero."""
    (n, k), (codes_name, scale, zero) = shape, (f"{prefix}._weight_{one}" for one in ("qdata", "scale", "zero_point"))
    _require(raw, codes_name, (n, k // 2), "I8", "U8")
    groups = raw.header(scale)[0][0] if raw.holds(scale) and len(raw.header(scale)[0]) == 2 else 1
    if groups < 1 or k % groups:
        raise LoadError(f"tensor {scale} has {groups} scales a row, which {k} inputs are not", hint=HINT)
    for name in (scale, zero):
        _require(raw, name, (groups, n), *FLOATS)

    def codes() -> torch.Tensor:
        stored = raw.stored(codes_name).view(torch.uint8)
        return torch.stack((stored & 15, stored >> 4), -1).flatten(1) ^ 8

    def parts() -> CodedParts:
        return _around_8(raw.stored(scale).T, raw.stored(zero).T, k // groups)

    return CodedMatrix(prefix, shape, 4, "torchao-int4", codes, parts, stored_bytes)


def _tiles(raw: RawTensors, prefix: str, shape: tuple[int, int], stored_bytes: int) -> CodedMatrix:
    """A word has eight codes of a row, four even inputs before the odd ones beside them."""
    (n, k), codes_name, scale = shape, f"{prefix}._weight_qdata", f"{prefix}._weight_scale_and_zero"
    rows, inputs = (-(-side // whole) * whole for side, whole in ((n, TILE_ROWS), (k, PADDED_INPUTS)))
    _require(raw, codes_name, (rows // TILE_ROWS, inputs // TILE_INPUTS, 32, 4), "I32")
    groups = raw.header(scale)[0][0] if raw.holds(scale) and len(raw.header(scale)[0]) == 3 else 1
    if groups < 1 or inputs % groups or k % (inputs // groups):
        raise LoadError(f"tensor {scale} has {groups} scales a row, which {k} of {inputs} inputs are not", hint=HINT)
    _require(raw, scale, (groups, rows, 2), *FLOATS)
    group = inputs // groups

    def codes() -> torch.Tensor:
        stored = raw.stored(codes_name).contiguous().view(torch.uint8)
        # [tile of rows, tile of inputs, row, pair of inputs, run of 32 inputs, odd, eight of a run]
        each = torch.stack((stored & 15, stored >> 4), -1).view(rows // 8, inputs // 128, 8, 4, 4, 2, 4)
        return each.permute(0, 2, 1, 4, 6, 3, 5).reshape(rows, inputs)[:n, :k].contiguous()

    def parts() -> CodedParts:
        both = raw.stored(scale)[: k // group, :n]
        return _around_8(both[..., 0].T, both[..., 1].T, group)

    return CodedMatrix(prefix, shape, 4, "torchao-int4-tiles", codes, parts, stored_bytes)


def _around_8(scales: torch.Tensor, zeros: torch.Tensor, group: int) -> CodedParts:
    """value = scale * (code - 8) + zero; what code 0 stands for in fp32, in which it is exact but for far exponents."""
    if not bool(zeros.any()):
        return CodedParts(scales=scales.contiguous(), zeros=None, group=group)
    return CodedParts(
        scales=scales.contiguous(), zeros=None, group=group, minima=(zeros.float() - 8 * scales.float()).contiguous()
    )


def in_rows(raw: RawTensors, scale: str, shape: tuple[int, int]) -> RawTensors:
    """The tensors with scales of floats of 4 and 8 bits by row where they lie in blocks of 128 rows by four scales of each.

    A block has its rows 32 apart beside one another.
    """
    if not raw.holds(scale):
        return raw
    (n, k), (found, dtype) = shape, raw.header(scale)
    groups = k // (16 if dtype == "F8_E4M3" else 32)
    rows, columns = -(-n // BLOCK_ROWS), -(-groups // BLOCK_SCALES)
    if dtype not in ("F8_E4M3", "F8_E8M0") or found != (32 * rows, 16 * columns):
        return raw

    return Overlaid(raw, {scale: Made((n, groups), dtype, lambda: out_of_blocks(raw.stored(scale), (n, groups)))})


def out_of_blocks(stored: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Scales of 8 bits in whole blocks as rows of that shape."""
    rows, columns = -(-shape[0] // BLOCK_ROWS), -(-shape[1] // BLOCK_SCALES)
    blocks = stored.view(torch.uint8).reshape(rows, columns, 32, 4, BLOCK_SCALES).permute(0, 3, 2, 1, 4)
    return blocks.reshape(rows * BLOCK_ROWS, -1)[: shape[0], : shape[1]].contiguous().view(stored.dtype)


def _require(raw: RawTensors, name: str, shape: tuple[int, ...], *dtypes: str) -> None:
    if not raw.holds(name):
        raise LoadError(f"tensor {name} is missing beside torchao's codes", hint="the checkpoint is incomplete")
    found, dtype = raw.header(name)
    if found != shape or dtype not in dtypes:
        raise LoadError(
            f"tensor {name} is {dtype} {list(found)}; {' or '.join(dtypes)} {list(shape)} is expected", hint=HINT
        )
