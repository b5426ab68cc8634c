"""GLM-5.3-Flash as a whole on the native backend: streams that mix, states whose decays have a bound, latents without
positions, an index of pools, in every format.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
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
)
from worlds import alone, check_cuts, check_past_a_tile, in_blocks_of_ones, on_sets, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
# as it is published, past a tile of 256 keys, of which 65 pools of 4 and the tail are seen
SIZES = {
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 256, "v_head_dim": 256, "linear_head_dim": 128,
    "linear_num_heads": 2, "index_head_dim": 128, "index_topk": 260, "max_position_embeddings": 512,
}  # fmt: skip
N_TOKENS = 277


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("glm5_next", tmp_path_factory.mktemp("glm"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("glm5_next", tmp_path_factory.mktemp("large"), dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def expected(published: Path) -> torch.Tensor:
    return alone(load_model(published, REFERENCE), prompt(N_TOKENS), None).logits


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=FORMAT_IDS)
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """A pool that two chunks fill is what it is in one, and a row's connections are of that row alone."""
    check_cuts(path, replace(CPU, weights=weights, kv=kv))


@pytest.mark.parametrize(("name", "kv"), on_sets(["bf16", "int8", "fp8"]))
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=69)


def test_an_index_of_pools_is_felt(published: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    """Otherwise all tests above would pass without one; up to where all is chosen nothing changes."""
    other = with_fields(published, tmp_path / "other", index_topk=16)
    few = alone(load_model(other, REFERENCE), prompt(N_TOKENS), None).logits
    assert (few[:19] - expected[:19]).abs().max() < 1e-4
    different = (few - expected)[24:].abs().amax(dim=-1)
    assert (different > 0.1 * expected.std()).float().mean() > 0.8


def test_what_an_earlier_owner_left_is_never_met(path: Path) -> None:
    """Neither behind the last token nor in a pool that is not whole."""
    model, tokens = load_model(path, ComputeConfig(backend="cpu", kv="int8", threads=1)), prompt(42)
    assert torch.equal(in_blocks_of_ones(model, tokens), alone(model, tokens, None).logits)


def test_a_token_takes_what_the_planner_says(published: Path) -> None:
    """A latent for each layer that attends, and for each that chooses a key and what weighs it in its pool."""
    check_bytes_of_a_token(published, 2 * (3 * 512 + 2 * 2 * 128))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: connections, offsets of pools, numbers of rules."""
    check_packed(path, weights, tmp_path / "packed")


@pytest.mark.parametrize(
    ("part", "shape"),
    [("hc_attn_fn", [15, 192]), ("hc_ffn_scale", [3]), ("index_kpool_compress_ape", [4, 32]), ("self_attn.A_log", [4]),
     ("index_kpool_compress_gate", [32, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    check_refused_by_name(path, part, shape, tmp_path / "other")


@pytest.mark.parametrize(
    "field",
    [("hc_sinkhorn_iters", 1), ("hc_eps", 0.2), ("swiglu_limit", 50.0), ("index_topk", 256), ("rms_norm_eps", 0.1),
     ("linear_lower_bound", -1.0), ("linear_lower_bound", None), ("index_kpool", 2)],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong; `index_kpool` is that of the tensors, or refused."""
    other = with_fields(path, tmp_path / "other", **dict([field]))
    if field[0] == "index_kpool":
        with pytest.raises(LoadError, match=r"index_kpool_compress_ape .*4"):
            load_model(other, REFERENCE)
        return
    check_felt(path, other)
