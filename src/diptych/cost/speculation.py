"""How far guesses at coming tokens hold, and how many are worth their rows: one arithmetic for engine, planner, simulator.

A step that verifies d drafts behind a sequence's token computes d rows more and hands out 1 + (drafts that hold) tokens.
Draft j holds where it and all before it are right: with the chance c_j, which falls with j. So a step gives
n + sum of c_j tokens in price(rows) seconds, and more drafts are worth it while tokens per second rise:

>>> round(expected_tokens(chances_at(0.7, 4)), 3)
2.773

`Acceptance` learns the chances of one sequence's drafter, `DraftPrices` chooses depths by predicted time. Guesses are judged
whether or not they were verified, which costs no row. Where the price says no, it is asked rarely, guesses are made as rarely
as they are dear, and very rarely a few drafts are verified all the same: a price that nobody ever paid may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf

from diptych.ground.shape import StepShape

MOST_DEPTH = 16  # drafts of one sequence and step
N_CONFIDENCES = 3  # how sure a drafter is of a guess, in its own scale from 0: each learned apart
LEAST_CHANCE = 0.02
_LEAST_GAIN = 1.05  # a prediction is no better than this, and what would be lost counts more than what would be won
_FIRST_RATE = 0.6
_FIRST_WEIGHT = 4
_FORGET = 0.15  # weight of a sequence's newest verdict
_FORGET_ALL = 0.02  # the same over all sequences
_REST = 16  # steps for which a price that said no is believed, unless chances rise
_RISEN = 1.1
_PROBE = (2, 64)  # refusals from one probe to the next, at first and at last
_PROBE_DEPTH = 2
_PROBE_PRICE = 6.0  # of a step without drafts; before anything is learned each row may be thought to cost a step
_SHARE = 0.005  # of a step's time that guesses in vain may take
_TRUST = 0.1  # weight of a newest measurement over predicted time, once there are many
_FADE = 0.998  # per step without drafts: an old measurement is tried again some day
_FARTHEST = 1.5  # what one measurement may say beyond those before it: the machine may have been busy


def chances_at(acceptance: float, n: int) -> list[float]:
    """Chances of n drafts where each is right with `acceptance` once all before it are: a, a^2, ..."""
    return [acceptance ** (j + 1) for j in range(n)]


def expected_tokens(chances: Sequence[float]) -> float:
    """Mean tokens of one sequence per step: its own and the drafts that hold; at one rate a, (1 - a^(n+1)) / (1 - a)."""
    return 1.0 + sum(chances)


def speedup(chances: Sequence[float], *, plain_s: float, verify_s: float) -> float:
    """Tokens per second with drafts over those without; verify_s holds the drafter's time, too."""
    return expected_tokens(chances) * plain_s / verify_s


class Acceptance:
    """How often guesses were right of late, by depth and by how sure the drafter was. Of one sequence, or of all (a pool)."""

    __slots__ = ("_n_verdicts", "_pool", "_rates")

    def __init__(self, pool: Acceptance | None = None) -> None:
        self._pool = pool
        self._n_verdicts = [_FIRST_WEIGHT] * N_CONFIDENCES  # the first rates count as so many
        # of draft j where all before it were right; a new sequence begins with what others have learned
        self._rates: list[list[float]] = (
            [[_FIRST_RATE] * MOST_DEPTH for _ in range(N_CONFIDENCES)]
            if pool is None
            else [list(rates) for rates in pool._rates]
        )

    def chances(self, n: int, confidence: int = 0) -> list[float]:
        """The chance of each of n drafts to be kept: falling, and cut where it is hopeless."""
        chances: list[float] = []
        chance = 1.0
        for rate in self._rates[confidence][:n]:
            chance *= rate
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def worth(self, n: int, confidence: int = 0) -> float:
        """Tokens that n drafts give on average."""
        return sum(self.chances(n, confidence))

    def learn(self, n_right: int, n_judged: int, confidence: int = 0) -> None:
        """The first n_right of n_judged drafts were right, and the next, where there is one, was wrong."""
        _move(self._rates[confidence], n_right, n_judged, _FORGET)
        pool = self._pool
        if pool is not None:  # a mean of the first verdicts, then of the latest
            n = pool._n_verdicts[confidence] = pool._n_verdicts[confidence] + 1
            _move(pool._rates[confidence], n_right, n_judged, _FORGET_ALL if n * _FORGET_ALL > 1.0 else 1.0 / n)


