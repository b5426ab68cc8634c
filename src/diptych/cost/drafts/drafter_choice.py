"""Which of the executor's drafters is asked, about which sequences and for how many drafts.

A drafter costs time before it guesses, and may have to keep up with the text. So a sequence is followed by one drafter at
most: the one that gives most tokens per second by learned acceptance and measured time. The others are given up, which costs
nothing, and now and then one of them is tried in its place, for one draft a step, out of the purse: the first wrong draft ends
the trial, and a drafter that is now found to give a tenth more stays. Where none pays, none follows, and trials go on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from diptych.cost.drafts.depths import DISTURBED, Ratio, choose_depths
from diptych.cost.drafts.drafter_trials import Asked, Asking, DrafterCost, Purse
from diptych.ground.shape import StepShape

Option = tuple[Asked, int, int]  # of one drafter for one chunk: its estimate, how many drafts have room, its confidence
Wanted = tuple[int, int]  # which drafter is asked, and for how many drafts

LONGEST_IDLE = 64  # steps
_SHORT_IDLE = 8  # the same while the purse cannot pay
_TRIED_SHARE = 8  # one of so many sequences that were given up is tried at a time
_FEW_TOKENS = 32  # read by a drafter with the next guess, for nothing
_FORGOTTEN = 0.95  # of a price that the purse could not pay is left a step later
_FEW_DEPTHS = 4  # are enough to see whether a drafter pays for all sequences alike
_BETTER = 1.1  # what another drafter must give over the one that is followed: to change costs what was read


class _Candidate:
    """One drafter: what it costs, and what is known of all sequences of a kind."""

    __slots__ = ("cost", "pools", "rest", "times")

    def __init__(self, cost: DrafterCost) -> None:
        self.cost = cost
        self.times = Ratio()  # measured over what it is thought to take, where that is a guess
        self.rest = Ratio()  # else seconds beyond its forwards, which are measured: once, however many drafts it makes
        self.pools: dict[int, Asked] = {}  # by kind of request

    @property
    def is_known(self) -> bool:
        """Whether its time was measured where it was asked, if it takes any."""
        return self.times.is_known or self.rest.is_known or self.cost.draft_s is None

    @property
    def is_priced(self) -> bool:
        """Whether its time was measured at all."""
        return self.is_known or self.cost.is_measured

    def draft_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        if self.cost.draft_s is None or not any(depths):
            return 0.0
        rest_s = self.rest.value if self.rest.is_known else 0.0
        return self.cost.draft_s(shape, depths) * self.times.value + rest_s

    def learn(self, drafting_s: float, measured_s: float) -> None:
        """Drafts took so long that were thought to take drafting_s by `cost`."""
        if self.cost.is_measured:
            self.rest.add(max(0.0, measured_s - drafting_s), drafting_s / 2.0)
        else:
            self.times.add(measured_s / max(drafting_s, 1e-12))


class Asker:
    """See the module. One per engine; price_s(shape, depths): a step's seconds with these depths, without the drafter."""

    def __init__(
        self, price_s: Callable[[StepShape, Sequence[int]], float], purse: Purse, drafters: Sequence[DrafterCost]
    ) -> None:
        self.has_asked = False  # any drafter, in the step that is planned
        self.asks_in: int | None = None  # steps until any may be asked; None: nobody has such a drafter
        self._n_skipped = 0  # steps to come for which nothing need be looked at, whoever else guesses in them
        self._price_s = price_s
        self._purse = purse
        self._candidates = [_Candidate(cost) for cost in drafters]
        self._short_of_s = 0.0  # what the last trial costs: until the purse holds it, no price is asked for another
        self._resting: list[Asked] = []  # pools of the sequences of that step that were given up
        self._last_shape: StepShape | None = None

    @property
    def is_needed(self) -> bool:
        """Whether any sequence had such a drafter."""
        return any(one.pools for one in self._candidates)

    def begin(self, n_drafters: int, kind: int) -> list[Asked]:
        """Of a new sequence, by number. It is followed by the drafter that gives most to the like of it, if any pays."""
        while len(self._candidates) < n_drafters:  # nobody says what they cost
            self._candidates.append(_Candidate(DrafterCost()))
        self._n_skipped = 0
        options = []
        for one in self._candidates[:n_drafters]:
            pool = one.pools.setdefault(kind, Asked(self._purse))
            options.append(Asked(self._purse, pool))
            options[-1].state = Asking.GIVEN_UP
        leader = self._leader(options)
        if leader is not None:
            options[leader].state = Asking.PAYS
        return options

    def read(self, estimates: Sequence[Asked | None], end: int, n: int) -> Wanted | None:
        """Who reads a prefill chunk that ends there, and how many drafts, n at most, it makes behind it; None: nobody."""
        if not self._purse.reads_prompts:
            return None
        for number, estimate in enumerate(estimates):
            if estimate is not None and estimate.state is not Asking.GIVEN_UP:
                estimate.read_tokens = end
                return number, min(n, estimate.first_depth, self._candidates[number].cost.most_drafts)
        return None

    def idle(self, n_steps: int) -> None:
        """So many steps passed in which nobody could be asked."""
        self._purse.pass_steps(n_steps)
        for pool in self._resting:
            pool.rest -= n_steps

    def skips(self) -> bool:
        """Whether nobody can be asked in this step, as all are given up or nothing can be paid; then it is over."""
        if not self._n_skipped:
            return False
        self._n_skipped -= 1
        self.has_asked = False
        self.idle(1)
        if self.asks_in:
            self.asks_in -= 1
        return True

    def ask(
        self, options: Sequence[Sequence[Option]], *, shape: StepShape, most_rows: int, limit_s: float | None
    ) -> list[Wanted]:
        """See `Depths.ask`. Where nothing pays one draft is asked for now and then, as only who drafts can be judged."""
        self._purse.pass_steps(1)
        self.has_asked = False
        wanted: list[Wanted] = [(0, 0)] * len(options)
        starts = [one.start_pos for one in shape.shapes for _ in range(one.count)]
        asked = self._to_ask(options, starts)
        if not asked:
            self.asks_in = min([pool.rest - 1 for pool in self._resting], default=LONGEST_IDLE)
            if all(some and all(one is None or one.state is Asking.GIVEN_UP for one, _, _ in some) for some in options):
                self._n_skipped = max(0, min(self.asks_in, LONGEST_IDLE))
            return wanted
        self.asks_in = 0
        self._purse.fill(self._price_s(shape, [0] * len(options)), len(options))
        self._last_shape = shape
        is_short = self._is_short and all(options[i][number][0].state is Asking.TRIED for i, number in asked.items())
        if self._is_short:
            self._short_of_s *= _FORGOTTEN
        if self._purse.is_empty or is_short:
            self.asks_in = self._n_skipped = min(
                max(_SHORT_IDLE, self._purse.steps_until(self._short_of_s)), LONGEST_IDLE
            )
            return wanted
        chosen: dict[int, list[int]] = {}  # by drafter
        for i, number in asked.items():
            number = self._settled(options[i], number, starts[i], shape)
            if self._can_read(number, starts[i] - options[i][number][0].read_tokens):
                chosen.setdefault(number, []).append(i)
        if not chosen:
            self.asks_in = _SHORT_IDLE
            return wanted
        for number, some in chosen.items():
            depths = self._depths(number, some, options, shape=shape, most_rows=most_rows, limit_s=limit_s)
            for i in some:
                if depths[i]:
                    self.has_asked = True
                    wanted[i] = number, depths[i]
                    options[i][number][0].ask(starts[i] + 1)
        return wanted

    def observe(
        self,
        number: int,
        shape: StepShape,
        depths: Sequence[int],
        measured_s: float,
        *,
        n_read: int,
        read_s: float,
    ) -> None:
        """The drafter took so long in a step of this shape, for these drafts; it read n_read tokens, which is never dearer
        than read_s, to compute them.
        """
        candidate, purse = self._candidates[number], self._purse
        cost, expected_s, is_priced = candidate.cost, read_s, candidate.is_priced
        if any(depths) and cost.draft_s is not None:
            drafting_s = cost.draft_s(shape, depths)
            expected_s = candidate.draft_s(shape, depths)
            if n_read <= _FEW_TOKENS * len(depths):
                candidate.learn(drafting_s, measured_s)
            elif cost.read_s is not None:
                expected_s += cost.read_s(n_read)
        took_s = min(measured_s, DISTURBED * expected_s) if is_priced else measured_s
        if shape.prefill_tokens and not any(depths):
            purse.pay_for_prompts(took_s)
        else:
            purse.pay(took_s)

    @property
    def _is_short(self) -> bool:
        """Whether the purse does not hold what a trial takes."""
        return self._purse.balance_s < self._short_of_s

    def _leader(self, options: Sequence[Asked]) -> int | None:
        """The drafter that gives most to sequences like this one; None where none pays. The first before any is known."""
        shape = self._last_shape
        if shape is None:
            return 0
        best, leader = 0.0, None
        is_any_known = any(one.is_known for one in self._candidates)
        for number, estimate in enumerate(options):
            if self._candidates[number].is_known or (number == 0 and not is_any_known):
                rate = self._rate(number, estimate.chances(_FEW_DEPTHS), shape)
                if rate > best:
                    best, leader = rate, number
        return leader

    def _rate(self, number: int, chances: Sequence[float], shape: StepShape) -> float:
        """Tokens per second of a step whose sequences all have these chances, as deep as pays; 0 where nothing does."""
        n = shape.n_sequences
        rows = [chances[: self._candidates[number].cost.most_drafts]] * n
        price_s = partial(self._price_and_draft_s, number, shape)
        depths = choose_depths(rows, n_sure=n, most_rows=len(rows[0]) * n, price_s=price_s)
        if not any(depths):
            return 0.0
        return (n + sum(sum(row[:depth]) for row, depth in zip(rows, depths, strict=True))) / price_s(depths)

    def _to_ask(self, options: Sequence[Sequence[Option]], starts: Sequence[int]) -> dict[int, int]:
        """By chunk the drafter that follows its sequence, or is tried in its place, from now on or still."""
        asked: dict[int, int] = {}
        given_up: dict[tuple[int, int], list[int]] = {}  # chunks by drafter and pool
        for i, some in enumerate(options):
            for number, (estimate, n, _) in enumerate(some):
                if not n:
                    continue
                if estimate.state is Asking.GIVEN_UP and estimate.pool is not None:
                    given_up.setdefault((number, id(estimate.pool)), []).append(i)
                elif i not in asked or (estimate.state is Asking.TRIED) != self._is_short:
                    asked[i] = number
        self._resting = []
        for (number, _), chunks in given_up.items():
            pool = options[chunks[0]][number][0].pool
            assert pool is not None
            self._resting.append(pool)
            pool.rest -= 1
            if pool.rest > 0:
                continue
            every = self._candidates[number].cost.begins_every
            chunks = [i for i in chunks if starts[i] % every == 0 and self._is_free(options[i], asked.get(i))]
            if not chunks:
                continue
            pool.rest = pool.wait
            chunks.sort(key=lambda i: -options[i][number][0].worth(1))
            for i in chunks[: 1 + len(chunks) // _TRIED_SHARE]:
                options[i][number][0].begin_trial()
                asked[i] = number
        return asked

    def _is_free(self, some: Sequence[Option], number: int | None) -> bool:
        """Whether another drafter may be tried in place of this one: that it is not on trial itself, and time is there."""
        return number is None or (some[number][0].state is Asking.PAYS and not self._is_short)

    def _settled(self, some: Sequence[Option], number: int, start: int, shape: StepShape) -> int:
        """Who is asked of a drafter and the one in whose place it is tried: who can read, and then who gives more."""
        estimate, n, confidence = some[number]
        if estimate.state is not Asking.TRIED or len(some) == 1:
            return number
        for followed, (other, n_other, confidence_other) in enumerate(some):
            if n_other and other.state is Asking.PAYS:
                if not self._can_read(number, start - estimate.read_tokens):
                    estimate.fail()
                    return followed
                if self._candidates[number].is_known:
                    rate = self._rate(number, estimate.chances(n, confidence), shape)
                    if rate > _BETTER * self._rate(followed, other.chances(n_other, confidence_other), shape):
                        other.give_way()
                        estimate.price(1)
        return number

    def _can_read(self, number: int, missed_tokens: int) -> bool:
        """Whether the purse pays for what the drafter has missed of a sequence."""
        read_s = self._candidates[number].cost.read_s
        if read_s is None or missed_tokens <= _FEW_TOKENS:
            return True
        return read_s(missed_tokens) <= self._purse.balance_s

    def _depths(
        self,
        number: int,
        some: Sequence[int],
        options: Sequence[Sequence[Option]],
        *,
        shape: StepShape,
        most_rows: int,
        limit_s: float | None,
    ) -> list[int]:
        """How many drafts of each chunk this drafter makes for some of them; the price decides, but for trials."""
        most_drafts = self._candidates[number].cost.most_drafts
        chances: list[list[float]] = [[] for _ in options]
        contested = set()
        for i in some:
            estimate, n, confidence = options[i][number]
            chances[i] = estimate.chances(min(n, most_drafts), confidence)
            if estimate.state is Asking.TRIED and any(one.state is Asking.PAYS for one, room, _ in options[i] if room):
                contested.add(i)
        price_s = partial(self._price_and_draft_s, number, shape)
        paying = [[] if i in contested else row for i, row in enumerate(chances)]
        depths = choose_depths(paying, n_sure=len(options), most_rows=most_rows, price_s=price_s, limit_s=limit_s)
        refused = []
        for i in some:
            if i not in contested:
                options[i][number][0].price(depths[i])
            if not depths[i]:
                refused.append(i)
        if refused:
            refused.sort(key=lambda i: -sum(chances[i]))
            depths = self._with_trials(number, depths, refused, price_s)
        return depths

    def _with_trials(
        self, number: int, depths: list[int], refused: list[int], price_s: Callable[[Sequence[int]], float]
    ) -> list[int]:
        """One draft of as many of the refused, the likeliest first, as the purse pays for."""
        before_s = price_s(depths)
        while refused:
            tried = list(depths)
            for i in refused:
                tried[i] = 1
            self._short_of_s = price_s(tried) - before_s
            if not self._candidates[number].is_priced or self._short_of_s <= self._purse.balance_s:
                return tried
            refused = refused[: len(refused) // 2]
        return depths

    def _price_and_draft_s(self, number: int, shape: StepShape, depths: Sequence[int]) -> float:
        """Seconds of a step with these depths, and of this drafter to make them first."""
        return self._price_s(shape, depths) + self._candidates[number].draft_s(shape, depths)
