"""What the engine settles by itself: memory that is there, and how many sequences run at one time."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from diptych.cost.places import MAX_PLACES, MAX_STEP_S, places
from diptych.engine import memory
from diptych.engine.load import load, make_engine, size_pool
from diptych.engine.memory import memory_of
from diptych.ground.config import EngineConfig, SchedulerConfig
from diptych.ground.errors import CapacityError

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
    (folder / limit).write_text("max\n")
    (folder.parent / limit).write_text("200000000\n")  # the group around it
    (folder.parent / used).write_text("250000000\n")
    assert memory_of(CPU).available_bytes == 0
    (folder.parent / limit).write_text(str(2**63 - 4096))
    assert memory_of(CPU).total_bytes == before.total_bytes
