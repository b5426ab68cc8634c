"""Layers with an index that chooses blocks of positions (MiniMax M3)."""

from __future__ import annotations

from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.latent import IndexSpec

OF_BLOCKS = "minimax_m3_sparse"  # what layer_types call such a layer
# published files have the numbers in an object of their own
IN_SPARSE = {"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks",
             "sparse_local_block": "index_local_blocks", "sparse_num_index_heads": "index_n_heads",
             "sparse_index_dim": "index_head_dim"}  # fmt: skip
OF_LAYERS = ("sparse_attention_freq", "sparse_disable_index_value")
# what its publisher's code may do otherwise
USUAL = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}
BLOCKS = (16, 32, 64, 128, 256)  # positions that kernels take together: of whole groups, and tiles of whole blocks


def as_indexed(raw: dict[str, Any], family: Family, path: str) -> dict[str, Any]:
    """The config with index_layers, which says of each layer whether it has an index, in place of kinds of layers."""
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
    for key, value in sparse.raw.items():
        if key in (*IN_SPARSE, *OF_LAYERS) or value is None:
            continue
        if key not in USUAL:
            raise LoadError(f"sparse_attention_config in {path} has {key} {value!r}, which is not known here")
        if value != USUAL[key]:
            raise LoadError(f"{key} in {path} is {value!r}; only {USUAL[key]!r} is run")
    off = sparse.integers("sparse_disable_index_value")
    if off is not None and len(off) != n_layers:
        raise LoadError(f"sparse_disable_index_value in {path} has {len(off)} entries; the model has {n_layers} layers")
    if off is not None and any(one and not is_off for one, is_off in zip(has_index, off, strict=True)):
        raise LoadError(
            f"sparse_disable_index_value in {path} has 0 for a layer with an index, whose values are not run"
        )
    numbers = {ours: sparse.raw[theirs] for theirs, ours in IN_SPARSE.items() if theirs in sparse.raw}
    left = {key: value for key, value in raw.items() if key not in ("sparse_attention_config", "layer_types")}
    return {**left, **numbers, "index_layers": has_index}


def block_indices(config: HfConfig, n_layers: int) -> list[IndexSpec | None]:
    """The index of each layer that has one; they are one object."""
    if not any(config.raw["index_layers"]):
        return [None] * n_layers
    block, n_blocks = config.integer("index_block_size"), config.integer("index_topk_blocks")
    n_heads, local, width = (config.integer(f"index_{name}") for name in ("n_heads", "local_blocks", "head_dim"))
    n_kv = config.integer("num_key_value_heads", config.integer("num_attention_heads"))
    if block not in BLOCKS:
        raise LoadError(
            f"index_block_size in {config.path} is {block}; it must be one of {', '.join(map(str, BLOCKS))}"
        )
    if n_heads != n_kv:
        raise LoadError(f"index_n_heads in {config.path} is {n_heads}; each of the {n_kv} KV heads has one")
    config.at_most("index_local_blocks", local, n_blocks)
    if width % 2:
        raise LoadError(f"index_head_dim in {config.path} is {width}; it must be even")
    index = IndexSpec(most=n_blocks * block, n_heads=n_heads, head_dim=width, block=block, local=local)
    return [index if has_index else None for has_index in config.raw["index_layers"]]
