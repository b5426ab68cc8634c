"""Entries of many tokens on the native backend: their sums beside a plain reference, and DeepSeek V4 as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from diptych.compute.ops import reference
from diptych.compute.ops.cpu.kernels import _cpu, instruction_sets
from diptych.compute.runner import load_model
from diptych.cost.kv_bytes import state_bytes
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
from op_bench import Bench, noise
from worlds import KERNEL_SETS, alone, check_cuts, check_past_a_tile, in_blocks_of_ones, on_sets, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
NEAR, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# rows and entries as wide as they are published, past a tile of 256 of a list
SIZES: dict[str, Any] = {
    "head_dim": 512, "partial_rotary_factor": 0.125, "q_lora_rank": 64, "num_hidden_layers": 3,
    "layer_types": [CHOSEN, ALL, NEAR], "compress_rates": {CHOSEN: 4, ALL: 128}, "sliding_window": 128,
    "mlp_layer_types": ["hash_moe", "moe", "moe"], "index_topk": 132, "index_head_dim": 128,
    "max_position_embeddings": 1024,
}  # fmt: skip
N_TOKENS = 557
N_INPUTS = 50


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v4", tmp_path_factory.mktemp("v4"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v4", tmp_path_factory.mktemp("large"), dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def expected(published: Path) -> torch.Tensor:
    return alone(load_model(published, REFERENCE), prompt(N_TOKENS), None).logits


class Sums(Bench):
    """The sums alone in a program, over a sequence whose i-th token has the i-th of so many inputs."""

    def __init__(self, name: str, d: int, tokens: int, n_series: int) -> None:
        self.d, self.tokens = d, tokens
        self.offsets, self.inputs = noise(tokens, n_series, d, seed=1), 3 * noise(N_INPUTS, 2, n_series, d, seed=2)
        super().__init__(name, self.inputs.flatten(1), threads=2)
        self.out = self.program.add_f32(d)
        offsets = self.program.add_vector(self.offsets.flatten())
        self.program.move_entries(x=self.x, out=self.out, offsets=offsets, layer=0, tokens=tokens, n_series=n_series)
        self._attend_for_form()
        rows = self.program.add_rows("bf16", self.width)
        self.program.head(x=self.x, norm=self.norm, eps=1e-6, rows=rows, weight=self.head)
        self.kv = _cpu.KvCache(heads=[(1, 2, 2)], n_blocks=8, block_tokens=64, format="bf16")
        self.kv.add_states([3 * n_series * d], 4)

    def step(
        self, begin: int, end: int, *, read: int, write: int, saves: Sequence[tuple[int, int, int]] = ()
    ) -> torch.Tensor:
        """[tokens, d], beside another sequence that begins anew."""
        n = end - begin
        self.program.run(
            np.array([*range(begin, end), *range(5)], dtype=np.int32),
            np.array([0, n, n + 5], dtype=np.int32),
            np.array([end, 5], dtype=np.int32),
            np.array([[0], [1]], dtype=np.int32),
            np.zeros(0, dtype=np.int32),
            self.kv,
            torch.empty(0, 1),
            states=(
                np.array([read, -1], dtype=np.int32),
                np.array([write, 3], dtype=np.int32),
                np.array(saves, dtype=np.int32).reshape(-1, 3),
            ),
        )
        result = torch.empty(n + 5, self.d)
        self.program.read_buffer(self.out, result)
        return result[:n]

    def entries(self, cuts: Sequence[int]) -> torch.Tensor:
        """Of all inputs, in steps that end behind these tokens."""
        made = [self.step(a, b, read=0 if a else -1, write=0) for a, b in pairwise((0, *cuts))]
        return torch.cat(made)[self.tokens - 1 :: self.tokens]


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(("d", "tokens", "n_series"), [(8, 4, 2), (40, 16, 1), (32, 2, 2), (24, 32, 1)])
def test_sums_are_those_of_the_reference(name: str, d: int, tokens: int, n_series: int) -> None:
    """However the work is cut, bit for bit, and near a softmax over all tokens at once."""
    sums = Sums(name, d, tokens, n_series)
    whole = sums.entries([N_INPUTS])
    wanted = reference.entries(*sums.inputs.unbind(1), sums.offsets, tokens=tokens)
    torch.testing.assert_close(whole, wanted, atol=2e-5, rtol=2e-5)
    for cuts in (list(range(1, N_INPUTS + 1)), [3, 17, 18, N_INPUTS]):
        assert torch.equal(sums.entries(cuts), whole)


def test_sums_that_are_left_elsewhere_go_on_from_there() -> None:
    """As those of a prefix that another sequence begins with."""
    sums = Sums(KERNEL_SETS[0], 24, 4, 2)
    whole = sums.step(0, N_INPUTS, read=-1, write=0, saves=[(0, 18, 2), (0, 23, 1)])
    for at, place in ((18, 2), (23, 1)):
        rest = sums.step(at, N_INPUTS, read=place, write=0)
        ends = [t for t in range(at, N_INPUTS) if (t + 1) % 4 == 0]
        assert torch.equal(rest[[t - at for t in ends]], whole[ends])


def test_what_cannot_be_meant_is_refused() -> None:
    """By whoever records it, before a kernel would read beyond its rows."""
    listed: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 1, "head_dim": 32, "scale": 1.0, "is_listed": True}
    _cpu.AttentionShape(**listed, window=8, entry_tokens=48)
    for wrong in ({"window": None}, {"window": 8, "entry_tokens": 3}, {"window": 8, "entry_tokens": 40},
                  {"window": 8, "softcap": 2.0}, {"window": 8, "is_listed": False, "entry_tokens": 4}):  # fmt: skip
        with pytest.raises(ValueError, match=r"list|entry"):
            _cpu.AttentionShape(**{**listed, **wrong})
    for heads in ((1, 64, 0, 32, 3), (1, 64, 0, 32, 32), (1, 34, 0, 32, 4)):
        with pytest.raises(ValueError, match="entries"):
            _cpu.KvCache(heads=[heads], n_blocks=2, block_tokens=16, format="bf16")
    program = _cpu.Program(KERNEL_SETS[0], 1)
    x, out, offsets = program.add_f32(64), program.add_f32(16), program.add_vector(torch.zeros(128))
    for wrong in ({"tokens": 3}, {"tokens": 1}, {"n_series": 1}, {"n_series": 3}, {"layer": -1}):
        with pytest.raises(ValueError, match="entries are of"):
            program.move_entries(
                **{"x": x, "out": out, "offsets": offsets, "layer": 0, "tokens": 4, "n_series": 2, **wrong}
            )
    rope, norm = program.add_rope([1.0], 1.0), program.add_vector(torch.ones(16))
    for wrong in ({"x": x}, {"tokens": 1}, {"is_index": True}):
        with pytest.raises(ValueError, match="rows are as wide"):
            program.cache_rows(**{"x": out, "layer": 0, "norm": norm, "norm_eps": 1e-6, "rope": rope, **wrong})


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=FORMAT_IDS)
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """An entry that two chunks fill is what it is in one, whoever keeps its sums meanwhile."""
    check_cuts(path, replace(CPU, weights=weights, kv=kv))


@pytest.mark.parametrize(("name", "kv"), on_sets(["bf16", "int8", "fp8"]))
def test_published_sizes_on_every_set(published: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """Near fp32, and the same bits in one prefill, in chunks, and beside others."""
    check_past_a_tile(published, expected, name, kv, chunk=139)


def test_what_an_earlier_owner_left_is_never_met(path: Path) -> None:
    """Neither behind the last token nor in an entry that is not whole."""
    for kv in ("bf16", "int8"):
        model, tokens = load_model(path, ComputeConfig(backend="cpu", kv=kv, threads=1)), prompt(42)
        assert torch.equal(in_blocks_of_ones(model, tokens), alone(model, tokens, None).logits)


def test_a_token_takes_what_the_planner_says(published: Path) -> None:
    """A row in each layer, a quarter of an entry and a key where 4 tokens make one, and a 16th where 128 do."""
    check_bytes_of_a_token(published, 2 * (3 * 512 + 512 // 4 + 128 + 512 // 16))
    for backend in ("cpu", "torch"):
        model = load_model(published, ComputeConfig(backend=backend, device="cpu", kv="bf16"))
        assert model.state_bytes == state_bytes(model.spec) == 4 * 3 * (2 * 512 + 2 * 128 + 512)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: offsets, connections, tables of experts."""
    check_packed(path, weights, tmp_path / "packed")


