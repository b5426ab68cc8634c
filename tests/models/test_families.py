"""The table of families against the configuration classes and models of transformers, with full and with empty configs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from counted import loaded_parameters
from diptych.cost.parameters import active_parameter_count, parameter_count
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.families.table import BY_MODEL_TYPE, FAMILIES
from diptych.models.keys import HARMLESS, HARMLESS_ENDINGS
from diptych.models.mlp import MoeSpec
from diptych.models.read import read_model
from diptych.models.rope import ROPE_KEYS
from diptych.models.spec import LayerSpec, ModelSpec
from small_configs import CLASS_NEEDS, EXPERTS, MORE, SMALL, SMALL_GPT

CLASSES = [
    family for family in FAMILIES if family.name in transformers.CONFIG_MAPPING
]  # of others stand republished.py
# decoders of which transformers has no class with a head around them alone
BARE = (
    "distilbert",
    "electra",
    "deberta",
    "deberta-v2",
    "modernbert",
    "eurobert",
    "roformer",
    "ultrabert",
)  # encoders without a pooler
TEXT_MODELS = {
    "step3p5": "Step3p7TextModel", "glm5_next_text": "Glm5NextTextModel", "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel", "glm_ocr_text": "GlmOcrTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel", "hunyuan_vl_text": "HunYuanVLTextModel",
    "granite_docling_text": "GraniteDoclingTextModel", "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "muse_glimmer_text": "MuseGlimmerTextModel", "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "molmo2_text": "Molmo2TextModel", "muse_spark_text": "MuseSparkTextModel", "mistral_large4_text": "MistralLarge4TextModel",
    "t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "emu3_text_model": "Emu3TextModel",
    "cosmos3_edge_text": "Cosmos3EdgeTextModel",
}  # fmt: skip


def config_of(family: Family, **fields: Any) -> Any:
    config = transformers.AutoConfig.for_model(family.name, **{**CLASS_NEEDS.get(family.name, {}), **fields})
    if family.name.startswith(("gemma4", "step")):  # layers differ: what most of them have
        config.allow_global_per_layer_attribute_access = True
    return config


def read(family: Family, config: dict[str, Any]) -> ModelSpec:
    config = {key: value for key, value in config.items() if key != "architectures"}  # None where no file was written
    return read_model(HfConfig({"model_type": family.name, **CLASS_NEEDS.get(family.name, {}), **config}), name="it")


def small(family: Family) -> dict[str, Any]:
    return SMALL_GPT[family.name] if family.name in SMALL_GPT else {**SMALL, **MORE.get(family.name, {})}


@pytest.fixture(autouse=True, scope="module")
def nothing_is_drawn() -> Iterator[None]:
    """Modules on the meta device, whose numbers nobody sees, would call what draws them all the same."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(kind, "reset_parameters", lambda module: None)
        yield


def counted(config: Any) -> int:
    """Parameters of the model that transformers builds, with buffers: the router's correction bias, layers' scales."""
    with torch.device("meta"):
        text_model = TEXT_MODELS.get(config.model_type)
        if text_model or config.model_type.endswith(("vl_text", "vl_moe_text", "4v_text", "4v_moe_text")):
            # a head is around them
            made = getattr(transformers, text_model) if text_model else transformers.AutoModel.from_config
            model = made(config)
            if not getattr(config, "tie_word_embeddings", False):
                model.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        elif config.model_type == "mllama_text_model":
            model = transformers.MllamaForCausalLM(config)
            layers = model.model.layers  # those that attend to pictures are not run
            model.model.layers = torch.nn.ModuleList(
                one for i, one in enumerate(layers) if i not in config.cross_attention_layers
            )
        elif config.model_type == "phi4_multimodal":
            model = transformers.Phi4MultimodalForCausalLM(config)
            del model.model.embed_tokens_extend  # of pictures and sound
        elif BY_MODEL_TYPE[config.model_type].is_encoder:
            bare = {} if config.model_type in BARE else {"add_pooling_layer": False}
            model = transformers.AutoModel.from_config(config, **bare)
            if config.model_type == "roformer":
                del model.encoder.embed_positions  # sines and cosines that turn
        elif config.model_type == "mistral4":  # on no list of those that write text
            model = transformers.Mistral4ForCausalLM(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = sum(
        b.numel()
        for name, b in model.named_buffers()
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar", "rotary_emb.alpha"))
    )
    # of experts without weights its class has gates all the same, which nobody reads
    unread = [
        getattr(config, "zero_expert_num", 0) * one.gate_up_proj[0].numel()
        for one in model.modules()
        if hasattr(one, "identity_expert")
    ]
    of_pictures = [
        one.numel()
        for name, one in model.named_parameters()
        if ".vision_moe." in name and not name.endswith("correction_bias")
    ]
    of_pictures.append(getattr(config, "additional_vocab_size", 0) * config.hidden_size)
    return sum(one.numel() for one in model.parameters()) + buffers - sum(unread) - sum(of_pictures)


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.name)
def test_an_empty_config_is_the_class_with_its_defaults(family: Family) -> None:
    """Files leave out what equals the class default. Seven of ten families were read otherwise by engine or planner:
    Gemma 2 had heads of 64 x 16 and no window in place of 256 x 4 and 4096, Qwen3-MoE no experts in place of 128.
    """
    assert read(family, {}) == read(family, config_of(family).to_dict())


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.name)
@pytest.mark.parametrize("fields", ["all left out", "small"])
def test_every_number_is_that_of_transformers(family: Family, fields: str) -> None:
    """Oracle: the config object of the same JSON, and the model built of it on the meta device."""
    given = {} if fields == "all left out" else small(family)
    config = config_of(family, **given)
    spec = read(family, given)
    assert parameter_count(spec) == counted(config)
    assert (spec.hidden, spec.vocab_size, spec.n_blocks) == (
        config.hidden_size, config.vocab_size, getattr(config, "num_layers", config.num_hidden_layers))  # fmt: skip
    # an encoder has no output projection, whatever its class says of one
    assert spec.is_tied == (family.is_encoder or getattr(config, "tie_word_embeddings", False))
    if spec.kv_layers:
        assert spec.n_heads == config.num_attention_heads
    if spec.kv_layers and spec.attention.mla is None:
        n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        is_multi_query = getattr(config, "multi_query", False) and not getattr(
            config, "new_decoder_architecture", False
        )
        assert spec.n_kv_heads == (1 if is_multi_query else n_kv_heads)
        assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    # a layer for each of a pair
    assert (*spec.windows, *(None for _ in spec.left_out)) == windows_of(config) * (2 if family.has_pairs else 1)
    if "rms_norm_eps" in family.keys and hasattr(config, "rms_norm_eps"):
        assert spec.norm_eps == (config.rms_norm_eps or config.layer_norm_eps)
    elif "rms_norm_eps" in {*family.keys} - {*family.renamed.values()}:  # the class has no such key
        assert family.fixed["rms_norm_eps"] == (spec.norm_eps,)
        with pytest.raises(LoadError, match=rf"rms_norm_eps .* is 0\.001; of .*, only {spec.norm_eps}"):
            read(family, {**given, "rms_norm_eps": 1e-3})
    if hasattr(config, "max_position_embeddings"):
        before = (family.positions_offset or 0) if family.counts_offset else 0
        assert spec.max_context_tokens == config.max_position_embeddings - before
    rope = getattr(config, "rope_parameters", None)
    if rope:
        for layer in spec.layers:
            kind = "sliding_attention" if layer.attention.window else "full_attention"
            if "compress" in rope:
                kind = "main" if layer.attention.entries is None else "compress"
            theirs, ours = rope.get(kind, rope), layer.attention.rope
            assert ours is None or (ours.theta, ours.kind) == (theirs["rope_theta"], theirs["rope_type"])


