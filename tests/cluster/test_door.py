"""The door is killed under load: no client takes half an answer for a whole one, nothing stays, and the next door serves."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest
from ray.cluster_utils import Cluster
from tests.cluster.states import N_ROUNDS, NODE, STATES, Load
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, body, is_alive, wait_for, worker_pids

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import ServerProcess

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray_head() -> Iterator[str]:
    """A Ray that stays when doors die: it takes as long to start as all else of them."""
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield nodes.address
    nodes.shutdown()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("round_number", range(N_ROUNDS))
def test_the_end_of_the_door_is_seen_by_every_client(ray_head: str, one: LLM, state: str, round_number: int) -> None:
    """A stream that ends without an end would be a truncated answer; here each breaks, or was whole before. Each of these doors
    but the first comes after one that was killed. In the first round it has a Ray of its own, which ends with it.
    """
    where = ("--ray-address", ray_head) if round_number else ()
    with ServerProcess("--prefill", "1", "--decode", "1", *where, *OPTIONS) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        family += [psutil.Process(pid) for pid in worker_pids(server).values()]
        with server.client() as http:
            answer = http.post("/v1/completions", json=body(WORDS)).json()
        wanted = one.generate([WORDS], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == wanted.choices[0].text
        load = Load(server, f"door {state} {round_number}", max_tokens=300)
        load.wait_for(state, ["decode-0" if state == "decoding" else "prefill-0"])
        server.process.kill()
        for stream, text in load.ended(one, timeout_s=30):
            if stream.broke is None:
                assert (stream.text, bool(stream.end)) == (text, True), "an answer that ends is whole"
            else:
                assert isinstance(stream.broke, httpx.TransportError), stream.broke
                assert text.startswith(stream.text), "and what came of the others was right"
        # Ray's agents look for their parent now and then
        engines = [one.pid for one in family if "Agent" not in _command(one)]
        wait_for(lambda: not any(map(is_alive, engines)), "all processes have ended", RECOVERY_S)


def test_a_door_that_is_told_to_end_finishes_what_it_has(one: LLM) -> None:
    """SIGTERM under load: what runs on workers is drained as what runs here, and no stream is cut."""
    with ServerProcess("--prefill", "1", "--decode", "1", *OPTIONS) as server:
        load = Load(server, "drain", max_tokens=300)
        load.wait_for("decoding", ["decode-0"])
        code, errors = server.stop(timeout_s=120)
        assert code == 0, errors
        load.check(one)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
