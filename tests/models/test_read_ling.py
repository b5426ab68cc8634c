"""Ling 3.0's configs, as its makers publish them and as transformers writes them."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec
from diptych.models.states import StateSpec

# of files of its makers, with what they say beside what is read
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 1536, "head_dim": 128,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 4608,
    "layer_group_size": 4, "first_k_dense_replace": 1, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "scale_router_input": False,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.5, "rope_interleave": True, "rope_theta": 6_000_000,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6_000_000, "rope_type": "default"},
    "gated_attention_proj_granularity_type": "head_wise", "short_conv_kernel_size": 4, "no_kda_lora": True,
    "use_kda_lora": False, "kda_safe_gate": True, "kda_lower_bound": -5, "num_kv_heads_for_linear_attn": 0,
    "group_norm_size": 1, "linear_silu": True, "use_qk_norm": True, "use_bias": False, "use_qkv_bias": False,
    "use_mla_nope": False, "use_nGPT": False, "up_proj_norm": False, "value_norm": False, "mtp_use_kda": False,
    "mtp_loss_scaling_factor": 0, "num_nextn_predict_layers": 1, "max_window_layers": 20, "seq_aux": True,
    "expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None, "vocab_size": 157_184,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "embedding_dropout": 0.0,
}  # fmt: skip
# as transformers writes the same: the width of heads is that of what turns, and each layer says what it is
SAVED: dict[str, Any] = {
    "architectures": ["BailingHybridForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 1536, "head_dim": 64,
    "linear_head_dim": 128, "linear_num_heads": 16, "linear_conv_kernel_dim": 4, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 4608, "layer_group_size": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2, "mlp_layer_types": ["dense", *["sparse"] * 7],
    "first_k_dense_replace": 1, "num_experts": 128, "num_experts_per_token": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 512, "num_expert_group": 8, "topk_group": 4, "moe_renormalize": True,
    "model_max_length": 131_072, "rope_parameters": {"rope_theta": 6_000_000.0, "rope_type": "default"},
    "short_conv_kernel_size": 4,
}  # fmt: skip


def read(**fields: Any) -> ModelSpec:
    return read_model(HfConfig({**PUBLISHED, **fields}), name="it")


def state_of(spec: ModelSpec) -> StateSpec:
    state = spec.layers[0].attention.state
    assert state is not None
    return state


def test_both_ways_to_say_it_are_one_model() -> None:
    spec = read()
    assert spec == read_model(HfConfig(SAVED), name="it")
    assert [layer.attention.state is None for layer in spec.layers] == [False, False, False, True] * 2
    assert (state_of(spec).key_dim, state_of(spec).least_decay, state_of(spec).rank) == (128, -5.0, 0)
    assert state_of(read(kda_safe_gate=False)).least_decay is None
    last = spec.layers[3].attention
    assert (last.gate_width, last.rope is not None and last.rope.rotary_dim) == (16, 64)
    drawn = read(q_lora_rank=256).layers[3].attention.mla
    assert drawn is not None
    assert drawn.q_rank == 256


def test_limits_hold_experts_and_shared_experts_of_some_layers() -> None:
    """By names of their own, with those of layers that draft behind them; a gate is held behind its activation."""
    spec = read(expert_swiglu_limit_list=[0] * 6 + [4, 4, 9], share_expert_swiglu_limit_list=[0] * 7 + [5.0])
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    assert [(one.limit, one.shared_limit) for one in mixtures[4:]] == [(None, None), (4.0, None), (4.0, 5.0)]
    form = mixtures[-1].form
    assert form is not None
    assert (form.bound, form.limit) == (4.0, float("inf"))
    assert isinstance(spec.layers[0].mlp, MlpSpec)
    assert spec.layers[0].mlp.limit is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 9}, "layer_group_size in config.json is 4, of 9 layers"),
        ({"share_expert_swiglu_limit_list": [5] * 8}, "share_expert_swiglu_limit_list .* 0 for the first 1"),
        ({"expert_swiglu_limit_list": [0] * 7}, "a number for each of 8 layers"),
        ({"moe_shared_expert_intermediate_size": 256}, "it must be that of moe_intermediate_size, 512"),
        ({"rotary_dim": 32}, "it must be that of qk_rope_head_dim, 64"),
        ({"kda_lower_bound": 5}, "kda_lower_bound in config.json is 5; it must be below 0"),
        ({"kda_lower_bound": True}, "kda_lower_bound in config.json is True"),
        ({"no_kda_lora": False}, "no_kda_lora in config.json is False"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj_granularity_type"),
        ({"num_kv_heads_for_linear_attn": 4}, "num_kv_heads_for_linear_attn"),
        ({"use_mla_nope": True}, "use_mla_nope"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read(**fields)


def test_ling_2_5_calls_itself_so_and_is_refused() -> None:
    """By its architecture, and by its own words where a file names none."""
    with pytest.raises(UnsupportedModel, match=r"'BailingMoeV2_5ForCausalLM' .* \(Lightning attention whose queries"):
        read(architectures=["BailingMoeV2_5ForCausalLM"])
    older = {key: one for key, one in PUBLISHED.items() if "kda" not in key and key != "architectures"}
    with pytest.raises(UnsupportedModel, match=r"Ling 2\.5, which is not supported \(Lightning attention"):
        read_model(HfConfig({**older, "group_norm_size": 8}), name="it")
