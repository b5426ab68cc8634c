"""`diptych serve` before workers whose links fail on order: what becomes of a message is in its request's id.

python tests/cluster/faulty_links_server.py serve --prefill 1 --decode 1     # "x-request-id: drop30-7"
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from diptych.cli import main
from diptych.ground.config import quiet_ray

quiet_ray(is_local=True)
from diptych.cluster import rays  # noqa: E402  # ray reads its environment when it is imported
from diptych.cluster.messages import Done, Parcel, Read, ToWorker  # noqa: E402
from diptych.cluster.process import WorkerProcess  # noqa: E402
from diptych.cluster.slots import Mapped  # noqa: E402
from diptych.cluster.worker import Worker  # noqa: E402


def with_data(parcel: Parcel, data_NB: np.ndarray) -> Parcel:
    return replace(parcel, payload=replace(parcel.payload, data_NB=data_NB))


def flipped(parcel: Parcel) -> Parcel:
    """The same with one bit changed, where it lies."""
    if parcel.seat is None:
        data = parcel.payload.data_NB.copy()
        data[-1, len(data[-1]) // 2] ^= 4
        return with_data(parcel, data)
    memory = Mapped().memory(parcel.seat)
    memory.flags.writeable = True
    memory[parcel.payload.header.block_bytes // 2] ^= 4
    return parcel


def becomes(fault: str, message: ToWorker, rng: random.Random) -> list[tuple[float, ToWorker]]:
    """(seconds later, message), ..."""
    is_parcel = isinstance(message, Parcel)
    faults: dict[str, Callable[[], list[tuple[float, ToWorker]]]] = {
        "drop10": lambda: [] if is_parcel and rng.random() < 0.1 else [(0, message)],
        "drop30": lambda: [] if is_parcel and rng.random() < 0.3 else [(0, message)],
        "slow": lambda: [(5.0, message)],
        "late": lambda: [(5.0 if is_parcel else 0, message)],
        "reorder": lambda: [(rng.random() * 0.4, message)],
        "twice": lambda: [(0, message), (0.1, message)],
        "bit": lambda: [(0, flipped(message) if isinstance(message, Parcel) else message)],
        "lease": lambda: [(0, message)] if isinstance(message, Read) else [],
        "unsaid": lambda: [] if isinstance(message, Done) else [(0, message)],
    }
    return faults.get(fault, lambda: [(0, message)])()


class FaultyProcess(WorkerProcess):
    """A worker whose messages to others go wrong, and are many: two blocks to a parcel."""

    rng = random.Random(5)

    def __init__(self, *arguments: Any) -> None:
        Worker.__init__.__kwdefaults__["parcel_bytes"] = 100_000
        super().__init__(*arguments)

    def _send(self, name: str, message: Any) -> None:
        # the id as the door knows it: cmpl-drop30-7
        if isinstance(message, Parcel) and message.seat is None:  # its memory is used again, and it may be sent later
            message = with_data(message, message.payload.data_NB.copy())
        for later_s, what in becomes(message.request_id.split("-")[1], message, FaultyProcess.rng):
            if later_s:
                threading.Timer(later_s, super()._send, (name, what)).start()
            else:
                super()._send(name, what)


if __name__ == "__main__":
    rays.WorkerActor = rays.actor_class(FaultyProcess)
    sys.exit(main())
