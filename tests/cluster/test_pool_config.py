"""What pools are made of: sizes, and what the workers of each run on."""

from __future__ import annotations

import importlib
import threading
from math import inf, nan
from types import SimpleNamespace

import pytest

from diptych.cluster.pool_config import OnCores, PoolConfig, PoolPlace, crowding
from diptych.cluster.process import with_memory
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.errors import ConfigError


def threads_of(
    pools: PoolConfig, *, cores: int, threads: int | None = None, tp: int = 1
) -> tuple[int | None, int | None]:
    engines = pools.engines(EngineConfig(compute=ComputeConfig(threads=threads, tp=tp)), cores=cores)
    return engines["prefill"].compute.threads, engines["decode"].compute.threads


def test_workers_of_one_machine_share_the_cores_that_no_pool_was_given() -> None:
    assert threads_of(PoolConfig(prefill=1, decode=3), cores=16) == (4, 4)
    assert threads_of(PoolConfig(prefill=1, decode=3), cores=16, tp=4) == (4, 4)
    assert threads_of(PoolConfig(prefill=1, decode=3), cores=16, threads=2) == (2, 2)
    assert threads_of(PoolConfig(prefill=1, decode=3, prefill_on=PoolPlace(threads=10)), cores=16) == (10, 2)
    assert threads_of(PoolConfig(prefill=1, decode=1, prefill_on=PoolPlace(threads=10)), cores=4) == (10, 1)
    assert threads_of(PoolConfig(prefill=1, decode=1, max_decode=2, decode_on=PoolPlace(threads=3)), cores=8) == (2, 3)
    both = PoolConfig(prefill=1, decode=1, prefill_on=PoolPlace(threads=5), decode_on=PoolPlace(threads=3))
    assert threads_of(both, cores=8) == (5, 3)
    assert threads_of(PoolConfig(prefill=1, decode=3, address="auto"), cores=16) == (None, None), "a node each, perhaps"


def test_each_pool_has_its_own_device() -> None:
    pools = PoolConfig(prefill=1, decode=1, prefill_on=PoolPlace.of("device=cuda:1,threads=2"))
    engines = pools.engines(EngineConfig(), cores=4)
    assert (engines["prefill"].compute.device, engines["prefill"].compute.threads) == ("cuda:1", 2)
    assert engines["decode"].compute.device == "auto"


def test_a_pool_runs_on_what_is_said_of_it() -> None:
    assert PoolPlace.of(None) == PoolPlace.of("") == PoolPlace()
    assert PoolPlace.of("threads=8,device=cuda,node=reader") == PoolPlace(threads=8, device="cuda", node="reader")


@pytest.mark.parametrize("text", ["threads", "threads=", "cores=3", "threads=1,threads=2", "node=a,,x"])
def test_what_is_no_such_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a pool cannot run on") as caught:
        PoolPlace.of(text)
    assert "threads=N, device=NAME, node=RESOURCE" in str(caught.value.hint)


@pytest.mark.parametrize(("target_queue_s", "calm_s"), [(0.0, 1.0), (nan, 1.0), (inf, 1.0), (1.0, -1.0), (1.0, nan)])
def test_no_time_is_refused(target_queue_s: float, calm_s: float) -> None:
    with pytest.raises(ConfigError, match="they must be more than 0, and 0 or more"):
        PoolConfig(target_queue_s=target_queue_s, calm_s=calm_s)


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1.5"])
def test_threads_are_a_number(threads: str) -> None:
    with pytest.raises(ConfigError, match=f"threads={threads}; it must be a whole number of at least 1"):
        PoolPlace.of(f"threads={threads}")


def test_what_is_said_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool prefill has no workers"):
        PoolConfig(decode=2, prefill_on=PoolPlace(threads=2))
    with pytest.raises(ConfigError, match="pool decode runs on node=fast, and there is one machine"):
        PoolConfig(decode=2, decode_on=PoolPlace(node="fast"))
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        PoolConfig(decode=2, decode_on=PoolPlace(device="tpu")).engines(EngineConfig(), cores=2)


