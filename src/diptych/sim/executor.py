"""An executor that computes nothing: a step takes as long as predicted, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from diptych.ground.clock import VirtualClock
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.ground.step import ChunkResult, StepPlan, StepResult

DRAWN_TOKEN = 0  # every token that a simulated step draws
MOST_KEPT = 4096  # results, one for each sequence: a decode step gives what the one before gave
IDLE_S = 1e-3  # without work, after which an engine has to be woken


class Remembered:
    """predict_s that knows its last answer: the scheduler asks for the very shape that the executor then lets pass."""

    def __init__(self, predict_s: Callable[[StepShape], float]) -> None:
        self._predict_s = predict_s
        self._shape: StepShape | None = None
        self._step_s = 0.0

    def __call__(self, shape: StepShape) -> float:
        """Seconds of a step."""
        if shape is not self._shape:
            self._step_s = self._predict_s(shape)
            self._shape = shape
        return self._step_s


class PredictedExecutor:
    """Moves the clock by predict_s(shape) per step; every token it draws is DRAWN_TOKEN, and drafts of it hold.

    wake_s: what a step takes longer before which there was nothing to do: threads sleep then, and caches are others'.
    worked_until_s: the end of the last step, also of one that did not come here.
    """

    def __init__(self, predict_s: Callable[[StepShape], float], clock: VirtualClock, *, wake_s: float = 0.0) -> None:
        self._predict_s = predict_s
        self._clock = clock
        self._wake_s = wake_s
        self.worked_until_s = -inf
        self._drawn: dict[int, ChunkResult] = {}  # by sequence: what its decode steps without drafts give

    def execute(self, plan: StepPlan) -> StepResult:
        """Let the plan's predicted time pass."""
        step_s = self._predict_s(plan.shape)
        if self._wake_s and not plan.shape.decode_tokens and self._clock.now_s() - self.worked_until_s > IDLE_S:
            step_s += self._wake_s
        self._clock.advance(step_s)
        self.worked_until_s = self._clock.now_s()
        drawn = self._drawn
        if len(drawn) > MOST_KEPT:
            drawn.clear()
        results = tuple(
            [
                drawn.get(chunk.seq_id) or self._draw(chunk.seq_id)
                if chunk.phase is Phase.DECODE and len(chunk.token_ids) == 1
                else ChunkResult(seq_id=chunk.seq_id, token_ids=_run_of(chunk.draft_token_ids) if chunk.samples else ())
                for chunk in plan.chunks
            ]
        )
        return StepResult(step_id=plan.step_id, results=results, device_s=step_s, host_s=0.0)

    def _draw(self, seq_id: int) -> ChunkResult:
        result = self._drawn[seq_id] = ChunkResult(seq_id=seq_id, token_ids=(DRAWN_TOKEN,))
        return result


def _run_of(drafts: Sequence[int]) -> tuple[int, ...]:
    """What verifying these drafts gives: those that hold, and the token drawn behind them."""
    n_right = 0
    while n_right < len(drafts) and drafts[n_right] == DRAWN_TOKEN:
        n_right += 1
    return (DRAWN_TOKEN,) * (1 + n_right)
