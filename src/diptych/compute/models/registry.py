"""From the architecture named in config.json to its family."""

from __future__ import annotations

from diptych.compute.models import (
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from diptych.compute.models.decoder import Family
from diptych.compute.models.hf_config import HfConfig
from diptych.ground.errors import UnsupportedModel

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY for module in (llama, mistral, qwen2, qwen3, phi3, gemma2, gemma3, olmo2, smollm3, mixtral, qwen3_moe)
)
SUPPORTED: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}


def family_of(config: HfConfig) -> Family:
    """The family of the first architecture in the config. Raises UnsupportedModel with the list of supported ones."""
    named = config.raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str) or architecture not in SUPPORTED:
        raise UnsupportedModel(
            f"architecture {architecture!r} in {config.path} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    return SUPPORTED[architecture]
