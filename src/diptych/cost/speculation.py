"""How many guesses at coming tokens are worth their rows: one arithmetic for engine, planner, simulator.

A step that verifies d drafts behind a sequence's token computes d rows more and hands out 1 + (drafts that hold) tokens.
Draft j holds with the chance c_j (`cost/acceptance.py`). So a step gives n + sum of c_j tokens in price(rows) seconds, and
more drafts are worth it while tokens per second rise: `choose_depths`.

`DraftPrices` chooses depths by predicted time. Guesses are judged whether or not they were verified, which costs no row.
Where the price says no, it is asked rarely, guesses are made as rarely as they are dear, and very rarely a few drafts are
verified all the same: a price that nobody ever paid may be wrong. The executor's drafter costs time before it guesses: whom
it is asked about, and what that may cost, is `cost/asking.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf

from diptych.cost.acceptance import LEAST_CHANCE, MOST_DEPTH, Acceptance
from diptych.cost.asking import Asked, Asking, Purse
from diptych.ground.shape import StepShape

_LEAST_GAIN = 1.05  # a prediction is no better than this, and what would be lost counts more than what would be won
_REST = 16  # steps for which a price that said no is believed, unless chances rise
_RISEN = 1.1
_PROBE = (2, 64)  # refusals from one probe to the next, at first and at last
_PROBE_DEPTH = 2
_SILENCE = 16  # steps in which nobody had a guess, until guesses are made as rarely as they are dear
_LONGEST_IDLE = 64  # steps
_SHORT_IDLE = 8  # the same while the purse cannot pay
_PROBE_PRICE = 6.0  # of a step without drafts; before anything is learned each row may be thought to cost a step
_SHARE = 0.005  # of a step's time that guesses in vain may take
_TRUST = 0.1  # weight of a newest measurement over predicted time, once there are many
_PLAIN_EVERY = 8
_BLIND = (4, 128)  # steps with drafts until one of their size goes without, to see what that takes: at first, at most
_LIKE_TOKENS = 256  # of context: within them drafts multiply the time of a step by the same
_LIKE_STEPS = 64  # measured, until what was remembered is predicted again
_FADE = 0.998  # per step without drafts: an old measurement is tried again some day
_TRIED_SHARE = 8  # one of so many sequences that were given up is tried at a time
_FEW_TOKENS = 2 * MOST_DEPTH  # read by the executor's drafter with the next guess, for nothing
_FORGOTTEN = 0.95  # of a price that the purse could not pay is left a step later
_SINGLY = 4  # drafts up to which sizes double; then rows of the step fill tiles
_FEW_DEPTHS = 4  # are enough to see whether a drafter pays for all sequences alike
DISTURBED = 3.0  # times what was expected: the machine did something else, which the drafter does not pay for
_FARTHEST = 1.5  # what one measurement may say beyond those before it: the machine may have been busy


class _Refusal:
    """What the price has refused to steps of about so many sequences: asking again costs time and gives nothing."""

    __slots__ = (
        "asks_in",
        "blind_in",
        "every",
        "guesses_in",
        "left_blind",
        "n_silent",
        "probe_every",
        "probes_in",
        "worth",
    )

    def __init__(self) -> None:
        self.blind_in = self.left_blind = _BLIND[0]  # steps with drafts until one goes without, and those left of them
        self.n_silent = 0  # steps in a row in which nobody had a guess
        self.worth = 0.0  # the most that was refused; 0: nothing was
        self.asks_in = 0  # steps until the price is asked whatever the worth
        self.every = 1  # steps from one guess to the next
        self.guesses_in = 0
        self.probes_in = 0  # refusals until some drafts are verified anyway, to see what they cost
        self.probe_every = _PROBE[0]

    def is_blind(self) -> bool:
        """Whether a step is to go without drafts that would pay: what it takes without is known from such steps alone."""
        self.left_blind -= 1
        if self.left_blind > 0:
            return False
        self.blind_in = self.left_blind = min(2 * self.blind_in, _BLIND[1])
        return True

    @property
    def is_guessed_always(self) -> bool:
        """Whether guesses are made in every step."""
        return not self.worth and self.n_silent < _SILENCE

    def probe(self, chances: Sequence[Sequence[float]], most_rows: int) -> list[int]:
        """A few drafts of the likeliest sequence now and then, and rarer each time."""
        self.probes_in -= 1
        depths = [0] * len(chances)
        if self.probes_in < 0:
            self.probes_in, self.probe_every = self.probe_every, min(2 * self.probe_every, _PROBE[1])
            best = max(range(len(chances)), key=lambda i: sum(chances[i]))
            depths[best] = min(_PROBE_DEPTH, len(chances[best]), most_rows)
        return depths


class Ratio:
    """Measured over predicted time of one kind of step: a mean of the first, then of the latest."""

    __slots__ = ("_n", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._n = 0

    @property
    def is_known(self) -> bool:
        """Whether any was measured."""
        return self._n > 0

    def add(self, ratio: float, like: float | None = None) -> None:
        """Take in one measurement; like: what the first is expected to be near to, where anything is."""
        if self._n:
            ratio = min(max(ratio, self.value / _FARTHEST), self.value * _FARTHEST)
        elif like is not None:
            ratio = min(ratio, DISTURBED * like)
        self._n += 1
        self.value += max(_TRUST, 1.0 / self._n) * (ratio - self.value)

    def fade(self, towards: float, kept: float) -> None:
        """Believe it a little less."""
        self.value = towards + (self.value - towards) * kept


class DraftPrices:
    """Depths of all sequences of a step by predicted time, corrected by how long such steps took. One per engine.

    predict_s: seconds of a step. guess_s: of the processor, for one guess and the questions around it. draft_s(shape, depths):
    of the executor's drafter in a step of this shape, so many drafts behind each of its decode chunks; None: no time.
    read_s(n_tokens): of that drafter, to read what it has missed of a sequence; None: it can go on without.
    """

    def __init__(
        self,
        predict_s: Callable[[StepShape], float],
        *,
        guess_s: float = 10e-6,
        draft_s: Callable[[StepShape, Sequence[int]], float] | None = None,
        read_s: Callable[[int], float] | None = None,
    ) -> None:
        self.purse = Purse()
        self._predict_s = predict_s
        self._guess_s = guess_s
        self._draft_s = draft_s
        self._read_s = read_s
        self._pools: dict[tuple[str, int], Acceptance] = {}
        self._asked_pools: dict[tuple[str, int], Asked] = {}  # pools of the executor's drafter
        self._refusals: dict[int, _Refusal] = {}  # by sequences of the step, as powers of two
        # measured over predicted, by rows (powers of two): of decode steps without drafts and with; and of the drafter
        self._plain: dict[int, Ratio] = {}
        self._verify: dict[int, Ratio] = {}
        self._n_plain = 0
        self._longer: dict[tuple[int, int, int], float] = {}  # see _times_longer
        self._n_learned = 0
        self._drafting = Ratio()
        self._short_of_s = 0.0  # what the last trial costs: until the purse holds it, no price is asked for another
        self._has_asked = False  # the executor's drafter, in the step that is planned
        self._asks_in: int | None = None  # steps until it may be asked; None: nobody has such a drafter
        self._resting: list[Asked] = []  # pools of the sequences of that step that were given up
        # its share of that step's drafts, the step's price without drafts and with
        self._sent: tuple[float, float, float] | None = None
        self._last_shape: StepShape | None = None

    def begin(self, name: str, kind: int = 0) -> Acceptance:
        """Of a new sequence with this drafter; each kind of request has chances of its own."""
        return Acceptance(self._pools.setdefault((name, kind), Acceptance()))

    def begin_asked(self, name: str, kind: int = 0) -> Asked:
        """The same with the executor's drafter. It is given up from the start where the like of it does not pay."""
        pool = self._asked_pools.setdefault((name, kind), Asked(self.purse))
        own = Asked(self.purse, pool)
        shape = self._last_shape
        if shape is not None:
            chances = [pool.chances(_FEW_DEPTHS)] * shape.n_sequences
            price_s = partial(self._price_and_draft_s, shape)
            most_rows = _FEW_DEPTHS * shape.n_sequences
            if not any(choose_depths(chances, n_sure=len(chances), most_rows=most_rows, price_s=price_s)):
                own.state = Asking.GIVEN_UP
        return own

    def best(self, guesses: Sequence[tuple[Acceptance, int, int]]) -> int:
        """Which of these guesses for one sequence is worth most."""
        worths = [estimate.worth(n, confidence) for estimate, n, confidence in guesses]
        return worths.index(max(worths))

    def read(self, estimate: Asked, end: int, n: int) -> int | None:
        """How many drafts, n at most, to ask of the executor behind a prefill chunk that ends there; None: not to read it."""
        if estimate.state is Asking.GIVEN_UP or not self.purse.reads_prompts:
            return None
        estimate.read_tokens = end
        return min(n, estimate.first_depth)

    def is_due(self, n_decodes: int) -> bool:
        """Whether to guess in this step: always, but where the price says no, as rarely as guesses are dear."""
        refusal = self._refusals.get(n_decodes.bit_length())
        if refusal is None or refusal.is_guessed_always:
            return True
        refusal.asks_in -= 1
        refusal.guesses_in -= 1
        if refusal.guesses_in > 0:
            return False
        refusal.guesses_in = refusal.every
        return True

    def silent(self, shape: StepShape, n_decodes: int) -> None:
        """Nobody had a guess: after many such steps guesses are made as rarely as they are dear."""
        refusal = self._refusals.setdefault(n_decodes.bit_length(), _Refusal())
        refusal.n_silent += 1
        if refusal.n_silent % _SILENCE == 0:
            refusal.every = refusal.guesses_in = self._rarely(n_decodes, shape)

    def idle_steps(self, n_decodes: int, *, is_guessing: bool) -> int:
        """For how many steps like the one just planned nothing would be guessed (by those that guess here) or asked."""
        idle = _LONGEST_IDLE if self._asks_in is None else self._asks_in
        if is_guessing:
            refusal = self._refusals.get(n_decodes.bit_length())
            idle = 0 if refusal is None or refusal.is_guessed_always else min(idle, refusal.guesses_in - 1)
        return max(idle, 0)

    def idle(self, n_steps: int, n_decodes: int) -> None:
        """So many of them passed."""
        self.purse.pass_steps(n_steps)
        for pool in self._resting:
            pool.rest -= n_steps
        refusal = self._refusals.get(n_decodes.bit_length())
        if refusal is not None:
            refusal.asks_in -= n_steps
            refusal.guesses_in -= n_steps

    def _rarely(self, n_decodes: int, shape: StepShape) -> int:
        """Steps from one guess to the next, so that guesses in vain take their share of the time and no more."""
        return min(_REST, ceil(n_decodes * self._guess_s / (_SHARE * self._predict_s(shape))))

    def choose(
        self, guesses: Sequence[tuple[Acceptance, int, int]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """How many drafts to verify of each of the step's decode chunks, at most `most_rows` together.

        guesses: of each decode chunk its estimate, how many of its drafts have room, and the confidence of the guess.
        shape: of the step without drafts, decode chunks first. limit_s: longest that a step with drafts may take.
        """
        refusal = self._refusals.setdefault(len(guesses).bit_length(), _Refusal())
        refusal.n_silent = 0
        guess_s = self._guess_s * sum(n > 0 for _, n, _ in guesses)

        def price_s(depths: Sequence[int]) -> float:  # who drafts guesses in every step
            return self._price_s(shape, depths) + (guess_s if any(depths) else 0.0)

        depths = self._decide(guesses, refusal, price_s, most_rows, limit_s)
        size = shape.n_sequences.bit_length()
        if any(depths) and self._verify and size not in self._plain and refusal.is_blind():
            return [0] * len(guesses)
        if refusal.worth and refusal.asks_in == _REST:  # the price said no just now
            refusal.every = refusal.guesses_in = self._rarely(len(guesses), shape)
            chances = [estimate.chances(n, confidence) if n else [] for estimate, n, confidence in guesses]
            probe = refusal.probe(chances, most_rows)
            most_s = min(_PROBE_PRICE * price_s(depths), limit_s or inf)
            if any(probe) and price_s(probe) <= most_s:
                depths = probe
        if self._asked_pools and any(depths):
            self._note_rows(guesses, depths, price_s)
        return depths

    def ask(
        self, guesses: Sequence[tuple[Asked, int, int]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """How many drafts the executor is to make behind each decode chunk, for the next step: those that would pay.

        As `choose`, and the drafter's time counts. Where nothing pays, one draft is asked for now and then, as only a drafter
        that drafts can be judged. 0: the sequence is given up until it is asked again.
        """
        self.purse.pass_steps(1)
        self._has_asked = False
        depths = [0] * len(guesses)
        asked = self._to_ask(guesses)
        if not asked:
            self._asks_in = min([pool.rest - 1 for pool in self._resting], default=_LONGEST_IDLE)
            return depths
        self._asks_in = 0
        plain_s = self._price_s(shape, depths)
        self.purse.fill(plain_s, len(guesses))
        self._last_shape = shape
        is_short = self.purse.balance_s < self._short_of_s and all(guesses[i][0].state is Asking.TRIED for i in asked)
        if self.purse.is_empty or is_short:
            self._short_of_s *= _FORGOTTEN
            self._asks_in = _SHORT_IDLE
            return depths
        starts = [one.start_pos for one in shape.shapes for _ in range(one.count)]
        asked = [i for i in asked if self._can_read(starts[i] - guesses[i][0].read_tokens)]
        if not asked:
            self._asks_in = _SHORT_IDLE
            return depths
        chances: list[list[float]] = [[] for _ in guesses]
        for i in asked:
            estimate, n, confidence = guesses[i]
            chances[i] = estimate.chances(n, confidence)
        price_s = partial(self._price_and_draft_s, shape)
        depths = choose_depths(chances, n_sure=len(guesses), most_rows=most_rows, price_s=price_s, limit_s=limit_s)
        refused = []
        for i in asked:
            guesses[i][0].price(depths[i])
            if not depths[i]:
                refused.append(i)
        if refused:
            refused.sort(key=lambda i: -sum(chances[i]))
            depths = self._with_trials(depths, refused, price_s)
        for i in asked:
            if depths[i]:
                self._has_asked = True
                guesses[i][0].read_tokens = starts[i] + 1
        return depths

    def _to_ask(self, guesses: Sequence[tuple[Asked, int, int]]) -> list[int]:
        """The sequences that are followed, and those given up that are tried again now."""
        asked: list[int] = []
        given_up: dict[int, tuple[Asked, list[int]]] = {}
        for i, (estimate, n, _) in enumerate(guesses):
            if not n:
                continue
            pool = estimate.pool
            if estimate.state is not Asking.GIVEN_UP or pool is None:
                asked.append(i)
            else:
                given_up.setdefault(id(pool), (pool, []))[1].append(i)
        self._resting = [pool for pool, _ in given_up.values()]
        for pool, some in given_up.values():
            pool.rest -= 1
            if pool.rest > 0:
                continue
            pool.rest = pool.wait
            some.sort(key=lambda i: -guesses[i][0].worth(1))
            for i in some[: 1 + len(some) // _TRIED_SHARE]:
                guesses[i][0].begin_trial()
                asked.append(i)
        return asked

    def _can_read(self, missed_tokens: int) -> bool:
        """Whether the purse pays for what the drafter has missed of a sequence."""
        if self._read_s is None or missed_tokens <= _FEW_TOKENS:
            return True
        return self._read_s(missed_tokens) <= self.purse.balance_s

    def _with_trials(
        self, depths: list[int], refused: list[int], price_s: Callable[[Sequence[int]], float]
    ) -> list[int]:
        """One draft of as many of the refused, the likeliest first, as the purse pays for."""
        before_s = price_s(depths)
        while refused:
            tried = list(depths)
            for i in refused:
                tried[i] = 1
            self._short_of_s = price_s(tried) - before_s
            if not self._drafting.is_known or self._short_of_s <= self.purse.balance_s:
                return tried
            refused = refused[: len(refused) // 2]
        return depths

    def _note_rows(
        self,
        guesses: Sequence[tuple[Acceptance, int, int]],
        depths: list[int],
        price_s: Callable[[list[int]], float],
    ) -> None:
        """The executor's drafts in a step are to pay for their part of what it takes longer."""
        rows = sum(depth for (estimate, _, _), depth in zip(guesses, depths, strict=True) if type(estimate) is Asked)
        if rows:
            self._sent = (rows / sum(depths), price_s([0] * len(depths)), price_s(depths))

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
        if self._sent is None and not self._has_asked and shape.n_tokens == shape.n_sequences == shape.decode_tokens:
            self._n_plain += 1  # in a row; of a long row some say enough
            if self._n_plain > _PLAIN_EVERY and self._n_plain % _PLAIN_EVERY:
                return
        else:
            self._n_plain = 0
        if self._sent is not None:
            (share, plain_s, longer_s), self._sent = self._sent, None
            took_s = longer_s if shape.prefill_tokens else min(measured_s, _FARTHEST * longer_s)
            self.purse.pay(share * max(0.0, took_s - plain_s))
        if not (self._pools or self._asked_pools) or shape.prefill_tokens or not shape.decode_tokens:
            return
        self._n_learned += 1
        if self._n_learned < _LIKE_STEPS or self._n_learned % _LIKE_STEPS == 0:
            self._longer.clear()
        ratio = measured_s / max(self._predict_s(shape), 1e-12)
        if shape.decode_tokens == shape.n_sequences:
            if self._has_asked:  # the drafter reads what the step computes
                plain_s = measured_s / ratio * self._plain_ratio(shape)
                self.purse.pay(min(max(0.0, measured_s - plain_s), (_FARTHEST - 1.0) * plain_s))
                return
            self._plain.setdefault(shape.decode_tokens.bit_length(), Ratio()).add(ratio)
            kept = _FADE if self._n_plain <= _PLAIN_EVERY else _FADE**_PLAIN_EVERY
            for known in self._verify.values():
                known.fade(self._plain_ratio(shape), kept)
        else:
            rows = shape.decode_tokens.bit_length()
            like = self._ratio(shape, rows) if self._plain or self._verify else None
            self._verify.setdefault(rows, Ratio()).add(ratio, like)

    def observe_drafting(self, shape: StepShape, depths: Sequence[int], measured_s: float, *, n_read: int) -> None:
        """The executor's drafter took so long in a step of this shape, for these drafts; it read n_read tokens for them."""
        expected_s = self._predict_s(shape) * self._plain_ratio(shape)  # to read is never dearer than to compute
        if any(depths) and self._draft_s is not None:
            drafting_s = self._draft_s(shape, depths)
            expected_s = drafting_s * self._drafting.value
            if n_read <= _FEW_TOKENS * len(depths):
                self._drafting.add(measured_s / max(drafting_s, 1e-12))
            elif self._read_s is not None:
                expected_s += self._read_s(n_read)
        took_s = min(measured_s, DISTURBED * expected_s) if self._drafting.is_known else measured_s
        if shape.prefill_tokens and not any(depths):
            self.purse.pay_for_prompts(took_s)
        else:
            self.purse.pay(took_s)

    def _price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """Seconds of the step with these depths of its decode chunks."""
        plain_s, rows = self._predict_s(shape), sum(depths)
        if not rows:
            return plain_s * self._plain_ratio(shape)
        times = self._times_longer(shape, depths, rows)
        return plain_s * times * self._ratio(shape, (shape.decode_tokens + rows).bit_length())

    def _times_longer(self, shape: StepShape, depths: Sequence[int], rows: int) -> float:
        """By what the drafts multiply the predicted time of a step. Remembered: a choice of depth asks for half a dozen."""
        if shape.prefill_tokens:
            return self._predict_s(shape.with_drafts(depths)) / self._predict_s(shape)
        key = shape.n_sequences, rows, shape.decode_context_tokens // (_LIKE_TOKENS * shape.n_sequences)
        times = self._longer.get(key)
        if times is None:
            plain_s = self._predict_s(shape)
            times = self._longer[key] = self._predict_s(shape.with_drafts(depths)) / max(plain_s, 1e-12)
        return times

    def _price_and_draft_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """The same with the drafts to be made first."""
        draft_s = 0.0 if self._draft_s is None or not any(depths) else self._draft_s(shape, depths)
        return self._price_s(shape, depths) + draft_s * self._drafting.value

    def _plain_ratio(self, shape: StepShape) -> float:
        """Measured over predicted of steps without drafts and about so many sequences."""
        return _nearest(self._plain, shape.n_sequences.bit_length()) if self._plain else 1.0

    def _ratio(self, shape: StepShape, rows: int) -> float:
        """The same of steps with drafts and about so many rows."""
        return _nearest(self._verify, rows) if self._verify else self._plain_ratio(shape)


def _nearest(ratios: dict[int, Ratio], rows: int) -> float:
    """Of the nearest number of rows that was seen."""
    known = ratios.get(rows)
    return (ratios[min(ratios, key=lambda seen: abs(seen - rows))] if known is None else known).value


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
    tokens, taken = float(n_sure), 0
    while taken < len(ranked):
        size = max(1, 2 * taken) if taken < _SINGLY else _rounder(len(chances) + taken) - len(chances)
        for minus_chance, _, i in ranked[taken:size]:
            depths[i] += 1
            tokens -= minus_chance
        taken = min(size, len(ranked))
        step_s = price_s(depths)
        if limit_s is not None and step_s > limit_s:
            break
        if tokens / step_s > best:
            chosen, best = list(depths), tokens / step_s
    return chosen


def _rounder(rows: int) -> int:
    """The next number of rows that fills whole tiles: a power of two, or half as much again."""
    power = 1 << (rows.bit_length() - 1)
    return power * 3 // 2 if power > 1 and rows < power * 3 // 2 else 2 * power
