"""The paged cache seen from outside: what is written is read, blocks are copied whole, forks do not leak."""

from __future__ import annotations

import platform
import re
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import xxhash

from checkpoints import make_checkpoint
from diptych.compute.kv_store import KVStore, TorchKVStore
from diptych.compute.model import Model
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.ops.cpu.kv import BACKED_BYTES, CpuKVStore
from diptych.compute.runner import load_model, memory_of_block
from diptych.cost.kv_bytes import kv_bytes_of_context, kv_bytes_per_token, state_bytes
from diptych.cost.parameters import kv_bytes_stored
from diptych.cost.setup import find_model
from diptych.cost.tables import kv_spec
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, TransferError
from diptych.models.config import HfConfig
from diptych.models.read import read_model
from stepping import Stepper

CPU = torch.device("cpu")
NATIVE = (
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
)
LINUX = (
    tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) if platform.system() == "Linux" else (0, 0)
)


def store(n_blocks: int = 6, block_tokens: int = 4) -> TorchKVStore:
    return TorchKVStore(
        heads=[(2, 3, 3)] * 2,
        n_blocks=n_blocks,
        block_tokens=block_tokens,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32"))


@pytest.mark.parametrize("n_tokens", [1, 3, 4, 5, 8, 11])
def test_written_keys_are_read_back(n_tokens: int) -> None:
    """Block edges are where a paged copy goes wrong."""
    kv, blocks = store(), [4, 0, 2]
    keys, values = torch.randn(2, 2, n_tokens, 3).unbind(0)
    before = [plane.clone() for plane in kv.layers[0]]
    kv.write(1, blocks, keys, values)
    got_keys, got_values = kv.read(1, blocks, n_tokens)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    assert all(map(torch.equal, kv.layers[0], before)), "the other layer is untouched"
    assert sum(map(torch.count_nonzero, kv.layers[1])) == 2 * 2 * n_tokens * 3, "and so is every other slot"


def test_copied_block_is_independent() -> None:
    """Copy on write: the child's tokens must not appear in the parent."""
    kv = store()
    keys, values = torch.randn(2, 2, 4, 3).unbind(0)
    kv.write(0, [1], keys, values)
    kv.copy_blocks([(1, 5)])
    kv.write(0, [1], torch.zeros(2, 4, 3), torch.zeros(2, 4, 3))
    assert torch.equal(kv.read(0, [5], 4)[0], keys)


def test_saved_cache_continues_the_sequence(model: Model) -> None:
    """Read here and written there, a cache is the same cache: hand-off and saved states depend on it."""
    tokens = list(range(10, 43))
    first = Stepper(model)
    first.prefill("a", tokens)
    expected = first.step({"a": [7]})["a"]
    second = Stepper(model, n_blocks=9, block_tokens=4)
    blocks = [8, 0, 7, 1, 6, 2, 5, 3, 4]
    for layer in range(model.spec.n_layers):
        second.kv.write(layer, blocks, *first.kv.read(layer, first.tables["a"], len(tokens)))
    second.tables["a"], second.lengths["a"] = blocks, len(tokens)
    torch.testing.assert_close(second.step({"a": [7]})["a"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "deepseek_v4", "minimax_m3"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NATIVE)])
def test_what_another_left_in_a_block_takes_no_part(backend: str, family: str, tmp_path: Path) -> None:
    """Behind a short sequence, beside a longer one, lay what was no number: whoever got those blocks failed of it, too."""
    model = load_model(make_checkpoint(family, tmp_path), ComputeConfig(backend=backend, threads=1))
    found = []
    for is_soiled in (False, True):
        stepper = Stepper(model)
        if is_soiled:
            blocks, kv = list(range(64)), stepper.kv
            for layer in range(len(model.spec.caches)):
                keys, values = kv.read(layer, blocks, 64 * 16)
                kv.write(layer, blocks, torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan))
        stepper.step({"short": [5, 6, 7], "long": list(range(10, 50))})
        found.append([stepper.step({"short": [8 + i], "long": [9 + i]}) for i in range(3)])
        found[-1].append(stepper.step({"short": [11, 12], "long": [13]}))
    for clean, soiled in zip(*found, strict=True):
        for name in clean:
            assert torch.equal(clean[name], soiled[name])


def test_bytes_per_block_are_the_bytes_held(model: Model) -> None:
    """The pool is sized by this number; a wrong one is an out-of-memory error later."""
    for block_tokens in (1, 16, 32):
        assert model.make_kv(5, block_tokens).nbytes == 5 * model.kv_bytes_per_block(block_tokens)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=NATIVE)])
