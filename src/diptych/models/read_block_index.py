"""Layers that choose blocks of tokens by an index (MiniMax M3), which is not run: as far as it chooses all they need none."""

from __future__ import annotations

import logging
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.family import Family

logger = logging.getLogger("diptych.models")

OF_BLOCKS = "minimax_m3_sparse"  # what layer_types call such a layer
# published files have the numbers in an object of their own
IN_SPARSE = {"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks"}


def without_blocks(raw: dict[str, Any], family: Family, path: str) -> dict[str, Any]:
    """The config of the same layers if they attended to everything."""
    n_layers = HfConfig({**family.keys, **raw}, path=path).integer("num_hidden_layers")
    sparse = HfConfig(raw, path=path).section("sparse_attention_config")
    kinds = raw.get("layer_types")
    if kinds is None and sparse.raw.get("sparse_attention_freq") is not None:
        kinds = [OF_BLOCKS if one else "full_attention" for one in sparse.integers("sparse_attention_freq") or ()]
    kinds = ["full_attention"] * n_layers if kinds is None else kinds
    if not isinstance(kinds, list) or any(kind not in ("full_attention", OF_BLOCKS) for kind in kinds):
        raise LoadError(f"layer_types in {path} may hold full_attention and {OF_BLOCKS} only")
    if len(kinds) != n_layers:
        raise LoadError(f"layer_types in {path} has {len(kinds)} entries; the model has {n_layers} layers")
    has_index = [kind == OF_BLOCKS for kind in kinds]
    off = sparse.integers("sparse_disable_index_value")
    if off is not None and any(one and not is_off for one, is_off in zip(has_index, off, strict=False)):
        raise LoadError(
            f"sparse_disable_index_value in {path} has 0 for a layer with an index, whose values are not run"
        )
    numbers = {ours: sparse.raw[theirs] for theirs, ours in IN_SPARSE.items() if theirs in sparse.raw}
    left = {key: value for key, value in raw.items() if key not in ("sparse_attention_config", "layer_types")}
    return {**left, **numbers} if any(has_index) else {**left, "index_topk_blocks": None}


def within_blocks(config: HfConfig, family: Family, limit: int) -> int:
    """How many positions the engine may use of `limit`: as many as the blocks that are chosen have, where there is an index."""
    if config.raw.get("index_topk_blocks") is None:
        return limit
    chosen = config.integer("index_topk_blocks") * config.integer("index_block_size")
    if chosen < limit:
        logger.warning("%s chooses blocks by an index, which is not run: up to %d tokens, where that chooses all of them",
                       family.name, chosen)  # fmt: skip
    return min(chosen, limit)
