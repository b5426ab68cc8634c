"""What amd-quark 0.13 exports beside what `coded_files` and `newer_files` have, with their machinery: whole numbers of 4 bits
by row, those of 8 bits alone, MXFP6 and MXFP8 (`torch/utils/pack.py`, compared by hand), and gpt-oss, whose experts it takes
apart (`torch/utils/llm/module_replacement/quark_experts.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from coded_files import AWQ_ORDER, Layout, Tensors, mxfp4_checkpoint, quark, rounded, valued

MX = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
FP8_INPUTS = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
# of 6 bits: the numbers of codes 0 to 31
LADDERS = {
    "fp6_e2m3": [m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)],
    "fp6_e3m2": [m / 16 for m in range(4)] + [(1 + m / 4) * 2.0 ** (e - 2) for e in range(7) for m in range(4)],
}  # fmt: skip


def with_weights(
    weight: dict[str, Any], inputs: dict[str, Any] | None = None, *, in_order: bool = False
) -> dict[str, Any]:
    """A config with that type of all weights."""
    section = quark("fp4", in_order=in_order).config
    return {**section, "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None}}


def by_row(kind: str, *, in_order: bool = False) -> Layout:
    """int4 or uint4, eight to a word along the inputs, zero points along the outputs; both filled up with zeros."""
    order = range(8) if in_order else AWQ_ORDER

    def packed(values: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(values.shape[0], -(-values.shape[1] // 8), dtype=torch.int64)
        for i, place in enumerate(order):
            some = values[:, place::8] & 15
            words[:, : some.shape[1]] |= some << (4 * i)
        return words.to(torch.int32)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = rounded(w, 4, w.shape[1], symmetric=kind == "int4")
        shift = 8 if kind == "int4" else 0
        parts = {
            "weight": packed(codes - shift),
            "weight_scale": scales[:, 0],
            "weight_zero_point": packed((zeros - shift).T)[0],
        }
        return parts, valued(codes, scales, zeros, torch.zeros(w.shape[1], dtype=torch.long))

    spec = {"dtype": kind, "qscheme": "per_channel", "ch_axis": 0, "group_size": None, "is_dynamic": False}
    return Layout(with_weights(spec, in_order=in_order), write)


def int8_alone() -> Layout:
    """Beside activations as they are."""
    made = quark("int8")
    return Layout(with_weights(made.config["global_quant_config"]["weight"]), made.write)


def mx(kind: str) -> Layout:
    """MXFP6, four codes in three bytes, the first in the lowest bits, or MXFP8."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = w.reshape(len(w), -1, 32)
        top = 448.0 if kind == "fp8_e4m3" else LADDERS[kind][-1]
        exponents = (groups.abs().amax(-1) / top).log2().ceil()
        scaled, each = groups / exponents.exp2()[..., None], exponents.exp2()[..., None]
        scales = (exponents + 127).to(torch.uint8)
        if kind == "fp8_e4m3":
            codes = scaled.to(torch.float8_e4m3fn)
            return {"weight": codes.view(w.shape), "weight_scale": scales}, (codes.float() * each).view(w.shape)
        ladder = torch.tensor(LADDERS[kind])
        nearest = (scaled.abs()[..., None] - ladder).abs().argmin(-1)
        codes = (nearest + 32 * (scaled < 0)).view(len(w), -1, 4)
        word = sum(codes[..., i] << (6 * i) for i in range(4))
        stored = torch.stack([word >> 8 * i & 255 for i in range(3)], -1).to(torch.uint8)
        values = torch.where(scaled < 0, -1.0, 1.0) * ladder[nearest] * each
        return {"weight": stored.flatten(1), "weight_scale": scales}, values.view(w.shape)

    return Layout(with_weights({"dtype": kind, **MX}), write)


def gpt_oss_of_quark(folder: Path, **fields: Any) -> tuple[Path, Path]:
    """(as amd publishes gpt-oss, MXFP4 of experts that lie one by one, as OpenAI does): the same blocks and biases."""
    published, _ = mxfp4_checkpoint(folder / "blocks", **fields)
    tensors: Tensors = {}
    for name, tensor in load_file(published / "model.safetensors").items():
        before, experts, what = name.partition(".mlp.experts.")
        if not experts:
            tensors[name] = tensor
            continue
        projection, _, kind = what.rpartition("_")
        ending = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}[kind]
        for e, own in enumerate(tensor):
            prefix = f"{before}{experts}{e}.{projection}."
            tensors[f"{prefix}{ending}"] = own.flatten(1) if kind == "blocks" else own.clone()
            tensors[f"{prefix}input_scale"] = torch.tensor(0.02)
    made = folder / "quark"
    made.mkdir()
    for file in published.glob("*.json"):
        shutil.copyfile(file, made / file.name)
    config = json.loads((made / "config.json").read_text())
    section = with_weights({"dtype": "fp4", **MX}, FP8_INPUTS) | {"exclude": ["lm_head", "*router*", "*self_attn*"]}
    (made / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made, published
