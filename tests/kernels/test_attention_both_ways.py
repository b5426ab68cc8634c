"""Attention both ways in every kernel set, against the reference; beside causal sequences, whose bits it must not touch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_ops import native_cache

from checkpoints import make_checkpoint
from diptych.compute.batch import ForwardBatch
from diptych.compute.ops import reference
from diptych.compute.ops.contract import AttentionSpec
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.models.positions import Distances
from op_bench import ROUNDED, Bench, check, distances_of, make_batch, noise, padded_distances, rounded
from thread_ranks import load_over_threads
from worlds import KERNEL_SETS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
# whole and both ways: 1, 2 and 4; two tiles, so that the first rows see a later tile; a block's edge; one token
SHAPE = EdgeShape(
    name="", sequences=((30, 9), (0, 300), (0, 33), (70, 1), (0, 1)), n_heads=2, n_kv_heads=1, head_dim=32
)
BOTH_WAYS = np.array([0, 1, 1, 0, 1], dtype=np.int32)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "window 1": {"window": 1}, "window 20": {"window": 20}, "window 270, softcap": {"window": 270, "softcap": 1.5},
    "distances": {"reach": 40},
}  # fmt: skip


def plain_of(variant: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in variant.items() if name != "reach"}


def run(isa: str, kv_format: str, variant: dict[str, Any], batch: ForwardBatch, n_blocks: int, threads: int) -> tuple:
    """What the kernels give [T, H d], and what the cache then holds as keys and values [N, P, K, d]."""
    qkv = rounded(noise(batch.n_tokens, 4 * 32, seed=3))
    kv, keys, values = native_cache(SHAPE, n_blocks, kv_format)
    bench = Bench(isa, qkv, threads=threads)
    native = cpu._cpu.AttentionShape(n_heads=2, n_kv_heads=1, head_dim=32, scale=32**-0.5, **plain_of(variant))
    q, out = bench.program.add_bf16(64), bench.program.add_f32(64)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None, has_full_width_norm=False,
        norm_eps=1e-6,
    )  # fmt: skip
    distances = bench.program.add_vector(padded_distances(SHAPE, variant["reach"])) if "reach" in variant else -1
    bench.program.attention(q=q, out=out, layer=0, shape=native, distances=distances)
    got = bench.run(out, 64, batch, kv)
    parts = qkv.view(batch.n_tokens, 4, 32)
    slots = torch.from_numpy(batch.slots_T(SHAPE.block_tokens)).long()
    at = slots // SHAPE.block_tokens, slots % SHAPE.block_tokens
    round_ = ROUNDED.get(kv_format, lambda x: x)
    keys[at], values[at] = round_(parts[:, 2:3]), round_(parts[:, 3:])
    return got, parts[:, :2], keys, values


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_each_row_sees_its_whole_sequence_or_a_window_to_either_side(variant: dict[str, Any], kv_format: str) -> None:
    causal, n_blocks = make_batch(SHAPE)
    batch = replace(causal, both_ways_S=BOTH_WAYS)
    expected: torch.Tensor | None = None
    for isa in KERNEL_SETS:
        got, q, keys, values = run(isa, kv_format, variant, batch, n_blocks, 1)
        if expected is None:
            spec = AttentionSpec(layer=0, n_heads=2, n_kv_heads=1, head_dim=32, scale=32**-0.5, **plain_of(variant))
            reach = variant.get("reach")
            distances = None if reach is None else distances_of(SHAPE, reach)
            spec = spec if reach is None else replace(spec, distances=Distances(n_buckets=4, reach=reach))
            expected = reference.attention_paged(q, keys, values, batch, spec, None, distances).flatten(1)
        check("attention", got, expected)
        assert torch.equal(got, run(isa, kv_format, variant, batch, n_blocks, 5)[0]), "tiles were split between threads"
        plain = run(isa, kv_format, variant, causal, n_blocks, 1)[0]
        starts = batch.query_start_S1
        for s, is_both in enumerate(BOTH_WAYS):
            rows = slice(starts[s], starts[s + 1])
            # one token alone sees itself, whatever is asked
            assert torch.equal(got[rows], plain[rows]) == (not is_both or rows.stop - rows.start == 1), s


def test_a_part_of_a_sequence_is_refused() -> None:
    """What stands behind a chunk is not known yet: a program that ran it would see another owner's keys."""
    batch, n_blocks = make_batch(SHAPE)
    with pytest.raises(ValueError, match="must come whole"):
        run(cpu.instruction_sets()[-1], "bf16", {}, replace(batch, both_ways_S=np.ones(5, dtype=np.int32)), n_blocks, 1)


def test_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    """Which sequences attend both ways is told to every rank with the step."""
    path = make_checkpoint("mistral", tmp_path, num_hidden_layers=2, dtype=torch.bfloat16)
    n_tokens = 40
    batch = ForwardBatch(
        token_ids_T=np.arange(2 * n_tokens, dtype=np.int32),
        query_start_S1=np.array([0, n_tokens, 2 * n_tokens], dtype=np.int32),
        context_tokens_S=np.array([n_tokens, n_tokens], dtype=np.int32),
        block_table_SM=np.arange(6, dtype=np.int32).reshape(2, 3),
        logits_rows_R=np.arange(2 * n_tokens, dtype=np.int32),
        both_ways_S=np.array([1, 0], dtype=np.int32),
    )
    config = ComputeConfig(backend="cpu", weights="bf16", threads=1)
    logits = []
    for model in (load_model(path, config), load_over_threads(path, replace(config, tp=2, threads=2))):
        logits.append(model.forward(batch, model.make_kv(8, 16)).clone())
        causal = model.forward(replace(batch, both_ways_S=None), model.make_kv(8, 16))
        assert not torch.equal(logits[-1][: n_tokens - 1], causal[: n_tokens - 1])
        assert torch.equal(logits[-1][n_tokens:], causal[n_tokens:])
        model.close()
    assert torch.equal(*logits)
