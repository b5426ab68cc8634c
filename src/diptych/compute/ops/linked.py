"""Ranks on several machines: `torch.distributed` (gloo) carries what ranks of one machine have in shared memory.

A carrier is what a native team calls at its meetings (csrc/threads/team.h, Link). Three groups of connections: one for the
gatherings of a step, one for what rank 0 asks (which may wait for hours), one over which rank 0 and each other say that they
are there. Who dies closes its connections, and whoever waits on one is told by the system; a machine that falls silent is
given up after LOST_S, and with it whatever waits for it. Nothing is encrypted and nobody is asked who he is: for networks
whose machines trust each other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from diptych.compute.ops.cpu.kernels import _cpu
from diptych.compute.ops.cpus import Placement, allowed_cpus, choose_cpus
from diptych.compute.ops.ranks import Ranks, Verb
from diptych.ground.clock import MonotonicClock, sleep_s
from diptych.ground.config import ComputeConfig, host_and_port
from diptych.ground.errors import ConfigError, EngineError, WorkerLost
from diptych.ground.version import VERSION

logger = logging.getLogger("diptych.compute")

JOIN_S = 300.0  # for all ranks to come
STEP_S = 60.0  # the longest that one rank may be behind another within a step
LOST_S = 20.0  # without a sign of life
PULSE_S = 0.5
HEARD_S = 5.0  # for others to hear why they are refused
RETRY_S = 0.2
LOOK = timedelta(seconds=1)  # while somebody is waited for: whether anybody is given up
FRAME_BYTES = 16384  # of a message's first piece: most steps fit
_FRAME = struct.Struct("<qq")  # kind, bytes
_FOR_EVER = timedelta(days=3650)
STEP = 0


class Carrier:
    """One rank's connections to the others. What the team calls raises nothing: it answers False, and `error` says why."""

    def __init__(self, address: str, number: int, size: int, *, join_s: float = JOIN_S) -> None:
        """Waits for all ranks. ConfigError where they do not come, or are others than rank 0 asks for."""
        host, port = host_and_port(address)
        self.number, self.size = number, size
        self.error = ""
        self.is_ending = threading.Event()
        self._is_given_up = threading.Event()
        self._to_send: queue.SimpleQueue[list[torch.Tensor] | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._kind = int(Verb.LOAD)
        self._token = torch.zeros(1, dtype=torch.uint8)
        self._store = _store(host, port, number, size, join_s)
        try:
            self._greet(join_s)
            own = host if number == 0 else _own_address(host, port)
            self._steps, self._calls, self._pulse = (
                self._group(name, own, limit)
                for name, limit in (
                    ("steps", timedelta(seconds=STEP_S)),
                    ("calls", _FOR_EVER),
                    ("pulse", timedelta(seconds=LOST_S)),
                )
            )
        except RuntimeError as error:
            raise ConfigError(f"the ranks at {address} could not be joined: {_line(error)}") from error

    def _greet(self, join_s: float) -> None:
        """Rank 0 looks at who has come and says whether they go on; all of them raise the same."""
        limit = timedelta(seconds=join_s)
        if self.number > 0:
            place = f"rank {self.number}"
            if self._store.add(f"{place} came", 1) > 1:
                raise ConfigError(f"there is a {place} already", hint="each rank has a number of its own")
            self._store.set(place, json.dumps({"version": VERSION, "size": self.size, "torch": torch.__version__}))
            self._store.wait(["refusal"], limit)
            refusal, size = self._store.get("refusal").decode(), int(self._store.get("size"))
            self._store.set(f"heard {self.number}", "")
            if not refusal and self.number >= size:  # rank 0 looks for nobody of that number
                refusal = f"{place} has size {self.size}, and rank 0 has {size}"
        else:
            self._store.set("size", str(self.size))
            refusal = self._refusal(limit)
            self._store.set("refusal", refusal)
            if refusal:  # the store goes with this process, and with it what the others would hear
                self._wait_for_listeners()
        if refusal:
            raise ConfigError(refusal)

    def _wait_for_listeners(self) -> None:
        came = [number for number in range(1, self.size) if self._store.check([f"rank {number}"])]
        if came:
            with contextlib.suppress(RuntimeError):
                self._store.wait([f"heard {number}" for number in came], timedelta(seconds=HEARD_S))

    def _refusal(self, limit: timedelta) -> str:
        for number in range(1, self.size):
            try:
                self._store.wait([f"rank {number}"], limit)
            except RuntimeError:
                return f"rank {number} of {self.size} has not come within {limit.total_seconds():.0f} s"
            said = json.loads(self._store.get(f"rank {number}"))
            wanted = {"version": VERSION, "size": self.size, "torch": torch.__version__}
            for name, value in wanted.items():
                if said.get(name) != value:
                    return f"rank {number} has {name} {said.get(name)}, and rank 0 has {value}"
        return ""

    def _group(self, name: str, own: str, limit: timedelta) -> Any:
        # the public ways (GLOO_SOCKET_IFNAME, init_process_group) bind to an interface, which may have several addresses, and
        # are one for the whole process
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=own)
        ]  # that address, and no other of this machine
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), self.number, self.size, options)

    # ---- what the team calls ----

    def meet(self) -> bool:
        """All ranks have come here."""
        return self._gathered([self._token.clone() for _ in range(self.size)], self._token)

    def gather(self, slots: np.ndarray) -> bool:
        """slots [size, bytes]: each rank has written its own; then all are there."""
        # memory of its own: what was given up is still written to where the others come back
        every = torch.empty(slots.shape, dtype=torch.uint8)
        is_there = self._gathered(list(every), torch.from_numpy(slots[self.number]))
        if is_there:
            slots[:] = every.numpy()
        return is_there

    def _gathered(self, every: list[torch.Tensor], own: torch.Tensor) -> bool:
        group = self._steps if self._kind == STEP else self._calls
        return self._try(lambda: self._wait(group.allgather([every], [own])))

    def _wait(self, work: Any) -> None:
        """Until it is done, or a rank is given up; gloo by itself waits as long as a group may."""
        while not self._is_given_up.is_set():
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it failed of
                    return
        raise RuntimeError("a rank was given up")

    def post(self, kind: int, data: bytes) -> bool:
        """Rank 0's message to all."""
        self._kind = kind
        frame = bytearray(FRAME_BYTES)
        begin = data[: FRAME_BYTES - _FRAME.size]
        _FRAME.pack_into(frame, 0, kind, len(data))
        frame[_FRAME.size : _FRAME.size + len(begin)] = begin
        pieces = [torch.frombuffer(frame, dtype=torch.uint8)]
        if len(data) > len(begin):
            pieces.append(torch.frombuffer(bytearray(data[len(begin) :]), dtype=torch.uint8))

        return self._try(lambda: self._send(pieces))

    def _send(self, pieces: list[torch.Tensor]) -> None:
        """Until all ranks read them, or one is given up. By a thread of its own: nothing ends the wait for a reader who fell
        silent before it asked, and a wait in pieces closes all connections.
        """
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_each, daemon=True, name="diptych-sender")
            self._sender.start()
        self._to_send.put(pieces)
        while not self._is_given_up.is_set():
            with contextlib.suppress(queue.Empty):
                error = self._sent.get(timeout=LOOK.total_seconds())
                if error is not None:
                    raise error
                return
        raise RuntimeError("a rank was given up")

    def _send_each(self) -> None:
        """What comes to be sent, until None comes."""
        for pieces in iter(self._to_send.get, None):
            error = None
            try:
                for piece in pieces:
                    for work in [self._calls.send([piece], other, 0) for other in range(1, self.size)]:
                        work.wait(timedelta(seconds=STEP_S))  # who has met at the last message reads the next
            except RuntimeError as failure:
                error = failure
            self._sent.put(error)

    def next(self) -> tuple[int, bytes] | None:
        """Rank 0's next message, however long it takes."""
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        if not self._try(lambda: self._calls.recv([frame], 0, 0).wait()):
            return None
        self._kind, n = _FRAME.unpack_from(frame.numpy().tobytes())
        data = frame.numpy()[_FRAME.size : _FRAME.size + n].tobytes()
        if n > len(data):
            rest = torch.empty(n - len(data), dtype=torch.uint8)
            if not self._try(lambda: self._calls.recv([rest], 0, 0).wait()):
                return None
            data += rest.numpy().tobytes()
        return self._kind, data

    def _try(self, carry: Callable[[], object]) -> bool:
        try:
            carry()
        except RuntimeError as error:
            self.error = self.error or _line(error)
            return False
        except KeyboardInterrupt:  # nobody knows how far it came, so the others cannot go on with this rank
            self.error = self.error or "interrupted"
            return False
        return True

    # ---- who is there ----

    def watch(self, lost: Callable[[int, str], object]) -> None:
        """Have `lost(rank, why)` called, on a thread, when a rank is gone or silent; ranks but 0 watch rank 0 alone."""
        others = range(1, self.size) if self.number == 0 else (0,)
        for other in others:
            threading.Thread(target=self._beat, args=(other, lost), daemon=True, name=f"diptych-pulse-{other}").start()

    def _beat(self, other: int, lost: Callable[[int, str], object]) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        try:
            while not self.is_ending.is_set():
                for is_sending in (self.number == 0, self.number != 0):
                    (self._pulse.send if is_sending else self._pulse.recv)([token], other, 0).wait()
                if self.number == 0:
                    self.is_ending.wait(PULSE_S)
        except RuntimeError as error:
            if not self.is_ending.is_set():
                lost(other, _line(error))

    def give_up(self) -> None:
        """A rank is gone: whoever waits for it here stops, at the latest after LOOK. It may have closed nothing."""
        self._is_given_up.set()

    def end(self) -> None:
        """Nothing is sent any more."""
        self._to_send.put(None)

    def say_error(self, text: str) -> None:
        """Where rank 0 finds it, if that is still there."""
        try:
            self._store.set(f"error {self.number}", text)
        except RuntimeError:
            logger.error("rank %d failed, and rank 0 cannot be told: %s", self.number, text)

    def error_of(self, number: int) -> str:
        """What a rank has said of its end."""
        name = f"error {number}"
        return self._store.get(name).decode() if self._store.check([name]) else ""


