"""Every op of the torch backend against the reference, over the edge shapes of the contract: by torch's kernels and by ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from kinds import CPU, Kind, in_turns, of_kinds

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops import reference
from diptych.compute.ops.contract import (
    Activation,
    AttentionSpec,
    LinearParts,
    MixtureParts,
    NormParts,
    QkNorm,
    RopeSpec,
)
from diptych.compute.ops.contract_parts import ExpertParts
from diptych.compute.ops.tolerances import EDGE_SHAPES, OPS, EdgeShape
from diptych.compute.ops.torch.loader import TorchAttention, TorchNorm
from diptych.compute.ops.torch.ops import TorchOps
from diptych.models.latent import MlaSpec
from diptych.models.mlp import MoeSpec, Scores
from diptych.models.positions import Distances, slopes

VARIANTS = {
    "plain": {},
    "window 1": {"window": 1},
    "window 8": {"window": 8},
    "window 16": {"window": 16},
    "window 17": {"window": 17},
    "chunks of 12": {"window": 12, "is_chunked": True},
    "softcap": {"softcap": 1.5},
    "softcap, window": {"softcap": 1.5, "window": 9},
    "slopes": {"has_slopes": True},
    "distances": {"distances": Distances(n_buckets=4, reach=20)},
}


@dataclass
class Memory:
    """A WeightTensor in memory."""

    name: str
    tensor: torch.Tensor
    random_seed: int | None = None
    row_order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> torch.Tensor:
        return self.tensor


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def world(shape: EdgeShape) -> tuple[ForwardBatch, int]:
    """A batch of this shape over scattered blocks, and the size of its pool."""
    size = shape.block_tokens
    rng = np.random.default_rng(0)
    counts = [-(-(cached + new) // size) for cached, new in shape.sequences]
    n_blocks = sum(counts) + 3
    ids = rng.permutation(n_blocks)
    table = np.zeros((len(counts), max(counts)), dtype=np.int32)
    taken = 0
    for s, count in enumerate(counts):
        table[s, :count] = ids[taken : taken + count]
        taken += count
    n_tokens = sum(new for _, new in shape.sequences)
    batch = ForwardBatch(
        token_ids_T=rng.integers(0, 50, n_tokens).astype(np.int32),
        query_start_S1=np.array([0, *accumulate(new for _, new in shape.sequences)], dtype=np.int32),
        context_tokens_S=np.array([cached + new for cached, new in shape.sequences], dtype=np.int32),
        block_table_SM=table,
        logits_rows_R=np.array([0, n_tokens - 1], dtype=np.int32),
    )
    return batch, n_blocks


def make_ops(shape: EdgeShape, kind: Kind) -> tuple[TorchOps, ForwardBatch, TorchKVStore]:
    batch, n_blocks = world(shape)
    kv = TorchKVStore(
        heads=[(shape.n_kv_heads, shape.head_dim, shape.value_dim)], n_blocks=n_blocks, block_tokens=shape.block_tokens,
        dtype=kind.dtype, device=kind.device,
    )  # fmt: skip
    for seed, plane in enumerate(kv.layers[0], 1):
        plane.copy_(noise(*plane.shape, seed=seed))
    return kind.ops(batch, kv, device=kind.device, dtype=kind.dtype), batch, kv


def attention_spec(shape: EdgeShape, **fields: object) -> AttentionSpec:
    sizes = {"n_heads": shape.n_heads, "n_kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim}
    if fields.pop("has_slopes", False):
        fields["slopes"] = slopes(shape.n_heads, 8.0)
    return AttentionSpec(layer=0, scale=shape.head_dim**-0.5, v_head_dim=shape.v_head_dim, **sizes, **fields)  # type: ignore[arg-type]


def check(name: str, got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape
    got, expected = got.cpu(), expected.cpu()
    error = (got.float() - expected.float()).abs().max().item() if got.numel() else 0.0
    assert error <= OPS[name].tolerance(dtype), f"{name} differs by {error}"


@in_turns
@of_kinds
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", EDGE_SHAPES, ids=lambda shape: shape.name)
def test_attention(shape: EdgeShape, variant: dict, kind: Kind) -> None:
    """Paging, raggedness, windows and groups meet at block edges; an off-by-one shows only there."""
    dtype = kind.dtype
    ops, batch, kv = make_ops(shape, kind)
    spec = attention_spec(shape, **variant)
    q = noise(batch.n_tokens, shape.n_heads, shape.head_dim, seed=2).to(dtype)
    distances = None if spec.distances is None else noise(shape.n_heads, 2 * spec.distances.reach + 1, seed=4)
    for sinks in (None, noise(shape.n_heads, seed=3, scale=3.0)):
        planes = (plane.cpu() for plane in kv.layers[0])
        expected = reference.attention_paged(q, *planes, batch, spec, sinks, distances)
        of_heads = [None if one is None else kind.put(one) for one in (sinks, distances)]
        heads = TorchAttention(spec, None, None, *of_heads)
        check("attention", ops.attention(kind.put(q), heads), expected.flatten(1), dtype)


@pytest.mark.parametrize("window", [None, 700], ids=["full", "window"])
def test_attention_of_a_long_chunk_in_slices(window: int | None) -> None:
    """Chunks over 512 queries are attended slice by slice; the borders must not show."""
    shape = EdgeShape(name="long", sequences=((37, 1100),), n_heads=2, n_kv_heads=1, head_dim=8)
    ops, batch, kv = make_ops(shape, Kind(TorchOps, CPU, torch.float32))
    spec = attention_spec(shape, window=window)
    q = noise(batch.n_tokens, shape.n_heads, shape.head_dim, seed=2)
    got = ops.attention(q, TorchAttention(spec, None, None)).unflatten(1, (2, 8))
    rows = [0, 1, 510, 511, 512, 513, 1023, 1024, 1025, 1099]
    for row in rows:
        position = 37 + row
        first = 0 if window is None else max(0, position - window + 1)
        seen = np.arange(first, position + 1)
        slots = batch.block_table_SM[0, seen // 16], seen % 16
        k, v = kv.layers[0][0][slots][:, 0], kv.layers[0][1][slots][:, 0]
        expected = (q[row] @ k.T * spec.scale).softmax(-1) @ v
        torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=0)


@of_kinds
@pytest.mark.parametrize(
    ("shape", "rotary_dim", "qk_norm"),
    [
        pytest.param(EDGE_SHAPES[(0, 9, -2)[(i + j) % 3]], rotary_dim, norm, id=f"{norm}-{rotary_dim}")
        for i, norm in enumerate((QkNorm.NONE, QkNorm.HEAD, QkNorm.HEADS, QkNorm.CENTRED, QkNorm.FULL))
        for j, rotary_dim in enumerate((0, 8, 16))
    ],
)  # each norm and each width of what is turned meets each shape
def test_rotate_and_cache(shape: EdgeShape, rotary_dim: int, qk_norm: QkNorm, kind: Kind) -> None:
    """A key is written once and read for the rest of the sequence: its norm, angle and slot must be right."""
    dtype = kind.dtype
    ops, batch, kv = make_ops(shape, kind)
    n_heads, n_kv, d, dv = shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.value_dim
    rope = (
        RopeSpec(inv_freq=tuple(0.7**i for i in range(rotary_dim // 2)), attention_factor=1.2) if rotary_dim else None
    )
    spec = attention_spec(shape, rope=rope, qk_norm=qk_norm, v_scale=1.0 if dv == d else 0.5)
    both = (2 * n_heads * d, 2 * n_kv * d)
    widths = {QkNorm.NONE: None, QkNorm.HEAD: (d, d), QkNorm.CENTRED: both}.get(qk_norm, (n_heads * d, n_kv * d))
    q_norm, k_norm = (None, None) if widths is None else (noise(w, seed=w) + 1.0 for w in widths)
    qkv = noise(batch.n_tokens, (n_heads + n_kv) * d + n_kv * dv, seed=5).to(dtype)
    before = [plane.flatten(0, 1).cpu().clone() for plane in kv.layers[0]]
    norms = [None if weight is None else TorchNorm(kind.put(weight)) for weight in (q_norm, k_norm)]
    got = ops.rotate_and_cache(kind.put(qkv), TorchAttention(spec, *norms))

    positions = torch.from_numpy(batch.positions_T)
    expected = []
    for part, norm, heads in (
        (qkv[:, : n_heads * d], q_norm, n_heads),
        (qkv[:, n_heads * d :][:, : n_kv * d], k_norm, n_kv),
    ):
        if qk_norm is QkNorm.FULL:
            part = reference.rms_norm(part, norm, eps=spec.norm_eps)
        part = part.unflatten(1, (heads, d))
        if qk_norm is QkNorm.HEAD:
            part = reference.rms_norm(part, norm, eps=spec.norm_eps)
        if qk_norm is QkNorm.HEADS:
            part = reference.layer_norm(part, torch.ones(d), eps=spec.norm_eps) * norm.view(heads, d)
        if qk_norm is QkNorm.CENTRED:
            scales, biases = norm.view(heads, 2, d).unbind(1)
            part = reference.layer_norm(part, torch.ones(d), eps=spec.norm_eps) * scales + biases
        expected.append(part if rope is None else reference.rotate(part, positions, rope))
    # values reach 3 with weights up to 3: the tolerance is of values of order one
    scale = max(1.0, expected[0].abs().max().item())
    check("rotate_and_cache", got / scale, expected[0] / scale, dtype)
    slots = torch.from_numpy(batch.slots_T(shape.block_tokens)).long()
    keys, values = (plane.flatten(0, 1).cpu() for plane in kv.layers[0])
    check("rotate_and_cache", keys[slots] / scale, expected[1] / scale, dtype)
    assert torch.equal(values[slots], qkv[:, -n_kv * dv :].unflatten(1, (n_kv, dv)) * spec.v_scale)
    others = torch.ones(len(keys), dtype=torch.bool)
    others[slots] = False
    assert torch.equal(keys[others], before[0][others])
    assert torch.equal(values[others], before[1][others])


@in_turns
@of_kinds
@pytest.mark.parametrize("n_tokens", [1, 2, 17])
@pytest.mark.parametrize("activation", [one for one in Activation if one is not Activation.XIELU])  # it has no gate
@pytest.mark.parametrize("has_bias", [False, True], ids=["bias-free", "bias"])
def test_linears_and_norms(n_tokens: int, activation: Activation, has_bias: bool, kind: Kind) -> None:
    """Parts stacked at load must come out in the order given, and biases with them."""
    dtype = kind.dtype
    ops, _, _ = make_ops(EdgeShape(name="any", sequences=((0, n_tokens),)), kind)
    loader = kind.loader()
    sizes, width = (24, 8, 16), 32
    weights = [noise(n, width, seed=n, scale=width**-0.5).to(dtype) for n in sizes]
    biases = [noise(n, seed=n + 1).to(dtype) for n in sizes] if has_bias else []
    parts = LinearParts(weights=tuple(Memory("w", w) for w in weights), biases=tuple(Memory("b", b) for b in biases))
    h, x = noise(n_tokens, width, seed=9).to(dtype), noise(n_tokens, 48, seed=10).to(dtype)
    expected = reference.linear(h, torch.cat(weights), torch.cat(biases) if has_bias else None)
    handle = loader.linear(parts)
    scale = max(1.0, expected.abs().max().item())
    check("linear", ops.linear(kind.put(h), handle) / scale, expected / scale, dtype)
    check(
        "linear_add",
        ops.linear_add(kind.put(h), handle, kind.put(x.clone())) / scale,
        (x.float() + expected) / scale,
        dtype,
    )
    check("add", ops.add(kind.put(x.clone()), kind.put(x)), x.float() * 2, dtype)
    gated = reference.gate(expected, activation)
    scale = max(1.0, gated.abs().max().item())
    check("linear_gate", ops.linear_gate(kind.put(h), loader.gated(parts, activation)) / scale, gated / scale, dtype)
    if activation in (Activation.SIGMOID, Activation.SILU):
        a = noise(n_tokens, 48, seed=15).to(dtype)
        given = reference.gate_heads(a, expected, activation)
        scale = max(1.0, given.abs().max().item())
        check(
            "gate_heads",
            ops.gate_heads(kind.put(h), loader.gate(parts, activation), kind.put(a)) / scale,
            given / scale,
            dtype,
        )
    norm = loader.norm(NormParts(weight=Memory("n", noise(width, seed=11).to(dtype))), offset=1.0)
    centred = NormParts(
        weight=Memory("n", noise(width, seed=12)), bias=Memory("b", noise(width, seed=13)), is_centred=True
    )
    expected = reference.layer_norm(h, centred.weight.read(), centred.bias.read(), eps=1e-5)
    check("norm", ops.norm(kind.put(h), loader.norm(centred), eps=1e-5), expected, dtype)
    gate = noise(n_tokens, 1, seed=14).to(dtype)
    expected = h.float() + h.float() * torch.sigmoid(gate.float())
    check("add_gated", ops.add_gated(kind.put(h.clone()), kind.put(h), kind.put(gate)), expected, dtype)
    normed = reference.rms_norm(h, noise(width, seed=11).to(dtype).float() + 1.0, eps=1e-5)
    check("norm", ops.norm(kind.put(h), norm, eps=1e-5), normed, dtype)


@of_kinds
@pytest.mark.parametrize(
    "routing",
    [
        {},
        {"renormalises": True},
        {"n_groups": 3, "groups_per_token": 2, "routed_scale": 2.0},
        {"n_groups": 3, "groups_per_token": 2, "group_best": 2, "scores": Scores.SIGMOID, "has_choice_bias": True},
        {"scores": Scores.LATE_SIGMOID, "has_choice_bias": True},
        {"scores": Scores.SIGMOID, "softcap": 0.4, "has_choice_bias": True, "renormalises": True},
        {"activation": Activation.CLAMPED},
        {"limit": 0.3},
        {"scores": Scores.SIGMOID, "weighs_input": True},
        {"activation": Activation.SQUARED_RELU, "is_gated": False},
        {"n_identities": 3, "has_choice_bias": True, "routed_scale": 2.0},
    ],
    ids=[
        "plain",
        "renormalised",
        "groups",
        "V3",
        "Kolibri",
        "Laguna",
        "clamped",
        "Step 3.7",
        "Llama 4",
        "Nemotron 3",
        "LongCat",
    ],
)
@pytest.mark.parametrize("n_tokens", [1, 9])
def test_experts(n_tokens: int, routing: dict[str, Any], kind: Kind) -> None:
    """A token sent to the wrong expert, or weighted twice, changes text without any error."""
    dtype = kind.dtype
    ops, _, _ = make_ops(EdgeShape(name="any", sequences=((0, n_tokens),)), kind)
    spec = MoeSpec(**{"n_experts": 6, "experts_per_token": 2, "expert_ffn": 12, **routing})
    router = noise(spec.n_scored, 16, seed=20).to(dtype)
    gate_up = [noise(12 * (spec.n_products - 1), 16, seed=30 + e, scale=0.25).to(dtype) for e in range(6)]
    down = [noise(16, 12, seed=40 + e, scale=0.25).to(dtype) for e in range(6)]
    bias = noise(spec.n_scored, seed=45) if spec.has_choice_bias else None
    parts = MixtureParts(
        router=LinearParts(weights=(Memory("r", router),)),
        choice_bias=None if bias is None else Memory("bias", bias),
        experts=tuple(
            ExpertParts(
                gate_up=LinearParts(weights=tuple(Memory("a", one) for one in gate_up[e].split(12))),
                down=LinearParts(weights=(Memory("c", down[e]),)),
            )
            for e in range(6)
        ),
    )
    handle = kind.loader().experts(spec, parts)
    h = noise(n_tokens, 16, seed=50).to(dtype)
    check("experts", ops.experts(kind.put(h), handle), reference.experts(h, router, gate_up, down, spec, bias), dtype)


@of_kinds
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [[], [0], [6, 2, 3]])
def test_embed_and_head(rows: list[int], softcap: float | None, kind: Kind) -> None:
    """Logits are wanted of some rows only, possibly none (a prefill chunk that is not the last)."""
    dtype = kind.dtype
    shape = EdgeShape(name="any", sequences=((0, 7),))
    batch, n_blocks = world(shape)
    fields = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
    batch = ForwardBatch(**{**fields, "logits_rows_R": np.array(rows, dtype=np.int32)})
    kv = TorchKVStore(heads=[(1, 2, 2)], n_blocks=n_blocks, block_tokens=16, dtype=dtype, device=kind.device)
    ops, loader = kind.ops(batch, kv, device=kind.device, dtype=dtype), kind.loader()
    tensor = Memory("table", noise(50, 16, seed=60).to(dtype))
    head = loader.head(tensor)
    table = loader.table(tensor, head=None)
    x = ops.embed(table, scale=2.0)
    check("embed", x, tensor.tensor[batch.token_ids_T] * 2.0, dtype)
    placed = ops.embed(table, scale=2.0, positions=table, first_position=3)
    check("embed", placed, tensor.tensor[batch.token_ids_T] * 2.0 + tensor.tensor[3:10], dtype)
    typed = ops.embed(table, scale=2.0, positions=table, first_position=3, types=table)
    check("embed", typed, tensor.tensor[batch.token_ids_T] * 2.0 + tensor.tensor[0] + tensor.tensor[3:10], dtype)
    pair = kind.ops(replace(batch, second_S=np.array([4], dtype=np.int32)), kv, device=kind.device, dtype=dtype)
    of_types = [0, 0, 0, 0, 1, 1, 1]
    typed = pair.embed(table, scale=2.0, types=table)
    check("embed", typed, tensor.tensor[batch.token_ids_T] * 2.0 + tensor.tensor[of_types], dtype)
    norm = Memory("norm", noise(16, seed=61) + 1.0)
    logits = ops.head(x, loader.norm(NormParts(weight=norm)), head, eps=1e-6, softcap=softcap)
    expected = reference.head(x.cpu(), norm.tensor, tensor.tensor, rows=rows, eps=1e-6, softcap=softcap)
    assert logits.dtype == torch.float32
    scale = max(1.0, expected.abs().max().item()) if rows else 1.0
    check("head", logits / scale, expected / scale, dtype)
    assert loader.table(tensor, head=head).data_ptr() == head.weight.data_ptr(), "a tied table is not a second copy"


@of_kinds
@pytest.mark.parametrize("turned", [4, 0], ids=["turned in part", "without positions"])
def test_latents_are_attended_to_as_their_expansion_would_be(kind: Kind, turned: int) -> None:
    """Latent attention absorbed, over a paged cache of one vector a token, against every head's own keys and values."""
    dtype = kind.dtype
    shape = EdgeShape(name="any", sequences=((0, 21),), n_heads=3)
    batch, n_blocks = world(shape)
    mla = MlaSpec(q_rank=None, kv_rank=12, nope_dim=6, rope_dim=turned, v_dim=5)
    kv = TorchKVStore(
        heads=[(1, mla.row, 0)], n_blocks=n_blocks, block_tokens=16, dtype=dtype, device=kind.device,
    )  # fmt: skip
    ops, loader = kind.ops(batch, kv, device=kind.device, dtype=dtype), kind.loader()
    rope = RopeSpec(inv_freq=(1.0, 0.3)[: turned // 2])
    spec = AttentionSpec(layer=0, n_heads=3, n_kv_heads=1, head_dim=mla.row, scale=0.3, rope=rope, mla=mla)
    norm = Memory("n", noise(12, seed=1) + 1.0)
    keys, values = noise(3, 12, 6, seed=2, scale=0.3).to(dtype), noise(3, 5, 12, seed=3, scale=0.3).to(dtype)
    heads = loader.latent_attention(
        spec,
        norm=NormParts(weight=norm),
        keys=tuple(LinearParts(weights=(Memory("k", one),)) for one in keys),
        values=tuple(LinearParts(weights=(Memory("v", one),)) for one in values),
    )
    rows, q = noise(21, mla.row, seed=4).to(dtype), noise(21, 3 * (6 + turned), seed=5).to(dtype)
    ops.cache_latents(kind.put(rows), heads)
    got = ops.expand(ops.attention(ops.absorb(kind.put(q), heads), heads), heads)

    positions = torch.from_numpy(batch.positions_T)
    q_parts = q.float().unflatten(1, (3, 6 + turned))
    q_parts = torch.cat([q_parts[..., :6], reference.rotate(q_parts[..., 6:], positions, rope)], dim=-1)
    latent = reference.rms_norm(rows[:, :12], norm.tensor, eps=spec.norm_eps)
    rotated = reference.rotate(rows[:, None, 12:], positions, rope)[:, 0]
    expected = reference.latent_attention(q_parts, torch.cat([latent, rotated], dim=-1), keys, values, scale=0.3)
    scale = max(1.0, expected.abs().max().item())
    check("attention", got / scale, expected / scale, dtype)
    assert torch.equal(*kv.read(0, batch.block_table_SM[0], 21)), "a key is its own value"
