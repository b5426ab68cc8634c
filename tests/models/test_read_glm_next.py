"""GLM-5.3-Flash's configs, as they are published and as transformers writes them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.gates import GateForm
from diptych.models.mlp import MoeSpec
from diptych.models.read import read_model
from diptych.models.streams import HyperSpec

KINDS = [*["linear_attention"] * 3, "deepseek_sparse_attention"] * 2
# of published files, with what they say beside what is read
PUBLISHED: dict[str, Any] = {
    "model_type": "glm5_next_text", "hidden_size": 4096, "vocab_size": 154_880, "max_position_embeddings": 1_048_576,
    "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_head_dim": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "head_dim": 0,
    "mla_use_nope": True, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "index_kpool": 4,
    "index_kpool_compress": True, "index_kpool_always_select_tail": True, "indexer_rope_interleave": True,
    "index_share_for_mtp_iteration": True, "indexer_types": ["full"] * 8, "layer_types": KINDS,
    "linear_attn_config": {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
                           "kda_layers": [0, 1, 2, 4, 5, 6], "full_attn_layers": [3, 7]},
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "first_k_dense_replace": 3, "intermediate_size": 12_288,
    "moe_intermediate_size": 2048, "n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5, "moe_router_dtype": "float32", "hidden_act": "silu", "swiglu_limit": 10.0, "mhc": True,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1, "attention_bias": False,
}  # fmt: skip


def config_of(**fields: Any) -> HfConfig:
    text = {key: one for key, one in {**PUBLISHED, **fields}.items() if one != "left out"}
    wrapped = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "vision_config": {"depth": 1},
    }
    return HfConfig({**wrapped, "text_config": text})


def test_a_published_config_and_what_transformers_makes_of_it_are_one_model() -> None:
    """Which has the object of states apart, layers of other names, and leaves nothing out."""
    theirs = transformers.Glm5NextTextConfig(**PUBLISHED).to_dict()
    spec = read_model(config_of(), name="it")
    assert spec == read_model(HfConfig({"model_type": "glm5_next", "text_config": theirs}), name="it")
    assert spec.streams == HyperSpec(n_streams=4, magnitude=2.0, eps=1e-6, rounds=20, has_end=False)
    assert [layer.attention.state is None for layer in spec.layers] == [False, False, False, True] * 2
    state, last = spec.layers[0].attention.state, spec.layers[3].attention
    assert state is not None
    assert (state.rank, state.least_decay, state.key_dim, state.n_value_heads) == (128, -5.0, 128, 64)
    assert last.mla is not None
    assert (last.rope, last.mla.row, last.mla.norm_eps, last.scale) == (None, 512, 1e-5, 256**-0.5)
    assert last.own_index is not None
    assert (last.own_index.most, last.own_index.n_pools, last.own_index.pool) == (2051, 512, 4)
    mixture = spec.layers[3].mlp
    assert isinstance(mixture, MoeSpec)
    assert [one.form for one in (spec.layers[0].mlp, mixture, mixture.shared)] == [GateForm(limit=10.0)] * 3


def test_layers_that_a_config_does_not_name() -> None:
    """The fourth of each four attends, and the first three have no mixture; oracle: the class."""
    names = dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types", "linear_attn_config"), "left out")
    theirs = transformers.Glm5NextTextConfig(num_hidden_layers=8)
    spec = read_model(config_of(**names), name="it")
    assert [layer.attention.state is not None for layer in spec.layers] == [
        kind == "linear_attention" for kind in theirs.layer_types
    ]
    assert [isinstance(layer.mlp, MoeSpec) for layer in spec.layers] == [
        kind == "sparse" for kind in theirs.mlp_layer_types
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail in .* is False"),
        ({"index_kpool_compress": False}, "index_kpool_compress in .* is False"),
        ({"index_topk": 2046}, "whole pools of 4 positions"),
        ({"index_kpool": 1}, "index_kpool in .* is 1"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim in .* is 64"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters in .* is 0"),
        ({"hc_mult": 9}, "hc_mult"),
        ({"swiglu_limit": 0}, "swiglu_limit in .* is 0"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace in .* mlp_layer_types says otherwise"),
        ({"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]}, "layer_types in .* must name 8 layers"),
        ({"indexer_types": ["full"] * 7 + ["shared"]}, "layer 7 share a choice, and the one before it makes none"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "kda_layers in .* by layer_types it is"),
        ({"linear_attn_config": {"allow_neg_eigval": True}}, "allow_neg_eigval in .* is True"),
        ({"linear_attn_config": {"gate_lower_bound": 1.0}}, "linear_lower_bound in .* is 1.0; it must be below 0"),
        ({"q_lora_rank": None}, "queries of an index"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read_model(config_of(**fields), name="it")


def test_a_rule_without_a_bound_is_one() -> None:
    """Where nobody says which it has; an object that speaks of a bound and names none means 5, as the class has it."""
    found = []
    for fields in ({"linear_attn_config": "left out", "linear_lower_bound": None},
                   {"linear_attn_config": {"gate_lower_bound": None}},
                   {"linear_attn_config": {"gate_lower_bound": None, "safe_gate": False}}):  # fmt: skip
        given = {key: one for key, one in {**PUBLISHED, **fields}.items() if one != "left out"}
        state = read_model(config_of(**fields), name="it").layers[0].attention.state
        assert state is not None
        assert state.least_decay == transformers.Glm5NextTextConfig(**given).linear_lower_bound
        found.append(state.least_decay)
    assert found == [None, -5.0, None]
