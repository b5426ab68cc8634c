"""Several simulations at one time: a map whose answers come in the order of what was asked, whoever worked on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
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


@contextmanager
def workers(processes: int) -> Iterator[Mapped]:
    """A map over so many processes; over none but this one for 1. What is asked and answered must be picklable."""
    Bound(int, 1, MAX_PROCESSES, "processes").take("processes", processes, ConfigError)
    if processes == 1:
        yield map
        return
    with get_context("spawn").Pool(processes) as pool:
        yield pool.imap
