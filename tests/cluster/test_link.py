"""What the door says to a worker arrives in the order in which it was said."""

from __future__ import annotations

import random
from types import SimpleNamespace

from diptych.cluster.link import DoorLink, InOrder
from diptych.cluster.messages import Cancel, ToWorker


def test_calls_that_overtake_each_other_are_taken_in_order() -> None:
    """A client that left before its long prompt had come was answered to the end: the word of it came first."""
    calls: list[tuple[str, int, ToWorker]] = []
    actor = SimpleNamespace(tell=SimpleNamespace(remote=lambda *call: calls.append(call)))
    link = DoorLink(actor, "first")
    said = [Cancel(request_id=str(n)) for n in range(20)]
    for message in said:
        link.send(message)
    random.Random(1).shuffle(calls)
    taken: list[ToWorker] = []
    ordered = InOrder(taken.append)
    for incarnation, number, message in calls:
        assert incarnation == "first"
        ordered.put(number, message)
    assert taken == said