@pytest.mark.parametrize(
    ("part", "shape"),
    [("attn.compressor.ape", [4, 64]), ("indexer.compressor.ape", [4, 32]), ("attn_sink", [4]), ("wo_a", [32, 64]),
     ("tid2eid", [160, 3]), ("compressor.wgate", [64, 64])],
)  # fmt: skip
def test_tensors_of_other_shapes_are_refused_by_name(path: Path, part: str, shape: list[int], tmp_path: Path) -> None:
    check_refused_by_name(path, part, shape, tmp_path / "other")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_an_expert_that_is_not_there_is_refused(path: Path, backend: str, tmp_path: Path) -> None:
    """A table of a damaged file would name memory behind the last."""
    other = Path(shutil.copytree(path, tmp_path / "other"))
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("tid2eid"))
    tensors[name][7, 1] = 8
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"tid2eid holds 8; .* below 8"):
        load_model(other, ComputeConfig(backend=backend, device="cpu"))


@pytest.mark.parametrize(
    "field",
    [("hc_sinkhorn_iters", 1), ("hc_eps", 0.2), ("swiglu_limit", 50.0), ("index_topk", 64), ("rms_norm_eps", 0.1),
     ("sliding_window", 9), ("routed_scaling_factor", 2.5), ("o_lora_rank", 32)],
    ids=str,
)  # fmt: skip
def test_every_number_of_the_config_is_felt(path: Path, field: tuple[str, Any], tmp_path: Path) -> None:
    """Otherwise no comparison with transformers would see it wrong; ranks are those of the tensors, or refused."""
    other = with_fields(path, tmp_path / "other", **dict([field]))
    if field[0] == "o_lora_rank":
        with pytest.raises(LoadError, match=r"wo_a\.weight .*\[32, 64\]; the config expects \[64, 64\]"):
            load_model(other, REFERENCE)
        return
    check_felt(path, other)
