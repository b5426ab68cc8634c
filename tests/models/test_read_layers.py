"""Layers that differ, as a config says it: kinds by layer, indices, heads of windowed layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from test_read import SMALL, read
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.gates import CLAMPED, SQUARED, GateForm
from diptych.models.latent import IndexSpec
from diptych.models.mlp import MoeSpec
from diptych.models.positions import QueryScale
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec, QkNorm
from diptych.models.streams import GatedSpec, HyperSpec


def choosers(spec: ModelSpec) -> str:
    """F for a layer that chooses what it attends to, S for one that takes another's choice."""
    kinds = ((layer.attention.index, layer.attention.own_index) for layer in spec.layers)
    return "".join("F" if own else "S" for index, own in kinds if index)


def test_layers_choose_what_they_attend_to_or_take_the_choice_of_another() -> None:
    """GLM-5.2's layers, by any of the three ways to say it; oracle: what the class makes of the same keys."""
    named = {"layer_types": ["deepseek_sparse_attention"] * 9, "num_hidden_layers": 9}
    ways = (
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_pattern": "FSSFSSFSS", "index_topk_freq": 5},
        {"indexer_types": ["full", "shared", "full"] * 3, "index_topk_pattern": "F" * 9},
    )
    for fields in ways:
        theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=9, **fields).indexer_types
        assert choosers(read("glm_moe_dsa", **named, **fields)) == "".join(kind[0].upper() for kind in theirs)
    assert choosers(read("deepseek_v32")) == "F" * SMALL["num_hidden_layers"]
    with pytest.raises(LoadError, match=r"layer_types in config\.json may hold"):
        read("deepseek_v3", num_hidden_layers=1, layer_types=["indexed_attention"])
    for fields, said in (
        ({"indexer_types": ["shared"] * 78}, "none was made before it"),
        ({"indexer_types": ["full"] * 3}, "must name 4 layers"),
        ({"index_topk_pattern": "FX" * 39}, "index_topk_pattern"),
        ({"q_lora_rank": None}, "queries of an index"),
        ({"index_head_dim": 32}, "64 of it turn"),
    ):
        with pytest.raises(LoadError, match=said):
            read("glm_moe_dsa", **fields)


