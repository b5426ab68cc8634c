"""The ARM64 sets under emulation: random models on three processors, then every other test of this folder (tests/arm64.sh)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "debootstrap")


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}")
def test_kernels_and_phase_equality_hold_on_an_emulated_arm64() -> None:
    script = Path(__file__).resolve().parents[1] / "arm64.sh"
    run = subprocess.run([script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "all of ARM64 passed" in run.stdout
