"""A checkpoint of gpt-oss whose experts lie in blocks of MXFP4, as published ones do."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints import make_checkpoint

QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def random_blocks(*rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and scales around 2^-5."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*rows, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(119, 124, rows, generator=generator, dtype=torch.uint8)


def mxfp4_checkpoint(directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose experts lie in blocks, and what transformers reads in them."""
    path = make_checkpoint("gpt_oss", directory)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISATION}))
    tensors, dequantised = load_file(path / "model.safetensors"), {}
    for seed, name in enumerate([n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]):
        n_experts, columns, rows = tensors.pop(name).shape
        blocks, scales = random_blocks(n_experts, rows, columns // 32, seed=seed)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        dequantised[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(tensors, path / "model.safetensors")
    return path, dequantised
