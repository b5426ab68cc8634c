"""Our kernels on tiles of every size, and whole models on a GPU: not one bit depends on how the work was cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from kinds import KINDS, Kind, in_turns
from test_torch_ops import Memory, noise, world

from checkpoints import FAMILIES, make_checkpoint
from diptych.compute.adapters import LowRank
from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.model import Model
from diptych.compute.ops import reference
from diptych.compute.ops.contract import Activation, AttentionSpec, LinearParts, RopeSpec
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.ops.torch.loader import TorchAttention
from diptych.compute.runner import load_model
from diptych.compute.sites import Site
from diptych.ground.config import ComputeConfig
from diptych.models.latent import IndexSpec, MlaSpec
from worlds import alone, beside, differing, prompt

OURS = {name: kind for name, kind in KINDS.items() if name.startswith("triton")}
pytestmark = pytest.mark.skipif(not OURS, reason="triton is not installed")
of_ours = pytest.mark.parametrize("kind", OURS.values(), ids=OURS)

# each has something of its own that kernels must do, or leave to torch
OTHERS = ("qwen2_moe", "gemma4", "gemma4-e2b", "gpt_oss", "command-r-plus", "llama4", "gpt2", "falcon", "phi", "apertus",
          "ernie4_5_moe", "hunyuan_v1_dense", "granite_swa", "afmoe", "ministral3", "nanochat")  # fmt: skip
# latent attention, values narrower than keys, and an index that chooses
WIDTHS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "mistral4", "axk1", "mimo_v2_flash",
          "deepseek_v32", "glm_moe_dsa")  # fmt: skip
# sizes of V2-Lite and V3, and of GLM-4.7-Flash, whose heads fill no tile
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
PUBLISHED: dict[str, dict[str, int]] = {
    "llama": {"head_dim": 64, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
    "deepseek_v2": {**LATENTS, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 16},
    "deepseek_v3": {**LATENTS, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 128},
    "glm4_moe_lite": {**LATENTS, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_attention_heads": 20},
    "deepseek_v32": {
        **LATENTS,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_attention_heads": 64,
        "index_topk": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
    },
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 2},
}
CONFIG = ComputeConfig(backend="torch", device="cuda", weights="bf16")
N_TOKENS = 75


@in_turns
@of_ours
@pytest.mark.parametrize("gate", [0, 1, 2], ids=["plain", "silu", "gelu"])
@pytest.mark.parametrize(("n", "k"), [(48, 40), (300, 320)])
@pytest.mark.parametrize("rows", [1, 17, 50, 150])
def test_products_in_tiles(rows: int, n: int, k: int, gate: int, kind: Kind) -> None:
    """Rows, columns and inputs that no tile divides."""
    kernels = import_module("diptych.compute.ops.gpu.products")
    x, weight = noise(rows, k, seed=1).to(kind.dtype), (noise(n, k, seed=2) * k**-0.5).to(kind.dtype)
    bias, added = noise(n, seed=3).to(kind.dtype), noise(rows, n if gate == 0 else n // 2, seed=4).to(kind.dtype)
    expected = x.float() @ weight.float().T + bias.float()
    if gate:
        first, up = expected.chunk(2, dim=1)
        act = torch.nn.functional.silu(first) if gate == 1 else torch.nn.functional.gelu(first, approximate="tanh")
        expected = act * up
    on_it = [kind.put(one) for one in (x, weight, bias)]
    got = kernels.multiply(*on_it, kind=gate, added=kind.put(added), dtype=torch.float32)
    error = (got.cpu() - expected - added.float()).abs().max().item()
    assert error < (1e-5 if kind.dtype == torch.float32 else 2e-3), error
    assert got.dtype == torch.float32


@of_ours
def test_an_adapter_changes_no_bit_of_rows_without_it(kind: Kind) -> None:
    """Its part comes before what is fused, which rows beside it keep."""
    shape = EdgeShape(name="two", sequences=((0, 5), (0, 4)))
    batch, n_blocks = world(shape)
    loader = kind.loader()
    parts = LinearParts(weights=(Memory("w", noise(48, 32, seed=1).to(kind.dtype)),))
    plain, gated = loader.linear(parts), loader.gated(parts, Activation.SILU)
    low_rank = LowRank(a=kind.put(noise(3, 32, seed=2).to(kind.dtype)), b=kind.put(noise(48, 3, seed=3).to(kind.dtype)))
    adapter = {id(one): [(Site(linear=one, begin=0, end=48, n_inputs=32), low_rank)] for one in (plain, gated)}
    h, x = (kind.put(noise(9, width, seed=4).to(kind.dtype)) for width in (32, 48))
    found = []
    for adapters_S in (None, np.array([0, -1], dtype=np.int32)):
        kv = TorchKVStore(heads=[(1, 8, 8)], n_blocks=n_blocks, block_tokens=16, dtype=kind.dtype, device=kind.device)
        step = replace(batch, adapters_S=adapters_S, logits_rows_R=np.array([8, 4], dtype=np.int32))
        ops = kind.ops(step, kv, device=kind.device, dtype=kind.dtype, adapters={0: adapter})
        of_rows = ops.linear_add(h, plain, x), ops.linear_gate(h, gated), ops.linear(h, plain)
        found.append((*of_rows, ops._scores(h[[8, 4]], plain)))
    changed = h[:5].float() @ low_rank.a.float().T @ low_rank.b.float().T
    for first, second in zip(*found, strict=True):
        rows = slice(0, 1) if len(first) == 2 else slice(5, 9)  # those of the sequence without an adapter
        assert torch.equal(first[rows], second[rows])
        assert not torch.equal(first, second)
    for i in (0, 2):
        first, second = (each[i][:5].float() for each in found)
        error = (second - first - changed).abs().max().item()
        assert error < (1e-4 if kind.dtype == torch.float32 else 0.3), error


@of_ours
def test_parts_of_wider_rows_are_read_as_they_lie(kind: Kind) -> None:
    """What is split off a row keeps its distance to the next."""
    products, by_row = (import_module(f"diptych.compute.ops.gpu.{name}") for name in ("products", "rows"))
    wide, weight = noise(5, 100, seed=1).to(kind.dtype), noise(24, 32, seed=2).to(kind.dtype)
    part = kind.put(wide)[:, 40:72]
    expected = wide[:, 40:72].float() @ weight.float().T
    torch.testing.assert_close(products.multiply(part, kind.put(weight)).cpu().float(), expected, atol=5e-2, rtol=0)
    turned = kind.put(wide.T.contiguous()).T[:, 40:72]
    torch.testing.assert_close(products.multiply(turned, kind.put(weight)).cpu().float(), expected, atol=5e-2, rtol=0)
    normed = torch.nn.functional.rms_norm(wide[:, 40:72].float(), (32,), eps=1e-5)
    torch.testing.assert_close(by_row.rms_norm(part, None, 1e-5).cpu().float(), normed, atol=2e-2, rtol=0)


def long_batch(contexts: list[int], rows: list[int]) -> tuple[ForwardBatch, int]:
    """Sequences of so many positions, the last `rows` of each new, over scattered blocks, and how many blocks there are."""
    n, width = len(contexts), -(-max(contexts) // 16)
    table = np.random.default_rng(0).permutation(n * width).reshape(n, width).astype(np.int32)
    batch = ForwardBatch(
        token_ids_T=np.zeros(sum(rows), dtype=np.int32), query_start_S1=np.cumsum([0, *rows], dtype=np.int32),
        context_tokens_S=np.array(contexts, dtype=np.int32), block_table_SM=table, logits_rows_R=np.zeros(0, dtype=np.int32),
    )  # fmt: skip
    return batch, table.size


@in_turns
@of_ours
@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "value_dim", "window", "has_sinks"),
    [
        (6, 2, 24, None, False),
        (6, 2, 24, None, True),
        (6, 2, 24, 100, False),
        (6, 2, 24, 700, True),
        (6, 2, 10, None, False),
        (6, 2, 40, 100, True),
        (70, 1, 24, None, False),
        (70, 1, 24, None, True),
    ],
)  # sinks are a number of each row, whatever it sees
def test_attention_over_long_contexts(
    n_heads: int, n_kv_heads: int, value_dim: int, window: int | None, has_sinks: bool, kind: Kind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Decode takes a long context in parts, prefill a long chunk in items, a large group in tiles: no border may show. Where
    there are many items of several tokens none is taken in parts, with the same bits.
    """
    batch, n_blocks = long_batch(*([1300, 511, 600, 1100], [1, 1, 30, 3]) if n_heads < 64 else ([700, 333], [1, 5]))
    kv = TorchKVStore(
        heads=[(n_kv_heads, 24, value_dim)], n_blocks=n_blocks, block_tokens=16, dtype=kind.dtype, device=kind.device
    )
    for seed, plane in enumerate(kv.layers[0], 1):
        plane.copy_(noise(*plane.shape, seed=seed))
    spec = AttentionSpec(
        layer=0, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=24, v_head_dim=value_dim, scale=0.2, window=window
    )
    sinks = noise(n_heads, seed=3) * 3 if has_sinks else None
    q = noise(batch.n_tokens, n_heads, 24, seed=2).to(kind.dtype)
    expected = reference.attention_paged(q, *(plane.cpu() for plane in kv.layers[0]), batch, spec, sinks).flatten(1)
    ops = kind.ops(batch, kv, device=kind.device, dtype=kind.dtype)
    heads = TorchAttention(spec, None, None, None if sinks is None else kind.put(sinks))
    got = ops.attention(kind.put(q), heads).cpu()
    monkeypatch.setattr(import_module("diptych.compute.ops.gpu.attention"), "MANY", 0)
    assert torch.equal(ops.attention(kind.put(q), heads).cpu(), got)
    error = (got.float() - expected.float()).abs().max().item()
    assert error < (1e-5 if kind.dtype == torch.float32 else 5e-3), error


