"""Layers that choose by an index what they attend to, which is not run: as far as they choose everything, they need none."""

from __future__ import annotations

import logging
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.family import Family

logger = logging.getLogger("diptych.models")

# what layers are called that attend by an index, of tokens or of blocks
OF_TOKENS = ("indexed_attention", "deepseek_sparse_attention")
OF_BLOCKS = "minimax_m3_sparse"
# MiniMax M3's older files have them in an object of their own
IN_SPARSE = {"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks"}


def without_index(raw: dict[str, Any], family: Family, path: str) -> dict[str, Any]:
    """The config of the same layers if they attended to everything."""
    if "index_topk" in family.keys:
        kinds = raw.get("layer_types")
        is_indexed = isinstance(kinds, list) and all(kind in OF_TOKENS for kind in kinds)
        return {key: value for key, value in raw.items() if key != "layer_types"} if is_indexed else raw
    return _without_blocks(raw, family, path) if "index_topk_blocks" in family.keys else raw


def _without_blocks(raw: dict[str, Any], family: Family, path: str) -> dict[str, Any]:
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


def within_index(config: HfConfig, family: Family, limit: int) -> int:
    """How many positions the engine may use of `limit`: as many as an index chooses, where there is one."""
    chosen = None
    if "index_topk" in family.keys:
        chosen = config.integer("index_topk")
    elif config.raw.get("index_topk_blocks") is not None:
        chosen = config.integer("index_topk_blocks") * config.integer("index_block_size")
    if chosen is None or chosen >= limit:
        return limit
    logger.warning("%s chooses what it attends to by an index, which is not run: up to %d tokens, where that chooses all",
                   family.name, chosen)  # fmt: skip
    return chosen
