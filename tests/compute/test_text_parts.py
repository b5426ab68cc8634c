"""Text parts of models for pictures and sound against transformers, as it writes them and as they are published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ask_reference, check_golden
from safetensors.torch import load_file, save_file

from checkpoints import COMMON, enliven, make_checkpoint, make_reference
from diptych.compute.adapters import read_adapter
from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.read import load_model_file
from diptych.models.stored import check_stored
from family_fields import SMALL_TOWER
from latent_configs import LATENT
from lora import write_adapter
from state_configs import QWEN4
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
NEW_TOKENS = 12


def test_text_part_of_a_multimodal_gemma3(tmp_path: Path) -> None:
    """The 4B, 12B and 27B checkpoints wrap the language model in a vision model."""
    import transformers

    text = {**COMMON, "head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 20, "num_hidden_layers": 7}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    reference = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    golden = ask_reference(reference, tmp_path, new_tokens=NEW_TOKENS)
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=None)


def test_text_part_of_a_multimodal_qwen4(tmp_path: Path) -> None:
    """Published files wrap it, call layers with an index full_attention, and say its turned part beside rope_parameters."""
    import transformers

    text = {**COMMON, **QWEN4, "hidden_act": "silu"}
    del text["intermediate_size"]
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
             "num_position_embeddings": 16}  # fmt: skip
    config = transformers.Qwen4ExpConfig(text_config=text, vision_config=tower)
    config._attn_implementation = "eager"
    reference = transformers.Qwen4ExpForConditionalGeneration(config).eval().float()
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    assert any("language_model" in name for name in load_file(tmp_path / "model.safetensors"))
    golden = ask_reference(reference, tmp_path, new_tokens=NEW_TOKENS)
    given = json.loads((tmp_path / "config.json").read_text())
    of_text = given["text_config"]
    of_text["layer_types"] = [kind.replace("indexed", "full") for kind in of_text["layer_types"]]
    of_text["partial_rotary_factor"] = of_text["rope_parameters"].pop("partial_rotary_factor")
    (tmp_path / "config.json").write_text(json.dumps(given))
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=5)


def test_text_part_of_a_published_gemma3n(tmp_path: Path) -> None:
    """Published files wrap it beside towers, and hold keys and values of the layers that attend to another's, too."""
    path = make_checkpoint("gemma3n", tmp_path)
    tensors = {
        name.replace("model.", "model.language_model.", 1): one
        for name, one in load_file(path / "model.safetensors").items()
    }
    for layer in (4, 5):
        for name in ("k_proj", "v_proj", "k_norm"):
            whose = f"model.language_model.layers.{{}}.self_attn.{name}.weight"
            tensors[whose.format(layer)] = tensors[whose.format(0)].clone()
    for tower in ("vision_tower.a.weight", "audio_tower.b.weight", "embed_vision.c.weight", "embed_audio.d.weight"):
        tensors[f"model.{tower}"] = torch.ones(3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    text |= {"query_pre_attn_scalar": 256, "altup_lr_multiplier": 1.0}
    wrapped = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (path / "config.json").write_text(json.dumps(wrapped))
    spec = load_model_file(path)
    check_stored(path, spec, parameter_count(spec))
    golden = ask_reference(make_reference("gemma3n"), path, new_tokens=4)
    model = load_model(path, REFERENCE)
    assert model.kv_bytes_per_block(16) == 4 * 16 * 2 * 2 * 24 * 4  # of six layers, two keep nothing
    check_golden(model, golden, chunk=9)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_text_part_of_a_published_gemma4(kind: str, tmp_path: Path) -> None:
    """Published files wrap it beside towers, and say once how heads of layers that see everything differ."""
    path = make_checkpoint(kind, tmp_path)
    tensors = {
        name.replace("model.", "model.language_model.", 1): one
        for name, one in load_file(path / "model.safetensors").items()
    }
    for tower in ("vision_tower.a.weight", "audio_tower.b.weight", "embed_vision.c.weight", "embed_audio.d.weight"):
        tensors[f"model.{tower}"] = torch.ones(3)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    del text["per_layer_config"]
    text |= {"use_bidirectional_attention": "vision", "global_head_dim": 32}
    if kind == "gemma4":
        text |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
    name = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}[kind]
    wrapped = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text}
    (path / "config.json").write_text(json.dumps(wrapped))
    spec = load_model_file(path)
    check_stored(path, spec, parameter_count(spec))
    golden = ask_reference(make_reference(kind), path, new_tokens=4)
    check_golden(load_model(path, REFERENCE), golden, chunk=9)


