"""compressed-tensors' `quantization_config`: what each of its groups of modules has, and sparsity.

Sources: compressed-tensors 0.20 (`quantization`, `compressors`), and of sparsity, which newer versions do not write, 0.12.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.ground.formats import KEPT_MXFP4, KEPT_NVFP4, KeptFormat
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import (
    OF_CACHE_NOTE,
    Quantisation,
    Scheme,
    block_of,
    kept_fp8,
    kept_groups,
    one_of,
    refuse,
)
from diptych.models.quantised.rotations import NOTE as ROTATED_NOTE
from diptych.models.quantised.rotations import read_transforms

MARLIN = "marlin-24"
FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", MARLIN,
)  # fmt: skip
IN_BYTES = ("int-quantized", "naive-quantized")
SPARSITY = ("dense", "sparse-24-bitmask", "sparse-bitmask")
FP4_KEPT = {16: KEPT_NVFP4, 32: KEPT_MXFP4}  # by the inputs that share a scale
FP6_KEPT = KeptFormat(kind="group8", group=32, scale="bf16", is_wide=True)
SPARSE_NOTE = "zeros of sparse matrices are kept and multiplied as other values"


@dataclass(slots=True)
class _Found:
    """What the groups that were read have said."""

    bits: int | None = None
    schemes: dict[str, Scheme] = field(default_factory=dict)  # of those whose codes lie in words
    kept: KeptFormat | None = None
    block: tuple[int, int] | None = None
    groups: list[int] = field(default_factory=list)
    zeros: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_compressed(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    is_marlin = one_of(section, "format", (*FORMATS, *SPARSITY), "dense") == MARLIN
    sparsity = one_of(section.section("sparsity_config"), "format", (*SPARSITY, MARLIN), "dense")
    rotations = read_transforms(section)
    found = _Found()
    if not all(one.is_idle for one in rotations):
        found.notes.append(ROTATED_NOTE)
    if is_marlin or sparsity != "dense":
        found.notes.append(SPARSE_NOTE)
    if section.raw.get("kv_cache_scheme") is not None:
        found.notes.append(OF_CACHE_NOTE)
    groups = section.section("config_groups")
    for name in groups.raw:
        _read_group(name, groups.section(name), found, "f16" if is_marlin else "bf16")
    return Quantisation(
        method="compressed-tensors",
        bits=found.bits,
        own_schemes=found.schemes,
        groups=tuple(dict.fromkeys(found.groups)),
        block=found.block,
        has_zeros=bool(found.zeros) and all(found.zeros),
        rotations=rotations,
        kept=None if any(one.is_by_class for one in rotations) else found.kept,
        note="; ".join(dict.fromkeys(found.notes)),
    )


def _read_group(name: str, scheme: HfConfig, found: _Found, scale: str) -> None:
    form = one_of(scheme, "format", (None, *FORMATS), None)
    if scheme.raw.get("output_activations") is not None:
        refuse(scheme, "output_activations", "outputs are not quantised here")
    weights, inputs = scheme.section("weights"), scheme.section("input_activations")
    kind = one_of(weights, "type", ("int", "float"), "int")
    width = one_of(weights, "num_bits", (4, 8) if kind == "int" else (4, 6, 8), 8)
    strategy = one_of(weights, "strategy", ("tensor", "channel", "group", "tensor_group", "block", None), None)
    if kind == "float" and width < 8:
        found.kept = _small_floats(weights, width)
        few = inputs.raw.get("num_bits")  # to which its publisher rounds activations, too
        if few in (4, 6):
            has = "8 bits" if found.kept != FP6_KEPT else "15 bits"
            found.notes.append(f"activations have {has}, and scales for them in the file are not used")
        return
    if kind == "int":
        is_symmetric = weights.flag("symmetric", True)
        size = weights.raw.get("group_size")
        has_groups = strategy == "group" or (strategy is None and size not in (None, -1))
        group = weights.optional_integer("group_size") if has_groups else None
        if form not in IN_BYTES:
            found.schemes[name] = Scheme(width, group)
        found.bits = width
        found.groups += [] if group is None else [group]
        found.zeros.append(not is_symmetric)
        found.kept = kept_groups(width, group, scale, is_symmetric=is_symmetric)
        if width == 8 and group is None and inputs.raw and is_symmetric:
            found.kept = KeptFormat(kind="int8")
    if kind == "float":
        block = block_of(weights, "block_structure")
        of_inputs = (1, weights.integer("group_size")) if strategy == "group" else None
        if block is not None and found.block not in (None, block) and found.block[0] > 1:
            refuse(weights, "block_structure", f"blocks of one size can be read, and others are {list(found.block)}")
        # MXFP8 is known by its scales, and may stand beside blocks
        found.block = block or found.block or of_inputs
        found.kept = kept_fp8(block or of_inputs)
    if inputs.raw and not inputs.raw.get("dynamic", False):
        found.notes.append("scales of activations in the file are not used: they are found for each row")


def _small_floats(weights: HfConfig, width: int) -> KeptFormat:
    """Of 4 and 6 bits."""
    one_of(weights, "symmetric", (True,), True)
    if width == 6:
        one_of(weights, "group_size", (32,), None)
        return FP6_KEPT
    return FP4_KEPT[one_of(weights, "group_size", tuple(FP4_KEPT), None)]
