"""An index that chooses pools of positions (GLM-5.3-Flash), on every kernel set: what keys are together, what is chosen."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops import reference
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from op_bench import Bench, make_batch, noise

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
N_HEADS, WIDTH, ROW, N_POOLS = 3, 24, 40, 9
# past a tile of 256 keys; some that see no more than are chosen; one that only decodes, whose pools lie in other blocks
SEQUENCES = ((0, 290), (0, 30), (0, 38))
OWN = [slice(begin, end) for begin, end in pairwise(np.cumsum([0, *(new for _, new in SEQUENCES)]))]
FAR = 1e4  # of gates: by a softmax one place of a pool has all of it


class Pools:
    """Tokens with keys and gates, pools of so many."""

    def __init__(self, pool: int, *, is_plain: bool) -> None:
        """is_plain: keys, queries and weights are whole numbers, and of each pool one token's key is that of all."""
        generator = torch.Generator().manual_seed(pool)
        self.pool, self.n = pool, sum(new for _, new in SEQUENCES)
        if is_plain:
            signs = torch.tensor([1.0, -1.0]).repeat(WIDTH // 2)
            # as many of one sign as of the other, so that a norm changes nothing
            self.keys = torch.stack([signs[torch.randperm(WIDTH, generator=generator)] for _ in range(self.n)])
            self.queries = torch.randint(-1, 2, (self.n, N_HEADS, WIDTH), generator=generator).float()
            self.weights = torch.randint(-2, 4, (self.n, N_HEADS), generator=generator).float()
            self.gates, self.offsets = torch.zeros(self.n, WIDTH), torch.zeros(pool, WIDTH)
            self.offsets[pool // 2] = FAR
        else:
            keys = noise(self.n, WIDTH, seed=1)
            self.keys = torch.nn.functional.layer_norm(keys, (WIDTH,), eps=1e-6)
            self.queries, self.weights = noise(self.n, N_HEADS, WIDTH, seed=2), noise(self.n, N_HEADS, seed=3)
            self.gates, self.offsets = noise(self.n, WIDTH, seed=4, scale=2.0), noise(pool, WIDTH, seed=5)

    def expected(self) -> list[list[int]]:
        """What each token sees."""
        found = []
        for own in OWN:
            keys = reference.pool_keys(self.keys[own], self.gates[own], self.offsets)
            settings = {"pool": self.pool, "n_pools": N_POOLS}
            found += reference.choose_pools(self.queries[own], keys, self.weights[own], **settings)
        return found


@cache  # every set has the same
def plain_pools(pool: int) -> tuple[Pools, list[list[int]]]:
    """Whole numbers, and what each token sees of them."""
    pools = Pools(pool, is_plain=True)
    return pools, pools.expected()


def run(isa: str, kv_format: str, pools: Pools, batch: ForwardBatch, n_blocks: int) -> tuple[np.ndarray, cpu.Any]:
    """The buffer of choices [T, most], and the cache."""
    most = (N_POOLS + 1) * pools.pool - 1
    bench = Bench(isa, torch.ones(pools.n, 8), threads=2)
    program = bench.program
    rope = program.add_rope([], 1.0)
    key, weights, choice = (program.add_f32(width) for width in (2 * WIDTH, N_HEADS, most))
    q, turned = program.add_f32(N_HEADS * WIDTH), program.add_bf16(N_HEADS * 2 * WIDTH)
    given = (
        (key, torch.cat([pools.keys, pools.gates], dim=1)),
        (q, pools.queries.flatten(1)),
        (weights, pools.weights),
    )
    tables = [values.contiguous() for _, values in given]  # which a program reads where they are
    for (buffer, _), table in zip(given, tables, strict=True):
        program.embed(program.add_table(table), buffer, 1.0)
    norm, bias = program.add_vector(torch.ones(WIDTH)), program.add_vector(torch.zeros(WIDTH))
    offsets = program.add_vector(pools.offsets.flatten().contiguous())
    program.cache_index(x=key, layer=0, norm=norm, bias=bias, norm_eps=1e-6, rope=rope, n_gates=WIDTH)
    program.pool_index(layer=0, offsets=offsets, pool=pools.pool, width=2 * WIDTH)
    shape = cpu._cpu.AttentionShape(
        n_heads=N_HEADS, n_kv_heads=1, head_dim=2 * WIDTH, scale=1.0, most=most, pool=pools.pool
    )
    program.choose(q=q, width=WIDTH, queries=turned, weights=weights, choice=choice, layer=0, rope=rope, shape=shape)
    kv = cpu._cpu.KvCache(heads=[(1, ROW + 2 * WIDTH, 0, ROW)], n_blocks=n_blocks, block_tokens=16, format=kv_format)
    return bench.run(choice, most, batch, kv).numpy().view(np.int32), kv


@pytest.mark.parametrize("pool", [2, 3, 4, 16])
def test_the_pools_of_the_highest_scores_are_chosen_and_the_positions_behind_them(isa: str, pool: int) -> None:
    """Of equals the lower. Pools of 3 lie across blocks of 16 tokens."""
    pools, expected = plain_pools(pool)
    batch, n_blocks = make_batch(EdgeShape(name="", sequences=SEQUENCES))
    found, _ = run(isa, "bf16", pools, batch, n_blocks)
    n_chosen, most = 0, (N_POOLS + 1) * pool - 1
    places = [t for own in OWN for t in range(own.stop - own.start)]
    for t, seen in enumerate(expected):
        if places[t] < most:
            assert seen == list(range(places[t] + 1))  # nothing is written of what sees all
            continue
        assert found[t][: len(seen)].tolist() == seen
        n_chosen += 1
    assert n_chosen > 100


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_keys_of_a_pool_become_one_in_the_place_of_the_last(isa: str, kv_format: str) -> None:
    """The rest of a row is zeros, by which no query reads gates; keys that complete no pool stay with theirs."""
    pools = Pools(4, is_plain=False)
    batch, n_blocks = make_batch(EdgeShape(name="", sequences=SEQUENCES))
    _, kv = run(isa, kv_format, pools, batch, n_blocks)
    bound = {"bf16": 0.02, "int8": 0.06, "fp8": 0.25}[kv_format]
    for s, own in enumerate(OWN):
        n, width = own.stop - own.start, ROW + 2 * WIDTH
        k, v = np.zeros((1, n, width), dtype=np.float32), np.zeros((1, n, width), dtype=np.float32)
        kv.read(0, batch.block_table_SM[s], k, v)
        rows = torch.from_numpy(k[0, :, ROW:])
        together = reference.pool_keys(pools.keys[own], pools.gates[own], pools.offsets)
        ends = torch.arange(3, n, 4)
        assert (rows[ends, :WIDTH] - together).abs().max() < bound
        assert not rows[ends, WIDTH:].any()
        others = torch.ones(n, dtype=torch.bool)
        others[ends] = False
        as_given = torch.cat([pools.keys, pools.gates], dim=1)[own]
        assert (rows - as_given)[others].abs().max() < 2 * bound


def test_what_does_not_fit_is_refused(isa: str) -> None:
    """A program is recorded by numbers: a wrong one must not reach memory."""
    bench = Bench(isa, torch.ones(3, 8))
    program, make = bench.program, cpu._cpu.AttentionShape
    for most, pool in ((11, 5), (4, 5), (11, 0), (129, 65)):
        with pytest.raises(ValueError, match="pools that are chosen are whole"):
            make(n_heads=2, n_kv_heads=1, head_dim=8, scale=1.0, most=most, pool=pool)
    with pytest.raises(ValueError, match="pools that are chosen are whole"):
        make(n_heads=2, n_kv_heads=1, head_dim=8, scale=1.0, pool=4)
    offsets = program.add_vector(torch.zeros(16))
    with pytest.raises(ValueError, match="of 2 to 64 keys"):
        program.pool_index(layer=0, offsets=offsets, pool=4, width=10)
    with pytest.raises(ValueError, match="of 2 to 64 keys"):
        program.pool_index(layer=0, offsets=offsets, pool=1, width=32)
    with pytest.raises(ValueError, match="before its gates"):
        program.cache_index(x=bench.x, layer=0, norm=offsets, bias=-1, norm_eps=1e-6, rope=0, n_gates=8)
    shape = make(n_heads=2, n_kv_heads=1, head_dim=8, scale=1.0, most=7, pool=4)
    given = dict.fromkeys(("q", "queries", "weights", "choice"), bench.x)
    with pytest.raises(ValueError, match="wider than its keys"):
        program.choose(**given, layer=0, rope=0, shape=shape, width=9)