def agree(reference: Any, folder: Path) -> None:
    """What transformers writes of a wrapper is read as it answers."""
    enliven(reference, 0)
    reference.save_pretrained(folder)
    check_golden(load_model(folder, REFERENCE), ask_reference(reference, folder, new_tokens=4), chunk=9)


@pytest.mark.parametrize(("kind", "is_tied"), [("mistral", False), ("ministral3", True)])
def test_text_part_of_a_multimodal_mistral(kind: str, is_tied: bool, tmp_path: Path) -> None:
    """Mistral Small 3.1 and Ministral 3 come in one wrapper, whose word on tied embeddings counts."""
    import transformers

    text = {**COMMON, "model_type": kind, "head_dim": 24, "sliding_window": None}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    config._attn_implementation = "eager"
    reference = transformers.Mistral3ForConditionalGeneration(config).eval().float()
    agree(reference, tmp_path)


def test_text_part_of_a_multimodal_lfm2(tmp_path: Path) -> None:
    """LFM2-VL, in a wrapper as Mistral's."""
    import transformers

    text = {**COMMON, "model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "patch_size": 8, "num_patches": 16}  # fmt: skip
    config = transformers.Lfm2VlConfig(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    reference = transformers.Lfm2VlForConditionalGeneration(config).eval().float()
    agree(reference, tmp_path)


QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 8, "embed_dim": 16, "hidden_size": 64, "out_hidden_size": 64,
              "intermediate_size": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
# what wraps a decoder beside a tower for pictures -> its decoder's fields, and the tower's
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **SMALL_TOWER}),
    "LlavaNext": (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "clip_vision_model", **SMALL_TOWER},
    ),
    "Mllama": (
        {"num_hidden_layers": 4, "cross_attention_layers": [1]},
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "image_size": 16,
            "patch_size": 8,
            "attention_heads": 2,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 32,
        },
    ),
    "LlavaOnevision": ({"model_type": "qwen2"}, {"model_type": "siglip_vision_model", **SMALL_TOWER}),
    "InternVL": (
        {"model_type": "qwen3", "head_dim": 24},
        {**SMALL_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
    ),
    "SmolVLM": ({"model_type": "llama"}, SMALL_TOWER),
    "Idefics3": ({"model_type": "llama"}, SMALL_TOWER),
    "Ovis2": ({"model_type": "qwen2"}, SMALL_TOWER),
    "Kimi_K25": (
        {"model_type": "deepseek_v3", **LATENT, "n_group": 2, "topk_group": 1},
        {**SMALL_TOWER, "merge_kernel_size": [2, 2]},
    ),
    "AyaVision": (
        {"model_type": "cohere2", "sliding_window": 16, "logit_scale": 0.5},
        {"model_type": "siglip_vision_model", **SMALL_TOWER},
    ),
    "Cohere2Vision": (
        {"model_type": "cohere2", "sliding_window": 16, "logit_scale": 0.5},
        {"model_type": "siglip_vision_model", **SMALL_TOWER},
    ),
    "Exaone4_5_": (
        {"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 4},
        {**SMALL_TOWER, **QWEN_TOWER},
    ),
    "Voxtral": ({"model_type": "llama"}, {**SMALL_TOWER, "max_source_positions": 8, "num_mel_bins": 8}),
    "Qwen2Audio": (
        {"model_type": "qwen2"},
        {
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "num_mel_bins": 8,
            "max_source_positions": 8,
        },
    ),
    "CohereCompass": (
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 16,
            "logit_scale": 0.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "sliding_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e3,
                    "factor": 4.0,
                    "mrope_section": [4, 2, 2],
                    "original_max_position_embeddings": 32,
                },
            },
        },
        QWEN_TOWER,
    ),
    "Aria": (
        {"moe_num_experts": 6, "moe_topk": 3, "intermediate_size": 40, "head_dim": 24},
        {"model_type": "idefics3_vision", **SMALL_TOWER},
    ),
    "Glm4v": ({"rope_parameters": HALF_ROTARY}, QWEN_TOWER),
    "Glm46V": ({"rope_parameters": HALF_ROTARY}, QWEN_TOWER),
    "Glm4vMoe": (
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**HALF_ROTARY, "mrope_section": [2, 3, 3]},
        },
        QWEN_TOWER,
    ),
    "Qwen2VL": (MROPE, QWEN_TOWER),
    "Qwen2_5_VL": (MROPE, QWEN_TOWER),
    "Qwen3VL": ({**MROPE, "head_dim": 24}, QWEN_TOWER),
    "Qwen3VLMoe": (
        {**MROPE, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
        QWEN_TOWER,
    ),
}


