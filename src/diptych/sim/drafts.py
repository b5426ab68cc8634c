"""Speculation in a simulation: a drafter that errs at a stated rate, and the time that it takes; or the drafts of a run
that is run again.

A simulated model draws DRAWN_TOKEN and nothing else, so a guess of it is right and any other is wrong: the scheduler, its
choice of depth and the verification are the engine's own, and only how often a guess is right is stated instead of learned
from a text.

In a run that is run again a step verifies behind so many tokens of an answer what was verified there, whoever had guessed it:
a look into the text, a model, or the grammar that forces it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple, Protocol

from diptych.control.speculation import Depths, EveryGuess, NewDrafter
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.bounds import Bound
from diptych.ground.config import SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.sim.executor import DRAWN_TOKEN

_WRONG_TOKEN = 1
_CONFIDENCE = 2  # of every guess alike
_ANY_ROWS = 1 << 32  # more than a step has: the scheduler's own bound holds, beside prompts of any length

Predict = Callable[[StepShape], float]


class Drafts(Protocol):
    """How speculation goes in a simulated engine."""

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """What the engine's scheduler is told."""
        ...

    def timed(self, predict_s: Predict) -> Predict:
        """predict_s with the drafter's time in every step that has drafts."""
        ...

    def depths(self, predict_s: Predict) -> Depths:
        """What drafts are worth."""
        ...

    def drafters(self, seed: int) -> dict[str, NewDrafter]:
        """For an `EngineCore`."""
        ...


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

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """See Drafts."""
        return replace(config, max_draft_tokens=self.draft_tokens)

    def depths(self, predict_s: Predict) -> Depths:
        """As the engine's: as many as pay."""
        return DraftPrices(predict_s)

    def drafters(self, seed: int) -> dict[str, NewDrafter]:
        """See Drafts."""
        rng = Random(seed)
        return {"stated": lambda request: StatedDrafter(self.acceptance, rng)}

    def timed(self, predict_s: Predict) -> Predict:
        """See Drafts."""

        def with_drafting(shape: StepShape) -> float:
            deepest = max((one.new_tokens for one in shape.shapes if one.is_decode), default=1) - 1
            if not deepest:
                return predict_s(shape)
            plain = [one._replace(new_tokens=1) for one in shape.shapes if one.is_decode]
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


class Verified(NamedTuple):
    """One choice of a request that ran: what it wrote, and the guesses that steps verified, by the tokens written before."""

    outputs: SequenceOf[int]
    guesses: Mapping[int, SequenceOf[int]]


class RecordedDrafts:
    """The drafts of requests that ran. What was verified is verified again, whether or not it would pay now."""

    def __init__(self) -> None:
        self._choices: dict[str, list[Verified]] = {}
        self._taken: dict[str, set[int]] = {}  # of these, by sequences

    @property
    def is_any(self) -> bool:
        """Whether anything was verified."""
        return any(one.guesses for choices in self._choices.values() for one in choices)

    def expect(self, request_id: str, choices: list[Verified]) -> None:
        """A request of this id will come."""
        self._choices[request_id] = choices

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        """See Drafts: nobody guesses but those of the run."""
        return replace(config, speculate="off")

    def timed(self, predict_s: Predict) -> Predict:
        """See Drafts: steps are as long as they were, drafting included."""
        return predict_s

    def depths(self, predict_s: Predict) -> Depths:
        """See Drafts: all of a guess, which is what was worth its rows."""
        return EveryGuess(rows=_ANY_ROWS)

    def drafters(self, seed: int) -> dict[str, NewDrafter]:
        """See Drafts."""
        return {"recorded": self._drafter} if self.is_any else {}

    def _drafter(self, request: Request) -> _RecordedDrafter:
        return _RecordedDrafter(
            self._choices.get(request.request_id, []),
            len(request.prompt_token_ids),
            self._taken.setdefault(request.request_id, set()),
        )


class _RecordedDrafter:
    """Of one sequence. Which choice of its request it is, nobody says: the first that wrote the same and is not taken."""

    def __init__(self, choices: list[Verified], prompt_tokens: int, taken: set[int]) -> None:
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._taken = taken
        self._number: int | None = None
        self._places: list[int] = []  # of its choice's guesses
        self.confidence = _CONFIDENCE

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See `diptych.control.drafters.Drafter`. Where steps end elsewhere than they did: what is left of a guess."""
        place = len(token_ids) - self._prompt_tokens
        if self._number is None or not self._is(self._number, token_ids, place):
            self._choose(token_ids, place)
        i = bisect_right(self._places, place)
        if self._number is None or not i:
            return []
        outputs, guesses = self._choices[self._number]
        before = self._places[i - 1]
        guess, known = guesses[before], place - before
        if known and list(outputs[before:place]) != list(guess[:known]):
            return []  # it did not hold so far
        return list(guess[known : known + n])

    def _is(self, number: int, token_ids: SequenceOf[int], place: int) -> bool:
        """Whether that choice wrote the same so far."""
        if len(self._choices) == 1:
            return True
        return list(self._choices[number].outputs[:place]) == list(token_ids[self._prompt_tokens :])

    def _choose(self, token_ids: SequenceOf[int], place: int) -> None:
        if self._number is not None:
            self._taken.discard(self._number)
        free = (number for number in range(len(self._choices)) if number not in self._taken)
        self._number = next((number for number in free if self._is(number, token_ids, place)), None)
        if self._number is None:
            self._places = []
            return
        self._taken.add(self._number)
        self._places = sorted(self._choices[self._number].guesses)
