"""DiffLlama on the native backend: values of two heads, and half of the heads taken from the others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, one_row_less
from diptych.compute.ops.cpu_kernels import instruction_sets
from diptych.compute.quant import save_quantised
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.ground.specs import KVSpec
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
    return make_checkpoint("diffllama", tmp_path_factory.mktemp("diff"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as wide as they are published, and values twice as wide."""
    folder = tmp_path_factory.mktemp("wide")
    return make_checkpoint("diffllama", folder, dtype=torch.bfloat16, head_dim=64, max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(published: Path) -> torch.Tensor:
    return alone(load_model(published, REFERENCE), prompt(N_TOKENS), None).logits


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    check_cuts(path, replace(CONFIG, weights=weights, kv=kv))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", KERNEL_SETS)
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=139)


def test_a_token_takes_what_the_planner_says(published: Path) -> None:
    """Each of four heads a key of 64 and values of two heads."""
    planned = 2 * 3 * 4 * (64 + 128)
    for backend in ("cpu", "torch"):
        config = ComputeConfig(backend=backend, device="cpu", kv="bf16")
        model = load_model(published, config)
        assert kv_bytes_per_token(model.spec, KVSpec()) == planned
        assert model.kv_bytes_per_block(16) == 16 * planned
        assert memory_of_block(model.spec, config, 16)[1] == 16 * planned


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` writes values as they are packed, and keeps what a difference is made of."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)


def test_values_of_an_odd_number_of_heads_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("diffllama", tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_key_value_heads": 4', '"num_key_value_heads": 1'))
    with pytest.raises(LoadError, match=r"num_key_value_heads in .* is 1; values of diffllama are those of two heads"):
        load_model(path, CONFIG)


@pytest.mark.parametrize(("part", "shape"), [("lambda_q1", [24]), ("lambda_k2", [24]), ("v_proj.weight", [96, 64])])
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=part):
        load_model(one_row_less(path, part, shape, tmp_path / "other"), CONFIG)


@pytest.mark.parametrize("part", ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "v_proj.bias"])
def test_every_tensor_is_felt(path: Path, part: str, tmp_path: Path) -> None:
    other = Path(shutil.copytree(path, tmp_path / "other"))
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith(part)]
    assert len(names) == 3
    changed = {name: tensors[name] + 0.3 * torch.arange(len(tensors[name])).cos() for name in names}
    save_file(tensors | changed, other / "model.safetensors", metadata={"format": "pt"})
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03
