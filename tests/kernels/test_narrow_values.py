"""Values of another width than keys (MiMo-V2-Flash): in kernels, caches, ranks and prices, whichever of the two is wider."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.loading.quant import save_quantised
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.components import cost_of
from diptych.cost.kv_bytes import kv_bytes_per_token
from diptych.cost.tables import kv_spec, quant_spec
from diptych.ground.config import ComputeConfig
from diptych.ground.shape import StepShape
from diptych.ground.specs import KVSpec
from thread_ranks import load_over_threads
from worlds import KERNEL_SETS, alone, beside, check_blocks_travel, differing, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)
DENSE = {"mlp_layer_types": ["dense"] * 4}
# as published, past a tile of 256 keys, an odd number of tokens; and wider than keys
WIDTHS = {"published": {"head_dim": 192, "v_head_dim": 128}, "wide": {"head_dim": 24, "v_head_dim": 56}}
N_TOKENS = 277


@pytest.fixture(scope="module", params=WIDTHS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {
        **WIDTHS[request.param],
        "mlp_layer_types": ["dense"] * 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
    }
    return make_checkpoint("mimo_v2_flash", tmp_path_factory.mktemp("values"), dtype=torch.bfloat16, **fields)


@pytest.fixture(scope="module")
def expected(path: Path) -> torch.Tensor:
    return alone(load_model(path, replace(CONFIG, backend="torch", weights="fp32")), prompt(N_TOKENS), None).logits


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", KERNEL_SETS)
def test_every_set_is_near_fp32_and_equal_within_itself(path: Path, expected: torch.Tensor, name: str, kv: str) -> None:
    """In one prefill, in chunks, beside others, and with the tiles of a decode dealt to two threads."""
    one, two = (load_model(path, replace(CONFIG, instruction_set=name, kv=kv, threads=n)) for n in (1, 2))
    tokens = prompt(N_TOKENS)
    whole = alone(one, tokens, None)
    assert (whole.logits - expected).norm() / expected.norm() < (0.1 if kv == "fp8" else 0.04)
    assert not alone(two, tokens, 69).differs_from(whole)  # the last token alone
    assert not beside(one, tokens[:40], 2, seed=1).differs_from(alone(one, tokens[:40], 7))


@pytest.mark.parametrize(("weights", "kv"), [("int8", "int8"), ("int4", "fp8")])
def test_cut_of_the_work_changes_no_bit(weights: str, kv: str, tmp_path: Path) -> None:
    """Forks, prefix hits and dirty blocks of a mixture whose layers have caches of several shapes."""
    path = make_checkpoint("mimo_v2_flash", tmp_path / "plain", dtype=torch.bfloat16)
    model, tokens = load_model(path, replace(CONFIG, weights=weights, kv=kv)), prompt(75)
    whole = alone(model, tokens, None)
    assert not (found := differing(model, tokens, whole)), found
    save_quantised(path, tmp_path / "packed", weights=weights)
    assert not alone(load_model(tmp_path / "packed", replace(CONFIG, kv=kv)), tokens, 7).differs_from(whole)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_ranks_divide_heads_of_two_widths(kv: str, tmp_path: Path) -> None:
    """What they hand to the next projection lies by the values' width; blocks travel as one rank has them."""
    path = make_checkpoint("mimo_v2_flash", tmp_path, dtype=torch.bfloat16)
    config, tokens = replace(CONFIG, kv=kv), prompt(40)
    one = load_model(path, config)
    whole = alone(one, tokens, None)
    for ranks in (2, 4):
        model = load_over_threads(path, replace(config, tp=ranks, threads=ranks))
        assert not (found := alone(model, tokens, 7).differs_from(whole)), found
        check_blocks_travel(one, model, tokens)
        assert memory_of_block(one.spec, replace(config, tp=ranks), 16)[1] == model.kv_bytes_per_block(16)
        model.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_token_takes_what_the_planner_says(backend: str, tmp_path: Path) -> None:
    """Padded to the keys' width values would take half as much again in the published sizes."""
    path = make_checkpoint("mimo_v2_flash", tmp_path, dtype=torch.bfloat16, **WIDTHS["published"], **DENSE)
    config = replace(CONFIG, backend=backend, kv="bf16")
    model = load_model(path, config)
    heads = [1, 2, 2, 1]
    assert [cache.sizes for cache in model.spec.caches] == [(n, 192, 128) for n in heads]
    planned = kv_bytes_per_token(model.spec, KVSpec())
    assert planned == 2 * sum(heads) * (192 + 128)
    assert model.kv_bytes_per_block(16) == model.make_kv(3, 16).nbytes // 3 == 16 * planned
    assert memory_of_block(model.spec, config, 16)[1] == 16 * planned


def test_products_and_reads_are_priced_by_their_width(tmp_path: Path) -> None:
    """Scores are as wide as keys, what is weighed as values, and of the cache each reads its part, scales included."""
    path = make_checkpoint("mimo_v2_flash", tmp_path, dtype=torch.bfloat16, **WIDTHS["published"], **DENSE)
    spec = load_model(path, replace(CONFIG, backend="torch")).spec
    cost = cost_of(spec, StepShape.decode(batch=2, context_tokens=100), quant=quant_spec("bf16"), kv=kv_spec("int8"))
    by_name = {one.name: one for one in cost.components}
    assert by_name["values"].flops / by_name["scores"].flops == pytest.approx(128 / 192)
    assert by_name["values"].kv_read_bytes / by_name["scores"].kv_read_bytes == pytest.approx((128 + 4) / (192 + 4))
    narrow = by_name["o"].flops / (2 * 2 * 4 * spec.hidden)
    assert narrow == pytest.approx(spec.n_layers * 128)