def _store(host: str, port: int, number: int, size: int, join_s: float) -> Any:
    """Where ranks find each other: rank 0 listens at that address alone (by itself the store would listen at all)."""
    fd = None
    if number == 0:
        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen at {host}:{port}: {error.strerror or error}",
                hint="tp_address is an address of this machine, and a port that nobody has",
            ) from error
        fd = listener.detach()
    else:
        _reach(host, port, join_s)
    try:
        limit = timedelta(seconds=join_s)
        # use_libuv: with it the store of torch 2.7 takes no listening socket
        return dist.TCPStore(
            host, port, size, number == 0, limit, wait_for_workers=False, master_listen_fd=fd, use_libuv=False
        )
    except RuntimeError as error:
        raise ConfigError(f"what listens at {host}:{port} is no rank 0: {_line(error)}") from error


def _reach(host: str, port: int, join_s: float) -> None:
    """Waits until somebody listens there; the store's own waiting is loud."""
    clock = MonotonicClock()
    deadline_s = clock.now_s() + join_s
    while True:
        try:
            socket.create_connection((host, port), timeout=join_s).close()
            return
        except OSError as error:
            if clock.now_s() > deadline_s:
                raise ConfigError(
                    f"rank 0 is not at {host}:{port} after {join_s:.0f} s: {error.strerror or error}",
                    hint="start rank 0, too",
                ) from error
            sleep_s(RETRY_S)


