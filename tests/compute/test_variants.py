"""Switches inside the families against transformers: rotary scalings, config layouts, head counts, file layouts and dtypes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ask_reference, check_golden, make_golden
from safetensors.torch import load_file, save_file

from checkpoints import COMMON, VOCAB, enliven, make_checkpoint, make_reference
from diptych.compute.runner import load_model
from diptych.cost.components import BF16, cost_of, kv_bytes_per_token
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.shape import StepShape
from diptych.ground.specs import KVSpec
from diptych.models.read import load_model_file
from diptych.models.stored import check_stored
from family_configs import LATENT, MORE
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
NEW_TOKENS = 12
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHORT, LONG = [1.0, 1.1, 1.3, 1.5, 1.7, 2.0, 2.2, 2.5], [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

# name -> (family, config fields)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain Llama": ("llama", {"attention_bias": False, "mlp_bias": False, "head_dim": None}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied Gemma": ("gemma2", {"tie_word_embeddings": False}),
    "every head its own": ("llama", {"num_key_value_heads": 4}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "yarn, attention factor": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 0.8}}),
    "yarn, mscale": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "yarn, betas": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": 8, "beta_slow": 2,
                                                  "truncate": False}}),
    "A.X K2 without groups, with biases, stretched": (
        "axk2", {"n_group": None, "topk_group": None, "attention_bias": True,
                 "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4}}),
    "no window": ("mistral", {"sliding_window": None}),
    "windows off": ("qwen2", {"use_sliding_window": False}),
    "windows by layer_types": (
        "qwen2", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "Qwen3 with biases and windows": (
        "qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "partial rotary": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "partial_rotary_factor": 0.5}}),
    "Phi-3 with a window": ("phi3", {"sliding_window": 11}),
    "Gemma 2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "Gemma 3 with a final cap": ("gemma3", {"final_logit_softcapping": 3.0}),
    "Gemma 3 scaled": ("gemma3", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "OLMo 2 with biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "NoPE by list": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9}),
    "Phi-4 mini": ("phi3", {"original_max_position_embeddings": 512, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": SHORT[:6],
        "long_factor": LONG[:6]}}),
    "SmolLM 2, Falcon 3": ("llama", {"attention_bias": False, "mlp_bias": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000042.0}}),
    "StableLM in parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    "Cohere with biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "ERNIE with experts on some layers": ("ernie4_5_moe", {"num_hidden_layers": 4, "moe_layer_interval": 2,
                                                           "moe_layer_end_index": 2}),
    "GLM-4.5 Air": ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    "HyperCLOVA X with a large epsilon": ("hyperclovax", {"rms_norm_eps": 0.05}),
    "EXAONE that windows no layer": ("exaone4", {"layer_types": ["full_attention"] * 4}),
    "gpt-oss without windows": ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
    "DeepSeek V2": ("deepseek_v2", {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4,
                                    "topk_group": 2, "routed_scaling_factor": 4.0}),
    "Kimi": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "attention_bias": True, "rope_interleave": False}),
    "GPT-NeoX one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "Falcon 11B": ("falcon-40b", {"num_ln_in_parallel_attn": 1, "bias": False}),
    "Falcon one after the other": ("falcon", {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False}),
    "SantaCoder's heads": ("gpt_bigcode", {"multi_query": False, "activation_function": "gelu_fast"}),
    "GPT-J that turns whole heads": ("gptj", {"rotary_dim": 16, "tie_word_embeddings": True}),
    "Mamba-2 whose channels have no bias": ("bamba", {"mamba_conv_bias": False, "mamba_d_conv": 2}),
    "Granite 4 without a state": ("granite-h-dense", {"layer_types": ["full_attention"] * 4}),
    "convolutions of one tap": ("lfm2", {"conv_L_cache": 1, "block_auto_adjust_ff_dim": False}),
    "a mixture whose experts have no bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "Phi-2": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.4, "hidden_size": 80}),
    "experts not renormalised": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "experts on every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_matches_transformers(name: str, tmp_path: Path) -> None:
    """Real configs switch these; a switch that is read and ignored gives fluent nonsense."""
    family, fields = VARIANTS[name]
    golden = make_golden(family, tmp_path, new_tokens=NEW_TOKENS, **fields)
    check_golden(load_model(golden.path, REFERENCE), golden, chunk=9)


def test_gpt2_is_read_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """Without the model's name before its tensors, and with the masks that older versions saved."""
    golden = make_golden("gpt2", tmp_path, new_tokens=NEW_TOKENS)
    tensors = {
        name.removeprefix("transformer."): one.clone()
        for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(COMMON["num_hidden_layers"])}
    save_file({**tensors, **masks}, tmp_path / "model.safetensors")
    model = load_model(tmp_path, REFERENCE)
    check_golden(model, golden, chunk=9)
    check_stored(tmp_path, model.spec, parameter_count(model.spec))


