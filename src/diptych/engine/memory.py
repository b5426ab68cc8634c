"""How much memory there is: the machine's or the GPU's, and no more than a container may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
PROCESS_STATUS = Path("/proc/self/status")
# limit, used, pages of files that were read long ago and lately, and those of them that are mapped; of either version
V2 = ("memory.max", "memory.current"), ("inactive_file", "active_file", "file_mapped")
V1 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("total_inactive_file", "total_active_file", "total_mapped_file"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in all, and bytes that can be had now without what is mapped: weights are used where their file is."""

    total_bytes: int
    available_bytes: int


def memory_of(device: torch.device) -> Memory:
    """The memory that tensors on `device` live in."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    machine = psutil.virtual_memory()
    total, available = machine.total, max(0, machine.available - _mapped_bytes())
    for limit, used in _container_limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    return Memory(total, available)


def _container_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of each control group that holds this process and has a limit; v1 and v2."""
    found = []
    for folder, (names, fields) in _folders():
        try:
            limit, used = (int((folder / name).read_text()) for name in names)
        except (OSError, ValueError):  # no such group here, or "max"
            continue
        # files that were read stay counted until somebody needs their place
        idle, busy, mapped = _numbers(folder / "memory.stat", fields)
        found.append((limit, max(0, used - min(idle, max(0, idle + busy - mapped)))))
    return found


def _mapped_bytes() -> int:
    """Pages of files that this process uses, which the system counts as free since it may take them and read them again."""
    try:
        lines = dict(line.split(":", 1) for line in PROCESS_STATUS.read_text().splitlines())
        return 1024 * int(lines["RssFile"].split()[0])
    except (OSError, ValueError, LookupError):  # no such file here
        return 0


def _folders() -> list[tuple[Path, tuple[tuple[str, str], tuple[str, str, str]]]]:
    """The process's own groups and those around them. In a container its own path may be the root that is mounted."""
    try:
        lines = PROCESS_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, V2
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", V1
        else:
            continue
        own = root / path.lstrip("/")
        found += [(folder, names) for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return found


def _numbers(path: Path, names: tuple[str, ...]) -> list[int]:
    """Of the fields of a file that the system makes anew whenever it is read; 0 where one is not there."""
    try:
        fields = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return [int(fields.get(name, "0")) for name in names]
    except (OSError, ValueError):
        return [0] * len(names)
