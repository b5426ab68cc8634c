"""Pools whose workers are several processes each: the same bits, and nothing stays where a worker is killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, Stream, body, wait_for, worker_pids

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]


def ranks_of(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children(recursive=True) if "diptych.compute.rank" in one.cmdline()]


def test_workers_of_two_ranks_answer_as_one_engine_and_die_whole(one: LLM) -> None:
    """Keys and values of ranks travel as those of one process, and a rank of a dead worker would hold its memory for ever."""
    with ServerProcess("--prefill", "1", "--decode", "1", *OPTIONS, "--tp", "2", "--threads", "2") as server:
        ranks = {name: ranks_of(pid) for name, pid in worker_pids(server).items()}
        assert [len(one) for one in ranks.values()] == [1, 1], "one more process for each worker"
        with server.client() as http:
            answer = http.post("/v1/completions", json=body(WORDS * 30)).json()
        wanted = one.generate([WORDS * 30], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == wanted.choices[0].text
        assert answer["timings"]["transfer_n"] > 0, "its prompt was read by the other worker"
        check_account(answer)
        sampling = {"temperature": 0.9, "seed": 3, "max_tokens": 300, "ignore_eos": True}
        stream = Stream(server, WORDS * 4, **sampling)
        wait_for(lambda: stream.n_events > 20, "the stream has begun")
        os.kill(worker_pids(server)["decode-0"], signal.SIGKILL)
        stream.thread.join(timeout=2 * RECOVERY_S)
        assert stream.error is None
        assert stream.text == one.generate([WORDS * 4], SamplingParams(**sampling))[0].choices[0].text
        check_account(stream.end)
        wait_for(lambda: not any(rank.is_running() for rank in ranks["decode-0"]), "its rank has ended")
        # a rank that dies takes its worker with it, and both come back
        os.kill(ranks["prefill-0"][0].pid, signal.SIGKILL)
        wait_for(lambda: server.metric("diptych_worker_deaths_total") == 2, "the loss was seen")
        with server.client() as http:
            answer = http.post("/v1/completions", json=body("again " + WORDS * 30)).json()
        wanted = one.generate(["again " + WORDS * 30], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == wanted.choices[0].text
        wait_for(lambda: len(worker_pids(server)) == 2, "both are back", 2 * RECOVERY_S)
        server.check_balance()
        code, errors = server.stop()
        assert code == 0, errors
