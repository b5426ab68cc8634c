"""Weights made of a checkpoint's values in blocks of GGUF, against files of such blocks that the `gguf` package wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from diptych.compute.model import Model
from diptych.compute.runner import load_model
from diptych.cost.setup import own_quant
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, LoadError
from diptych.ground.formats import MADE_WEIGHTS
from diptych.models.files import WHOLE_FILE
from gguf_files import gguf_reference, write_gguf
from stepping import Stepper
from thread_ranks import load_over_threads

pytestmark = pytest.mark.native
PROMPT = list(range(3, 60))
NOT_MADE = ("norm", "bias", "ffn_gate_inp", "token_embd")  # the table is of 16 bits where it is not the head, too


def logits_of(model: Model) -> torch.Tensor:
    return Stepper(model).prefill("it", PROMPT, chunk=None)


@pytest.mark.parametrize(
    ("family", "weights"),
    [*(("qwen2", weights) for weights in MADE_WEIGHTS), ("mixtral", "q8_0"), ("mixtral", "q4_1"), ("llama", "q5_1")],
)
def test_they_are_the_blocks_of_a_file(family: str, weights: str, tmp_path: Path) -> None:
    """Whose head is in Q8_0 and, where it is tied, the table with it."""
    is_tied = family == "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    reference = gguf_reference(family, **sizes, tie_word_embeddings=is_tied).to(torch.bfloat16)
    reference.save_pretrained(str(tmp_path / "folder"))

    def kind_of(name: str) -> str:
        if any(part in name for part in NOT_MADE) and not (is_tied and name.startswith("token_embd")):
            return "BF16" if name.endswith(".weight") and "norm" not in name else "F32"
        return "Q8_0" if name.startswith(("output.", "token_embd")) else weights.upper()

    path = write_gguf(reference, tmp_path / "model.gguf", choose=kind_of)
    for activations in ("int8", "int15"):
        config = ComputeConfig(backend="cpu", weights=weights, activations=activations, threads=1)
        made = load_model(tmp_path / "folder", config)
        file = load_model(path, ComputeConfig(backend="cpu", activations=activations, threads=1))
        assert made.weights_format == file.weights_format
        assert torch.equal(logits_of(made), logits_of(file))
        assert made.weight_bytes == file.weight_bytes


def test_a_table_that_a_file_has_in_codes_stays_so(tmp_path: Path) -> None:
    """Its own codes were asked of blocks that were made, and its rows were noise."""
    reference = gguf_reference("gemma3n", hidden_size_per_layer_input=32)
    kinds = {True: "Q4_0", False: "F32"}
    path = write_gguf(
        reference, tmp_path / "m.gguf", choose=lambda name: kinds[name.startswith("per_layer_token_embd")]
    )
    made, plain = (
        logits_of(load_model(path, ComputeConfig(backend="cpu", weights=weights, threads=1)))
        for weights in ("q8_0", "bf16")
    )
    assert (made - plain).std() < 0.1 * plain.std(), "8 bits of the layers cost half of that"


def test_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "it", hidden_size=64, intermediate_size=96)
    config = ComputeConfig(backend="cpu", weights="q8_0", threads=1)
    whole = logits_of(load_model(path, config))
    model = load_over_threads(path, ComputeConfig(backend="cpu", weights="q8_0", threads=2, tp=2))
    assert torch.equal(logits_of(model), whole)
    model.close()


def test_inputs_that_are_no_whole_blocks_stay_in_16_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "head_dim": 12}
    path = make_checkpoint("qwen3", tmp_path / "it", **sizes)
    made = load_model(path, ComputeConfig(backend="cpu", weights="q8_0", threads=1))
    plain = load_model(path, ComputeConfig(backend="cpu", weights="bf16", threads=1))
    assert made.weights_format == "bf16"
    assert torch.equal(logits_of(made), logits_of(plain))


@pytest.mark.parametrize("weights", MADE_WEIGHTS)
def test_a_model_has_the_bytes_that_the_planner_reckons(weights: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "it", hidden_size=256, intermediate_size=512, tie_word_embeddings=True)
    model = load_model(path, ComputeConfig(backend="cpu", weights=weights, threads=1))
    tensors = load_file(path / WHOLE_FILE)
    head = tensors["model.embed_tokens.weight"].numel()
    layers = sum(one.numel() for name, one in tensors.items() if "proj" in name)
    quant = own_quant(weights)
    assert quant.head_weight_bytes is not None
    reckoned = head * quant.head_weight_bytes + layers * quant.weight_bytes
    assert quant.pace < 1.0, "groups end"
    assert reckoned <= model.weight_bytes < 1.1 * reckoned


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "it", hidden_size=64, intermediate_size=96)
    tensors = load_file(path / WHOLE_FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path / WHOLE_FILE, {"format": "pt"})
    with pytest.raises(
        LoadError, match=r"layers\.1\.mlp\.up_proj\.weight has a weight that is not finite; q4_0 cannot"
    ):
        load_model(path, ComputeConfig(backend="cpu", weights="q4_0", threads=1))


def test_torch_has_none(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "it")
    with pytest.raises(ConfigError, match="weights is 'q8_0'; the torch backend has fp32 and bf16"):
        load_model(path, ComputeConfig(backend="torch", device="cpu", weights="q8_0"))