@pytest.mark.parametrize("family", ["internlm2", "qwen2", "phi3"])
def test_text_of_internvl_in_its_own_files(family: str, tmp_path: Path) -> None:
    """Before transformers had a class of it: the decoder in `llm_config`, beside a tower and what joins them."""
    path = make_checkpoint(family, tmp_path)
    config = json.loads((path / "config.json").read_text())
    wrapped = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": config,
               "vision_config": {"model_type": "intern_vit_6b"}, "template": "internlm2-chat", "select_layer": -1}  # fmt: skip
    (path / "config.json").write_text(json.dumps(wrapped))
    tensors = {f"language_model.{name}": one for name, one in load_file(path / "model.safetensors").items()}
    tower = {name: torch.ones(4) for name in ("vision_model.embeddings.class_embedding", "mlp1.0.weight")}
    save_file({**tensors, **tower}, path / "model.safetensors", metadata={"format": "pt"})
    spec = load_model_file(path)
    check_stored(path, spec, parameter_count(spec))
    golden = ask_reference(make_reference(family), path, new_tokens=4)
    check_golden(load_model(path, REFERENCE), golden, chunk=9)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore")
def test_text_parts_beside_towers_for_pictures(name: str, tmp_path: Path) -> None:
    """Of a token of text the three positions of pictures are one, and what a tower has is left alone."""
    import transformers

    text, tower = WRAPPED[name]
    beside = "audio_config" if name in ("Voxtral", "Qwen2Audio") else "vision_config"
    config = getattr(transformers, f"{name}Config")(text_config={**COMMON, **text}, **{beside: tower})
    config._attn_implementation = "eager"
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().float()
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    if name == "Kimi_K25":  # its mapping calls the decoder's layers blocks, too, which published files do not
        tensors = load_file(tmp_path / "model.safetensors").items()
        named = {
            key.replace("language_model.model.blocks.", "language_model.model.layers."): one for key, one in tensors
        }
        save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec = load_model_file(tmp_path)
    assert spec.is_wrapped
    check_stored(tmp_path, spec, parameter_count(spec))
    golden = ask_reference(reference, tmp_path, new_tokens=4)
    if (
        text.get("model_type") == "cohere2"
    ):  # what scales its logits these classes lost; as models alone they are scaled
        golden = replace(golden, logits=golden.logits * config.text_config.logit_scale)
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=9)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VLMoe"])
def test_text_parts_as_qwen_published_them(name: str, tmp_path: Path) -> None:
    """The first ones have one flat config and names without a part for language, the mixture lies as [inputs, outputs]."""
    import transformers

    text, vision = WRAPPED[name]
    config = getattr(transformers, f"{name}Config")(text_config={**COMMON, **text}, vision_config=vision)
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().float()
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    golden = ask_reference(reference, tmp_path, new_tokens=4)
    tensors = load_file(tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    if name == "Qwen3VLMoe":
        tensors = {key: one.transpose(1, 2).contiguous() if ".experts." in key else one for key, one in tensors.items()}
    else:
        tensors = {
            key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): one
            for key, one in tensors.items()
        }
        flat = written.pop("text_config")
        del flat["rope_parameters"], flat["model_type"]
        rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
        written = {**flat, **written, "rope_theta": 1e4, "rope_scaling": rope, "tie_word_embeddings": False}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(written))
    check_stored(tmp_path, spec := load_model_file(tmp_path), parameter_count(spec))
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=9)


