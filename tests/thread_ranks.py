"""Ranks as threads of the test's own process: the same code and the same shared file, without the seconds that a process takes
to import torch. What only processes can show (being killed, leaving nothing) is tested with processes.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

from diptych.compute import rank
from diptych.compute.model import Model
from diptych.compute.ops.cpu_kernels import _cpu
from diptych.compute.ops.ranks import Ranks
from diptych.compute.runner import build_over_ranks, open_blueprint
from diptych.ground.config import ComputeConfig


class _Thread:
    """As much of a process as `Ranks` asks of one."""

    def __init__(self, team: Any) -> None:
        self._thread = threading.Thread(target=self._run, args=(team,), daemon=True)
        self._thread.start()

    def _run(self, team: Any) -> None:
        try:
            rank.run(team)
        except Exception:
            return  # told to rank 0, which raises it

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return 0

    def kill(self) -> None:
        raise AssertionError("a rank did not leave")


class ThreadRanks(Ranks):
    def _start(self, number: int) -> Any:
        return _Thread(_cpu.Team(self._fd, number, self.size, self.is_crowded))


def load_over_threads(path: Path, config: ComputeConfig) -> Model:
    """The checkpoint on `config.tp` ranks."""
    opened = open_blueprint(path, config)
    source = {"path": str(path), "max_context_tokens": None}
    return build_over_ranks(opened.blueprint, opened.config, source, start=ThreadRanks)