def test_memory_is_divided_where_it_is_shared() -> None:
    """Workers of one machine share its memory; a GPU is one worker's, and the machine's memory says nothing of it."""
    one, on_gpu = EngineConfig(), EngineConfig(compute=ComputeConfig(device="cuda"))
    assert with_memory(one, 1) is one
    assert with_memory(on_gpu, 2) is on_gpu
    half, quarter = (with_memory(one, share).kv_memory_bytes for share in (2, 4))
    assert 1.8 < half / quarter < 2.2


def test_workers_with_more_threads_than_cores_are_told_of() -> None:
    """Two pools of all cores each: either is predicted as if it were alone, and is half as fast when both work."""
    both = [OnCores("decode-0", "a", 8, 8), OnCores("prefill-0", "a", 8, 8)]
    assert crowding(both) == "workers compete: 16 threads (decode-0 8, prefill-0 8) on 8 cores of one machine"
    assert crowding([OnCores("decode-0", "a", 4, 8), OnCores("prefill-0", "a", 4, 8)]) is None
    assert crowding([OnCores("decode-0", "a", 8, 8), OnCores("prefill-0", "b", 8, 8)]) is None, "a node each"
    assert crowding([OnCores("decode-0", "a", 8, 8), OnCores("prefill-0", "a", 8, None)]) is None, "one is on a GPU"
    assert crowding([OnCores("decode-0", "a", 16, 8)]) is None, (
        "what one engine does with its threads is its own matter"
    )
    assert crowding([]) is None


def test_crowded_workers_have_no_prediction_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """A profile of two threads spoke of both workers, and answers told times that no crowded worker keeps."""
    rays = importlib.import_module("diptych.cluster.rays")
    cluster = object.__new__(rays.RayCluster)

    def hello(name: str, threads: int, gap: str | None) -> SimpleNamespace:
        facts, card = SimpleNamespace(name=name, node="a"), SimpleNamespace(threads=threads)
        return SimpleNamespace(facts=facts, card=card, cores=2, gap=gap)

    cluster.actors = {"decode-0": None, "prefill-0": None}
    cluster.hellos = {name: hello(name, 1, None) for name in cluster.actors}
    assert cluster._unpredicted() is None
    assert not cluster._tell_crowding()
    assert not caplog.records
    cluster.hellos = {name: hello(name, 2, None) for name in cluster.actors}
    words = "workers compete: 4 threads (decode-0 2, prefill-0 2) on 2 cores of one machine"
    assert cluster._unpredicted() == words
    assert cluster._tell_crowding()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert words in caplog.text
    assert "threads=N in --prefill-on" in caplog.text
    cluster.hellos["decode-0"] = hello("decode-0", 2, "never measured")
    assert cluster._unpredicted() == "decode-0: never measured"
    del cluster.actors["prefill-0"]  # its pool shrank
    assert cluster._crowding() is None


def test_a_worker_that_dies_as_soon_as_it_is_there_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for its clock then was gone for good: pools followed no load any more, and the worker never came back."""
    rays = importlib.import_module("diptych.cluster.rays")
    cluster = object.__new__(rays.RayCluster)
    cluster._scaling, cluster._is_closing, cluster.clock = threading.Lock(), threading.Event(), MonotonicClock()
    killed, asked = [], []

    def is_gone(actor: object, clock: object) -> float:
        asked.append(actor)
        if len(asked) == 3:
            cluster._is_closing.set()
        raise rays.RayError("it died")

    monkeypatch.setattr(rays, "_clock_ahead_s", is_gone)
    monkeypatch.setattr(rays, "POLL_S", 0.0)
    monkeypatch.setattr(rays.ray, "kill", killed.append)
    monkeypatch.setattr(rays.ray, "get", lambda answer, timeout: SimpleNamespace(incarnation="new"))
    cluster.actors, cluster._leaving = {}, set()
    cluster._start = lambda names: cluster.actors.update(dict.fromkeys(names, "actor"))
    cluster._scale_to("decode", 1)
    assert (cluster.actors, killed) == ({}, ["actor"])
    cluster.actors = {"decode-0": SimpleNamespace(hello=SimpleNamespace(remote=lambda: None))}
    cluster.hellos = {"decode-0": SimpleNamespace(incarnation="old")}
    assert not cluster._is_back("decode-0", is_hung=False)
    assert len(asked) == 3, "tried again, until the end"
