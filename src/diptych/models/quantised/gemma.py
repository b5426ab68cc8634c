"""Gemma's `quantization_config`: packed whole numbers of 2, 4 and 8 bits with a scale of each row, embeddings too.

Source: transformers 5.23 (`integrations/gemma_quant.py`, `quantizers/quantizer_gemma.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.quantised.fields import Quantisation, kept_groups, one_of, pattern_of

BITS = (2, 4, 8)
MOST_PATTERNS = 4096


def read_gemma(section: HfConfig) -> Quantisation:
    """What it says. LoadError, by name, for what is not read."""
    section.flag("quantize_embeddings", False)  # which the files show
    bits = one_of(section, "num_bits", BITS, 4)
    return Quantisation(
        method="gemma",
        bits=bits,
        own_bits=tuple(_own_bits(section)),
        kept=kept_groups(bits, None, "f32", is_symmetric=True),
        note="activations have scales of their own, and are not held within the file's ranges (input_activation_scale, "
        "output_activation_scale); those of a cache are not used",
    )


def _own_bits(section: HfConfig) -> Iterator[tuple[re.Pattern[str], int]]:
    """By pattern of a module's name, the first that fits."""
    found = section.section("module_quant_configs")
    if len(found.raw) > MOST_PATTERNS:
        raise LoadError(f"{found.path} has {len(found.raw)} patterns; at most {MOST_PATTERNS} are read")
    for pattern, own in found.raw.items():
        if not isinstance(own, Mapping) or set(own) - {"num_bits"}:
            raise LoadError(f"{pattern!r} in {found.path} is {own!r}; an object with num_bits alone can be read")
        yield (
            pattern_of(found.path, pattern),
            one_of(HfConfig(own, path=f"{pattern!r} in {found.path}"), "num_bits", BITS, 4),
        )
