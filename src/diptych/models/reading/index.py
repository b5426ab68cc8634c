"""What a config says of an index that chooses what latent attention attends to: its sizes, and which layers have one."""

from __future__ import annotations

from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.latent import IndexSpec
from diptych.models.reading.block_index import block_indices

FULL, SHARED = "full", "shared"  # a layer makes a choice of its own, or takes the last one made before it
SHARED_BY = 4  # layers, the first of which chooses, where a class has no key for it; the model's first is by itself
INDEX_EPS = 1e-6  # of the key's norm, whatever the config says of the others
POOLED = (2, 4, 8, 16)  # positions of a block, of which a group of keys in the cache has some
IN_PATTERNS = {"F": FULL, "S": SHARED}


def layer_indices(config: HfConfig, family: Family, have_states: list[bool]) -> list[IndexSpec | None]:
    """Of each layer, of those with a state, too, which have none to make; equal ones are one object."""
    n_layers = len(have_states)
    if "index_topk_blocks" in family.keys:
        return block_indices(config, n_layers)
    if "indexer_budget" in family.keys:
        return [_pooled_index(config)] * n_layers
    if "index_topk" not in family.keys or "entry_layers" in family.keys:
        return [None] * n_layers
    if config.raw.get("q_lora_rank") is None and not family.shares_latents:
        raise LoadError(f"q_lora_rank in {config.path} is null; queries of an index are made of what it gives")
    width, turned = config.integer("index_head_dim"), config.integer("qk_rope_head_dim", low=0)
    if width % 2 or width < turned:
        raise LoadError(f"index_head_dim in {config.path} is {width}; it must be even, and {turned} of it turn")
    most, pool = (
        config.integer("index_topk"),
        config.integer("index_kpool", low=2) if "index_kpool" in family.keys else 1,
    )
    if most % pool:
        raise LoadError(
            f"index_topk in {config.path} is {most}; it must be whole pools of {pool} positions (index_kpool)"
        )
    made = {
        kind: IndexSpec(
            most=most + pool - 1,
            n_heads=config.integer("index_n_heads"),
            head_dim=width,
            is_interleaved=config.flag("indexer_rope_interleave"),
            turns_last=family.index_turns_last,
            norm_eps=config.number("rms_norm_eps") if family.index_turns_last else INDEX_EPS,
            is_own=kind == FULL,
            pool=pool,
            is_apart=family.shares_latents,
        )
        for kind in (FULL, SHARED)
    }
    kinds = _kinds(config, family, n_layers)
    for i, (kind, has_state) in enumerate(zip(kinds, have_states, strict=True)):
        if any(have_states) and kind == SHARED and not has_state and (i == 0 or have_states[i - 1]):
            raise LoadError(
                f"indexer_types in {config.path} has layer {i} share a choice, and the one before it makes none"
            )
    return [made[kind] for kind in kinds]


def _kinds(config: HfConfig, family: Family, n_layers: int) -> list[str]:
    if "indexer_types" not in family.keys:
        return [FULL] * n_layers
    named: Any = config.raw["indexer_types"]
    pattern = config.raw.get("index_topk_pattern")
    if named is None and pattern is None:
        every = max(config.integer("index_topk_freq", SHARED_BY, low=0), 1)
        first = config.integer("index_skip_topk_offset", 2, low=0) - 1
        return [FULL if max(i - first, 0) % every == 0 else SHARED for i in range(n_layers)]
    key, kinds = ("index_topk_pattern", pattern) if named is None else ("indexer_types", named)
    if isinstance(kinds, str):
        kinds = [IN_PATTERNS.get(one, one) for one in kinds]
    if not isinstance(kinds, list) or len(kinds) < n_layers or any(kind not in (FULL, SHARED) for kind in kinds):
        raise LoadError(f"{key} in {config.path} must name {n_layers} layers, each {FULL} or {SHARED}")
    if kinds[0] != FULL and family.state_rule is None:
        raise LoadError(f"{key} in {config.path} has the first layer share a choice, and none was made before it")
    return kinds[:n_layers]


def _pooled_index(config: HfConfig) -> IndexSpec:
    """Of blocks by the means of their keys (Qwen4-Exp)."""
    budget, block, width = (
        config.integer(name) for name in ("indexer_budget", "indexer_compress_ratio", "index_head_dim")
    )
    n_keys = config.integer("indexer_kv_heads")
    if n_keys != 1:
        raise LoadError(f"indexer_kv_heads in {config.path} is {n_keys}; an index has one key for all its heads")
    if block not in POOLED:
        raise LoadError(
            f"indexer_compress_ratio in {config.path} is {block}; it must be one of {', '.join(map(str, POOLED))}"
        )
    if budget % block:
        raise LoadError(f"indexer_budget in {config.path} is {budget}; it must be a multiple of {block}")
    if width % 2:
        raise LoadError(f"index_head_dim in {config.path} is {width}; it must be even")
    # whole blocks, and what makes no whole one
    return IndexSpec(
        most=budget + block - 1, n_heads=config.integer("index_n_heads"), head_dim=width, block=block, by_means=True
    )
