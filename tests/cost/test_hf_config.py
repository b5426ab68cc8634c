"""A Hugging Face config.json becomes the same model as in the library that defines it."""

from __future__ import annotations

import json

import pytest

from diptych.cost.hf_config import load_model_file, model_spec_from_hf
from diptych.cost.parameters import parameter_count
from diptych.cost.tables import model_spec
from diptych.ground.errors import ConfigError

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 256, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, **EXPERTS,
}  # fmt: skip
FAMILIES = [
    ("llama", {}), ("mistral", {}), ("qwen2", {}), ("qwen3", {}), ("gemma2", {}), ("gemma3_text", {}), ("phi3", {}),
    ("olmo2", {}), ("smollm3", {}), ("glm4", {}), ("cohere", {}), ("starcoder2", {}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen3_moe", {"num_experts": 4, **EXPERTS}),
    ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 48, **EXPERTS}),
    ("gpt_oss", {"num_local_experts": 4}),
    ("deepseek_v2", {"n_shared_experts": 2, **LATENT}),
    ("deepseek_v3", {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, **LATENT}),
    ("glm4_moe", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "extra"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_parameters_equal_the_defining_library(family, extra):
    """Oracle: transformers builds the model on the meta device; every shape we derive is in the count."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **SMALL, **extra)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    # the router's correction bias is stored as a buffer, yet published counts include it
    buffers = {name: b.numel() for name, b in model.named_buffers() if "correction_bias" in name}
    assert parameter_count(model_spec_from_hf(config.to_dict())) == counted + sum(buffers.values())


def test_a_full_size_config_equals_the_table():
    """DeepSeek-V3's published keys give the table's model, with nothing left at a default."""
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "topk_method": "noaux_tc", "max_position_embeddings": 163840,
    }  # fmt: skip
    found = model_spec_from_hf(config)
    table = model_spec("deepseek-v3")
    assert (found.moe, found.mla, found.windows) == (table.moe, table.mla, table.windows)
    assert parameter_count(found) == table.published_parameters


def test_windows_come_from_the_config():
    """gemma3 declares a pattern, gpt-oss lists layer types, qwen2 declares a window that is switched off."""
    base = {**SMALL, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 32}
    assert model_spec_from_hf(base).windows == (32,) * 5 + (None, 32)
    listed = {**SMALL, "model_type": "gpt_oss", "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    listed["layer_types"] = ["full_attention", "sliding_attention"] * 2
    assert model_spec_from_hf(listed).windows == (None, 8, None, 8)
    off = {**SMALL, "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}
    assert model_spec_from_hf(off).windows == (None,) * 4


def test_multimodal_wrappers_give_their_language_part():
    """Gemma-3 4B and larger wrap the text model in text_config."""
    wrapped = {"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text"}}
    assert model_spec_from_hf(wrapped).norms_per_layer == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": 3}, "4 heads and 3 kv heads"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "5 experts per token of 4"),
        ({"layer_types": ["linear_attention"] * 4}, "not attention"),
        ({"model_type": "mamba2"}, "not attention"),
    ],
)
def test_impossible_configs_are_refused_by_name(change, words):
    """A wrong price is worse than none."""
    with pytest.raises(ConfigError, match=words):
        model_spec_from_hf({**SMALL, "model_type": "llama", **change})


def test_files_and_folders_work_and_damage_is_said(tmp_path):
    """`diptych plan ./checkpoint` reads the folder's config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert load_model_file(tmp_path).name == tmp_path.name
    assert load_model_file(tmp_path / "config.json").n_layers == 4
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="as JSON"):
        load_model_file(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="no file"):
        load_model_file(tmp_path / "none.json")
