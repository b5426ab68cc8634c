"""Every op of the native backend but the linear layers (test_gemm) against the reference, over the edge shapes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops import reference
from diptych.compute.ops.contract import Activation, AttentionSpec, RopeSpec
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EDGE_SHAPES, EdgeShape
from diptych.ground.formats import KV_IN_BYTES
from diptych.models.gates import PLAIN
from diptych.models.mlp import MoeSpec, Scores
from diptych.models.positions import Distances, QueryScale, slopes
from op_bench import ROUNDED, Bench, check, distances_of, make_batch, noise, padded_distances, rounded
from worlds import KERNEL_SETS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
BF16 = torch.bfloat16
WIDE_SHAPES = (
    EdgeShape(name="three tiles", sequences=((700, 1), (0, 300)), n_heads=3, n_kv_heads=1, head_dim=64),
    EdgeShape(name="tile edges", sequences=((255, 1), (256, 1), (257, 2), (511, 3)), head_dim=80, block_tokens=32),
    EdgeShape(name="wide heads", sequences=((40, 2),), n_heads=2, n_kv_heads=1, head_dim=256, block_tokens=64),
    EdgeShape(name="middle heads", sequences=((30, 7),), n_heads=7, n_kv_heads=1, head_dim=96),
    EdgeShape(name="two dimensions", sequences=((5, 12),), head_dim=2),
    EdgeShape(name="more heads than a task's rows", sequences=((20, 2),), n_heads=70, n_kv_heads=1, head_dim=32),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "window 1": {"window": 1}, "window 17": {"window": 17}, "window 260": {"window": 260},
    "softcap": {"softcap": 1.5}, "softcap, window": {"softcap": 1.5, "window": 9}, "sinks": {"has_sinks": True},
    "sinks, window": {"has_sinks": True, "window": 17}, "chunks": {"window": 24, "is_chunked": True},
    "long chunks": {"window": 300, "is_chunked": True}, "slopes": {"has_slopes": True},
    "slopes, softcap": {"has_slopes": True, "softcap": 1.5}, "distances": {"reach": 40},
    "distances, softcap": {"reach": 1, "softcap": 1.5},
}  # fmt: skip
KV_FORMATS = ("bf16", "int8", KV_IN_BYTES, "fp8")
BEST = next(iter(cpu.instruction_sets()), "")


def native_cache(
    shape: EdgeShape, n_blocks: int, kv_format: str, *, spread: bool = False
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A cache filled with noise, and what it holds as [N, P, K, d]."""
    heads = [(shape.n_kv_heads, shape.head_dim, shape.value_dim)]
    kv = cpu._cpu.KvCache(heads=heads, n_blocks=n_blocks, block_tokens=shape.block_tokens, format=kv_format)
    n_tokens = n_blocks * shape.block_tokens
    blocks = np.arange(n_blocks, dtype=np.int32)
    widths = shape.head_dim, shape.value_dim
    dense = [noise(shape.n_kv_heads, n_tokens, width, seed=seed) for seed, width in enumerate(widths, 1)]
    if spread:
        dense[1] *= torch.logspace(-2, 2, n_tokens)[:, None]
    kv.write(0, blocks, dense[0], dense[1])
    kv.read(0, blocks, dense[0], dense[1])
    paged = [x.transpose(0, 1).reshape(n_blocks, shape.block_tokens, shape.n_kv_heads, x.shape[-1]) for x in dense]
    return kv, paged[0], paged[1]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_and_cache_write_over_edge_shapes(isa: str, name: str, kv_format: str) -> None:
    """Paging, raggedness, windows and groups meet at the edges of blocks, tiles and vectors."""
    variant = {"has_sinks": False} | VARIANTS[name]
    has_sinks = variant.pop("has_sinks")
    shapes = (*EDGE_SHAPES, *WIDE_SHAPES) if "avx512" in isa or "amx" in isa else (*EDGE_SHAPES[-5:], *WIDE_SHAPES[:3])
    for turn, shape in enumerate(shapes, list(VARIANTS).index(name) + KV_FORMATS.index(kv_format)):
        threads = 1 if turn % 4 else 2  # which wait for each other, and for what runs beside them
        # 254 levels of weights; what they are exactly, test_in_bytes.py says
        tolerance = 5e-2 if kv_format == KV_IN_BYTES else None
        got, expected = attended(isa, shape, kv_format, variant, has_sinks=has_sinks, threads=threads)
        check("attention", got, expected, tolerance=tolerance)


