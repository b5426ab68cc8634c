"""Folders of Gemma's own packing: transformers, which has the only reader of them, gives the same logits and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.gemma_quant import QuantizedEmbedding

from checkpoints import make_checkpoint
from coded_files import TOKENS, gemma, logits_of, packed_bytes, quantised_checkpoints
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.models.config import read_json
from diptych.models.contents import contents_of


@pytest.mark.parametrize(("family", "bits"), [("gemma3", 4), ("gemma", 2), ("llama", 8)])
def test_a_packed_folder_of_gemma_gives_the_logits_of_transformers(family: str, bits: int, tmp_path: Path) -> None:
    """Which reads it itself; without scales of activations neither of the two rounds any."""
    original = make_checkpoint(family, tmp_path / "original", dtype=torch.bfloat16)
    coded, _ = quantised_checkpoints(original, tmp_path, gemma(bits))
    names = [name.rpartition(".") for name in load_file(coded / "model.safetensors")]
    packed = {stem for stem, _, part in names if part == "weight_scale"}
    config = read_json(coded / "config.json")
    floats = sorted({"lm_head", *(stem for stem, _, _ in names if stem not in packed)})
    config["quantization_config"]["modules_to_not_convert"] = floats
    (coded / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(coded, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.3
    assert (logits_of(coded, backend="torch", weights="fp32") - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("blocks", [1, 2])
def test_embeddings_of_gemma_are_read_in_codes(blocks: int, tmp_path: Path) -> None:
    """One table is the head, too, and another is gathered from by layer: transformers' own tables are the reference."""
    original = make_checkpoint("gemma3n", tmp_path / "original", dtype=torch.bfloat16)
    coded, plain = quantised_checkpoints(original, tmp_path, gemma(4))
    tensors, values = load_file(coded / "model.safetensors"), load_file(plain / "model.safetensors")
    names = [name for name in values if "embed_tokens" in name]
    assert len(names) == 2
    for name, bits in zip(names, (8, 2), strict=True):
        stem, (n, width) = name.removesuffix(".weight"), values[name].shape
        table = QuantizedEmbedding(n, width, torch.float32, num_bits=bits)
        codes = torch.randint(
            -(1 << (bits - 1)), 1 << (bits - 1), (n, width), generator=torch.Generator().manual_seed(bits)
        )
        table.embedding_quantized.data = packed_bytes(codes.to(torch.int8), bits)
        table.embedding_scale.data = 0.01 * torch.rand(n, blocks, generator=torch.Generator().manual_seed(n)) + 0.001
        del tensors[name]
        tensors |= {f"{stem}.{part}": one.data for part, one in table.named_parameters()}
        values[name] = table.weight.detach()
    tensors["model.layers.0.self_attn.k_cache_scale"] = torch.tensor(0.1)
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = read_json(coded / "config.json")
    patterns = {r"embed_tokens$": {"num_bits": 8}, "per_layer$": {"num_bits": 2}}
    config["quantization_config"] |= {"quantize_embeddings": True, "module_quant_configs": patterns}
    (coded / "config.json").write_text(json.dumps(config))
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert torch.equal(logits_of(coded, backend="torch", weights="fp32"), exact)
    expected = load_model(plain, ComputeConfig(backend="torch", threads=1)).n_parameters
    assert sum(group.parameters for group in contents_of(coded).groups) == expected
    if instruction_sets():
        assert (logits_of(coded, backend="cpu") - exact).abs().mean() < 0.06 * exact.std()
