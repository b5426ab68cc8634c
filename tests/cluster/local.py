"""A cluster in one process and one thread: real workers over real engines, with links that can be told to fail.

cluster = LocalCluster(loaded, config, prefill=1, decode=2)
completions = cluster.llm.generate(prompts, sampling)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from diptych.cluster.core import ClusterCore
from diptych.cluster.messages import Facts, Parcel, ToWorker
from diptych.cluster.slots import Mapped
from diptych.cluster.worker import Worker
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.adapters import Adapters
from diptych.engine.engine import Engine
from diptych.engine.executor import ModelExecutor
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, make_machinery
from diptych.engine.spans import Spans
from diptych.ground.config import EngineConfig
from diptych.ground.phase import Status

Fault = Callable[[ToWorker], list[tuple[int, ToWorker]]]  # what becomes of a message: (steps later, message), ...


def no_fault(message: ToWorker) -> list[tuple[int, ToWorker]]:
    return [(0, message)]


class LocalLink:
    """The door's way to a worker; what a dead one is told is lost."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def send(self, message: ToWorker) -> None:
        self._cluster.post(self._name, message)


class LocalCluster:
    """Steps the door, then every worker, in turn."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        prefill: int = 1,
        decode: int = 1,
        fault: Fault = no_fault,
        local_prefill_tokens: int = 0,
        reader: LoadedModel | None = None,
        takes_other_kernels: bool = False,
        lease_s: float = 30.0,
        late_s: float = 0.05,
        spans: Callable[[str], Spans | None] = lambda name: None,
        parcel_bytes: int = 2048,
        machine: str | None = None,
    ) -> None:
        """machine: see Worker; None: parcels travel with their bytes."""
        self.loaded, self.engine_config = loaded, config
        self._late = (lease_s, late_s)
        self._spans, self._parcel_bytes, self._machine = spans, parcel_bytes, machine
        self._reader, self._takes_other_kernels = reader or loaded, takes_other_kernels
        self.fault = fault
        self.on_message: Callable[[str, ToWorker], object] = lambda name, message: None
        self.core = ClusterCore(now_s=loaded.clock.now_s, pump=self._pump, local_prefill_tokens=local_prefill_tokens)
        self.workers: dict[str, Worker] = {}
        self._mail: deque[tuple[int, str, ToWorker]] = deque()  # (when, to whom, what)
        self._n_pumped = 0
        self.n_sent = 0
        self.batch_steps = 1  # of a worker, before the door hears of them
        vocab_size = loaded.model.spec.vocab_size
        self.grammars = GrammarCompiler(loaded.tokenizer, vocab_size)
        for number in range(decode):
            self.start(f"decode-{number}", decodes=True)
        for number in range(prefill):
            self.start(f"prefill-{number}", decodes=False)
        self.engine = Engine(
            self.core,  # type: ignore[arg-type]
            _NoExecutor(),  # type: ignore[arg-type]
            loaded.tokenizer,
            clock=loaded.clock,
            vocab_size=vocab_size,
            grammars=self.grammars,
            adapters=Adapters(loaded.model, max_loras=0, max_rank=0),
            encodes=loaded.encoder is not None,
        )
        self.llm = LLM(loaded, config, engine=self.engine)

    def start(self, name: str, *, decodes: bool) -> None:
        loaded = self.loaded if decodes else self._reader
        machinery = make_machinery(
            loaded.model, self.engine_config, clock=loaded.clock, grammars=self.grammars, loaded=loaded
        )
        lease_s, late_s = self._late
        worker = Worker(
            name,
            machinery,
            clock=self.loaded.clock,
            send=self._send,
            takes_other_kernels=self._takes_other_kernels,
            lease_s=lease_s,
            late_s=late_s,
            spans=self._spans(name),
            parcel_bytes=self._parcel_bytes,
            machine=self._machine,
        )
        self.workers[name] = worker
        self.core.attach(LocalLink(self, name), Facts.of(name, machinery.core), decodes=decodes)

    def kill(self, name: str) -> None:
        """Nothing that it did not say is ever said, and the door is told."""
        del self.workers[name]
        self.core.lost(name, "killed")

    def post(self, name: str, message: ToWorker) -> None:
        self._mail.append((self._n_pumped, name, message))

    def _send(self, name: str, message: ToWorker) -> None:
        """From worker to worker: here links fail."""
        self.n_sent += 1
        if isinstance(message, Parcel) and message.seat is None:  # its memory is used again, and it may be sent later
            message = with_data(message, message.payload.data_NB.copy())
        for later, what in self.fault(message):
            self._mail.append((self._n_pumped + later, name, what))

    def _pump(self) -> None:
        self._n_pumped += 1
        due = [one for one in self._mail if one[0] < self._n_pumped]
        self._mail = deque(one for one in self._mail if one[0] >= self._n_pumped)
        for _, name, message in due:
            self.on_message(name, message)
            if name in self.workers:
                self.workers[name].take(message)
        for name, worker in list(self.workers.items()):
            for _ in range(self.batch_steps):
                worker.step()
            self.core.deliver(name, worker.batch())

    def check(self) -> None:
        """Every block is accounted for, nothing is held, and nobody waits for anything."""
        for _ in range(3):
            self._pump()
        for worker in self.workers.values():
            assert self.fault is not no_fault or not worker._reader._slots.n_in_use, "memory lent to others is back"
            worker.core.check()
            counts = worker.counts()
            assert (counts.core.blocks_in_use, counts.receiving, counts.reading) == (0, 0, 0), worker.name
            assert not worker.core.waits_for_others, Status.SENDING
        assert not self.core._open
        assert all(at == type(at)() for at in self.core._router._at), "the router's books balance"

    def total(self, name: str) -> int:
        return sum(getattr(worker.counts(), name) for worker in self.workers.values())

    def reasons(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for worker in self.workers.values():
            for reason, number in getattr(worker.counts(), name).items():
                found[reason] = found.get(reason, 0) + number
        return found


class _NoExecutor(ModelExecutor):
    def __init__(self) -> None:
        """The door computes nothing."""


def with_data(parcel: Parcel, data_NB: np.ndarray) -> Parcel:
    return replace(parcel, payload=replace(parcel.payload, data_NB=data_NB))


def data_of(parcel: Parcel) -> np.ndarray:
    """Its bytes, wherever they lie, to be changed there."""
    if parcel.seat is None:
        return parcel.payload.data_NB
    memory = Mapped().memory(parcel.seat)
    memory.flags.writeable = True
    n_blocks = len(parcel.digests)
    return memory[: n_blocks * parcel.payload.header.block_bytes].reshape(n_blocks, -1)


def flipped(parcel: Parcel) -> Parcel:
    """The same with one bit changed."""
    data = data_of(parcel)
    data[-1, len(data[-1]) // 2] ^= 4
    return parcel
