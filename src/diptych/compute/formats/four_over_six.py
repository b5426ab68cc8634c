"""Four Over Six's matrices: NVFP4, filled up to 128 rows and 64 inputs, with scales in the blocks of a GPU's tensor cores.

`quantized_weight_values` u8, the lower nibble first, `quantized_weight_scale_factors` E4M3, in a row, `quantized_weight_amax`
the largest of all values, which is worth what the rule for scales says; `quantized_weight_metadata` both shapes, 1, and
whether scales lie in blocks. Source: fouroversix 1.0 (`model/modules/linear.py`, `quantize/backend.py`).
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import Fp4Matrix, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, Made, Overlaid, all_bytes, finite, require, require_groups
from diptych.compute.formats.torchao import out_of_blocks
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation

GROUP = 16
FILLED = (128, 64)  # rows and inputs, to multiples of


def open_four_over_six(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Fp4Matrix | None:
    """The matrix under `prefix`, checked against the shape that the config gives; None where it has no codes."""
    values, scales, largest, sides = (
        f"{prefix}.quantized_weight_{one}" for one in ("values", "scale_factors", "amax", "metadata")
    )
    if not raw.holds(values):
        return None
    (n, k), (rows, inputs) = shape, (-(-side // whole) * whole for side, whole in zip(shape, FILLED, strict=True))
    require_groups(prefix, k, GROUP)
    require(raw, values, (rows, inputs // 2), "U8")
    require(raw, scales, (rows * inputs // GROUP,), "F8_E4M3")
    found = raw.header(largest)[0] if raw.holds(largest) else (1,)
    require(raw, largest, () if found == () else (1,), "F32", "BF16", "F16")
    require(raw, sides, (6,), "I64", "I32")
    if (stored := raw.stored(sides).tolist()) != [n, k, rows, inputs, 1, 1]:
        raise LoadError(
            f"tensor {sides} is {stored}; {[n, k, rows, inputs, 1, 1]} is expected: both shapes, and scales in blocks",
            hint=CONTRADICTION,
        )
    made = {
        values: Made((n, k // 2), "U8", lambda: raw.stored(values)[:n, : k // 2].contiguous()),
        scales: Made((n, k // GROUP), "F8_E4M3", lambda: _rows(raw, scales, (n, k), inputs)),
        largest: Made((), "F32", lambda: finite(raw, largest).float().reshape(()) / how.largest),
    }
    nbytes = all_bytes(raw, prefix)
    return Fp4Matrix(
        prefix, Overlaid(raw, made), values, scales, largest, divides=False, stored_bytes=nbytes, group=GROUP
    )


def _rows(raw: RawTensors, name: str, shape: tuple[int, int], inputs: int) -> torch.Tensor:
    whole = out_of_blocks(raw.stored(name), (shape[0], inputs // GROUP))
    return whole.view(torch.uint8)[:, : shape[1] // GROUP].contiguous().view(torch.float8_e4m3fn)
