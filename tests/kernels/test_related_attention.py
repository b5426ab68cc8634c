"""Scores of contents and distances in every kernel set, against the reference; what one sequence adds, another must not see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_ops import native_cache

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops import reference
from diptych.compute.ops.contract import AttentionSpec
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from op_bench import Bench, check, make_batch, noise, rounded
from worlds import KERNEL_SETS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
H, D, REACH, PLACES = 3, 32, 60, 22  # texts go on behind the reach, and 22 is no multiple of a vector
# two tiles, so that rows see a later one; a group of 16 keys of which the last are another's; one token
SHAPE = EdgeShape(name="", sequences=((0, 33), (0, 300), (0, 1), (0, 64)), n_heads=H, n_kv_heads=H, head_dim=D)
PLACE_OF = torch.randint(0, PLACES, (2 * REACH + 1,), generator=torch.Generator().manual_seed(9))


def run(isa: str, kv_format: str, batch: ForwardBatch, n_blocks: int, qkv: torch.Tensor, threads: int = 1) -> tuple:
    """What the kernels give [T, H d], and what they were given: heads' rows, and the cache [N, P, K, d]."""
    of_heads = [rounded(noise(2, PLACES, D, seed=20 + head)) for head in range(H)]
    kv, keys, values = native_cache(SHAPE, n_blocks, kv_format)
    bench = Bench(isa, qkv, threads=threads)
    program = bench.program
    native = cpu._cpu.AttentionShape(n_heads=H, n_kv_heads=H, head_dim=D, scale=D**-0.5)
    q, out = program.add_bf16(H * D), program.add_f32(H * D)
    program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None, has_full_width_norm=False,
        norm_eps=1e-6,
    )  # fmt: skip
    packed, said = cpu._cpu.LinearShape(format="bf16", n=PLACES, k=D), []
    for side in (0, 1):
        weights = [program.add_linear(packed, [rows[side].contiguous()]) for rows in of_heads]
        said.append(program.add_f32(H * PLACES))
        program.heads(
            weights=weights, x=bench.x, first=side * H * D, head_stride=D, rows=program.add_rows("bf16", D, H),
            out=said[-1], out_head_stride=PLACES, store="f32",
        )  # fmt: skip
    places = program.add_vector(PLACE_OF.float())
    program.attention(
        q=q, out=out, layer=0, shape=native, of_queries=said[0], of_keys=said[1], places=places, n_places=PLACES
    )
    got = bench.run(out, H * D, batch, kv)
    parts = qkv.view(batch.n_tokens, 3 * H, D)
    slots = torch.from_numpy(batch.slots_T(SHAPE.block_tokens)).long()
    at = slots // SHAPE.block_tokens, slots % SHAPE.block_tokens
    keys[at], values[at] = parts[:, H : 2 * H], parts[:, 2 * H :]
    return got, parts[:, :H], keys, values, [torch.stack([rows[side] for rows in of_heads]) for side in (0, 1)]


@pytest.mark.parametrize("both_ways", [True, False])
def test_scores_gain_what_query_and_key_say_of_the_distance(both_ways: bool) -> None:
    """Also where a sequence is read causally, whole."""
    batch, n_blocks = make_batch(SHAPE)
    batch = replace(batch, both_ways_S=np.full(4, both_ways, dtype=np.int32)) if both_ways else batch
    qkv = rounded(noise(batch.n_tokens, 3 * H * D, seed=3))
    expected: torch.Tensor | None = None
    for isa in KERNEL_SETS:
        got, q, keys, values, rows = run(isa, "bf16", batch, n_blocks, qkv)
        if expected is None:
            spec = AttentionSpec(layer=0, n_heads=H, n_kv_heads=H, head_dim=D, scale=D**-0.5)
            related = (*rows, PLACE_OF)
            expected = reference.attention_paged(q, keys, values, batch, spec, related=related).flatten(1)
            plain = reference.attention_paged(q, keys, values, batch, spec).flatten(1)
            assert (plain - expected).abs().max() > 0.5, "what is gained changes nothing here"
        check("attention", got, expected)
        assert torch.equal(got, run(isa, "bf16", batch, n_blocks, qkv, threads=3)[0])


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_neighbours_change_no_bit(kv_format: str) -> None:
    batch, n_blocks = make_batch(SHAPE)
    batch = replace(batch, both_ways_S=np.ones(4, dtype=np.int32))
    qkv = rounded(noise(batch.n_tokens, 3 * H * D, seed=3))
    others = qkv.clone()
    others[:33], others[333:] = noise(33, 3 * H * D, seed=5), torch.nan
    for isa in KERNEL_SETS:
        got, beside = (run(isa, kv_format, batch, n_blocks, one)[0] for one in (qkv, others))
        assert torch.equal(got[33:333], beside[33:333])
        assert not torch.equal(got[:33], beside[:33])


def test_a_sequence_that_does_not_come_whole_is_refused() -> None:
    """Keys that were read before have left nothing that could be added."""
    batch, n_blocks = make_batch(replace(SHAPE, sequences=((30, 9), (0, 33))))
    with pytest.raises(ValueError, match="must come whole"):
        run(KERNEL_SETS[0], "bf16", batch, n_blocks, rounded(noise(batch.n_tokens, 3 * H * D, seed=3)))


def test_numbers_are_one_for_each_head_and_place() -> None:
    program = Bench(KERNEL_SETS[0], noise(4, 96, seed=1)).program
    shape = cpu._cpu.AttentionShape(n_heads=3, n_kv_heads=3, head_dim=32, scale=1.0)
    said, places = program.add_f32(3 * PLACES), program.add_vector(PLACE_OF.float())
    with pytest.raises(ValueError, match="each head and place"):
        program.attention(
            q=program.add_bf16(96), out=program.add_f32(96), layer=0, shape=shape, of_queries=said, of_keys=said,
            places=places, n_places=PLACES + 1,
        )  # fmt: skip
