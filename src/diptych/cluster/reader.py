"""Prompts that a worker reads for others: computed here, sent block by block, answered there (`cluster.worker` is that side).

A reading begins with a `Read` and ends with a `Done`, whatever happens in between; the blocks that each step completes go out
behind it, in memory that who asked can map (`cluster.slots`) or as arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diptych.cluster.messages import Done, Parcel, Read, StateParcel, StopReading, ToWorker
from diptych.cluster.slots import Seat, Slots
from diptych.cluster.worker_spans import WorkerSpans
from diptych.compute.kv_store import KVPayload
from diptych.control.blocks import chain, root_digest
from diptych.engine.load import Machinery
from diptych.ground.clock import Clock
from diptych.ground.errors import EngineError
from diptych.ground.events import Event, FinishEvent, ScheduledEvent, StepBeginEvent, StepEndEvent
from diptych.ground.phase import FinishReason
from diptych.ground.request import READ_ONLY, Request

logger = logging.getLogger("diptych.cluster")

# of one parcel at most. Ray takes 0.6 ms of processor time for an object of any size, as long as copying 4 MiB
PARCEL_BYTES = 16 * 2**20
N_SLOTS = 4  # parcels on their way that others on this machine read where they lie; more go through the object store
NO_DATA = np.empty((0, 0), dtype=np.uint8)


@dataclass(slots=True)
class Reading:
    """A prompt that is read here for another worker."""

    order: Read
    arrival_s: float
    sent_blocks: int
    digests: list[bytes]
    begin_s: float | None = None
    end_s: float | None = None
    fault: str | None = None
    predicted_s: float | None = 0.0  # what was expected of the steps it was read in
    step_id: int | None = None  # the last of them

    def scheduled(self, step: StepBeginEvent) -> None:
        """A chunk of it is in this step; another may have been before."""
        if self.begin_s is None:
            self.begin_s = step.at_s
        if step.step_id != self.step_id:
            self.step_id = step.step_id
            both = (self.predicted_s, step.predicted_s)
            self.predicted_s = None if None in both else sum(one or 0.0 for one in both)


class Reader:
    """See the module. Its worker owns it, and calls `send_what_is_ready` after every step."""

    def __init__(
        self,
        name: str,
        machinery: Machinery,
        *,
        clock: Clock,
        send: Callable[[str, ToWorker], None],
        spans: WorkerSpans,
        lease_s: float,
        parcel_bytes: int,
        machine: str | None,
    ) -> None:
        """lease_s: for how long a slot is lent. The rest as of `Worker`."""
        self._name = name
        self._core, self._executor = machinery.core, machinery.executor
        self._lineage = self._executor.lineage
        self._clock, self._send, self._spans = clock, send, spans
        self._lease_s = lease_s
        # blocks of a parcel, always in the same memory: new pages are a fault each
        self._parcel_blocks = max(1, parcel_bytes // max(self._executor.block_bytes, 1))  # which may have none
        self._room = np.empty((self._parcel_blocks, self._executor.block_bytes), dtype=np.uint8)
        self._machine = machine
        self._slots = Slots(name, N_SLOTS if machine is not None and self._room.nbytes else 0, self._room.nbytes)
        self._step: StepBeginEvent | None = None  # in flight, or the last
        self._reading: dict[str, Reading] = {}
        self._read_of: dict[tuple[str, str], str] = {}  # (who wants it, its request) -> ours
        self._n_read = 0
        self.sent_tokens = self.sent_bytes = 0
        self.export_s = 0.0

    @property
    def n_reading(self) -> int:
        """Prompts that are not over."""
        return len(self._reading)

    def read(self, order: Read) -> None:
        """Put a prompt in line; what is wrong with it is said to who asked."""
        if (order.answer_to, order.request_id) in self._read_of:
            return  # a link may say a thing twice
        self._n_read += 1
        request_id, now_s = f"read-{self._n_read}", self._clock.now_s()
        request = Request(
            request_id=request_id,
            prompt_token_ids=order.token_ids,
            sampling=READ_ONLY,
            arrival_s=now_s,
            priority=order.priority,
            cache_salt=order.cache_salt,
        )
        try:
            self._core.submit_prefill(request)
        except EngineError as error:
            logger.warning("cannot read request=%s for=%s: %s", order.request_id, order.answer_to, error.message)
            done = Done(request_id=order.request_id, queue_s=0.0, read_s=0.0, fault="reader_refused")
            self._send(order.answer_to, done)
            return
        root, block_tokens = root_digest(self._lineage, order.cache_salt), self._core.pool.block_tokens
        digests = chain(order.token_ids, root, block_tokens, order.end_block)
        self._reading[request_id] = Reading(order, now_s, order.first_block, digests)
        self._read_of[order.answer_to, order.request_id] = request_id

    def stop(self, stop: StopReading) -> None:
        """Read no further, if it is not over."""
        request_id = self._read_of.get((stop.answer_to, stop.request_id))
        if request_id is not None:
            self._stop(request_id)

    def lost(self, name: str) -> None:
        """That worker is gone: read nothing for it any more."""
        self._slots.lost(name)
        for request_id, reading in list(self._reading.items()):
            if reading.order.answer_to == name:
                self._stop(request_id)

    def took(self, event: Event) -> bool:
        """Whether an event is of a prompt that is read here; what it says is kept for who asked, and theirs to count."""
        if isinstance(event, StepBeginEvent):
            self._step = event
        if isinstance(event, StepBeginEvent | StepEndEvent) or event.request_id not in self._reading:
            return False
        reading = self._reading[event.request_id]
        if isinstance(event, ScheduledEvent):
            assert self._step is not None, "a chunk is in a step"
            reading.scheduled(self._step)
        elif isinstance(event, FinishEvent):
            reading.fault = "reader_failed" if event.reason is FinishReason.ERROR else "reader_stopped"
            reading.end_s = event.at_s
        return True

    def _stop(self, request_id: str) -> None:
        order = self._reading.pop(request_id).order
        del self._read_of[order.answer_to, order.request_id]
        self._core.cancel(request_id, self._clock.now_s())

    def send_what_is_ready(self) -> None:
        """The blocks that steps have completed since the last call, and that it is over where it is."""
        for request_id, reading in list(self._reading.items()):
            if reading.fault is None:
                self._send_blocks(request_id, reading)
            if reading.end_s is None:
                continue
            fault = reading.fault or self._send_state(request_id, reading)
            order, begin_s = reading.order, reading.begin_s or reading.end_s
            del self._reading[request_id]
            del self._read_of[order.answer_to, order.request_id]
            if reading.fault is None:
                self._core.sent(request_id)
            self._spans.part(
                "read",
                order.trace,
                begin_s=begin_s,
                end_s=self._clock.now_s(),
                attributes={
                    "gen_ai.request.id": order.request_id,
                    "diptych.answers": order.answer_to,
                    "diptych.tokens": len(order.token_ids),
                    "diptych.blocks.sent": reading.sent_blocks - order.first_block,
                },
                error=fault,
            )
            done = Done(
                request_id=order.request_id,
                queue_s=begin_s - reading.arrival_s,
                read_s=reading.end_s - begin_s,
                predicted_s=reading.predicted_s,
                fault=fault,
            )
            self._send(order.answer_to, done)

    def _send_blocks(self, request_id: str, reading: Reading) -> None:
        order, block_tokens = reading.order, self._core.pool.block_tokens
        block_ids, computed_tokens = self._core.blocks_of(request_id)
        first, end = reading.sent_blocks, min(computed_tokens // block_tokens, order.end_block)
        if computed_tokens >= len(order.token_ids):
            reading.end_s = self._clock.now_s()
        begin_s = self._clock.now_s()
        while first < end:
            until = min(end, first + self._parcel_blocks)
            payload, seat = self._export(block_ids[first:until], order)
            parcel = Parcel(
                request_id=order.request_id,
                reader=self._name,
                lineage=self._lineage,
                first_block=first,
                digests=tuple(reading.digests[first:until]),
                payload=payload,
                seat=seat,
            )
            self._send(order.answer_to, parcel)
            self.sent_tokens += (until - first) * block_tokens
            self.sent_bytes += (until - first) * self._executor.block_bytes
            first = reading.sent_blocks = until
        self.export_s += self._clock.now_s() - begin_s  # without a seat, sending is a copy too, into the object store

    def _send_state(self, request_id: str, reading: Reading) -> str | None:
        """The state behind the blocks that were asked for; why it cannot be sent, where there is one."""
        order = reading.order
        if not self._executor.has_states:
            return None
        begin_s = self._clock.now_s()
        _, place = self._core.places_of(request_id, order.end_block * self._core.pool.block_tokens)
        if place is None:
            return "state_not_kept"
        payload = self._executor.export_state(place)
        parcel = StateParcel(
            request_id=order.request_id,
            reader=self._name,
            lineage=self._lineage,
            digest=reading.digests[-1],
            payload=payload,
        )
        self._send(order.answer_to, parcel)
        self.sent_bytes += payload.data_NB.nbytes
        self.export_s += self._clock.now_s() - begin_s
        return None

    def _export(self, block_ids: Sequence[int], order: Read) -> tuple[KVPayload, Seat | None]:
        """The blocks for who asked: in memory that it can map, where there is some, or as an array."""
        now_s = self._clock.now_s()
        may_share = self._machine is not None and order.machine == self._machine
        taken = self._slots.take(order.answer_to, now_s, now_s + self._lease_s) if may_share else None
        if taken is None:
            return self._executor.export_blocks(block_ids, self._room), None
        room = taken.memory[: self._room.nbytes].reshape(self._room.shape)
        payload = self._executor.export_blocks(block_ids, room)
        if not np.may_share_memory(payload.data_NB, room):  # ranks gather in memory of their own
            room[: len(block_ids)] = payload.data_NB
        return replace(payload, data_NB=NO_DATA), taken.seat