def test_streams_by_hyper_connections() -> None:
    """HY V4; oracle: what the class makes of the same keys. A limit of 0 is refused: to its pages it is none."""
    for n in (1, 7):
        config = transformers.HYV4Config(num_hidden_layers=n)
        spec = read("hy_v4", num_hidden_layers=n)
        assert choosers(spec) == "".join(kind[0].upper() for kind in config.indexer_types)
        kinds = ["sparse" if isinstance(layer.mlp, MoeSpec) else "dense" for layer in spec.layers]
        assert kinds == config.mlp_layer_types
    assert spec.streams == HyperSpec(n_streams=4, magnitude=2.0, eps=1e-6)
    attention, moe = spec.layers[0].attention, spec.moe
    assert moe is not None
    assert (moe.form, moe.shared.form) == (GateForm(limit=10.0), None)
    assert (attention.has_sinks, attention.has_gate, attention.gates_heads) == (True, True, False)
    index = attention.own_index
    assert index is not None
    assert (index.turns_last, index.norm_eps) == (True, spec.norm_eps)
    assert read("hy_v4", num_key_value_heads=3).n_kv_heads == spec.n_heads  # which the class puts there, too
    for fields, said in (
        ({"hc_mult": 9}, "hc_mult in .* is 9; at most 8"),
        ({"hc_mult": 0}, "hc_mult in .* is 0; it must be a whole number of at least 1"),
        ({"hc_magnitude": -1.0}, "hc_magnitude in .* must be a number greater than 0"),
        ({"hc_eps": "small"}, "hc_eps in .* must be a number"),
        ({"swiglu_limit": 0.0}, r"swiglu_limit in .* is 0\.0; it must be a number greater than 0"),
        ({"swiglu_limit": None}, "swiglu_limit in .* is None; it must be a number greater than 0"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "none was made before it"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types in .* must name 4 layers"),
        ({"index_topk_freq": 4}, "it changes the mathematics, and hy_v4 has no such key"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace .* hy_v4 has no such key"),
        ({"q_lora_rank": None}, "queries of an index"),
    ):
        with pytest.raises(LoadError, match=said):
            read("hy_v4", **fields)
    with pytest.raises(LoadError, match=r"hc_mult .* changes the mathematics"):
        read("llama", hc_mult=4)


QWEN4: dict[str, Any] = {
    "num_hidden_layers": 4, "ple_layer_ids": [3, 1, 3], "eos_token_id": [7, 9], "indexer_n_heads": 4, "indexer_kv_heads": 1,
    "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4, "partial_rotary_factor": 0.25,
    "hidden_size": 128, "head_dim": 64, "ngram_vocab_size_base": 100, "vocab_size": 500,
}  # fmt: skip


def test_streams_in_one_row_n_grams_and_blocks_by_their_means() -> None:
    """Qwen4-Exp; oracle: what the classes make of the same keys."""
    config = transformers.Qwen4ExpTextConfig(**QWEN4)
    spec = read("qwen4_exp_text", **QWEN4)
    assert spec == read("qwen4_exp_text", **QWEN4, layer_types=config.layer_types)
    types = ["full_attention" if kind == "indexed_attention" else kind for kind in config.layer_types]
    assert spec == read("qwen4_exp_text", **QWEN4, layer_types=types)  # as published
    assert [layer.attention.state is not None for layer in spec.layers] == [kind[0] == "l" for kind in types]
    assert spec.streams == GatedSpec(n_streams=4, rank=320)
    assert spec.layers[3].attention.index == IndexSpec(most=2051, n_heads=4, head_dim=128, block=4, by_means=True)
    ngrams = spec.ngrams
    assert ngrams is not None
    assert (ngrams.layers, ngrams.end, ngrams.width) == ((0, 2), 7, 128)
    for place in range(2):
        theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0, place)
        sizes, firsts = zip(*ngrams.heads(place), strict=True)
        assert (list(sizes), list(firsts)) == (theirs.head_vocab_sizes, theirs.head_offsets)
        assert ngrams.factors(place) == tuple(theirs.layer_multipliers.tolist())
        assert (ngrams.rows(place), ngrams.head_width) == tuple(theirs.ngram_embedding.weight.shape)
    published = {"mamba_ssm_dtype": "float32", "mtp": {"hybrid": True}, "mtp_num_hidden_layers": 1, "ple_embed_dim": 2560,
                 "ple_layer_ids": [2], "ngram_vocab_size_base": 20_000_000, "split_ngram_parts": 128}  # fmt: skip
    ngrams = read("qwen4_exp_text", **{**QWEN4, **published}).ngrams
    assert ngrams is not None
    assert (ngrams.rows(0), ngrams.head_width) == (128 * 2_500_012, 160)  # as its files have them
    for fields, said in (
        ({"hc_count": 1}, "hc_count in .* is 1; it must be a whole number of at least 2"),
        ({"hc_count": 9}, "hc_count in .* is 9; at most 8"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids in .* the number, from 1 to 4, of a layer with linear attention"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids in .* the number, from 1 to 4"),
        ({"ple_embed_dim": 120}, "ple_embed_dim in .* is 120; 16 heads of n-grams cannot share it evenly"),
        ({"ngram_size": 1}, "ngram_size in .* at least 2"),
        ({"eos_token_id": None}, "eos_token_id in .* is None; n-grams begin anew behind the first"),
        ({"eos_token_id": 500}, "eos_token_id in .* must be below 500"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads in .* is 2; an index has one key for all its heads"),
        ({"indexer_compress_ratio": 32}, "indexer_compress_ratio in .* is 32; it must be one of 2, 4, 8, 16"),
        ({"indexer_budget": 2050}, "indexer_budget in .* is 2050; it must be a multiple of 4"),
        ({"indexer_head_dim": 8}, "index_head_dim in .* is 8; 16 dimensions of a head turn there, too"),
        ({"indexer_budget": None}, "indexer_budget in .* must be a whole number of at least 1"),
        ({"output_gate_type": "tanh"}, "output_gate_type in .* is 'tanh'; it may be silu or sigmoid"),
        ({"altup_num_inputs": 4}, "altup_num_inputs .* changes the mathematics"),
    ):
        with pytest.raises(LoadError, match=said):
            read("qwen4_exp_text", **{**QWEN4, **fields})
    with pytest.raises(LoadError, match=r"hc_lowrank .* changes the mathematics"):
        read("llama", hc_lowrank=4)


def test_the_layers_of_llama_4() -> None:
    """Three of four turn, within chunks, with normed q and k; the fourth sees everything, its queries scaled by position.

    A file may wrap the decoder beside its vision, say 4 for true, and leave the list of layers empty: all mean the same.
    """
    spec = read("llama4_text", num_hidden_layers=8)
    near, far = spec.layers[0].attention, spec.layers[3].attention
    assert [layer.attention is far for layer in spec.layers] == [False, False, False, True] * 2
    assert (near.window, near.is_chunked, near.qk_norm, near.query_scale) == (8192, True, QkNorm.UNIT, None)
    assert (far.window, far.is_chunked, far.qk_norm, far.rope) == (None, False, QkNorm.NONE, None)
    assert far.query_scale == QueryScale(slope=0.1, tokens=8192, shift=1)
    text = {
        **SMALL,
        "model_type": "llama4_text",
        "num_hidden_layers": 8,
        "attn_temperature_tuning": 4,
        "no_rope_layers": [],
    }
    wrapped = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    assert read_model(HfConfig(wrapped)).layers == read("llama4_text", num_hidden_layers=8).layers
    with pytest.raises(LoadError, match="stretches what llama4_text norms"):
        read("llama4_text", rope_scaling={"rope_type": "yarn", "factor": 4.0})


def test_layers_by_number_and_heads_of_windowed_layers() -> None:
    """MiMo-V2-Flash as its makers publish it: numbers for kinds of layers, heads of two kinds, a window without its token."""
    fields = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2,
        "head_dim": 24, "v_head_dim": 16,
    }  # fmt: skip
    usual = read("mimo_v2_flash", **fields)
    published = {
        "hybrid_layer_pattern": [0, 1, 1, 1], "moe_layer_freq": [0, 1, 1, 1], "partial_rotary_factor": 0.334,
        "rope_theta": 5_000_000, "swa_rope_theta": 10_000, "sliding_window": 128, "sliding_window_size": 128,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16,
        "attention_chunk_size": 128, "routed_scaling_factor": None, "layernorm_epsilon": 1e-5, "hybrid_block_size": None,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_value_scale": 0.707,
    }  # fmt: skip
    assert read("mimo_v2_flash", **fields, **published).layers == usual.layers
    assert usual.windows == (None, 129, 129, 129)
    full, windowed = usual.layers[0].attention, usual.layers[1].attention
    assert (full.n_kv_heads, windowed.n_kv_heads, full.has_sinks, windowed.has_sinks) == (2, 4, False, True)
    assert (full.value_dim, full.v_scale, full.rope.rotary_dim) == (16, 0.707, 8)
    others = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 12, "swa_v_head_dim": 10,
              "add_full_attention_sink_bias": True}  # fmt: skip
    other = read("mimo_v2_flash", **{**fields, **published, **others})
    heads = [(one.attention.n_heads, *one.attention.cache.sizes, one.attention.has_sinks) for one in other.layers[:2]]
    assert heads == [(4, 2, 24, 16, True), (6, 3, 12, 10, True)]
    for given, what in (
        ({"hybrid_layer_pattern": [0, 1, 1, 2]}, "hybrid_layer_pattern .* a number below 2"),
        ({"hybrid_layer_pattern": 6}, "hybrid_layer_pattern .* a number below 2"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types .* has 2 entries"),
        ({"moe_layer_freq": [0] * 4, "mlp_layer_types": ["sparse"] * 4}, "moe_layer_freq and mlp_layer_types"),
        ({"swa_head_dim": 11}, "swa_head_dim .* must be even"),
        ({"swa_num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"hybrid_block_size": 5}, "hybrid_block_size"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ):
        with pytest.raises(LoadError, match=what):
            read("mimo_v2_flash", **{**fields, **given})
    with pytest.raises(LoadError, match="it changes the mathematics"):
        read("llama", hybrid_layer_pattern=[0, 1, 1, 1])


def test_layers_that_attend_to_pictures_are_left_out() -> None:
    """Llama 3.2 Vision without pictures; oracle: which layers the class makes of the same config."""
    for fields in ({}, {"num_hidden_layers": 5, "cross_attention_layers": [1, 4, 8]}):
        spec = read("mllama_text_model", **{"num_hidden_layers": 40, **fields})
        with torch.device("meta"):
            config = transformers.MllamaTextConfig(**{**SMALL, "pad_token_id": 0, "num_hidden_layers": 40, **fields})
            layers = transformers.MllamaForCausalLM(config).model.layers
        left_out = [i for i, layer in enumerate(layers) if hasattr(layer, "cross_attn")]
        assert list(spec.left_out) == left_out
        assert [spec.blocks_of(i) for i in range(spec.n_layers)] == [
            (i, i) for i in range(len(layers)) if i not in left_out
        ]
        assert spec.n_blocks == len(layers)
    with pytest.raises(LoadError, match="names all 2 layers; none is left"):
        read("mllama_text_model", num_hidden_layers=2, cross_attention_layers=[0, 1])
    with pytest.raises(LoadError, match="tie_word_embeddings"):
        read("mllama_text_model", tie_word_embeddings=True)


def test_layers_that_a_search_has_left() -> None:
    """Nemotron NAS's block_configs as they are published; what is no attention, no gated MLP and not nothing is refused."""

    def one(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
        plain = {"no_op": False, "replace_with_linear": False, "sparsify": None}
        return {
            "attention": {
                **plain,
                "n_heads_in_group": None,
                "window_length": None,
                "unshifted_sink": False,
                **attention,
            },
            "ffn": {**plain, "ffn_mult": None, **ffn},
        }

    nothing = {"no_op": True}
    blocks = [
        one({"n_heads_in_group": 4}, {"ffn_mult": 2.625}),
        one(nothing, {"ffn_mult": 5.25}),
        one({"n_heads_in_group": 2}, nothing),
        one(nothing, nothing),
    ]
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": None}
    given = {**sizes, "intermediate_size": None}
    spec = read("nemotron-nas", **given, block_configs=blocks)
    found = [(x.attention.n_heads, x.attention.own_kv_heads, x.mlp and x.mlp.ffn, x.norms.count) for x in spec.layers]
    # 2 / 3 of 512 times 2.625 is 896, which is more than 3 256s
    assert found == [(8, 2, 1024, 2), (0, 0, 1792, 1), (8, 4, None, 1)]
    assert (spec.blocks, spec.left_out, spec.kv_layers, spec.n_parts) == (((0, 0), (1, 1), (2, None)), (3,), (0, 2), 4)
    deci = read("nemotron-nas", **sizes, num_key_value_heads_per_layer=[4, 4, 2, 1])
    assert [layer.attention.n_kv_heads for layer in deci.layers] == [4, 4, 2, 1]
    usual = blocks[:3]
    for last, what in (
        (
            one({"replace_with_linear": True}, {"ffn_mult": 1.0}),
            r"replace_with_linear in attention of block_configs\[3\]",
        ),
        (one({"n_heads_in_group": 8, "window_length": 512}, nothing), "window_length in attention .* is 512"),
        (
            one({"n_heads_in_group": 8}, {"replace_with_linear": True}),
            r"replace_with_linear in ffn of block_configs\[3\]",
        ),
        (one({"n_heads_in_group": 8}, {"intermediate_size": 64, "gated": True, "moe": {"n": 4}}), "moe in ffn"),
        (one({"n_heads_in_group": 8}, {"intermediate_size": 64, "gated": False}), "gated in ffn .* is False"),
        (one({"n_heads_in_group": 3}, nothing), "n_heads_in_group .* is 3; 8 query heads"),
        (one({}, nothing), "n_heads_in_group .* is None"),
        (one({"n_heads_in_group": 8}, {}), "ffn_mult .* is None"),
        (one({"no_op": "yes"}, nothing), "no_op .* must be true or false"),
    ):
        with pytest.raises(LoadError, match=what):
            read("nemotron-nas", **given, block_configs=[*usual, last])
    with pytest.raises(LoadError, match="must hold 4 objects"):
        read("nemotron-nas", **given, block_configs=usual)
    with pytest.raises(UnsupportedModel, match="no layer that attends"):
        read("nemotron-nas", **given, block_configs=[one(nothing, {"ffn_mult": 1.0})] * 4)
    with pytest.raises(LoadError, match="must hold 4 numbers"):
        read("nemotron-nas", **sizes, num_key_value_heads_per_layer=[4, 4])


def test_an_index_of_blocks_by_layer() -> None:
    """MiniMax M3; published files have its numbers in an object of their own."""
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "max_position_embeddings": 8192}
    plain = read("minimax_m3_vl_text", **fields)
    assert (plain.max_context_tokens, plain.mlp) == (8192, None), "no layer has an index unless it is said"
    sparse = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max",
              "sparse_block_size": 32, "sparse_topk_blocks": 8, "sparse_attention_freq": [0, 1, 1, 1],
              "sparse_disable_index_value": [0, 1, 1, 1], "sparse_local_block": 2, "sparse_num_index_heads": 2,
              "sparse_index_dim": 24}  # fmt: skip
    published = {"moe_layer_freq": [0, 1, 1, 1], "dense_intermediate_size": 48, "use_gemma_norm": True, "rotary_dim": 8,
                 "partial_rotary_factor": 0.5, "qk_norm_type": "per_head", "hidden_act": "swigluoai"}  # fmt: skip
    found = read("minimax_m3_vl_text", **fields, **published, sparse_attention_config=sparse)
    assert (found.max_context_tokens, found.mlp.ffn, found.moe.expert_ffn) == (8192, 48, 96)
    index = IndexSpec(most=256, n_heads=2, head_dim=24, block=32, local=2)
    assert [layer.attention.index for layer in found.layers] == [None, index, index, index]
    assert [cache.sizes for cache in found.caches] == [(2, 16, 16)] * 4 + [(1, 24, 0)] * 3
    assert [found.index_place(i) for i in range(4)] == [None, 4, 5, 6]
    assert found.attention.rope.rotary_dim == 8
    assert found.mlp.form == found.moe.form == found.moe.shared.form == CLAMPED
    kinds = {
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "index_block_size": 32,
        "index_topk_blocks": 8,
        "index_local_blocks": 2,
        "index_n_heads": 2,
        "index_head_dim": 24,
    }
    same = read("minimax_m3_vl_text", **fields, **published, **kinds)
    assert same.layers == found.layers
    for given, what in (
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types .* may hold full_attention and minimax_m3_sparse"),
        ({**kinds, "index_block_size": 48}, "index_block_size .* is 48; it must be one of 16, 32"),
        ({**kinds, "index_n_heads": 4}, "index_n_heads .* is 4; each of the 2 KV heads has one"),
        ({**kinds, "index_local_blocks": 9}, "index_local_blocks .* is 9; at most 8"),
        ({**kinds, "index_local_blocks": 0}, "index_local_blocks .* at least 1"),
        ({**kinds, "index_head_dim": 25}, "index_head_dim .* must be even"),
        ({**kinds, "index_head_dim": 8}, "index_head_dim .* is 8; 16 dimensions"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types .* has 3 entries"),
        ({"sparse_attention_config": {**sparse, "sparse_disable_index_value": [0] * 4}}, "sparse_disable_index_value"),
        (
            {"sparse_attention_config": {**sparse, "sparse_disable_index_value": [0, 1]}},
            "has 2 entries; the model has 4",
        ),
        ({"sparse_attention_config": {**sparse, "sparse_init_block": 1}}, "sparse_init_block .* is 1; only 0 is run"),
        (
            {"sparse_attention_config": {**sparse, "sparse_score_type": "mean"}},
            "sparse_score_type .* only 'max' is run",
        ),
        ({"sparse_attention_config": {**sparse, "use_sparse_attention": False}}, "use_sparse_attention .* only True"),
        ({"sparse_attention_config": {**sparse, "sparse_sinks": 4}}, "sparse_sinks 4, which is not known here"),
        ({"swiglu_limit": 10.0}, "swiglu_limit"),
        ({"moe_layer_freq": [0, 1, 1, 2]}, "moe_layer_freq"),
    ):
        with pytest.raises(LoadError, match=what):
            read("minimax_m3_vl_text", **{**fields, **given})
    with pytest.raises(LoadError, match="it changes the mathematics"):
        read("minimax_m2", sparse_attention_config=sparse)


def test_numbers_for_each_layer_and_those_that_draft() -> None:
    """Step 3.7 as it is published: lists that go on behind its layers, heads of windowed layers in an object."""
    usual = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_sliding_attention_heads": 6,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "swiglu_limits": [None, None, None, 7.0],
        "swiglu_limits_shared": [None, None, 16.0, 16.0], "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    }  # fmt: skip
    found = read("step3p5", **usual)
    assert [one.attention.n_heads for one in found.layers] == [4, 6, 4, 6]
    assert [one.attention.rope.rotary_dim for one in found.layers] == [8, 16, 8, 16]
    assert [one.mlp.limit for one in found.layers] == [None, None, None, 7.0]
    assert [one.mlp.shared_limit for one in found.layers[1:]] == [None, 16.0, 16.0]
    assert read("step3p5", **{**usual, "swiglu_limits_shared": [5.0, None, None, None]}).mlp.limit == 5.0
    published = {
        **{key: value for key, value in usual.items() if key not in ("num_sliding_attention_heads", "mlp_layer_types")},
        "num_nextn_predict_layers": 1, "layer_types": [*usual["layer_types"], "sliding_attention"],
        "moe_layers_enum": "1,2,3", "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0], "rope_parameters": None,
        "swiglu_limits_shared": [0.0, 0.0, 16.0, 16.0, 0.0], "rope_theta": [5e6, 1e4, 5e6, 1e4, 1e4],
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0, 1.0], "yarn_only_types": ["full_attention"],
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6,
                                    "num_attention_groups": 2, "head_dim": 16},
    }  # fmt: skip
    assert read("step3p5", **published).layers == found.layers
    blank = {**published, "moe_layers_enum": published["moe_layers_enum"] + ","}
    assert read("step3p5", **blank).layers == found.layers  # transformers skips what is blank, too
    by_layer = {"per_layer_config": {str(i): {"num_attention_heads": 6} for i in (1, 3)}}
    written = {key: value for key, value in usual.items() if key != "num_sliding_attention_heads"}
    assert read("step3p5", **written, **by_layer).layers == found.layers
    stretched = read("step3p5", **published, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert [one.attention.rope.factor for one in stretched.layers[:2]] == [2.0, 1.0]
    for given, what in (
        ({"attention_other_setting": {"num_attention_groups": 4}}, "num_attention_groups .* is 4"),
        ({"per_layer_config": {"1": {"num_attention_heads": 6}}}, "per_layer_config"),
        ({"per_layer_config": {"1": 6, "3": 6}}, "per_layer_config"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"rope_theta": [5e6, 1e4, 5e6, 2e4, 1e4]}, "rope_theta .* the same for all sliding_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "an object for each kind"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum"),
        ({"swiglu_limits": [7.0]}, "swiglu_limits .* must hold 4 numbers"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
    ):
        with pytest.raises(LoadError, match=what):
            read("step3p5", **{**published, **given})


def test_laguna_says_gates_heads_and_dense_layers_in_several_ways() -> None:
    """XS.2, XS 2.1 and M.1 as they are published; oracle: what the class makes of the same keys (`test_families`)."""
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    usual = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
        "head_dim": 16, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_attention_heads_per_layer": [4, 6, 2, 4], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "gating": True, "partial_rotary_factor": 0.5, "rope_parameters": rope,
    }  # fmt: skip
    found = read("laguna", **usual)
    assert [one.attention.n_heads for one in found.layers] == [4, 6, 2, 4]
    assert [one.attention.rope.rotary_dim for one in found.layers] == [8, 16, 8, 16]
    assert [one.attention.gate_width for one in found.layers] == [4, 6, 2, 4]
    newer = {
        **usual, "gating": "per-head", "gating_types": ["per_head"] * 4, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        "norm_topk_prob": True, "qkv_bias": None, "swa_attention_sink_enabled": False,
        "moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False,
        "rope_parameters": {**rope, "original_max_position_embeddings": 4096},
    }  # fmt: skip
    assert read("laguna", **newer).layers == found.layers
    assert read("laguna", **newer, rope_theta=3.0).layers == found.layers  # which no class of Laguna reads
    windowless = {
        key: value for key, value in usual.items() if key not in ("layer_types", "num_attention_heads_per_layer")
    }
    channels = read("laguna", **{**windowless, "gating": "per-element", "sliding_window": 0,
                                 "rope_parameters": {"full_attention": rope["full_attention"]}})  # fmt: skip
    assert {(one.attention.window, one.attention.gate_width) for one in channels.layers} == {(None, 64)}
    assert read("laguna", **{**usual, "moe_router_logit_softcapping": 30.0}).moe.softcap == 30.0
    for given, what in (
        ({"gating": False}, "gating in .* is False"),
        ({"gating": "sigmoid"}, "gating in .* is 'sigmoid'"),
        ({"gating_types": ["per_head"] * 3}, "gates of 4 layers"),
        ({"gating_types": ["per_head"] * 3 + ["per_element"]}, "other gates than gating"),
        ({"mlp_only_layers": [0, 1]}, r"mlp_only_layers in .* is \[0, 1\]"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "no object for full_attention layers"),
        ({"rope_parameters": {**rope, "sliding_attention": {"rope_type": "default"}}}, "rope_theta is missing"),
        ({"num_attention_heads_per_layer": [4, 4]}, "num_attention_heads_per_layer .* must hold 4 numbers from 1 on"),
        ({"num_attention_heads_per_layer": [4, 3, 4, 4]}, "3 query heads cannot share 2"),
        ({"num_attention_heads_per_layer": [4, 0, 4, 4]}, "must hold 4 numbers from 1 on"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ({"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 0}, "sliding_window"),
    ):
        with pytest.raises(LoadError, match=what):
            read("laguna", **{**usual, **given})


def test_gates_of_a_squared_relu_are_bitnet_s_alone() -> None:
    """Experts and sparse gates have other ways to join gate and up, which have no such form."""
    assert read("bitnet").mlp.form is SQUARED
    assert read("bitnet", hidden_act="silu").mlp.form is None
    assert read("arcee").mlp.form is None  # which has the curve, and no gate
    for family, more in (("llama", {}), ("mixtral", {"num_local_experts": 4})):
        with pytest.raises(LoadError, match="'relu2'; no op of the engine computes it"):
            read(family, **{"hidden_act": "relu2", **more})


def test_gpt_neo_s_layers_are_runs_of_names() -> None:
    """Each with how often it comes; what a file has beside them says the same, or it is not clear what is meant."""
    usual = {"attention_types": [[["global"], 1], [["local", "global"], 1], [["local"], 1]], "window_size": 7,
             "num_key_value_heads": None, "head_dim": None}  # fmt: skip
    assert read("gpt_neo", **usual).windows == (None, 7, None, 7)
    named = ["global", "local", "global", "local"]
    assert read("gpt_neo", **usual, attention_layers=named).windows == (None, 7, None, 7)
    assert {layer.attention.scale for layer in read("gpt_neo", **usual).layers} == {1.0}
    for given, what in (
        ({"attention_layers": named[::-1]}, "attention_layers and attention_types .* say different things"),
        ({"attention_types": [[["global"], 3]]}, "layer_types in .* has 3 entries; the model has 4 layers"),
        ({"attention_types": [[["global", "sparse"], 2]]}, "a list of global and local and how often it comes"),
        ({"attention_types": [[["global"], 4_000_000_000]]}, "how often it comes are expected"),
        ({"attention_types": [["global", 4]]}, "a list of global and local"),
        ({"attention_types": "global"}, "attention_types in .* has 'global'"),
    ):
        with pytest.raises(LoadError, match=what):
            read("gpt_neo", **{**usual, **given})


def test_aria_gates_all_experts_by_silu() -> None:
    """Its class computes experts by SiLU whatever `hidden_act` says, and shared ones by that; biases lie in none here."""
    with pytest.raises(
        LoadError, match=r"hidden_act in config\.json is 'gelu'; of aria_text, only 'silu' is supported"
    ):
        read("aria_text", hidden_act="gelu")
    with pytest.raises(LoadError, match="mlp_bias"):
        read("aria_text", mlp_bias=True)


def test_compass_turns_each_kind_of_layers_in_its_own_way_or_not() -> None:
    """What published files have beside the kinds is looked at by nobody; a kind that is not named is refused."""
    kinds = {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 50_000.0}}
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    spec = read("cohere_compass_text", **layers, rope_parameters={**kinds, "rope_theta": 1e4, "rope_type": "default"})
    ropes = [layer.attention.rope for layer in spec.layers]
    assert [rope and rope.theta for rope in ropes] == [50_000.0, None] * 2
    assert spec.windows == (4096, None) * 2
    spec = read(
        "cohere_compass_text", num_hidden_layers=3, rope_parameters=kinds
    )  # without layer_types all see everything
    assert [layer.attention.rope for layer in spec.layers] == [None] * 3
    assert spec.windows == (None,) * 3
    for fields, said in (
        ({}, "neither an object nor null for full_attention"),
        ({**layers, "rope_parameters": {"full_attention": None}}, "neither an object nor null for sliding_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "neither an object nor null"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_theta is missing from full_attention",
        ),
        ({"rope_parameters": {**kinds, "factor": 2.0}}, "factor in rope_parameters"),
        ({"rope_parameters": kinds, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling in"),
        ({**layers, "rope_parameters": kinds, "sliding_window": None}, "sliding_window is missing"),
        ({"rope_parameters": kinds, "is_causal": False}, "is_causal"),
        ({"rope_parameters": kinds, "transformer_block_type": "sequential"}, "transformer_block_type"),
    ):
        with pytest.raises(LoadError, match=said):
            read("cohere_compass_text", **fields)


@pytest.mark.parametrize("name", ["phi3", "phi4_multimodal"])
def test_phi_4_says_what_it_does_not_have(name: str) -> None:
    """Keys of its own files, in the one setting that they are published in; Phi-4-mini has them, too."""
    read(name, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False, attention_bias=False)
    for key, value in (
        ("full_attn_mod", 2),
        ("interpolate_factor", 4),
        ("lm_head_bias", True),
        ("attention_bias", True),
    ):
        with pytest.raises(LoadError, match=f"{key} in config.*{name}, only"):
            read(name, **{key: value})


def test_words_of_one_family_shut_no_other_out() -> None:
    """Files made of Phi-4-mini by the name of a Llama keep its keys, and others name their norms."""
    assert read("llama", full_attn_mod=1, interpolate_factor=1, norm_type="rms_norm", rope_style="split") == read(
        "llama"
    )


def test_what_has_no_op_is_refused_by_its_reason() -> None:
    """dots3-note attends to latents within windows and norms the part of a key that turns; ZAYA convolves queries and keys."""
    for named, kind, said in (
        ("Dots3NoteForConditionalGeneration", "dots3_note", "latent attention within windows"),
        ("Dots3NoteForCausalLM", "dots3_note_text", "rotary keys that are normed"),
        ("ZayaForCausalLM", "zaya", "convolved over tokens"),
    ):
        with pytest.raises(UnsupportedModel, match=f"{named}.*{said}"):
            read_model(HfConfig({**SMALL, "architectures": [named], "model_type": kind}))
