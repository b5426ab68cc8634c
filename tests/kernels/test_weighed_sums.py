"""Sums that are weighed by channel, norms behind heads and behind each expert: Muse Spark on the native backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from family_checks import (
    CPU,
    FORMAT_IDS,
    FORMATS,
    REFERENCE,
    bent,
    check_felt,
    check_packed,
    check_refused_by_name,
    with_fields,
    with_tensors,
)
from worlds import KERNEL_SETS, alone, check_cuts, check_past_a_tile, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
N_TOKENS = 279


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("muse_spark", tmp_path_factory.mktemp("spark"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(path: Path) -> torch.Tensor:
    return alone(load_model(path, REFERENCE), prompt(N_TOKENS), None).logits


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=FORMAT_IDS)
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    check_cuts(path, replace(CPU, weights=weights, kv=kv))


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_every_set_is_near_fp32(path: Path, expected: torch.Tensor, name: str) -> None:
    """And has the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(path, expected, name, "bf16", chunk=139)


@pytest.fixture(scope="module")
def unchosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A model whose tokens meet all experts, and its logits in fp32."""
    path = make_checkpoint("muse_spark", tmp_path_factory.mktemp("all"), dtype=torch.bfloat16, num_experts_per_tok=8)
    return path, alone(load_model(path, REFERENCE), prompt(60), None).logits


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_where_nothing_is_chosen_every_set_is_as_near_as_a_dense_model(
    unchosen: tuple[Path, torch.Tensor], name: str
) -> None:
    """0.03: what is farther above comes of choices. Without the norm behind experts it would be 0.8."""
    path, logits = unchosen
    found = alone(load_model(path, replace(CPU, instruction_set=name)), prompt(60), None).logits
    assert ((found - logits).norm() / logits.norm()).item() < 0.05


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps gates of sums, and what stands before norms."""
    check_packed(path, weights, tmp_path / "packed")


@pytest.mark.parametrize(
    ("part", "shape"),
    [("post_attention_residual_gate.gate", [64]), ("post_feedforward_layernorm.weight", [64]),
     ("experts.post_expert_norm.weight", [48]), ("pre_expert_norm.weight", [48]), ("pre_expert_proj", [48, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    check_refused_by_name(path, part, shape, tmp_path / "other")


@pytest.mark.parametrize(
    "field",
    [("residual_gate_temperature", 2.0), ("post_norm_eps", 1e-8), ("output_multiplier", 1.4), ("routed_scaling_factor", 3.0),
     ("qk_scale_factor", 6.0)],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong."""
    check_felt(path, with_fields(path, tmp_path / "other", **dict([field])))


@pytest.mark.parametrize(
    "part",
    ["post_attention_residual_gate.gate", "post_feedforward_residual_gate.gate", "post_feedforward_layernorm.weight",
     "post_expert_norm.weight", "pre_expert_norm.weight"],
)  # fmt: skip
def test_every_tensor_is_felt(path: Path, part: str, tmp_path: Path) -> None:
    check_felt(path, with_tensors(path, tmp_path / "other", part, bent))
