"""The executor's side of a drafter: whatever it does, answers stand.

A drafter that raises is switched off for the engine, with a line in the log; what it says is cut at the first thing that is
no token, and to what was asked. Its own time is `StepResult.draft_s`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from diptych.compute.drafter import Drafter
from diptych.compute.ops.contract import Taps
from diptych.ground.step import ChunkResult, StepPlan

logger = logging.getLogger("diptych.engine")


class Drafting:
    """A drafter kept from doing harm. `failures` counts what it raised (it is off after the first), `refused_tokens` what was
    no token of the vocabulary, or more than was asked.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int) -> None:
        self._drafter: Drafter | None = drafter
        self._vocab_size = vocab_size
        self.failures = 0
        self.refused_tokens = 0

    def taps_of(self, plan: StepPlan) -> Taps | None:
        """What the drafter reads of the model in this step; None where that is nothing."""
        if self._drafter is None or not self._drafter.taps:
            return None
        if all(chunk.wanted_drafts is None for chunk in plan.chunks):
            return None
        return Taps(numbers=self._drafter.taps)

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
        tables_of: Callable[[Iterable[int]], np.ndarray],
        taps: Taps | None = None,
    ) -> tuple[ChunkResult, ...]:
        """The step's results with the drafts that their chunks wanted. tables_of: the block tables of sequences."""
        drafter = self._drafter
        if drafter is None:
            return results
        chunks = [
            chunk if result.error is None and not result.is_complete else chunk._replace(wanted_drafts=None)
            for chunk, result in zip(plan.chunks, results, strict=True)
        ]
        found: dict[int, Sequence[int]] = {}

        def ask() -> None:
            tables_CM = tables_of(chunk.seq_id for chunk in chunks)
            states = None if taps is None else taps.states
            found.update(drafter.propose(chunks, [result.token_ids for result in results], tables_CM, states))
            for chunk in chunks:
                if chunk.seq_id in found:
                    found[chunk.seq_id] = self._sound(found[chunk.seq_id], chunk.wanted_drafts or 0)

        if not self._guard(ask) or not found:
            return results
        return tuple(
            replace(result, draft_token_ids=tuple(found[result.seq_id])) if found.get(result.seq_id) else result
            for result in results
        )

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
            self._drafter = None
            logger.warning("drafter switched off, answers go on without: %s: %s", type(error).__name__, error)
            logger.debug("drafter failed", exc_info=error)
            return False
        return True