def test_aria_by_the_names_of_its_class(tmp_path: Path) -> None:
    """Published files call experts fc1 and fc2, the class of transformers 5 gate_up_proj and down_proj: either is read."""
    path = make_checkpoint("aria", tmp_path)
    tensors = load_file(path / "model.safetensors")
    ids = list(range(3, 20))
    before = Stepper(load_model(path, REFERENCE)).step({"a": ids})["a"]
    renamed = {
        name.replace("fc1.weight", "gate_up_proj").replace("fc2.weight", "down_proj"): one
        for name, one in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    check_stored(path, spec := load_model_file(path), parameter_count(spec))
    assert torch.equal(Stepper(load_model(path, REFERENCE)).step({"a": ids})["a"], before)


STACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0]}  # fmt: skip


def as_phi4mm(path: Path) -> None:
    """As Microsoft publishes it: projections beside adapters for pictures and sound, which would change what text gives."""
    tensors: dict[str, torch.Tensor] = {}
    for name, one in load_file(path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".layers." not in name or "embed_tokens_extend" in name or not module.endswith(STACKED):
            tensors[name] = one
            continue
        tensors[f"{module}.base_layer.weight"] = one
        for kind in ("vision", "speech"):
            tensors[f"{module}.lora_A.{kind}.weight"] = torch.ones(4, one.shape[1])
            tensors[f"{module}.lora_B.{kind}.weight"] = torch.ones(one.shape[0], 4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    rope, lora = config.pop("rope_parameters"), {"r": 4, "lora_alpha": 8, "layer": "layers.*", "dp": 0.0}
    del config["vision_config"], config["audio_config"]
    config |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "rope_theta": rope.pop("rope_theta"),
               "partial_rotary_factor": rope.pop("partial_rotary_factor"), "vision_lora": lora, "speech_lora": lora,
               "rope_scaling": {"type": rope.pop("rope_type"), "short_factor": rope["short_factor"],
                                "long_factor": rope["long_factor"]},
               "embd_layer": {"embedding_cls": "image_audio"}, "audio_processor": {"name": "cascades"}, "img_processor": None,
               "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
               "sliding_window": 262_144}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("trained", "prompt"), [(256, 40), (32, 80)], ids=["short", "long"])
def test_phi4_multimodal_as_it_is_published(trained: int, prompt: int, tmp_path: Path) -> None:
    """Of a flat config and of files with adapters inside, text is what the base layers alone give, in either set of factors."""
    fields = {"rope_parameters": LONGROPE, "original_max_position_embeddings": trained, "tie_word_embeddings": True}
    path = make_checkpoint("phi4_multimodal", tmp_path, **fields)
    golden = ask_reference(make_reference("phi4_multimodal", **fields), path, new_tokens=4, prompt_tokens=prompt)
    as_phi4mm(path)
    check_stored(path, spec := load_model_file(path), parameter_count(spec))
    assert (spec.attention.rope.kind, spec.attention.rope.rotary_dim) == ("longrope", 12)
    check_golden(load_model(path, REFERENCE), golden, chunk=9)


def test_an_adapter_fits_phi4_multimodal_by_either_name_of_its_projections(tmp_path: Path) -> None:
    """Adapters are trained on the class, whose modules have no base layers."""
    path = make_checkpoint("phi4_multimodal", tmp_path / "base", rope_parameters=LONGROPE, tie_word_embeddings=True)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", path, {"qkv_proj": 3}), max_rank=8)
    ids, found = list(range(3, 20)), []
    for is_published in (False, True):
        if is_published:
            as_phi4mm(path)
        stepper = Stepper(model := load_model(path, REFERENCE))
        stepper.adapters = {"adapted": model.add_adapter(adapter)}
        found.append(stepper.step({"adapted": ids, "plain": ids}))
    assert (found[0]["adapted"] - found[0]["plain"]).abs().max() > 0.5
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("adapted", "plain"))


def test_an_index_that_counts_towers_says_nothing_of_a_decoder(tmp_path: Path) -> None:
    """Where the files are not there; of a decoder alone the same sum is refused."""
    config = {
        "model_type": "phi4mm",
        "architectures": ["Phi4MMForCausalLM"],
        "torch_dtype": "bfloat16",
        "embd_layer": {"a": 1},
    }
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 11_148_920_000}, "weight_map": {"model.x": "a"}})
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_stored(tmp_path, spec := load_model_file(tmp_path), parameter_count(spec))
    (tmp_path / "config.json").write_text(json.dumps({**config, "embd_layer": None}))
    with pytest.raises(LoadError, match="the files beside it hold 5574460000"):
        check_stored(tmp_path, spec, parameter_count(spec))
