"""Ray nodes on one machine: workers of one service on several, and one node that is lost in every state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster
from tests.cluster.states import N_ROUNDS, NODE, STATES, Load
from tests.cluster.test_serve import OPTIONS, RECOVERY_S, WORDS, body, held, wait_for

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import CLOCK, ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]


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
    """Three workers, two of which fit on a node; the door is at the head, and one node is free."""
    with ServerProcess("--prefill", "1", "--decode", "2", "--ray-address", cluster.address, *OPTIONS) as server:
        cluster.add_node(**NODE)
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
@pytest.mark.parametrize("round_number", range(N_ROUNDS))
def test_a_node_that_is_lost_loses_no_request(
    cluster: Cluster, pools: ServerProcess, one: LLM, state: str, round_number: int
) -> None:
    """Its workers' requests go on at the others, and its workers are started on a node that has room.

    That node may be noticed later than the last answer is over, so "all are up" was true before one of them was missed.
    """
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
    with ThreadPoolExecutor(1) as beside:
        checking = beside.submit(load.check, one)
        cluster.add_node(**NODE)  # that is free in the next round; only a main thread may
        checking.result()

    def are_back() -> bool:
        now = nodes_of(pools)
        return len(now) == 3 and lost not in now.values()

    wait_for(are_back, "all workers are up again, elsewhere", RECOVERY_S)
    print(f"{state}: {victims} were back after {CLOCK.now_s() - lost_s:.1f} s")
    wait_for(lambda: stored(cluster) == (0, 0), "nothing stays in Ray's stores")
    pools.check_balance()


def stored(cluster: Cluster) -> tuple[int, int]:
    """Objects and bytes in Ray's stores, on all nodes: what travels between nodes lies there on both sides."""
    stats = [
        node_stats(node.node_ip_address, node.node_manager_port, include_memory_info=False).store_stats
        for node in cluster.worker_nodes
    ]
    return sum(one.num_local_objects for one in stats), sum(one.object_store_bytes_used for one in stats)


def test_clients_that_leave_free_the_stores_of_nodes(cluster: Cluster, pools: ServerProcess) -> None:
    """A client that leaves in the middle of a transfer: parcels on their way are in no store a second later."""
    wait_for(lambda: len(nodes_of(pools)) == 3, "all workers are up", RECOVERY_S)
    most, took_s = 0, list[float]()
    for n in range(10):
        before = pools.metric("diptych_worker_sent_bytes_total")
        with pools.client() as http:
            options = {"stream": True, "max_tokens": 400, "ignore_eos": True}
            prompts = [f"{n} {i} {WORDS * 80}" for i in range(3)]
            streams = [http.stream("POST", "/v1/completions", json=body(one, **options)) for one in prompts]
            answers = [stream.__enter__() for stream in streams]
            wait_for(
                lambda old=before: pools.metric("diptych_worker_sent_bytes_total") > old, "parcels are on their way"
            )
            most = max(most, stored(cluster)[0])
            for stream in streams:
                stream.__exit__(None, None, None)
            assert all(answer.status_code == 200 for answer in answers)
        took_s.append(wait_for(lambda: held(pools) + stored(cluster)[0] == 0, "all is free", timeout_s=20))
    print(f"free after {', '.join(f'{one:.2f}' for one in sorted(took_s))} s; up to {most} objects were seen")
    pools.check_balance()


def test_a_service_of_one_machine_leaves_other_rays_alone(cluster: Cluster) -> None:
    """It found the Ray that somebody had started here, and ended with a traceback about its number of processors."""
    with ServerProcess("--workers", "1", *OPTIONS) as server:
        assert not {node.node_id for node in cluster.list_all_nodes()} & set(nodes_of(server).values())
        with server.client() as http:
            http.post("/v1/completions", json=body(WORDS)).raise_for_status()


def test_pools_run_where_and_on_what_is_said_of_each(cluster: Cluster, one: LLM) -> None:
    """Two kinds of machines are the point of pools: each has its own, with threads of its own, and the text is the same."""
    places = {"prefill-0": "reader", "decode-0": "writer"}
    nodes = {worker: cluster.add_node(**NODE, resources={name: 1}).node_id for worker, name in places.items()}
    pools = ("--prefill", "1", "--decode", "1", "--ray-address", cluster.address, *OPTIONS)
    with ServerProcess(*pools, "--prefill-on", "node=reader,threads=2", "--decode-on", "node=writer") as server:
        assert nodes_of(server) == nodes
        with server.client() as http:
            answer = http.post("/v1/completions", json=body(WORDS * 40)).json()
        wanted = one.generate([WORDS * 40], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == wanted.choices[0].text
        assert answer["timings"]["transfer_n"] > 0
        code, errors = server.stop()
        assert code == 0, errors
        told = dict(re.findall(r"worker engine name=(\S+) .* threads=(\d)", errors))
        assert told == {"prefill-0": "2", "decode-0": "1"}
    with pytest.raises(RuntimeError, match=r"need 1 of Ray.* resource nowhere; its nodes have 0"):
        ServerProcess(*pools, "--decode-on", "node=nowhere")
