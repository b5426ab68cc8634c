"""What one rank of several has of a model: outputs of every projection, heads of the attention, tokens of the vocabulary.

Ranks divide outputs and never inputs: a sum over K that is cut adds up in another order, and the bits would depend on how many
ranks there are. So each output is computed whole by one rank, and what the next projection reads is gathered
(csrc/threads/team.h).

>>> Rank(number=1, size=2).share(160)
(96, 160)
>>> Rank(number=3, size=4).heads(8, 2)
OwnHeads(first_head=6, n_heads=2, first_kv_head=1, n_kv_heads=1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.compute.ops.cpus import Cpu, Placement, choose_cpus
from diptych.ground.config import numa_nodes
from diptych.ground.errors import ConfigError

PANEL_LANES, STRIP_LANES = (
    64,
    16,
)  # of packed weights (csrc/gemm/gemm_kernels.h): what a rank has ends with a panel if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHeads:
    """The heads of one rank: n_heads query heads from first_head on, which read n_kv_heads from first_kv_head on."""

    first_head: int
    n_heads: int
    first_kv_head: int
    n_kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Rank `number` of `size`. team: the native barrier and memory of them, None where there is one rank only."""

    number: int = 0
    size: int = 1
    team: Any = None
    placement: Placement | None = None  # of its threads

    def share(self, n_outputs: int, *, lanes: int = 1) -> tuple[int, int]:
        """Which of n_outputs it computes, [begin, end); an output takes `lanes` of the packed weight (two where gated)."""
        if n_outputs < self.size:
            raise ConfigError(
                f"tp is {self.size}, and a projection of this model has {n_outputs} outputs",
                hint="ask for fewer ranks",
            )
        panel, strip = PANEL_LANES // lanes, STRIP_LANES
        unit = next((unit for unit in (panel, strip) if n_outputs >= unit * self.size), 1)
        units = -(-n_outputs // unit)
        begin, end = (units * i // self.size * unit for i in (self.number, self.number + 1))
        return min(begin, n_outputs), min(end, n_outputs)

    def heads(self, n_heads: int, n_kv_heads: int, *, together: int = 1) -> OwnHeads | None:
        """Its heads; None where others have them all. together: so many query heads of one KV head are not parted.

        KV heads are divided where there are enough of them. Else each is held by as many ranks as can have query heads of it
        (its keys and values are then kept more than once), and ranks that are left over have no part in the attention.
        """
        group = n_heads // n_kv_heads
        if n_kv_heads >= self.size:
            begin, end = (n_kv_heads * i // self.size for i in (self.number, self.number + 1))
            return OwnHeads(
                first_head=begin * group, n_heads=(end - begin) * group, first_kv_head=begin, n_kv_heads=end - begin
            )
        holders = min(group // together, self.size // n_kv_heads)
        kv_head, place = divmod(self.number, holders)
        if kv_head >= n_kv_heads:
            return None
        begin, end = (group // together * i // holders * together for i in (place, place + 1))
        return OwnHeads(first_head=kv_head * group + begin, n_heads=end - begin, first_kv_head=kv_head, n_kv_heads=1)


def head_rows(
    widths: Sequence[int], own: OwnHeads, n_heads: int, n_kv_heads: int, *, has_states: bool = False
) -> tuple[tuple[int, int], ...]:
    """The rows of a rank's heads in q, k and v one behind the other, which are so wide; q may be alone.

    has_states: q and k are of key heads, which are the KV heads here, and v is of all heads; otherwise q alone is of all.
    """
    queries, shared = (own.first_head, own.n_heads, n_heads), (own.first_kv_head, own.n_kv_heads, n_kv_heads)
    begin, rows = 0, ()  # type: tuple[int, tuple[tuple[int, int], ...]]
    for width, (first, n, of) in zip(
        widths, (shared, shared, queries) if has_states else (queries, shared, shared), strict=False
    ):
        rows += ((begin + first * width // of, begin + (first + n) * width // of),)
        begin += width
    return rows


def copies_of_kv(n_heads: int, n_kv_heads: int, size: int, *, together: int = 1) -> int:
    """KV heads that `size` ranks hold together, those that several of them hold counted as often."""
    own = (Rank(number=i, size=size).heads(n_heads, n_kv_heads, together=together) for i in range(size))
    return sum(heads.n_kv_heads for heads in own if heads is not None)


def ranks_that_attend(n_heads: int, n_kv_heads: int, size: int) -> int:
    """Of `size` ranks, those that have heads."""
    return sum(Rank(number=i, size=size).heads(n_heads, n_kv_heads) is not None for i in range(size))


def rank_placements(size: int, threads: int | None, numa: str, cpus: list[Cpu]) -> list[Placement]:
    """The CPUs of each of `size` ranks, which have `threads` threads together (None: one per core).

    Ranks are dealt out over NUMA nodes where their numbers allow it, else over the cores in their order. ConfigError for a
    number of threads that they cannot share equally.
    """
    if threads is not None and threads % size:
        raise ConfigError(
            f"threads is {threads} and tp is {size}; threads are those of all ranks together, which have equally many",
            hint=f"ask for a multiple of {size}",
        )
    wanted = numa_nodes(numa)
    nodes = sorted({cpu.node for cpu in cpus if not wanted or cpu.node in wanted})
    each = None if threads is None else threads // size
    if numa != "off" and len(nodes) > 1 and len(nodes) % size == 0:
        per_rank = len(nodes) // size
        groups = [nodes[i * per_rank : (i + 1) * per_rank] for i in range(size)]
        return [choose_cpus(each, ",".join(map(str, group)), cpus) for group in groups]
    if numa != "off" and len(nodes) > 1 and size % len(nodes) == 0:
        per_node = size // len(nodes)
        return [
            placement
            for node in nodes
            for placement in _divided(choose_cpus(each and each * per_node, str(node), cpus), per_node)
        ]
    return _divided(choose_cpus(threads, numa, cpus), size)


def _divided(whole: Placement, size: int) -> list[Placement]:
    each = max(1, whole.threads // size)
    if len(whole.cpus) < each * size:  # more threads than CPUs, or not to be pinned
        return [Placement(threads=each, nodes=whole.nodes)] * size
    return [Placement(threads=each, cpus=whole.cpus[i * each : (i + 1) * each], nodes=whole.nodes) for i in range(size)]


def together(placements: list[Placement]) -> Placement:
    """The CPUs of all ranks, as if one process had them."""
    return Placement(
        threads=sum(one.threads for one in placements),
        cpus=tuple(cpu for one in placements for cpu in one.cpus),
        nodes=tuple(sorted({node for one in placements for node in one.nodes})),
    )
