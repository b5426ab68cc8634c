"""What holds of every family whose layers have parts of their own: bytes, packed folders, damaged and changed files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import one_row_less
from diptych.compute.loading.quant import save_quantised
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.ground.specs import KVSpec
from worlds import alone, prompt

CPU = ComputeConfig(backend="cpu", threads=1)
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]  # of weights and caches
FORMAT_IDS = ["-".join(pair) for pair in FORMATS]


def check_bytes_of_a_token(path: Path, planned: int) -> None:
    """The planner and both backends agree on what a token takes of a cache in bf16."""
    for backend in ("cpu", "torch"):
        config = ComputeConfig(backend=backend, device="cpu", kv="bf16")
        model = load_model(path, config)
        assert kv_bytes_per_token(model.spec, KVSpec()) == planned
        assert model.kv_bytes_per_block(16) == 16 * planned
        assert memory_of_block(model.spec, config, 16)[1] == 16 * planned


def check_packed(path: Path, weights: str, folder: Path) -> None:
    """A folder of `diptych quantize` has the bits of the checkpoint that it was made from."""
    save_quantised(path, folder, weights=weights)
    whole = alone(load_model(path, replace(CPU, weights=weights)), prompt(30), None)
    assert not alone(load_model(folder, CPU), prompt(30), 7).differs_from(whole)


def check_refused_by_name(path: Path, part: str, shape: list[int], copy: Path) -> None:
    """A tensor that has lost a row, the first with that part in its name."""
    with pytest.raises(LoadError, match=re.escape(part)):
        load_model(one_row_less(path, part, shape, copy), CPU)


def check_felt(path: Path, other: Path) -> None:
    """Two models give different logits: otherwise no comparison with transformers would see the difference go wrong."""
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03


def with_fields(path: Path, copy: Path, **fields: Any) -> Path:
    """A copy whose config, that of its text where there is one, has other fields."""
    shutil.copytree(path, copy)
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config).update(fields)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_tensors(path: Path, copy: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy where all tensors with that part in their names are changed."""
    shutil.copytree(path, copy)
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if part in name]
    assert names
    save_file(
        tensors | {name: change(tensors[name]) for name in names}, copy / "model.safetensors", metadata={"format": "pt"}
    )
    return copy


def bent(tensor: torch.Tensor) -> torch.Tensor:
    """Each row moved by another number."""
    return tensor + 0.3 * torch.arange(len(tensor)).cos()
