"""A request at the door that is not over: its prompt, its seed and every token handed out, which is what makes it move.

one = OpenRequest.of(request, with_seed)
if one.note(event): ...            # as its worker's events come
one.hand_off()                     # when that worker is gone: another goes on from here
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.ground.errors import EngineError
from diptych.ground.events import Event, FinishEvent, PromptLogprobsEvent, ScheduledEvent, TokenEvent, TransferEvent
from diptych.ground.handoff import HandOff
from diptych.ground.phase import FinishReason
from diptych.ground.request import Request


@dataclass(slots=True)
class OpenRequest:
    """See the module. sent: with a seed, as workers get it."""

    request: Request
    sent: Request
    token_ids: list[list[int]]
    is_ended: list[bool]
    decoder: int | None = None  # None: it waits for a worker
    reader: int | None = None
    has_begun: bool = False  # where it is
    accounted_tokens: int = 0  # of the prompt, computed, cached or transferred
    logprobs_tokens: int = 0
    n_moves: int = 0
    parked_s: float = 0.0

    @classmethod
    def of(cls, request: Request, sent: Request) -> OpenRequest:
        """One that has just come."""
        n = request.sampling.n
        return cls(request, sent, [[] for _ in range(n)], [False] * n)

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return all(self.is_ended)

    @property
    def longest(self) -> int:
        """Tokens of the longest choice so far."""
        return max(len(one) for one in self.token_ids)

    def hand_off(self) -> HandOff:
        """All that another worker needs to go on from here."""
        longest = self.longest
        return HandOff(
            request=self.sent,
            output_token_ids=tuple(
                None if is_ended else tuple(tokens)
                for tokens, is_ended in zip(self.token_ids, self.is_ended, strict=True)
            ),
            computed_tokens=len(self.request.prompt_token_ids) + longest if longest else self.accounted_tokens,
            logprobs_tokens=self.logprobs_tokens,
        )

    def note(self, event: Event) -> bool:
        """Keep what a move would need of an event; whether it is news of an open choice."""
        if isinstance(event, TokenEvent):
            tokens = self.token_ids[event.index]
            if self.is_ended[event.index]:
                return False
            assert event.position == len(tokens), (event.request_id, event.position, len(tokens))
            tokens.append(event.token_id)
        elif isinstance(event, FinishEvent):
            if self.is_ended[event.index]:
                return False
            self.is_ended[event.index] = True
        elif isinstance(event, ScheduledEvent):
            if event.index == 0 and not event.is_recompute:
                left = len(self.request.prompt_token_ids) - event.context_tokens
                self.accounted_tokens += max(0, min(event.chunk_tokens, left)) + event.cached_tokens
        elif isinstance(event, TransferEvent):
            self.accounted_tokens += event.cached_tokens + event.transferred_tokens
        elif isinstance(event, PromptLogprobsEvent):
            self.logprobs_tokens = event.start + len(event.entries)
        return True

    def end(self, now_s: float, reason: FinishReason, error: EngineError | None) -> list[Event]:
        """End what is open of it, the last choice first; the events that say so."""
        ended = [index for index in reversed(range(len(self.is_ended))) if not self.is_ended[index]]
        self.is_ended = [True] * len(self.is_ended)
        return [
            FinishEvent(
                request_id=self.request.request_id,
                index=index,
                at_s=now_s,
                reason=reason,
                output_tokens=len(self.token_ids[index]),
                error=error,
            )
            for index in ended
        ]
