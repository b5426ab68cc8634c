"""Two Ray nodes on one machine: workers of one service on both, and one node that is lost in every state."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from tests.cluster.states import N_ROUNDS, SAMPLED, STATES, is_in
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, Stream, body, wait_for, worker_pids

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import CLOCK, ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]
NODE = {"num_cpus": 3, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # how soon a lost node is called so (docs/cluster.md); what Ray has by itself takes a minute on a busy machine
    health = {"health_check_period_ms": 2000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": health})
    yield nodes
    nodes.shutdown()


def nodes_of(server: ServerProcess) -> dict[str, str]:
    rows = re.findall(r'diptych_worker_up{node="(\w+)".*worker="([^"]+)"} 1', server.scrape())
    return {worker: node for node, worker in rows}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("round_number", range((N_ROUNDS + 1) // 2))
def test_a_node_that_is_lost_loses_no_request(cluster: Cluster, one: LLM, state: str, round_number: int) -> None:
    """Its workers' requests go on at the other node, and its workers are started there."""
    second = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    with ServerProcess("--prefill", "1", "--decode", "2", "--ray-address", cluster.address, *OPTIONS) as server:
        where = nodes_of(server)
        assert len(set(where.values())) == 2, "workers are spread over nodes"
        victims = sorted(worker for worker, node in where.items() if node == second.node_id)
        with server.client() as http:
            answer = http.post("/v1/completions", json=body(WORDS * 40)).json()
        wanted = one.generate([WORDS * 40], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == wanted.choices[0].text
        check_account(answer)
        rng, before = random.Random(f"{state} {round_number}"), server.scrape()
        asked = [
            (f"{rng.random()} " + WORDS * rng.choice((1, 6, 20, 40)), {"seed": rng.randrange(2**32), **SAMPLED})
            for _ in range(8)
        ]
        streams = [Stream(server, prompt, max_tokens=200, **options) for prompt, options in asked]
        wait_for(
            lambda: (
                any(is_in(server, victim, state, streams, before) for victim in victims)
                or not any(stream.thread.is_alive() for stream in streams)
            ),
            f"{victims} {state}",
        )
        cluster.remove_node(second, allow_graceful=False)
        lost_s = CLOCK.now_s()
        for stream in streams:
            stream.thread.join(timeout=120)
            assert not stream.thread.is_alive(), "a stream hangs"
        texts = one.generate([prompt for prompt, _ in asked], [SamplingParams(max_tokens=200, **o) for _, o in asked])
        for stream, completion in zip(streams, texts, strict=True):
            assert stream.error is None, stream.error
            assert stream.text == completion.choices[0].text
            check_account(stream.end)
        wait_for(lambda: len(worker_pids(server)) == 3, "all workers are up again", 2 * RECOVERY_S)
        print(f"{state}: {victims} were back after {CLOCK.now_s() - lost_s:.1f} s")
        assert set(nodes_of(server).values()) == {cluster.head_node.node_id}
        server.check_balance()
        code, errors = server.stop()
        assert code == 0, errors


def test_a_service_of_one_machine_leaves_other_rays_alone(cluster: Cluster) -> None:
    """It found the Ray that somebody had started here, and ended with a traceback about its number of processors."""
    with ServerProcess("--workers", "1", *OPTIONS) as server:
        assert not {node.node_id for node in cluster.list_all_nodes()} & set(nodes_of(server).values())
        with server.client() as http:
            http.post("/v1/completions", json=body(WORDS)).raise_for_status()
