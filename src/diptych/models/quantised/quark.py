"""AMD Quark's `quantization_config`: fp8, whole numbers of 4 and 8 bits, MXFP4, NVFP4.

Sources: amd-quark 0.13, with 0.6 to 0.9 beside it (`torch/quantization/config`, `torch/export/nn/modules/realquantizer.py`,
`torch/utils/pack.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from diptych.ground.formats import KEPT_MXFP4, KEPT_NVFP4, KeptFormat
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import Quantisation, block_of, kept_fp8, kept_groups, one_of, refuse

TYPES = ("fp8_e4m3", "fp4", "int4", "uint4", "int8")
ROWS = ("per_tensor", "per_channel")
NVFP4 = "nvfp4"  # which it writes as two types, fp4 and one of its scales
# type, inputs that share a scale, rows and inputs that do
Weight = tuple[str, int | None, tuple[int, int] | None]


def read_quark(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    one_of(section, "quant_method", ("quark",), None)
    export = section.section("export")
    one_of(export, "weight_format", ("real_quantized",), "real_quantized")
    is_ordered = one_of(export, "pack_method", ("reorder", "order"), "reorder") == "order"
    if section.raw.get("softmax_quant_spec") is not None:
        refuse(section, "softmax_quant_spec", "attention is not quantised here")
    _refuse_rotations(section)
    kinds = dict.fromkeys(_weights(section))
    if not kinds:
        refuse(section, "global_quant_config", "it must say how weights are quantised")
    words = [(kind, group) for kind, group, _ in kinds if kind in ("int4", "uint4")]
    if len(words) > 1:
        refuse(section, "layer_quant_config", "one kind of whole numbers of 4 bits can be read")
    kind, group, _ = next(iter(kinds))
    blocks = list(dict.fromkeys(block for _, _, block in kinds if block is not None))
    if len(blocks) > 1:
        refuse(section, "layer_quant_config", "blocks of one size can be read")
    kept: dict[str, KeptFormat | None] = {
        "fp8_e4m3": kept_fp8(blocks[0] if blocks else None),
        "fp4": KEPT_MXFP4,
        NVFP4: KEPT_NVFP4,
        "int8": KeptFormat(kind="int8"),
    }
    return Quantisation(
        method="quark",
        bits=8 if kind in ("fp8_e4m3", "int8") else 4,
        group=words[0][1] if words else group,
        block=blocks[0] if blocks else None,
        is_ordered=is_ordered,
        is_signed=bool(words) and words[0][0] == "int4",
        kept=kept[kind] if kind in kept else kept_groups(4, group, "bf16", is_symmetric=kind == "int4"),
        note="scales of activations and of a cache in the file are not used: activations have "
        f"{16 if kind == 'fp8_e4m3' else 8} bits",
    )


def _weights(section: HfConfig) -> Iterator[Weight]:
    """Of each part of a mixture."""
    schemes = [section.section("global_quant_config")]
    for name in ("layer_quant_config", "layer_type_quant_config"):
        schemes += [section.section(name).section(one) for one in section.section(name).raw]
    for scheme in schemes:
        if scheme.raw.get("bias") is not None:
            refuse(scheme, "bias", "quantised biases are not read")
        spec = scheme.raw.get("weight")
        if spec is None:
            continue  # floats
        if isinstance(spec, list):
            yield _two_types(scheme, spec)
            continue
        if not isinstance(spec, Mapping):
            refuse(scheme, "weight", "it must be an object")
        kind, group, block = _weight(scheme.section("weight"))
        if kind == "int8" and scheme.raw.get("input_tensors") is None:
            refuse(scheme, "input_tensors", "whole numbers of 8 bits can be read beside activations of 8 bits")
        yield kind, group, block


def _two_types(scheme: HfConfig, spec: list[object]) -> Weight:
    """E2M1 in groups of 16 whose scales are E4M3, with one of the matrix: NVFP4."""
    parts = [HfConfig(one, path=f"weight in {scheme.path}") for one in spec if isinstance(one, Mapping)]
    if len(parts) != 2 or len(spec) != 2 or parts[1].raw.get("is_scale_quant") is not True:
        refuse(scheme, "weight", "one type with one scale, or NVFP4 (fp4 and fp8_e4m3 of its scales) can be read")
    values, scales = parts
    one_of(values, "dtype", ("fp4",), None)
    one_of(values, "qscheme", ("per_group",), None)
    one_of(values, "group_size", (16,), None)
    one_of(values, "ch_axis", (-1, 1), -1)
    one_of(scales, "dtype", ("fp8_e4m3",), None)
    one_of(scales, "qscheme", ("per_tensor",), None)
    for part in parts:
        one_of(part, "is_dynamic", (False, None), None)
    return NVFP4, 16, None


def _weight(spec: HfConfig) -> Weight:
    kind = one_of(spec, "dtype", TYPES, None)
    one_of(spec, "is_dynamic", (False, None), None)
    if kind in ("fp4", "int4", "uint4"):
        one_of(spec, "qscheme", ("per_group",), None)
        one_of(spec, "ch_axis", (-1, 1), -1)
        one_of(spec, "zero_point_type", ("int32", None), None)
    elif kind == "fp8_e4m3" and spec.raw.get("qscheme") == "per_block":
        block = block_of(spec, "block_size")
        if block is None:
            refuse(spec, "block_size", "it must be two whole numbers, rows and inputs")
        return kind, None, block
    else:
        one_of(spec, "qscheme", ROWS, None)
        one_of(spec, "ch_axis", (0, None), None)
    if kind == "fp4":
        one_of(spec, "scale_format", ("e8m0",), None)
        one_of(spec, "group_size", (32,), None)
        return kind, 32, None
    return kind, spec.integer("group_size") if kind in ("int4", "uint4") else None, None


def _refuse_rotations(section: HfConfig) -> None:
    """Which may go on while the model runs; what other algorithms do is in the weights."""
    found = section.raw.get("algo_config")
    for one in found if isinstance(found, list) else [found]:
        name = one.get("name") if isinstance(one, Mapping) else None
        if name in ("rotation", "quarot", "spinquant"):
            refuse(section, "algo_config", "rotations of activations are not run")
