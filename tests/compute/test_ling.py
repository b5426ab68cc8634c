"""Ling 3.0 as its makers' files have it, against transformers where that has less: low ranks of queries, limits of experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import ask_reference, check_golden
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, make_reference
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from stepping import Stepper

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FAMILY, RANK, EPS = "bailing_hybrid", 24, 1e-6


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def rewrite(path: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> None:
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"}
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


class LowRank(torch.nn.Module):
    """Queries by a rank of their own, normed between, as DeepSeek V3 has them."""

    def __init__(self, down: torch.Tensor, norm: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.down, self.norm, self.up = down, norm, up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(F.linear(x, self.down), (RANK,), self.norm, EPS), self.up)


def test_queries_may_have_a_rank(tmp_path: Path) -> None:
    """Ling 3.0 tiny; the class of transformers has no such projections, so those of this test stand in their place."""
    path, oracle = make_checkpoint(FAMILY, tmp_path), make_reference(FAMILY)
    tensors, generator = tensors_of(path), torch.Generator().manual_seed(1)
    name = next(name for name in tensors if name.endswith("kv_a_layernorm.weight")).removesuffix(
        "kv_a_layernorm.weight"
    )
    q = tensors.pop(f"{name}q_proj.weight")
    down, up = (torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in ((RANK, 64), (len(q), RANK)))
    norm = 1 + 0.2 * torch.randn(RANK, generator=generator)
    tensors |= {f"{name}q_a_proj.weight": down, f"{name}q_a_layernorm.weight": norm, f"{name}q_b_proj.weight": up}
    rewrite(path, tensors, q_lora_rank=RANK)
    number = re.search(r"layers\.(\d+)", name)
    assert number is not None
    oracle.model.layers[int(number[1])].self_attn.q_proj = LowRank(down, norm, up)
    check_golden(load_model(path, REFERENCE), ask_reference(oracle, path, new_tokens=8), chunk=9)


def held(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def test_limits_of_experts_are_held_as_the_makers_serve_them(tmp_path: Path) -> None:
    """silu(gate) below a limit, up within it, of experts and shared experts of some layers, as vLLM and SGLang have it."""
    path, oracle = make_checkpoint(FAMILY, tmp_path), make_reference(FAMILY)
    experts, shared = [0, 0, 0.1, 0.3], [0, 0, 0, 0.4]
    plain = Stepper(load_model(path, REFERENCE)).prefill("it", list(range(5, 40)))
    rewrite(path, tensors_of(path), expert_swiglu_limit_list=experts, share_expert_swiglu_limit_list=shared)
    limited = Stepper(load_model(path, REFERENCE)).prefill("it", list(range(5, 40)))
    assert (plain - limited).abs().max() > 0.1, "the limits hold next to nothing back; the test would see nothing"
    for layer, of_experts, of_shared in zip(oracle.model.layers, experts, shared, strict=True):
        if of_experts:
            layer.mlp.experts._apply_gate = lambda both, limit=of_experts: held(both, limit)
        if of_shared:
            mlp = layer.mlp.shared_experts
            mlp.forward = lambda x, mlp=mlp, limit=of_shared: mlp.down_proj(
                held(torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1), limit)
            )
    oracle.set_experts_implementation("batched_mm")  # the one of them that asks for _apply_gate
    check_golden(load_model(path, REFERENCE), ask_reference(oracle, path, new_tokens=8), chunk=9)


@pytest.mark.parametrize(
    "names",
    [
        (("attention.dense", "attention.o_proj"),),
        (("gate.expert_bias", "gate.e_score_correction_bias"), ("attention.dense", "attention.o_proj")),
    ],
    ids=str,
)
def test_files_call_some_tensors_otherwise(names: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    """What leaves a state is o_proj in the makers' files; layers that draft lie beside, and nobody reads those."""
    path = make_checkpoint(FAMILY, tmp_path)
    expected = Stepper(load_model(path, REFERENCE)).prefill("it", list(range(5, 30)))
    renamed = {"model.layers.4.eh_proj.weight": torch.ones(2, 2), "model.mtp.norm.weight": torch.ones(2)}
    for name, tensor in tensors_of(path).items():
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    rewrite(path, renamed)
    assert torch.equal(Stepper(load_model(path, REFERENCE)).prefill("it", list(range(5, 30))), expected)
