"""What the converter writes of layers of several kinds (heads by window, positions, limits, an index) and of widths.

Its words are those of `conversion/mimo.py`, `step3.py` and `glm.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

BY_WINDOW = ("mimo_v2_flash", "step3p5")


def windowed(config: Any) -> list[bool]:
    """Which layers are."""
    return [kind == "sliding_attention" for kind in config.layer_types]


def write_windowed_heads(out: gguf.GGUFWriter, config: Any, full: Mapping[str, Any]) -> None:
    """Of each layer; the published configs' window is without the token itself where llama.cpp's converter takes it over."""
    heads, n_kv, kinds = config.num_attention_heads, config.num_key_value_heads, windowed(config)
    out.add_key_length(config.head_dim)
    out.add_sliding_window_pattern(kinds)
    if config.model_type == "mimo_v2_flash":
        out.add_head_count(heads)
        out.add_head_count_kv([2 * n_kv if one else n_kv for one in kinds])
        out.add_sliding_window(config.sliding_window - 1)
        out.add_value_length(config.v_head_dim)
        out.add_rope_dimension_count(int(config.head_dim * full["partial_rotary_factor"]))
        out.add_float32(f"{out.arch}.attention.value_scale", config.attention_value_scale)
        return
    out.add_head_count([config.num_sliding_attention_heads if one else heads for one in kinds])
    out.add_head_count_kv([n_kv] * len(kinds))
    out.add_sliding_window(config.sliding_window)
    out.add_value_length(config.head_dim)
    out.add_moe_every_n_layers(1)
    for add, limits in (
        (out.add_swiglu_clamp_exp, config.swiglu_limits),
        (out.add_swiglu_clamp_shexp, config.swiglu_limits_shared),
    ):
        add([0.0 if one is None else float(one) for one in limits])


def write_choice(out: gguf.GGUFWriter, config: Any) -> None:
    """What an index chooses by, and which layers have one."""
    out.add_indexer_head_count(config.index_n_heads)
    out.add_indexer_key_length(config.index_head_dim)
    out.add_indexer_top_k(config.index_topk)
    out.add_array(f"{out.arch}.attention.indexer.types", [kind == "full" for kind in config.indexer_types])


def write_mixture(out: gguf.GGUFWriter, config: Any) -> None:
    """Of these models; groups and scales as far as their converters say them."""
    if config.model_type == "step3p5":
        out.add_expert_shared_feed_forward_length(config.share_expert_dim)
        out.add_expert_weights_scale(config.moe_router_scaling_factor)
        out.add_expert_weights_norm(True)
        out.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
        return
    out.add_expert_group_count(config.n_group)
    out.add_expert_group_used_count(config.topk_group)
    out.add_expert_weights_scale(config.routed_scaling_factor)
    out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "glm_moe_dsa":
        out.add_expert_shared_count(config.n_shared_experts)
        out.add_leading_dense_block_count(config.first_k_dense_replace)
        out.add_expert_weights_norm(config.norm_topk_prob)


def padded_freqs(config: Any, rope: Mapping[str, Any], divisors: Callable[[int], np.ndarray]) -> np.ndarray:
    """Of layers that attend to everything, as far as they turn; ones behind them for windowed layers, which turn whole."""
    turned = int(config.head_dim * rope["partial_rotary_factor"])
    found = divisors(turned)
    return np.concatenate([found, np.ones(config.head_dim // 2 - len(found), dtype=np.float32)])


def kv_heads(config: Any, name: str) -> int:
    """Of the layer whose tensor that is."""
    blocks = getattr(config, "block_configs", None)
    if blocks is None:
        return int(config.num_key_value_heads)
    return int(config.num_attention_heads // blocks[int(name.split(".")[2])]["attention"]["n_heads_in_group"])


def searched_metadata(config: Any) -> dict[str, Any]:
    """What the converter writes of Nemotron NAS in place of numbers: lists, with 0 for what a layer has not."""
    heads, blocks = config.num_attention_heads, config.block_configs
    groups = [one["attention"]["n_heads_in_group"] for one in blocks]
    return {
        "attention.head_count": [heads if group else 0 for group in groups],
        "attention.head_count_kv": [heads // group if group else 0 for group in groups],
        "feed_forward_length": [one["ffn"]["intermediate_size"] or 0 for one in blocks],
    }


def longest(config: Any) -> int:
    """By whatever name; of BLOOM, whose files rarely say it, the converter takes the width."""
    return next(
        getattr(config, name)
        for name in ("max_position_embeddings", "max_seq_len", "hidden_size")
        if hasattr(config, name)
    )


def ffn_width(config: Any) -> int:
    """Of the MLP, by whatever name."""
    if getattr(config, "block_auto_adjust_ff_dim", False):
        return -(-int(2 * config.intermediate_size / 3) // config.block_multiple_of) * config.block_multiple_of
    names = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size")
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if one), 4 * config.hidden_size)


def turning_pairs(config: Any) -> np.ndarray:
    """What the converter adds for Gemma 4: by what frequencies are divided, of pairs that do not turn 1e30."""
    full = config.per_layer_config[config.layer_types.index("full_attention")]
    turning = int(full.head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return np.array([1.0] * turning + [1e30] * (full.head_dim // 2 - turning), dtype=np.float32)


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary settings; of a model without them what nobody reads."""
    return dict(getattr(config, "rope_parameters", None) or {"rope_theta": 1e4})