def windows_of(config: Any) -> tuple[int | None, ...]:
    if config.model_type == "gpt_neo":
        return tuple(None if kind == "global" else config.window_size for kind in config.attention_layers)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or None
    types = getattr(config, "layer_types", None)
    if config.model_type.startswith("zamba"):  # a layer with a block before its state is two
        return (window,) * (len(types) + types.count("hybrid"))
    if hasattr(config, "layers_block_type"):  # blocks, of which MLPs are a part of the layer before them
        types = [kind for kind in types if kind not in ("mlp", "moe")]
    if types is None:
        return (window,) * config.num_hidden_layers
    return tuple(None if kind in ("full_attention", "conv", "linear_attention") else window for kind in types)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe", "dots1"])
def test_windows_without_layer_types_are_where_the_class_has_them(name: str) -> None:
    """Qwen2-MoE's lie before max_window_layers, on every other layer; they were put behind it, on all."""
    family = BY_MODEL_TYPE[name]
    fields = {**small(family), "num_hidden_layers": 5, "sliding_window": 9, "max_window_layers": 3}
    fields |= {} if name == "dots1" else {"use_sliding_window": True}
    config = config_of(family, **fields)
    assert set(windows_of(config)) == {None, 9}
    assert read(family, fields).windows == windows_of(config)


def with_few_experts(spec: ModelSpec) -> ModelSpec:
    """Two of each expert that a token chooses, at most: those behind them are asked for as they are."""

    def few(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mlp, MoeSpec):
            return layer
        moe = layer.mlp
        n = min(moe.n_experts, moe.n_groups * math.ceil(2 * moe.experts_per_token / moe.n_groups))
        return replace(layer, mlp=replace(moe, n_experts=n))

    return replace(spec, layers=tuple(few(layer) for layer in spec.layers))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("fields", ["all left out", "small"])
def test_the_count_is_what_the_loader_loads(family: Family, fields: str) -> None:
    """The planner's number of parameters and the tensors the engine asks for are one thing."""
    spec = with_few_experts(read(family, {} if fields == "all left out" else small(family)))
    assert parameter_count(spec) == loaded_parameters(spec)


@pytest.mark.parametrize("family", CLASSES, ids=lambda family: family.name)
def test_every_field_of_the_class_is_read_fixed_or_harmless(family: Family) -> None:
    """A field that a new version of transformers adds, or that was forgotten here, must be decided about by someone."""
    config = transformers.AutoConfig.for_model(family.name, **CLASS_NEEDS.get(family.name, {}))
    fields = set(config.to_dict()) - set(transformers.PreTrainedConfig().to_dict())
    known = {"layer_types", *family.keys, *family.fixed, *family.unread, *family.renamed, *HARMLESS, *ROPE_KEYS}
    assert not sorted(name for name in fields - known if not name.endswith(HARMLESS_ENDINGS))


def test_a_token_meets_only_its_experts() -> None:
    """A mixture's token was priced with all its experts by the server's account of segments."""
    family = BY_MODEL_TYPE["qwen3_moe"]
    few = read(family, {**SMALL, "num_experts": 8, **EXPERTS})
    all_of_them = read(family, {**SMALL, "num_experts": 8, **EXPERTS, "num_experts_per_tok": 8})
    assert active_parameter_count(few) < 0.6 * active_parameter_count(all_of_them)
