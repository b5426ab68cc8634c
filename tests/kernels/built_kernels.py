"""What csrc/bench/Makefile makes of the kernels: the library that test_gemm loads, and programs."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "csrc" / "bench"


def made(name: str) -> Path:
    """The file of this name, with the kernels that the installation has built, unless a source is newer than they."""
    build, source = BENCH.parents[1] / "build", BENCH.parent
    machine = platform.machine()
    out, options = build / ("kernels-arm64" if machine in ("aarch64", "arm64") else "kernels"), []
    newest = max(path.stat().st_mtime for path in source.glob("*.*") if not path.name.startswith("module"))
    for archive in build.glob(f"cp*-linux_{machine}/libdiptych_kernels.a"):
        if archive.stat().st_mtime > newest:
            out, options = archive.parent / "kernels", [f"KERNELS={archive}"]
    command = ["make", "-s", "-j2", "-C", str(BENCH), f"OUT={out}", *options, str(out / name)]
    subprocess.run(command, check=True, capture_output=True)
    return out / name
