"""What csrc/bench/Makefile makes of the kernels: the library that test_gemm loads, programs, and the objects behind both."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "csrc" / "bench"
BUILD = BENCH.parents[1] / "build"
SOURCES = [path for path in BENCH.parent.glob("*/*.*") if path.parent.name not in ("bench", "module", "test")]
MACHINE = platform.machine()


def compiler() -> str:
    """The C++ compiler; skips the test where it, or make, is not there."""
    found = os.environ.get("CXX", "g++")
    if shutil.which("make") is None or shutil.which(found) is None:
        pytest.skip("needs make and a C++ compiler")
    return found


def installed() -> Path | None:
    """The archive of kernels that the installation has built, unless a source is newer than it."""
    newest = max(path.stat().st_mtime for path in SOURCES)
    archives = [one for one in BUILD.glob(f"cp*-linux_{MACHINE}/libdiptych_kernels.a") if one.stat().st_mtime > newest]
    return archives[-1] if archives else None


def made(name: str) -> Path:
    """The file of this name, with the kernels of the installation where they are as new as the sources."""
    archive = installed()
    out = BUILD / ("kernels-arm64" if MACHINE in ("aarch64", "arm64") else "kernels")
    if archive is not None:
        out = archive.parent / "kernels"
    options = [] if archive is None else [f"KERNELS={archive}"]
    command = ["make", "-s", "-j2", "-C", str(BENCH), f"OUT={out}", *options, str(out / name)]
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "kernels.lock").open("w") as lock:  # another process of the tests would load what is half written
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True, capture_output=True)
    return out / name


def objects() -> list[Path]:
    """Files that hold an object of each source of the kernels: the installation's archive, or one by one."""
    archive = installed()
    if archive is not None:
        return [archive]
    out = made("libdiptych_kernels.so").parent
    return [
        out / f"{source.stem}.o"
        for source in SOURCES
        if source.suffix == ".cpp" and (out / f"{source.stem}.o").exists()
    ]
