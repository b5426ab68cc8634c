"""What a drafter that the executor runs is to a sequence, and the purse that all of its time comes from.

A sequence is given up where the price of drafts says no: nothing is asked, read or kept up with. It is tried again rarely,
and more rarely each time. A new sequence begins with what others of its kind have taught. Who is asked is chosen in
`drafter_choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

from diptych.cost.drafts.acceptance import MOST_DEPTH, Acceptance
from diptych.ground.shape import StepShape

_FIRST_DEPTH = 3  # asked of the executor's drafter behind a prompt, before anything is known of it
_WAIT = (8, 1024)  # steps until a sequence that was given up is tried again, at first and at most
_LONGEST_TRIAL = 6  # right guesses in a row lift a chance that was 0.1 to 0.66


_DEAF = 64  # asked so often without an answer: an EAGLE head that waits for a block's beginning needs half of it
_DEAF_ON_TRIAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCost:
    """What one of the executor's drafters takes, before its own steps are measured.

    draft_s(shape, depths): seconds in a step of this shape, so many drafts behind each of its decode chunks; None: no time.
    read_s(n_tokens): to read what it has missed of a sequence; None: it goes on without. begins_every: it can begin to read
    a sequence at each so-many-th token alone. most_drafts: of one sequence and step. is_measured: draft_s is what it took
    before anybody asked, and no guess.
    """

    draft_s: Callable[[StepShape, Sequence[int]], float] | None = None
    read_s: Callable[[int], float] | None = None
    begins_every: int = 1
    most_drafts: int = MOST_DEPTH
    is_measured: bool = False


class Asking(Enum):
    """Whether a drafter is asked about a sequence."""

    PAYS = "the price says that it does"
    TRIED = "it says no, and a draft of one token is asked for, to see"
    GIVEN_UP = "nothing is asked, read or kept up with"


class Purse:
    """Seconds that the executor's drafters may still cost. One per engine.

    It earns EARNED of the time that decode would take without drafts, and for every draft that held the time of a token. It
    pays for all of the drafter's time, the rows of its drafts, and what a step takes longer because it is read. Nothing is
    asked of the drafter while it is empty, and it never holds more than MOST_STEPS steps. Prompts are read out of a part of
    its own, of the same size, which gets half of what is earned and what the other part cannot hold: a long prompt does not
    keep drafts from paying for it, and is not read where they do not. So with the drafter a load takes

        T <= (1 + EARNED) T_off + 2 MOST_STEPS step_s + (what one step may cost)

    however wrong chances and predictions are; T_off is what the same tokens take without.
    """

    EARNED = 0.01
    FIRST_STEPS = 4.0  # in it at the beginning
    MOST_STEPS = 8.0

    __slots__ = ("_is_open", "_n_steps", "_plain_s", "_token_s", "balance_s", "prompts_s")

    def __init__(self) -> None:
        self.balance_s = 0.0
        self.prompts_s = 0.0
        self._is_open = False
        self._n_steps = 0  # since it was filled
        self._plain_s = self._token_s = 0.0  # of one step, and of one token in it

    @property
    def is_empty(self) -> bool:
        """Whether nothing may be asked."""
        return self._is_open and self.balance_s <= 0.0

    @property
    def reads_prompts(self) -> bool:
        """Whether prompts may be read; before anything was decoded, those of one step."""
        return self.prompts_s > 0.0 if self._is_open else self.prompts_s >= 0.0

    def pass_steps(self, n_steps: int) -> None:
        """So many steps decode."""
        self._n_steps += n_steps

    def fill(self, plain_s: float, n_sequences: int) -> None:
        """Earn for the steps that passed; one of so many sequences takes plain_s without drafts."""
        if not self._is_open:
            self._is_open = True
            self.balance_s += self.FIRST_STEPS * plain_s
            self.prompts_s += self.FIRST_STEPS * plain_s
        half_s, most_s = 0.5 * self.EARNED * self._n_steps * plain_s, self.MOST_STEPS * plain_s
        balance_s = self.balance_s + half_s
        self.balance_s = min(balance_s, most_s)
        self.prompts_s = min(self.prompts_s + half_s + balance_s - self.balance_s, most_s)
        self._n_steps = 0
        self._plain_s, self._token_s = plain_s, plain_s / n_sequences

    def steps_until(self, balance_s: float) -> int:
        """Steps that earn so much, if no draft holds."""
        return ceil((balance_s - self.balance_s) / (0.5 * self.EARNED * self._plain_s)) if self._plain_s else 0

    def pay(self, seconds: float) -> None:
        """Something took so long."""
        self.balance_s -= seconds

    def pay_for_prompts(self, seconds: float) -> None:
        """Prompts were read for so long."""
        self.prompts_s -= seconds

    def gain(self, n_tokens: int) -> None:
        """So many drafts held."""
        self.balance_s += n_tokens * self._token_s


class Asked(Acceptance):
    """Of one of the executor's drafters in one sequence, or in all of one kind (a pool): its chances, and whether it is asked.

    A pool knows when a sequence that was given up may be tried again: after `wait` steps, which double with every trial that
    fails and halve with every one that succeeds.
    """

    __slots__ = ("depth", "n_judged", "pool", "purse", "read_tokens", "rest", "state", "unanswered", "wait")

    def __init__(self, purse: Purse, pool: Asked | None = None) -> None:
        super().__init__(pool)
        self.purse = purse
        self.pool = pool
        self.state = Asking.PAYS
        self.n_judged = 0  # of a trial
        self.unanswered = 0  # asked so often since its last guess
        self.read_tokens = 0  # how far the drafter has read
        self.depth = _FIRST_DEPTH  # of a pool: what paid last
        self.wait = self.rest = _WAIT[0]

    def learn(self, n_right: int, n_judged: int, confidence: int = 0) -> None:
        """A trial ends with the first wrong guess, or after so many right ones that the price refused all the same."""
        super().learn(n_right, n_judged, confidence)
        self.unanswered = 0
        if self.state is Asking.TRIED:
            self.n_judged += 1
            if n_right == 0 or self.n_judged >= _LONGEST_TRIAL:
                self.fail()

    def fail(self) -> None:
        """It is given up, and tried again after twice the time."""
        self.state = Asking.GIVEN_UP
        if self.pool is not None:
            self.pool.rest = self.pool.wait
            self.pool.wait = min(2 * self.pool.wait, _WAIT[1])

    def ask(self, read_tokens: int) -> None:
        """It is asked for a guess, and reads so far for it. One that never answers is given up."""
        self.read_tokens = read_tokens
        self.unanswered += 1
        if self.unanswered >= (_DEAF_ON_TRIAL if self.state is Asking.TRIED else _DEAF):
            self.unanswered = 0
            self.fail()

    def kept(self, n_kept: int) -> None:
        """See Acceptance."""
        super().kept(n_kept)
        self.purse.gain(n_kept)

    def price(self, depth: int) -> None:
        """The price says that so many drafts pay; 0 for none."""
        if depth == 0:
            if self.state is Asking.PAYS:
                self.begin_trial()
            return
        if self.pool is not None:
            self.pool.depth = depth
            if self.state is Asking.TRIED:
                self.pool.wait = max(self.pool.wait // 2, _WAIT[0])
        self.state = Asking.PAYS

    @property
    def first_depth(self) -> int:
        """Drafts to begin with: as many as paid last."""
        return self.depth if self.pool is None else self.pool.depth

    def begin_trial(self) -> None:
        """Ask for drafts that the price refuses."""
        self.state, self.n_judged, self.unanswered = Asking.TRIED, 0, 0

    def give_way(self) -> None:
        """To another drafter that gives more: given up, and tried as soon as any."""
        self.state = Asking.GIVEN_UP
        if self.pool is not None:
            self.pool.rest = self.pool.wait
