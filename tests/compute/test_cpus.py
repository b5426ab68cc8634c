"""Where the kernels' threads run: cores first, node by node, on topologies written as Linux writes them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

import diptych
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.cpu.kv import CpuKVStore
from diptych.compute.ops.cpus import Cpu, Placement, allowed_cpus, choose_cpus, parse_list, warn_of_sharing
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from worlds import EVERY_KERNEL_SET, KERNEL_SETS

BUNDLED = Path(diptych.__file__).parent / "bundled" / "diptych-10m"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each: CPUs 0 to 7 are first threads, 8 to 15 their second ones."""
    for node, numbers in ((0, "0-3,8-11"), (1, "4-7,12-15")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(numbers + "\n")
    for number in range(16):
        topology = tmp_path / f"cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 8},{number % 8 + 8}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("threads", "numa", "cpus", "nodes"),
    [
        (None, "auto", range(8), (0, 1)),
        (3, "auto", range(3), (0,)),
        (6, "auto", range(6), (0, 1)),
        (10, "auto", (*range(8), 8, 9), (0, 1)),
        (None, "1", range(4, 8), (1,)),
        (6, "1", (4, 5, 6, 7, 12, 13), (1,)),
        (None, "1, 0", range(8), (0, 1)),
    ],
)
def test_a_core_has_one_thread_until_all_have_one(
    server: Path, threads: int | None, numa: str, cpus: tuple[int, ...], nodes: tuple[int, ...]
) -> None:
    """Two threads of one core share its arithmetic, so the second ones come last."""
    placement = choose_cpus(threads, numa, allowed_cpus(server, range(16)))
    assert placement == Placement(threads=len(cpus), cpus=tuple(cpus), nodes=nodes)


def test_only_allowed_cpus_are_used(server: Path) -> None:
    """A container or `taskset` that gives away three CPUs, two of them of one core."""
    cpus = allowed_cpus(server, {2, 10, 13})
    assert choose_cpus(None, "auto", cpus) == Placement(threads=2, cpus=(2, 13), nodes=(0, 1))
    assert choose_cpus(3, "auto", cpus) == Placement(threads=3, cpus=(2, 13, 10), nodes=(0, 1))
    assert choose_cpus(4, "auto", cpus) == Placement(threads=4)  # more threads than CPUs: the system shares them out
    assert choose_cpus(None, "off", cpus) == Placement(threads=2)
    assert choose_cpus(5, "off", cpus) == Placement(threads=5)


def test_a_system_that_describes_nothing_has_one_node_of_cores(tmp_path: Path) -> None:
    """Some containers hide /sys."""
    assert choose_cpus(None, "auto", allowed_cpus(tmp_path, {0, 5})) == Placement(threads=2, cpus=(0, 5), nodes=(0,))


def test_a_node_that_is_not_there_is_refused(server: Path) -> None:
    """Silently running elsewhere would halve the bandwidth that somebody paid for."""
    with pytest.raises(ConfigError, match=r"node 7; the CPUs this process may use are on nodes 0, 1"):
        choose_cpus(None, "0,7", allowed_cpus(server, range(16)))
    with pytest.raises(ConfigError, match=r"on node 0"):
        choose_cpus(None, "1", allowed_cpus(server, range(4)))
    for text in ("", "one", "0;1", "-1", "0,"):
        with pytest.raises(ConfigError, match="auto, off, or nodes"):
            ComputeConfig(numa=text)


@pytest.mark.parametrize(("text", "numbers"), [("0", [0]), ("0-3,8\n", [0, 1, 2, 3, 8]), ("", []), ("2,4-4", [2, 4])])
def test_lists_of_the_kernel(text: str, numbers: list[int]) -> None:
    """As /sys writes them."""
    assert parse_list(text) == numbers


def test_torch_refuses_a_placement_it_does_not_follow() -> None:
    """It starts threads of its own, anywhere."""
    with pytest.raises(ConfigError, match="torch places its own threads"):
        load_model(BUNDLED, ComputeConfig(backend="torch", device="cpu", numa="0"))


@pytest.mark.native
@pytest.mark.skipif(not cpu_kernels.instruction_sets(), reason="the native kernels are not installed")
@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no NUMA policies")
def test_a_cache_over_several_nodes_is_dealt_out(caplog: pytest.LogCaptureFixture) -> None:
    """Read back from the system, with the one node that every machine has; where the policy is refused, the log says so."""
    cache = {"heads": [(2, 64, 64)] * 2, "format": "bf16"}
    node = allowed_cpus()[0].node
    with caplog.at_level(logging.WARNING, "diptych.compute"):
        store = CpuKVStore(cache, n_blocks=64, block_tokens=32, nodes=(node, node))
    is_dealt = f"interleave:{node}" in Path("/proc/self/numa_maps").read_text()
    assert is_dealt != ("KV cache stays" in caplog.text)
    assert not store.native.interleave([1023])  # no such node


@pytest.mark.native
@pytest.mark.skipif(not cpu_kernels.instruction_sets(), reason="the native kernels are not installed")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("numa", ["auto", "off"])
def test_threads_run_where_they_were_placed(numa: str) -> None:
    """Read back from the system: a worker that is not pinned may share a CPU with another for whole steps."""

    def masks() -> dict[str, list[int]]:
        found = {}
        for status in Path("/proc/self/task").glob("*/status"):
            line = next(x for x in status.read_text().splitlines() if x.startswith("Cpus_allowed_list"))
            found[status.parent.name] = parse_list(line.split(":")[1])
        return found

    allowed = allowed_cpus()
    placement = choose_cpus(min(2, len(allowed)), numa, allowed)
    before = masks()
    program = cpu_kernels._cpu.Program(cpu_kernels.instruction_sets()[0], placement.threads, placement.cpus)
    program.argmax(np.zeros((4, 4), dtype=np.float32))  # every worker has begun
    new = [mask for thread, mask in masks().items() if thread not in before]
    assert len(new) == placement.threads - 1
    for mask in new:
        assert mask == (list(placement.cpus[1:]) if numa == "auto" else sorted(os.sched_getaffinity(0)))
    assert masks()[str(os.getpid())] == before[str(os.getpid())]  # the caller is free again


def test_more_threads_than_cpus_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Every operation ends with its last thread, so one too many halves the speed; `lab quality` said so for each format."""
    cpus = [Cpu(number=n, core=n, node=0) for n in range(2)]
    for numa in ("auto", "off"):
        caplog.clear()
        warn_of_sharing.cache_clear()
        assert choose_cpus(2, numa, cpus).threads == 2
        assert not caplog.records
        for _ in range(2):
            assert choose_cpus(3, numa, cpus).threads == 3
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["threads=3 share cpus=2"]


@pytest.mark.parametrize("name", EVERY_KERNEL_SET)
def test_the_sets_of_this_processor_are_chosen_by_name(name: str) -> None:
    """Whatever is tested on every set is tested on these."""
    if name not in KERNEL_SETS:
        pytest.skip(f"this CPU cannot run {name}, whose kernels have no tests here")
    assert cpu_kernels.choose_instruction_set(name) == name
