"""Rank 0's side of a model on several ranks: it starts their processes, tells them what to do, and notices when one is gone.

A rank other than 0 is `python -m diptych.compute.rank`. All share one anonymous file (`memfd`), which is handed down by its
descriptor and is gone with the last of them: no named segment can stay behind. Steps are posted by the native program; all
else (loading, making a KV cache, copying blocks) is a message of a few bytes of JSON and a payload, and ends, as a step does,
with one meeting of all ranks.

Whoever dies breaks the team. Rank 0 waits for its children on a thread each, and a meeting that waits is told at once; a rank
whose rank 0 is gone ends itself (`compute.rank`), whatever rank 0 died of.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from diptych.compute.ops.cpu.kernels import _cpu
from diptych.compute.ops.cpus import Placement, allowed_cpus
from diptych.compute.ops.shares import Rank, rank_placements
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    ExecutorError,
    LoadError,
    UnsupportedModel,
    WorkerLost,
)

logger = logging.getLogger("diptych.compute")

END_S = 5.0  # for ranks to leave by themselves
ANSWER_BYTES = 1024
NOTICE_S = 1.0  # for the system to say who it was that died
_HEAD = struct.Struct("<q")
# what may go wrong with a part as with the whole, and is said as the same error
_TOLD = {kind.__name__: kind for kind in (LoadError, UnsupportedModel, ConfigError, CapacityError)}
TeamBroken: type[Exception] = _cpu.TeamBroken if _cpu is not None else RuntimeError


class Verb(IntEnum):
    """What rank 0 asks of the others; 0 is a step (csrc/program/program_run.cpp)."""

    LOAD = 1
    MAKE_KV = 2
    BACK_KV = 3
    COPY = 4
    EXPORT = 5
    IMPORT = 6
    READ = 7
    WRITE = 8
    ADD_ADAPTER = 9
    DROP_ADAPTER = 10
    KNOW_WRITTEN = 11
    END = 12


def pack(head: dict[str, Any], payload: bytes = b"") -> bytes:
    """A message: the length of the JSON, the JSON, the payload."""
    text = json.dumps(head).encode()
    return _HEAD.pack(len(text)) + text + payload


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """What `pack` packed."""
    (n,) = _HEAD.unpack_from(message)
    head: dict[str, Any] = json.loads(message[_HEAD.size : _HEAD.size + n])
    return head, message[_HEAD.size + n :]


def outputs_view(team: Any, shape: Sequence[int], dtype: type[np.generic]) -> np.ndarray:
    """An array in the memory that ranks give results back in."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    view: np.ndarray = team.outputs(nbytes)[:nbytes].view(dtype).reshape(shape)
    return view


def gathered(team: Any, own: np.ndarray, slot_bytes: int) -> np.ndarray:
    """What every rank gives, [size, slot_bytes], own at the beginning of its slot; for rank 0 to know."""
    slots = outputs_view(team, (team.size, slot_bytes), np.uint8)
    data = np.ascontiguousarray(own).reshape(-1).view(np.uint8)
    slots[team.rank, : len(data)] = data
    team.gather(slot_bytes)
    return slots


