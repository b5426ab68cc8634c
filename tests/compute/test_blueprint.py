"""What a config says of the output projection and of rotary factors, against what the files hold and the user asks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from diptych.compute.runner import load_model
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
PROMPT = list(range(5, 25))


@pytest.mark.parametrize("differs", [True, False])
def test_a_tied_config_beside_an_lm_head(differs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Merged and fine-tuned checkpoints have both; transformers uses the file's own head where it differs."""
    path = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    head = table.flip(0) if differs else table
    save_file({**tensors, "lm_head.weight": head.contiguous().clone()}, path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="diptych.compute"):
        model = load_model(path, REFERENCE)
    assert ("lm_head" in caplog.text) is differs
    assert model.spec.is_tied is not differs
    assert model.n_parameters == parameter_count(model.spec)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    assert (Stepper(model).prefill("a", PROMPT) - expected).abs().max() < 1e-4


def test_longrope_factors_are_named_and_can_be_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which keys turn by which factors is decided once, at load; the log says which and why."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    path = make_checkpoint("phi3", tmp_path, original_max_position_embeddings=64, rope_parameters=rope)
    names = {}
    for asked in ("auto", "short", "long"):
        config = ComputeConfig(backend="torch", device="cpu", weights="fp32", longrope=asked)
        with caplog.at_level(logging.INFO, logger="diptych.compute"):
            model = load_model(path, config, max_context_tokens=256)
        assert model.spec.attention.rope is not None
        names[asked] = model.spec.attention.rope.divisors_name
    assert names == {"auto": "long_factor", "short": "short_factor", "long": "long_factor"}
    assert "longrope factors=long_factor chosen=by max_context_tokens trained_tokens=64" in caplog.text
    assert "factors=short_factor chosen=asked for" in caplog.text


def test_a_deeply_nested_config_is_a_clear_error(tmp_path: Path) -> None:
    """A RecursionError used to come through."""
    path = make_checkpoint("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config)[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(Exception, match="deeper than") as caught:
        load_model(path, REFERENCE)
    assert type(caught.value).__name__ == "LoadError"