def test_where_no_layer_attends_blocks_have_no_bytes(backend: str, tmp_path: Path) -> None:
    """They number tokens: all that is done with blocks is done with them, and nothing moves."""
    path = make_checkpoint("mamba", tmp_path)
    model = load_model(path, ComputeConfig(backend=backend, device="cpu", threads=1, weights="bf16"))
    assert model.kv_bytes_per_block(32) == 0
    kv = model.make_kv(4, 32, n_places=2)
    assert kv.nbytes == 2 * model.state_bytes > 0
    assert (kv.header.block_bytes, kv.header.n_layers) == (0, 0)
    kv.back_memory(lambda: False)
    kv.copy_blocks([(0, 3)])
    payload = kv.export_blocks([1, 2])
    assert payload.data_NB.shape == (2, 0)
    assert payload.checksums == (xxhash.xxh3_64_intdigest(b""),) * 2
    kv.import_blocks([0, 3], payload)
    other = replace(payload, checksums=(payload.checksums[0], 7))
    with pytest.raises(TransferError, match="block 1 of 2 does not have its checksum"):
        kv.import_blocks([0, 3], other)
    state = torch.arange(model.state_bytes // 4, dtype=torch.float32)
    kv.write_state(1, state)
    assert torch.equal(kv.read_state(1), state)
    assert not kv.read_state(0).any()


def test_pool_that_does_not_fit_is_refused_with_the_number() -> None:
    with pytest.raises(CapacityError, match="281474976710656 blocks"):
        store(n_blocks=2**48)


@pytest.mark.native
def test_backing_the_memory_leaves_what_is_written() -> None:
    """It runs beside steps, so it may not touch a byte."""
    cache = {"heads": [(2, 16, 16)] * 2, "format": "bf16"}
    kv = CpuKVStore(cache, n_blocks=12_000, block_tokens=32)
    block_ids = [11_999, 3]
    keys, values = torch.randn(2, 40, 16).bfloat16().float(), torch.randn(2, 40, 16).bfloat16().float()
    kv.write(1, block_ids, keys, values)
    resident = psutil.Process().memory_info().rss
    kv.back_memory(lambda: False)
    if LINUX >= (5, 14):  # before, the kernel has no way to ask
        assert psutil.Process().memory_info().rss - resident > kv.nbytes / 2
    read_keys, read_values = kv.read(1, block_ids, 40)
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, values)
    assert not kv.read(0, [0, 1], 64)[0].any()


