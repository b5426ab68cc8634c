"""DeepSeek V4's configs, as they are published and as transformers writes them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.gates import GateForm
from diptych.models.latent import EntrySpec
from diptych.models.mlp import MoeSpec, Scores
from diptych.models.read import read_model
from diptych.models.streams import HyperSpec

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1}
# of published files, with what they say beside what is read
PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "vocab_size": 129_280, "max_position_embeddings": 1_048_576,
    "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0], "compress_rope_theta": 160_000,
    "rope_theta": 10_000, "rope_scaling": YARN, "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "num_hash_layers": 3, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "hidden_act": "silu", "swiglu_limit": 10.0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "attention_dropout": 0.0, "num_nextn_predict_layers": 1, "expert_dtype": "fp4", "initializer_range": 0.02,
    "bos_token_id": 0, "eos_token_id": 1, "use_cache": True, "torch_dtype": "bfloat16",
}  # fmt: skip
NEAR, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def config_of(**fields: Any) -> HfConfig:
    raw = {key: one for key, one in {**PUBLISHED, **fields}.items() if one != "left out"}
    return HfConfig({"architectures": ["DeepseekV4ForCausalLM"], **raw})


def test_a_published_config_and_what_transformers_makes_of_it_are_one_model() -> None:
    """Which names layers, keeps rotary settings of two kinds, and leaves nothing out."""
    theirs = transformers.DeepseekV4Config(**PUBLISHED).to_dict()
    spec = read_model(config_of(), name="it")
    assert spec == read_model(HfConfig({**theirs, "architectures": ["DeepseekV4ForCausalLM"]}), name="it")
    assert spec.streams == HyperSpec(n_streams=4, magnitude=2.0, eps=1e-6, rounds=20, has_end=True)
    attentions = [layer.attention for layer in spec.layers]
    some, every = EntrySpec(tokens=4, overlaps=True), EntrySpec(tokens=128)
    assert [one.entries for one in attentions] == [None, None, some, every, some, every]
    assert [one.own_index is not None for one in attentions] == [False, False, True, False, True, False]
    assert {one.window for one in attentions} == {128}
    ropes = [one.rope for one in attentions if one.rope is not None]
    assert [(one.kind, one.theta, one.attention_factor) for one in ropes[1:3]] == [
        ("default", 10_000.0, 1.0),
        ("yarn", 160_000.0, 1.0),
    ]
    last = attentions[2]
    assert last.mla is not None
    assert (last.mla.row, last.mla.v_dim, last.mla.n_groups, last.scale) == (512, 128, 8, 512**-0.5)
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    assert [one.by_token for one in mixtures] == [True] * 3 + [False] * 3
    assert {(one.scores, one.form, one.shared.form) for one in mixtures} == {
        (Scores.ROOT_SOFTPLUS, GateForm(limit=10.0), GateForm(limit=10.0))
    }


@pytest.mark.parametrize("n", [1, 2, 7])
def test_layers_that_a_config_does_not_name(n: int) -> None:
    """Oracle: the class."""
    theirs = transformers.DeepseekV4Config(num_hidden_layers=n)
    spec = read_model(config_of(compress_ratios="left out", num_hash_layers="left out", num_hidden_layers=n), name="it")
    kinds = [
        ALL if (own := layer.attention.entries) and not own.overlaps else CHOSEN if own else NEAR
        for layer in spec.layers
    ]
    assert kinds == theirs.layer_types
    by_token = [isinstance(layer.mlp, MoeSpec) and layer.mlp.by_token for layer in spec.layers]
    assert by_token == [kind == "hash_moe" for kind in theirs.mlp_layer_types]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": [0, 4, 8, 128, 4, 128]}, "compress_ratios .* 6 numbers, each 0, 4, 128"),
        ({"compress_ratios": [0, 4]}, "compress_ratios .* 6 numbers"),
        ({"layer_types": [NEAR] * 5}, "layer_types .* 6 layers"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types .* each sliding_attention, compressed"),
        ({"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types .* each hash_moe or moe"),
        ({"compress_rates": {CHOSEN: 3}}, "compress_rates .* has 3; it must be 2, 4, 8 or a multiple of 16"),
        ({"compress_rates": {ALL: 40}}, "compress_rates .* has 40"),
        ({"compress_rates": {"full_attention": 4}}, "full_attention in compress_rates .* no kind of layer"),
        ({"head_dim": 520, "qk_rope_head_dim": 64}, "head_dim .* is 520; with entries of 128"),
        ({"o_groups": 7}, "o_groups .* is 7"),
        ({"o_lora_rank": 100}, "o_groups .* 64 heads must share both evenly"),
        ({"qk_rope_head_dim": 63}, "63 turn; it must be an even part"),
        ({"partial_rotary_factor": 0.25}, "qk_rope_head_dim .* is 64; by partial_rotary_factor it is 128"),
        ({"index_head_dim": 32}, "index_head_dim .* is 32; .* 64 of it turn"),
        ({"scoring_func": "softmax"}, "scoring_func .* is 'softmax'; .* only 'sqrtsoftplus'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads .* is 2; .* only 1"),
        ({"n_shared_experts": 2}, "n_shared_experts .* is 2; .* only 1"),
        ({"intermediate_size": 512}, "intermediate_size .* is 512; moe_intermediate_size is 2048"),
        (
            {"rope_parameters": {kind: {"rope_theta": 1e4, "partial_rotary_factor": part}
                                 for kind, part in (("main", 0.125), ("compress", 0.25))}},
            "partial_rotary_factor in compress .* is 0.25 of 512; 64 dimensions turn",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "wavelength": 3}}, "wavelength in rope_parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_run_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read_model(config_of(**fields))
