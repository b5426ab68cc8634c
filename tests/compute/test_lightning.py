"""Lightning attention as MiniMax-Text-01's and M1's own files have it, against transformers where that has less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import ask_reference, check_golden
from transformers import MiniMaxM2Config
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RotaryEmbedding, apply_rotary_pos_emb

from checkpoints import make_checkpoint, make_reference
from diptych.compute.runner import load_model
from diptych.cost.kv_bytes import STATE_BYTES
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.read import load_model_file, read_model
from diptych.models.spec import ModelSpec
from diptych.models.states import steady_decays

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
# config.json of MiniMax-M1, but for what no forward reads
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniMaxM1ForCausalLM"], "model_type": "minimax_m1", "attn_type_list": [*[0] * 7, 1] * 10,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 10_240_000,
    "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "num_local_experts": 32, "postnorm": True, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000, "rotary_dim": 64,
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "vocab_size": 200_064,
}  # fmt: skip


def read(**fields: Any) -> ModelSpec:
    return read_model(HfConfig({**PUBLISHED, **fields}), name="it")


def test_a_published_config_is_read() -> None:
    """By its own words: ten layers attend, whose heads turn by half; the others keep 64 matrices each."""
    spec = read()
    assert spec.kv_layers == tuple(range(7, 80, 8))
    rope = spec.attention.rope
    assert rope is not None
    assert rope.rotary_dim == 64
    scales = spec.layers[0].scales
    assert (scales.before_attention, scales.attention_out, scales.before_mlp, scales.mlp_out) == (
        PUBLISHED["layernorm_linear_attention_alpha"], 1.0, PUBLISHED["layernorm_mlp_alpha"], 1.0
    )  # fmt: skip
    assert spec.state_elements * STATE_BYTES == 70 * 64 * 128 * 128 * 4
    assert spec.states[0].norm_eps == 1e-6


def test_a_head_fades_by_its_number_and_its_layer_s() -> None:
    """The slopes of ALiBi in the first layer, next to nothing in the last."""
    first, last = steady_decays(4, 0, 3), steady_decays(4, 2, 3)
    assert first == pytest.approx([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], rel=2e-5)
    assert 0 < last[0] < 1e-5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"postnorm": False}, "postnorm in config.json is False"),
        ({"shared_intermediate_size": 9216}, "shared_intermediate_size in config.json is 9216"),
        ({"sliding_window": 64}, "sliding_window in config.json is 64"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act in config.json is 'gelu_pytorch_tanh'; layers with a state"),
        ({"attn_type_list": [0, 1]}, "layer_types in config.json has 2 entries; the model has 80 layers"),
        ({"attn_type_list": [2] * 80}, "attn_type_list"),
        ({"rotary_dim": 130}, "rotary dimension 130 of head_dim 128"),
        ({"layernorm_mlp_alpha": "3"}, "mlp_alpha_factor in config.json is '3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read(**fields)


def test_the_words_of_published_files_are_those_of_transformers(tmp_path: Path) -> None:
    """Layers as numbers, factors under names of their own: the same model."""
    path = make_checkpoint("minimax", tmp_path)
    given = json.loads((path / "config.json").read_text())
    ours = load_model_file(path)
    words = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for part, theirs in words.items():
        for one in ("alpha", "beta"):
            given[f"layernorm_{theirs}_{one}"] = given.pop(f"{part}_{one}_factor")
    given["attn_type_list"] = [int(kind == "full_attention") for kind in given.pop("layer_types")]
    given |= {"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "postnorm": True}
    (path / "config.json").write_text(json.dumps(given))
    assert load_model_file(path) == ours


def test_a_part_of_each_head_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As their makers' code has it; that of transformers turns whole heads, so MiniMax M2's rotation stands in its place."""
    fields = {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    path, oracle = make_checkpoint("minimax", tmp_path, **fields), make_reference("minimax", **fields)
    turned = {**fields["rope_parameters"], "partial_rotary_factor": 0.5}
    config = MiniMaxM2Config(head_dim=24, hidden_size=64, num_attention_heads=4, rope_parameters=turned)
    oracle.model.rotary_emb = MiniMaxM2RotaryEmbedding(config)
    assert len(oracle.model.rotary_emb.inv_freq) == 6
    monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    whole = load_model(path, REFERENCE)
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**given, "rotary_dim": 12}))
    golden = ask_reference(oracle, path, new_tokens=6)
    check_golden(load_model(path, REFERENCE), golden, chunk=9)
    with pytest.raises(AssertionError):
        check_golden(whole, golden, chunk=9)


def test_states_fade_over_a_long_prompt(tmp_path: Path) -> None:
    """Longer than the chunks in which either computes: what is left between them is what is left within one."""
    path = make_checkpoint("minimax", tmp_path)
    golden = ask_reference(make_reference("minimax"), path, 200, 4)
    check_golden(load_model(path, REFERENCE), golden, chunk=None)
    assert torch.isfinite(golden.logits).all()
