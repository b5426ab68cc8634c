"""Who is here: the open requests with their choices, how a choice begins, and how it ends.

    books = Books(scheduler, engine_seed=0, memory=None)
    sequences = books.open(hand_off, context_tokens=4096)     # choice 0, and those that wait for it to read the prompt
    books.fork_children(sequences[0])                          # it has: they begin on the same blocks
    events = [books.end(sequences[0], now_s, FinishReason.STOP)]
    books.forget_if_over(request_id)

`EngineCore` changes them within its calls only. Where one of those was cut short they are not believed, and `write_off` is
all that is asked of them.
"""

from __future__ import annotations

from diptych.control.drafters import AnswerMemory
from diptych.control.entry import open_sequences
from diptych.control.scheduler import Scheduler
from diptych.control.sequence import Sequence
from diptych.ground.errors import EngineError
from diptych.ground.events import Event, FinishEvent
from diptych.ground.handoff import HandOff
from diptych.ground.phase import FinishReason, Status


class Books:
    """See the module."""

    def __init__(
        self, scheduler: Scheduler, *, engine_seed: int, memory: AnswerMemory | None, first_seq_id: int = 0
    ) -> None:
        """memory: of answers, for drafters that look things up there. first_seq_id: of the next sequence."""
        self._scheduler = scheduler
        self._engine_seed = engine_seed
        self._memory = memory
        self.requests: dict[str, list[Sequence]] = {}  # open ones, all choices
        self.n_unborn = 0  # choices that wait for choice 0 to read the prompt
        self.next_seq_id = first_seq_id
        self.ended_seq_ids: list[int] = []  # that the executor does not know of yet

    def open(self, hand_off: HandOff, *, context_tokens: int) -> list[Sequence]:
        """The open choices of a request; nobody is in line yet. context_tokens: the longest that a sequence may get."""
        sequences = open_sequences(
            hand_off,
            config=self._scheduler.config,
            first_seq_id=self.next_seq_id,
            engine_seed=self._engine_seed,
            context_tokens=context_tokens,
        )
        self.next_seq_id += len(sequences)
        unborn = [seq for seq in sequences if seq.is_unborn]
        self.n_unborn += len(unborn)
        self._scheduler.waiting_tokens += sum(seq.waiting_tokens for seq in unborn)
        self.requests[hand_off.request.request_id] = sequences
        return sequences

    def withdraw(self, request_id: str) -> None:
        """A request that was just opened is not to be here after all."""
        for seq in self.requests.pop(request_id):
            if seq.is_unborn:
                self._bear(seq)

    def fork_children(self, seq: Sequence) -> None:
        """The prompt is computed: its other choices may begin, on the same blocks."""
        if seq.index != 0 or seq.has_forked:
            return
        seq.has_forked = True
        for child in self.requests[seq.request.request_id]:
            if child.is_unborn:
                self._bear(child)
                self._scheduler.fork(seq, child)

    def end(
        self,
        seq: Sequence,
        now_s: float,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: EngineError | None = None,
    ) -> Event:
        """Finish a sequence now; blocks that a step is still using go back when it ends."""
        seq.move(Status.FINISHED)
        seq.finish_reason = reason
        if self._memory is not None:
            self._memory.add(seq.request.cache_salt, seq.token_ids[seq.prompt_tokens :])
        if seq.is_unborn:
            self._bear(seq)
        if seq.index == 0 and not seq.has_forked:  # its children have nobody to wait for any more
            for child in self.requests[seq.request.request_id]:
                if child.is_unborn:
                    self._bear(child)
                    self._scheduler.enqueue(child)
        self._scheduler.detach(seq)
        if not seq.is_in_flight:
            self._scheduler.release(seq)
        if seq.has_started:
            self.ended_seq_ids.append(seq.seq_id)
        return _finish(seq, now_s, reason, stop_token_id=stop_token_id, error=error)

    def cancel(self, request_id: str, now_s: float, reason: FinishReason, error: EngineError | None) -> list[Event]:
        """End every open choice of a request, in any state. An unknown or finished id gives no events."""
        events: list[Event] = []
        for seq in reversed(self.requests.get(request_id, ())):
            if seq.status is not Status.FINISHED:
                events.append(self.end(seq, now_s, reason, error=error))
        self.forget_if_over(request_id)
        return events

    def forget_if_over(self, request_id: str) -> None:
        """A request of which every choice has ended is open no more."""
        if all(seq.status is Status.FINISHED for seq in self.requests.get(request_id, ())):
            self.requests.pop(request_id, None)

    def write_off(self, now_s: float, error: EngineError) -> tuple[list[Event], list[int]]:
        """The ends of all open choices, and the ids that the executor may know: all that is believed of torn books."""
        alive = [seq for sequences in self.requests.values() for seq in reversed(sequences)]
        events: list[Event] = [
            _finish(seq, now_s, FinishReason.ERROR, error=error) for seq in alive if seq.status is not Status.FINISHED
        ]
        return events, [*self.ended_seq_ids, *(seq.seq_id for seq in alive if seq.has_started)]

    def _bear(self, child: Sequence) -> None:
        child.is_unborn = False
        self.n_unborn -= 1
        self._scheduler.waiting_tokens -= child.waiting_tokens


def _finish(
    seq: Sequence,
    now_s: float,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    error: EngineError | None = None,
) -> FinishEvent:
    return FinishEvent(
        request_id=seq.request.request_id,
        index=seq.index,
        at_s=now_s,
        reason=reason,
        output_tokens=seq.output_tokens,
        stop_token_id=stop_token_id,
        error=error,
    )
