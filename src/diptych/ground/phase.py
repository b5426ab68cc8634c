"""The words for the two phases and for the life of a sequence.

Owns: `Phase`, `Status`, and `MOVES`, the one table of legal status changes. Imports nothing of the project.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What a chunk of work does: read the prompt in parallel, or write one token from the cache."""

    PREFILL = "prefill"
    DECODE = "decode"


class Status(Enum):
    """Where a sequence stands. `MOVES` says which change is legal."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SENDING = "sending"
    RECEIVING = "receiving"
    FINISHED = "finished"


# A preempted sequence goes back to WAITING and is computed again from its known tokens. One whose prompt is read by one
# engine and answered by another is SENDING there and RECEIVING here until its keys and values have come, or will not:
# then it is WAITING here with the blocks that it has.
MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.RECEIVING, Status.FINISHED}),
    Status.PREFILL: frozenset({Status.DECODE, Status.SENDING, Status.WAITING, Status.FINISHED}),
    Status.DECODE: frozenset({Status.WAITING, Status.FINISHED}),
    Status.SENDING: frozenset({Status.FINISHED}),
    Status.RECEIVING: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why a sequence ended. `value` is the word the HTTP contract uses."""

    STOP = "stop"  # an EOS id, a stop token id, a stop string, or a grammar that is complete
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # the client left or asked for it
    ERROR = "error"  # the engine failed while this request was open, or one of its sequences could not go on
