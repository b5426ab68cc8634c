"""The kill and abort matrices under load, with real processes: nothing is lost, and nothing stays behind. Twenty minutes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.cluster.states import N_ROUNDS, STATES, Load, gauge
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, Stream, body, held, wait_for, worker_pids

from diptych.cluster.reader import N_SLOTS
from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import CLOCK, ServerProcess

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def pools() -> Iterator[ServerProcess]:
    with ServerProcess("--prefill", "1", "--decode", "2", *OPTIONS) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors


def wait_until_received(server: ServerProcess, n_bytes: float) -> None:
    wait_for(lambda: server.metric("diptych_worker_received_bytes_total") > n_bytes, "keys and values have come")


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("round_number", range(N_ROUNDS))
def test_a_kill_under_load_loses_nothing(
    pools: ServerProcess, one: LLM, victim: str, state: str, round_number: int
) -> None:
    """Every stream ends with the text it would have had, and the worker is back in time."""
    wait_for(lambda: len(worker_pids(pools)) == 3, "all workers are up", 120)
    deaths = pools.metric("diptych_worker_deaths_total")
    load = Load(pools, f"{victim} {state} {round_number}", max_tokens=120)
    load.wait_for(state, [victim])
    os.kill(worker_pids(pools)[victim], signal.SIGKILL)
    killed_s = CLOCK.now_s()
    load.check(one)
    wait_for(lambda: pools.metric("diptych_worker_deaths_total") == deaths + 1, "the death was seen")
    wait_for(lambda: len(worker_pids(pools)) == 3, "the worker is back", RECOVERY_S)
    assert CLOCK.now_s() - killed_s < 2 * RECOVERY_S
    pools.check_balance()


def lent(server: ServerProcess) -> int:
    """Parcels that lie in memory which workers share: the words at the head of each one's file (`cluster.slots`)."""
    n_lent = 0
    for pid in worker_pids(server).values():
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if re.match(r"/memfd:diptych-[0-9a-f]{32} ", os.readlink(path)):
                    with path.open("rb") as file:
                        n_lent += int(np.count_nonzero(np.frombuffer(file.read(8 * N_SLOTS), dtype=np.uint64)))
    return n_lent


@pytest.mark.parametrize("state", STATES)
def test_clients_that_leave_free_everything(pools: ServerProcess, state: str) -> None:
    """In whatever state a request is: blocks and what is on its way are back to nothing within a second."""
    wait_for(lambda: len(worker_pids(pools)) == 3, "all workers are up", 120)
    for round_number in range(5):
        before = pools.metric("diptych_worker_received_bytes_total")
        client = pools.client(timeout_s=60)
        answers = [
            client.stream("POST", "/v1/completions", json=body(f"{state} {round_number} {n} " + WORDS * 60, stream=True,
                          max_tokens=800, ignore_eos=True))
            for n in range(3)
        ]  # fmt: skip
        opened = [answer.__enter__() for answer in answers]
        assert all(answer.status_code == 200 for answer in opened)
        if state == "decoding":
            lines = [answer.iter_lines() for answer in opened]
            for line in lines:
                next(line)
        elif state == "transferring":
            wait_until_received(pools, before)
        for answer in answers:
            answer.__exit__(None, None, None)
        client.close()
        took_s = wait_for(lambda: held(pools) + lent(pools) == 0, f"all is free after {state}", timeout_s=20)
        print(f"{state}: free after {took_s:.2f} s")
    pools.check_balance()


def test_a_hung_worker_is_given_up(pools: ServerProcess) -> None:
    """A process that lives and says nothing is as good as dead."""
    wait_for(lambda: len(worker_pids(pools)) == 3, "all workers are up", 120)
    deaths, pid = pools.metric("diptych_worker_deaths_total"), worker_pids(pools)["decode-1"]
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: pools.metric("diptych_worker_deaths_total") == deaths + 1, "it is given up", 60)
    wait_for(lambda: worker_pids(pools).get("decode-1", pid) != pid, "another one is there", 120)
    pools.check_balance()