@in_turns
@of_ours
@pytest.mark.parametrize(("n_heads", "rank"), [(3, 24), (20, 32), (70, 16)])
def test_latent_attention_over_long_contexts(
    n_heads: int, rank: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, of keys whose first numbers are the values; behind them lies what is nobody's."""
    batch, n_blocks = long_batch(
        *([600, 1100, 90, 531], [1, 1, 25, 3]) if n_heads < 64 else ([531, 1100, 257], [1, 3, 1])
    )
    kv = TorchKVStore(
        heads=[(1, rank + 16, 0)], n_blocks=n_blocks, block_tokens=16, dtype=kind.dtype, device=kind.device
    )
    plane = kv.layers[0][0]
    plane.copy_(noise(*plane.shape, seed=1))
    plane[..., rank + 8 :] = torch.nan
    mla = MlaSpec(q_rank=None, kv_rank=rank, nope_dim=6, rope_dim=8, v_dim=5)
    spec = AttentionSpec(layer=0, n_heads=n_heads, n_kv_heads=1, head_dim=mla.row, scale=0.2, mla=mla)
    q = noise(batch.n_tokens, n_heads, mla.row, seed=2).to(kind.dtype)
    keys = plane[..., : mla.row].cpu()
    expected = reference.attention_paged(q, keys, keys[..., :rank], batch, spec).flatten(1)
    ops = kind.ops(batch, kv, device=kind.device, dtype=kind.dtype)
    got = ops.attention(kind.put(q), TorchAttention(spec, None, None))
    monkeypatch.setattr(import_module("diptych.compute.ops.gpu.attention"), "MANY", 0)
    assert torch.equal(ops.attention(kind.put(q), TorchAttention(spec, None, None)), got)
    assert got.shape == expected.shape
    error = (got.cpu().float() - expected).abs().max().item()
    assert error < (1e-5 if kind.dtype == torch.float32 else 5e-3), error


@of_ours
def test_the_highest_scores_are_chosen_and_attended_to(kind: Kind) -> None:
    """Scores are whole numbers, many of them equal. A token that sees no more than are chosen has the bits of one without."""
    index = import_module("diptych.compute.ops.gpu.index")
    batch, n_blocks = long_batch([150, 40, 50], [80, 1, 50])
    kv = TorchKVStore(heads=[(1, 64, 0)], n_blocks=n_blocks, block_tokens=16, dtype=kind.dtype, device=kind.device)
    generator = torch.Generator().manual_seed(0)
    plane = kv.layers[0][0]
    plane.copy_(noise(*plane.shape, seed=1))
    plane[..., 40:] = torch.randint(-1, 2, (*plane.shape[:3], 24), generator=generator).to(plane)
    queries = torch.randint(-1, 2, (batch.n_tokens, 3, 24), generator=generator).float()
    weights = torch.randint(-2, 4, (batch.n_tokens, 3), generator=generator).float()
    ops, most = kind.ops(batch, kv, device=kind.device, dtype=kind.dtype), 37
    scores = torch.full((batch.n_tokens, 150), float("-inf"), device=kind.device)
    on_it = kind.put(queries.to(kind.dtype)), kind.put(weights)
    for one in ops._items_of(4):
        index.score(
            *on_it,
            ops._pool(0)[0],
            scores,
            one.items_I4,
            ops._table,
            begin=40,
            block_tokens=16,
            most_rows=one.most_rows,
        )
    chosen = index.highest(scores, most)
    mla = MlaSpec(q_rank=8, kv_rank=24, nope_dim=6, rope_dim=16, v_dim=5)
    spec = AttentionSpec(
        layer=0,
        n_heads=20,
        n_kv_heads=1,
        head_dim=40,
        scale=0.2,
        mla=mla,
        index=IndexSpec(most=most, n_heads=3, head_dim=24),
    )
    q, heads = noise(batch.n_tokens, 20, 40, seed=2).to(kind.dtype), TorchAttention(spec, None, None)
    everywhere = ops.attention(kind.put(q), heads).cpu()
    ops._listed = chosen
    got, few = ops.attention(kind.put(q), heads).cpu(), torch.from_numpy(batch.positions_T) < most
    if kind.device.type == "cuda":  # numpy, which interprets, adds up as the tile's rows allow
        assert torch.equal(got[few], everywhere[few])
    assert few.sum() > 30
    rows = kv.layers[0][0].cpu().float()
    for s, (begin, end) in enumerate(pairwise(batch.query_start_S1)):
        seen = np.arange(batch.context_tokens_S[s])
        tokens = rows[batch.block_table_SM[s, seen // 16], seen % 16, 0]
        for t in range(begin, end):
            at = int(batch.positions_T[t])
            products = (queries[t] @ tokens[: at + 1, 40:].T).clamp(min=0)
            best = (weights[t] @ products).sort(descending=True, stable=True).indices[:most].sort().values
            assert chosen[t, : len(best)].tolist() == best.tolist()
            keys = tokens[best, :40]
            expected = ((q[t].float() @ keys.T) * spec.scale).softmax(dim=-1) @ keys[:, :24]
            error = (got[t].float() - expected.flatten()).abs().max().item()
            assert error < (1e-5 if kind.dtype == torch.float32 else 1.2e-2), (
                t,
                error,
            )  # three values of 16 bits, of up to 3


@in_turns
@of_ours
@pytest.mark.parametrize(("n", "k"), [(24, 10), (130, 136)])
@pytest.mark.parametrize("rows", [1, 17, 150])
def test_products_of_heads(rows: int, n: int, k: int, kind: Kind) -> None:
    """Each head's numbers by its own matrix; those behind them are turned, and nothing else is."""
    latents = import_module("diptych.compute.ops.gpu.latents")
    x, weight = noise(rows, 3, k + 12, seed=1).to(kind.dtype), (noise(3, n, k, seed=2) * k**-0.5).to(kind.dtype)
    rope, positions = RopeSpec(inv_freq=tuple(0.7**i for i in range(6)), attention_factor=1.2), torch.arange(rows) + 40
    cos, sin = (torch.from_numpy(part)[positions] for part in rope.tables(rows + 40))
    expected = torch.einsum("xhk,hnk->xhn", x[..., :k].float(), weight.float())
    turned = reference.rotate(x[..., k:], positions, rope)
    on_it = kind.put(x), kind.put(weight)
    plain = latents.multiply_heads(*on_it).cpu()
    both = latents.multiply_heads(*on_it, turn=(kind.put(cos), kind.put(sin))).cpu()
    assert torch.equal(plain, both[..., :n])
    tolerance = 1e-5 if kind.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(both.float(), torch.cat([expected, turned], dim=-1), atol=tolerance, rtol=0)


@of_ours
def test_latents_of_nobody_are_not_cached(kind: Kind) -> None:
    """A recorded step has places that no token has; and an index has its keys behind the latents."""
    latents = import_module("diptych.compute.ops.gpu.latents")
    rows, weight = noise(3, 20, seed=1).to(kind.dtype), noise(12, seed=2) + 1.0
    rope, positions = RopeSpec(inv_freq=(1.0, 0.5, 0.2, 0.1)), torch.tensor([7, 0, 9])
    turn = tuple(kind.put(torch.from_numpy(part)[positions]) for part in rope.tables(10))
    before = noise(6, 1, 25, seed=3).to(kind.dtype)
    cache = kind.put(before.clone())
    latents.cache_latents(
        kind.put(rows), kind.put(torch.tensor([4, -1, 0])), cache, weight=kind.put(weight), turn=turn, eps=1e-6
    )
    normed = reference.rms_norm(rows[:, :12], weight, eps=1e-6)
    expected = before.float()
    expected[[4, 0], 0, :20] = torch.cat([normed, reference.rotate(rows[:, None, 12:], positions, rope)[:, 0]], 1)[
        [0, 2]
    ]
    tolerance = 1e-5 if kind.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(cache.cpu().float(), expected, atol=tolerance, rtol=0)
    others = cache.cpu().clone()
    others[[4, 0], 0, :20] = before[[4, 0], 0, :20]
    assert torch.equal(others, before)


def load(family: str, directory: Path, **overrides: object) -> Model:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return load_model(make_checkpoint(family, directory, dtype=torch.bfloat16, **overrides), CONFIG)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, *WIDTHS])
def test_cut_of_the_work_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Decode replays what was recorded, prefill multiplies other tiles: every bit of logits and cache is the same."""
    model = load(family, tmp_path)
    assert model.keeps_bits
    tokens = prompt(N_TOKENS)
    whole = alone(model, tokens, None)
    assert torch.isfinite(whole.logits).all()
    assert whole.logits.std() > 0.1, "the model says nearly the same everywhere; the test would see nothing"
    assert not (found := differing(model, tokens, whole)), found


@pytest.mark.gpu
@pytest.mark.parametrize("family", PUBLISHED)
def test_long_contexts_change_no_bit(family: str, tmp_path: Path) -> None:
    """Beyond one part of a context, decode adds the parts up in a kernel of its own."""
    model = load(family, tmp_path, max_position_embeddings=2048, num_hidden_layers=2, **PUBLISHED[family])
    tokens = prompt(1200)
    whole = alone(model, tokens, None, n_blocks=160)
    for chunk in (1, 100, 513):
        assert not (what := alone(model, tokens, chunk, n_blocks=160).differs_from(whole)), (chunk, what)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "minicpm3", "youtu"])
def test_logits_are_as_near_as_those_of_torch(family: str, tmp_path: Path) -> None:
    """In 16 bits, against the same weights in fp32: what is rounded to them weighs more than how sums are made."""
    model = load(family, tmp_path)
    by_torch = ComputeConfig(backend="torch", device="cpu", weights="bf16")
    exact = alone(load_model(tmp_path, replace(by_torch, weights="fp32")), prompt(N_TOKENS), None).logits
    ours, theirs = (
        (alone(one, prompt(N_TOKENS), 20).logits - exact).square().mean().sqrt()
        for one in (model, load_model(tmp_path, by_torch))
    )
    assert ours < 1.25 * theirs, (ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3", "deepseek_v32", "mimo_v2_flash"]
)
def test_a_step_recorded_is_the_step(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decode and both at once, each recorded when it first comes or never."""
    model, graphs = load(family, tmp_path), import_module("diptych.compute.ops.gpu.graphs")
    tokens = prompt(N_TOKENS)
    recorded: list[object] = []
    record = graphs.StepGraphs._record
    monkeypatch.setattr(graphs.StepGraphs, "_record", lambda *args: recorded.append(args[-1]) or record(*args))
    monkeypatch.setattr(graphs, "MET_BEFORE", 1000)
    ways = [partial(beside, n_neighbours=6, seed=seed) for seed in range(3)] + [partial(alone, chunk=20)]
    eager = [way(model, tokens) for way in ways]
    assert not any(form.n_several for form in recorded)
    monkeypatch.setattr(graphs, "MET_BEFORE", 0)
    assert not [
        what for way, expected in zip(ways, eager, strict=True) if (what := way(model, tokens).differs_from(expected))
    ]
    assert {form.n_singles > 0 for form in recorded if form.n_several} == {False, True}, (
        "prompts alone and beside decode"
    )


@of_ours
@pytest.mark.parametrize(("n_tokens", "n_experts", "top"), [(1, 4, 2), (40, 6, 3), (70, 130, 8), (300, 20, 8)])
def test_choices_are_placed_by_expert(n_tokens: int, n_experts: int, top: int, kind: Kind) -> None:
    """A choice that is placed wrong meets another expert's weights."""
    products = import_module("diptych.compute.ops.gpu.products")
    chosen = noise(n_tokens, n_experts, seed=n_tokens).topk(top).indices.flatten()
    order, starts = products.place(kind.put(chosen), n_experts)
    assert torch.equal(order.cpu().long(), chosen.argsort(stable=True))
    counts = torch.bincount(chosen, minlength=n_experts)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
