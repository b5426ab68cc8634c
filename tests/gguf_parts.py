"""What the converter writes to GGUF of families whose configs and experts lie in parts."""

from __future__ import annotations

from typing import Any

import gguf
import torch

WIDTH_OF_DBRX = 40  # of the experts of the tests


def write_dbrx(out: gguf.GGUFWriter, config: Any) -> None:
    """Its metadata, from sections of the config."""
    out.add_context_length(config.max_seq_len)
    out.add_embedding_length(config.d_model)
    out.add_block_count(config.n_layers)
    out.add_feed_forward_length(config.ffn_config.ffn_hidden_size)
    out.add_head_count(config.n_heads)
    out.add_head_count_kv(config.attn_config.kv_n_heads)
    out.add_rope_freq_base(config.attn_config.rope_theta)
    out.add_clamp_kqv(config.attn_config.clip_qkv)
    out.add_expert_count(config.ffn_config.moe_num_experts)
    out.add_expert_used_count(config.ffn_config.moe_top_k)
    out.add_layer_norm_eps(1e-5)


def experts_of_dbrx(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Apart, each as [outputs, inputs]."""
    by_expert = values.unflatten(0, (-1, WIDTH_OF_DBRX))
    return {f"{name}.weight": by_expert.transpose(1, 2) if name.endswith("w2") else by_expert}


def clamped_experts(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of gpt-oss: [inputs, outputs] and biases, gate and up in turn."""
    root, _, part = name.rpartition(".")
    stem, ending = (part.removesuffix("_bias"), "bias") if part.endswith("_bias") else (part, "weight")
    values = values.transpose(-1, -2) if ending == "weight" else values
    if stem == "down_proj":
        return {f"{root}.{stem}.{ending}": values}
    return {f"{root}.gate_proj.{ending}": values[:, ::2], f"{root}.up_proj.{ending}": values[:, 1::2]}


OWN_EXPERTS = {"gpt_oss": clamped_experts, "dbrx": experts_of_dbrx}
