"""Ranks as threads of the test's own process: the same code and the same shared file, without the seconds that a process takes
to import torch. What only processes can show (being killed, leaving nothing) is tested with processes.
"""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.compute import rank
from diptych.compute.model import Model
from diptych.compute.ops.cpu.kernels import _cpu
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


def free_address() -> str:
    """On loopback; whoever takes the port meanwhile fails the test, which says so."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def load_over_links(path: Path, config: ComputeConfig, *, measured: Mapping[str, torch.Tensor] | None = None) -> Model:
    """The checkpoint on `config.tp` ranks that have no memory in common, as on so many machines. measured: over a text."""
    config = replace(config, tp_address=free_address(), threads=1, numa="off")
    failures: list[BaseException] = []

    def join(number: int) -> None:
        try:
            rank.run_linked(str(path), config, number)
        except BaseException as error:
            failures.append(error)

    for number in range(1, config.tp):
        threading.Thread(target=join, args=(number,), daemon=True).start()
    opened = open_blueprint(path, config)
    opened.blueprint.source.measured = measured or {}
    model = build_over_ranks(opened.blueprint, opened.config, {"path": str(path), "max_context_tokens": None})
    assert not failures, failures
    return model


def load_over_threads(
    path: Path, config: ComputeConfig, *, measured: Mapping[str, torch.Tensor] | None = None
) -> Model:
    """The checkpoint on `config.tp` ranks. measured: over a text."""
    opened = open_blueprint(path, config)
    opened.blueprint.source.measured = measured or {}
    source = {"path": str(path), "max_context_tokens": None}
    return build_over_ranks(opened.blueprint, opened.config, source, start=ThreadRanks)
