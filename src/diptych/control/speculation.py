"""Drafts: guesses at a sequence's next tokens, which a decode step verifies, and how many of them are worth their rows.

A draft costs speed or gains it and never changes an answer: the executor draws every token by the usual rule, and a draft
is kept only while it equals what was drawn. Everything here is integers, and chances as floats.

    speculation = Speculation(Lookup())
    speculation.propose(token_ids, 16)       # [] where nothing like the last tokens stood before
    speculation.learn(token_ids_of_the_step) # how far the guess was right

How many: decode reads all weights for one row, and a few rows more cost little. `choose_depths` adds the likeliest drafts
of all sequences while predicted tokens per second rise; none at all is one of its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import Protocol

from diptych.ground.config import MODEL_DRAFTERS
from diptych.ground.shape import StepShape

MOST_DRAFTS = 16  # of one sequence and step
MOST_ROWS = 128  # of all sequences: beyond it a step is bound by arithmetic on every machine we know
UNPRICED_ROWS = 8  # of a whole step where nobody predicts its time: so few cost about as much as one
FIRST_DRAFTS = 3  # asked of the executor's drafter behind a prompt, before anything is known of it
PROBE_STEPS = 32  # so often a hopeless drafter is asked for one draft, to see whether its luck has turned
_UNPRICED_CHANCE = 0.5
_LEAST_CHANCE = 0.02
_LEAST_GAIN = 1.02  # a prediction is not better than this
_FIRST_RATE = 0.6
_FORGET = 0.15  # weight of the newest verdict
_READ_AT_ONCE = 4096  # tokens indexed per call: some milliseconds, so that a long prompt does not hold up one step


class Drafter(Protocol):
    """Guesses what comes next in one sequence."""

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """At most `n` tokens that may follow `token_ids`, which only ever grows at its end."""
        ...


class Lookup:
    """What followed the last three tokens (else two) where they stood before: the text quotes itself or its prompt.

    An index of every pair and triple of tokens to the latest position behind it, extended as tokens come: O(1) per token.
    While a guess goes on being right its source is followed, so that a long match is not left for a later, shorter one.
    """

    __slots__ = ("_after_pair", "_after_triple", "_at", "_read", "_source")

    def __init__(self) -> None:
        self._after_pair: dict[int, int] = {}
        self._after_triple: dict[int, int] = {}
        self._read = 1  # the next token that may end a pair
        self._source: int | None = None  # token_ids[_source] is the guess for token_ids[_at]
        self._at = 0

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See Drafter."""
        known = len(token_ids)
        self._index(token_ids, known - 1)  # nothing follows the newest token yet
        source = self._followed(token_ids)
        if source is None:
            source = self._found(token_ids)
        self._source, self._at = source, known
        if source is None:
            return []
        drafts = list(token_ids[source : source + n])
        while len(drafts) < n:  # the source ran into the end: what it says of the text goes on in the guess itself
            drafts.append(drafts[len(drafts) - (known - source)])
        return drafts

    def _index(self, token_ids: SequenceOf[int], end: int) -> None:
        """Take in pairs and triples that end before `end`."""
        first, end = self._read, min(end, self._read + _READ_AT_ONCE)
        pairs, triples = self._after_pair, self._after_triple
        for i in range(first, end):
            pair = token_ids[i - 1] << 32 | token_ids[i]
            pairs[pair] = i + 1
            if i > 1:
                triples[token_ids[i - 2] << 64 | pair] = i + 1
        self._read = max(first, end)

    def _followed(self, token_ids: SequenceOf[int]) -> int | None:
        """Where the last guess goes on, when all that came since is what it said."""
        source, at = self._source, self._at
        if source is None:
            return None
        while at < len(token_ids):
            if token_ids[at] != token_ids[source]:
                return None
            at, source = at + 1, source + 1
        return source

    def _found(self, token_ids: SequenceOf[int]) -> int | None:
        if len(token_ids) < 2:
            return None
        pair = token_ids[-2] << 32 | token_ids[-1]
        if len(token_ids) > 2:
            found = self._after_triple.get(token_ids[-3] << 64 | pair)
            if found is not None:
                return found
        return self._after_pair.get(pair)


