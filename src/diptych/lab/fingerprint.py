"""What a measurement was taken on: without it a number proves nothing later."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from diptych.ground.clock import wall_time_s
from diptych.ground.version import VERSION


def fingerprint(device: torch.device | None = None) -> dict[str, str]:
    """Processor, cores, memory, system and versions, as text; the GPU where torch sees one: `device`, or the first."""
    info = {
        "cpu": _cpu_name(),
        "cores": str(psutil.cpu_count(logical=False) or psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diptych": VERSION,
        "date": datetime.fromtimestamp(wall_time_s(), UTC).isoformat(timespec="seconds"),
    }
    cache_bytes = last_level_cache_bytes()
    if cache_bytes is not None:
        info["last-level cache"] = f"{cache_bytes / 2**20:.0f} MiB"
    if torch.cuda.is_available():
        index = 0 if device is None or device.type != "cuda" else device.index or 0
        card = torch.cuda.get_device_properties(index)
        info |= {
            "gpu": card.name,
            "gpu memory": f"{card.total_memory / 2**30:.0f} GiB",
            "gpu capability": f"{card.major}.{card.minor}, {card.multi_processor_count} multiprocessors",
            "cuda": str(torch.version.cuda),
        }
    return info


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache the first core sees; None where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(1024 * int(text[:-1]))
    return max(sizes, default=None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split("\t:", 1) if "\t:" in line else line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    sets = [name for name in ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if name in flags]
    return f"{facts.get('model name', platform.machine())} ({', '.join(sets) or 'no AVX2'})"
