"""DiffLlama on the native backend: values of two heads, and half of the heads taken from the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.cost.memory import engine_weight_bytes
from diptych.ground.errors import LoadError
from family_checks import (
    CPU,
    FORMAT_IDS,
    FORMATS,
    REFERENCE,
    bent,
    check_bytes_of_a_token,
    check_felt,
    check_packed,
    check_refused_by_name,
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
    return make_checkpoint("diffllama", tmp_path_factory.mktemp("diff"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as wide as they are published, and values twice as wide."""
    folder = tmp_path_factory.mktemp("wide")
    return make_checkpoint("diffllama", folder, dtype=torch.bfloat16, head_dim=64, max_position_embeddings=512)


@pytest.fixture(scope="module")
def expected(published: Path) -> torch.Tensor:
    return alone(load_model(published, REFERENCE), prompt(N_TOKENS), None).logits


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=FORMAT_IDS)
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    check_cuts(path, replace(CPU, weights=weights, kv=kv))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", KERNEL_SETS)
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=139)


def test_a_token_takes_what_the_planner_says(published: Path) -> None:
    """Each of four heads a key of 64 and values of two heads."""
    check_bytes_of_a_token(published, 2 * 3 * 4 * (64 + 128))


def test_the_planner_counts_values_that_lie_with_both_of_two_heads(tmp_path: Path) -> None:
    """It missed a tenth of such a model."""
    path = make_checkpoint("diffllama", tmp_path, dtype=torch.bfloat16, hidden_size=256, head_dim=64)
    model = load_model(path, CPU)
    table = model.spec.vocab_size * model.spec.hidden * 2
    assert engine_weight_bytes(model.spec, "bf16") == pytest.approx(model.weight_bytes + table, rel=0.02)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` writes values as they are packed, and keeps what a difference is made of."""
    check_packed(path, weights, tmp_path / "packed")


def test_values_of_an_odd_number_of_heads_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint("diffllama", tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_key_value_heads": 4', '"num_key_value_heads": 1'))
    with pytest.raises(LoadError, match=r"num_key_value_heads in .* is 1; values of diffllama are those of two heads"):
        load_model(path, CPU)


@pytest.mark.parametrize(("part", "shape"), [("lambda_q1", [24]), ("lambda_k2", [24]), ("v_proj.weight", [96, 64])])
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    check_refused_by_name(path, part, shape, tmp_path / "other")


@pytest.mark.parametrize("part", ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "v_proj.bias"])
def test_every_tensor_is_felt(path: Path, part: str, tmp_path: Path) -> None:
    check_felt(path, with_tensors(path, tmp_path / "other", part, bent))
