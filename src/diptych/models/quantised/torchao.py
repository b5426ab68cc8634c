"""torchao's `quantization_config`, as transformers 5 saves it to safetensors: whole numbers of 1 to 8 bits, fp8, NVFP4, MXFP4
and MXFP8.

Sources: torchao 0.18 (`quantization/quant_api.py`, `prototype/safetensors`), transformers 5.23
(`quantizers/quantizer_torchao.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diptych.ground.formats import KEPT_MXFP4, KEPT_NVFP4, KeptFormat
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import Quantisation, kept_fp8, kept_groups, one_of, refuse

INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
FP8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
INT4 = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")
NVFP4 = ("NVFP4WeightOnlyConfig", "NVFP4DynamicActivationNVFP4WeightConfig")
MX = "MXDynamicActivationMXWeightConfig"
PACKED = ("PLAIN", "TILE_PACKED_TO_4D")  # of int4; others are a kernel's own
SCALED = ("AWQConfig", "SmoothQuantConfig")  # around another: inputs are multiplied by numbers of their own first
MIXTURES = ("FqnToConfig", "ModuleFqnToConfig")
TYPES = {f"int{bits}": bits for bits in range(1, 9)}
HELD_BITS = {1: 2, 7: 8}  # what codes have here, where that is not what they have there
FLOATS = {"float8_e4m3fn": 8, "float4_e2m1fn_x2": 4}
Kind = tuple[str, int]  # type of a config, bits of a code


def read_torchao(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    found = section.section("quant_type").section("default")
    is_scaled = found.raw.get("_type") in SCALED
    if is_scaled:
        found = found.section("_data").section("base_config")
    kinds = list(dict.fromkeys(_kinds(found)))
    if not kinds:
        refuse(section, "quant_type", "its 'default' must say how weights are quantised")
    name, bits = kinds[0]
    is_alone = len({bits for _, bits in kinds}) == 1
    held = HELD_BITS.get(bits, bits) if is_alone else 8  # of a mixture the config does not say which it is
    meets_rows = all(one == INT8[1] for one, _ in kinds)
    return Quantisation(
        method="torchao",
        bits=held,
        meets_int8_rows=meets_rows,
        kept=None if is_scaled else _kept(name, held, found),
        note="activations have 8 bits, or 15 beside codes of more than 4; of fp8 16" if not meets_rows else "",
    )


def _kept(name: str, bits: int, found: HfConfig) -> KeptFormat | None:
    if name in FP8:
        return kept_fp8(None)
    if name in NVFP4:
        return KEPT_NVFP4
    if name == MX:
        return KEPT_MXFP4 if bits == 4 else None
    if name == INT4[1]:
        return kept_groups(4, 128, "bf16", is_symmetric=True)
    if name in INT4:
        kept = kept_groups(4, found.section("_data").integer("group_size", 128), "bf16", is_symmetric=False)
        return kept and replace(kept, grid="minima")
    if name == INT8[1]:  # of a mixture this says what most matrices may be
        return KeptFormat(kind="int8")
    own = found.section("_data")
    granularity = own.section("weight_granularity" if "weight_granularity" in own.raw else "granularity").section(
        "_data"
    )
    mapping = own.section("weight_mapping_type" if "weight_mapping_type" in own.raw else "mapping_type")
    is_symmetric = mapping.raw.get("_data") != "ASYMMETRIC"
    scale = "f32" if name in INT8 else "bf16"
    return kept_groups(bits, granularity.optional_integer("group_size"), scale, is_symmetric=is_symmetric)


def _kinds(found: HfConfig) -> Iterator[Kind]:
    name = found.raw.get("_type")
    own = found.section("_data")
    if name in MIXTURES:
        for part in ("fqn_to_config", "module_fqn_to_config"):
            for module, one in own.section(part).raw.items():
                if isinstance(one, Mapping):
                    yield from _kinds(own.section(part).section(module))
        return
    if name in FP8:
        _data(own, "weight_dtype", ("float8_e4m3fn",))
        yield str(name), 8
        return
    if name in INT8:
        yield str(name), 8
        return
    if name in INTX:
        _data(own, "intx_packing_format", ("UNPACKED_TO_INT8",))
        yield str(name), TYPES[_data(own, "weight_dtype", tuple(TYPES), "int8")]
        return
    if name in INT4:
        _packing(own)
        yield str(name), 4
        return
    if name in NVFP4:
        yield str(name), 4
        return
    if name == MX:
        one_of(own, "block_size", (32,), 32)
        yield MX, FLOATS[_data(own, "weight_dtype", tuple(FLOATS), "float8_e4m3fn")]
        return
    refuse(found, "_type", f"{', '.join((*INT8, *FP8, *INTX, *INT4, *NVFP4, MX))} and mixtures of them can be read")


def _packing(own: HfConfig) -> None:
    """LoadError for int4 in the order of a kernel that is not known."""
    found = own.raw.get("int4_packing_format")
    name = found.get("_data") if isinstance(found, Mapping) else found
    if str(name).upper() not in PACKED:
        refuse(own, "int4_packing_format", f"{' or '.join(PACKED)} can be read")
    one_of(own, "int4_tile_packed_ntile", (8,), 8)


def _data(own: HfConfig, name: str, allowed: tuple[str, ...], default: str | None = None) -> Any:
    """What is named by `_data`, as torchao writes dtypes and choices."""
    value = own.raw.get(name)
    if value is None:
        return default or allowed[0]
    if not isinstance(value, Mapping) or value.get("_data") not in allowed:
        refuse(own, name, f"{' or '.join(allowed)} can be read")
    return value["_data"]
