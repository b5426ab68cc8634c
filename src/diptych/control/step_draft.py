"""A plan in the making: what the scheduler and those beside it write one step into."""

from __future__ import annotations

from diptych.ground.events import Event
from diptych.ground.shape import StepShape
from diptych.ground.step import BlockCopy, Chunk, SequenceStart

NOTHING = StepShape(())


class StepDraft:
    """Lives for one call of `Scheduler.plan`. limit_s: a step with decode chunks may not be predicted to take longer."""

    def __init__(self, *, step_id: int, now_s: float, budget_tokens: int, limit_s: float | None) -> None:
        self.step_id = step_id
        self.now_s = now_s
        self.left_tokens = budget_tokens
        self.limit_s = limit_s
        self.shape = NOTHING
        self.chunks: list[Chunk] = []
        self.copies: list[BlockCopy] = []
        self.starts: list[SequenceStart] = []
        self.preempted: list[Event] = []
        self.scheduled: list[Event] = []
        self.decode_request_ids: list[str] = []
