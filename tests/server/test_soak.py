"""Mixed load with random aborts: seconds in the normal run, an hour with `-m slow` (minutes: DIPTYCH_SOAK_MINUTES)."""

from __future__ import annotations

import asyncio
import os

import pytest

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
    soak(server, seconds=6.0)


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
