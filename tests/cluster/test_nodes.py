"""Ray nodes on one machine: workers of one service on several, and one node that is lost in every state."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from tests.cluster.states import N_ROUNDS, STATES, Load
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, body, wait_for

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import CLOCK, ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # how soon a lost node is called so (docs/cluster.md); what Ray has by itself takes a minute on a busy machine
    health = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
    head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": health}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(**NODE)
    nodes.wait_for_nodes()
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def pools(cluster: Cluster) -> Iterator[ServerProcess]:
    """Three workers, two of which fit on a node; the door is at the head."""
    with ServerProcess("--prefill", "1", "--decode", "2", "--ray-address", cluster.address, *OPTIONS) as server:
        yield server
        code, errors = server.stop()
        assert code == 0, errors


def nodes_of(server: ServerProcess) -> dict[str, str]:
    rows = re.findall(r'diptych_worker_up{node="(\w+)".*worker="([^"]+)"} 1', server.scrape())
    return {worker: node for node, worker in rows}


def test_workers_of_two_nodes_answer_as_one_engine(pools: ServerProcess, one: LLM) -> None:
    """Keys and values come over Ray's transfer between nodes, wherever it has placed the workers."""
    assert len(set(nodes_of(pools).values())) == 2, "workers are spread over nodes"
    with pools.client() as http:
        answer = http.post("/v1/completions", json=body(WORDS * 40)).json()
    wanted = one.generate([WORDS * 40], SamplingParams(max_tokens=40, temperature=0.0))[0]
    assert answer["choices"][0]["text"] == wanted.choices[0].text
    assert answer["timings"]["transfer_n"] > 0
    check_account(answer)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("round_number", range((N_ROUNDS + 1) // 2))
def test_a_node_that_is_lost_loses_no_request(
    cluster: Cluster, pools: ServerProcess, one: LLM, state: str, round_number: int
) -> None:
    """Its workers' requests go on at the others, and its workers are started on a node that has room.

    That node may be noticed later than the last answer is over, so "all are up" was true before one of them was missed.
    """
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    wait_for(lambda: len(nodes_of(pools)) == 3, "all workers are up", RECOVERY_S)
    where = nodes_of(pools)
    # by turns the node of a worker that answers and that of the one that reads
    lost = where["prefill-0" if (round_number + STATES.index(state)) % 2 else "decode-0"]
    victims = sorted(worker for worker, node in where.items() if node == lost)
    load = Load(pools, f"{state} {round_number}", max_tokens=200)
    load.wait_for(state, victims)
    (node,) = (node for node in cluster.worker_nodes if node.node_id == lost)
    cluster.remove_node(node, allow_graceful=False)
    lost_s = CLOCK.now_s()
    load.check(one)

    def are_back() -> bool:
        now = nodes_of(pools)
        return len(now) == 3 and lost not in now.values()

    wait_for(are_back, "all workers are up again, elsewhere", RECOVERY_S)
    print(f"{state}: {victims} were back after {CLOCK.now_s() - lost_s:.1f} s")
    pools.check_balance()


def test_a_service_of_one_machine_leaves_other_rays_alone(cluster: Cluster) -> None:
    """It found the Ray that somebody had started here, and ended with a traceback about its number of processors."""
    with ServerProcess("--workers", "1", *OPTIONS) as server:
        assert not {node.node_id for node in cluster.list_all_nodes()} & set(nodes_of(server).values())
        with server.client() as http:
            http.post("/v1/completions", json=body(WORDS)).raise_for_status()