def old_layout(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    return config


@pytest.mark.parametrize("name", ["theta", "linear", "llama3", "yarn", "partial rotary", "Gemma 3 scaled"])
def test_old_config_layout_gives_the_same_model(name: str, tmp_path: Path) -> None:
    """Most checkpoints on the hub were written before `rope_parameters` existed."""
    family, fields = VARIANTS[name]
    fields = {**fields, "sliding_window_pattern": 3} if family == "gemma3" else fields
    path = make_checkpoint(family, tmp_path, **fields)
    new = load_model(path, REFERENCE)
    config = json.loads((path / "config.json").read_text())
    assert "rope_parameters" in config, "transformers writes the new layout"
    (path / "config.json").write_text(json.dumps(old_layout(config)))
    old = load_model(path, REFERENCE)
    assert old.spec == new.spec


@pytest.mark.parametrize(("max_context", "prompt"), [(64, 40), (256, 80)], ids=["short", "long"])
def test_longrope_on_both_sides_of_its_limit(max_context: int, prompt: int, tmp_path: Path) -> None:
    """The engine chooses once by its longest context; transformers by each sequence. They agree on each side."""
    fields = {"original_max_position_embeddings": 64, "rope_parameters": {**LONGROPE, "rope_theta": 1e4}}
    golden = make_golden("phi3", tmp_path, prompt_tokens=prompt, new_tokens=NEW_TOKENS, **fields)
    model = load_model(golden.path, REFERENCE, max_context_tokens=max_context)
    check_golden(model, golden, chunk=17)
    other = load_model(golden.path, REFERENCE, max_context_tokens=256 if max_context == 64 else 64)
    assert other.spec.attention.rope != model.spec.attention.rope
    assert other.revision != model.revision, "keys turned by other angles must not be taken for equal"


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """For a sequence as long as the engine's longest, the frequencies are those transformers computes."""
    fields = {
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    }
    path = make_checkpoint("llama", tmp_path, **fields)
    tokens = torch.randint(3, VOCAB, (1, 96), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = make_reference("llama", **fields)(tokens, use_cache=False).logits[0]
    model = load_model(path, REFERENCE, max_context_tokens=96)
    assert model.spec.max_context_tokens == 96
    got = Stepper(model).prefill("a", tokens[0].tolist(), chunk=13)
    assert (got - expected).abs().max() < 1e-4
    assert load_model(path, REFERENCE).spec.max_context_tokens == 48, "unasked, a model keeps its trained length"
    assert load_model(path, REFERENCE, max_context_tokens=999).spec.max_context_tokens == 192, "factor 4 is the most"


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """Anything above 5 GB comes in parts."""
    whole = make_checkpoint("qwen2", tmp_path / "whole")
    parts = make_checkpoint("qwen2", tmp_path / "parts", max_shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    tokens = list(range(5, 30))
    one, other = (Stepper(load_model(path, REFERENCE)).prefill("a", tokens) for path in (whole, parts))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_files_computed_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    """The file's dtype is storage: asked for fp32, the model computes in fp32 on exactly those values."""
    import transformers

    path = make_checkpoint("gemma3", tmp_path, dtype=dtype)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    check_golden(load_model(path, REFERENCE), ask_reference(reference.eval(), path, new_tokens=NEW_TOKENS), chunk=None)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_files_run_in_bf16_unasked(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 compute stays near the fp32 answer: the average logit differs by a few roundings."""
    golden = make_golden(family, tmp_path, dtype=dtype, new_tokens=NEW_TOKENS)
    model = load_model(golden.path, ComputeConfig(backend="torch", device="cpu"))
    assert (model.weights_format, model.kv_format) == ("bf16", "bf16")
    logits = Stepper(model).prefill("a", golden.prompt)
    error = (logits - golden.logits[: len(golden.prompt)]).abs().mean()
    assert error < 0.05 * golden.logits.std(), error


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


def test_minimax_m3_as_its_decoder_alone_is_saved(tmp_path: Path) -> None:
    """transformers stacks gate and up of what a token always meets, and keeps the bias of the choice with the router."""
    import transformers

    fields = MORE["minimax_m3"][2]
    reference = transformers.MiniMaxM3VLForCausalLM(transformers.MiniMaxM3VLTextConfig(**{**COMMON, **fields}))
    reference.eval().float().set_attn_implementation("eager")
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    golden = ask_reference(reference, tmp_path, new_tokens=NEW_TOKENS)
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=None)


def test_what_gates_norms_and_heads_is_counted(tmp_path: Path) -> None:
    """A.X K2: every tensor is read, and the planner knows how many numbers there are."""
    path = make_checkpoint("axk2", tmp_path)
    spec = load_model_file(path)
    check_stored(path, spec, parameter_count(spec))


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
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    golden = ask_reference(reference, tmp_path, new_tokens=4)
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=9)


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
    enliven(reference, 0)
    reference.save_pretrained(tmp_path)
    golden = ask_reference(reference, tmp_path, new_tokens=4)
    check_golden(load_model(tmp_path, REFERENCE), golden, chunk=9)


SMALL_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "image_size": 16, "patch_size": 8}  # fmt: skip
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


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_neighbours_change_nothing(family: str, tmp_path: Path) -> None:
    """A mixed step of ragged chunks gives each sequence the logits it has alone."""
    model = load_model(make_checkpoint(family, tmp_path), REFERENCE)
    generator = torch.Generator().manual_seed(5)
    prompts = {name: torch.randint(3, VOCAB, (n,), generator=generator).tolist() for name, n in
               (("a", 50), ("b", 1), ("c", 33), ("d", 17))}  # fmt: skip
    alone = {name: Stepper(model).prefill(name, tokens) for name, tokens in prompts.items()}
    stepper = Stepper(model)
    cuts = {"a": [7, 1, 41, 1], "b": [0, 1], "c": [16, 16, 1], "d": [1, 1, 14, 1]}
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    for turn in range(4):
        chunks = {}
        for name, sizes in cuts.items():
            begin = sum(sizes[:turn])
            if turn < len(sizes) and sizes[turn]:
                chunks[name] = prompts[name][begin : begin + sizes[turn]]
        for name, logits in stepper.step(chunks).items():
            got[name].append(logits)
    for name, logits in alone.items():
        torch.testing.assert_close(torch.cat(got[name]), logits, atol=1e-4, rtol=0)


def test_both_names_of_what_is_in_an_olmo_hybrid(tmp_path: Path) -> None:
    """Files for vLLM call norms as other models do and join convolutions; transformers reads either."""
    make_checkpoint("olmo_hybrid", tmp_path / "apart")
    model = make_reference("olmo_hybrid")
    model.save_pretrained(str(tmp_path / "joined"), save_original_format=False)
    ids = list(range(3, 20))
    found = [Stepper(load_model(tmp_path / name, REFERENCE)).step({"a": ids})["a"] for name in ("apart", "joined")]
    assert torch.equal(*found)
    with torch.no_grad():
        assert (model(torch.tensor([ids])).logits[0] - found[0]).abs().max() < 1e-4


def test_layers_without_attention_cost_and_keep_nothing_of_it(tmp_path: Path) -> None:
    """Of six layers of a Nemotron NAS three attend, with KV heads of their own; planner, caches and phases agree."""
    path = make_checkpoint("nemotron-nas", tmp_path, dtype=torch.bfloat16)
    check_stored(path, spec := load_model_file(path), parameter_count(spec))
    assert kv_bytes_per_token(spec, KVSpec()) == 2 * 2 * 16 * (2 + 1 + 4)
    shape = StepShape.decode(batch=3, context_tokens=20)
    cost = cost_of(spec, shape, quant=BF16, kv=KVSpec())
    heads, kv_width = 3 * 4 * 16, 2 * 16 * (2 + 1 + 4)
    wanted = {"qkv": heads + kv_width, "o": heads, "mlp": 3 * (96 + 40 + 56 + 72)}
    assert {name: cost.component(name).flops for name in wanted} == {
        name: 2 * 3 * 64 * width for name, width in wanted.items()
    }
    for backend in ("cpu", "torch"):
        model = load_model(path, ComputeConfig(backend=backend, device="cpu", kv="bf16"))
        assert model.kv_bytes_per_block(16) == 16 * kv_bytes_per_token(spec, KVSpec())