class Handed:
    """The guess that came up with a sequence's last result: made by the executor's drafter, with tensors."""

    __slots__ = ("token_ids",)

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()

    def propose(self, token_ids: SequenceOf[int], n: int) -> list[int]:
        """See Drafter."""
        return list(self.token_ids[:n])


DRAFTERS: Mapping[str, Callable[[], Drafter]] = MappingProxyType(
    {"lookup": Lookup, **dict.fromkeys(MODEL_DRAFTERS, Handed)}
)
# seconds of the executor's drafter in a step of this shape that asks for so many drafts behind each of its decode chunks
DraftPrice = Callable[[StepShape, SequenceOf[int]], float]


class Speculation:
    """One sequence's drafter, its newest guess, and how often guesses of each depth were right of late."""

    __slots__ = ("_drafter", "_guess", "_rates")

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._guess: list[int] = []
        self._rates = [_FIRST_RATE] * MOST_DRAFTS  # draft j is right when all before it were

    def propose(self, token_ids: SequenceOf[int]) -> list[int]:
        """At most MOST_DRAFTS tokens."""
        self._guess = self._drafter.propose(token_ids, MOST_DRAFTS)[:MOST_DRAFTS]
        return self._guess

    def chances(self, n: int) -> list[float]:
        """The chance of each of the first `n` drafts to be kept: it falls with depth, and ends where it is hopeless."""
        chances: list[float] = []
        chance = 1.0
        for rate in self._rates[:n]:
            chance *= rate
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def hand(self, draft_token_ids: tuple[int, ...]) -> None:
        """Take the guess that the executor's drafter made behind the newest token; for a `Handed` drafter alone."""
        if isinstance(self._drafter, Handed):
            self._drafter.token_ids = draft_token_ids

    def learn(self, token_ids: SequenceOf[int]) -> None:
        """Compare the guess with what came, whether or not it was sent to be verified: so a bad time ends by itself."""
        rates = self._rates
        for j, (draft, token_id) in enumerate(zip(self._guess, token_ids, strict=False)):
            rates[j] += _FORGET * ((draft == token_id) - rates[j])
            if draft != token_id:
                break
        self._guess = []


def choose_depths(
    chances: SequenceOf[SequenceOf[float]],
    *,
    n_sure: int,
    most_rows: int,
    price_s: Callable[[list[int]], float] | None,
    limit_s: float | None = None,
) -> list[int]:
    """How many drafts of each sequence to verify, at most `most_rows` together.

    chances: of each sequence and depth, falling with depth. n_sure: tokens that the step gives anyway. price_s: predicted
    time of the step with these depths, None where nobody knows; limit_s: longest a step with drafts may take.
    O(rows log rows), and O(log rows) calls of price_s.
    """
    least = _UNPRICED_CHANCE if price_s is None else 0.0
    # equal chances: the shallower first, so that a draft never comes without those before it
    ranked = sorted(
        ((-chance, j, i) for i, row in enumerate(chances) for j, chance in enumerate(row) if chance >= least)
    )[: max(0, most_rows)]
    depths = [0] * len(chances)
    if price_s is None:
        for _, _, i in ranked:
            depths[i] += 1
        return depths
    chosen = depths
    best = _LEAST_GAIN * n_sure / max(price_s(depths), 1e-12) if ranked else 0.0
    tokens, taken, size = float(n_sure), 0, 1
    depths = list(depths)
    while taken < len(ranked):
        for minus_chance, _, i in ranked[taken:size]:
            depths[i] += 1
            tokens -= minus_chance
        taken = min(size, len(ranked))
        size *= 2
        step_s = price_s(depths)
        if limit_s is not None and step_s > limit_s:
            break
        if tokens / step_s > best:
            chosen, best = list(depths), tokens / step_s
    return chosen
