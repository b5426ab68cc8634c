"""What the engine settles by itself: memory that is there, and how many sequences run at one time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tests.checkpoints import make_checkpoint

from diptych.compute.loading.weights import Checkpoint
from diptych.compute.ops.cpu.kernels import MOST_HEAD_DIM, MOST_LATENT_DIM
from diptych.compute.runner import load_model
from diptych.cost.places import MAX_PLACES, MAX_STEP_S, places
from diptych.engine import memory
from diptych.engine.load import bundled_dir, load, make_engine
from diptych.engine.memory import Memory, memory_of
from diptych.engine.pool_size import size_pool
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, ConfigError

CPU = torch.device("cpu")


def test_places_follow_the_pool_and_the_time_of_a_step() -> None:
    """64 places for everything halved the output of 256 clients on a small model, and made a large one stutter."""
    assert places(262_144, 4096, None).number == MAX_PLACES
    assert places(20_480, 4096, None).number == 40
    assert places(800, 512, None).number == 12
    assert places(10, 4096, None).number == 1
    slow = places(262_144, 4096, lambda rows, tokens: 0.02 + 0.002 * rows)
    assert slow.number == 40
    assert "100 ms" in slow.reason
    assert 0.02 + 0.002 * slow.number <= MAX_STEP_S
    # reading the weights alone takes longer than a reader waits: rows that cost next to nothing run along
    assert places(262_144, 4096, lambda rows, tokens: 0.5 + 0.004 * rows).number == 127
    assert places(262_144, 4096, lambda rows, tokens: 0.5 * rows).number == 2


def test_an_engine_without_a_number_runs_as_many_as_fit() -> None:
    loaded = load("bundled", EngineConfig())
    config = EngineConfig(kv_memory_bytes=12_582_912 * 5)
    assert make_engine(loaded, config).core.max_running_sequences == 40
    asked = EngineConfig(kv_memory_bytes=12_582_912 * 5, scheduler=SchedulerConfig(max_running_sequences=7))
    assert make_engine(loaded, asked).core.max_running_sequences == 7


def test_more_kv_memory_than_there_is_is_refused_with_what_fits() -> None:
    """It was taken, and the machine's memory ran out under the first requests."""
    model = load("bundled", EngineConfig()).model
    asked = 4 * psutil.virtual_memory().total
    with pytest.raises(CapacityError) as caught:
        size_pool(model, EngineConfig(kv_memory_bytes=asked))
    assert str(asked) in caught.value.message
    assert str(memory_of(CPU).total_bytes) in caught.value.message
    assert "at most 4096" in (caught.value.hint or "")


