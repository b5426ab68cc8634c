"""Sums that are weighed by channel, norms behind heads and behind each expert: Muse Spark on the native backend."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, one_row_less
from diptych.compute.ops.cpu_kernels import instruction_sets
from diptych.compute.quant import save_quantised
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from worlds import KERNEL_SETS, alone, check_cuts, check_past_a_tile, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]
N_TOKENS = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("muse_spark", tmp_path_factory.mktemp("spark"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(path: Path) -> torch.Tensor:
    return alone(load_model(path, REFERENCE), prompt(N_TOKENS), None).logits


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    check_cuts(path, replace(CONFIG, weights=weights, kv=kv))


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
    found = alone(load_model(path, replace(CONFIG, instruction_set=name)), prompt(60), None).logits
    assert ((found - logits).norm() / logits.norm()).item() < 0.05


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps gates of sums, and what stands before norms."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)


@pytest.mark.parametrize(
    ("part", "shape"),
    [("post_attention_residual_gate.gate", [64]), ("post_feedforward_layernorm.weight", [64]),
     ("experts.post_expert_norm.weight", [48]), ("pre_expert_norm.weight", [48]), ("pre_expert_proj", [48, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=part):
        load_model(one_row_less(path, part, shape, tmp_path / "other"), CONFIG)


@pytest.mark.parametrize(
    "field",
    [("residual_gate_temperature", 2.0), ("post_norm_eps", 1e-8), ("output_multiplier", 1.4), ("routed_scaling_factor", 3.0),
     ("qk_scale_factor", 6.0)],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= dict([field])
    (other / "config.json").write_text(json.dumps(config))
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03


@pytest.mark.parametrize(
    "part",
    ["post_attention_residual_gate.gate", "post_feedforward_residual_gate.gate", "post_feedforward_layernorm.weight",
     "post_expert_norm.weight", "pre_expert_norm.weight"],
)  # fmt: skip
def test_every_tensor_is_felt(path: Path, part: str, tmp_path: Path) -> None:
    other = Path(shutil.copytree(path, tmp_path / "other"))
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith(part) and "language_model" in name]
    assert names
    changed = {name: tensors[name] + 0.3 * torch.arange(len(tensors[name])).cos() for name in names}
    save_file(tensors | changed, other / "model.safetensors", metadata={"format": "pt"})
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03
