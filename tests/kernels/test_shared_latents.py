"""Latents that layers share, learned turns, queries scaled by their heads' numbers: Mistral Large 4 on the native backend."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint, one_row_less
from diptych.compute.ops import reference
from diptych.compute.ops.cpu_kernels import _cpu, instruction_sets
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.quant import save_quantised
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.ground.specs import KVSpec
from op_bench import Bench, make_batch, noise
from worlds import KERNEL_SETS, alone, check_cuts, check_past_a_tile, in_blocks_of_ones, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]
# rows and keys as wide as they are published, past a tile of a list
SIZES: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_head_dim": 128,
    "index_topk": 260, "max_position_embeddings": 1024, "mlp_layer_types": ["dense"] * 5,
}  # fmt: skip
N_TOKENS = 400


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


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    check_cuts(path, replace(CONFIG, weights=weights, kv=kv))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", KERNEL_SETS)
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=139)


def test_what_an_earlier_owner_left_is_never_met(path: Path) -> None:
    for kv in ("bf16", "int8"):
        model, tokens = load_model(path, replace(CONFIG, kv=kv)), prompt(42)
        assert torch.equal(in_blocks_of_ones(model, tokens), alone(model, tokens, None).logits)


def test_a_token_takes_what_the_planner_says(published: Path) -> None:
    """Of five layers three keep latents, one of them nothing for positions, and three a key of an index."""
    planned = 2 * (2 * 576 + 512 + 3 * 128)
    for backend in ("cpu", "torch"):
        config = ComputeConfig(backend=backend, device="cpu", kv="bf16")
        model = load_model(published, config)
        assert kv_bytes_per_token(model.spec, KVSpec()) == planned
        assert model.kv_bytes_per_block(16) == 16 * planned
        assert memory_of_block(model.spec, config, 16)[1] == 16 * planned


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: learned turns, numbers of heads."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)


@pytest.mark.parametrize(
    ("part", "shape"),
    [("lerope.alpha", [4]), ("attention.ssmax_scaling.s", [4]), ("indexer.ssmax_scaling.b", [8]),
     ("indexer.q_input_norm.weight", [64]), ("indexer.wq_b", [256, 64]), ("wkv_a_with_mqa", [40, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=re.escape(part)):
        load_model(one_row_less(path, part, shape, tmp_path / "other"), CONFIG)


@pytest.mark.parametrize(
    "field",
    [("index_topk", 64), ("rms_norm_eps", 0.1), ("routed_scaling_factor", 2.5), ("final_logit_softcapping", 2.0),
     ("indexer_types", ["full", "full", "shared", "shared", "shared"])],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= dict([field])
    (other / "config.json").write_text(json.dumps(config))
    if field[0] == "indexer_types":  # whose weights a checkpoint has
        with pytest.raises(LoadError, match=r"indexer"):
            load_model(other, REFERENCE)
        return
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03


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
    other = Path(shutil.copytree(path, tmp_path / "other"))
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if part in name]
    assert names
    save_file(
        tensors | {name: tensors[name] + 0.5 for name in names}, other / "model.safetensors", metadata={"format": "pt"}
    )
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03
