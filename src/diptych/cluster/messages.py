"""What the door tells workers, what they tell it, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diptych.compute.kv_store import KVPayload
from diptych.control.stats import CoreStats
from diptych.ground.events import Event
from diptych.ground.handoff import HandOff


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Serve this request, all of it. reader: the worker that is to read its prompt; None: this one."""

    hand_off: HandOff
    reader: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The request is over, whatever became of it."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A choice is over: its text ended behind so many tokens."""

    request_id: str
    index: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """That worker is gone: nothing more will come from it."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPrefixes:
    """Drop every cached prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """From the worker that will answer: compute these tokens and send me blocks [first_block, end_block) as they are ready."""

    request_id: str
    answer_to: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    priority: int
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReading:
    """From the worker that had asked: it is not wanted any more."""

    request_id: str
    answer_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Computed blocks of a request, from `first_block` on. digests: of the chain of tokens that ends with each block."""

    request_id: str
    first_block: int
    digests: tuple[bytes, ...]
    payload: KVPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Everything that was to be read has been sent, or cannot be. queue_s: until it began; read_s: from there on."""

    request_id: str
    queue_s: float
    read_s: float
    fault: str | None = None


ToWorker = Submit | Cancel | Finish | Lost | ForgetPrefixes | Read | StopReading | Parcel | Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A worker's numbers: gauges of this moment, and counters since it began.

    recomputes: requests of which not everything came that was to come, by why; recomputed_tokens: what was read again for it.
    refused: parcels that were not taken in, by why. receiving, reading: requests whose keys and values are on their way here,
    or are computed here for others.
    """

    core: CoreStats
    receiving: int
    reading: int
    sent_tokens: int
    sent_bytes: int
    received_tokens: int
    received_bytes: int
    import_s: float
    export_s: float
    recomputed_tokens: int
    recomputes: Mapping[str, int]
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events of whole steps, in order, and the numbers behind them. now_s: the worker's clock."""

    events: list[Event]
    counts: Counts
    now_s: float
