"""Mixed load with random aborts: seconds in the normal run, an hour with `-m slow` (minutes: DIPTYCH_SOAK_MINUTES)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from diptych.ground.errors import ConfigError
from diptych.lab.soak import run_soak
from diptych.lab.stall_budget import StallConfig, run_stall
from server_process import ServerProcess


def soak(server: ServerProcess, *, seconds: float) -> None:
    pid = server.process.pid
    result = asyncio.run(run_soak(server.url, seconds=seconds, clients=12, seed=1, api_key=None, pid=pid))
    assert result.problems == []
    assert result.outcomes["answered"] > 0
    server.wait_idle()


def test_seconds_of_mixed_load_lose_nothing(server: ServerProcess) -> None:
    soak(server, seconds=3.0)


def test_the_command_prints_its_result(server: ServerProcess) -> None:
    """It once failed after an hour, in the last line."""
    command = [sys.executable, "-m", "diptych.lab.soak", "--url", server.url, "--minutes", "0.02", "--clients", "3"]
    done = subprocess.run([*command, "--think-s", "0.1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["outcomes"].values()) == result["sent"] > 0
    assert (result["blocks_left"], result["problems"]) == (0, [])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_an_hour_of_mixed_load_loses_nothing(server: ServerProcess) -> None:
    soak(server, seconds=60.0 * float(os.environ.get("DIPTYCH_SOAK_MINUTES", "60")))


def test_the_stall_experiment_sees_the_streams_wait(server: ServerProcess) -> None:
    """Only that it measures: how long the waits are is for the lab, on a quiet machine."""
    found = asyncio.run(
        run_stall(StallConfig(url=server.url, streams=3, prompt_tokens=1500, new_tokens=120, lead_tokens=20))
    )
    assert found["gaps_during"] > 0
    assert found["ttft_s"] > 0
    assert found["itl_during_s"]["max"] >= found["itl_before_s"]["p50"]


def test_streams_that_end_too_soon_leave_nobody_waiting(server: ServerProcess) -> None:
    """The prompt was to be sent behind a token that never came: the run did not end."""
    with pytest.raises(ConfigError, match="new tokens of a stream is 40; it must be a whole number of at least 51"):
        StallConfig(url=server.url, new_tokens=40)
    config = StallConfig(url=server.url, streams=1, prompt_tokens=16, new_tokens=4, lead_tokens=3)
    object.__setattr__(config, "lead_tokens", 9)  # as if an event had brought several tokens
    assert asyncio.run(run_stall(config))["ttft_s"] > 0


FEW = ["--concurrency", "1", "--prompt-tokens", "4", "--new-tokens", "1"]


@pytest.mark.parametrize(
    ("tool", "more"), [("soak", ["--minutes", "60"]), ("stall_budget", []), ("http_cost", ["bundled", *FEW])]
)
def test_without_a_server_it_says_so_at_once(tool: str, more: list[str]) -> None:
    """A soak of nothing would count refused connections for an hour."""
    command = [sys.executable, "-m", f"diptych.lab.{tool}", "--url", "http://127.0.0.1:9", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no connection" in done.stderr
    assert "Traceback" not in done.stderr
    assert "diptych serve" in done.stderr
