"""Latents that layers share, learned turns, queries scaled by their heads' numbers: Mistral Large 4 on the native backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.ops import reference
from diptych.compute.ops.cpu.kernels import _cpu, instruction_sets
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.runner import load_model
from diptych.ground.errors import LoadError
from family_checks import (
    CPU,
    FORMAT_IDS,
    FORMATS,
    REFERENCE,
    check_bytes_of_a_token,
    check_felt,
    check_packed,
    check_refused_by_name,
    with_fields,
    with_tensors,
)
from op_bench import Bench, make_batch, noise
from worlds import KERNEL_SETS, alone, check_cuts, check_past_a_tile, in_blocks_of_ones, on_sets, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
# rows and keys as wide as they are published, past a tile of a list
SIZES: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128,
    "index_topk": 260, "max_position_embeddings": 1024, "mlp_layer_types": ["dense"] * 5,
}  # fmt: skip
N_TOKENS = 279


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mistral_large4", tmp_path_factory.mktemp("large4"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mistral_large4", tmp_path_factory.mktemp("wide"), dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def expected(published: Path) -> torch.Tensor:
    return alone(load_model(published, REFERENCE), prompt(N_TOKENS), None).logits


def scaled(name: str, q: torch.Tensor, scales: torch.Tensor, *sequences: tuple[int, int]) -> torch.Tensor:
    """Queries in a program whose i-th token has the i-th of them; sequences: tokens before, and of the step."""
    bench = Bench(name, q, threads=2)
    bench.program.scale_heads(q=bench.x, by_head=bench.program.add_vector(scales))
    return bench.run(bench.x, bench.width, make_batch(EdgeShape(name="", sequences=sequences))[0])


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_queries_are_scaled_as_the_reference_says(name: str) -> None:
    """Each head by its own numbers, each token by its position in its sequence, whoever is beside it."""
    q, scales = noise(30, 3 * 24, seed=1), noise(6, seed=2)
    whole = scaled(name, q, scales, (0, 30))
    factors = reference.head_scales(torch.arange(30), scales)
    torch.testing.assert_close(whole, (q.unflatten(1, (3, 24)) * factors[..., None]).flatten(1), atol=1e-6, rtol=1e-6)
    assert torch.equal(
        scaled(name, torch.cat([q[11:], q[:5]]), scales, (11, 19), (0, 5)), torch.cat([whole[11:], whole[:5]])
    )


def test_numbers_that_are_not_two_of_each_head_are_refused() -> None:
    program = _cpu.Program(KERNEL_SETS[0], 1)
    q = program.add_f32(24)
    for size in (1, 3, 10):
        with pytest.raises(ValueError, match="two numbers each"):
            program.scale_heads(q=q, by_head=program.add_vector(torch.zeros(size)))


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=FORMAT_IDS)
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    check_cuts(path, replace(CPU, weights=weights, kv=kv))


@pytest.mark.parametrize(("name", "kv"), on_sets(["bf16", "int8", "fp8"]))
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=139)


def test_what_an_earlier_owner_left_is_never_met(path: Path) -> None:
    for kv in ("bf16", "int8"):
        model, tokens = load_model(path, replace(CPU, kv=kv)), prompt(42)
        assert torch.equal(in_blocks_of_ones(model, tokens), alone(model, tokens, None).logits)


def test_a_token_takes_what_the_planner_says(published: Path) -> None:
    """Of five layers three keep latents, one of them nothing for positions, and three a key of an index."""
    check_bytes_of_a_token(published, 2 * (2 * 576 + 512 + 3 * 128))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: learned turns, numbers of heads."""
    check_packed(path, weights, tmp_path / "packed")


@pytest.mark.parametrize(
    ("part", "shape"),
    [("lerope.alpha", [4]), ("attention.ssmax_scaling.s", [4]), ("indexer.ssmax_scaling.b", [8]),
     ("indexer.q_input_norm.weight", [64]), ("indexer.wq_b", [256, 64]), ("wkv_a_with_mqa", [40, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    check_refused_by_name(path, part, shape, tmp_path / "other")


@pytest.mark.parametrize(
    "field",
    [("index_topk", 64), ("rms_norm_eps", 0.1), ("routed_scaling_factor", 2.5), ("final_logit_softcapping", 2.0),
     ("indexer_types", ["full", "full", "shared", "shared", "shared"])],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong."""
    other = with_fields(path, tmp_path / "other", **dict([field]))
    if field[0] == "indexer_types":  # whose weights a checkpoint has
        with pytest.raises(LoadError, match=r"indexer"):
            load_model(other, REFERENCE)
        return
    check_felt(path, other)


@pytest.mark.parametrize(
    "part",
    [
        "lerope.alpha",
        "attention.ssmax_scaling.s",
        "attention.ssmax_scaling.b",
        "indexer.ssmax_scaling",
        "q_input_norm.bias",
    ],
)
def test_every_tensor_is_felt(path: Path, part: str, tmp_path: Path) -> None:
    """Of those that no other family has."""
    check_felt(path, with_tensors(path, tmp_path / "other", part, lambda tensor: tensor + 0.5))
