"""A config.json becomes a model, or is refused by the name of what is wrong; the same for engine and planner."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from diptych.cost.parameters import parameter_count
from diptych.cost.setup import find_model
from diptych.cost.tables import model_spec
from diptych.ground.errors import ConfigError, EngineError, LoadError, UnsupportedModel
from diptych.models.config import MAX_JSON_DEPTH, HfConfig, read_json
from diptych.models.families.table import BY_MODEL_TYPE, SUPPORTED
from diptych.models.gguf.architectures import ARCHITECTURES
from diptych.models.gguf.checkpoint import load_gguf_spec
from diptych.models.mlp import Scores
from diptych.models.positions import QueryScale
from diptych.models.read import family_of, load_model_file, read_model
from diptych.models.refused import IN_GGUF, MISSING, reason_for
from diptych.models.spec import ModelSpec, Norms

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 256,
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
LONGROPE = {"type": "yarn", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def read(model_type: str, context: int | None = None, longrope: str = "auto", **fields: Any) -> ModelSpec:
    config = {**SMALL, "model_type": model_type, **fields}
    return read_model(HfConfig(config), context, longrope=longrope)


def test_a_full_size_config_equals_the_table() -> None:
    """DeepSeek-V3's published keys give the table's model, with nothing left at a default."""
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "topk_method": "noaux_tc", "max_position_embeddings": 163840,
        "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "ep_size": 1, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16", "aux_loss_alpha": 0.001,
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    }  # fmt: skip
    found, table = read_model(HfConfig(config)), model_spec("deepseek-v3")
    assert (found.moe, found.attention.mla, found.windows) == (table.moe, table.attention.mla, table.windows)
    assert parameter_count(found) == table.published_parameters


def test_windows_come_from_the_config() -> None:
    """gemma3 declares a pattern, gpt-oss lists layer types, qwen2 declares a window that is switched off."""
    assert read("gemma3_text", num_hidden_layers=7, sliding_window=32).windows == (32,) * 5 + (None, 32)
    types = ["full_attention", "sliding_attention"] * 2
    oss = read("gpt_oss", sliding_window=8, num_local_experts=2, num_experts_per_tok=1, layer_types=types)
    assert oss.windows == (None, 8, None, 8)
    assert read("qwen2", sliding_window=32, use_sliding_window=False).windows == (None,) * 4


def test_multimodal_wrappers_give_their_language_part() -> None:
    """Gemma-3 4B and larger wrap the text model in text_config."""
    config = {"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text"}, "vision_config": {"x": 1}}
    assert read_model(HfConfig(config)).layers[0].norms.count == 4


@pytest.mark.parametrize(
    "kind",
    ["squeezebert", "rwkv", "jetmoe"],
)  # fmt: skip
def test_what_is_on_no_list_is_refused(kind: str) -> None:
    """Hybrids and encoders were priced as dense decoders: a wrong price is worse than none."""
    with pytest.raises(UnsupportedModel, match=kind):
        read(kind)


@pytest.mark.parametrize(("kind", "named"), sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))
def test_every_kind_that_transformers_knows_is_read_or_refused_by_name(kind: str, named: str) -> None:
    """By its type alone, and as its files are written: no kind may pass for another one's."""
    config = HfConfig({**SMALL, "model_type": kind, "architectures": [named]})
    for given in (config, HfConfig({**SMALL, "model_type": kind})):
        if kind in BY_MODEL_TYPE:
            assert kind in family_of(given).model_types
        else:
            with pytest.raises(UnsupportedModel, match=f"{named}|{kind}|text_config"):
                family_of(given)


def test_every_model_beside_pictures_and_sound_is_read_or_there_is_a_reason() -> None:
    """One that is on no list is refused without a word of what is missing, also where nothing is (Omnilingual ASR)."""
    named = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    assert not [
        kind for kind, name in named.items() if name not in SUPPORTED and not (reason_for(kind) or reason_for(name))
    ]


def test_a_key_that_says_what_another_says_is_no_change() -> None:
    """Pixtral Large has its epsilon by two names; what only looks alike (chunks beside windows) is refused still."""
    assert read("mistral", rms_norm_eps=1e-6, norm_eps=1e-6).layers == read("mistral", rms_norm_eps=1e-6).layers
    for kind, fields in (
        ("mistral", {"rms_norm_eps": 1e-6, "norm_eps": 1e-5}),
        ("mistral", {"sliding_window": 32, "attention_chunk_size": 32}),
        ("cohere", {"logit_scale": 0.0625, "logits_scaling": 0.0625}),
    ):
        with pytest.raises(LoadError, match="it changes the mathematics"):
            read(kind, **fields)


