"""GLM-5.3-Flash as a whole on the native backend: streams that mix, states whose decays have a bound, latents without
positions, an index of pools, in every format.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint, one_row_less
from diptych.compute.ops.cpu_kernels import instruction_sets
from diptych.compute.quant import save_quantised
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.ground.specs import KVSpec
from worlds import KERNEL_SETS, alone, check_cuts, check_past_a_tile, in_blocks_of_ones, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]
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


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """A pool that two chunks fill is what it is in one, and a row's connections are of that row alone."""
    check_cuts(path, replace(CONFIG, weights=weights, kv=kv))


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", KERNEL_SETS)
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=69)


def test_an_index_of_pools_is_felt(published: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    """Otherwise all tests above would pass without one; up to where all is chosen nothing changes."""
    other = Path(shutil.copytree(published, tmp_path / "other"))
    config = json.loads((published / "config.json").read_text())
    config["text_config"]["index_topk"] = 16
    (other / "config.json").write_text(json.dumps(config))
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
    for backend in ("cpu", "torch"):
        config = ComputeConfig(backend=backend, device="cpu", kv="bf16")
        model = load_model(published, config)
        planned = kv_bytes_per_token(model.spec, KVSpec())
        assert planned == 2 * (3 * 512 + 2 * 2 * 128)
        assert model.kv_bytes_per_block(16) == 16 * planned
        assert memory_of_block(model.spec, config, 16)[1] == 16 * planned


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: connections, offsets of pools, numbers of rules."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)


@pytest.mark.parametrize(
    ("part", "shape"),
    [("hc_attn_fn", [15, 192]), ("hc_ffn_scale", [3]), ("index_kpool_compress_ape", [4, 32]), ("self_attn.A_log", [4]),
     ("index_kpool_compress_gate", [32, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=re.escape(part)):
        load_model(one_row_less(path, part, shape, tmp_path / "other"), CONFIG)


@pytest.mark.parametrize(
    "field",
    [("hc_sinkhorn_iters", 1), ("hc_eps", 0.2), ("swiglu_limit", 50.0), ("index_topk", 256), ("rms_norm_eps", 0.1),
     ("linear_lower_bound", -1.0), ("linear_lower_bound", None), ("index_kpool", 4)],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong; `index_kpool` is that of the tensors, or refused."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= dict([field]) if field[0] != "index_kpool" else {"index_kpool": 2}
    (other / "config.json").write_text(json.dumps(config))
    if field[0] == "index_kpool":
        with pytest.raises(LoadError, match=r"index_kpool_compress_ape .*4"):
            load_model(other, REFERENCE)
        return
    first, second = (alone(load_model(one, REFERENCE), prompt(40), None).logits for one in (path, other))
    assert (first - second).abs().max() > 0.03
