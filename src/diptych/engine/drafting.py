"""The executor's side of drafters: whatever they do, answers stand.

A drafter that raises is switched off for the engine, with a line in the log; what it says is cut at the first thing that is
no token, and to what was asked. The time of all of them is `StepResult.draft_s`, and `observe` learns what each took for what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from diptych.compute.drafting.drafter import Drafter
from diptych.compute.ops.contract import Taps
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.clock import Clock, MonotonicClock
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.ground.step import Chunk, ChunkResult, StepPlan

logger = logging.getLogger("diptych.engine")

_MOST_MISSED = 64  # steps
Step = tuple[tuple[Chunk, ...], tuple[ChunkResult, ...]]
Tables = Callable[[Iterable[int]], np.ndarray]  # the block tables of these sequences


class Observe(Protocol):
    """Learns how long a drafter took in a step of this shape."""

    def __call__(self, shape: StepShape, depths: Sequence[int], measured_s: float, *, n_read: int) -> None:
        """depths: the drafts of each decode chunk. n_read: tokens that it read before."""
        ...


def _observe_nothing(shape: StepShape, depths: Sequence[int], measured_s: float, *, n_read: int) -> None:
    """Nobody learns."""


class Drafting:
    """A drafter kept from doing harm. `failures` counts what it raised (it is off after the first), `refused_tokens` what was
    no token of the vocabulary, or more than was asked. number: by which chunks name it.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        observe: Observe = _observe_nothing,
        number: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._drafter: Drafter | None = drafter
        self._vocab_size = vocab_size
        self._observe = observe
        self._number = number
        self._clock = clock or MonotonicClock()
        self._missed: list[Step] = []  # that nobody has told it of yet
        self.failures = 0
        self.refused_tokens = 0

    @property
    def number(self) -> int:
        """By which chunks name it. Of a step in which none does, `miss` is all it hears."""
        return self._number

    def miss(self, steps: Sequence[Step]) -> None:
        """What steps gave that it was not asked about. It is told when it is needed: most steps need not notice it."""
        if self._drafter is not None:
            self._missed += steps
            if len(self._missed) >= _MOST_MISSED:
                self._guard(self._catch_up)

    def _catch_up(self) -> None:
        missed, self._missed = self._missed, []
        if self._drafter is not None:
            for chunks, results in missed:
                self._drafter.follow(chunks, [result.token_ids for result in results])

    def taps_of(self, plan: StepPlan) -> Taps | None:
        """What the drafter reads of the model in this step; None where that is nothing."""
        if not self._guard(self._catch_up):
            return None
        drafter = self._drafter
        if drafter is None or not drafter.taps:
            return None
        return Taps(numbers=drafter.taps) if self._reads(drafter, self._own(plan.chunks)) else None

    @property
    def is_on(self) -> bool:
        """Whether it still drafts."""
        return self._drafter is not None

    def follow(self, plan: StepPlan) -> None:
        """Sequences that ended and began, and the step's copies."""
        if self._drafter is None:
            return
        drafter = self._drafter

        def tell() -> None:
            self._catch_up()
            for seq_id in plan.ended_seq_ids:
                drafter.end(seq_id)
            for start in plan.starts:
                drafter.begin(start)
            if plan.copies:
                drafter.copy_blocks([(copy.source_block_id, copy.target_block_id) for copy in plan.copies])

        self._guard(tell)

    def propose(
        self,
        plan: StepPlan,
        results: tuple[ChunkResult, ...],
        tables_of: Tables,
        taps: Taps | None = None,
    ) -> tuple[ChunkResult, ...]:
        """The results of a step in which it is asked, with the drafts that chunks wanted. tables_of: sequences' tables."""
        drafter = self._drafter
        if drafter is None:
            return results
        begin_s = self._clock.now_s()
        given = [result.token_ids for result in results]
        if not self._guard(lambda: drafter.follow(plan.chunks, given)):
            return results
        chunks = [
            chunk if result.error is None and not result.is_complete else chunk._replace(wanted_drafts=None)
            for chunk, result in zip(self._own(plan.chunks), results, strict=True)
        ]
        if not self._reads(drafter, chunks):
            return results
        found: dict[int, Sequence[int]] = {}

        def ask() -> None:
            tables_CM = tables_of(chunk.seq_id for chunk in chunks)
            states = None if taps is None else taps.states
            found.update(drafter.propose(chunks, given, tables_CM, states))
            for chunk in chunks:
                if chunk.seq_id in found:
                    found[chunk.seq_id] = self._sound(found[chunk.seq_id], chunk.wanted_drafts or 0)

        if not self._guard(ask):
            return results
        # a sequence that is another drafter's this time keeps what that one says
        found = {chunk.seq_id: found[chunk.seq_id] for chunk in chunks if found.get(chunk.seq_id)}
        depths = [len(found.get(chunk.seq_id, ())) for chunk in chunks if chunk.phase is Phase.DECODE]
        self._observe(plan.shape, depths, self._clock.now_s() - begin_s, n_read=drafter.n_read)
        if not found:
            return results
        return tuple(
            replace(result, draft_token_ids=tuple(found[result.seq_id])) if result.seq_id in found else result
            for result in results
        )

    def _own(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """The chunks, those of other drafters as if nobody wanted anything behind them."""
        number = self._number
        if all(chunk.drafter == number for chunk in chunks):
            return chunks
        return [chunk if chunk.drafter == number else chunk._replace(wanted_drafts=None) for chunk in chunks]

    def _reads(self, drafter: Drafter, chunks: Sequence[Chunk]) -> bool:
        """Whether it has something to do behind any of them."""
        found: list[bool] = []
        return self._guard(lambda: found.append(any(drafter.reads(chunk) for chunk in chunks))) and found[0]

    def _sound(self, drafts: Sequence[int], wanted: int) -> Sequence[int]:
        """As far as they are tokens, and no more than were asked."""
        n = 0
        while n < min(len(drafts), wanted) and type(drafts[n]) is int and 0 <= drafts[n] < self._vocab_size:
            n += 1
        if n < len(drafts):
            self.refused_tokens += len(drafts) - n
        return drafts[:n]

    def _guard(self, call: Callable[[], None]) -> bool:
        """Whether it went well."""
        try:
            call()
        except Exception as error:
            self.failures += 1
            self._drafter, self._missed = None, []
            logger.warning("drafter switched off, answers go on without: %s: %s", type(error).__name__, error)
            logger.debug("drafter failed", exc_info=error)
            return False
        return True


class Draftings:
    """The drafters of one executor. In a step each is asked about the chunks that name it, and is told of others later."""

    def __init__(self, drafters: Sequence[Drafting]) -> None:
        self._all = tuple(drafters)
        self._asked: dict[int, Taps | None] = {}  # in this step: what each reads of the model, by its place
        self._missed: list[Step] = []  # in which none was asked

    @property
    def failures(self) -> int:
        """Of all."""
        return sum(one.failures for one in self._all)

    @property
    def refused_tokens(self) -> int:
        """Of all."""
        return sum(one.refused_tokens for one in self._all)

    @property
    def is_on(self) -> bool:
        """Whether any still drafts."""
        return any(one.is_on for one in self._all)

    def begin(self, plan: StepPlan) -> Taps | None:
        """Sequences that ended and began, and the step's copies. Answers what is to be read of the model in this step, None
        where that is nothing.
        """
        asked = {chunk.drafter for chunk in plan.chunks if chunk.wanted_drafts is not None}
        is_news = plan.ended_seq_ids or plan.starts or plan.copies
        if not asked and not is_news:  # most steps, where nobody pays
            self._asked = {}
            return None
        self._tell()
        if is_news:
            for one in self._all:
                one.follow(plan)
        self._asked = {i: one.taps_of(plan) for i, one in enumerate(self._all) if one.number in asked and one.is_on}
        read = [taps for taps in self._asked.values() if taps is not None]
        if len(read) <= 1:
            return read[0] if read else None
        return Taps(numbers=tuple(dict.fromkeys(number for taps in read for number in taps.numbers)))

    def end(
        self, plan: StepPlan, results: tuple[ChunkResult, ...], tables_of: Tables, taps: Taps | None
    ) -> tuple[ChunkResult, ...]:
        """The results with the drafts that chunks wanted. taps: what `begin` asked for, with its states."""
        step = plan.chunks, results
        if not self._asked:
            self._missed.append(step)
            if len(self._missed) >= _MOST_MISSED:
                self._tell()
            return results
        drafted = results
        for i, one in enumerate(self._all):
            if i not in self._asked:
                one.miss([step])
                continue
            own = self._asked[i]
            if own is not None and own is not taps:
                assert taps is not None
                assert taps.states is not None
                own.states = taps.states[[taps.numbers.index(number) for number in own.numbers]]
            drafted = one.propose(plan, drafted, tables_of, own)
        return drafted

    def _tell(self) -> None:
        """What was missed by all."""
        missed, self._missed = self._missed, []
        for one in self._all:
            one.miss(missed)

    @property
    def has_asked(self) -> bool:
        """Whether any is asked in this step."""
        return bool(self._asked)


def join_drafters(ready: Sequence[Drafter], prices: DraftPrices, *, vocab_size: int, clock: Clock) -> Draftings:
    """Drafters by number, kept from doing harm, whose time the prices learn."""
    return Draftings(
        [
            Drafting(
                drafter,
                vocab_size=vocab_size,
                observe=partial(prices.observe_drafting, drafter=number),
                number=number,
                clock=clock,
            )
            for number, drafter in enumerate(ready)
        ]
    )