def test_reasons_are_of_what_is_refused_and_stand_in_the_docs() -> None:
    """A reason that outlives its refusal, or a family that the page does not name, misleads."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert not [name for name in (*SUPPORTED, *ARCHITECTURES) if f"`{name}`" not in page]
    for reason, kinds in MISSING.items():
        assert reason in page
        assert not set(kinds) & set(BY_MODEL_TYPE)
        assert set(kinds) <= set(transformers.CONFIG_MAPPING.keys())
    with pytest.raises(UnsupportedModel, match=r"not supported \(a mask that is made of the values"):
        read("doge", architectures=["DogeForCausalLM"])


def test_a_gguf_file_of_a_refused_kind_is_told_why_too(tmp_path: Path) -> None:
    """Such a file was sent to its Hugging Face checkpoint, which is refused as well."""
    names = set(gguf.MODEL_ARCH_NAMES.values())
    assert not [kind for kind in IN_GGUF.values() if reason_for(kind) is None]
    assert set(IN_GGUF) - names <= {"deepseek32"}  # newer than the package
    for name in ("rwkv6", "rwkv7"):
        out = gguf.GGUFWriter(str(tmp_path / name), name)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.close()
        with pytest.raises(UnsupportedModel, match=rf"'{name}' .* is not supported \(") as refused:
            load_gguf_spec(tmp_path / name)
        assert refused.value.hint is None


def test_a_wrapper_is_the_decoder_that_it_names() -> None:
    """Mistral Small 3 and Ministral 3 come in the same wrapper, around decoders of two families."""
    for kind in ("mistral", "ministral3"):
        wrapped = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
                   "text_config": {**SMALL, "model_type": kind}, "vision_config": {"x": 1}}  # fmt: skip
        assert read_model(HfConfig(wrapped)).layers == read(kind).layers
    with pytest.raises(UnsupportedModel, match="Mistral3"):
        read("mistral3", architectures=["Mistral3ForConditionalGeneration"], text_config={"model_type": "qwen9"})


def test_queries_are_scaled_by_position_to_the_whole_length() -> None:
    """Ministral 3 was run up to its original length only, 16,384 tokens of 262,144."""
    assert read("ministral3").max_context_tokens == 262_144
    assert {layer.attention.query_scale for layer in read("ministral3").layers} == {
        QueryScale(slope=0.1, tokens=16_384)
    }


@pytest.mark.parametrize(
    ("section", "named"),
    [({"alibi": False}, "alibi in"), ({"qk_ln": True}, "qk_ln in"), ({"attn_type": "multiquery_attention"}, "attn_type in"),
     ({"alibi_bias_max": 0}, "alibi_bias_max in"), (3, "attn_config in .* must be an object")],
)  # fmt: skip
def test_what_a_section_of_mpt_says_is_honoured_or_refused(section: object, named: str) -> None:
    mpt = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256}
    said = read_model(HfConfig({**mpt, "attn_config": {"alibi_bias_max": 16, "clip_qkv": 6.0}})).attention
    assert (said.slopes[-1], said.clip) == (2.0**-16, 6.0)
    with pytest.raises(LoadError, match=named):
        read_model(HfConfig({**mpt, "attn_config": section}))


def test_an_architecture_under_another_model_type_is_refused() -> None:
    """transformers takes the class, and with it every default, from model_type."""
    with pytest.raises(UnsupportedModel, match="ministral"):
        read("ministral", architectures=["MistralForCausalLM"])
    for name in ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"):  # as transformers builds it
        assert read("internlm3", architectures=[name]).family == "internlm3"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("llama", {"hidden_size": None}, "hidden_size in config.json is None"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers in config.json is 0"),
        ("llama", {"vocab_size": "many"}, "vocab_size in config.json is 'many'"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ("llama", {"head_dim": 10**9}, "head_dim in config.json is 1000000000; it must be at most 4096"),
        ("llama", {"vocab_size": 10**12}, "vocab_size in config.json is 1000000000000; it must be at most"),
        ("llama", {"num_hidden_layers": 10**7}, "it must be at most 2048"),
        ("llama", {"max_position_embeddings": 2**40}, "it must be at most"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
        ("llama", {"hidden_act": "gelu"}, "no op of the engine"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "turns whole heads"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "warp": 3}}, "warp"),
        ("llama", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "factor in .* is None"),
        ("llama", {"num_local_experts": 4}, "num_local_experts"),
        ("llama", {"sliding_window": 4096}, "sliding_window"),
        ("llama", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok in config.json is 5"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "or switched off; layer_types names"),
        ("gemma2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window is missing"),
        ("lara_mini", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window is missing"),
        ("mellum", {"mlp_layer_types": [["sparse"]] * 4, "layer_types": ["full_attention"] * 4}, "mlp_layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("sarvam_moe", {"score_function": "softmax"}, "score_function in config.json is 'softmax'"),
        ("apertus1p5_text", {"output_vocab_size": 300_000}, "output_vocab_size in config.json is 300000; at most 256 are"),
        ("apertus1p5_text", {"output_vocab_size": 100, "tie_word_embeddings": True}, "a tied head has all of them"),
        ("gemma", {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"}, "hidden_act .* is 'relu'; no op"),
        ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [2.0]}, "max_position_embeddings": 8192}, "short_factor"),
        *(("bamba", {"time_step_limit": value}, "time_step_limit in config.json is") for value in (
            3, True, "x", [], [1.0], [2.0, 1.0], [-1.0, 1.0], [float("nan")] * 2, [0, 10**400], [{"a": 1}, 2])),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset in config.json is 8; it must be at most 7"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period in config.json is 0"),
        ("jamba", {"expert_layer_offset": 2}, "expert_layer_offset in config.json is 2; it must be at most 1"),
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias in config.json is True"),
        ("jamba", {"mamba_dt_rank": "some"}, "mamba_dt_rank in config.json is 'some'"),
        ("jamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act in config.json is 'gelu_pytorch_tanh'; layers with a"),
        ("jamba", {"sliding_window": 8}, "sliding_window in config.json is 8"),
        ("bamba", {"mamba_n_groups": 2}, "mamba_n_groups in config.json is 2"),
        ("bamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act in config.json is 'gelu_pytorch_tanh'; layers with a"),
        *(("nemotron_h", {"hybrid_override_pattern": pattern, "num_hidden_layers": None}, words) for pattern, words in (
            ("-M*", "block 0 in config.json is an MLP with no attention or state right before it"),
            ("M-E*", "block 2 in config.json is an MLP"), ("M|*-", "hybrid_override_pattern in config.json is 'M|\\*-'"),
            (["M", "*"], "hybrid_override_pattern"), ("", "names 0 blocks"), ("M" * 4096, "names 4096 blocks"))),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "names 3 blocks; num_hidden_layers is 4"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", 3]}, "layers_block_type in config.json is"),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "use_bias": True}, "use_bias"),
        ("nemotron_h", {"num_hidden_layers": 52}, "the default of layers_block_type .* names 4 blocks"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts in config.json is 2"),
        ("nemotron_h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act in config.json is 'relu'"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate in config.json is"),
        ("falcon_h1", {"mamba_d_ssm": 100, "mamba_n_heads": 3}, "mamba_d_ssm is 100, for 3 heads"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers in config.json has 2 numbers; 5 are needed"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers in config.json is 0.0"),
        ("falcon_h1", {"mlp_bias": True}, "mlp_bias in config.json is True"),
        ("codegen", {"num_attention_heads": 2, "num_key_value_heads": None, "rotary_dim": 8}, "is 2; .* codegen lie in 4"),
        *(("kimi_linear", {"linear_attn_config": given}, words) for given, words in (
            (None, "must hold the numbers from 1 to 4"), ({"full_attn_layers": [1, 2, 3, 4], "kda_layers": [4]}, "from 1 to 4"),
            ({"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 1}, "head_dim in .* is 1"),
            ({"full_attn_layers": [4], "kda_layers": [1, 2, 3], "gate_lower_bound": -5.0}, "gate_lower_bound in .* is -5.0"))),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope in config.json is False"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e-9}, "intermediate_size in block_auto_adjust_ff_dim of .* is 0"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e29}, "it must be at most 2097152"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_configs_are_refused_by_name(kind: str, fields: dict[str, Any], words: str) -> None:
    """Sizes beyond any model ended in out-of-memory; keys that change the mathematics were ignored."""
    if "long_factor" in str(fields):
        fields, words = {**fields, "original_max_position_embeddings": 64}, "long_factor"
    with pytest.raises(LoadError, match=words):
        read(kind, **STATES.get(kind, {}) | fields)


@pytest.mark.parametrize(
    ("given", "limits"),
    [(None, (0.0, math.inf)), ([0, math.inf], (0.0, math.inf)), ([0.5, {"__float__": "Infinity"}], (0.5, math.inf)),
     ([0.001, 0.1], (0.001, 0.1))],
)  # fmt: skip
def test_the_steps_of_mamba_2_are_held_as_the_config_says(given: Any, limits: tuple[float, float]) -> None:
    """JSON has no word for infinity; transformers writes an object."""
    state = read("bamba", **STATES["bamba"], time_step_limit=given).layers[0].attention.state
    assert state is not None
    assert state.step_limits == limits


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("bamba", {**STATES["bamba"], "attn_layer_indices": []}), ("nemotron_h", {"hybrid_override_pattern": "M-M-"})],
)
def test_no_layer_has_to_attend(kind: str, fields: dict[str, Any]) -> None:
    """Such models were refused, as were those whose class has no attention at all."""
    spec = read(kind, **fields)
    assert (spec.kv_layers, spec.caches) == ((), ())
    assert spec.state_layers == tuple(range(spec.n_layers))


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [({"use_bias": True}, "use_bias in config.json is True"), ({"hidden_act": "gelu_pytorch_tanh"}, "tanh'; layers with"),
     ({"state_size": 0}, "is 0"), ({"sliding_window": 4}, "sliding_window in config.json is 4")],
)  # fmt: skip
def test_what_states_alone_do_not_have_is_refused(kind: str, fields: dict[str, Any], words: str) -> None:
    """Biases of the projections around a state, gates of another kind, and what only attention could have."""
    with pytest.raises(LoadError, match=words):
        read_model(HfConfig({"model_type": kind, "num_hidden_layers": 2, **fields}, path="config.json"))


def test_a_width_that_is_said_is_that_of_the_channels() -> None:
    """transformers takes intermediate_size before what expand would give."""
    for fields, width in (({}, 1536), ({"intermediate_size": 1600}, 1600), ({"expand": 3}, 2304)):
        spec = read_model(HfConfig({"model_type": "mamba", **fields}))
        state = spec.layers[0].attention.state
        assert state is not None
        assert (state.width, state.rank, spec.n_layers) == (width, 48, 32)


def test_blocks_of_their_own_are_layers_of_both() -> None:
    """By letters, by names, and by the names that older versions of transformers wrote."""
    ways = [
        {"hybrid_override_pattern": "M-M*-"},
        {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]},
        {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
    ]
    specs = [read("nemotron_h", **way, num_hidden_layers=5, mamba_num_heads=8, mamba_head_dim=16) for way in ways]
    assert specs[0] == specs[1] == specs[2]
    spec = specs[0]
    assert spec.blocks == ((0, 1), (2, None), (3, 4))
    assert (spec.n_layers, spec.n_blocks, spec.state_layers, spec.kv_layers) == (3, 5, (0, 1), (2,))
    assert [(layer.mlp is None, layer.norms) for layer in spec.layers] == [
        (False, Norms.BEFORE), (True, Norms.ALONE), (False, Norms.BEFORE)]  # fmt: skip


def test_published_files_say_more_than_is_read() -> None:
    """Nemotron 3 Nano, K-EXAONE and OLMo Hybrid were refused for keys that their own classes do not read."""
    blocks = {"hybrid_override_pattern": "M-*-", "rope_theta": 10_000, "partial_rotary_factor": 1.0, "norm_eps": 1e-5}
    assert read("nemotron_h", num_hidden_layers=4, **blocks).layers[1].attention.rope is None
    named = {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp"], "num_hidden_layers": 4}
    dense = read("nemotron_h", n_routed_experts=0, intermediate_size=96, **named)
    assert [layer.mlp and layer.mlp.ffn for layer in dense.layers] == [96, 96]
    fields = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_experts": 4, "num_experts_per_tok": 2}
    assert read("exaone_moe", architectures=["ExaoneMoEForCausalLM"], **fields).moe is not None
    layers = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
    for given in (
        {"rope_theta": None},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_parameters": {"rope_theta": None}},
    ):
        assert read("olmo_hybrid", **layers, **given).layers[1].attention.rope is None
    assert read("olmo_hybrid", **layers).layers[1].attention.rope is not None
    types = ["sliding_attention"] * 3 + ["full_attention"]
    for switch in (True, False):  # of no meaning here
        for kind in ("mellum", "flint"):
            found = read(kind, layer_types=types, sliding_window=8, use_sliding_window=switch, num_experts=8)
            assert found.windows == (8, 8, 8, None)


def test_command_r7b_and_a_as_they_were_published(caplog: pytest.LogCaptureFixture) -> None:
    """Their files have what an older code read; Granite 4's key for positions made one of it a reason to refuse them."""
    older = {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "order_of_interleaved_layers": "local_attn_first",
             "use_gated_activation": True, "use_parallel_block": True, "use_embedding_sharing": True, "layer_switch": 4,
             "use_parallel_embedding": False, "use_qk_norm": False, "cache_implementation": "hybrid"}  # fmt: skip
    assert read("cohere2", **older).layers == read("cohere2").layers
    assert not caplog.text
    for key, value in (("position_embedding_type", "alibi"), ("rotary_pct", 0.5), ("use_parallel_block", False)):
        with pytest.raises(LoadError, match=key):
            read("cohere2", **{**older, key: value})
    assert read("granite", position_embedding_type="rope").layers == read("granite").layers
    with pytest.raises(LoadError, match="position_embedding_type"):
        read("granite", position_embedding_type="nope")


