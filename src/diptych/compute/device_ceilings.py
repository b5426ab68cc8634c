"""What a GPU could do at most, in more detail than a phase report wants: copies of several sizes, arithmetic, launches.

Small sizes take less time than their launch, so runs are recorded and replayed one behind the other, and what a kernel takes
that moves one number is taken off. On a CPU, where the tests go the same way, they just follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from diptych.compute.ceilings import CACHED, REPEATS, torch_flops_per_s, torch_read_bytes_per_s
from diptych.ground.clock import MonotonicClock

COPY_MIB = (8, 16, 24, 32, 48, 64, 128, 512, 2048)  # source and target together
RUN_MIB = 512  # copied in one go, so that small copies follow one another
MOST_RUNS = 64
LAUNCHES = 256  # fewer than a queue of the device holds
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCeilings:
    """Best of several tries. copy_bytes_per_s: read and written, by the MiB in which source and target lie; flops_per_s: by
    dtype; launch_s: what the host takes to launch one kernel.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: Mapping[int, float]
    flops_per_s: Mapping[str, float]
    launch_s: float

    @property
    def cache(self) -> dict[str, float] | None:
        """The device's last-level cache: bytes, the largest size that is copied faster than memory, and the rate there."""
        return cache_of(self.copy_bytes_per_s, self.read_bytes_per_s)


def cache_of(rates: Mapping[int, float], memory_bytes_per_s: float) -> dict[str, float] | None:
    """From rates by MiB; None where no size is faster. Sizes behind the first that memory must serve are chance."""
    held = list(takewhile(lambda mib: rates[mib] >= CACHED * memory_bytes_per_s, sorted(rates)))
    return {"bytes": held[-1] * 2.0**20, "bytes_per_s": min(rates[mib] for mib in held)} if held else None


def device_ceilings(
    device: torch.device, *, copy_mib: Sequence[int] = COPY_MIB, side: int | None = None
) -> DeviceCeilings:
    """Measured now; takes some seconds. Sizes of which the free memory does not hold four are left out.

    side: rows of the matrices that are multiplied; what the device needs for its best where none is given.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copy_mib = [mib for mib in copy_mib if 4 * mib * 2**20 <= free]
    empty = torch.zeros(1, device=device)
    nothing_s = _run_s(lambda: torch.mul(empty, 1.0, out=empty), device, MOST_RUNS)
    copies = {mib: _copy_bytes_per_s(mib, device, nothing_s) for mib in copy_mib}
    return DeviceCeilings(
        read_bytes_per_s=max(torch_read_bytes_per_s(device), copies[max(copies)] if copies else 0.0),
        copy_bytes_per_s=copies,
        flops_per_s={name: torch_flops_per_s(device, dtype, side=side) for name, dtype in DTYPES.items()},
        launch_s=_launch_s(device),
    )


def _copy_bytes_per_s(mib: int, device: torch.device, nothing_s: float) -> float:
    n_bytes = mib * 2**20
    source = torch.rand(n_bytes // 8, device=device)
    target = torch.empty_like(source)
    run_s = _run_s(lambda: torch.mul(source, 1.0, out=target), device, min(MOST_RUNS, max(2, RUN_MIB // mib)))
    return n_bytes / max(run_s - nothing_s, 0.1 * run_s)


def _run_s(work: Callable[[], object], device: torch.device, n_runs: int) -> float:
    """Seconds of one of so many runs, one behind the other."""
    work()
    if device.type != "cuda":
        clock = MonotonicClock()
        return min(_host_s(work, n_runs, clock) for _ in range(REPEATS)) / n_runs
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(n_runs):
                work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        found = []
        for _ in range(REPEATS + 1):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / n_runs)
    return min(found[1:])  # the first warms up


def _launch_s(device: torch.device) -> float:
    number, clock = torch.zeros(1, device=device), MonotonicClock()
    found = []
    for _ in range(REPEATS + 1):
        found.append(_host_s(lambda: torch.mul(number, 1.0, out=number), LAUNCHES, clock) / LAUNCHES)
        number.item()  # waits for all of them
    return min(found[1:])


def _host_s(work: Callable[[], object], n_runs: int, clock: MonotonicClock) -> float:
    begin_s = clock.now_s()
    for _ in range(n_runs):
        work()
    return clock.now_s() - begin_s