def _move(rates: list[float], n_right: int, n_judged: int, weight: float) -> None:
    for j in range(n_right):
        rates[j] += weight * (1.0 - rates[j])
    if n_right < n_judged:
        rates[n_right] -= weight * rates[n_right]


class _Refusal:
    """What the price has refused to steps of about so many sequences: asking again costs time and gives nothing."""

    __slots__ = ("asks_in", "every", "guesses_in", "probe_every", "probes_in", "worth")

    def __init__(self) -> None:
        self.worth = 0.0  # the most that was refused; 0: nothing was
        self.asks_in = 0  # steps until the price is asked whatever the worth
        self.every = 1  # steps from one guess to the next
        self.guesses_in = 0
        self.probes_in = 0  # refusals until some drafts are verified anyway, to see what they cost
        self.probe_every = _PROBE[0]

    def probe(self, chances: Sequence[Sequence[float]], most_rows: int) -> list[int]:
        """A few drafts of the likeliest sequence now and then, and rarer each time."""
        self.probes_in -= 1
        depths = [0] * len(chances)
        if self.probes_in < 0:
            self.probes_in, self.probe_every = self.probe_every, min(2 * self.probe_every, _PROBE[1])
            best = max(range(len(chances)), key=lambda i: sum(chances[i]))
            depths[best] = min(_PROBE_DEPTH, len(chances[best]), most_rows)
        return depths


