"""A Llama whose layers a search has taken apart (Nemotron NAS), of transformers' own layers, as it has no class of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP


class Nothing(torch.nn.Module):
    """In place of attention, or of an MLP: what it adds is zeros."""

    def __init__(self, *, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.is_attention else zeros


class SearchedForCausalLM(LlamaForCausalLM):
    """Its config has block_configs, whose MLPs have their widths as numbers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for i, (layer, one) in enumerate(zip(self.model.layers, config.block_configs, strict=True)):
            attention, ffn, own = one["attention"], one["ffn"], copy.deepcopy(config)
            if attention["no_op"]:
                layer.self_attn, layer.input_layernorm = Nothing(is_attention=True), torch.nn.Identity()
            else:
                own.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
                layer.self_attn = LlamaAttention(own, i)
            if ffn["no_op"]:
                layer.mlp, layer.post_attention_layernorm = Nothing(is_attention=False), torch.nn.Identity()
            else:
                own.intermediate_size = ffn["intermediate_size"]
                layer.mlp = LlamaMLP(own)


def block(group: int | None, width: int | None) -> dict[str, Any]:
    """Of block_configs: query heads that share a KV head, and how wide the MLP is; None: there is none."""
    return {
        "attention": {
            "n_heads_in_group": group,
            "no_op": group is None,
            "replace_with_linear": False,
            "sparsify": None,
        },
        "ffn": {"intermediate_size": width, "no_op": width is None, "replace_with_linear": False},
    }
