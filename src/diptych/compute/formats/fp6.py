"""MXFP6: floats of 6 bits with a power of two for 32 inputs, as compressed-tensors and Quark pack them, four in three bytes.

E2M3's eighths, up to 7.5, are whole numbers of 7 bits, which the kernels hold as those of 8. E3M2's sixteenths go up to 28:
each is one of fp8 (E4M3), for which no kernel has such groups.

Legend: n outputs, k inputs.
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, Matrix, RawTensors, ScaledMatrix
from diptych.compute.formats.tensors import Made, Overlaid, all_bytes, require, require_groups
from diptych.ground.errors import LoadError

GROUP = 32
# E2M3 in eighths: 0 to 7, then 8 to 15 times 1, 2 and 4, and the same below 0
_EIGHTHS = [*range(8), *((8 + m) << e for e in range(3) for m in range(8))]
E2M3 = torch.tensor([*_EIGHTHS, *(-one for one in _EIGHTHS)], dtype=torch.int16)
# E3M2 in sixteenths: 0 to 3, then 4 to 7 times 1 to 64
_SIXTEENTHS = [*range(4), *((4 + m) << e for e in range(7) for m in range(4))]
E3M2 = torch.tensor([sign * one / 16 for sign in (1, -1) for one in _SIXTEENTHS]).to(torch.float8_e4m3fn)


def open_fp6(raw: RawTensors, prefix: str, shape: tuple[int, int], weight: str, *, is_e3m2: bool = False) -> Matrix:
    """weight, by its whole name, u8 [n, 3 k / 4], four codes in three bytes, and weight_scale u8 [n, k / 32], exponents."""
    n, k = shape
    scale = f"{prefix}.weight_scale"
    require_groups(prefix, k, GROUP)
    require(raw, weight, (n, 3 * k // 4), "U8")
    require(raw, scale, (n, k // GROUP), "U8", "F8_E8M0")

    def unpacked() -> torch.Tensor:
        first, second, third = raw.stored(weight).view(n, k // 4, 3).unbind(-1)
        four = (first & 63, first >> 6 | (second & 15) << 2, second >> 4 | (third & 3) << 4, third >> 2)
        return torch.stack(four, -1).flatten(1).long()

    if is_e3m2:
        as_fp8 = Made((n, k), "F8_E4M3", lambda: E3M2.view(torch.uint8)[unpacked()].view(torch.float8_e4m3fn))
        made = Overlaid(raw, {weight: as_fp8})
        return ScaledMatrix(weight, made, scale, (1, GROUP), "mxfp6-e3m2", all_bytes(raw, prefix))

    def parts() -> CodedParts:
        exponents = raw.stored(scale).view(torch.uint8)
        if bool((exponents == 255).any()):
            raise LoadError(
                f"{scale} has a scale that is no number", hint="the checkpoint is damaged; download it again"
            )
        return CodedParts(scales=torch.exp2(exponents.float() - 130).bfloat16(), zeros=None, group=GROUP)

    def codes() -> torch.Tensor:
        return (E2M3[unpacked()] + 128).to(torch.uint8)

    return CodedMatrix(prefix, shape, 8, "mxfp6", codes, parts, all_bytes(raw, prefix))
