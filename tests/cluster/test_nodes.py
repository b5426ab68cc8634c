"""Two Ray nodes on one machine: workers of one service on both, and one node that is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster
from tests.cluster.test_serve import OPTIONS, WORDS, Stream, body, wait_for, worker_pids

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]
NODE = {"num_cpus": 3, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield nodes
    nodes.shutdown()


def nodes_of(server: ServerProcess) -> dict[str, str]:
    rows = re.findall(r'diptych_worker_up{node="(\w+)".*worker="([^"]+)"} 1', server.scrape())
    return {worker: node for node, worker in rows}


def test_a_node_that_is_lost_loses_no_request(cluster: Cluster) -> None:
    """Its workers' requests go on at the other node, and its workers are started there."""
    second = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    one = LLM("bundled", threads=1, kv_memory_bytes=33554432, max_context_tokens=2048)
    with ServerProcess("--prefill", "1", "--decode", "2", "--ray-address", cluster.address, *OPTIONS) as server:
        assert len(set(nodes_of(server).values())) == 2, "workers are spread over nodes"
        with server.client() as http:
            answer = http.post("/v1/completions", json=body(WORDS * 40)).json()
        wanted = one.generate([WORDS * 40], SamplingParams(max_tokens=40, temperature=0.0))[0]
        assert answer["choices"][0]["text"] == wanted.choices[0].text
        check_account(answer)
        options = {"temperature": 0.9, "max_tokens": 600, "ignore_eos": True}
        streams = [Stream(server, f"{n} {WORDS * 6}", seed=n, **options) for n in range(6)]
        wait_for(lambda: all(stream.n_events > 10 for stream in streams), "all streams have begun", 60)
        cluster.remove_node(second, allow_graceful=False)
        for stream in streams:
            stream.thread.join(timeout=120)
        texts = one.generate(
            [f"{n} {WORDS * 6}" for n in range(6)], [SamplingParams(seed=n, **options) for n in range(6)]
        )
        for stream, completion in zip(streams, texts, strict=True):
            assert stream.error is None, stream.error
            assert stream.text == completion.choices[0].text
            check_account(stream.end)
        wait_for(lambda: len(worker_pids(server)) == 3, "all workers are up again", 120)
        assert len(set(nodes_of(server).values())) == 1
        server.check_balance()
        code, errors = server.stop()
        assert code == 0, errors
