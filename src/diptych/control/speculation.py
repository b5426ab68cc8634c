"""Speculation in the scheduler: who guesses for a sequence, how guesses are judged, and what a bad drafter may do (nothing).

A draft costs speed or gains it and never changes an answer: the executor draws every token by the usual rule, and a draft
is kept only while it equals what was drawn. Everything here is integers; what guesses are worth is `Depths`, which the
engine fills with `diptych.cost.drafts.prices` and a bare core with `EveryGuess`.

    guesser = Guesser(SchedulerConfig(speculate="lookup"), n_vocab=4096)
    speculation = guesser.begin(request, depths)     # None for a request that wants no drafts
    speculation.propose(token_ids)                   # the best guess of its drafters, [] for none
    speculation.learn(token_ids_of_the_step)         # how far every guess was right
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from diptych.control.drafters import FOLLOWED, AnswerMemory, Drafter, Handed, Lookup, Prediction
from diptych.ground.config import SchedulerConfig
from diptych.ground.request import Request
from diptych.ground.shape import StepShape

logger = logging.getLogger("diptych.control")

UNPRICED_ROWS = 8  # of a whole step where nobody prices drafts: so few cost about as much as one
MOST_FAULTS = 8  # of a drafter, then nobody asks it any more

_INTS = {int}
NewDrafter = Callable[[Request], Drafter]
Priced = tuple[Any, int, int]  # an Estimate, how many drafts have room, the confidence of the guess
NO_GUESS: Priced = (None, 0, 0)
Wanted = tuple[int, int]  # which of the executor's drafters is to guess, and how many drafts
NOTHING: Wanted = (0, 0)


class Estimate(Protocol):
    """How far the guesses of one drafter hold for one sequence."""

    def learn(self, n_right: int, n_judged: int, confidence: int) -> None:
        """The first n_right of n_judged drafts were right."""
        ...

    def kept(self, n_kept: int) -> None:
        """So many drafts were verified and held."""
        ...


class Depths(Protocol):
    """Says how many guesses are worth their rows."""

    def begin(self, name: str, kind: int, *, is_sure: bool = False) -> Any:
        """The Estimate of a new sequence with the drafter of this name and a request of this kind; handed back to `choose`.

        is_sure: its drafts are known to hold.
        """
        ...

    def begin_asked(self, names: SequenceOf[str], kind: int) -> list[Any]:
        """The same with each of the executor's drafters, by number; handed back to `read` and `ask`, too."""
        ...

    def best(self, guesses: SequenceOf[Priced]) -> int:
        """Which of these guesses for one sequence is worth most."""
        ...

    def read(self, estimates: SequenceOf[Any], end: int, n: int) -> Wanted | None:
        """Who of the executor's drafters is to read a prefill chunk that ends there, and how many drafts, n at most, to make
        behind it; None: nobody. estimates: by number, None for a drafter that is off.
        """
        ...

    def is_due(self, n_decodes: int) -> bool:
        """Whether a step of so many decode chunks is worth guessing for."""
        ...

    def silent(self, shape: StepShape, n_decodes: int) -> None:
        """It was, and nobody had a guess."""
        ...

    def idle_steps(self, n_decodes: int, *, is_guessing: bool) -> int:
        """For how many steps like the one just planned nothing would be guessed (by those that guess here) or asked."""
        ...

    def idle(self, n_steps: int, n_decodes: int) -> None:
        """So many of them passed, with so many decode chunks, and nothing here was called."""
        ...

    def choose(
        self, guesses: SequenceOf[Priced], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """How many drafts to verify of each decode chunk of a step of this shape, which has none yet."""
        ...

    def is_asking(self) -> bool:
        """Whether `ask` is worth a call in this step; where it is not, the step has passed for it."""
        ...

    def ask(
        self, options: SequenceOf[SequenceOf[Priced]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[Wanted]:
        """Which of the executor's drafters is to make how many drafts behind each decode chunk, for the next step to verify;
        none: it is given up. options: of each chunk what each drafter, by number, could make.
        """
        ...


class _Unjudged:
    """The estimate of who believes every guess."""

    def learn(self, n_right: int, n_judged: int, confidence: int) -> None:
        """Nothing."""

    def kept(self, n_kept: int) -> None:
        """Nothing."""


class EveryGuess:
    """Verifies what is guessed, the first drafts of every sequence first, in steps of at most `rows` rows. Prices nothing."""

    def __init__(self, rows: int = UNPRICED_ROWS) -> None:
        self._rows = rows

    def begin(self, name: str, kind: int, *, is_sure: bool = False) -> Any:
        """See Depths."""
        return _Unjudged()

    def begin_asked(self, names: SequenceOf[str], kind: int) -> list[Any]:
        """See Depths."""
        return [_Unjudged() for _ in names]

    def best(self, guesses: SequenceOf[Priced]) -> int:
        """The longest."""
        lengths = [n for _, n, _ in guesses]
        return lengths.index(max(lengths))

    def read(self, estimates: SequenceOf[Any], end: int, n: int) -> Wanted | None:
        """Every prompt, by the first."""
        numbers = [number for number, one in enumerate(estimates) if one is not None]
        return (numbers[0], min(n, self._rows)) if numbers else None

    def is_due(self, n_decodes: int) -> bool:
        """Always."""
        return True

    def silent(self, shape: StepShape, n_decodes: int) -> None:
        """Nothing."""

    def idle_steps(self, n_decodes: int, *, is_guessing: bool) -> int:
        """Never."""
        return 0

    def idle(self, n_steps: int, n_decodes: int) -> None:
        """Nothing."""

    def choose(
        self, guesses: SequenceOf[Priced], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """See Depths."""
        left = min(most_rows, self._rows - shape.n_tokens)
        depths = [0] * len(guesses)
        for depth in range(1, max((n for _, n, _ in guesses), default=0) + 1):
            for i, (_, n, _) in enumerate(guesses):
                if depth <= n and left > 0:
                    depths[i], left = depth, left - 1
        return depths

    def is_asking(self) -> bool:
        """Always."""
        return True

    def ask(
        self, options: SequenceOf[SequenceOf[Priced]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[Wanted]:
        """The first drafter that has room."""
        numbers = [next((number for number, one in enumerate(some) if one[1]), 0) for some in options]
        guesses = [some[number] if some else NO_GUESS for some, number in zip(options, numbers, strict=True)]
        depths = self.choose(guesses, shape=shape, most_rows=most_rows, limit_s=limit_s)
        return list(zip(numbers, depths, strict=True))


class _Source:
    """One drafter of one sequence, and its newest guess."""

    __slots__ = ("confidence", "drafter", "estimate", "guess", "name")

    def __init__(self, name: str, drafter: Drafter, estimate: Estimate) -> None:
        self.name = name
        self.drafter = drafter
        self.estimate = estimate
        self.guess: list[int] = []
        self.confidence = 0


class Speculation:
    """The drafters of one sequence. Every guess is judged, sent or not, so that a bad time ends by itself."""

    __slots__ = (
        "_best",
        "_depths",
        "_forced",
        "_guesser",
        "_guessing",
        "_handed",
        "_most_drafts",
        "_sources",
        "has_drafts_at_hand",
        "is_open",
    )

    def __init__(self, guesser: Guesser, depths: Depths, sources: list[_Source], most_drafts: int) -> None:
        self._guesser = guesser
        self._depths = depths
        self._sources = sources
        # of the executor's drafters, by number; None for one that is off
        self._handed: list[_Source | None] = [None] * guesser.n_executor_drafters
        self._forced: _Source | None = None  # by the grammar
        for source in sources:
            if isinstance(source.drafter, Handed):
                if source.drafter.number is None:
                    self._forced = source
                else:
                    self._handed[source.drafter.number] = source
        self._guessing = [one for one in sources if not isinstance(one.drafter, Handed)]
        self._best: _Source | None = None
        self._most_drafts = most_drafts
        self.has_drafts_at_hand = False  # the executor has made some, which have been paid for
        self.is_open = False  # `learn` and `hand` have something to do: most steps need not call them

    @property
    def is_guessing(self) -> bool:
        """Whether any of its drafters guesses by itself."""
        return bool(self._guessing)

    def hand(self, number: int, draft_token_ids: tuple[int, ...], forced_token_ids: tuple[int, ...] = ()) -> None:
        """Take the guess that the executor's drafter of this number made behind the newest token, and what is forced there."""
        self.is_open = self.has_drafts_at_hand = False
        for source in self._sources:
            drafter = source.drafter
            if isinstance(drafter, Handed):
                own = draft_token_ids if drafter.number == number else ()
                drafter.token_ids = forced_token_ids if source is self._forced else own
                if drafter.token_ids:
                    self.is_open = self.has_drafts_at_hand = True

    def propose(self, token_ids: SequenceOf[int]) -> list[int]:
        """The guess that is worth most, [] for none."""
        found = []
        for source in self._sources if self.has_drafts_at_hand else self._guessing:
            self._guesser.ask(source, token_ids, self._most_drafts)
            if source.guess:
                found.append(source)
        if not found:
            self._best = None
            return []
        if self._forced in found and len(found) > 1:  # who says otherwise is wrong, and who says less says nothing new
            forced = self._forced.guess
            found = [one for one in found if one.guess[: len(forced)] == forced]
        best = found[0]
        if len(found) > 1:
            best = found[self._depths.best([(one.estimate, len(one.guess), one.confidence) for one in found])]
        self._best, self.is_open = best, True
        return best.guess

    def priced(self, n: int) -> Priced:
        """What `Depths.choose` wants to know of n drafts of the guess."""
        best = self._best
        return NO_GUESS if best is None else (best.estimate, n, best.confidence)

    def askable(self, n: int) -> list[Priced]:
        """What `Depths.ask` wants to know: none where the executor's drafters are off, or another one is being followed."""
        best = self._best
        if best is not None and best.confidence == FOLLOWED and best not in self._handed:
            return []
        n = min(n, self._most_drafts)
        return [
            NO_GUESS
            if one is None or not isinstance(one.drafter, Handed)
            else (one.estimate, n, one.drafter.confidence)
            for one in self._handed
        ]

    def wanted_behind(self, end: int, n: int) -> Wanted | None:
        """See `Depths.read`."""
        handing = [one if one is not None and isinstance(one.drafter, Handed) else None for one in self._handed]
        if not any(handing):
            return None
        return self._depths.read([one and one.estimate for one in handing], end, min(n, self._most_drafts))

    def learn(self, token_ids: SequenceOf[int]) -> None:
        """Compare guesses with what came: the drafts that held, and one token."""
        best = self._best
        if best is None:
            return  # nobody had a guess
        if len(token_ids) > 1:
            best.estimate.kept(len(token_ids) - 1)
        for source in self._sources:
            guess, source.guess = source.guess, []
            n_judged = min(len(guess), len(token_ids))
            if n_judged:
                n_right = 0
                while n_right < n_judged and guess[n_right] == token_ids[n_right]:
                    n_right += 1
                source.estimate.learn(n_right, n_judged, source.confidence)
        self._best = None


def _kind_of(request: Request) -> int:
    """Requests whose tokens are about as easy to guess: by temperature (none, up to a half, more), and under a grammar."""
    sampling = request.sampling
    return (sampling.temperature > 0.0) + (sampling.temperature > 0.5) + 3 * (sampling.structured is not None)


class Guesser:
    """Makes the drafters of every sequence, and switches off those that misbehave: that costs speed and no answer.

    A fault is an exception, or a guess that is no list of at most so many token ids. It ends the drafter for the sequence,
    and after MOST_FAULTS of one name for all. A drafter that never returns is not guarded against: it runs on this thread.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        n_vocab: int | None = None,
        drafters: dict[str, NewDrafter] | None = None,
        executor_drafters: SequenceOf[str] = (),
    ) -> None:
        """n_vocab: token ids are below it; None: nobody says. See EngineCore."""
        self.n_faults = 0
        self.memory = AnswerMemory(config.lookup_memory_tokens) if config.lookup_memory_tokens else None
        self.asks_executor = bool(executor_drafters)  # whether any of its drafters is on
        self._executor_drafters = tuple(executor_drafters)
        self._n_vocab = n_vocab
        self._most_drafts = config.max_draft_tokens
        self._follows_grammars = config.speculate != "off"
        self._faults: dict[str, int] = {}
        if drafters is None:
            drafters = {"lookup": self._lookup} if config.speculate in ("lookup", "auto") else {}
        self._drafters = dict(drafters)

    @property
    def n_executor_drafters(self) -> int:
        """Those that misbehaved, too: they keep their numbers."""
        return len(self._executor_drafters)

    def most_drafts(self, request: Request) -> int:
        """Drafts of one step that a request may have."""
        most = request.sampling.max_draft_tokens
        return self._most_drafts if most is None else min(most, self._most_drafts)

    def begin(self, request: Request, depths: Depths) -> Speculation | None:
        """The drafters of a sequence that begins to decode; None where it has none."""
        makers = self._drafters
        if request.prediction_token_ids:
            makers = {"prediction": _prediction} | makers
        most_drafts = self.most_drafts(request)
        is_forced = self._follows_grammars and request.sampling.structured is not None
        if not most_drafts or not (makers or self.asks_executor or is_forced):
            return None
        kind = _kind_of(request)
        sources = [
            _Source(name, make(request), depths.begin(name, kind)) for name, make in makers.items() if self._is_on(name)
        ]
        if is_forced:
            sources.append(_Source("grammar", Handed(None), depths.begin("grammar", kind, is_sure=True)))
        if self.asks_executor:
            names = self._executor_drafters
            for number, estimate in enumerate(depths.begin_asked(names, kind)):
                if self._is_on(names[number]):
                    sources.append(_Source(names[number], Handed(number), estimate))
        return Speculation(self, depths, sources, most_drafts) if sources else None

    def ask(self, source: _Source, token_ids: SequenceOf[int], n: int) -> None:
        """Have a drafter guess; one that misbehaves is replaced by one that never does."""
        try:
            guess = source.drafter.propose(token_ids, n)
            fault = self._fault_of(guess, source.drafter.confidence, n) if guess else None
        except Exception as error:
            guess, fault = [], f"{type(error).__name__}: {error}"
        if fault is None:
            source.guess, source.confidence = guess, source.drafter.confidence
            return
        source.guess, source.drafter = [], _Silent()
        self.n_faults += 1
        self._faults[source.name] = self._faults.get(source.name, 0) + 1
        scope = "sequence" if self._faults[source.name] < MOST_FAULTS else "engine"
        self.asks_executor = any(map(self._is_on, self._executor_drafters))
        logger.warning("drafter switched off name=%s scope=%s reason=%s", source.name, scope, fault)

    def _is_on(self, name: str) -> bool:
        return self._faults.get(name, 0) < MOST_FAULTS

    def _fault_of(self, guess: object, confidence: object, n: int) -> str | None:
        if type(guess) is not list or set(map(type, guess)) != _INTS:
            return f"proposed {str(guess)[:60]}, which is no list of token ids"
        if len(guess) > n:
            return f"proposed {len(guess)} tokens; it was asked for at most {n}"
        lowest, highest = min(guess), max(guess)
        if lowest < 0 or (self._n_vocab is not None and highest >= self._n_vocab):
            return f"proposed tokens {lowest} to {highest}; the vocabulary has {self._n_vocab}"
        if confidence not in (0, 1, 2):
            return f"has the confidence {str(confidence)[:60]}; it must be 0, 1 or 2"
        return None

    def _lookup(self, request: Request) -> Drafter:
        return Lookup(self.memory, request.cache_salt)


class _Silent:
    """In place of a drafter that misbehaved."""

    confidence = 0

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """Nothing."""
        return []


def _prediction(request: Request) -> Drafter:
    return Prediction(request.prediction_token_ids, start=len(request.prompt_token_ids))