def test_where_no_layer_attends_states_alone_take_memory(tmp_path: Path) -> None:
    """A block has no bytes there, and memory was divided by them."""
    path = make_checkpoint("mamba", tmp_path)
    model = load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32"))
    config = EngineConfig(kv_memory_bytes=model.state_bytes * 40, max_context_tokens=1000)
    size = size_pool(model, config)
    assert (size.context_tokens, size.n_places) == (1000, 20), "half of the memory is for states"
    assert size.n_blocks >= 4 * -(-1000 // config.block_tokens)
    for asked in (1, model.state_bytes):
        with pytest.raises(CapacityError, match=rf"1 sequences need {model.state_bytes} bytes for their states"):
            size_pool(model, EngineConfig(kv_memory_bytes=asked))
    with pytest.raises(CapacityError, match="are free") as caught:
        size_pool(model, EngineConfig(kv_memory_bytes=4 * psutil.virtual_memory().total))
    assert "tokens" not in caught.value.message + (caught.value.hint or "")


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=pytest.mark.native)])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_too_much_kv_memory_is_refused_before_the_weights_are_read(
    backend: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took minutes of loading to hear it. What is said of tokens is what the loaded model would say."""
    if backend == "torch" and kv == "int8":
        pytest.skip("the torch backend has no int8 cache")
    compute = ComputeConfig(backend=backend, kv=kv, weights="bf16", threads=1)
    model = load("bundled", EngineConfig(compute=compute)).model
    too_much = EngineConfig(compute=compute, kv_memory_bytes=2**50)
    gigabyte = Memory(2**31, 2**30)
    monkeypatch.setattr("diptych.engine.pool_size.memory_of", lambda device: gigabyte)
    with pytest.raises(CapacityError) as late:
        size_pool(model, too_much)

    def read(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(CapacityError) as early:
        load("bundled", too_much)
    assert early.value.message == late.value.message
    largest = 2**30 // model.kv_bytes_per_block(32) * 32
    assert f"of the {2**31} bytes of memory here {2**30} are free, which hold at most {largest} tokens" in str(
        early.value
    )
    with pytest.raises(ConfigError, match="max_context_tokens is 100000"):
        load("bundled", EngineConfig(compute=compute, max_context_tokens=100_000))


@pytest.mark.parametrize("kv_memory_bytes", [1, 1000])
def test_memory_for_no_block_is_told_in_bytes(kv_memory_bytes: int) -> None:
    """The hint was to ask for a context of at most 0 tokens."""
    with pytest.raises(CapacityError) as caught:
        load("bundled", EngineConfig(kv_memory_bytes=kv_memory_bytes))
    assert "at most 0" not in (caught.value.hint or "")
    assert "a block of 32 tokens has 98304 bytes" in (caught.value.hint or "")


def test_weights_in_a_mapped_file_are_no_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts their pages as free, and a pool that took them would have every step read the disk."""
    machine = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "PROCESS_STATUS", tmp_path / "status")
    assert memory_of(CPU).available_bytes == machine.available
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  9000 kB\nRssFile:\t    2000 kB\nThreads:\t1\n")
    assert memory_of(CPU).available_bytes == machine.available - 2000 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_is_the_machines(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the machine's free memory is more than the container's whole, and its end."""
    if version == 2:
        own, root = "0::/pods/mine\n", tmp_path
        limit, used, file_bytes = "memory.max", "memory.current", "inactive_file"
    else:
        own, root = "5:devices:/x\n4:memory:/pods/mine\n", tmp_path / "memory"
        limit, used, file_bytes = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    folder = root / "pods" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(own)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "PROCESS_CGROUPS", tmp_path / "cgroup")
    before = memory_of(CPU)
    (folder / limit).write_text("300000000\n")
    (folder / used).write_text("250000000\n")
    (folder / "memory.stat").write_text(f"anon 1\n{file_bytes} 50000000\n")
    assert memory_of(CPU).total_bytes == 300_000_000
    assert memory_of(CPU).available_bytes == 100_000_000
    stat = {"inactive_file": 50_000_000, "active_file": 30_000_000, "mapped_file": 65_000_000}
    names = {name: f"total_{name}" for name in stat} if version == 1 else {"mapped_file": "file_mapped"}
    (folder / "memory.stat").write_text("".join(f"{names.get(name, name)} {n}\n" for name, n in stat.items()))
    assert memory_of(CPU).available_bytes == 65_000_000, "a file in use is no room"
    (folder / limit).write_text("max\n")
    (folder.parent / limit).write_text("200000000\n")  # the group around it
    (folder.parent / used).write_text("250000000\n")
    assert memory_of(CPU).available_bytes == 0
    (folder.parent / limit).write_text(str(2**63 - 4096))
    assert memory_of(CPU).total_bytes == before.total_bytes


def test_what_lies_beside_the_blocks_is_told(tmp_path: Path) -> None:
    """A context that needed 358,400 bytes was refused where 430,080 were allowed, without a word of who had the rest."""
    model = load_model(make_checkpoint("jamba", tmp_path), ComputeConfig(backend="torch", weights="fp32"))
    config = EngineConfig(kv_memory_bytes=8 * model.kv_bytes_per_block(32), max_context_tokens=200)  # 7 blocks
    with pytest.raises(CapacityError) as caught:
        size_pool(model, config)
    taken = int(re.search(r"of KV cache, beside (\d+) for states of sequences;", caught.value.message)[1])  # type: ignore[index]
    assert taken % model.state_bytes == 0 < taken
    drafter = SimpleNamespace(block_bytes=0, scratch_bytes=12345)
    with pytest.raises(CapacityError, match=r"of KV cache, beside .* and 12345 for the rows of drafters; "):
        size_pool(model, config, [drafter])  # type: ignore[list-item]


@pytest.mark.native
@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llama", {"head_dim": 514}, "heads of 514 numbers; the cpu backend takes an even number of at most 512"),
        ("deepseek_v3", {"kv_lora_rank": 1024}, r"latents of \d+ numbers; the cpu backend takes .* at most 1024"),
        ("mistral4", {"kv_lora_rank": 31}, r"latents of \d+ numbers; the cpu backend takes an even number"),
    ],
)
def test_widths_that_the_kernels_do_not_hold_are_refused(
    tmp_path: Path, family: str, fields: dict[str, int], words: str
) -> None:
    """A ValueError of the kernels, from whose words nobody learns that the torch backend runs such a model."""
    path = make_checkpoint(family, tmp_path, **fields)
    for tp in (1, 2):
        with pytest.raises(ConfigError, match=words) as caught:
            load_model(path, ComputeConfig(backend="cpu", threads=2, tp=tp))
        assert "--backend torch" in (caught.value.hint or "")
    load_model(path, ComputeConfig(backend="torch", weights="fp32")).make_kv(2, 16)


@pytest.mark.native
def test_the_widest_heads_that_are_taken_have_a_cache(tmp_path: Path) -> None:
    """What is refused, and what the kernels refuse, is the same."""
    widest = (("llama", {"head_dim": MOST_HEAD_DIM}), ("deepseek_v3", {"kv_lora_rank": MOST_LATENT_DIM - 8}))
    for family, fields in widest:
        model = load_model(
            make_checkpoint(family, tmp_path / family, **fields), ComputeConfig(backend="cpu", threads=1)
        )
        assert model.spec.caches[0].head_dim == (MOST_HEAD_DIM if family == "llama" else MOST_LATENT_DIM)
        model.make_kv(2, 16)


@pytest.mark.native
def test_blocks_of_no_whole_tiles_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    """After minutes of loading, and with several ranks by a traceback of each and the end of all."""
    read: list[int] = []
    with pytest.raises(ConfigError, match="block_tokens is 24; the cpu backend needs a multiple of 16"):
        load("bundled", EngineConfig(block_tokens=24), progress=lambda *_: read.append(1))
    assert read == []
    model = load_model(make_checkpoint("llama", tmp_path), ComputeConfig(backend="cpu", threads=2, tp=2))
    with pytest.raises(ConfigError, match="block_tokens is 24"):
        model.make_kv(4, 24)
    model.make_kv(4, 32)  # its ranks are there
    model.close()


def test_blocks_that_part_a_row_of_entries_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    """Two prompts that shared a block and no entry wrote into one row: each was answered by what the other had read."""
    folder, read = make_checkpoint("deepseek_v4", tmp_path, vocab_size=4096), []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_dir() / name, folder / name)
    compute = ComputeConfig(backend="torch", threads=1)
    for block_tokens in (1, 4, 24):
        with pytest.raises(ConfigError, match=f"block_tokens is {block_tokens}; 16 tokens of this model share a row"):
            load(
                str(folder),
                EngineConfig(compute=compute, block_tokens=block_tokens),
                progress=lambda *_: read.append(1),
            )
    assert read == []
    model = load_model(folder, compute)
    with pytest.raises(ConfigError, match="block_tokens is 24"):
        model.make_kv(4, 24)
    model.make_kv(4, 48)
