"""Blocks that layers share (Zamba, Zamba2): attention and an MLP aside of the stream, before some layers that keep a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.mlp import MlpSpec
from diptych.models.reading.blocks import ATTENTION, STATE
from diptych.models.spec import LayerSpec

KINDS = ("hybrid", STATE, "mamba")  # with a block before it, and without: by two names
LONG_CONTEXT = 16_384
# the class's own, of 54 layers
USUAL = (STATE, *((STATE,) * 5 + ("hybrid",)) * 7, *(STATE,) * 4, "hybrid", *(STATE,) * 3, "hybrid", STATE, STATE)


def as_asides(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keys that say of usual layers what the config says of such: a layer with a block before its state is two here.

    blocks: of each layer its number in the checkpoint, and that of its MLP, if any.
    """
    config = HfConfig(raw, path=path)
    n_layers, hidden, n_heads = (
        config.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    given = raw["layers_block_type"]
    kinds = _usual(config, n_layers) if given is None else given
    if not isinstance(kinds, list | tuple) or len(kinds) != n_layers or any(kind not in KINDS for kind in kinds):
        raise LoadError(f"layers_block_type in {path} must hold {n_layers} of hybrid and mamba, one for each layer")
    if 2 * hidden % n_heads:
        raise LoadError(f"hidden_size in {path} is {hidden}; {n_heads} heads do not divide twice that")
    n_kv, has_own = config.integer("num_key_value_heads", n_heads), config.flag("use_shared_attention_adapter")
    if has_own and n_kv != n_heads:
        raise LoadError(
            f"num_key_value_heads in {path} is {n_kv}; with use_shared_attention_adapter it must be as many as all heads, "
            f"{n_heads}"
        )
    width, with_blocks = 2 * hidden // n_heads, [i for i, kind in enumerate(kinds) if kind == KINDS[0]]
    for key, wanted in (("head_dim", width), ("attention_hidden_size", 2 * hidden), ("hybrid_layer_ids", with_blocks)):
        if raw[key] not in (None, wanted):
            raise LoadError(f"{key} in {path} is {raw[key]!r}; it must be {wanted!r}, as the rest of the file says")
    blocks = [(i, mlp) for i, kind in enumerate(kinds) for mlp in ((i, None) if kind == KINDS[0] else (None,))]
    return {
        "blocks": tuple(blocks),
        "num_hidden_layers": len(blocks),
        "layer_types": [STATE if mlp is None else ATTENTION for _, mlp in blocks],
        "head_dim": width,
        "query_pre_attn_scalar": width / 2,
        "intermediate_size": config.integer("intermediate_size", 4 * hidden),
        "max_position_embeddings": LONG_CONTEXT
        if config.flag("use_long_context")
        else config.integer("max_position_embeddings"),
        **(_steps_and_turns(config) if "use_mem_rope" in raw else {}),
    }


def _usual(config: HfConfig, n_layers: int) -> tuple[str, ...]:
    """What the class makes of layers that nobody names: of Zamba2 54, of Zamba every so many-th behind the third."""
    if "attn_layer_period" not in config.raw:
        return USUAL
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", low=0)
    return (STATE, STATE, "hybrid", *("hybrid" if i % period == offset else STATE for i in range(n_layers - 3)))


def _steps_and_turns(config: HfConfig) -> dict[str, Any]:
    """Of Zamba2: its steps have a bound that other classes draw their weights by, and it may know positions."""
    return {
        "time_step_limit": [config.number("time_step_min"), math.inf],
        "position_embedding_type": "rope" if config.flag("use_mem_rope") else "none",
    }


def with_shares(config: HfConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Which layers aside have the weights of which: num_mem_blocks blocks in turn, of Zamba2 each with low ranks of every use's
    own; of Zamba one without.
    """
    n_blocks = config.integer("num_mem_blocks", 1)
    rank = config.integer("adapter_rank") if "adapter_rank" in config.raw else 0
    attention_rank = rank if config.flag("use_shared_attention_adapter") else 0
    aside = [i for i, layer in enumerate(layers) if layer.is_aside]
    made: list[LayerSpec] = list(layers)
    for use, i in enumerate(aside):
        mlp = layers[i].mlp
        assert isinstance(mlp, MlpSpec)
        attention = replace(layers[i].attention, beside=config.integer("hidden_size"), own_rank=attention_rank)
        first = aside[use % n_blocks]
        made[i] = replace(
            layers[i], attention=attention, mlp=replace(mlp, own_rank=rank), shares=None if first == i else first
        )
    return made
