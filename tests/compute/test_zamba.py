"""Blocks that layers share, of Zamba and Zamba2: held once, read at each use, by published words; what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_reference
from diptych.compute.adapters import read_adapter
from diptych.compute.runner import load_model
from diptych.cost.components import cost_of
from diptych.cost.kv_bytes import STATE_BYTES
from diptych.cost.parameters import linear_parameter_count, parameter_count
from diptych.cost.tables import kv_spec, quant_spec
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.ground.shape import StepShape
from diptych.models.config import HfConfig
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
# config.json of Zamba2-1.2B, but for what no forward reads
PUBLISHED: dict[str, Any] = {
    "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "adapter_rank": 128, "add_bias_linear": False,
    "attention_head_dim": 128, "attention_hidden_size": 4096, "chunk_size": 256, "hidden_act": "gelu", "hidden_size": 2048,
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35], "intermediate_size": 8192, "kv_channels": 64,
    "layers_block_type": [*(["mamba"] * 5 + ["hybrid"]) * 6, "mamba", "mamba"], "mamba_d_conv": 4, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 1, "max_position_embeddings": 4096, "n_mamba_heads": 64,
    "num_attention_heads": 32, "num_hidden_layers": 38, "num_key_value_heads": 32, "num_mem_blocks": 1,
    "num_query_groups": 32, "rms_norm_eps": 1e-5, "rope_theta": 10_000, "time_step_min": 0.001, "use_conv_bias": True,
    "use_long_context": False, "use_mem_rope": True, "use_shared_attention_adapter": True, "vocab_size": 32_000,
}  # fmt: skip


# config.json of Zamba-7B-v1, likewise
FIRST: dict[str, Any] = {
    "architectures": ["ZambaForCausalLM"], "model_type": "zamba", "attention_head_dim": 464, "attention_hidden_size": 7424,
    "attn_layer_offset": 4, "attn_layer_period": 6, "hidden_act": "gelu", "hidden_mamba_act": "silu", "hidden_size": 3712,
    "intermediate_size": 14_848, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 232,
    "mamba_expand": 2, "mamba_proj_bias": False, "max_position_embeddings": 4096, "n_mamba_heads": 2,
    "num_attention_heads": 16, "num_hidden_layers": 76, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "vocab_size": 32_000,
}  # fmt: skip


def read(**fields: Any) -> ModelSpec:
    return read_model(HfConfig({**PUBLISHED, **fields}), name="it")


def test_a_published_config_is_read() -> None:
    """38 states, and six uses of one block before them, each with keys and values and ranks of its own."""
    spec = read()
    assert spec.n_layers == 44
    assert spec.kv_layers == (5, 12, 19, 26, 33, 40)
    assert [spec.layers[i].shares for i in spec.kv_layers] == [None, *[5] * 5]
    assert parameter_count(spec) == 1_215_064_704  # 1.2 billion, as its makers count
    assert spec.state_elements * STATE_BYTES == 38 * 4 * (64 * 64 * 128 + 3 * (4096 + 2 * 128))
    assert (spec.attention.head_dim, spec.attention.scale) == (128, 64**-0.5)
    assert spec.attention.rope is not None
    assert read(use_mem_rope=False).attention.rope is None
    assert read(use_long_context=True).max_context_tokens == 16_384


def test_the_first_one_s_config_is_read() -> None:
    """76 states of Mamba-1 in two heads, and thirteen uses of one block, the first behind two layers."""
    spec = read_model(HfConfig(FIRST), name="it")
    assert [spec.blocks[i][0] for i in spec.kv_layers] == [2, *range(7, 76, 6)]
    assert {spec.layers[i].shares for i in spec.kv_layers[1:]} == {2}
    assert 7.2e9 < parameter_count(spec) < 7.4e9
    (state,) = {spec.layers[i].attention.state for i in spec.state_layers}
    assert state is not None
    assert (state.n_key_heads, state.rank, state.width) == (2, 232, 7424)
    assert spec.attention.rope is None
    named = [*("mamba", "mamba", "hybrid"), *("hybrid" if i % 6 == 4 else "mamba" for i in range(73))]
    assert read_model(HfConfig({**FIRST, "layers_block_type": named}), name="it") == spec


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_mamba_heads": 3}, "n_mamba_heads in config.json is 3, of 7424 channels"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias in config.json is True"),
        ({"hidden_mamba_act": "gelu"}, "mamba_hidden_act in config.json is 'gelu'; layers with a state"),
        ({"attn_layer_period": 0}, "attn_layer_period in config.json is 0"),
        ({"adapter_rank": 128}, "adapter_rank in config.json is 128"),
    ],
    ids=str,
)
def test_what_the_first_one_has_not_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read_model(HfConfig({**FIRST, **fields}), name="it")


def test_blocks_take_turns() -> None:
    spec = read(num_mem_blocks=4)
    assert [spec.layers[i].shares for i in spec.kv_layers] == [None, None, None, None, 5, 12]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers_block_type": ["mamba"] * 37}, "layers_block_type in config.json must hold 38"),
        ({"layers_block_type": ["mamba"] * 37 + ["moe"]}, "layers_block_type in config.json must hold 38"),
        ({"layers_block_type": None}, "layers_block_type in config.json must hold 38"),
        ({"add_bias_linear": True}, "add_bias_linear in config.json is True"),
        ({"hidden_act": "silu"}, "hidden_act in config.json is 'silu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings in config.json is False"),
        ({"use_shared_mlp_adapter": False}, "use_shared_mlp_adapter in config.json is False"),
        ({"attention_head_dim": 64}, "head_dim in config.json is 64; it must be 128"),
        ({"attention_hidden_size": 2048}, "attention_hidden_size in config.json is 2048; it must be 4096"),
        ({"hybrid_layer_ids": [5]}, "hybrid_layer_ids in config.json is"),
        ({"mamba_headdim": 32}, "mamba_d_head in config.json is 32"),
        ({"num_key_value_heads": 8}, "num_key_value_heads in config.json is 8; with use_shared_attention_adapter"),
        ({"num_attention_heads": 33}, "33 heads do not divide twice that"),
        ({"num_mem_blocks": 0}, "num_mem_blocks in config.json is 0"),
        ({"adapter_rank": 0}, "adapter_rank in config.json is 0"),
        ({"time_step_min": -1.0}, "time_step_min in config.json is -1.0"),
        ({"num_experts": 4}, "num_experts in config.json is 4"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read(**fields)


@pytest.mark.parametrize("config", [REFERENCE, ComputeConfig(backend="cpu", weights="bf16")], ids=["torch", "cpu"])
@pytest.mark.native
def test_a_block_is_held_once(config: ComputeConfig, tmp_path: Path) -> None:
    """Three uses of two blocks take one block less than three of three."""
    nbytes, counts = [], []
    for n_blocks in (3, 2):
        path = make_checkpoint("zamba2", tmp_path / str(n_blocks), dtype=torch.bfloat16, num_mem_blocks=n_blocks)
        model = load_model(path, config)
        nbytes.append(model.weight_bytes)
        counts.append(parameter_count(model.spec))
    less, each = counts[0] - counts[1], 4 if config is REFERENCE else 2
    assert less > counts[1] / 6
    assert each * less <= nbytes[0] - nbytes[1] < 1.5 * each * less  # padded to lanes


def test_each_use_is_computed_and_priced() -> None:
    """Weights that are held once are multiplied, and read, by every layer that has them."""
    spec, one = read(), read(num_mem_blocks=6)
    assert parameter_count(one) > 1.4 * parameter_count(spec)
    assert linear_parameter_count(one) == linear_parameter_count(spec)
    step = StepShape.decode(batch=4, context_tokens=100)
    costs = [cost_of(model, step, quant=quant_spec("bf16"), kv=kv_spec("bf16")) for model in (spec, one)]
    assert costs[0].flops == costs[1].flops
    assert costs[0].weight_bytes == costs[1].weight_bytes > 2 * parameter_count(spec)


def test_names_of_every_use_in_a_file_are_those_of_one(tmp_path: Path) -> None:
    """Older files have a block under the name of each layer that uses it."""
    path = make_checkpoint("zamba2", tmp_path)
    tensors = load_file(path / "model.safetensors")
    copies = {name.replace("layers.1.", "layers.3."): one.clone() for name, one in tensors.items()
              if "layers.1.shared_transformer" in name}  # fmt: skip
    assert copies
    assert not copies.keys() & tensors.keys()
    prompt = list(range(3, 40))
    plain = Stepper(load_model(path, REFERENCE)).prefill("it", prompt, chunk=None)
    save_file({**tensors, **copies}, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Stepper(load_model(path, REFERENCE)).prefill("it", prompt, chunk=None), plain)


def test_adapters_of_a_block_are_refused_by_name(tmp_path: Path) -> None:
    """In transformers each use has one of its own."""
    path = make_checkpoint("zamba2", tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(make_reference("zamba2"), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(LoadError, match=r"q_proj, whose weights several layers share"):
        load_model(path, REFERENCE).add_adapter(read_adapter(tmp_path / "adapter", max_rank=8))


def test_a_config_without_its_kinds_is_the_class_s_own() -> None:
    given = json.loads(json.dumps({"model_type": "zamba2"}))
    spec = read_model(HfConfig(given), name="it")
    assert len(spec.kv_layers) == 9
    assert spec.n_blocks == 54