def test_command_a_plus_by_each_of_its_keys() -> None:
    """Older files say how many layers are dense, newer ones which; what is added is a mean or a sum, norms are of two kinds."""
    fields = {"num_hidden_layers": 6, "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 2,
              "num_attention_heads": 4, "intermediate_size": 40, "sliding_window": 8, "head_dim": 16,
              "prefix_dense_intermediate_size": 80}  # fmt: skip
    found = read("cohere2_moe", **fields)
    assert found.windows == (None, None, 8, 8, 8, None), "each of the dense, every fourth behind them"
    assert [one.attention.rope is not None for one in found.layers] == [True] * 5 + [False]
    assert [one.mlp.ffn if i < 2 else one.mlp.expert_ffn for i, one in enumerate(found.layers)] == [80] * 2 + [40] * 4
    assert [one.scales.mlp_out for one in found.layers] == [1.0] * 2 + [0.5] * 4
    assert found.centres_norms
    assert found.moe.renormalises
    kinds = {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4, "first_k_dense_replace": 0,
             "layer_types": ["full_attention" if one is None else "sliding_attention" for one in found.windows]}  # fmt: skip
    assert read("cohere2_moe", **{**fields, **kinds}).layers == found.layers
    patterned = read("cohere2_moe", **fields, prefix_dense_sliding_window_pattern=2)
    assert patterned.windows[:2] == (8, None)
    assert patterned.layers[1].attention.rope is None
    others = {"rms_norm_eps": 1e-6, "expert_selection_fn": "sigmoid", "norm_topk_prob": False,
              "shared_expert_combination_strategy": "sum"}  # fmt: skip
    other = read("cohere2_moe", **{**fields, **others})
    assert not other.centres_norms
    assert other.norm_eps == 1e-6
    assert (other.moe.scores, other.moe.renormalises) == (Scores.SIGMOID, False)
    assert {one.scales.mlp_out for one in other.layers} == {1.0}
    assert read("cohere2_moe", **{**fields, "prefix_dense_intermediate_size": None}).layers[0].mlp.ffn == 40
    for key in ("expert_selection_fn", "shared_expert_combination_strategy"):
        with pytest.raises(LoadError, match=rf"{key} .* is 'best'"):
            read("cohere2_moe", **fields, **{key: "best"})


