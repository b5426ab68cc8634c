"""optimum-quanto's map of modules (`quanto_qmap.json`, beside a config.json that says nothing), or a section of its own.

Source: optimum-quanto 0.2.7 (`models/transformers_models.py`, `quantize.py`, `tensor/qtype.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from diptych.ground.errors import LoadError
from diptych.ground.formats import KeptFormat
from diptych.models.config import QUANTO_MAP, HfConfig
from diptych.models.quantised.fields import Quantisation, kept_fp8, kept_groups, one_of, refuse

OTHER_FP8 = ("qfloat8_e5m2", "qfloat8_e4m3fnuz")
BITS = {"qint2": 2, "qint4": 4, "qint8": 8, "qfloat8": 8, "qfloat8_e4m3fn": 8, **dict.fromkeys(OTHER_FP8, 8)}
NONE = "none"
GROUP = 128  # which it makes smaller for inputs that 128 does not divide


def read_quanto(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    named = [_one(own) for own in _modules(section)]
    kinds = Counter(kind for kind in named if kind != NONE)
    if not kinds:
        refuse(section, QUANTO_MAP, "it must name modules and how their weights are quantised")
    kind = kinds.most_common(1)[0][0]
    return Quantisation(
        method="quanto",
        bits=BITS[kind],
        kept=_kept(kind),
        note="activations have 8 bits, or 15 beside codes of 8; of fp8 16",
    )


def _modules(section: HfConfig) -> list[HfConfig]:
    if QUANTO_MAP not in section.raw:  # as transformers names its types
        weights = section.raw.get("weights")
        named = f"q{weights.replace('float8', 'float8_e4m3fn')}" if isinstance(weights, str) else weights
        return [HfConfig({**section.raw, "weights": named}, path=section.path)]
    modules = section.section(QUANTO_MAP)
    for name, own in modules.raw.items():
        if not isinstance(own, Mapping):
            raise LoadError(f"{name} in {modules.path} is a {type(own).__name__}; it must be an object")
    return [modules.section(name) for name in modules.raw]


def _one(own: HfConfig) -> str:
    one_of(own, "activations", (None, NONE), None)
    return str(one_of(own, "weights", (*BITS, NONE), None))


def _kept(kind: str) -> KeptFormat | None:
    if kind in OTHER_FP8:
        return None
    if kind.startswith("qfloat"):
        return kept_fp8(None)
    if kind == "qint8":
        return kept_groups(8, None, "bf16", is_symmetric=True)
    return KeptFormat(kind=f"group{BITS[kind]}", group=GROUP, scale="bf16", grid="minima16")
