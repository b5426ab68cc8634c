"""One engine of a pool: it answers requests, and takes in what other workers have read for it. No text.

Its owner gives it messages and calls `step`, on one thread. A prompt that another worker reads, by its `Reader`
(`cluster.reader`), goes this way:

    here: reserve blocks, `Read` ─> there: compute; after every step the blocks that it completed ─> here: check, import
    there: the state behind them, of models that have states; `Done` ─> here: settle, read the rest (at least the last token,
    at most a block more than came), answer

Whole blocks travel, and the first token is drawn where the answer is written, so no state of sampling travels at all.
A block is used only while its lease holds, and where layout, revision, tokens and checksum are right. What is not used is
computed here, and a counter says why: nothing that goes wrong on the way can change an answer.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from diptych.cluster.messages import (
    Batch,
    Cancel,
    Done,
    Finish,
    ForgetPrefixes,
    Heard,
    Lost,
    Parcel,
    Read,
    StateParcel,
    StopReading,
    Submit,
    ToWorker,
)
from diptych.cluster.reader import PARCEL_BYTES, Reader
from diptych.cluster.slots import Mapped, Seat
from diptych.cluster.underway import Coming, stats_with
from diptych.cluster.worker_spans import WorkerSpans
from diptych.compute.kv_store import KVPayload
from diptych.control.blocks import chain, root_digest
from diptych.control.policy import rank_of
from diptych.control.stats import WorkerCounts
from diptych.engine.load import Machinery
from diptych.engine.spans import Spans
from diptych.ground.clock import Clock
from diptych.ground.errors import EngineError, TransferError
from diptych.ground.events import Event, FinishEvent, TransferEvent
from diptych.ground.handoff import HandOff
from diptych.ground.phase import FinishReason
from diptych.stepper import Stepper

logger = logging.getLogger("diptych.cluster")

LEASE_S = 30.0  # without news of a reader; it may have a line before it
LATE_S = 1.0  # for what is still on its way when the reader says that it has sent everything


class Worker:
    """See the module. send(name, message): to another worker; it may be lost on the way. Its arrays are written over by the
    next one, so who does not send at once copies them.
    """

    def __init__(
        self,
        name: str,
        machinery: Machinery,
        *,
        clock: Clock,
        send: Callable[[str, ToWorker], None],
        takes_other_kernels: bool = False,
        lease_s: float = LEASE_S,
        late_s: float = LATE_S,
        parcel_bytes: int = PARCEL_BYTES,
        spans: Spans | None = None,
        machine: str | None = None,
    ) -> None:
        """takes_other_kernels: keys and values of the same model computed by another instruction set are used. They are equal
        within tolerance, so answers then depend in their last places on who read a prompt.
        machine: workers of an equal one can map each other's memory (`cluster.slots`); None: nobody's.
        """
        self.name = name
        self.core = machinery.core
        self._executor = machinery.executor
        self._clock = clock
        self._send = send
        self._spans = WorkerSpans(spans, name)
        self._lineage, self._takes_other_kernels = self._executor.lineage, takes_other_kernels
        self._lease_s, self._late_s = lease_s, late_s
        self._reader = Reader(
            name,
            machinery,
            clock=clock,
            send=send,
            spans=self._spans,
            lease_s=lease_s,
            parcel_bytes=parcel_bytes,
            machine=machine,
        )
        self._machine = machine
        self._mapped = Mapped()
        self._stepper = Stepper(self.core, self._executor, clock, fold=self._fold, observe=machinery.observe)
        self._events: list[Event | Heard] = []
        # no blocks could be held for them yet, and until when to try; in the order of the waiting line
        self._unplaced: list[tuple[float, Submit]] = []
        self._coming: dict[str, Coming] = {}
        self._received_tokens = self._received_bytes = 0
        self._import_s = 0.0
        self._recomputed_tokens = 0
        self._recomputes: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._lost_ends = 0
        self._handlers: dict[type, Callable[..., None]] = {
            Submit: self._on_submit,
            Cancel: self._on_cancel,
            Finish: self._on_finish,
            Lost: self._on_lost,
            ForgetPrefixes: lambda message: self.core.reset_prefix_cache(),
            Read: self._reader.read,
            StopReading: self._reader.stop,
            Parcel: self._on_parcel,
            StateParcel: self._on_state,
            Done: self._on_done,
        }

    @property
    def has_work(self) -> bool:
        """Whether a step may do something."""
        return self.core.has_work or bool(self._unplaced)

    @property
    def next_due_s(self) -> float | None:
        """When something has to be given up, if nothing happens before."""
        due = [one.lease_s for one in self._coming.values()] + [until_s for until_s, _ in self._unplaced]
        return min(due, default=None)

    def take(self, message: ToWorker) -> None:
        """Do what a message says; what is wrong with it is its request's end, or counted."""
        self._handlers[type(message)](message)

    def step(self) -> bool:
        """Give up what is overdue, run one step, send what it computed for others. False: there was nothing to do.

        Raises as `Stepper.step` does; the requests of the step have then ended with an error.
        """
        self._give_up_overdue()
        self._place()
        try:
            return self._stepper.step()
        finally:
            self._reader.send_what_is_ready()

    def batch(self) -> Batch:
        """Events since the last batch, and the numbers now."""
        events, self._events = self._events, []
        return Batch(events=events, counts=self.counts(), now_s=self._clock.now_s())

    def counts(self) -> WorkerCounts:
        """The numbers of this moment."""
        return WorkerCounts(
            core=stats_with(self.core, [one.hand_off for _, one in self._unplaced]),
            receiving=len(self._coming),
            reading=self._reader.n_reading,
            sent_tokens=self._reader.sent_tokens,
            sent_bytes=self._reader.sent_bytes,
            received_tokens=self._received_tokens,
            received_bytes=self._received_bytes,
            import_s=self._import_s,
            export_s=self._reader.export_s,
            recomputed_tokens=self._recomputed_tokens,
            recomputes=dict(self._recomputes),
            refused=dict(self._refused),
            lost_ends=self._lost_ends,
        )

    def _fold(self, events: list[Event]) -> None:
        """Keep what the door is to know; what is read for others is theirs to count."""
        for event in events:
            self._spans.fold(event)
            if not self._reader.took(event):
                self._events.append(event)

    # Answering

    def _on_submit(self, submit: Submit) -> None:
        self._spans.begin(submit.hand_off, self._clock.now_s())
        if submit.reader is None:
            self._resume(submit.hand_off)
        else:
            insort(self._unplaced, (self._clock.now_s() + self._lease_s, submit), key=self._rank)

    def _rank(self, unplaced: tuple[float, Submit]) -> float:
        request = unplaced[1].hand_off.request
        return rank_of(arrival_s=request.arrival_s, priority=request.priority, aging_s=self.core.config.aging_s)

    def _resume(self, hand_off: HandOff) -> None:
        try:
            self.core.resume(hand_off)
        except EngineError as error:
            self._fail(hand_off, error)

    def _fail(self, hand_off: HandOff, error: EngineError) -> None:
        for index, token_ids in enumerate(hand_off.output_token_ids):
            if token_ids is not None:
                end = FinishEvent(
                    request_id=hand_off.request.request_id,
                    index=index,
                    at_s=self._clock.now_s(),
                    reason=FinishReason.ERROR,
                    output_tokens=len(token_ids),
                    error=error,
                )
                self._spans.fold(end)
                self._events.append(end)

    def _on_cancel(self, cancel: Cancel) -> None:
        request_id, now_s = cancel.request_id, self._clock.now_s()
        self._unplaced = [one for one in self._unplaced if one[1].hand_off.request.request_id != request_id]
        coming = self._coming.pop(request_id, None)
        if coming is not None:
            self._stop_reader(coming)
        self.core.cancel(request_id, now_s)
        self._spans.end(request_id, now_s, error="cancelled")
        self._events.append(Heard(request_id))

    def _on_finish(self, finish: Finish) -> None:
        ended = self.core.finish(
            finish.request_id,
            finish.index,
            self._clock.now_s(),
            reason=FinishReason.STOP,
            output_tokens=finish.output_tokens,
        )
        for event in ended:
            self._spans.fold(event)

    def _on_lost(self, lost: Lost) -> None:
        """Go on without it, and read nothing for it any more."""
        self._mapped.lost(lost.name)
        for request_id, coming in list(self._coming.items()):
            if coming.submit.reader == lost.name:
                self._settle(request_id, "reader_lost")
        for number, (until_s, submit) in enumerate(self._unplaced):
            if submit.reader == lost.name:
                self._unplaced[number] = (until_s, replace(submit, reader=None))
        self._reader.lost(lost.name)

    # Taking in what another worker reads

    def _place(self) -> None:
        """Hold blocks for what is to come, in order, as long as there are some."""
        while self._unplaced:
            _, submit = self._unplaced[0]
            if submit.reader is None:
                del self._unplaced[0]
                self._resume(submit.hand_off)
                continue
            try:
                cached_tokens = self.core.reserve(submit.hand_off)
            except EngineError as error:
                del self._unplaced[0]
                self._fail(submit.hand_off, error)
                continue
            if cached_tokens is None:
                return
            del self._unplaced[0]
            self._ask(submit, cached_tokens)

    def _ask(self, submit: Submit, cached_tokens: int) -> None:
        request, known = submit.hand_off.request, submit.hand_off.known_token_ids
        block_tokens, now_s = self.core.pool.block_tokens, self._clock.now_s()
        first_block, end_block = cached_tokens // block_tokens, (len(known) - 1) // block_tokens
        digests = chain(known, root_digest(self._lineage, request.cache_salt), block_tokens, end_block)
        coming = Coming(submit, first_block, end_block, now_s, now_s + self._lease_s, digests)
        coming.needs_state = self._executor.has_states
        self._coming[request.request_id] = coming
        if first_block == end_block:  # all of it is here, though the door did not know
            self._settle(request.request_id)
            return
        assert submit.reader is not None
        order = Read(
            request_id=request.request_id,
            answer_to=self.name,
            # one more than the blocks hold, as the context allows: a reader that has them all computes this one only
            token_ids=known[: min(end_block * block_tokens + 1, self.core.context_limit_tokens - 2)],
            cache_salt=request.cache_salt,
            priority=request.priority,
            first_block=first_block,
            end_block=end_block,
            trace=request.trace,
            machine=self._machine,
        )
        self._send(submit.reader, order)

    def _on_parcel(self, parcel: Parcel) -> None:
        try:
            self._take_in(parcel)
        finally:
            if parcel.seat is not None:
                self._mapped.give_back(parcel.seat)

    def _take_in(self, parcel: Parcel) -> None:
        coming = self._coming.get(parcel.request_id)
        if coming is None:
            self._refused["late"] += 1
            # it may not have heard: what is long goes another way, and was overtaken by what was said after it
            self._send(parcel.reader, StopReading(request_id=parcel.request_id, answer_to=self.name))
            return
        begin_s = self._clock.now_s()
        coming.lease_s = begin_s + (self._lease_s if coming.done is None else self._late_s)
        end_block = parcel.first_block + len(parcel.digests)
        try:
            if not coming.first_block <= parcel.first_block < end_block <= coming.end_block:
                raise TransferError(
                    f"blocks {parcel.first_block} to {end_block} came; {coming.first_block} to {coming.end_block} were "
                    "asked for",
                    reason="range",
                )
            if list(parcel.digests) != coming.digests[parcel.first_block : end_block]:
                raise TransferError("the blocks are of other tokens or of another salt", reason="tokens")
            block_ids, _ = self.core.blocks_of(parcel.request_id)
            if not coming.arrived.isdisjoint(range(parcel.first_block, end_block)):
                return  # it is here already
            self._executor.import_blocks(block_ids[parcel.first_block : end_block], self._payload_of(parcel))
        except TransferError as error:
            self._refuse(parcel, coming, error)
            return
        coming.arrived.update(range(parcel.first_block, end_block))
        self._received_tokens += len(parcel.digests) * self.core.pool.block_tokens
        self._received_bytes += len(parcel.digests) * self._executor.block_bytes
        self._came(parcel.request_id, coming, begin_s)

    def _on_state(self, parcel: StateParcel) -> None:
        coming = self._coming.get(parcel.request_id)
        if coming is None or not coming.needs_state:
            self._refused["late"] += coming is None
            return
        begin_s = self._clock.now_s()
        try:
            if parcel.digest != coming.digests[coming.end_block - 1]:
                raise TransferError("the state is of other tokens or of another salt", reason="tokens")
            place, _ = self.core.places_of(parcel.request_id)
            assert place is not None, parcel.request_id
            self._executor.import_state(place, self._payload_of(parcel))
        except TransferError as error:
            self._refuse(parcel, coming, error)
            return
        coming.needs_state = False
        self._received_bytes += parcel.payload.data_NB.nbytes
        self._came(parcel.request_id, coming, begin_s)

    def _came(self, request_id: str, coming: Coming, begin_s: float) -> None:
        """Something was taken in from begin_s on."""
        if coming.is_complete:  # only the word that it is over may still be on its way, or lost
            coming.lease_s = begin_s + self._late_s
        self._import_s += self._clock.now_s() - begin_s
        self._settle_if_complete(request_id, coming)

    def _refuse(self, parcel: Parcel | StateParcel, coming: Coming, error: TransferError) -> None:
        self._refused[error.reason] += 1
        coming.refused = error.reason
        logger.warning("parcel refused request=%s reason=%s: %s", parcel.request_id, error.reason, error.message)

    def _payload_of(self, parcel: Parcel | StateParcel) -> KVPayload:
        """What came, from where it lies, as our own where it may stand for it."""
        payload = parcel.payload
        if isinstance(parcel, Parcel) and parcel.seat is not None:
            payload = replace(payload, data_NB=self._seated(parcel.seat, len(parcel.digests)))
        if not self._takes_other_kernels or parcel.lineage != self._lineage:
            return payload
        return replace(payload, header=replace(payload.header, revision=self.core.model_revision))

    def _seated(self, seat: Seat, n_blocks: int) -> np.ndarray:
        n_bytes = n_blocks * self._executor.block_bytes
        if n_bytes > seat.slot_bytes:
            raise TransferError(f"{n_blocks} blocks of {n_bytes} bytes are not in {seat.slot_bytes}", reason="shape")
        try:
            memory = self._mapped.memory(seat)
        except TransferError:
            self._machine = None  # what comes next shall come another way
            raise
        return memory[:n_bytes].reshape(n_blocks, -1)

    def _on_done(self, done: Done) -> None:
        coming = self._coming.get(done.request_id)
        if coming is None:
            return
        coming.done = done
        coming.lease_s = self._clock.now_s() + self._late_s
        if done.fault is not None or coming.refused is not None:
            self._settle(done.request_id, coming.refused or done.fault or "")
        else:
            self._settle_if_complete(done.request_id, coming)

    def _settle_if_complete(self, request_id: str, coming: Coming) -> None:
        if coming.done is not None and coming.is_complete:
            self._settle(request_id)

    def _settle(self, request_id: str, fault: str = "") -> None:
        """Go on with what is here. fault: why that is not everything."""
        coming = self._coming.pop(request_id)
        n_blocks, block_tokens = coming.n_blocks, self.core.pool.block_tokens
        if not coming.is_complete and coming.first_block < coming.end_block:
            first_lost = coming.first_block if self._executor.has_states else n_blocks
            self._recomputes[fault] += 1
            self._recomputed_tokens += (coming.end_block - first_lost) * block_tokens
            if coming.done is None:
                self._stop_reader(coming)
        done, now_s = coming.done, self._clock.now_s()
        attributes: dict[str, str | int] = {
            "gen_ai.request.id": request_id,
            "diptych.reader": coming.submit.reader or "",
            "diptych.blocks.asked": coming.end_block - coming.first_block,
            "diptych.blocks.received": n_blocks - coming.first_block,
        }
        trace = coming.submit.hand_off.request.trace
        self._spans.part(
            "receive", trace, begin_s=coming.begin_s, end_s=now_s, attributes=attributes, error=fault or None
        )
        for event in self.core.settle(request_id, n_blocks * block_tokens, now_s, has_state=coming.is_complete):
            assert isinstance(event, TransferEvent)
            told = replace(
                event,
                begin_s=coming.begin_s,
                queue_s=None if done is None else done.queue_s,
                read_s=None if done is None else done.read_s,
                predicted_s=None if done is None else done.predicted_s,
            )
            self._events.append(told)

    def _stop_reader(self, coming: Coming) -> None:
        if coming.submit.reader is not None and coming.done is None:
            request_id = coming.submit.hand_off.request.request_id
            self._send(coming.submit.reader, StopReading(request_id=request_id, answer_to=self.name))

    def _give_up_overdue(self) -> None:
        now_s = self._clock.now_s()
        for request_id, coming in list(self._coming.items()):
            if coming.lease_s <= now_s:
                self._lost_ends += coming.done is None and coming.is_complete
                self._settle(request_id, coming.refused or ("missing" if coming.done is not None else "lease"))
        for one in [one for one in self._unplaced if one[0] <= now_s]:  # blocks are short: wait in line as anybody else
            self._unplaced.remove(one)
            self._resume(one[1].hand_off)
