"""A cache of int8 that queries and weights of 8 bits meet: every kernel set against the same rounding in fp64."""

from __future__ import annotations

import pytest
import torch
from test_ops import KV_FORMATS, attended, native_cache, rows_in, sizes_of

from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from diptych.ground.formats import KV_IN_BYTES
from op_bench import Bench, make_batch, quantised

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
LEVELS, LANES, TILE = 254, 16, 256
# three tiles, rows that see part of one, numbers of dimensions that fill no four and no vector, values of three vectors
SHAPES = (
    EdgeShape(name="", sequences=((700, 3), (255, 2)), n_heads=7, n_kv_heads=1, head_dim=64),
    EdgeShape(name="", sequences=((300, 40),), n_heads=2, n_kv_heads=1, head_dim=18, v_head_dim=40),
)


def of_tile(scores: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, levels: int | None) -> torch.Tensor:
    """A tile's weighted values, weights rounded to whole levels: what is lost of one goes to the next but one of its lane."""
    weights = scores.exp() * scales
    if levels is not None:
        unit = scales.max() / levels
        lost = torch.zeros(2, LANES, dtype=torch.float64)
        for group, at in enumerate(range(0, len(weights), LANES)):
            exact = weights[at : at + LANES] / unit + lost[group % 2, : len(weights) - at]
            weights[at : at + LANES] = exact.round() * unit
            lost[group % 2, : len(exact)] = exact - exact.round()
    return weights @ codes


def reckoned(shape: EdgeShape, *, levels: int | None) -> torch.Tensor:
    """[T, H dv] in fp64; levels None: weights are not rounded."""
    batch, n_blocks = make_batch(shape)
    _, keys, values = native_cache(shape, n_blocks, KV_IN_BYTES)
    heads, d = shape.n_heads, shape.head_dim
    q, k, v = rows_in(shape, batch, spread=False).split((heads * d, d, shape.value_dim), dim=1)
    queries, k, v = quantised(q.view(-1, heads, d)).double(), quantised(k).double(), quantised(v).double()
    out = torch.empty(len(q), heads, shape.value_dim, dtype=torch.float64)
    row = 0
    for (cached, fresh), table in zip(shape.sequences, batch.block_table_SM, strict=True):
        held = [torch.cat([x[block] for block in table]).double()[:cached, 0] for x in (keys, values)]
        own_k, own_v = (torch.cat([x, new[row : row + fresh]]) for x, new in zip(held, (k, v), strict=True))
        scales = own_v.abs().amax(-1) / 127
        for i in range(fresh):
            seen = cached + i + 1
            scores = queries[row + i] @ own_k[:seen].T * d**-0.5
            for h in range(heads):
                parts = [slice(at, min(at + TILE, seen)) for at in range(0, seen, TILE)]
                most = [scores[h, part].max() for part in parts]
                tiles = [
                    of_tile(scores[h, part] - m, own_v[part] / scales[part, None], scales[part], levels=levels)
                    for part, m in zip(parts, most, strict=True)
                ]
                top = max(most)
                total = sum((m - top).exp() * tile for m, tile in zip(most, tiles, strict=True))
                out[row + i, h] = total / (scores[h] - top).exp().sum()
        row += fresh
    return out.flatten(1)


@pytest.mark.parametrize("shape", SHAPES, ids=["three tiles", "odd sizes"])
def test_what_is_rounded_is_what_is_said(isa: str, shape: EdgeShape) -> None:
    """Where a set's exponential, which is good to a level of bf16, stands at half a level, a weight is its neighbour."""
    got, _ = attended(isa, shape, KV_IN_BYTES, {})
    exact, rounded = (reckoned(shape, levels=levels) for levels in (None, LEVELS))
    by_rounding, left = ((x - rounded).abs().mean() for x in (exact, got))
    assert left < by_rounding / 5


def attention_of(isa: str, shape: EdgeShape, kv_format: str, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a set makes of rows of q, k and v over a cache of noise, and that cache's values in their order."""
    batch, n_blocks = make_batch(shape)
    kv, _, values = native_cache(shape, n_blocks, kv_format)
    bench = Bench(isa, qkv, threads=2)
    native = cpu._cpu.AttentionShape(scale=0.125, in_bytes=kv_format == KV_IN_BYTES, **sizes_of(shape))
    width = shape.n_heads * shape.head_dim
    q, out = bench.program.add_bf16(width), bench.program.add_f32(width)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None,
        has_full_width_norm=False, norm_eps=1e-6,
    )  # fmt: skip
    bench.program.attention(q=q, out=out, layer=0, shape=native)
    return bench.run(out, width, batch, kv), torch.cat([values[block] for block in batch.block_table_SM[0]])[:, 0]


ROWS = EdgeShape(name="", sequences=((300, 20),), n_heads=3, n_kv_heads=1, head_dim=64)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_query_of_zeros_meets_alike_what_it_sees(isa: str, kv_format: str) -> None:
    """A pruned head's. Its scores are zeros, and of what lies behind it none counts."""
    qkv = rows_in(ROWS, make_batch(ROWS)[0], spread=False)
    qkv[:, :64] = 0.0
    got, before = attention_of(isa, ROWS, kv_format, qkv)
    seen = torch.cat([before[:300], qkv[:, -64:]])
    expected = torch.stack([seen[: 301 + row].mean(0) for row in range(20)])
    assert (got[:, :64] - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("column", [-128, -64], ids=["key", "value"])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_who_sees_what_is_no_number_has_none(isa: str, kv_format: str, column: int) -> None:
    """Whatever the cache rounds it to: a plausible answer behind a broken token would be rubbish."""
    qkv = rows_in(ROWS, make_batch(ROWS)[0], spread=False)
    qkv[4, column] = torch.nan
    got, _ = attention_of(isa, ROWS, kv_format, qkv)
    seen = got[4:].unflatten(1, (3, 64))
    assert seen.isnan().all() if column == -128 or kv_format != "bf16" else seen[..., 0].isnan().all()
