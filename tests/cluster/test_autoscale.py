"""Pools that follow the load: grown at once, shrunk late, and no request can tell."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cluster.local import LocalCluster
from tests.cluster.test_serve import OPTIONS, WORDS, Stream, wait_for, worker_pids
from tests.engine.conftest import tiny_config

from diptych.cluster.autoscale import Autoscaler, probe
from diptych.cluster.pool_config import PoolConfig
from diptych.engine.llm import LLM
from diptych.engine.load import load, make_machinery
from diptych.ground.clock import MonotonicClock
from diptych.ground.request import SamplingParams
from server_process import ServerProcess, check_account


def scaler() -> Autoscaler:
    return Autoscaler({"decode": (1, 4)}, target_s=2.0, calm_s=10.0)


def wanted(one: Autoscaler, n_workers: int, work_s: float, now_s: float) -> int:
    return one.wanted("decode", n_workers=n_workers, work_s=work_s, now_s=now_s)


def test_a_pool_grows_at_once_and_within_its_bounds() -> None:
    """Who waits for a worker to load should not first wait for a reason to load it."""
    assert [wanted(scaler(), 1, work_s, 0.0) for work_s in (0.0, 2.0, 2.1, 7.0, 100.0)] == [1, 1, 2, 4, 4]


def test_a_pool_shrinks_when_it_was_calm_for_long() -> None:
    """A worker reads all weights when it starts: one that a burst needed a moment ago stays for the next."""
    one = scaler()
    assert wanted(one, 4, 0.0, 0.0) == 4
    assert wanted(one, 4, 3.0, 5.0) == 4
    assert wanted(one, 4, 8.0, 9.0) == 4, "calm is over"
    assert wanted(one, 4, 0.0, 11.0) == 4
    assert wanted(one, 4, 3.0, 15.0) == 4
    assert wanted(one, 4, 0.0, 21.0) == 2, "the most that were needed in ten calm seconds"
    assert wanted(one, 2, 0.0, 22.0) == 2
    assert wanted(one, 2, 0.0, 32.0) == 1


@pytest.mark.native
def test_a_probe_leaves_no_trace(tiny_dir: Path) -> None:
    """Its prompt must not be found in the cache, and its blocks must be free."""
    config = tiny_config("cpu")
    loaded = load(str(tiny_dir), config)
    machinery = make_machinery(loaded.model, config, clock=loaded.clock)
    speeds = probe(machinery, MonotonicClock())
    assert speeds.read_s > 0.0
    assert speeds.decode_s > 0.0
    machinery.core.check()
    stats = machinery.core.stats()
    assert (stats.blocks_in_use, stats.blocks_cached, stats.running, stats.waiting) == (0, 0, 0, 0)


@pytest.mark.native
def test_a_pool_grows_while_a_worker_that_is_to_go_has_streams(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of minutes on a worker too many held up every change, and who was wanted again had to end first."""
    rays = importlib.import_module("diptych.cluster.rays")
    config = tiny_config("cpu")
    local = LocalCluster(load(str(tiny_dir), config), config, prefill=0, decode=2)
    engine, pump, ended = local.engine, local.core._pump, []
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    for prompt in ([5, 6, 7], [8, 9, 10]):
        engine.submit(engine.make_request(prompt, long, arrival_s=engine.clock.now_s()), lambda delta: None)
    engine.step()
    assert local.core.n_open_at("decode-1") == 1
    local.core._pump = lambda: None  # streams stand still
    cluster = object.__new__(rays.RayCluster)
    cluster.core, cluster.llm, cluster._pools = local.core, SimpleNamespace(wake=lambda: None), PoolConfig(decode=2)
    cluster._scaling, cluster._is_closing, cluster._threads = threading.Lock(), threading.Event(), []
    cluster.actors, cluster._leaving = {"decode-0": "actor 0", "decode-1": "actor 1"}, set()
    cluster._start = lambda names: None
    monkeypatch.setattr(rays.ray, "kill", ended.append)
    state = local.core.workers[1]

    def stepped_until(condition: Callable[[], object], what: str) -> None:
        wait_for(lambda: (engine.step(), condition())[1], what)

    cluster._scale("decode", 1)
    stepped_until(lambda: state.is_draining, "it is to go")
    cluster._scale("decode", 2)
    stepped_until(lambda: not state.is_draining, "it is wanted again, and stays")
    cluster._scale("decode", 1)
    stepped_until(lambda: state.is_draining, "it is to go once more")
    assert not ended
    local.core._pump = pump
    stepped_until(lambda: ended, "it has ended behind its stream")
    assert (ended, list(cluster.actors)) == (["actor 1"], ["decode-0"])
    stepped_until(lambda: state.is_gone and not engine.n_open, "the door knows")
    cluster._is_closing.set()


@pytest.mark.native
@pytest.mark.cluster
@pytest.mark.slow
def test_workers_come_with_the_load_and_go_after_it(one: LLM) -> None:
    """Over real workers: a burst has the pool grow, calm has it shrink, and each stream has the text of one engine."""
    scaling = ("--workers", "1", "--max-workers", "3", "--target-queue-s", "0.05", "--calm-s", "3")
    options = {"temperature": 0.9, "max_tokens": 900, "ignore_eos": True}
    with ServerProcess(*scaling, *OPTIONS) as server:
        assert list(worker_pids(server)) == ["decode-0"]
        streams, n = [], 0

        def keep_busy() -> bool:
            nonlocal n
            while sum(stream.thread.is_alive() for stream in streams) < 8:
                streams.append(Stream(server, f"{n} {WORDS * 5}", seed=n, **options))
                n += 1
            return len(worker_pids(server)) == 3

        wait_for(keep_busy, "the pool has grown", 150)
        with server.client() as http:
            refusal = http.post("/scale", params={"decode": 2})
        assert refusal.status_code == 400, "two masters"
        wait_for(lambda: list(worker_pids(server)) == ["decode-0"], "the pool has shrunk", 300)
        for stream in streams:
            stream.thread.join(timeout=200)
        prompts = [f"{n} {WORDS * 5}" for n in range(len(streams))]
        texts = one.generate(prompts, [SamplingParams(seed=n, **options) for n in range(len(streams))])
        for stream, completion in zip(streams, texts, strict=True):
            assert stream.error is None, stream.error
            assert stream.text == completion.choices[0].text
            check_account(stream.end)
        server.check_balance()
        code, errors = server.stop()
        assert code == 0, errors
        assert "workers on one machine do not pay" in errors, "whoever starts this is told"
