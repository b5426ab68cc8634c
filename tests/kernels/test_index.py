"""What an index chooses, on every kernel set: against the plain definition, and in a model whose answers need it."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from diptych.compute.adapters import read_adapter
from diptych.compute.batch import ForwardBatch
from diptych.compute.ops import reference
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from lora import write_adapter
from op_bench import Bench, make_batch
from stepping import Stepper
from worlds import KERNEL_SETS, alone, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
N_HEADS, WIDTH, ROW, MOST = 3, 24, 40, 37
# past a tile of 256 keys; some that see no more than are chosen; one that only decodes
SEQUENCES = ((0, 290), (0, 30), (0, 38))
OWN = [slice(begin, end) for begin, end in pairwise(np.cumsum([0, *(new for _, new in SEQUENCES)]))]


class Choosers:
    """Tokens whose scores are whole numbers, so that many are equal and none depends on an order of sums."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.n = sum(new for _, new in SEQUENCES)
        signs = torch.tensor([1.0, -1.0]).repeat(WIDTH // 2)
        # as many of one sign as of the other, so that a norm changes nothing
        self.keys = torch.stack([signs[torch.randperm(WIDTH, generator=generator)] for _ in range(self.n)])
        self.queries = torch.randint(-1, 2, (self.n, N_HEADS, WIDTH), generator=generator).float()
        self.weights = torch.randint(-2, 4, (self.n, N_HEADS), generator=generator).float()

    def expected(self) -> list[list[int]]:
        """Of each token."""
        return [one for s in OWN for one in reference.choose(self.queries[s], self.keys[s], self.weights[s], most=MOST)]

    def scores(self) -> list[torch.Tensor]:
        """Of each token, those of all positions of its sequence."""
        products = ((self.queries[s] @ self.keys[s].T).clamp(min=0) * self.weights[s][..., None] for s in OWN)
        return [row for one in products for row in one.sum(dim=1)]


@pytest.fixture(scope="module")
def choosers() -> Choosers:
    return Choosers()


@pytest.fixture(scope="module")
def expected(choosers: Choosers) -> list[list[int]]:
    return choosers.expected()


def chosen(isa: str, kv_format: str, choosers: Choosers, batch: ForwardBatch, n_blocks: int) -> np.ndarray:
    """What lies in the buffer of choices [T, most]."""
    bench = Bench(isa, torch.ones(choosers.n, 8), threads=2)
    program = bench.program
    rope = program.add_rope([0.0] * 8, 1.0)  # which turns nothing
    key, weights, choice = (program.add_f32(width) for width in (WIDTH, N_HEADS, MOST))
    q, turned = program.add_f32(N_HEADS * WIDTH), program.add_bf16(N_HEADS * WIDTH)
    given = ((key, choosers.keys), (q, choosers.queries.flatten(1)), (weights, choosers.weights))
    tables = [values.contiguous() for _, values in given]  # which a program reads where they are
    for (buffer, _), table in zip(given, tables, strict=True):
        program.embed(program.add_table(table), buffer, 1.0)
    norm, bias = program.add_vector(torch.ones(WIDTH)), program.add_vector(torch.zeros(WIDTH))
    program.cache_index(x=key, layer=0, norm=norm, bias=bias, norm_eps=1e-6, rope=rope)
    shape = cpu._cpu.AttentionShape(n_heads=N_HEADS, n_kv_heads=1, head_dim=WIDTH, scale=1.0, most=MOST)
    program.choose(q=q, queries=turned, weights=weights, choice=choice, layer=0, rope=rope, shape=shape)
    kv = cpu._cpu.KvCache(heads=[(1, ROW + WIDTH, 0, ROW)], n_blocks=n_blocks, block_tokens=16, format=kv_format)
    return bench.run(choice, MOST, batch, kv).numpy().view(np.int32)


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_the_highest_scores_are_chosen_and_the_lower_of_equals(
    isa: str, kv_format: str, choosers: Choosers, expected: list[list[int]]
) -> None:
    batch, n_blocks = make_batch(EdgeShape(name="", sequences=SEQUENCES))
    found = chosen(isa, kv_format, choosers, batch, n_blocks)
    n_chosen, scores = 0, choosers.scores()
    for t, positions in enumerate(expected):
        if len(positions) < MOST or positions == list(range(MOST)):
            continue  # all that it sees, or what may be all that it sees
        if kv_format == "bf16":
            assert found[t].tolist() == positions
        else:  # whose scales make numbers of these that round, so that equal scores are nearly equal
            own = scores[t]
            assert sorted(set(found[t].tolist())) == found[t].tolist()
            assert torch.equal(own[found[t]].sort().values, own[positions].sort().values)
        n_chosen += 1
    assert n_chosen > 200


def test_a_model_says_something_else_where_all_is_chosen(tmp_path: Path) -> None:
    """Otherwise all other tests of such models would pass without an index."""
    path = make_checkpoint("deepseek_v32", tmp_path, dtype=torch.bfloat16)
    config = json.loads((path / "config.json").read_text())
    answers = []
    for most in (config["index_topk"], 256):
        (path / "config.json").write_text(json.dumps({**config, "index_topk": most}))
        model = load_model(path, ComputeConfig(backend="cpu", threads=1))
        answers.append(alone(model, prompt(40), None).logits)
    few = config["index_topk"]
    assert torch.equal(*(one[:few] for one in answers))
    different = (answers[0] - answers[1])[few:].abs().amax(dim=-1)
    assert (different > 0.1 * answers[0].std()).float().mean() > 0.8


@pytest.mark.parametrize(
    ("family", "modules"), [("glm_moe_dsa", {"wq_b": 4}), ("axk2", {"wq_b": 4, "q_b_proj": 4, "W_down": 4, "W_up": 4})]
)
def test_an_adapter_changes_the_queries_of_an_index_and_is_refused_for_the_rest(
    family: str, modules: dict[str, int], tmp_path: Path
) -> None:
    """Oracle: the checkpoint with the adapter's product added to `wq_b`; in A.X K2 other modules are read in parts, or gate."""
    base = make_checkpoint(family, tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, modules)
    merged = Path(shutil.copytree(base, tmp_path / "merged"))
    tensors, low_ranks = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, b in low_ranks.items():
        if "lora_B" not in name:
            continue
        a = low_ranks[name.replace("lora_B", "lora_A")]
        tensors[name.removeprefix("base_model.model.").replace("lora_B.weight", "weight")] += 2 * b @ a
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    model, other = (
        load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32")) for path in (base, merged)
    )
    stepper = Stepper(model)
    stepper.adapters = {"it": model.add_adapter(read_adapter(adapter, max_rank=64))}
    logits, expected = stepper.prefill("it", prompt(40), chunk=7), alone(other, prompt(40), None).logits
    assert (logits - expected).abs().max() < 1e-4
    assert (alone(model, prompt(40), None).logits - expected).abs().max() > 0.1
    for name in ("wk", "weights_proj"):
        refused = write_adapter(tmp_path / name, base, {name: 4})
        with pytest.raises(LoadError, match=name):
            model.add_adapter(read_adapter(refused, max_rank=64))
