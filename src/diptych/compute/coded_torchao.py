"""torchao's whole numbers: codes in bytes, also those of fewer bits, with a scale and a zero point of each group.

`_weight_qdata` int8 [n, k], `_weight_scale` and `_weight_zero_point` [n, G]. Source: torchao 0.18
(`quantization/quantize_/workflows`: Int8Tensor, IntxUnpackedToInt8Tensor; `prototype/safetensors`).
"""

from __future__ import annotations

import torch

from diptych.compute.coded_matrices import CodedMatrix, CodedParts, RawTensors
from diptych.ground.errors import LoadError
from diptych.models.quantisation import Quantisation

HINT = "config.json contradicts the weights; they must come from the same model"
SCALES = ("F16", "BF16", "F32")


def open_integers(
    raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation, stored_bytes: int
) -> CodedMatrix:
    """The matrix under `prefix`, checked against the shape that the config gives."""
    (n, k), bits = shape, how.bits or 8
    codes_name, scale, zero = (f"{prefix}._weight_{one}" for one in ("qdata", "scale", "zero_point"))
    _require(raw, codes_name, shape, "I8")
    groups = raw.header(scale)[0][-1] if raw.holds(scale) and len(raw.header(scale)[0]) == 2 else 1
    if groups < 1 or k % groups:
        raise LoadError(f"tensor {scale} has {groups} scales a row, which {k} inputs are not", hint=HINT)
    _require(raw, scale, (n, groups), *SCALES)
    if raw.holds(zero):
        _require(raw, zero, (n, groups), "I8", "I32")
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
        return CodedParts(scales=raw.stored(scale).contiguous(), zeros=zeros, group=k // groups)

    label = f"torchao-int{bits}"
    return CodedMatrix(prefix, shape, bits, label, codes, parts, stored_bytes, meets_int8_rows=how.meets_int8_rows)


def _require(raw: RawTensors, name: str, shape: tuple[int, ...], *dtypes: str) -> None:
    if not raw.holds(name):
        raise LoadError(f"tensor {name} is missing beside torchao's codes", hint="the checkpoint is incomplete")
    found, dtype = raw.header(name)
    if found != shape or dtype not in dtypes:
        raise LoadError(
            f"tensor {name} is {dtype} {list(found)}; {' or '.join(dtypes)} {list(shape)} is expected", hint=HINT
        )
