"""Configs of layers that have more parts than others, or less: what they say, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from diptych.cost.components import BF16, cost_of
from diptych.cost.parameters import active_parameter_count, parameter_count
from diptych.cost.routing import expected_experts, touched_experts
from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.ground.shape import StepShape
from diptych.ground.specs import KVSpec
from diptych.models.config import HfConfig
from diptych.models.families.table import BY_MODEL_TYPE, WRAPPERS
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.read import family_of, is_headless, read_model
from diptych.models.refused import reason_for
from diptych.models.spec import ModelSpec, Norms

LONGCAT = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 36,
           "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3}  # fmt: skip


def read(kind: str, **fields: Any) -> ModelSpec:
    return read_model(HfConfig({"model_type": kind, **fields}), name="it")


def test_longcat_flash_as_it_is_published_has_its_size() -> None:
    """560 billion numbers, of which a token meets 18.6 to 31.3 billion, 27 on average (the model's card)."""
    said = {"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA",
            "attention_bias": False, "router_bias": False}  # fmt: skip
    spec = read("longcat_flash", **said)
    assert round(parameter_count(spec) / 1e9) in (560, 561)
    assert 26e9 < active_parameter_count(spec) < 28e9
    assert len(spec.layers) == 2 * spec.n_blocks == 56


def test_a_layer_of_two_parts_is_two_layers() -> None:
    """The mixture beside the first MLP, which every token meets as it does shared experts, is added behind the second."""
    spec = read("longcat_flash", **LONGCAT)
    first, second = spec.layers[0].mlp, spec.layers[1].mlp
    assert isinstance(first, MoeSpec)
    assert isinstance(second, MlpSpec)
    assert first.is_late
    assert (first.n_experts, first.n_scored, first.shared_ffn) == (8, 12, second.ffn)
    assert [spec.half_of(i) for i in range(4)] == [0, 1, 0, 1]
    mla = spec.attention.mla
    assert mla is not None
    assert (mla.q_scale, mla.kv_scale) == (2.0, 4 / 3)


def test_tokens_touch_fewer_experts_where_some_have_no_weights() -> None:
    """What they choose of those costs nothing."""
    moe = read("longcat_flash", **LONGCAT).moe
    assert moe is not None
    assert moe.met_experts == 2
    assert touched_experts(moe, 1) == pytest.approx(2)
    assert touched_experts(moe, 50) < expected_experts(8, 3, 50)


def test_what_stands_before_a_head_is_priced_once_a_row() -> None:
    """ModernBERT's decoders project each row once more before the output projection, which only wanted rows meet."""
    spec = read("modernbert-decoder")
    assert spec.transforms_head
    plain = replace(spec, transforms_head=False)
    shape = StepShape.prefill(batch=1, new_tokens=64)
    flops = [cost_of(one, shape, quant=BF16, kv=KVSpec()).component("head").flops for one in (spec, plain)]
    assert flops[0] - flops[1] == 2 * 64 * spec.hidden**2
    assert [layer.norms for layer in spec.layers[:2]] == [Norms.BEFORE_MLP, Norms.BEFORE]
    assert spec.windows[:4] == (None, 64, 64, None)


def test_positions_that_are_made_are_no_parameters() -> None:
    """XGLM's table is in no file; its rows are the mathematics of its class."""
    spec = read("xglm")
    assert (spec.n_position_embeddings, spec.first_position) == (2050, 2)
    assert parameter_count(spec) == parameter_count(replace(spec, n_position_embeddings=0))


def test_the_last_layer_alone_has_a_bias() -> None:
    """Of GPT-NeoX Japanese; a bias in each would be asked for and not found."""
    assert [layer.attention.has_o_bias for layer in read("gpt_neox_japanese", num_hidden_layers=3).layers] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type"),
        ("longcat_flash", {"mla_scale_q_lora": False}, "mla_scale_q_lora"),
        ("longcat_flash", {"num_layers": 2, "num_hidden_layers": 5}, "twice num_layers, 2"),
        ("longcat_flash", {**LONGCAT, "moe_topk": 13}, "num_experts_per_tok"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn"),
        ("dbrx", {"ffn_config": 3}, "ffn_config"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("xglm", {"pad_token_id": 5}, "pad_token_id"),
        ("xglm", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt_neox_japanese", {"intermediate_multiple_size": 3}, "intermediate_multiple_size"),
        ("modernbert-decoder", {"local_attention": 1}, "local_attention"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(kind: str, fields: dict[str, Any], named: str) -> None:
    """An option that is read and not honoured gives fluent nonsense."""
    with pytest.raises(LoadError, match=named):
        read(kind, **fields)


def test_kv_heads_of_a_family_without_them_may_be_its_heads() -> None:
    """Configs that were converted by another family's code say it (Persimmon's); fewer would be another model."""
    assert read("persimmon", num_attention_heads=64, num_key_value_heads=64).n_kv_heads == 64
    with pytest.raises(LoadError, match=r"num_key_value_heads in .* is 8; it changes the mathematics"):
        read("persimmon", num_attention_heads=64, num_key_value_heads=8)


def test_a_model_that_keeps_nothing_of_a_text_is_none() -> None:
    """Convolutions of one tap alone: its plan divided by the bytes that a sequence takes."""
    fields = {"num_hidden_layers": 2, "layer_types": ["conv", "conv"]}
    assert not read("lfm2", conv_L_cache=2, **fields).kv_layers
    with pytest.raises(UnsupportedModel, match="no layer that attends to keys and values or keeps a state"):
        read("lfm2", conv_L_cache=1, **fields)


def test_made_positions_have_two_sines() -> None:
    """Frequencies are spread from the first to the last; with one of them that was a division by zero at load."""
    assert read("xglm", d_model=4, attention_heads=1).computes_positions
    with pytest.raises(UnsupportedModel, match="2 numbers wide; made positions need 4"):
        read("xglm", d_model=2, attention_heads=1)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("longcat_flash", "num_layers"), ("longcat_flash", "zero_expert_num"),
     *(("mamba", one) for one in ("state_size", "conv_kernel", "time_step_rank", "intermediate_size"))],
)  # fmt: skip
def test_numbers_past_every_model_are_refused_at_once(kind: str, key: str) -> None:
    """A config of a hundred bytes made lists of billions of layers, and of names of experts."""
    with pytest.raises(LoadError, match=f"is {2**31 - 1}; it must be at most"):
        read(kind, **{key: 2**31 - 1})


def test_sizes_of_experts_of_text_come_before_those_of_pictures() -> None:
    """ERNIE 4.5 VL's first files say both of each; a third is of nothing that is known."""
    fields = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "moe_k": 2, "intermediate_size": 96}

    def moe_of(**sizes: object) -> MoeSpec | None:
        return read_model(HfConfig({"model_type": "ernie4_5_vl_moe_text", **fields, **sizes})).moe

    both = moe_of(moe_num_experts=[4, 4], moe_intermediate_size=[32, 24])
    assert both is not None
    assert (both.n_experts, both.expert_ffn, both.shared_ffn, both.choice_rows) == (4, 32, 64, 2)
    assert both == moe_of(moe_num_experts=4, moe_intermediate_size=32)
    with pytest.raises(LoadError, match=r"num_experts in .* is \[4, 4, 4\]"):
        moe_of(moe_num_experts=[4, 4, 4], moe_intermediate_size=[32, 24])


WRAPPED_KINDS = ("qwen3_asr",)  # around decoders that are read
# of T5 the encoder alone is read, of EuroBERT no head
NOT_READ = (
    "EuroBertForSequenceClassification",
    "T5ForSequenceClassification",
    "MT5ForSequenceClassification",
    "T5Model",
    "MT5Model",
)


@pytest.mark.parametrize(
    "mapping", [MODEL_MAPPING_NAMES, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES], ids=["bare", "labels"]
)
def test_every_class_without_a_head_of_what_is_read_is_read(mapping: Mapping[str, str | tuple[str, ...]]) -> None:
    """GPT2Model, GPT2ForSequenceClassification and those of multimodal embedding models (Qwen3VLModel) were refused."""
    kinds = [kind for kind in mapping if kind in BY_MODEL_TYPE]
    assert len(kinds) > 80
    for kind in kinds:
        for name in (mapping[kind],) if isinstance(mapping[kind], str) else mapping[kind]:
            if name not in NOT_READ:
                assert kind in family_of(HfConfig({"model_type": kind, "architectures": [name]})).model_types


@pytest.mark.parametrize(
    "what", ["SEQUENCE_CLASSIFICATION", "MASKED_LM", "TEXT_ENCODING", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"]
)
def test_every_kind_that_judges_or_embeds_texts_is_read_or_there_is_a_reason(what: str) -> None:
    """Longformer, ESM and LayoutLM were refused without a word of what is missing."""
    mapping = getattr(modeling_auto, f"MODEL_FOR_{what}_MAPPING_NAMES")
    assert not [kind for kind in mapping if kind not in (*BY_MODEL_TYPE, *WRAPPED_KINDS) and reason_for(kind) is None]


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_without_a_head_are_what_they_are_around(name: str) -> None:
    bare = f"{name.removesuffix('ForConditionalGeneration')}Model"
    for one in (name, bare) if bare != f"{name}Model" else (name,):
        config = HfConfig({"architectures": [one], "text_config": {"model_type": "qwen3"}})
        assert family_of(config).name == "qwen3"
        assert is_headless(config) == (one == bare)
