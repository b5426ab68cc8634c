"""HY V4 as a whole on the native backend: streams by hyper-connections, sinks and gates of latent heads, in every format."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, one_row_less
from diptych.compute.loading.quant import save_quantised
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from worlds import KERNEL_SETS, alone, check_cuts, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("hy_v4", tmp_path_factory.mktemp("hy_v4"), dtype=torch.bfloat16)


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """A row's connections are of that row alone, whoever is beside it."""
    check_cuts(path, replace(CONFIG, weights=weights, kv=kv), [(9, 3)])


@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_each_set_is_equal_within_itself(path: Path, isa: str) -> None:
    """Products of whole streams have one order in every set."""
    model = load_model(path, replace(CONFIG, instruction_set=isa))
    whole = alone(model, prompt(40), None)
    assert not alone(model, prompt(40), 3).differs_from(whole)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: connections, sinks, norms."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)


CLASS_NAMES = (
    ("hc_pre.hc_attn_layer.hc_", "attn_hc."), ("hc_pre.hc_mlp_layer.hc_", "ffn_hc."),
    ("hc_pre.hc_head.hc_head_", "hc_head.hc_"), ("learnable_sink_param", "sinks"), ("linear_gate", "gate_proj"),
)  # fmt: skip
OWN_NAMES = (
    ("hc_pre.hc_attn_layer.", "hc_attn_layer.hc_pre."), ("hc_pre.hc_mlp_layer.", "hc_mlp_layer.hc_pre."),
    ("hc_pre.hc_head.", "hc_head.hc_pre."), ("mlp.linear_gate", "mlp.gate_proj"),
    ("shared_experts.linear_gate", "shared_experts.gate_proj"),
)  # fmt: skip


@pytest.mark.parametrize("names", [CLASS_NAMES, OWN_NAMES], ids=["of the class", "of the model's own files"])
def test_a_file_may_name_tensors_in_other_ways(path: Path, names: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    """transformers reads all of them; layers that draft lie beside, and nobody reads those."""
    tensors, other = load_file(path / "model.safetensors"), Path(shutil.copytree(path, tmp_path / "other"))
    renamed = {"model.mtp_layers.0.self_attn.o_proj.weight": torch.ones(2, 2)}
    for name, tensor in tensors.items():
        renamed[reduce(lambda one, pair: one.replace(*pair), names, name)] = tensor
    assert len(renamed.keys() - tensors.keys()) > 3 * 6
    save_file(renamed, other / "model.safetensors", metadata={"format": "pt"})
    whole, again = (alone(load_model(one, CONFIG), prompt(20), None) for one in (path, other))
    assert not again.differs_from(whole)


@pytest.mark.parametrize(
    ("part", "shape"),
    [("hc_attn_layer.hc_fn", [6, 192]), ("hc_mlp_layer.hc_scale", [2]), ("hc_head.hc_head_base", [3]),
     ("learnable_sink_param", [4]), ("self_attn.linear_gate.weight", [48, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=re.escape(part)):
        load_model(one_row_less(path, part, shape, tmp_path / "other"), CONFIG)


@pytest.mark.parametrize(
    "field",
    [("hc_magnitude", 0.7), ("hc_eps", 0.2), ("swiglu_limit", 50.0), ("index_topk", 256), ("rms_norm_eps", 0.1)],
)
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, float], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    config = json.loads((path / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, field[0]: field[1]}))
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03
