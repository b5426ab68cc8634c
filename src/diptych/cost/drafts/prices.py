"""How many guesses at coming tokens are worth their rows: one arithmetic for engine, planner, simulator.

A step that verifies d drafts behind a sequence's token computes d rows more and hands out 1 + (drafts that hold) tokens.
Draft j holds with the chance c_j (`acceptance.py`). So a step gives n + sum of c_j tokens in price(rows) seconds, and
more drafts are worth it while tokens per second rise: `choose_depths`.

`DraftPrices` chooses depths by predicted time. Guesses are judged whether or not they were verified, which costs no row.
Where the price says no, it is asked rarely, guesses are made as rarely as they are dear, and very rarely a few drafts are
verified all the same: a price that nobody ever paid may be wrong. The executor's drafters cost time before they guess: which
of them is asked about whom is `drafter_choice.py`, and what that may cost `drafter_trials.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import TypedDict, Unpack

from diptych.cost.drafts.acceptance import FIRST_RATE, LEAST_CHANCE, Acceptance
from diptych.cost.drafts.depths import DISTURBED, FARTHEST, LOWEST, Ratio, choose_depths
from diptych.cost.drafts.drafter_choice import LONGEST_IDLE, Asker, Option, Wanted
from diptych.cost.drafts.drafter_trials import Asked, DrafterCost, Purse
from diptych.ground.shape import StepShape

# Both measured behind steps that empty the caches.
_GUESS_S = 12e-6  # of one guess and the questions around it, where nobody says
_ROUND = 5  # times that takes what is done once in a step with guesses
_REST = 16, 4  # steps and guesses for which a price that said no is believed, unless chances rise
_RISEN = 1.1
_PROBE = (1, 16)  # refusals from one probe to the next, at first and at last
_PROBE_DEPTH = 2
_SILENCE = 16  # steps in which nobody had a guess and no draft held, until guesses are made as rarely as they are dear
_LOOKS = 2  # steps in which one is looked for behind a guess, however long it was silent before
_STAKE = 0.5  # of what the purse holds may go to one of them
_SHARE = 0.005  # of the time of steps that guesses may take which the price refuses
_SILENT_SHARE = 0.02  # the same of looking for one: text that begins to quote is not to wait long
_RAREST = 64  # steps from one guess to the next
_PLAIN_ALL = 8  # steps behind drafts that are all looked at, where their size is known
_PLAIN_EVERY = 16  # of which one is, then
_LONG_S = 0.01  # a step that takes longer does not notice that it is looked at
_BLIND = (4, 64)  # steps with drafts until one of their size goes without, to see what that takes: at first, at most
_LOWER = 0.93  # of what a step without drafts was thought to take: the next goes without, too, until that is known
_LIKE_TOKENS = 256  # of context: within them drafts multiply the time of a step by the same
_LIKE_STEPS = 64  # measured, until what was remembered is predicted again
_FADE = 0.998  # per step without drafts, and for two with: an old measurement is tried again some day
_SENT_EVERY = 16  # steps with drafts after which that is done for all of them


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
        self.n_silent = 0  # steps in which nobody had a guess, since a draft held
        self.worth = 0.0  # the most that was refused; 0: nothing was
        self.asks_in = 0  # steps until the price is asked whatever the worth
        self.every = 1  # steps from one guess to the next
        self.guesses_in = 0
        self.probes_in = 0  # refusals until some drafts are verified anyway, to see what they cost
        self.probe_every = _PROBE[0]

    def is_blind(self, *, is_known: bool) -> bool:
        """Whether a step is to go without drafts that would pay: what it takes without is known from such steps alone.

        is_known: whether any of the size was seen; what was seen may have been disturbed, or be old.
        """
        self.left_blind -= 1
        if self.left_blind > 0:
            return False
        self.blind_in = self.left_blind = _BLIND[1] if is_known else min(2 * self.blind_in, _BLIND[1])
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


class DraftCosts(TypedDict, total=False):
    """What `DraftPrices` may be told.

    guess_s: seconds of the processor for one guess and the questions around it. drafters: those that the executor runs.
    """

    guess_s: float
    drafters: Sequence[DrafterCost]


class DraftPrices:
    """Depths of all sequences of a step by predicted time, corrected by how long such steps took. One per engine.

    predict_s: seconds of a step.
    """

    def __init__(self, predict_s: Callable[[StepShape], float], **costs: Unpack[DraftCosts]) -> None:
        self.purse = Purse()  # of the executor's drafters
        self.rows_purse = Purse()  # of what steps take longer for any draft
        self._predict_s = predict_s
        self._guess_s = costs.get("guess_s", _GUESS_S)
        self._asker = Asker(self._price_s, self.purse, costs.get("drafters", ()))
        self._pools: dict[tuple[str, int], Acceptance] = {}
        self._refusals: dict[int, _Refusal] = {}  # by sequences of the step, as powers of two
        # measured over predicted, by `_size` of rows: of decode steps without drafts and with; and of the drafter
        self._plain: dict[int, Ratio] = {}
        self._verify: dict[int, Ratio] = {}
        # sequences of steps without drafts that are known, and short: of many some say enough
        self._settled: set[int] = set()
        self._n_plain = 0  # of them, since the last with drafts
        self._longer: dict[tuple[int, int, int], float] = {}  # see _times_longer
        self._n_learned = 0
        self._has_held = False  # a draft, since the last choice
        # of the planned step's drafts the executor's share; its price without drafts, with them, and `_most_s`
        self._sent: tuple[float, float, float, tuple[float, float]] | None = None

    def begin(self, name: str, kind: int = 0, *, is_sure: bool = False) -> Acceptance:
        """Of a new sequence with this drafter; each kind of request has chances of its own. is_sure: they begin with 1."""
        pool = self._pools.setdefault((name, kind), Acceptance(first_rate=1.0 if is_sure else FIRST_RATE))
        estimate = Acceptance(pool)
        estimate.on_kept = self._held
        return estimate

    def begin_asked(self, names: Sequence[str], kind: int = 0) -> list[Asked]:
        """The same with the executor's drafters, by number: one of them follows the sequence, where any pays."""
        estimates = self._asker.begin(len(names), kind)
        for estimate in estimates:
            estimate.on_kept = self._held
        return estimates

    def _held(self, n_kept: int) -> None:
        """So many drafts of a sequence held."""
        self.rows_purse.gain(n_kept)
        self._has_held = True

    def best(self, guesses: Sequence[tuple[Acceptance, int, int]]) -> int:
        """Which of these guesses for one sequence is worth most."""
        worths = [estimate.worth(n, confidence) for estimate, n, confidence in guesses]
        return worths.index(max(worths))

    def read(self, estimates: Sequence[Asked | None], end: int, n: int) -> Wanted | None:
        """Who of the executor's drafters reads a prefill chunk that ends there, and how many drafts, n at most, it makes
        behind it; None: nobody.
        """
        return self._asker.read(estimates, end, n)

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
        if refusal.n_silent >= _SILENCE:
            every = min(2 * refusal.every, self._rarely(n_decodes, shape, _SILENT_SHARE))
            refusal.every = refusal.guesses_in = every

    def idle_steps(self, n_decodes: int, *, is_guessing: bool) -> int:
        """For how many steps like the one just planned nothing would be guessed (by those that guess here) or asked."""
        asks_in = self._asker.asks_in
        idle = LONGEST_IDLE if asks_in is None else asks_in
        if is_guessing:
            refusal = self._refusals.get(n_decodes.bit_length())
            idle = 0 if refusal is None or refusal.is_guessed_always else min(idle, refusal.guesses_in - 1)
        return max(idle, 0)

    def idle(self, n_steps: int, n_decodes: int) -> None:
        """So many of them passed."""
        self._asker.idle(n_steps)
        self.rows_purse.pass_steps(n_steps)
        refusal = self._refusals.get(n_decodes.bit_length())
        if refusal is not None:
            refusal.asks_in -= n_steps
            refusal.guesses_in -= n_steps

    def _rarely(self, n_decodes: int, shape: StepShape, share: float) -> int:
        """Steps from one guess to the next, so that guesses in vain take this share of the time and no more."""
        return min(_RAREST, ceil((_ROUND + n_decodes) * self._guess_s / (share * self._predict_s(shape))))

    def choose(
        self, guesses: Sequence[tuple[Acceptance, int, int]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[int]:
        """How many drafts to verify of each of the step's decode chunks, at most `most_rows` together.

        guesses: of each decode chunk its estimate, how many of its drafts have room, and the confidence of the guess.
        shape: of the step without drafts, decode chunks first. limit_s: longest that a step with drafts may take.
        """
        refusal = self._refusals.setdefault(len(guesses).bit_length(), _Refusal())
        refusal.n_silent = 0 if self._has_held else min(refusal.n_silent, _SILENCE - _LOOKS)
        self._has_held = False
        if not refusal.worth:
            refusal.every = 1
        self.rows_purse.pass_steps(1)
        if not shape.prefill_tokens:
            self.rows_purse.fill(self._price_s(shape, [0] * len(guesses)), len(guesses))
        if self.rows_purse.is_empty:
            return [0] * len(guesses)
        guess_s = self._guess_s * (_ROUND + sum(n > 0 for _, n, _ in guesses))

        def price_s(depths: Sequence[int]) -> float:  # who drafts guesses in every step
            return self._price_s(shape, depths) + (guess_s if any(depths) else 0.0)

        depths, is_refused = self._decide(guesses, refusal, price_s, most_rows, limit_s)
        size = _size(shape.n_sequences)
        if any(depths) and self._verify and refusal.is_blind(is_known=size in self._plain):
            return [0] * len(guesses)
        if is_refused:
            refusal.every = refusal.guesses_in = self._rarely(len(guesses), shape, _SHARE)
            refusal.asks_in = max(_REST[0], _REST[1] * refusal.every)
            chances = [estimate.chances(n, confidence) if n else [] for estimate, n, confidence in guesses]
            probe = refusal.probe(chances, most_rows)
            stake_s = _STAKE * self.rows_purse.balance_s
            most_s = min(price_s(depths) + stake_s, limit_s or inf)
            if any(probe) and price_s(probe) <= most_s:
                depths = probe
        if any(depths):
            self._note_rows(guesses, depths, shape)
        return depths

    def is_asking(self) -> bool:
        """Whether anybody may be asked in this step; it is over where not."""
        return not self._asker.skips()

    def ask(
        self, options: Sequence[Sequence[Option]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[Wanted]:
        """Which of the executor's drafters is to make how many drafts behind each decode chunk, for the next step.

        options: of each chunk what each drafter, by number, could make. As `choose`, and the drafter's time counts.
        """
        return self._asker.ask(options, shape=shape, most_rows=most_rows, limit_s=limit_s)

    def _note_rows(
        self, guesses: Sequence[tuple[Acceptance, int, int]], depths: Sequence[int], shape: StepShape
    ) -> None:
        """The drafts in a step are to pay for what it takes longer, and the executor's for their part of it."""
        rows = sum(depth for (estimate, _, _), depth in zip(guesses, depths, strict=True) if type(estimate) is Asked)
        plain_s, longer_s = self._price_s(shape, [0] * len(depths)), self._price_s(shape, depths)
        self._sent = rows / sum(depths), plain_s, longer_s, self._most_s(shape, depths, longer_s)

    def _most_s(self, shape: StepShape, depths: Sequence[int], longer_s: float) -> tuple[float, float]:
        """What a step of this price takes at most, beyond which it was the machine that did something else; and what is paid
        for it then.
        """
        is_known = _size(shape.decode_tokens + sum(depths)) in self._verify
        most_s = (FARTHEST if is_known else DISTURBED) * longer_s
        return most_s, most_s

    def _decide(
        self,
        guesses: Sequence[tuple[Acceptance, int, int]],
        refusal: _Refusal,
        price_s: Callable[[list[int]], float],
        most_rows: int,
        limit_s: float | None,
    ) -> tuple[list[int], bool]:
        """The depths that pay, after what was refused of late; and whether the price says no just now."""
        least = 0.0 if refusal.asks_in <= 0 else refusal.worth * _RISEN
        chances = [estimate.chances(n, confidence) if n else [] for estimate, n, confidence in guesses]
        chances = [row if sum(row) > least else [] for row in chances]
        worth = max(map(sum, chances), default=0.0)
        depths = [0] * len(guesses)
        if worth and most_rows > 0:
            depths = choose_depths(chances, n_sure=len(guesses), most_rows=most_rows, price_s=price_s, limit_s=limit_s)
        if any(depths):
            refusal.worth = 0.0
            return depths, False
        is_refused = worth > 0.0 or refusal.asks_in <= 0
        if is_refused:
            refusal.worth = max(worth, LEAST_CHANCE)
        return depths, is_refused

    def observe(self, shape: StepShape, measured_s: float) -> None:
        """Learn how far off predictions are for steps with and without drafts; steps with prefill say nothing of it."""
        weight = 1
        if self._sent is not None or self._asker.has_asked:
            self._n_plain = 0
        elif shape.n_tokens in self._settled and shape.n_sequences == shape.decode_tokens == shape.n_tokens:
            self._n_plain += 1
            if self._n_plain > _PLAIN_ALL:
                if self._n_plain % _PLAIN_EVERY:
                    return
                weight = _PLAIN_EVERY
        if self._sent is not None:
            (share, plain_s, longer_s, (most_s, disturbed_s)), self._sent = self._sent, None
            took_s = longer_s if shape.prefill_tokens else measured_s if measured_s <= most_s else disturbed_s
            if measured_s < _LOWER * plain_s:  # with drafts in it
                self._doubt(shape)
            self.purse.pay(share * max(0.0, took_s - plain_s))
            self.rows_purse.pay(max(0.0, took_s - plain_s))
        if not (self._pools or self._asker.is_needed) or shape.prefill_tokens or not shape.decode_tokens:
            return
        self._n_learned += 1
        if self._n_learned < _LIKE_STEPS or self._n_learned % _LIKE_STEPS == 0:
            self._longer.clear()
        predicted_s = max(self._predict_s(shape), 1e-12)
        ratio = measured_s / predicted_s
        if shape.decode_tokens == shape.n_sequences:
            if self._asker.has_asked:  # the drafter reads what the step computes
                plain_s = predicted_s * self._plain_ratio(shape)
                self.purse.pay(min(max(0.0, measured_s - plain_s), (FARTHEST - 1.0) * plain_s))
                return
            known = self._plain.setdefault(_size(shape.decode_tokens), Ratio(LOWEST))
            if known.is_known and ratio < _LOWER * known.value:
                self._doubt(shape)
            known.add(ratio)
            if known.is_settled and predicted_s < _LONG_S:
                self._settled.add(shape.decode_tokens)
            self._fade(shape, _FADE**weight)
        else:
            rows = _size(shape.decode_tokens)
            like = self._ratio(shape, rows)
            if self._n_learned % _SENT_EVERY == 0:
                self._fade(shape, _FADE ** (_SENT_EVERY // 2))
            self._verify.setdefault(rows, Ratio()).add(ratio, like)

    def _doubt(self, shape: StepShape) -> None:
        """Steps of so many sequences take less without drafts than was thought: the next is one."""
        refusal = self._refusals.get(shape.n_sequences.bit_length())
        if refusal is not None:
            refusal.left_blind = 1

    def _fade(self, shape: StepShape, kept: float) -> None:
        """Believe what steps with drafts took a little less."""
        for known in self._verify.values():
            known.fade(self._plain_ratio(shape), kept)

    def observe_drafting(
        self, shape: StepShape, depths: Sequence[int], measured_s: float, *, n_read: int, drafter: int = 0
    ) -> None:
        """The executor's drafter of this number took so long in a step of this shape, for these drafts; it read n_read
        tokens for them.
        """
        read_s = self._predict_s(shape) * self._plain_ratio(shape)  # to read is never dearer than to compute
        self._asker.observe(drafter, shape, depths, measured_s, n_read=n_read, read_s=read_s)

    def _price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """Seconds of the step with these depths of its decode chunks."""
        plain_s, rows = self._predict_s(shape), sum(depths)
        if not rows:
            return plain_s * self._plain_ratio(shape)
        times = self._times_longer(shape, depths, rows)
        return plain_s * times * self._ratio(shape, _size(shape.decode_tokens + rows))

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

    def _plain_ratio(self, shape: StepShape) -> float:
        """Measured over predicted of steps without drafts and about so many sequences."""
        return _nearest(self._plain, _size(shape.n_sequences)) if self._plain else 1.0

    def _ratio(self, shape: StepShape, rows: int) -> float:
        """The same of steps with drafts and about so many rows."""
        return _nearest(self._verify, rows) if self._verify else self._plain_ratio(shape)


def _size(rows: int) -> int:
    """Rows that are one size: from a power of two to half as much again, and from there to the next."""
    n_bits = rows.bit_length()
    return 2 * n_bits + (rows >> (n_bits - 2) & 1 if n_bits > 1 else 0)


def _nearest(ratios: dict[int, Ratio], rows: int) -> float:
    """Of the nearest size that was seen."""
    known = ratios.get(rows)
    return (ratios[min(ratios, key=lambda seen: abs(seen - rows))] if known is None else known).value
