"""What a worker tells of the parts that it has in requests: reading for another worker, receiving, answering."""

from __future__ import annotations

from diptych.engine.spans import Attributes, Spans
from diptych.ground.events import Event, FinishEvent
from diptych.ground.handoff import HandOff
from diptych.ground.phase import FinishReason


class WorkerSpans:
    """Of one worker; without `spans` it does nothing. A request that moves is answered on several workers, each with a span."""

    def __init__(self, spans: Spans | None, worker: str) -> None:
        self._spans, self._worker = spans, worker
        self._answering: dict[str, tuple[HandOff, float, int]] = {}  # since when, and how many choices are open

    def part(
        self,
        name: str,
        trace: str | None,
        *,
        begin_s: float,
        end_s: float,
        attributes: Attributes,
        error: str | None = None,
    ) -> None:
        """A part that is over."""
        if self._spans is not None:
            told = {"diptych.worker": self._worker, **attributes}
            self._spans.note(name, parent=trace, begin_s=begin_s, end_s=end_s, attributes=told, error=error)

    def begin(self, hand_off: HandOff, now_s: float) -> None:
        """This worker is to answer, from where another one stopped."""
        if self._spans is not None and hand_off.request.trace is not None:
            n_open = sum(token_ids is not None for token_ids in hand_off.output_token_ids)
            self._answering[hand_off.request.request_id] = (hand_off, now_s, n_open)

    def fold(self, event: Event) -> None:
        """An end of a choice may be the end of the answer."""
        if not self._answering or not isinstance(event, FinishEvent):
            return
        one = self._answering.get(event.request_id)
        if one is None:
            return
        hand_off, begin_s, n_open = one
        if n_open > 1:
            self._answering[event.request_id] = (hand_off, begin_s, n_open - 1)
            return
        error = "the engine failed" if event.reason is FinishReason.ERROR else None
        self.end(event.request_id, event.at_s, error=error)

    def end(self, request_id: str, now_s: float, *, error: str | None = None) -> None:
        """It is over here, whatever became of it."""
        one = self._answering.pop(request_id, None)
        if one is not None:
            hand_off, begin_s, _ = one
            known = max((len(token_ids) for token_ids in hand_off.output_token_ids if token_ids is not None), default=0)
            attributes: dict[str, str | int] = {"gen_ai.request.id": request_id, "diptych.tokens_before": known}
            trace = hand_off.request.trace
            self.part("answer", trace, begin_s=begin_s, end_s=now_s, attributes=attributes, error=error)
