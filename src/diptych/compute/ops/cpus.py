"""Which CPUs the threads of the kernels are pinned to, and which NUMA nodes that makes.

One thread per physical core by default: two threads of one core share its dot-product units and its bandwidth. Nodes are
filled one after the other, so that few threads share one node's memory; every thread packs most of the weights that it
later reads, which puts them on its own node.

>>> choose_cpus(4, "auto", [Cpu(number=n, core=n % 4, node=n % 4 // 2) for n in range(8)]).cpus
(0, 1, 2, 3)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diptych.ground.config import numa_nodes
from diptych.ground.errors import ConfigError

logger = logging.getLogger("diptych.compute")

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """One logical CPU. core: the lowest CPU number of its physical core."""

    number: int
    core: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where `threads` threads run: thread i on cpus[i], or where the system likes when cpus is empty.

    nodes: the NUMA nodes of these CPUs, ascending.
    """

    threads: int
    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


def allowed_cpus(system: Path = SYSTEM, allowed: Iterable[int] | None = None) -> list[Cpu]:
    """The CPUs that this process may use, as the system describes them; one core and node 0 each where it does not."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    node_of = {
        number: int(path.parent.name.removeprefix("node"))
        for path in sorted(system.glob("node/node[0-9]*/cpulist"))
        for number in parse_list(path.read_text())
    }
    cpus = []
    for number in sorted(allowed):
        siblings = system / f"cpu/cpu{number}/topology/thread_siblings_list"
        core = min(parse_list(siblings.read_text()), default=number) if siblings.exists() else number
        cpus.append(Cpu(number=number, core=core, node=node_of.get(number, 0)))
    return cpus


def parse_list(text: str) -> list[int]:
    """The kernel's list format: `0-3,8` is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


@cache
def warn_of_sharing(threads: int, n_cpus: int) -> None:
    """Once in a process: not again for each of the models that are loaded with the same settings."""
    logger.warning("threads=%d share cpus=%d: all wait for the one whose turn comes last", threads, n_cpus)


def choose_cpus(threads: int | None, numa: str, cpus: Sequence[Cpu]) -> Placement:
    """The placement for the settings `threads` and `numa` (see ComputeConfig).

    ConfigError for a node without a CPU that this process may use. More threads than CPUs are not pinned, and a warning, once.
    """
    if threads is not None and threads > len(cpus):
        warn_of_sharing(threads, len(cpus))
    if numa == "off":
        return Placement(threads=threads or len({cpu.core for cpu in cpus}))
    wanted = numa_nodes(numa)
    present = sorted({cpu.node for cpu in cpus})
    for node in wanted:
        if node not in present:
            raise ConfigError(
                f"numa names node {node}; the CPUs this process may use are on {_named(present)}",
                hint="numactl --hardware shows the nodes of a machine",
            )
    usable = [cpu for cpu in cpus if not wanted or cpu.node in wanted]
    seen: set[int] = set()
    ranks = []  # second threads of a core come after the first of all
    for cpu in usable:
        ranks.append((cpu.core in seen, cpu.node, cpu.number))
        seen.add(cpu.core)
    order = [number for _, _, number in sorted(ranks)]
    n = threads or len(seen)
    if n > len(order):
        return Placement(threads=n)
    chosen = order[:n]
    nodes = sorted({cpu.node for cpu in usable if cpu.number in chosen})
    return Placement(threads=n, cpus=tuple(chosen), nodes=tuple(nodes))


def _named(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