def test_published_files_repeat_and_leave_over() -> None:
    """StarCoder 2 3B, Hunyuan 7B and A13B, dots.llm1: what an ancestor read, or other classes of the same makers."""
    ancestor = {"activation_function": "gelu", "scale_attn_weights": True, "attention_softmax_in_fp32": True}
    assert read("starcoder2", **ancestor).layers == read("starcoder2").layers
    assert read("llama", activation="swiglu").layers == read("llama").layers, "Falcon 3"
    bloom = {"model_type": "bloom", "n_layer": 2}
    in_fp32 = read_model(HfConfig({**bloom, "attention_softmax_in_fp32": True}))
    assert in_fp32.layers == read_model(HfConfig(bloom)).layers
    with pytest.raises(LoadError, match="activation"):
        read("llama", activation="geglu")
    head = {"attention_head_dim": 16, "use_qk_norm": True, "use_cla": False}
    dense = {**head, "num_experts": 1, "num_shared_expert": 1}
    assert read("hunyuan_v1_dense", **dense).layers == read("hunyuan_v1_dense").layers
    with pytest.raises(LoadError, match=r"num_experts .* is 8"):
        read("hunyuan_v1_dense", **{**dense, "num_experts": 8})
    experts = {"num_experts": 4, "moe_topk": [2] * 4, "moe_intermediate_size": [32] * 4, "num_shared_expert": [1] * 4}
    latent = {"use_mla": False, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert read("hunyuan_v1_moe", **experts, **head, **latent).layers == read("hunyuan_v1_moe", **experts).layers
    with pytest.raises(LoadError, match="use_mla"):
        read("hunyuan_v1_moe", **experts, **{**latent, "use_mla": True})
    chosen = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    named = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    assert read("dots1", **chosen, **named).layers == read("dots1", **chosen).layers
    with pytest.raises(LoadError, match="scoring_func"):
        read("dots1", **chosen, scoring_func="softmax")


def test_keys_at_their_usual_value_are_no_obstacle() -> None:
    """Real files hold many keys that say: as usual."""
    fields = {"partial_rotary_factor": 1.0, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
              "pretraining_tp": 1, "attention_dropout": 0.1, "eos_token_id": [1, 2], "_name_or_path": "x",
              "rope_scaling": None, "num_experts": 0, "layer_types": ["full_attention"] * 4}  # fmt: skip
    assert read("llama", **fields).layers == read("llama").layers
    types = ["sliding_attention"] * 4
    assert read("mistral", layer_types=types).layers == read("mistral").layers, "they say what the class does anyway"


def test_unknown_keys_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """transformers never looks at a key its class does not have, so neither refuses; but nothing is ignored in silence."""
    with caplog.at_level(logging.WARNING, logger="diptych.models"):
        read("llama", my_trainer_version="3", off=False)
    assert "my_trainer_version" in caplog.text
    assert "off" not in caplog.text.replace("config keys", "")


def test_class_defaults_that_were_read_wrong() -> None:
    """Mixtral turned by 1e4 where its class says 1e6; Cohere's head was counted twice."""
    rope = read("mixtral").attention.rope
    assert rope is not None
    assert rope.theta == 1e6
    assert read("cohere").is_tied


def test_phi3_calls_longrope_yarn() -> None:
    """Its first checkpoints wrote "yarn" for what became longrope; the true yarn gives other frequencies."""
    fields = {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 256}
    kinds = {context: read("phi3", context, **fields).attention.rope for context in (64, 256)}
    assert [(r.kind, r.divisors_name) for r in kinds.values() if r] == [
        ("longrope", "short_factor"), ("longrope", "long_factor")]  # fmt: skip
    asked = read("phi3", 256, "short", **fields).attention.rope
    assert asked is not None
    assert asked.divisors == (1.0,) * 8


def test_windowed_layers_keep_a_base_of_their_own() -> None:
    """Where the newer layout leaves bases out they are the class's, 1e4 within windows; 1e6 was taken for both."""
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    spec = read("gemma3_text", num_hidden_layers=6, sliding_window=8, rope_parameters=ropes)
    bases = {layer.attention.window: layer.attention.rope.theta for layer in spec.layers if layer.attention.rope}
    theirs = transformers.Gemma3TextConfig(rope_parameters=ropes).rope_parameters
    assert bases == {8: theirs["sliding_attention"]["rope_theta"], None: theirs["full_attention"]["rope_theta"]}
    assert bases == {8: 1e4, None: 1e6}


def test_of_two_layouts_the_older_counts() -> None:
    """transformers takes rope_scaling where a file has both; the newer was taken here."""
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    theirs = transformers.LlamaConfig(**copy.deepcopy(both)).rope_parameters
    rope = read("llama", **both).attention.rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == (theirs["rope_type"], theirs["factor"], theirs["rope_theta"])


def test_longrope_is_not_asked_of_a_model_without() -> None:
    """An option is honoured or refused."""
    with pytest.raises(ConfigError, match="one set of factors"):
        read("llama", None, "long")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers in config.json is 4; at most 3"),
        ({"num_kv_shared_layers": 3}, r"layer 3 .* keys and values of a windowed layer before layer 1"),
        ({"altup_num_inputs": 9}, "altup_num_inputs .* is 9; at most 8"),
        ({"altup_active_idx": 4}, "altup_active_idx .* is 4; at most 3"),
        ({"activation_sparsity_pattern": [0.5]}, "has 1 entries; the model has 4"),
        ({"activation_sparsity_pattern": [0.5, 1.0, 0, 0]}, "has 1.0; it must hold numbers from 0 to below 1"),
        ({"intermediate_size": [8, 8]}, "intermediate_size .* has 2 entries"),
        ({"intermediate_size": [8, 8, 0, 8]}, "intermediate_size .* is 0"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar .* is 64"),
    ],
)
def test_what_gemma_3n_has_beside_others_is_checked(fields: dict[str, Any], said: str) -> None:
    """A layer that shares nothing, a stream that is not there."""
    kinds = ["full_attention", "full_attention", "full_attention", "sliding_attention"]
    with pytest.raises(LoadError, match=said):
        read("gemma3n_text", **{"num_kv_shared_layers": 0, "layer_types": kinds, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "must say the same of each layer .* those are 1, 3"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}}, "must say the same of each layer"),
        ({"per_layer_config": {"1": {"head_dim": 32}, "last": {"head_dim": 32}}}, "must say the same of each layer"),
        ({"per_layer_config": [32]}, "must say the same of each layer"),
        ({"per_layer_config": {"1": {"ffn": 3}, "3": {"ffn": 3}}}, "ffn in per_layer_config .* is 3"),
        ({"global_head_dim": 33}, "head_dim of layers that attend to everything is 33"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention .* is 'all'"),
        ({"num_kv_shared_layers": 3}, r"layer 1 .* keys and values of a full layer before layer 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "is 1.5; it must",
        ),
    ],
)
def test_what_gemma_4_has_beside_others_is_checked(fields: dict[str, Any], said: str) -> None:
    """Heads that no layer can have, attention that no op computes."""
    with pytest.raises(LoadError, match=said):
        read("gemma4_text", **{"layer_types": ["sliding_attention", "full_attention"] * 2, **fields})