def test_pools_grow_and_shrink_under_load(pools: ServerProcess, one: LLM) -> None:
    """Workers come and go while streams run, and no stream can tell."""
    wait_for(lambda: len(worker_pids(pools)) == 3, "all workers are up", 120)
    options = {"temperature": 0.9, "max_tokens": 700, "ignore_eos": True}

    def streams(first: int) -> list[Stream]:
        return [Stream(pools, f"{n} {WORDS * 5}", seed=n, **options) for n in range(first, first + 6)]

    def check(begun: list[Stream], first: int) -> None:
        for stream in begun:
            stream.thread.join(timeout=200)
        wanted = one.generate(
            [f"{n} {WORDS * 5}" for n in range(first, first + 6)],
            [SamplingParams(seed=n, **options) for n in range(first, first + 6)],
        )
        for stream, completion in zip(begun, wanted, strict=True):
            assert stream.error is None, stream.error
            assert stream.text == completion.choices[0].text

    before = streams(0)
    with pools.client() as http:
        assert http.post("/scale", json={"decode": 3}).status_code == 400, "sizes stand in the query"
        assert http.post("/scale", params={"decode": 3, "prefill": 2}).json() == {"scaling": True}
        wait_for(lambda: len(worker_pids(pools)) == 5, "two more are up", 120)
        between = streams(10)
        wait_for(lambda: all(stream.n_events > 5 for stream in between), "streams have begun", 60)
        assert http.post("/scale", params={"decode": 1, "prefill": 0}).json() == {"scaling": True}
        after = streams(20)
        wait_for(lambda: list(worker_pids(pools)) == ["decode-0"], "four have gone", 200)
        check(before, 0)
        check(between, 10)
        check(after, 20)
        pools.check_balance()
        http.post("/scale", params={"decode": 2, "prefill": 1})
    wait_for(lambda: len(worker_pids(pools)) == 3, "pools are as they were", 120)
    pools.check_balance()


def test_a_worker_that_comes_back_as_another_version_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken back, and what it did not understand was lost; those that are left answer."""
    script, is_back = Path(__file__).with_name("updated_node_server.py"), tmp_path / "is-back"
    monkeypatch.setenv("DIPTYCH_TEST_UPDATED", str(is_back))
    with ServerProcess("--workers", "2", *OPTIONS, script=script) as server:
        wait_for(lambda: len(worker_pids(server)) == 2, "both are up", 120)
        before = worker_pids(server)
        os.kill(before["decode-0"], signal.SIGKILL)
        wait_for(lambda: server.metric("diptych_worker_deaths_total") == 1, "the death was seen")
        wait_for(is_back.exists, "it is back")
        for n in range(4):
            stream = Stream(server, f"{n} {WORDS}", max_tokens=200, ignore_eos=True)
            stream.thread.join(timeout=60)
            assert stream.error is None
            assert stream.end["usage"]["completion_tokens"] == 200
        assert list(worker_pids(server)) == ["decode-1"]
        server.check_balance()
        code, errors = server.stop()
        assert code == 0
        assert "worker stays out: worker decode-0 runs Diptych 0.0.9" in errors


def test_a_worker_whose_new_start_fails_is_started_once_more(
    one: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts an actor again that has died, but not one that could not begin: it stayed away, and nobody was told why."""
    script, has_failed = Path(__file__).with_name("failing_node_server.py"), tmp_path / "has-failed"
    monkeypatch.setenv("DIPTYCH_TEST_FAILED", str(has_failed))
    with ServerProcess("--prefill", "1", "--decode", "1", *OPTIONS, script=script) as server:
        wait_for(lambda: len(worker_pids(server)) == 2, "both are up", 120)
        os.kill(worker_pids(server)["prefill-0"], signal.SIGKILL)
        wait_for(has_failed.exists, "it could not begin")
        wait_for(lambda: len(worker_pids(server)) == 2, "it is back", 120)
        Load(server, "after a failed start", max_tokens=20).check(one)
        assert gauge(server.scrape(), "sent_bytes_total", "prefill-0") > 0, "who answers knows the new one"
        server.check_balance()
        code, errors = server.stop()
        assert code == 0
        assert "worker did not start again name=prefill-0 why=ActorDiedError: LoadError: the disk is away" in errors
