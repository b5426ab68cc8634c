"""Several simulations at one time: a map whose answers come in the order of what was asked, whoever worked on them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
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


def _begin() -> None:
    """In each process. Ctrl-C reaches all of a terminal's, and the one that asked ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _teach()


def _rebuilt(table: MappingProxyType[object, object]) -> tuple[Callable[..., object], tuple[dict[object, object]]]:
    return _read_only, (dict(table),)


def _read_only(table: dict[object, object]) -> MappingProxyType[object, object]:
    return MappingProxyType(table)


@contextmanager
def workers(processes: int) -> Iterator[Mapped]:
    """A map over so many processes; over none but this one for 1. What is asked and answered must be picklable."""
    Bound(int, 1, MAX_PROCESSES, "processes").take("processes", processes, ConfigError)
    if processes == 1:
        yield map
        return
    _teach()
    with get_context("spawn").Pool(processes, initializer=_begin) as pool:
        yield pool.imap
