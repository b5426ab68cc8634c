"""Values that are normed, and layers that attend to what another has written, in the native backend and in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops import reference
from diptych.compute.ops.contract import AttentionSpec, RopeSpec
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.ops.torch.loader import TorchAttention
from diptych.compute.ops.torch.ops import TorchOps
from op_bench import Bench, check, make_batch, noise, rounded
from worlds import KERNEL_SETS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
H, K, D = 6, 2, 24
SHAPE = EdgeShape(name="", sequences=((40, 1), (7, 1), (0, 33)), n_heads=H, n_kv_heads=K, head_dim=D)


def native_kv(n_blocks: int) -> Any:
    return cpu._cpu.KvCache(
        heads=[(K, D, D)], n_blocks=n_blocks, block_tokens=16, format="bf16"
    )  # fmt: skip


@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_values_are_normed_before_they_are_written(isa: str) -> None:
    """Each head over its own width, without a weight."""
    batch, n_blocks = make_batch(SHAPE)
    qkv, kv = noise(batch.n_tokens, (H + 2 * K) * D, seed=5, scale=3.0), native_kv(n_blocks)
    bench, native = Bench(isa, qkv), cpu._cpu.AttentionShape(n_heads=H, n_kv_heads=K, head_dim=D, scale=1.0)
    q = bench.program.add_bf16(H * D)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None, has_full_width_norm=False,
        norm_eps=1e-6, has_v_norm=True,
    )  # fmt: skip
    bench.program.attention(q=q, out=bench.program.add_f32(H * D), layer=0, shape=native)
    bench.run(q, H * D, batch, kv)
    expected = reference.rms_norm(qkv[:, (H + K) * D :].unflatten(1, (K, D)), torch.ones(D), eps=1e-6)
    for s, context in enumerate(batch.context_tokens_S):
        begin, end = batch.query_start_S1[s], batch.query_start_S1[s + 1]
        keys, values = torch.empty(K, int(context), D), torch.empty(K, int(context), D)
        kv.read(0, batch.block_table_SM[s], keys, values)
        check("rotate_and_cache", values[:, -(end - begin) :], expected[begin:end].transpose(0, 1))
        assert torch.equal(
            keys[:, -(end - begin) :], rounded(qkv[begin:end, H * D : (H + K) * D]).view(-1, K, D).transpose(0, 1)
        )


@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_keys_may_be_the_values_and_norms_follow_the_turn(isa: str) -> None:
    """A row has no values then: they are the keys as they were projected, normed without a weight."""
    batch, n_blocks = make_batch(SHAPE)
    qk, kv = noise(batch.n_tokens, (H + K) * D, seed=5, scale=3.0), native_kv(n_blocks)
    bench, native = Bench(isa, qk), cpu._cpu.AttentionShape(n_heads=H, n_kv_heads=K, head_dim=D, scale=1.0)
    weight, rope = noise(D, seed=6) + 1, RopeSpec(inv_freq=(1.0, 0.3, 0.0))
    norm, turn = bench.program.add_vector(weight), bench.program.add_rope(list(rope.inv_freq), 1.0)
    q = bench.program.add_bf16(H * D)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=turn, q_norm=norm, k_norm=norm, has_full_width_norm=False,
        norm_eps=1e-6, has_v_norm=True, has_v=False, norms_turned=True,
    )  # fmt: skip
    bench.program.attention(q=q, out=bench.program.add_f32(H * D), layer=0, shape=native)
    turned = reference.rotate(qk.unflatten(1, (H + K, D)), torch.from_numpy(batch.positions_T), rope)
    normed = reference.rms_norm(turned, weight, eps=1e-6)
    check("rotate_and_cache", bench.run(q, H * D, batch, kv), normed[:, :H].flatten(1))
    expected = reference.rms_norm(qk[:, H * D :].unflatten(1, (K, D)), torch.ones(D), eps=1e-6)
    for s, context in enumerate(batch.context_tokens_S):
        begin, end = batch.query_start_S1[s], batch.query_start_S1[s + 1]
        keys, values = torch.empty(K, int(context), D), torch.empty(K, int(context), D)
        kv.read(0, batch.block_table_SM[s], keys, values)
        check("rotate_and_cache", values[:, -(end - begin) :], expected[begin:end].transpose(0, 1))
        check("rotate_and_cache", keys[:, -(end - begin) :], normed[begin:end, H:].transpose(0, 1))


@pytest.mark.parametrize("isa", KERNEL_SETS)
def test_a_layer_without_keys_reads_what_is_there_and_writes_nothing(isa: str) -> None:
    """Its rows hold queries alone, as wide as they are."""
    batch, n_blocks = make_batch(SHAPE)
    kv, blocks = native_kv(n_blocks), torch.arange(n_blocks, dtype=torch.int32).numpy()
    dense = [rounded(noise(K, n_blocks * 16, D, seed=seed)) for seed in (1, 2)]
    kv.write(0, blocks, *dense)
    rows = noise(batch.n_tokens, H * D, seed=7)
    bench, native = Bench(isa, rows), cpu._cpu.AttentionShape(n_heads=H, n_kv_heads=K, head_dim=D, scale=0.2)
    q, out = bench.program.add_bf16(H * D), bench.program.add_f32(H * D)
    bench.program.rotate(
        qkv=bench.x, q=q, layer=0, shape=native, rope=None, q_norm=None, k_norm=None, has_full_width_norm=False,
        norm_eps=1e-6, writes_kv=False,
    )  # fmt: skip
    bench.program.attention(q=q, out=out, layer=0, shape=native)
    got = bench.run(out, H * D, batch, kv)
    paged = [x.transpose(0, 1).reshape(n_blocks, 16, K, D) for x in dense]
    spec = AttentionSpec(layer=0, n_heads=H, n_kv_heads=K, head_dim=D, scale=0.2)
    check("attention", got, reference.attention_paged(rounded(rows).view(-1, H, D), *paged, batch, spec).flatten(1))
    after = [torch.empty(K, n_blocks * 16, D) for _ in range(2)]
    kv.read(0, blocks, *after)
    assert all(torch.equal(one, other) for one, other in zip(after, dense, strict=True))


def test_torch_norms_values_and_shares_them() -> None:
    """The second layer of the model has the cache's only layer."""
    batch, n_blocks = make_batch(SHAPE)
    kv = TorchKVStore(
        heads=[(K, D, D)], n_blocks=n_blocks, block_tokens=16, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    sizes = {"n_heads": H, "n_kv_heads": K, "head_dim": D, "scale": 0.2}
    first = TorchAttention(AttentionSpec(layer=0, has_v_norm=True, **sizes), None, None)
    second = TorchAttention(AttentionSpec(layer=1, place=0, owns_kv=False, **sizes), None, None)
    ops = TorchOps(batch, kv, device=torch.device("cpu"), dtype=torch.float32)
    qkv = noise(batch.n_tokens, (H + 2 * K) * D, seed=5, scale=3.0)
    ops.rotate_and_cache(qkv, first)
    slots = torch.from_numpy(batch.slots_T(16)).long()
    expected = reference.rms_norm(qkv[:, (H + K) * D :].unflatten(1, (K, D)), torch.ones(D), eps=1e-6)
    torch.testing.assert_close(kv.layers[0][1].flatten(0, 1)[slots], expected, atol=1e-5, rtol=0)
    before, rows = [plane.clone() for plane in kv.layers[0]], noise(batch.n_tokens, H * D, seed=7)
    got = ops.attention(ops.rotate_and_cache(rows, second), second)
    assert all(map(torch.equal, kv.layers[0], before))
    whole = reference.attention_paged(rows.view(-1, H, D), kv.layers[0][0], kv.layers[0][1], batch, second.spec)
    torch.testing.assert_close(got, whole.flatten(1), atol=1e-5, rtol=0)
