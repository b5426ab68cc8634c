"""HQQ's `quantization_config`: whole numbers of 1 to 8 bits with a scale and a zero point of each group.

Sources: hqq 0.2.8 (`core/quantize.py`, `core/bitpack.py`), transformers 5.23 (`integrations/hqq.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from diptych.ground.errors import LoadError
from diptych.ground.formats import WIDE_BITS, KeptFormat, group_held
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import Quantisation, one_of, refuse

BITS = (8, 6, 5, 4, 3, 2, 1.58, 1)
HELD_BITS = {1.58: 2, 1: 2}  # what codes have here, where that is not what they have there
MOST_PARTS = 4096


def read_hqq(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    found = section.section("quant_config")
    if not found.raw:
        refuse(section, "quant_config", "it must say how weights are quantised")
    schemes = dict(_schemes(found))
    bits, group, axis = schemes.get("", next(iter(schemes.values())))
    held = HELD_BITS.get(bits, int(bits))
    return Quantisation(
        method="hqq",
        bits=held,
        group=group,
        own_groups={tag: own for tag, (_, own, _) in schemes.items() if tag and own is not None},
        kept=_kept(held, group) if axis == 1 else None,
        note="values are made in fp32, not in its 16 bits",
    )


def _kept(bits: int, group: int | None) -> KeptFormat | None:
    """Zero points are fractions, so what code 0 stands for is kept."""
    held = 128 if group is None else group_held(group)
    if held is None:
        return None
    return KeptFormat(kind=f"group{bits}", group=held, scale="f16", grid="minima", is_wide=bits >= WIDE_BITS)


def tag_of(module: str) -> str:
    """What its mixtures call a module: `self_attn.q_proj` of `model.layers.3.self_attn.q_proj`."""
    return ".".join(part for part in module.split(".") if part not in ("model", "layers") and not part.isnumeric())


def _schemes(found: HfConfig) -> Iterator[tuple[str, tuple[float, int | None, int]]]:
    """(bits, values that share a scale, axis) by tag; one without a tag is of all modules. None: a row or column."""
    if "weight_quant_params" in found.raw:
        yield "", _scheme(found)
        return
    if len(found.raw) > MOST_PARTS:
        raise LoadError(f"{found.path} has {len(found.raw)} parts; at most {MOST_PARTS} are read")
    for tag, own in found.raw.items():
        if own is None:
            continue  # floats
        if not isinstance(own, Mapping):
            raise LoadError(f"{found.path} has a {type(own).__name__} for {tag!r}; it must be an object")
        yield tag, _scheme(found.section(tag))


def _scheme(own: HfConfig) -> tuple[float, int | None, int]:
    """Whether scales are quantised themselves (`scale_quant_params`) each matrix says: newer versions pass it over."""
    weights = own.section("weight_quant_params")
    bits = one_of(weights, "nbits", BITS, None)
    one_of(weights, "channel_wise", (True,), True)
    one_of(weights, "view_as_float", (False, True), False)  # as each matrix says, too
    group = weights.optional_integer("group_size")
    if group is not None and group < 1:
        refuse(weights, "group_size", "it must be a whole number of values")
    return bits, group, one_of(weights, "axis", (0, 1), 0)
