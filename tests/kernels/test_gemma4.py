"""Gemma 4 as a whole on the native backend: caches of several shapes, keys that are values, layers that are scaled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.loading.quant import save_quantised
from diptych.compute.model import Model
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.exchange import gathered
from diptych.cost.kv_bytes import kv_bytes_of_context, kv_bytes_per_token
from diptych.cost.parameters import parameter_count
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import TransferError
from diptych.ground.specs import KVSpec
from thread_ranks import load_over_threads
from worlds import alone, check_blocks_travel, differing, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
FORMATS = [("bf16", "bf16"), ("int8", "int8"), ("int4", "fp8")]
# of each layer that keeps something, how many heads and how wide
HEADS = {
    "gemma4": [(2, 16), (1, 24)] * 2,
    "gemma4-e2b": [(2, 16), (2, 24)] * 2,
    "gemma4-a4b": [(2, 16), (2, 16), (1, 24)],
}


@pytest.fixture(scope="module", params=HEADS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(family, tmp_path_factory.mktemp(family), dtype=torch.bfloat16)


def over(path: Path, config: ComputeConfig, ranks: int) -> Model:
    return load_over_threads(path, replace(config, tp=ranks, threads=ranks))


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_cut_of_the_work_changes_no_bit(path: Path, weights: str, kv: str) -> None:
    """Layers of different heads have tasks of their own in one step, and places of their own in one block."""
    model = load_model(path, replace(CONFIG, weights=weights, kv=kv))
    tokens = prompt(75)
    whole = alone(model, tokens, None)
    assert whole.logits.std() > 0.2
    assert not (found := differing(model, tokens, whole)), found
    by_threads = load_model(path, replace(CONFIG, weights=weights, kv=kv, threads=3))
    assert not alone(by_threads, tokens, 9).differs_from(whole)


@pytest.mark.parametrize(("weights", "kv"), FORMATS, ids=["-".join(pair) for pair in FORMATS])
def test_ranks_change_no_bit(path: Path, weights: str, kv: str) -> None:
    """A rank has other heads of one layer than of another, and none of some; blocks travel as one rank has them."""
    config, tokens = replace(CONFIG, weights=weights, kv=kv), prompt(40)
    one = load_model(path, config)
    whole = alone(one, tokens, None)
    for ranks in (2, 4):
        model = over(path, config, ranks)
        for chunk in (None, 7):
            assert not (found := alone(model, tokens, chunk).differs_from(whole)), found
        assert model.program.n_meetings == gathered(model.spec, tp=ranks, weights=model.weights_format).meetings  # type: ignore[attr-defined]
        check_blocks_travel(one, model, tokens)
        assert memory_of_block(one.spec, replace(config, tp=ranks), 16)[1] == model.kv_bytes_per_block(16)
        model.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", HEADS)
def test_what_is_kept_and_counted(name: str, backend: str, tmp_path: Path) -> None:
    """Each layer keeps heads of its own number and width, in the store, in what travels and in what is priced."""
    path = make_checkpoint(name, tmp_path, dtype=torch.bfloat16)
    model = load_model(path, replace(CONFIG, backend=backend))
    assert [(cache.n_heads, cache.head_dim) for cache in model.spec.caches] == HEADS[name]
    numbers = 2 * sum(n * width for n, width in HEADS[name])
    assert kv_bytes_per_token(model.spec, KVSpec(bytes_per_element=2)) == 2 * numbers
    # values of the kernels are padded to 16
    padded = sum(n * (width + -(-width // 16) * 16 if backend == "cpu" else 2 * width) for n, width in HEADS[name])
    assert model.kv_bytes_per_block(16) == model.make_kv(3, 16).nbytes // 3 == 2 * 16 * padded
    assert memory_of_block(model.spec, replace(CONFIG, backend=backend), 16)[1] == model.kv_bytes_per_block(16)
    kv = model.make_kv(4, 16)
    torch.manual_seed(0)
    sent = []
    for layer, (n, width) in enumerate(HEADS[name]):
        sent.append(torch.randn(2, n, 20, width).bfloat16().float())
        kv.write(layer, [2, 1], *sent[-1])
    kv.copy_blocks([(2, 0)])
    other = model.make_kv(5, 16)
    other.import_blocks([4, 3], kv.export_blocks([0, 1]))
    for layer, both in enumerate(sent):
        assert torch.equal(torch.stack(other.read(layer, [4, 3], 20)).float().cpu(), both)
    damaged = kv.export_blocks([0])
    damaged.data_NB[0, -1] ^= 1
    with pytest.raises(TransferError, match="checksum"):
        other.import_blocks([0], damaged)
    assert model.n_parameters == parameter_count(model.spec)


@pytest.mark.parametrize("name", HEADS)
def test_only_narrow_heads_have_windows(name: str, tmp_path: Path) -> None:
    """What a planner prices for engines that keep windows: each layer its own width times what it sees."""
    spec = load_model(make_checkpoint(name, tmp_path, dtype=torch.bfloat16), CONFIG).spec
    held = kv_bytes_of_context(spec, KVSpec(bytes_per_element=2, block_tokens=16), 64)
    assert held == 2 * 2 * sum(n * width * (16 if width == 16 else 64) for n, width in HEADS[name])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_packed_checkpoint_has_the_bits_of_the_plain_one(path: Path, weights: str, tmp_path: Path) -> None:
    """`diptych quantize` keeps what is not packed: scales of layers, the table of layers, norms."""
    save_quantised(path, tmp_path / "packed", weights=weights)
    whole = alone(load_model(path, replace(CONFIG, weights=weights)), prompt(30), None)
    assert not alone(load_model(tmp_path / "packed", CONFIG), prompt(30), 7).differs_from(whole)