WHOLE = [name for name in KERNEL_SETS if "neon" not in name and "amx" not in name]


@pytest.mark.parametrize("isa", WHOLE, indirect=True)
def test_attention_over_an_int8_cache_is_finer_than_bf16(isa: str) -> None:
    """Queries and weights are whole numbers of 16 bits there; rounded to bf16, as they were, they erred five times as much."""
    shape = EdgeShape(name="", sequences=((700, 1), (255, 2)), n_heads=7, n_kv_heads=1, head_dim=64)
    got, expected = attended(isa, shape, "int8", {}, spread=True)
    assert (got - expected).abs().max() < 4e-4 * expected.abs().max()


def test_every_code_of_fp8_is_its_number_for_few_rows_and_for_many(isa: str) -> None:
    """Many rows meet a tile that was widened before, few rows its codes, which are widened in the registers that multiply."""
    heads, d, n_tokens, size = 7, 64, 300, {"n_heads": 7, "head_dim": 64, "block_tokens": 32}
    batch, n_blocks = make_batch(EdgeShape(name="", sequences=((0, n_tokens),), **size))
    n = n_blocks * 32
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)
    keys = codes.repeat(n * d // 256 + 1)[: n * d].view(1, n, d).clone()
    # Each exponent has columns of its own, of one sign: numbers without one (below 2^-6) stand beside nothing larger.
    column, token = torch.arange(d), torch.arange(n)[:, None]
    values = codes[column // 32 * 128 + column % 16 * 8 + token % 8][None].clone()
    keys[..., 0] = values[..., 15] = 448.0  # of every token, so that its scale is 1 and each code stays what it is
    kv = cpu._cpu.KvCache(heads=[(1, d, d)], n_blocks=n_blocks, block_tokens=32, format="fp8")
    kv.write(0, np.arange(n_blocks, dtype=np.int32), keys, values)
    native = cpu._cpu.AttentionShape(scale=2e-4, n_heads=heads, n_kv_heads=1, head_dim=d)
    qkv = rounded(noise(40, (heads + 2) * d, seed=3))
    qkv[:, -d:] = 0.0

    def last_rows(fresh: int) -> torch.Tensor:
        bench = Bench(isa, qkv[-fresh:].contiguous(), threads=1)
        q, out = bench.program.add_bf16(heads * d), bench.program.add_f32(heads * d)
        bench.program.rotate(
            qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None,
            has_full_width_norm=False, norm_eps=1e-6,
        )  # fmt: skip
        bench.program.attention(q=q, out=out, layer=0, shape=native, sinks=-1)
        shape = EdgeShape(name="", sequences=((n_tokens - fresh, fresh),), **size)
        return bench.run(out, heads * d, make_batch(shape)[0], kv)

    many = last_rows(40)
    for fresh in (1, 2, 3):
        assert torch.equal(last_rows(fresh), many[-fresh:]), f"{fresh} tokens"
    k, v = torch.empty(1, n_tokens, d), torch.empty(1, n_tokens, d)
    kv.read(0, batch.block_table_SM[0], k, v)
    assert len(torch.unique(v)) > 250
    weights = torch.softmax(qkv[-1, : heads * d].view(heads, d) @ k[0].T * 2e-4, -1)
    assert ((many[-1].view(heads, d) - weights @ v[0]).abs() <= 4e-3 * (weights @ v[0].abs())).all()


def attended(
    isa: str,
    shape: EdgeShape,
    kv_format: str,
    variant: dict[str, Any],
    *,
    has_sinks: bool = False,
    spread: bool = False,
    threads: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a set makes of a shape's rows (of some, where they are many), and the reference. spread: values of many sizes."""
    batch, n_blocks = make_batch(shape)
    kv, _, _ = native_cache(shape, n_blocks, kv_format, spread=spread)
    bench = Bench(isa, rows_in(shape, batch, spread=spread), threads=threads)
    fields = {name: one for name, one in variant.items() if name not in ("has_slopes", "reach")}
    fields["in_bytes"] = kv_format == KV_IN_BYTES
    native = cpu._cpu.AttentionShape(scale=shape.head_dim**-0.5, **sizes_of(shape), **fields)
    q = bench.program.add_bf16(shape.n_heads * shape.head_dim)
    out = bench.program.add_f32(shape.n_heads * shape.value_dim)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None,
        has_full_width_norm=False, norm_eps=1e-6,
    )  # fmt: skip
    numbers = {
        "sinks": bench.program.add_vector(sinks_of(shape)) if has_sinks else -1,
        "slopes": bench.program.add_vector(torch.tensor(slopes(shape.n_heads, 8.0))) if "has_slopes" in variant else -1,
        "distances": bench.program.add_vector(padded_distances(shape, variant["reach"])) if "reach" in variant else -1,
    }
    bench.program.attention(q=q, out=out, layer=0, shape=native, **numbers)
    got = bench.run(out, shape.n_heads * shape.value_dim, batch, kv)
    return got[looked_at(batch)], expected_rows(
        shape, kv_format, tuple(variant.items()), has_sinks=has_sinks, spread=spread
    )


def rows_in(shape: EdgeShape, batch: ForwardBatch, *, spread: bool) -> torch.Tensor:
    of_values = shape.n_kv_heads * shape.value_dim
    qkv = rounded(noise(batch.n_tokens, (shape.n_heads + shape.n_kv_heads) * shape.head_dim + of_values, seed=3))
    if spread:
        qkv[:, -shape.head_dim :] *= 0.01
    return qkv


def sizes_of(shape: EdgeShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in ("n_heads", "n_kv_heads", "head_dim", "v_head_dim")}


def sinks_of(shape: EdgeShape) -> torch.Tensor:
    return noise(shape.n_heads, seed=4, scale=3.0)


def looked_at(batch: ForwardBatch) -> list[int]:
    n = batch.n_tokens
    return list(range(n)) if n < 64 else [0, 1, 2, 255, 256, 257, n - 1]


@cache  # every set has the same
def expected_rows(
    shape: EdgeShape, kv_format: str, variant: tuple[tuple[str, Any], ...], *, has_sinks: bool, spread: bool
) -> torch.Tensor:
    batch, n_blocks = make_batch(shape)
    _, keys, values = native_cache(shape, n_blocks, kv_format, spread=spread)
    q_width, k_width = (n * shape.head_dim for n in (shape.n_heads, shape.n_kv_heads))
    parts = rows_in(shape, batch, spread=spread).tensor_split((q_width, q_width + k_width), dim=1)
    counts = shape.n_heads, shape.n_kv_heads, shape.n_kv_heads
    q, new_k, new_v = (part.unflatten(1, (n, -1)) for part, n in zip(parts, counts, strict=True))
    if kv_format in ROUNDED:
        new_k, new_v = (ROUNDED[kv_format](x) for x in (new_k, new_v))
    if kv_format == KV_IN_BYTES:
        q = ROUNDED[kv_format](q)
    slots = torch.from_numpy(batch.slots_T(shape.block_tokens)).long()
    keys[slots // shape.block_tokens, slots % shape.block_tokens] = new_k
    values[slots // shape.block_tokens, slots % shape.block_tokens] = new_v
    fields = dict(variant)
    if fields.pop("has_slopes", False):
        fields["slopes"] = slopes(shape.n_heads, 8.0)
    reach = fields.pop("reach", None)
    if reach is not None:
        fields["distances"] = Distances(n_buckets=4, reach=reach)
    spec = AttentionSpec(layer=0, scale=shape.head_dim**-0.5, **sizes_of(shape), **fields)
    sinks = sinks_of(shape) if has_sinks else None
    distances = None if reach is None else distances_of(shape, reach)
    return attention_rows(q, keys, values, batch, spec, looked_at(batch), sinks, distances)


def attention_rows(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    spec: AttentionSpec,
    rows: list[int],
    sinks: torch.Tensor | None,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """reference.attention_paged, for the rows asked for only."""
    picked = []
    for row in rows:
        s = int(np.searchsorted(batch.query_start_S1, row, side="right")) - 1
        one = ForwardBatch(
            token_ids_T=batch.token_ids_T[row : row + 1], query_start_S1=np.array([0, 1], dtype=np.int32),
            context_tokens_S=batch.positions_T[row : row + 1] + 1, block_table_SM=batch.block_table_SM[s : s + 1],
            logits_rows_R=batch.logits_rows_R,
        )  # fmt: skip
        picked.append(reference.attention_paged(q[row : row + 1], keys, values, one, spec, sinks, distances).flatten(1))
    return torch.cat(picked)


@pytest.mark.parametrize("norm", ["none", "head", "heads", "centred", "full"])
@pytest.mark.parametrize("rotary_dim", [0, 8, 24])
def test_rotate_writes_query_key_and_value(isa: str, rotary_dim: int, norm: str) -> None:
    """A key is written once and read for the rest of the sequence: its norm, angle and slot must be right."""
    shape = EdgeShape(name="", sequences=((40, 1), (7, 1), (0, 33), (1000, 5)), n_heads=6, n_kv_heads=2, head_dim=24)
    batch, n_blocks = make_batch(shape)
    qkv = noise(batch.n_tokens, 10 * 24, seed=5)
    kv, _, _ = native_cache(shape, n_blocks, "bf16")
    bench = Bench(isa, qkv)
    rope = RopeSpec(
        inv_freq=tuple(10000 ** (-i / max(rotary_dim // 2, 1)) for i in range(rotary_dim // 2)), attention_factor=1.2
    )
    width = {"none": (0, 0), "head": (24, 24), "centred": (6 * 48, 2 * 48)}.get(norm, (6 * 24, 2 * 24))
    scale = QueryScale(slope=0.3, tokens=8, shift=1) if norm == "none" else None
    weights = [noise(n, seed=6 + i) + 1 for i, n in enumerate(width)]
    native = cpu._cpu.AttentionShape(n_heads=6, n_kv_heads=2, head_dim=24, scale=1.0)
    q = bench.program.add_bf16(6 * 24)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native,
        rope=bench.program.add_rope(list(rope.inv_freq), rope.attention_factor) if rotary_dim else None,
        q_norm=bench.program.add_vector(weights[0]) if width[0] else None,
        k_norm=bench.program.add_vector(weights[1]) if width[1] else None,
        has_full_width_norm=norm == "full", has_head_norms=norm in ("heads", "centred"), norm_eps=1e-6,
        has_norm_biases=norm == "centred",
        query_scale=scale and (scale.slope, scale.tokens, scale.shift),
    )  # fmt: skip
    bench.program.attention(q=q, out=bench.program.add_f32(6 * 24), layer=0, shape=native)
    got_q = bench.run(q, 6 * 24, batch, kv)

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(1, (-1, 24))
        if norm == "head":
            heads = reference.rms_norm(heads, weight, eps=1e-6)
        if norm == "heads":
            heads = reference.layer_norm(heads, torch.ones(24), eps=1e-6) * weight.view(-1, 24)
        if norm == "centred":
            scales, biases = weight.view(-1, 2, 24).unbind(1)
            heads = reference.layer_norm(heads, torch.ones(24), eps=1e-6) * scales + biases
        if norm == "full":
            heads = reference.rms_norm(x, weight, eps=1e-6).unflatten(1, (-1, 24))
        return reference.rotate(heads, torch.from_numpy(batch.positions_T), rope) if rotary_dim else heads

    positions = torch.from_numpy(batch.positions_T)
    by_position = torch.ones(1) if scale is None else reference.query_scales(positions, scale)
    expected_q = expected(qkv[:, : 6 * 24], weights[0]).flatten(1) * by_position[:, None]
    check("rotate_and_cache", got_q / by_position[:, None], rounded(expected_q) / by_position[:, None])
    expected_k, expected_v = expected(qkv[:, 6 * 24 : 8 * 24], weights[1]), qkv[:, 8 * 24 :].unflatten(1, (-1, 24))
    for s, context in enumerate(batch.context_tokens_S):
        begin, end = batch.query_start_S1[s], batch.query_start_S1[s + 1]
        keys, values = torch.empty(2, int(context), 24), torch.empty(2, int(context), 24)
        kv.read(0, batch.block_table_SM[s], keys, values)
        check("rotate_and_cache", keys[:, -(end - begin) :], expected_k[begin:end].transpose(0, 1))
        assert torch.equal(values[:, -(end - begin) :], rounded(expected_v[begin:end].transpose(0, 1)))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 100, 576])
def test_norm_and_sums_of_rows(isa: str, width: int) -> None:
    """Rows that are no multiple of the vector length, and a row of zeros."""
    x = noise(5, width, seed=1)
    x[3] = 0
    weight = noise(width, seed=2)
    bench = Bench(isa, x)
    out, index = bench.program.add_f32(width), bench.program.add_vector(weight)
    bench.program.norm(bench.x, index, 1e-5, out)
    bench.program.add_norm(out, index, 1e-5, bench.x)
    bench.program.add(out, bench.x)
    y = reference.rms_norm(x, weight, eps=1e-5)
    total = bench.run(bench.x, width)
    normed = torch.empty(5, width)
    bench.program.read_buffer(out, normed)
    torch.testing.assert_close(normed, y, atol=1e-5, rtol=0)
    torch.testing.assert_close(total, x + reference.rms_norm(y, weight, eps=1e-5) + y, atol=2e-5, rtol=0)


@pytest.mark.parametrize("has_bias", [False, True], ids=["bias-free", "bias"])
@pytest.mark.parametrize("width", [1, 15, 17, 64, 100])
def test_centred_norm_of_rows(isa: str, width: int, has_bias: bool) -> None:
    """Rows far from zero: squares about zero would lose the variance."""
    x = noise(5, width, seed=1) + torch.tensor([0.0, 1.0, -30.0, 200.0, 0.0])[:, None]
    weight, bias = noise(width, seed=2), noise(width, seed=3)
    bench = Bench(isa, x)
    program = bench.program
    out = program.add_f32(width)
    number = program.add_vector(bias) if has_bias else -1
    program.norm(bench.x, program.add_vector(weight), 1e-5, out, number, True)
    expected = reference.layer_norm(x.double(), weight, bias if has_bias else None, eps=1e-5)
    torch.testing.assert_close(bench.run(out, width), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("width", "parts"), [(96, 4), (51, 3), (640, 2)])
def test_norm_of_parts_of_rows(isa: str, width: int, parts: int) -> None:
    """Each by itself: by one norm over all of them a loud group of Mamba-2's heads would take the others' voice."""
    x, weight = noise(5, width, seed=1), noise(width, seed=2)
    x[:, : width // parts] *= 30
    bench = Bench(isa, x)
    out = bench.program.add_f32(width)
    bench.program.norm(bench.x, bench.program.add_vector(weight), 1e-5, out, parts=parts)
    expected = torch.cat(
        [reference.rms_norm(one, w, eps=1e-5) for one, w in zip(x.chunk(parts, 1), weight.chunk(parts), strict=True)],
        dim=1,
    )
    torch.testing.assert_close(bench.run(out, width), expected, atol=1e-5, rtol=0)
    for wrong in ({"parts": 7}, {"parts": 0}, {"parts": parts, "is_centred": True}, {"parts": parts, "bias": 0}):
        with pytest.raises(ValueError, match="equal parts of a row"):
            bench.program.norm(bench.x, 0, 1e-5, out, **wrong)


def test_gated_sum_of_rows(isa: str) -> None:
    """Qwen2-MoE's shared experts come by a sigmoid of each token's own."""
    x = noise(5, 37, seed=1)
    bench = Bench(isa, x)
    program = bench.program
    gate, y = program.add_f32(1), program.add_f32(37)
    gates = noise(5, 1, seed=2, scale=4.0)
    program.embed(program.add_table(gates), gate, 1.0)
    program.embed(program.add_table(x), y, 2.0)
    program.add(y, bench.x, gate)
    torch.testing.assert_close(bench.run(bench.x, 37), x + torch.sigmoid(gates) * 2 * x, atol=1e-5, rtol=0)


ROUTINGS: dict[str, dict[str, Any]] = {
    "V2": {"n_groups": 4, "groups_per_token": 2, "routed_scale": 3.0},
    "V3": {"n_groups": 4, "groups_per_token": 2, "group_best": 2, "scores": Scores.SIGMOID, "renormalises": True},
    "ERNIE": {"renormalises": True, "has_choice_bias": True},
    "Llama 4": {"activation": Activation.SILU, "scores": Scores.SIGMOID, "weighs_input": True},
    "Step 3.7": {"activation": Activation.SILU, "limit": 0.8, "scores": Scores.SIGMOID, "renormalises": True},
    "sparsemixer": {"scores": Scores.SPARSEMIXER, "margin": 0.4, "activation": Activation.SILU, "routed_scale": 0.5},
    "Kolibri": {"scores": Scores.LATE_SIGMOID, "has_choice_bias": True, "renormalises": True},
    "Laguna": {"activation": Activation.SILU, "scores": Scores.SIGMOID, "softcap": 0.4, "has_choice_bias": True,
               "renormalises": True},
    "LongCat": {"activation": Activation.SILU, "n_identities": 4, "has_choice_bias": True, "routed_scale": 2.0},
    "sigmoid, bias": {"scores": Scores.SIGMOID, "has_choice_bias": True, "routed_scale": 0.5},
    "Nemotron 3": {"activation": Activation.SQUARED_RELU, "is_gated": False, "scores": Scores.SIGMOID,
                   "renormalises": True},
}  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_experts_of_groups_and_clamped_gates(isa: str, weights: str, routing: dict[str, Any]) -> None:
    """DeepSeek's groups, scores and bias for the choice; inner values that an operation of its own makes: gates of gpt-oss and
    Llama 4, no gates of Nemotron 3.
    """
    sizes = {"n_experts": 8, "experts_per_token": 3, "expert_ffn": 48}
    spec = MoeSpec(**{"activation": Activation.CLAMPED, **sizes, **routing})
    n, ffn, hidden, top_k = spec.n_experts, spec.expert_ffn, 64, spec.experts_per_token
    x = rounded(noise(9, hidden, seed=1))
    router = rounded(noise(spec.n_scored, hidden, seed=2, scale=2 * hidden**-0.5))
    width = (spec.n_products - 1) * ffn
    gate_up = [rounded(noise(width, hidden, seed=3 + e, scale=4 * hidden**-0.5)) for e in range(n)]
    down = [rounded(noise(hidden, ffn, seed=30 + e, scale=0.02 * ffn**-0.5)) for e in range(n)]
    bias = noise(spec.n_scored, seed=50, scale=0.5) if spec.has_choice_bias else None
    bench = Bench(isa, x)
    program = bench.program

    def pack(w: torch.Tensor, kind: str) -> int:
        return program.add_linear(cpu._cpu.LinearShape(format=kind, n=len(w), k=w.shape[1]), [w])

    rows, router_rows = program.add_rows(weights, hidden), program.add_rows("bf16", hidden)
    program.prepare(bench.x, rows)
    program.prepare(bench.x, router_rows)
    out = program.add_f32(hidden)
    program.moe(
        router=pack(router, "bf16"), router_rows=router_rows, scores=program.add_f32(spec.n_scored),
        gate_up=[pack(w, weights) for w in gate_up], down=[pack(w, weights) for w in down], rows=rows, hidden=None,
        hidden_rows=program.add_rows(weights, ffn, rows_per_token=top_k), expanded=program.add_f32(hidden, top_k),
        out=out, top_k=top_k, renormalises=spec.renormalises, activation="silu",
        scores_by=(spec.scores.value, spec.margin), choice_bias=-1 if bias is None else program.add_vector(bias),
        groups=(spec.n_groups, spec.groups_per_token, spec.group_best), routed_scale=spec.routed_scale,
        wide=program.add_f32(width, top_k), weighs_input=spec.weighs_input,
        curve="" if spec.is_gated else spec.activation.value,
        gate=(spec.form or PLAIN).numbers, softcap=spec.softcap or 0.0, identities=(spec.n_identities, bench.x),
    )  # fmt: skip
    check("experts", bench.run(out, hidden), reference.experts(x, router, gate_up, down, spec, bias))


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize(("weights", "n_identities"), [("bf16", 0), ("int8", 0), ("bf16", 2), ("int8", 3)])
def test_experts(isa: str, weights: str, n_identities: int, renormalises: bool, activation: Activation) -> None:
    """Routing, gathering and the weighted sum; equal scores go to the lowest expert."""
    n_experts, top_k, ffn, hidden = 5, 2, 48, 64
    spec = MoeSpec(
        n_experts=n_experts, experts_per_token=top_k, expert_ffn=ffn, renormalises=renormalises, activation=activation,
        n_identities=n_identities,
    )  # fmt: skip
    x = rounded(noise(9, hidden, seed=1))
    router = rounded(noise(spec.n_scored, hidden, seed=2, scale=hidden**-0.5))
    router[3] = router[1]
    gate_up = [rounded(noise(2 * ffn, hidden, seed=3 + e, scale=hidden**-0.5)) for e in range(n_experts)]
    down = [rounded(noise(hidden, ffn, seed=30 + e, scale=ffn**-0.5)) for e in range(n_experts)]
    bench = Bench(isa, x)
    program = bench.program

    def pack(w: torch.Tensor, kind: str, *, is_gated: bool = False) -> int:
        return program.add_linear(cpu._cpu.LinearShape(format=kind, n=len(w), k=w.shape[1], is_gated=is_gated), [w])

    rows, router_rows = program.add_rows(weights, hidden), program.add_rows("bf16", hidden)
    program.prepare(bench.x, rows)
    program.prepare(bench.x, router_rows)
    out = program.add_f32(hidden)
    program.moe(
        router=pack(router, "bf16"), router_rows=router_rows, scores=program.add_f32(spec.n_scored),
        gate_up=[pack(w, weights, is_gated=True) for w in gate_up], down=[pack(w, weights) for w in down], rows=rows,
        hidden=None if weights == "bf16" else program.add_f32(ffn, top_k),
        hidden_rows=program.add_rows(weights, ffn, rows_per_token=top_k), expanded=program.add_f32(hidden, top_k),
        out=out, top_k=top_k, renormalises=renormalises, activation=activation.value,
        identities=(n_identities, bench.x),
    )  # fmt: skip
    check("experts", bench.run(out, hidden), reference.experts(x, router, gate_up, down, spec))


def test_head_norms_projects_and_softcaps_the_wanted_rows(isa: str) -> None:
    """Only the rows asked for, in the order asked for."""
    x, norm, weight = noise(6, 40, seed=1), noise(40, seed=2) + 1, rounded(noise(77, 40, seed=3, scale=40**-0.5))
    program = cpu._cpu.Program(isa, 1)
    buffer = program.add_f32(40)
    program.embed(program.add_table(x), buffer, 1.0)
    program.attention(
        q=program.add_bf16(2), out=program.add_f32(2), layer=0,
        shape=cpu._cpu.AttentionShape(n_heads=1, n_kv_heads=1, head_dim=2, scale=1.0),
    )  # fmt: skip
    linear = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=77, k=40), [weight])
    program.head(
        x=buffer, norm=program.add_vector(norm), eps=1e-6, rows=program.add_rows("bf16", 40), weight=linear, softcap=1.5
    )
    batch, _ = make_batch(EdgeShape(name="", sequences=((0, 6),)))
    rows = [5, 0, 3]
    logits = torch.empty(3, 77)
    kv = cpu._cpu.KvCache(heads=[(1, 2, 2)], n_blocks=4, block_tokens=16, format="bf16")
    program.run(
        batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM,
        np.array(rows, dtype=np.int32), kv, logits,
    )  # fmt: skip
    check("head", logits, reference.head(x, norm, weight, rows=rows, eps=1e-6, softcap=1.5))


def head_program(
    isa: str, x: torch.Tensor, weight: torch.Tensor, *, weights: str, softcap: float | None, threads: int
) -> tuple[Any, Any]:
    """(program, cache) of a head over the embedding x; the attention gives the program its cache's shape."""
    width = x.shape[1]
    program = cpu._cpu.Program(isa, threads)
    buffer = program.add_f32(width)
    program.embed(program.add_table(x), buffer, 1.0)
    shape = cpu._cpu.AttentionShape(n_heads=1, n_kv_heads=1, head_dim=2, scale=1.0)
    program.attention(q=program.add_bf16(2), out=program.add_f32(2), layer=0, shape=shape)
    linear = program.add_linear(cpu._cpu.LinearShape(format=weights, n=len(weight), k=width), [weight])
    norm, rows = program.add_vector(torch.ones(width)), program.add_rows("bf16" if weights == "bf16" else "int8", width)
    program.head(x=buffer, norm=norm, eps=1e-6, rows=rows, weight=linear, softcap=softcap)
    return program, cpu._cpu.KvCache(heads=[(1, 2, 2)], n_blocks=8, block_tokens=16, format="bf16")


@pytest.mark.parametrize(
    ("softcap", "threads"),
    # of nine on fewer CPUs some take what others were dealt, back to front: ties tell
    [(None, 2), (1.5, 1), (0.05, 2), (0.05, 9)],
)
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_best_without_logits_is_the_arg_max_of_the_logits(
    isa: str, weights: str, softcap: float | None, threads: int
) -> None:
    """Greedy text must not depend on whether somebody beside it wanted logits: ties, caps that make ties, NaN and all."""
    width, n_rows = 64, 48
    for vocab in (1, 77, 1000):
        x = noise(n_rows, width, seed=vocab)
        weight = noise(vocab, width, seed=vocab + 1, scale=0.3)
        half = vocab // 2
        weight[half:] = weight[: vocab - half].clone()  # every logit of the second half is one of the first
        x[5] = 0.0  # all logits 0: the first wins
        x[7] = torch.nan
        x[9, 3] = torch.inf
        program, kv = head_program(isa, x, weight, weights=weights, softcap=softcap, threads=threads)
        batch, _ = make_batch(EdgeShape(name="", sequences=((0, n_rows),)))
        for wanted in ([5], [7], [9, 2], [*range(20, 25)], [*range(47, 30, -1)], [*range(48)]):
            rows = np.array(wanted, dtype=np.int32)
            arrays = (batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM, rows, kv)
            logits = torch.empty(len(rows), vocab)
            program.run(*arrays, logits)
            ids, values = program.run_best(*arrays)
            expected = logits.numpy().argmax(axis=1)  # the first among equals, and the first NaN before all
            assert ids == expected.tolist()
            np.testing.assert_array_equal(values, logits.numpy()[np.arange(len(rows)), expected])


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_best_of_a_row_without_numbers_is_no_number(isa: str, softcap: float | None) -> None:
    """The sampler ends a sequence by this; a plausible logit would let rubbish through."""
    x = torch.full((2, 32), torch.nan)
    program, kv = head_program(isa, x, noise(100, 32, seed=1), weights="bf16", softcap=softcap, threads=2)
    batch, _ = make_batch(EdgeShape(name="", sequences=((0, 2),)))
    rows = np.array([1, 0], dtype=np.int32)
    arrays = (batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM, rows, kv)
    ids, values = program.run_best(*arrays)
    assert ids == [0, 0]
    assert np.isnan(values).all()


def test_an_operation_on_what_is_not_there_is_refused() -> None:
    """An unknown store kind was taken for add_f32, and a wrong number was looked up past the end of a list."""
    program = cpu._cpu.Program(BEST, 1)
    x, y, rows = program.add_f32(16), program.add_f32(32), program.add_rows("bf16", 16)
    weight = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=32, k=16), [noise(32, 16, seed=1)])
    good = {"category": "qkv", "weight": weight, "rows": rows, "out": y}
    program.linear(**good, store="f32")
    for wrong, match in (
        ({"store": "f16"}, "store kind f16"), ({"activation": "relu"}, "activation relu"),
        ({"category": "other"}, "category other"), ({"weight": 1}, "weight 1 of 1"), ({"out": 9}, "buffer 9 of 3"),
        ({"rows": -1}, "buffer -1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            program.linear(**{**good, **wrong})
    with pytest.raises(ValueError, match="vector 0 of 0"):
        program.norm(x, 0, 1e-6, rows)
    with pytest.raises(ValueError, match="weight format fp7"):
        cpu._cpu.LinearShape(format="fp7", n=32, k=16)
    with pytest.raises(ValueError, match="group"):
        cpu._cpu.LinearShape(format="int4", n=32, k=16, group=48)
    with pytest.raises(ValueError, match="KV format fp4"):
        cpu._cpu.KvCache(heads=[(1, 2, 2)], n_blocks=1, block_tokens=16, format="fp4")
    with pytest.raises(ValueError, match="this machine has"):
        cpu._cpu.Program("abacus", 1)


def test_rows_in_pairs_are_refused_where_rows_come_by_a_list() -> None:
    """Experts' and heads' lists name rows, and memory has two for each: halves of other rows were read, without a word."""
    program = cpu._cpu.Program(BEST, 1)
    y, wide, pairs, rows = (
        program.add_f32(32),
        program.add_f32(64, 2),
        *map(program.add_rows, ("bf16_pair", "bf16"), (32, 32)),
    )
    weight = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=32, k=32), [noise(32, 32, seed=1)])
    experts = {
        "router": weight, "router_rows": rows, "scores": y, "gate_up": [weight] * 2, "down": [weight] * 2, "rows": rows,
        "hidden": None, "hidden_rows": rows, "expanded": y, "out": y, "top_k": 1, "renormalises": False, "activation": "silu",
    }  # fmt: skip
    heads = {
        "weights": [weight],
        "x": y,
        "head_stride": 32,
        "rows": rows,
        "out": y,
        "out_head_stride": 32,
        "store": "f32",
    }
    for record, good, wrong in (
        (program.moe, experts, {"rows": pairs}), (program.moe, experts, {"hidden_rows": pairs}),
        (program.moe, experts, {"up": [weight] * 2, "up_rows": pairs, "wide": wide}), (program.heads, heads, {"rows": pairs}),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=f"buffer {pairs} holds rows of bf16_pair, which cannot be read by a list of rows"
        ):
            record(**good | wrong)
        record(**good)
    for wrong in ({"curve": "squared_relu"}, {"curve": "xielu", "wide": wide}, {"curve": "cube", "wide": wide}):
        with pytest.raises(ValueError, match=r"without a gate|curve xielu|activation cube"):
            program.moe(**experts | wrong)
    linear = {"category": "qkv", "weight": weight, "rows": pairs}
    with pytest.raises(ValueError, match="cannot be an operation's output"):
        program.linear(**linear, out=pairs, store="bf16")
    program.linear(**linear, out=y, store="f32")
