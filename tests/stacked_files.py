"""Mixtures whose experts lie in one tensor of fp8, by transformers' own quantiser, beside plain ones of the very values.

coded, plain = stacked_checkpoints("blocks", original_stacks(folder), folder)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from checkpoints import make_checkpoint
from coded_files import Tensors
from diptych.models.config import read_json

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 4}
Written = tuple[Tensors, torch.Tensor]


def original_stacks(folder: Path, **sizes: int) -> Path:
    """A plain checkpoint of Mistral Small 4."""
    return make_checkpoint("mistral4", folder / "original", dtype=torch.bfloat16, **(SIZES | sizes))


def by_transformers(block: tuple[int, int] | None, **fields: str) -> Callable[[str, torch.Tensor], Written]:
    """What its quantiser saves of a tensor, and its values as its own dequantisation has them, in fp32."""
    made = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block, **fields)))

    def write(name: str, w: torch.Tensor) -> Written:
        parts = made.convert({name: w.float()})
        assert len(parts) == 2, name
        scale = next(part for one, part in parts.items() if one != name)
        return parts, made.reverse_op._dequantize_one(parts[name], scale, torch.float32)

    return write


def of_halves(name: str, w: torch.Tensor) -> Written:
    """A scale of gate and one of up, for which FP8Experts has room."""
    is_pair = w.ndim == 3 and "gate_up" in name
    return by_transformers((w.shape[-2] // (2 if is_pair else 1), w.shape[-1]))(name, w)


def of_all(name: str, w: torch.Tensor) -> Written:
    """One scale for all experts."""
    parts, values = by_transformers(None)(name, w.flatten(0, -2))
    parts[name] = parts[name].view(w.shape)
    return {one: part if one == name else part.reshape(1) for one, part in parts.items()}, values.view(w.shape)


def of_experts(name: str, w: torch.Tensor) -> Written:
    """As Mistral Small 4: a scale of each expert, and one of its inputs."""
    parts, values = by_transformers(None)(name, w)
    if w.ndim == 3:
        return {**parts, f"{name}_activation_scale": torch.full((len(w),), 0.5)}, values
    return {**parts, f"{name.removesuffix('weight')}activation_scale": torch.tensor(0.5)}, values


# block of the config, how its tensors are written, what holds stacked experts
KINDS = {
    "blocks": ([128, 128], by_transformers((128, 128)), "fp8-g128"),
    "blocks in powers of two": ([128, 128], by_transformers((128, 128), scale_fmt="ue8m0"), "fp8-g128"),
    "small blocks": ([32, 64], by_transformers((32, 64)), None),
    "experts": (None, of_experts, "fp8"),
    "gate and up": (None, of_halves, "fp8"),
    "all": (None, of_all, "fp8"),
}


def stacked_checkpoints(kind: str, original: Path, folder: Path) -> tuple[Path, Path]:
    """(as transformers quantises it, plain fp32 of the same values)"""
    block, write, _ = KINDS[kind]
    coded: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        coded[name] = plain[name] = tensor
        if ".experts." in name or (".shared_experts." in name and tensor.ndim == 2):
            parts, values = write(name, tensor)
            coded |= {one: part.contiguous() for one, part in parts.items()}
            plain[name] = values.contiguous()
    config = read_json(original / "config.json")
    scheme = "static" if kind == "experts" else "dynamic"
    section = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}
    for path, tensors, more in (
        (folder / "coded", coded, {"quantization_config": section}),
        (folder / "plain", plain, {}),
    ):
        shutil.copytree(original, path)
        (path / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return folder / "coded", folder / "plain"
