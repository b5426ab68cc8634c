"""RecurrentGemma's configs: a pattern of blocks that repeats, and MLPs half as wide as they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig

KINDS = {"recurrent": "linear_attention", "attention": "sliding_attention"}
BF16_BITS = 8  # of a number of its, beside the exponent


def as_griffin(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same config with what each layer is, the width of one half of an MLP, and what embeddings are multiplied by: the
    root of the model's width, which the class rounds to bf16 whatever it computes in.

    LoadError for another block, a width that has no half, and for layers or heads that are said to be others than follow.
    """
    config = HfConfig({**defaults, **raw}, path=path)
    n, hidden, n_heads = (config.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    pattern, width = config.raw["block_types"], config.integer("intermediate_size", low=2)
    if not isinstance(pattern, list) or not pattern or any(kind not in (*KINDS,) for kind in pattern):
        raise LoadError(f"block_types in {path} is {pattern!r}; it may hold {' and '.join(KINDS)} only")
    if width % 2:
        raise LoadError(f"intermediate_size in {path} is {width}; gate and up have half of it each")
    kinds = [KINDS[pattern[i % len(pattern)]] for i in range(n)]
    for key, wanted in (("layer_types", kinds), ("layers_block_type", kinds), ("head_dim", hidden // n_heads)):
        if raw.get(key) not in (None, wanted):
            raise LoadError(f"{key} in {path} is {raw[key]!r}; it must be {wanted!r}, as the rest of the file says")
    others = {key: value for key, value in raw.items() if key not in ("head_dim", "layers_block_type")}
    return {
        **others,
        "layer_types": kinds,
        "intermediate_size": width // 2,
        "embedding_multiplier": _rounded(hidden**0.5),
    }


def _rounded(value: float) -> float:
    """To bf16, ties to even."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2**BF16_BITS), exponent - BF16_BITS)
