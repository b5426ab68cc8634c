"""AutoRound's `quantization_config`: whole numbers, which lie as AutoGPTQ's or AutoAWQ's do, or floats of 4 and 8 bits, which
lie as those of compressed-tensors.

Sources: auto-round 0.16 (`export/export_to_autoround`, `inference/backend.py` and `convert_model.py`), and of older files 0.2
to 0.4, which name a kernel (`backend`) where newer ones name the layout (`packing_format`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.ground.errors import LoadError
from diptych.ground.formats import KEPT_MXFP4, KEPT_NVFP4
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import (
    HINT,
    Quantisation,
    Scheme,
    group_size,
    kept_fp8,
    kept_groups,
    one_of,
    refuse,
)
from diptych.models.quantised.rotations import NOTE as ROTATED_NOTE
from diptych.models.quantised.rotations import read_rotation

BITS = (2, 3, 4, 5, 6, 7, 8)
LEFT_ALONE = 16  # bits of matrices that stay floats
# what changes the mathematics in a way that is not run
UNREAD = ("spinquant_config", "super_bits", "super_group_size", "transform_config")
KERNELS = ("", "exllamav2", "exllama", "triton", "tritonv2", "marlin", "cuda", "torch")  # which change no layout


def read_auto_round(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    for name in UNREAD:
        if section.raw.get(name):
            refuse(section, name, "it is not read")
    kind = section.raw.get("data_type", "int")
    if isinstance(kind, str) and kind.startswith(("mx_fp", "nv_fp")):
        return _read_fp4(section, kind)
    if section.raw.get("rotation_config"):
        refuse(section, "rotation_config", "rotations of mx_fp and nv_fp can be read")
    if kind in ("fp", "fp8", "fp8_e4m3"):
        return _read_fp8(section)
    layout = _layout(section)
    if not _is_integer(section):
        refuse(section, "data_type", "whole numbers ('int'), 'mx_fp', 'nv_fp' and 'fp' can be read")
    if section.raw.get("act_bits") is not None and section.integer("act_bits") < LEFT_ALONE:
        refuse(section, "act_bits", "activations of 16 bits beside codes of whole numbers can be read")
    bits = one_of(section, "bits", BITS if layout != "awq" else (4,), None)
    group, is_symmetric = group_size(section, "group_size"), section.flag("sym", True)
    return Quantisation(
        method="awq" if layout == "awq" else "gptq",
        bits=bits,
        group=group,
        own_schemes=_own_schemes(section, Scheme(bits, group), layout),
        has_zeros=True,
        zero_added=1 if layout == "gptq" else 0,
        kept=kept_groups(8 if bits == 7 else bits, group, "f16", is_symmetric=is_symmetric),
    )


def _read_fp4(section: HfConfig, kind: str) -> Quantisation:
    """MXFP4, MXFP8 and NVFP4; which of them a matrix of a mixture is, its tensors show."""
    rotations, few = read_rotation(section), "activations have 8 bits, and scales for them in the file are not used"
    one_of(section, "packing_format", ("auto_round:llm_compressor",), None)
    is_mx = kind.startswith("mx_fp")
    bits = one_of(section, "bits", (4, 8) if is_mx else (4,), None)
    one_of(section, "group_size", (32,) if is_mx else (16,), None)
    return Quantisation(
        method="compressed-tensors",
        bits=bits,
        rotations=rotations,
        kept=None if bits == 8 or rotations else KEPT_MXFP4 if is_mx else KEPT_NVFP4,
        note=ROTATED_NOTE if rotations else few if bits == 4 else "",
    )


def _read_fp8(section: HfConfig) -> Quantisation:
    """E4M3 with a scale of a matrix, of rows or of blocks."""
    one_of(section, "packing_format", ("auto_round:fp8_static", "auto_round:fp8", None), None)
    one_of(section, "bits", (8,), None)
    found = section.raw.get("group_size")
    block = section.integers("group_size") if isinstance(found, list) else None
    if (block is None and found not in (-1, 0, None)) or (block is not None and (len(block) != 2 or min(block) < 1)):
        refuse(section, "group_size", "-1 (rows), 0 (a matrix) or two whole numbers (a block) can be read")
    of_blocks = None if block is None else (block[0], block[1])
    note = "scales of activations in the file are not used: they are found for each row"
    return Quantisation(method="fp8", block=of_blocks, kept=kept_fp8(of_blocks), note=note)


def _layout(section: HfConfig) -> str:
    """'gptq', whose zero points are stored less one, 'gptq_v2' or 'awq'."""
    name = "packing_format" if "packing_format" in section.raw or "backend" not in section.raw else "backend"
    value = section.raw.get(name, "auto")
    if value in ("auto", None):
        return "gptq"
    if not isinstance(value, str):
        refuse(section, name, "it must name a layout")
    head, *rest = value.split(":")
    parts = [part for part in rest if part not in KERNELS]
    if head in ("auto_round", "gptq", "auto_gptq") and parts in ([], ["auto_gptq"], ["gptq"], ["gptqmodel"]):
        if head != "auto_round" or parts in (["auto_gptq"], ["gptq"]):
            return "gptq"
        return "gptq_v2"
    if head == "autoround" and not parts:  # of 0.2, which packed by AutoGPTQ's own modules
        return "gptq"
    if value in ("auto_round:auto_awq", "auto_round:awq", "auto_awq"):
        return "awq"
    refuse(section, name, "the layouts of AutoGPTQ, GPTQModel and AutoAWQ, and AutoRound's own, can be read")


def _is_integer(section: HfConfig) -> bool:
    kind = section.raw.get("data_type", "int")
    return isinstance(kind, str) and kind in ("int", "int_sym", "int_asym")


def _own_schemes(section: HfConfig, usual: Scheme, layout: str) -> dict[str, Scheme]:
    """By the names, or patterns, of `extra_config`; those of 16 bits are floats, which the files show."""
    schemes = {}
    for name, own in section.section("extra_config").raw.items():
        if not isinstance(own, Mapping):
            raise LoadError(
                f"extra_config of {section.path} has a {type(own).__name__} for {name}; it must be an object"
            )
        scheme = _scheme(HfConfig({**_usual(section, usual), **own}, path=f"{name} in extra_config of {section.path}"))
        if scheme is not None and layout == "awq" and scheme != usual:
            raise LoadError(
                f"{name} in extra_config of {section.path} has {scheme.bits} bits in groups of {scheme.group or 'a row'}; in "
                "AutoAWQ's layout all are alike",
                hint=HINT,
            )
        if scheme is not None and scheme != usual:
            schemes[name] = scheme
    return schemes


def _usual(section: HfConfig, usual: Scheme) -> dict[str, Any]:
    return {"bits": usual.bits, "group_size": -1 if usual.group is None else usual.group}


def _scheme(own: HfConfig) -> Scheme | None:
    """None: floats."""
    if own.raw.get("bits") is not None and own.integer("bits") >= LEFT_ALONE:
        return None
    if not _is_integer(own):
        refuse(own, "data_type", "whole numbers ('int') can be read")
    return Scheme(one_of(own, "bits", BITS, None), group_size(own, "group_size"))