class _Ratio:
    """Measured over predicted time of one kind of step: a mean of the first, then of the latest."""

    __slots__ = ("_n", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._n = 0

    def add(self, ratio: float) -> None:
        """Take in one measurement."""
        if self._n:
            ratio = min(max(ratio, self.value / _FARTHEST), self.value * _FARTHEST)
        self._n += 1
        self.value += max(_TRUST, 1.0 / self._n) * (ratio - self.value)

    def fade(self, towards: float) -> None:
        """Believe it a little less."""
        self.value = towards + (self.value - towards) * _FADE


class DraftPrices:
    """Depths of all sequences of a step by predicted time, corrected by how long such steps took. One per engine.

    predict_s: seconds of a step. guess_s: of the processor, for one guess. draft_s(shape, depths): of the executor's drafter in
    a step of this shape, so many drafts behind each of its decode chunks; None: no time.
    """

    def __init__(
        self,
        predict_s: Callable[[StepShape], float],
        *,
        guess_s: float = 5e-6,
        draft_s: Callable[[StepShape, Sequence[int]], float] | None = None,
    ) -> None:
        self._predict_s = predict_s
        self._guess_s = guess_s
        self._draft_s = draft_s
        self._pools: dict[str, Acceptance] = {}
        self._refusals: dict[int, _Refusal] = {}  # by sequences of the step, as powers of two
        self._unasked: dict[int, _Refusal] = {}  # the same of drafts that the executor would have to make
        self._plain = (
            _Ratio()
        )  # measured over predicted: of decode steps without drafts, and with by rows (powers of two)
        self._verify: dict[int, _Ratio] = {}

    def begin(self, name: str) -> Acceptance:
        """Of a new sequence with this drafter."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = Acceptance()
        return Acceptance(pool)

    def is_due(self, n_decodes: int) -> bool:
        """Whether to guess in this step: always, but where the price says no, as rarely as guesses are dear."""
        refusal = self._refusals.get(n_decodes.bit_length())
        if refusal is None or not refusal.worth:
            return True
        refusal.asks_in -= 1
        refusal.guesses_in -= 1
        if refusal.guesses_in > 0:
            return False
        refusal.guesses_in = refusal.every
        return True

    def choose(
        self, guesses: Sequence[tuple[Acceptance, int, int]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """How many drafts to verify of each of the step's decode chunks, at most `most_rows` together.

        guesses: of each decode chunk its estimate, how many of its drafts have room, and the confidence of the guess.
        shape: of the step without drafts, decode chunks first. limit_s: longest that a step with drafts may take.
        """
        refusal = self._refusals.setdefault(len(guesses).bit_length(), _Refusal())
        price_s = partial(self._price_s, shape)
        depths = self._decide(guesses, refusal, price_s, most_rows, limit_s)
        if refusal.worth and refusal.asks_in == _REST:  # the price said no just now
            dear = len(guesses) * self._guess_s / (_SHARE * self._predict_s(shape))
            refusal.every = refusal.guesses_in = min(_REST, ceil(dear))
            chances = [estimate.chances(n, confidence) if n else [] for estimate, n, confidence in guesses]
            probe = refusal.probe(chances, most_rows)
            most_s = min(_PROBE_PRICE * price_s(depths), limit_s or inf)
            if any(probe) and price_s(probe) <= most_s:
                return probe
        return depths

    def ask(
        self, guesses: Sequence[tuple[Acceptance, int, int]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """How many drafts the executor is to make behind each decode chunk, for the next step: those that would pay.

        As `choose`, and the drafter's time counts. Where nothing pays, one draft each is asked for now and then, as only a
        drafter that drafts can be judged.
        """
        refusal = self._unasked.setdefault(len(guesses).bit_length(), _Refusal())
        refusal.asks_in -= 1
        is_due = refusal.worth > 0.0 and refusal.asks_in <= 0
        depths = self._decide(guesses, refusal, partial(self._price_and_draft_s, shape), most_rows, limit_s)
        if is_due and not any(depths):
            depths = [min(n, 1) for _, n, _ in guesses]
        return depths

    def _decide(
        self,
        guesses: Sequence[tuple[Acceptance, int, int]],
        refusal: _Refusal,
        price_s: Callable[[list[int]], float],
        most_rows: int,
        limit_s: float | None,
    ) -> list[int]:
        """The depths that pay, after what was refused of late."""
        least = 0.0 if refusal.asks_in <= 0 else refusal.worth * _RISEN
        chances = [estimate.chances(n, confidence) if n else [] for estimate, n, confidence in guesses]
        chances = [row if sum(row) > least else [] for row in chances]
        worth = max(map(sum, chances), default=0.0)
        depths = [0] * len(guesses)
        if worth and most_rows > 0:
            depths = choose_depths(chances, n_sure=len(guesses), most_rows=most_rows, price_s=price_s, limit_s=limit_s)
        if any(depths):
            refusal.worth = 0.0
        elif worth or refusal.asks_in <= 0:
            refusal.worth, refusal.asks_in = max(worth, LEAST_CHANCE), _REST
        return depths

    def observe(self, shape: StepShape, measured_s: float) -> None:
        """Learn how far off predictions are for steps with and without drafts; steps with prefill say nothing of it."""
        if not self._pools or shape.prefill_tokens or not shape.decode_tokens:
            return
        ratio = measured_s / max(self._predict_s(shape), 1e-12)
        if shape.decode_tokens == shape.n_sequences:
            self._plain.add(ratio)
            for known in self._verify.values():
                known.fade(self._plain.value)
        else:
            self._verify.setdefault(shape.decode_tokens.bit_length(), _Ratio()).add(ratio)

    def _price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """Seconds of the step with these depths of its decode chunks."""
        if not any(depths):
            return self._predict_s(shape) * self._plain.value
        longer = shape.with_drafts(depths)
        return self._predict_s(longer) * self._ratio(longer.decode_tokens.bit_length())

    def _price_and_draft_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """The same with the drafts to be made first."""
        draft_s = 0.0 if self._draft_s is None or not any(depths) else self._draft_s(shape, depths)
        return self._price_s(shape, depths) + draft_s

    def _ratio(self, rows: int) -> float:
        """Measured over predicted of steps with drafts and about so many rows, or of the nearest number that was seen."""
        if not self._verify:
            return self._plain.value
        return self._verify[min(self._verify, key=lambda known: abs(known - rows))].value


def choose_depths(
    chances: Sequence[Sequence[float]],
    *,
    n_sure: int,
    most_rows: int,
    price_s: Callable[[list[int]], float],
    limit_s: float | None = None,
) -> list[int]:
    """How many drafts of each sequence to verify, at most `most_rows` together: the likeliest, while they pay.

    chances: of each sequence and depth, falling with depth. n_sure: tokens that the step gives anyway. price_s: predicted
    time of the step with these depths. limit_s: longest that a step with drafts may take.
    O(rows log rows), and O(log rows) calls of price_s.
    """
    # equal chances: the shallower first, so that a draft never comes without those before it
    ranked = sorted([(-chance, j, i) for i, row in enumerate(chances) for j, chance in enumerate(row)])
    del ranked[max(0, most_rows) :]
    chosen = [0] * len(chances)
    if not ranked:
        return chosen
    best = _LEAST_GAIN * n_sure / max(price_s(chosen), 1e-12)
    depths = list(chosen)
    tokens, taken, size = float(n_sure), 0, 1
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
