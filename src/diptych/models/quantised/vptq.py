"""VPTQ's `quantization_config`: vectors of outputs out of codebooks, whose sides it has for each module.

Source: vptq 0.0.5 (`layers/vqlinear.py`, `layers/model_base.py`, `utils/pack.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import Quantisation, Vectors, one_of, refuse

MOST_MODULES = 1 << 16
MOST_BITS = 16  # of a code


def read_vptq(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    vectors: dict[str, Vectors] = {}
    for field in ("shared_layer_config", "config_for_layers"):  # names of the last part, and whole ones
        modules = section.section(field)
        if len(modules.raw) > MOST_MODULES:
            raise LoadError(f"{modules.path} has {len(modules.raw)} modules; at most {MOST_MODULES} are read")
        for name, own in modules.raw.items():
            if not isinstance(own, Mapping):
                raise LoadError(f"{name} in {modules.path} is a {type(own).__name__}; it must be an object")
            vectors[name] = _vectors(HfConfig(own, path=f"{name} in {modules.path}"))
    if not vectors:
        refuse(section, "config_for_layers", "it must say how the weights of each module are quantised")
    return Quantisation(method="vptq", vectors=vectors, note="values are made in fp32, not in its 16 bits")


def _vectors(own: HfConfig) -> Vectors:
    one_of(own, "is_indice_packed", (True,), True)
    one_of(own, "vector_quant_dim", ("out",), "out")
    outlier, main = _two(own, "vector_lens")
    outlier_books, books = _two(own, "num_centroids")
    outlier_rest, rest = _two(own, "num_res_centroids")
    if outlier_rest > 0:
        refuse(own, "num_res_centroids", "outliers that are the sum of two vectors are not read")
    has_outliers = outlier > 1 and outlier_books > 0  # as its own class sees them
    if main < 1 or books < 2 or (has_outliers and own.integer("outlier_size") < 1):
        refuse(own, "vector_lens", "a length and a number of vectors are expected")
    for name, size in (("num_centroids", books), ("num_res_centroids", rest)):
        if size > 0 and (size & size - 1 or size < 2 or size > 1 << MOST_BITS):
            refuse(own, name, f"powers of two up to {1 << MOST_BITS} can be read")
    return Vectors(
        sides=(own.integer("out_features"), own.integer("in_features")),
        length=main,
        size=books,
        rest=max(rest, 0),
        runs=own.integer("group_num", 1),
        run=own.integer("group_size"),
        outliers=own.integer("outlier_size") if has_outliers else 0,
        outlier_length=outlier if has_outliers else 0,
        outlier_size=outlier_books if has_outliers else 0,
        has_order=own.flag("enable_perm", False),
        has_norm=own.flag("enable_norm", False),
    )


def _two(own: HfConfig, name: str) -> tuple[int, int]:
    """Of outliers, and of all else; -1: none."""
    found = own.integers(name)
    if found is None or len(found) != 2 or any(isinstance(one, bool) or one > 1 << MOST_BITS for one in found):
        refuse(own, name, "it must be two whole numbers, of outliers and of all else")
    return found[0], found[1]
