"""Both ends of the door's way to a worker: messages arrive in the order in which they were sent.

Ray promises none to an actor of several threads. A prompt of some 30k tokens travels through its object store, and the word
that its client has left would overtake it: the worker would answer nobody, to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from diptych.cluster.messages import ToWorker


class Link(Protocol):
    """The way to one worker. What is sent may be lost if the worker dies; then the cluster is told that it is lost."""

    def send(self, message: ToWorker) -> None:
        """Have the worker take a message, soon and in order."""
        ...


class DoorLink:
    """A `Link` to one incarnation of a worker."""

    def __init__(self, actor: Any, incarnation: str) -> None:
        self._actor, self._incarnation = actor, incarnation
        self._n_sent = 0

    def send(self, message: ToWorker) -> None:
        """See Link."""
        self._actor.tell.remote(self._incarnation, self._n_sent, message)
        self._n_sent += 1


class InOrder:
    """At the worker: hands on by number, from 0."""

    def __init__(self, take: Callable[[ToWorker], object]) -> None:
        self._take = take
        self._early: dict[int, ToWorker] = {}
        self._n_taken = 0

    def put(self, number: int, message: ToWorker) -> None:
        """A message as it came."""
        self._early[number] = message
        while self._n_taken in self._early:
            self._take(self._early.pop(self._n_taken))
            self._n_taken += 1
