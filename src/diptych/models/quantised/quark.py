"""AMD Quark's `quantization_config`: fp8, whole numbers of 4 and 8 bits, MXFP4, MXFP6, MXFP8, NVFP4.

Sources: amd-quark 0.13, with 0.6 to 0.9 beside it (`torch/quantization/config`, `torch/export/nn/modules/realquantizer.py`,
`torch/utils/pack.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from diptych.ground.formats import KEPT_MXFP4, KEPT_NVFP4, KeptFormat
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import Quantisation, block_of, kept_fp8, kept_groups, one_of, refuse

SIXES = ("fp6_e2m3", "fp6_e3m2")
TYPES = ("fp8_e4m3", "fp4", "int4", "uint4", "int8", *SIXES)
WORDS = ("int4", "uint4")
ROWS = ("per_tensor", "per_channel")
NVFP4 = "nvfp4"  # which it writes as two types, fp4 and one of its scales
MXFP8 = "mxfp8"  # fp8_e4m3 in groups of 32
ALONE = "int8 alone"  # whole numbers that meet activations of 16 bits
# bits of activations beside them, where not 8
FEW = {"fp8_e4m3": 16, MXFP8: 16, ALONE: 15, "fp6_e2m3": 15, "fp6_e3m2": 16}
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
    words = [(kind, group) for kind, group, _ in kinds if kind in WORDS]
    sixes = [kind for kind, _, _ in kinds if kind in SIXES]
    if len(words) > 1 or len(sixes) > 1:
        what = "whole numbers of 4 bits" if len(words) > 1 else "floats of 6 bits"
        refuse(section, "layer_quant_config", f"one kind of {what} can be read")
    kind, group, _ = next(iter(kinds))
    blocks = list(dict.fromkeys(block for _, _, block in kinds if block is not None))
    if len(blocks) > 1:
        refuse(section, "layer_quant_config", "blocks of one size can be read")
    kept: dict[str, KeptFormat | None] = {
        "fp8_e4m3": kept_fp8(blocks[0] if blocks else None),
        "fp4": KEPT_MXFP4,
        NVFP4: KEPT_NVFP4,
        MXFP8: None,
        "int8": KeptFormat(kind="int8"),
        ALONE: kept_groups(8, None, "bf16", is_symmetric=True),
        "fp6_e2m3": kept_groups(8, 32, "bf16", is_symmetric=True),
        "fp6_e3m2": None,
    }
    bits = {"fp8_e4m3": 8, MXFP8: 8, "int8": 8, ALONE: 8, **dict.fromkeys(SIXES, 6)}.get(kind, 4)
    return Quantisation(
        method="quark",
        bits=bits,
        group=words[0][1] if words else group,
        block=blocks[0] if blocks else None,
        layout=sixes[0] if sixes else "gemm",
        is_ordered=is_ordered,
        meets_int8_rows=not any(one == ALONE for one, _, _ in kinds),
        is_signed=bool(words) and words[0][0] == "int4",
        kept=kept[kind] if kind in kept else kept_groups(4, group, "bf16", is_symmetric=kind == "int4"),
        note=f"scales of activations and of a cache in the file are not used: activations have {FEW.get(kind, 8)} bits",
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
        yield ALONE if kind == "int8" and scheme.raw.get("input_tensors") is None else kind, group, block


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
    is_mx = kind in ("fp4", *SIXES) or (kind == "fp8_e4m3" and spec.raw.get("qscheme") == "per_group")
    if is_mx or (kind in WORDS and spec.raw.get("qscheme") != "per_channel"):
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
        one_of(spec, "zero_point_type", ("int32", None), None)
        return kind, None, None
    if is_mx:
        one_of(spec, "scale_format", ("e8m0",), None)
        one_of(spec, "group_size", (32,), None)
        return MXFP8 if kind == "fp8_e4m3" else kind, 32, None
    return kind, spec.integer("group_size"), None


def _refuse_rotations(section: HfConfig) -> None:
    """Which may go on while the model runs; what other algorithms do is in the weights."""
    found = section.raw.get("algo_config")
    for one in found if isinstance(found, list) else [found]:
        name = one.get("name") if isinstance(one, Mapping) else None
        if name in ("rotation", "quarot", "spinquant"):
            refuse(section, "algo_config", "rotations of activations are not run")
