"""Several simulations at one time: a map whose answers come in the order of what was asked, whoever worked on them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Protocol, TypeVar

from diptych.ground.bounds import Bound
from diptych.ground.errors import ConfigError

MAX_PROCESSES = 256
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Mapped(Protocol):
    """A lazy map in order."""

    def __call__(self, work: Callable[[Asked], Answer], asked: Iterable[Asked], /) -> Iterator[Answer]:
        """The answers."""
        ...


def _teach() -> None:
    """This process, and each of those, to send read-only tables, which specs are full of."""
    ForkingPickler.register(MappingProxyType, _rebuilt)


def _rebuilt(table: MappingProxyType[object, object]) -> tuple[Callable[..., object], tuple[dict[object, object]]]:
    return _read_only, (dict(table),)


def _read_only(table: dict[object, object]) -> MappingProxyType[object, object]:
    return MappingProxyType(table)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """A signal that comes within is raised behind it. Only the main thread is interrupted by signals: others need nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, before)
        if came:
            signal.raise_signal(number)


@contextmanager
def workers(processes: int) -> Iterator[Mapped]:
    """A map over so many processes; over none but this one for 1. What is asked and answered must be picklable.

    Ctrl-C reaches all processes of a terminal, and the one that asked ends the others. Each inherits that it waits for none of
    theirs: one that came before they have begun would leave some of them behind. SIGTERM, which ends them, waits until each has
    been told what it is to do, or they would complain.
    """
    Bound(int, 1, MAX_PROCESSES, "processes").take("processes", processes, ConfigError)
    if processes == 1:
        yield map
        return
    _teach()
    resource_tracker.ensure_running()  # the Pool would start it, and whoever does waits for SIGINT from there on
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _held_back(signal.SIGTERM):
            pool = get_context("spawn").Pool(processes, initializer=_teach)
        with pool:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield pool.imap
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
