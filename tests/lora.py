"""LoRA adapters for tests: written by hand in peft's layout, or by peft itself.

folder = write_adapter(directory, base, {"q_proj": 5, "down_proj": 3}, seed=1)
reference = peft_model("qwen2", directory, r=5, target_modules=["q_proj"])
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from checkpoints import make_reference

ALL = {"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": 4, "gate_proj": 4, "up_proj": 4, "down_proj": 4}


def write_adapter(
    directory: Path, base: Path, ranks: Mapping[str, int], *, seed: int = 0, size: float = 0.5, **config: Any
) -> Path:
    """An adapter of random numbers for those modules of every layer of a checkpoint; config: more of its config's fields."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(str(base / "model.safetensors"), framework="pt") as file:
        for name in sorted(file.keys()):
            module = name.removesuffix(".weight")
            rank = ranks.get(module.rpartition(".")[2])
            if rank is None or not name.endswith(".weight"):
                continue
            n, k = file.get_slice(name).get_shape()
            tensors |= _pair(f"base_model.model.{module}", n, k, rank, generator, size)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    first = next(iter(ranks.values()))
    known = {"peft_type": "LORA", "r": first, "lora_alpha": 2 * first, "rank_pattern": dict(ranks),
             "alpha_pattern": {name: 2 * rank for name, rank in ranks.items()}, "bias": "none"}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(known | config))
    return directory


def _pair(module: str, n: int, k: int, rank: int, generator: torch.Generator, size: float) -> dict[str, torch.Tensor]:
    a = torch.randn(rank, k, generator=generator) * k**-0.5
    b = torch.randn(n, rank, generator=generator) * size * rank**-0.5
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def peft_model(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    size: float = 0.5,
    fields: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> Any:
    """The tiny model of a family with a random adapter, in peft, which saves that into directory. fields: of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        model = peft.get_peft_model(
            make_reference(family, **fields), peft.LoraConfig(task_type="CAUSAL_LM", **config)
        ).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found = re.search(r"lora_([AB])", name)
                if found is not None:
                    scale = size if found[1] == "B" else 1.0
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=generator) * scale * parameter.shape[1] ** -0.5
                    )
        model.save_pretrained(str(directory))
    return model
