"""RecurrentGemma as its published files have it, and what of their words is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ask_reference, check_golden
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_reference
from diptych.compute.runner import load_model
from diptych.cost.kv_bytes import STATE_BYTES
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.read import load_model_file, read_model
from diptych.models.spec import ModelSpec

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
# config.json of recurrentgemma-2b, but for ids of tokens
PUBLISHED: dict[str, Any] = {
    "architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "attention_bias": False,
    "attention_dropout": 0.0, "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True, "final_w_init_variance_scale": 0.07692307692307693,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15_360,
    "logits_soft_cap": 30.0, "lru_width": 2560, "num_attention_heads": 10, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 256_000, "w_init_variance_scale": 0.01,
}  # fmt: skip


def read(**fields: Any) -> ModelSpec:
    return read_model(HfConfig({**PUBLISHED, **fields}), name="it")


def test_a_published_config_is_read() -> None:
    """Eight of its layers see 2,048 tokens, eighteen keep a number of each channel and three inputs of its taps."""
    spec = read()
    assert spec.kv_layers == tuple(range(2, 26, 3))
    assert {spec.windows[i] for i in spec.kv_layers} == {2048}
    assert spec.state_elements * STATE_BYTES == 18 * 4 * 2560 * 4
    assert spec.embed_scale == 50.5  # the root of 2560, as bf16 has it
    assert 2.6e9 < parameter_count(spec) < 2.8e9  # as its makers count: 2.7 billion
    attention = spec.attention
    assert (attention.n_heads, attention.n_kv_heads, attention.head_dim) == (10, 1, 256)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_types": ["recurrent", "mamba"]}, "block_types in config.json is"),
        ({"block_types": []}, "block_types in config.json is"),
        ({"block_types": "recurrent"}, "block_types in config.json is 'recurrent'"),
        ({"layer_types": ["sliding_attention"] * 26}, "layer_types in config.json is"),
        ({"intermediate_size": 15_361}, "intermediate_size in config.json is 15361; gate and up"),
        ({"head_dim": 128}, "head_dim in config.json is 128; it must be 256"),
        ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim in config.json is False"),
        ({"lru_width": 2561}, "lru_width in config.json is 2561; 10 heads"),
        ({"conv1d_width": 0}, "conv1d_width in config.json is 0"),
        ({"hidden_activation": "relu"}, "hidden_act in config.json is 'relu'"),
        ({"num_key_value_heads": 4}, "10 query heads cannot share 4"),
        ({"mamba_d_state": 16}, "mamba_d_state in config.json is 16"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read(**fields)


def test_the_first_token_enters_whole(tmp_path: Path) -> None:
    """Nothing has faded before it. A model whose units hardly fade says so: what comes later hardly enters."""
    path, oracle = make_checkpoint("recurrent_gemma", tmp_path), make_reference("recurrent_gemma")
    tensors = load_file(path / "model.safetensors")
    named = [name for name in tensors if name.endswith("recurrent_param")]
    assert len(named) == 3
    save_file(tensors | {name: torch.full_like(tensors[name], -4.0) for name in named}, path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    for name, parameter in oracle.named_parameters():
        if name.endswith("recurrent_param"):
            parameter.data.fill_(-4.0)
    golden = ask_reference(oracle, path, new_tokens=4)
    check_golden(load_model(path, REFERENCE), golden, chunk=9)


def test_a_config_that_names_its_layers_is_the_same_model(tmp_path: Path) -> None:
    path = make_checkpoint("recurrent_gemma", tmp_path)
    ours, given = load_model_file(path), json.loads((path / "config.json").read_text())
    kinds = ["linear_attention", "linear_attention", "sliding_attention", "linear_attention"]
    (path / "config.json").write_text(json.dumps({**given, "layers_block_type": kinds}))
    assert load_model_file(path) == ours
