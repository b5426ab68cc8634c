"""What runs in a worker's own process, and what may be called there: one engine, loaded, on a thread (`cluster.runner`).

Three groups of calls (`cluster.rays.actor_class`), each in order and none behind another: what the door says, what other
workers send, and what the door fetches. That it is Ray that calls is not known here: peers are handles with `remote` calls.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch

from diptych.cluster.autoscale import probe
from diptych.cluster.link import InOrder
from diptych.cluster.messages import Batch, Facts, Hello, ModelCard, ToWorker
from diptych.cluster.pool_config import PoolConfig
from diptych.cluster.runner import WorkerRunner
from diptych.cluster.worker import Worker
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.cost.shared_machine import Speeds
from diptych.engine.load import load, make_machinery, warn_of_long_steps
from diptych.engine.memory import memory_of
from diptych.engine.model_profile import local_predictor, profile_gap
from diptych.engine.pool_size import KV_MEMORY_SHARE
from diptych.engine.spans import spans_to
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import EngineConfig
from diptych.ground.errors import LoadError
from diptych.ground.spare_time import start_in_spare_time
from diptych.ground.version import VERSION

POLL_S = 0.5  # a worker that has nothing to say says so as often


class WorkerProcess:
    """A process with one engine, before Ray makes an actor of it."""

    def __init__(
        self,
        name: str,
        model: str,
        config: EngineConfig,
        share: int,
        pools: PoolConfig,
        node_id: Callable[[], str],
        level: int,
    ) -> None:
        """share: how many workers divide the memory. node_id: asked where the worker runs. level: of its log."""
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        clock = MonotonicClock()
        loaded = load(model, config, clock=clock)
        self._loaded = loaded
        self._incarnation = uuid.uuid4().hex
        self._peers: dict[str, Any] = {}
        grammars = GrammarCompiler(loaded.tokenizer, loaded.model.spec.vocab_size)
        machinery = make_machinery(
            loaded.model, with_memory(config, share), clock=clock, grammars=grammars, loaded=loaded
        )
        warn_of_long_steps(loaded.model, config, machinery.core.context_limit_tokens)
        node = node_id()
        self._facts = Facts.of(name, machinery.core, node=node, pid=psutil.Process().pid)
        self._clock = clock
        predicted = local_predictor(loaded.model)
        limit = machinery.core.context_limit_tokens
        self._speeds = None if predicted is None else Speeds.of(predicted.predict_s, limit)
        self._probed = probe(machinery, clock) if pools.bounds and self._speeds is None else None
        endpoint = pools.otlp_traces_endpoint
        self._spans = None if endpoint is None else spans_to(endpoint, clock=clock, process=name)
        worker = Worker(
            name,
            machinery,
            clock=clock,
            send=self._send,
            takes_other_kernels=pools.takes_other_kernels,
            spans=self._spans,
            machine=node,
        )
        self._runner = WorkerRunner(worker, clock=clock)
        self._told = InOrder(self._runner.post)
        loaded.model.on_loss(self._runner.fail)
        start_in_spare_time(lambda: machinery.executor.back_memory(lambda: False), name="diptych-memory", daemon=True)

    def hello(self) -> Hello:
        """Once it is loaded."""
        model = self._loaded.model
        card = ModelCard(**{name: getattr(model, name) for name in ModelCard.__dataclass_fields__})
        return Hello(
            version=VERSION,
            incarnation=self._incarnation,
            facts=self._facts,
            card=card,
            load_s=self._loaded.load_s,
            now_s=self._clock.now_s(),
            speeds=self._speeds,
            gap=profile_gap(model),
            cores=psutil.cpu_count(logical=False) if model.device.type == "cpu" else None,
            probed=self._probed,
        )

    def meet(self, peers: dict[str, Any]) -> None:
        """The other workers' handles."""
        self._peers |= peers

    def tell(self, incarnation: str, number: int, message: ToWorker) -> None:
        """From the door."""
        if incarnation == self._incarnation:
            self._told.put(number, message)

    def give(self, message: ToWorker) -> None:
        """From another worker. Keys and values are looked at where they lie, be it in the object store or in a slot."""
        self._runner.post(message)

    def fetch(self, incarnation: str) -> Batch | None:
        """What happened; None in every POLL_S without news."""
        if incarnation != self._incarnation:
            raise LoadError("this worker has started anew")
        return self._runner.fetch(POLL_S)

    def leave(self) -> None:
        """The process is about to be ended: send what nobody has yet."""
        if self._spans is not None:
            self._spans.close()

    def _send(self, name: str, message: ToWorker) -> None:
        peer = self._peers.get(name)
        if peer is not None:
            peer.give.remote(message)


def with_memory(config: EngineConfig, share: int) -> EngineConfig:
    """One engine's part of the memory that one alone would take; a GPU is a worker's own."""
    if config.kv_memory_bytes is not None or share == 1 or config.compute.device.startswith("cuda"):
        return config
    available = memory_of(torch.device("cpu")).available_bytes
    return replace(config, kv_memory_bytes=int(available * KV_MEMORY_SHARE / share))
