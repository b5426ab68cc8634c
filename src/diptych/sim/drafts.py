"""Speculation in a simulation: a drafter that errs at a stated rate, and the time that it takes.

A simulated model draws DRAWN_TOKEN and nothing else, so a guess of it is right and any other is wrong: the scheduler, its
choice of depth and the verification are the engine's own, and only how often a guess is right is stated instead of learned
from a text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from random import Random

from diptych.control.speculation import NewDrafter
from diptych.ground.bounds import Bound
from diptych.ground.errors import ConfigError
from diptych.ground.shape import ChunkShape, StepShape
from diptych.sim.executor import DRAWN_TOKEN

_WRONG_TOKEN = 1
_CONFIDENCE = 2  # of every guess alike


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedDrafts:
    """At most draft_tokens per sequence and step, each right with `acceptance` once those before it are.

    draft_cost: of drafting one token for all sequences, in decode steps; the planner's word and meaning.
    """

    draft_tokens: int
    acceptance: float
    draft_cost: float = 0.05

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        Bound(int, 1, 16, "").take("draft tokens", self.draft_tokens, ConfigError)
        Bound(float, 0.0, 1.0, "").take("acceptance", self.acceptance, ConfigError)
        Bound(float, 0.0, 10.0, "").take("draft cost", self.draft_cost, ConfigError)

    def drafters(self, seed: int) -> dict[str, NewDrafter]:
        """For an `EngineCore`."""
        rng = Random(seed)
        return {"stated": lambda request: StatedDrafter(self.acceptance, rng)}

    def timed(self, predict_s: Callable[[StepShape], float]) -> Callable[[StepShape], float]:
        """predict_s with the drafter's time in every step that has drafts."""

        def with_drafting(shape: StepShape) -> float:
            deepest = max((one.new_tokens for one in shape.shapes if one.is_decode), default=1) - 1
            if not deepest:
                return predict_s(shape)
            plain = [ChunkShape(one.phase, 1, one.start_pos, True, one.count) for one in shape.shapes if one.is_decode]
            return predict_s(shape) + deepest * self.draft_cost * predict_s(StepShape(plain))

        return with_drafting


class StatedDrafter:
    """Of one sequence."""

    def __init__(self, acceptance: float, rng: Random) -> None:
        self._acceptance = acceptance
        self._rng = rng
        self.confidence = _CONFIDENCE

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See `diptych.control.drafters.Drafter`."""
        drafts = [DRAWN_TOKEN] * n
        for j in range(n):
            if self._rng.random() >= self._acceptance:
                drafts[j] = _WRONG_TOKEN
                break
        return drafts