def _own_address(host: str, port: int) -> str:
    """Of this machine, as rank 0's sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _line(error: BaseException) -> str:
    """What gloo and the store say, without where in their sources, and without advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0][:200]


class LinkedRanks(Ranks):
    """Rank 0's side: the others are started by hand, on machines of their own (`diptych rank`)."""

    def __init__(self, size: int, config: ComputeConfig) -> None:
        assert config.tp_address is not None
        cpus = allowed_cpus()
        own = choose_cpus(config.threads, config.numa, cpus)
        self.placements = [own, *[Placement(threads=0)] * (size - 1)]
        self._begin(size, is_crowded=own.threads > len(cpus))
        logger.info("waiting for %d ranks at %s", size - 1, config.tp_address)
        self._carrier = carrier = Carrier(config.tp_address, 0, size)
        self._fd = os.memfd_create("diptych", os.MFD_CLOEXEC)
        self.team = team = _cpu.Team(self._fd, 0, size, self.is_crowded, carrier)
        watch = self.watch

        def lost(number: int, why: str) -> None:
            if not watch.is_ending:
                watch.gone[number] = how = f"is gone ({why})"  # a step may have broken the team before
                watch.lose(number, how, team)
                carrier.give_up()

        carrier.watch(lost)
        self._ends_with(_end_linked, self.watch, team, self._fd, carrier)

    def _said_by(self, number: int) -> str:
        return self._carrier.error_of(number)

    def failure(self) -> EngineError:
        """As Ranks, with what the connection said."""
        error = super().failure()
        if isinstance(error, WorkerLost) and not self.watch.gone and self._carrier.error:
            return WorkerLost(f"{error.message}: {self._carrier.error}", hint=error.hint)
        return error


def _end_linked(watch: Any, team: Any, fd: int, carrier: Carrier) -> None:
    watch.is_ending = True
    carrier.is_ending.set()  # whoever closes now is not lost
    if not team.is_broken:
        carrier.post(int(Verb.END), b"")
    carrier.end()
    team.break_up()
    os.close(fd)