def test_files_and_folders_work_and_damage_is_said(tmp_path: Path) -> None:
    """`diptych plan ./checkpoint` reads the folder's config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert load_model_file(tmp_path).name == tmp_path.name
    assert load_model_file(tmp_path / "config.json").n_layers == 4
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(LoadError, match=r"bad\.json cannot be read"):
        load_model_file(tmp_path / "bad.json")
    with pytest.raises(LoadError, match="no file"):
        load_model_file(tmp_path / "none.json")


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 900, 200_000])
@pytest.mark.parametrize("brackets", [('{"a":', "}"), ("[", "]")], ids=["objects", "lists"])
def test_deep_json_is_an_error_and_no_recursion(tmp_path: Path, depth: int, brackets: tuple[str, str]) -> None:
    """A RecursionError used to come through to the user."""
    text = brackets[0] * depth + "1" + brackets[1] * depth
    (tmp_path / "config.json").write_text('{"x": ' + text + "}")
    with pytest.raises(EngineError, match="deeper than"):
        read_json(tmp_path / "config.json")


def write_checkpoint(folder: Path, n_parameters: int, **index: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama", "torch_dtype": "bfloat16"}))
    text = json.dumps({"model.x": {"dtype": "BF16", "shape": [n_parameters], "data_offsets": [0, 2 * n_parameters]}})
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights = folder / "model.safetensors"
        weights.write_bytes(len(text).to_bytes(8, "little") + text.encode())
        os.truncate(weights, weights.stat().st_size + 2 * n_parameters)  # zeros, that take no room


@pytest.mark.parametrize("has_index", [False, True])
def test_the_planner_counts_what_lies_beside_the_config(tmp_path: Path, has_index: bool) -> None:
    """A config that leaves out half of a model gives half its price, unless someone counts."""
    true_count = parameter_count(read("llama"))
    for count, is_right in ((true_count, True), (true_count + 1, False)):
        index = {"metadata": {"total_size": 2 * count}, "weight_map": {"model.x": "a"}} if has_index else {}
        write_checkpoint(tmp_path, count, **index)
        if is_right:
            assert parameter_count(find_model(str(tmp_path))) == true_count
        else:
            with pytest.raises(LoadError, match=f"{count}"):
                find_model(str(tmp_path))
