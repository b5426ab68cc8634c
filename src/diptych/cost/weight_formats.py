"""In what format a weight is read and multiplied, where the device has other ones than its file."""

from __future__ import annotations

from diptych.ground.specs import HardwareSpec, QuantSpec, Stored

FP4 = ("fp4", "mxfp4")  # formats with values that some devices multiply as they are


def weight_class(weight_bytes: float, name: str) -> str:
    """Which achieved bandwidth applies: formats that must be unpacked reach less of it."""
    if name == "fp8" and weight_bytes == 1.0:
        return "fp8"
    if weight_bytes >= 3.0:
        return "fp32"
    if weight_bytes >= 1.5:
        return "bf16"
    if weight_bytes >= 0.9:
        return "int8"
    return "fp4" if name in FP4 else "int4"


def read_as(weights: str, *, is_unpacked: bool, has_fp4: bool) -> str:
    """The format whose achieved bandwidth applies: one the device cannot multiply is unpacked on the way, like int8 or int4."""
    if weights == "fp4":
        return weights if has_fp4 else "int4"
    return "int8" if is_unpacked and weights == "fp8" else weights


def experts_of(quant: QuantSpec, hardware: HardwareSpec) -> tuple[Stored, ...]:
    """How experts are multiplied: those of mxfp4 meet rows of 8 bits where the device multiplies fp4, as vLLM and TensorRT-LLM
    have them there (W4A8); on others they are unpacked to 16 bits (W4A16).
    """
    if quant.name == "mxfp4" and "fp4" in hardware.flops_per_s:
        return (Stored(1.0, quant.expert_bytes, "fp8"),)
    return quant.expert_mix