@pytest.mark.native
@pytest.mark.skipif(LINUX < (5, 14), reason="the kernel has no way to ask for memory")
def test_memory_comes_in_the_order_in_which_blocks_are_handed_out() -> None:
    """It came layer by layer, so the first steps wrote where none was yet: 150 to 390 ms in place of 50 for a second or two."""
    cache = {"heads": [(2, 64, 64)] * 4, "format": "bf16"}
    kv = CpuKVStore(cache, n_blocks=2000, block_tokens=32)
    assert kv.nbytes // 4 > 4 * BACKED_BYTES
    asked = count()
    kv.back_memory(lambda: next(asked) == 4)  # a piece of every layer
    ones = torch.ones(2, 32, 64)

    def new_pages(block_id: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for layer in range(4):
            kv.write(layer, [block_id], ones, ones)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    new_pages(0)  # what is around the pool's memory is there now, too
    near, far = new_pages(1), new_pages(1000)
    assert near < far


def filled(make: Callable[[str], KVStore], revision: str, seed: int) -> KVStore:
    """A store of 6 blocks full of noise."""
    kv = make(revision)
    torch.manual_seed(seed)
    for layer in range(2):
        kv.write(layer, list(range(6)), torch.randn(2, 96, 4), torch.randn(2, 96, 4))
    return kv


def torch_store(revision: str) -> KVStore:
    return TorchKVStore(
        heads=[(2, 4, 4)] * 2,
        n_blocks=6,
        block_tokens=16,
        dtype=torch.bfloat16,
        device=CPU,
        revision=revision,
    )


def native_store(revision: str, kv_format: str = "bf16") -> KVStore:
    cache = {"heads": [(2, 4, 4)] * 2, "format": kv_format}
    return CpuKVStore(cache, n_blocks=6, block_tokens=16, revision=revision)


STORES = [
    torch_store,
    pytest.param(native_store, marks=NATIVE),
    pytest.param(partial(native_store, kv_format="int8"), marks=NATIVE, id="native int8"),
    pytest.param(partial(native_store, kv_format="int8x8"), marks=NATIVE, id="native int8x8"),
    pytest.param(partial(native_store, kv_format="fp8"), marks=NATIVE, id="native fp8"),
]


@pytest.mark.parametrize("make", STORES)
def test_exported_blocks_are_the_same_bits_elsewhere(make: Callable[[str], KVStore]) -> None:
    """A sequence that moves to another process goes on with the bits it would have had, in blocks of other numbers."""
    here, there = filled(make, "a", seed=1), filled(make, "a", seed=2)
    before = there.export_blocks([5, 4])
    there.import_blocks([3, 0, 1], here.export_blocks([0, 5, 2]))
    for layer in range(2):
        for got, expected in zip(there.read(layer, [3, 0, 1], 48), here.read(layer, [0, 5, 2], 48), strict=True):
            assert torch.equal(got, expected)
    assert there.export_blocks([3, 0, 1]).checksums == here.export_blocks([0, 5, 2]).checksums
    assert there.export_blocks([5, 4]).checksums == before.checksums, "the other blocks are untouched"


@pytest.mark.parametrize("make", STORES)
def test_blocks_that_are_not_this_stores_are_refused_whole(make: Callable[[str], KVStore]) -> None:
    """Decoding from another model's keys, or from damaged ones, gives fluent nonsense and no error."""
    here, there = filled(make, "a", seed=1), filled(make, "a", seed=2)
    payload = here.export_blocks([0, 1, 2])
    flipped = payload.data_NB.copy()
    flipped[2, -1] ^= 1
    wrong = {
        "revision": replace(payload, header=replace(payload.header, revision="b")),
        "layout": replace(payload, header=replace(payload.header, layout="another")),
        "dtype": replace(payload, header=replace(payload.header, dtype="fp16")),
        "block_tokens": replace(payload, header=replace(payload.header, block_tokens=32)),
        "shape": replace(payload, data_NB=payload.data_NB[:2]),
    }
    before = there.export_blocks(list(range(6))).checksums
    for named, bad in wrong.items():
        with pytest.raises(TransferError, match=named):
            there.import_blocks([0, 1, 2], bad)
    with pytest.raises(TransferError, match="3 checksums"):
        there.import_blocks([0, 1], payload)
    assert there.export_blocks(list(range(6))).checksums == before, "nothing of a refused payload is written"
    with pytest.raises(TransferError, match="block 2 of 3"):
        there.import_blocks([0, 1, 2], replace(payload, data_NB=flipped))
    assert there.export_blocks([3, 4, 5]).checksums == before[3:], "no block is touched but those that should have come"
    there.import_blocks([0, 1, 2], payload)
    assert there.export_blocks([0, 1, 2]).checksums == payload.checksums


@NATIVE[0]
@NATIVE[1]
@pytest.mark.parametrize("stripes", [4, 5, 15, 16, 17, 31, 32, 33, 48, 49])
def test_checksums_of_the_copying_pass_are_xxhash(stripes: int) -> None:
    """Other stores and the ranks take the library's: one number has to be the other, at every edge of the algorithm."""
    cache = {"heads": [(1, 2 * stripes, 0)] * 3, "format": "bf16"}
    kv = CpuKVStore(cache, n_blocks=3, block_tokens=16)
    assert kv.header.block_bytes == 3 * 64 * stripes
    one = CpuKVStore({**cache, "heads": cache["heads"][:1]}, n_blocks=3, block_tokens=16)
    for store in (kv, one):
        rng = np.random.default_rng(stripes)
        data = rng.integers(0, 256, (2, store.header.block_bytes), dtype=np.uint8)
        sums = [xxhash.xxh3_64_intdigest(row.tobytes()) for row in data]
        assert store.native.import_checked(np.array([2, 0], dtype=np.int32), data) == sums
        room = np.zeros((3, store.header.block_bytes), dtype=np.uint8)
        sent = store.export_blocks([2, 0], room)
        assert list(sent.checksums) == sums
        assert np.shares_memory(sent.data_NB, room)
        assert np.array_equal(sent.data_NB, data)


@NATIVE[0]
@NATIVE[1]
def test_fp8_holds_what_e4m3_holds_and_the_rest_to_the_nearest() -> None:
    """Every code but NaN comes back as it was, whatever its row's scale; between them torch's rounding is the oracle."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[torch.isfinite(codes)]
    random = (
        torch.randn(1, 16, 254, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 5, 16)[None, :, None]
    )
    cache = {"heads": [(1, 254, 254)] * 1, "format": "fp8"}
    store = CpuKVStore(cache, n_blocks=1, block_tokens=16)
    for factor in (1.0, 2.0**-20, 2.0**20):
        keys = (codes * factor).expand(1, 16, 254).contiguous()
        store.write(0, [0], keys, -keys)
        read = store.read(0, [0], 16)
        assert torch.equal(read[0], keys)
        assert torch.equal(read[1], -keys)
    store.write(0, [0], random, random)
    scale = random.abs().amax(-1, keepdim=True) / 448
    assert torch.equal(store.read(0, [0], 16)[0], (random / scale).to(torch.float8_e4m3fn).float() * scale)
    for least in (1e-42, 1e-38, 3e38):  # a scale and its inverse that are numbers: nothing becomes infinite
        store.write(0, [0], keys := torch.full((1, 16, 254), least), keys)
        assert (store.read(0, [0], 16)[0] - keys).abs().max() <= max(least / 16, 2.0**-136)


@NATIVE[0]
@NATIVE[1]
@pytest.mark.parametrize("name", ["diptych-10m", "llama-3.1-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_the_planner_knows_how_much_a_block_takes(name: str, kv_format: str) -> None:
    """int8's scales, 6 % of it at 64 values a head, were left out. The kernels' own figure is right, up to its alignment."""
    spec = find_model("bundled" if name == "diptych-10m" else name)
    kernel_bytes = cpu_kernels.kv_bytes_per_block(spec, kv_format, 32)
    planned_bytes = kv_bytes_of_context(spec, kv_spec(kv_format), 32)
    assert planned_bytes <= kernel_bytes <= planned_bytes + 63 * spec.n_kv_heads * spec.n_layers
    assert kernel_bytes == planned_bytes or kv_format != "bf16"


# latents alone, beside states and under streams, with an index, with one for several layers, over pools; an index beside
# grouped queries, of keys and of means; heads of two shapes, layers that keep nothing
NAMED = ["deepseek-v2-lite", "kimi-linear-48b-a3b", "qwen3-0.6b", "gemma-4-e2b"]
KEEPERS: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {},
    "MiniCPM3ForCausalLM": {},
    "BailingMoeV3ForCausalLM": {},
    "DeepseekV32ForCausalLM": {},
    "GlmMoeDsaForCausalLM": {"index_topk_freq": 4},
    "AXK2ForCausalLM": {},
    "HYV4ForCausalLM": {},
    "Glm5NextForConditionalGeneration": {},
    "MiniMaxM3SparseForConditionalGeneration": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 59]},
    "Qwen4ExpForCausalLM": {
        "indexer_budget": 2048, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
    },
}  # fmt: skip


@NATIVE[0]
@NATIVE[1]
@pytest.mark.parametrize("name", [*NAMED, *KEEPERS])
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "fp8"])
def test_a_pool_holds_what_is_counted(name: str, kv_format: str) -> None:
    """Latents without an index, and keys of an index beside grouped queries, have room for a scale that was not counted."""
    config = {"architectures": [name], **KEEPERS.get(name, {})}
    spec = find_model(name) if name in NAMED else read_model(HfConfig(config))
    kv = kv_spec(kv_format, block_tokens=64)  # each head of a block is filled up to 64 bytes
    pool = CpuKVStore({**cpu_kernels.cache_sizes(spec), "format": kv_format}, n_blocks=2, block_tokens=64)
    assert pool.nbytes == 2 * 64 * kv_bytes_per_token(spec, kv) == kv_bytes_stored(spec, kv, 128, is_ours=True)
    assert pool.nbytes == kv_bytes_of_context(spec, kv, 100, is_ours=True) - state_bytes(spec)
    assert pool.nbytes == 2 * memory_of_block(spec, ComputeConfig(backend="cpu", kv=kv_format), 64)[1]


def test_a_block_keeps_what_windows_no_longer_see() -> None:
    """`inspect` and `plan --hardware local` counted a window of most layers of Gemma 3, a sixth of what the engine holds."""
    spec = find_model("gemma-3-1b")
    held = cpu_kernels.kv_bytes_per_block(spec, "bf16", 32_768)
    assert kv_bytes_of_context(spec, kv_spec("bf16"), 32_768, is_ours=True) == held
    assert kv_bytes_of_context(spec, kv_spec("bf16"), 32_768) < held / 4