def answer(team: Any, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What this rank says to what was asked of all, no longer than ANSWER_BYTES; what all have said, for rank 0 to know."""
    text = json.dumps(said).encode().ljust(ANSWER_BYTES)
    slots = gathered(team, np.frombuffer(text, dtype=np.uint8), ANSWER_BYTES)
    return [json.loads(one.tobytes()) for one in slots] if team.rank == 0 else []


def raised(what: str, said: dict[str, Any]) -> EngineError:
    """The error that a rank's answer tells of."""
    if said["error"] == MemoryError.__name__:
        return CapacityError(f"{what}: it has no memory for it")
    return _TOLD.get(said["error"], ExecutorError)(f"{what}: {said['message']}")


class _Watch:
    """Who is gone, and who wants to know. Shared with threads that must not keep the ranks alive."""

    def __init__(self) -> None:
        self.is_ending = False
        self.gone: dict[int, str] = {}  # rank -> how it ended
        self.noticed = threading.Event()
        self.listeners: list[Callable[[], object]] = []

    def wait_for(self, number: int, process: subprocess.Popen[bytes], team: Any) -> None:
        """Until the process ends; without being asked to, it breaks the team."""
        self.lose(number, _end_of(process.wait()), team)

    def lose(self, number: int, how: str, team: Any) -> None:
        """A rank is gone."""
        if self.is_ending:
            return
        if not team.is_broken:  # else it left because of another
            self.gone[number] = how
            team.break_up()
        self.noticed.set()
        for tell in tuple(self.listeners):
            tell()


class Ranks:
    """The ranks beside rank 0, as processes. One message at a time: hold `lock` around whatever posts one."""

    def __init__(self, size: int, config: ComputeConfig) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(f"tp is {size}; ranks share memory as Linux has it", hint="leave tp out")
        cpus = allowed_cpus()
        self.placements = rank_placements(size, config.threads, config.numa, cpus)
        self._begin(size, is_crowded=sum(placement.threads for placement in self.placements) > len(cpus))
        self._fd = os.memfd_create("diptych", os.MFD_CLOEXEC)
        try:
            self.team = _cpu.Team(self._fd, 0, size, self.is_crowded)
        except MemoryError as error:
            os.close(self._fd)
            raise CapacityError("the system has no shared memory for ranks to meet in") from error
        others: list[Any] = []
        self._ends_with(_end_ranks, self.watch, self.team, self._fd, others)
        try:
            for number in range(1, size):
                others.append(self._start(number))
        except BaseException:
            self._end()
            raise

    def _begin(self, size: int, *, is_crowded: bool) -> None:
        self.size = size
        self.is_crowded = is_crowded
        self.lock = threading.RLock()
        self.watch = _Watch()

    def _ends_with(self, end: Callable[..., None], *arguments: Any) -> None:
        self._end = weakref.finalize(self, _if_ours, os.getpid(), end, *arguments)

    def rank(self, number: int) -> Rank:
        """What rank `number` knows of itself."""
        return Rank(number=number, size=self.size, team=self.team, placement=self.placements[number])

    def _start(self, number: int) -> Any:
        arguments = [str(n) for n in (self._fd, number, self.size, int(self.is_crowded), os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "diptych.compute.rank", *arguments],  # -P: no module out of the current folder
            pass_fds=(self._fd,),
            stdin=subprocess.DEVNULL,
            # a signal to the group (Ctrl-C, a shell's kill) is rank 0's to answer: it ends its requests first
            start_new_session=True,
        )
        watching = (number, process, self.team)
        threading.Thread(target=self.watch.wait_for, args=watching, daemon=True, name=f"diptych-rank-{number}").start()
        return process

    def tell(
        self, verb: Verb, head: dict[str, Any], payload: bytes = b"", *, own: Callable[[], object] = lambda: None
    ) -> None:
        """Have every rank do it, rank 0 by `own`, and wait for all. Raises what it was that failed, or WorkerLost."""
        with self.lock:
            self.check()
            message = pack(head, payload)
            self.team.message(len(message))[:] = np.frombuffer(message, dtype=np.uint8)
            try:
                self.team.post(int(verb), len(message))
                own()
                self.team.meet()
            except TeamBroken as error:
                raise self.failure() from error
            except BaseException:
                self.end()  # the others wait in the middle of something
                raise

    def ask(
        self, verb: Verb, head: dict[str, Any], payload: bytes = b"", *, own: Callable[[], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """As `tell`, and the answers of all ranks in their order; `own` gives rank 0's."""
        said: list[dict[str, Any]] = []
        self.tell(verb, head, payload, own=lambda: said.extend(answer(self.team, own())))
        return said

    def check(self) -> None:
        """Raise what `failure` says where not all ranks are there any more."""
        if self.team.is_broken:
            raise self.failure()

    def failure(self) -> EngineError:
        """Why the team is broken."""
        for number in range(1, self.size):
            kind, _, text = self._said_by(number).partition("|")
            message, _, hint = text.partition("\nhint: ")
            if kind in _TOLD:
                return _TOLD[kind](message, hint=hint or None)
            if kind:
                return WorkerLost(f"rank {number} of {self.size} failed: {kind}: {message}")
        self.watch.noticed.wait(NOTICE_S)
        gone = ", ".join(f"rank {number} {how}" for number, how in sorted(self.watch.gone.items()))
        return WorkerLost(
            f"the engine computes with {self.size} processes, and not all are there any more: {gone or 'they were ended'}",
            hint="start the engine again; the system's log says whether memory ran out",
        )

    def _said_by(self, number: int) -> str:
        return str(self.team.error_of(number))

    def end(self) -> None:
        """Let the other ranks go and wait for them."""
        self._end()


def _end_of(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _if_ours(owner: int, end: Callable[..., None], *arguments: Any) -> None:
    if os.getpid() == owner:  # a fork of rank 0 that ends has no say
        end(*arguments)


def _end_ranks(watch: _Watch, team: Any, fd: int, others: list[Any]) -> None:
    watch.is_ending = True
    team.break_up()
    for process in others:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    os.close(fd)


def placement_head(placement: Placement) -> dict[str, Any]:
    """A placement as JSON."""
    return {"threads": placement.threads, "cpus": list(placement.cpus), "nodes": list(placement.nodes)}


def placement_of(head: dict[str, Any]) -> Placement:
    """And back."""
    return Placement(threads=head["threads"], cpus=tuple(head["cpus"]), nodes=tuple(head["nodes"]))
