"""What a config says of an index that chooses what layers attend to.

Of latent attention it chooses tokens: its sizes, and which layers have one. Of MiniMax M3 it chooses blocks, which is not run:
as far as it chooses everything, its layers need none.
"""

from __future__ import annotations

import logging
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.family import Family
from diptych.models.latent import IndexSpec

logger = logging.getLogger("diptych.models")

# what layers are called that attend by an index, of tokens or of blocks
OF_TOKENS = ("indexed_attention", "deepseek_sparse_attention")
OF_BLOCKS = "minimax_m3_sparse"
# MiniMax M3's older files have them in an object of their own
IN_SPARSE = {"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks"}
FULL, SHARED = "full", "shared"  # a layer makes a choice of its own, or takes the last one made before it
IN_PATTERNS = {"F": FULL, "S": SHARED}


def without_index(raw: dict[str, Any], family: Family, path: str) -> dict[str, Any]:
    """The config without what names layers for their index: one of tokens is told by sizes of its own (`layer_indices`), and
    where blocks are chosen these are the same layers if they attended to everything.
    """
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
    """How many positions the engine may use of `limit`: as many as an index of blocks chooses, where there is one."""
    if config.raw.get("index_topk_blocks") is None:
        return limit
    chosen = config.integer("index_topk_blocks") * config.integer("index_block_size")
    if chosen >= limit:
        return limit
    logger.warning("%s chooses what it attends to by an index, which is not run: up to %d tokens, where that chooses all",
                   family.name, chosen)  # fmt: skip
    return chosen


def layer_indices(config: HfConfig, family: Family, n_layers: int) -> list[IndexSpec | None]:
    """Of each layer; equal ones are one object."""
    if "index_topk" not in family.keys:
        return [None] * n_layers
    if config.raw.get("q_lora_rank") is None:
        raise LoadError(f"q_lora_rank in {config.path} is null; queries of an index are made of what it gives")
    width, turned = config.integer("index_head_dim"), config.integer("qk_rope_head_dim")
    if width % 2 or width < turned:
        raise LoadError(f"index_head_dim in {config.path} is {width}; it must be even, and {turned} of it turn")
    made = {
        kind: IndexSpec(
            most=config.integer("index_topk"),
            n_heads=config.integer("index_n_heads"),
            head_dim=width,
            is_interleaved=config.flag("indexer_rope_interleave"),
            is_own=kind == FULL,
        )
        for kind in (FULL, SHARED)
    }
    return [made[kind] for kind in _kinds(config, family, n_layers)]


def _kinds(config: HfConfig, family: Family, n_layers: int) -> list[str]:
    if "indexer_types" not in family.keys:
        return [FULL] * n_layers
    named: Any = config.raw["indexer_types"]
    pattern = config.raw["index_topk_pattern"]
    if named is None and pattern is None:
        every = max(config.integer("index_topk_freq", low=0), 1)
        first = config.integer("index_skip_topk_offset", low=0) - 1
        return [FULL if max(i - first, 0) % every == 0 else SHARED for i in range(n_layers)]
    key, kinds = ("index_topk_pattern", pattern) if named is None else ("indexer_types", named)
    if isinstance(kinds, str):
        kinds = [IN_PATTERNS.get(one, one) for one in kinds]
    if not isinstance(kinds, list) or len(kinds) < n_layers or any(kind not in (FULL, SHARED) for kind in kinds):
        raise LoadError(f"{key} in {config.path} must name {n_layers} layers, each {FULL} or {SHARED}")
    if kinds[0] != FULL:
        raise LoadError(f"{key} in {config.path} has the first layer share a choice, and none was made before it")
    return kinds[:n_layers]
