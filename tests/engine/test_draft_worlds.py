"""The drafter's own keys and values in random worlds: forks, prefix hits, preemption, cancels, drafts asked now and then.

Model and draft model are the same toy here, whose next token is a hash of all KV that it sees through a block table. So the
drafter is right every time, or a slot of its store held something else than it believed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.control.test_worlds import Referee, toy_seconds
from tests.control.toy import ToyExecutor, toy_kv, toy_next

from diptych.compute.drafting.draft_store import DraftStore
from diptych.compute.drafting.drafter import DraftModel
from diptych.control.speculation import EveryGuess
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.clock import MonotonicClock
from diptych.ground.step import StepPlan, StepResult


class ToyStore:
    """Toy keys and values of the drafter."""

    def __init__(self, n_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.slots: list[list[int | None]] = [[None] * block_tokens for _ in range(n_blocks)]

    def copy_blocks(self, pairs) -> None:
        for source, target in pairs:
            self.slots[target] = list(self.slots[source])


class ToyModel:
    """The toy behind the interface of a model."""

    spec = SimpleNamespace(max_context_tokens=10**6, vocab_size=2**31)

    def make_kv(self, n_blocks: int, block_tokens: int) -> ToyStore:
        return ToyStore(n_blocks, block_tokens)

    def forward(self, batch, kv: ToyStore, want) -> tuple[list[int], list[float]]:
        def slot(table, position: int) -> tuple[list[int | None], int]:
            return kv.slots[table[position // kv.block_tokens]], position % kv.block_tokens

        best = []
        wanted = set(batch.logits_rows_R.tolist())
        for s, end in enumerate(batch.context_tokens_S.tolist()):
            first, last = batch.query_start_S1[s : s + 2].tolist()
            table = batch.block_table_SM[s].tolist()
            for row in range(first, last):
                position = end - (last - row)
                block, at = slot(table, position)
                before, previous = slot(table, position - 1) if position else ([0], 0)
                assert before[previous] is not None, "the drafter reads what it never wrote"
                block[at] = toy_kv(before[previous], int(batch.token_ids_T[row]), position)
                if row in wanted:
                    contents = [block[at] for block, at in (slot(table, p) for p in range(position + 1))]
                    best.append(toy_next(contents))
        return best, [0.0] * len(best)


class DraftingToy(ToyExecutor):
    """The toy executor with a drafter behind it, which is asked, not asked, or not told, at random."""

    def __init__(self, n_blocks: int, block_tokens: int, rng: random.Random, config) -> None:
        super().__init__(n_blocks, block_tokens)
        self.rng = rng
        self.n_right = 0
        most_drafts = config.max_draft_tokens
        store = DraftStore(
            ToyModel(),
            n_blocks=n_blocks,
            block_tokens=block_tokens,
            most_sequences=rng.choice((1, 2, 64)),
            most_drafts=most_drafts,
        )
        plain = SimpleNamespace(is_plain=lambda seq_ids: True, rewind=lambda seq_id, position: None)
        rows = rng.choice((3, 7, 10**6))
        self.drafter = DraftModel(ToyModel(), store, plain, most_rows=rows, clock=MonotonicClock())

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.ended_seq_ids:
            self.drafter.end(seq_id)
        for start in plan.starts:
            self.drafter.begin(start)
        self.drafter.copy_blocks([(copy.source_block_id, copy.target_block_id) for copy in plan.copies])
        result = super().execute(plan)
        for chunk, one in zip(plan.chunks, result.results, strict=True):
            drafts = chunk.draft_token_ids
            assert one.token_ids[: len(drafts)] == drafts, "the drafter was wrong"
            self.n_right += len(drafts)
        asked = [
            chunk._replace(wanted_drafts=self.rng.choice((None, 0, chunk.wanted_drafts, chunk.wanted_drafts)))
            for chunk in plan.chunks
        ]
        tables = [self.tables[chunk.seq_id] for chunk in plan.chunks]
        width = max(map(len, tables))
        tables_CM = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
        given = [one.token_ids for one in result.results]
        self.drafter.follow(asked, given)
        drafts_of = {}
        if any(self.drafter.reads(chunk) for chunk in asked):
            drafts_of = self.drafter.propose(asked, given, tables_CM)
        for chunk in asked:
            assert len(drafts_of.get(chunk.seq_id, ())) <= (chunk.wanted_drafts or 0)
        return replace(
            result,
            results=tuple(replace(one, draft_token_ids=tuple(drafts_of.get(one.seq_id, ()))) for one in result.results),
        )


def check(seeds) -> None:
    """Run worlds, and see that they reach every corner."""
    seen = {"right": 0, "preemptions": 0, "hits": 0, "cut": 0}
    for seed in seeds:
        rng = random.Random(seed)
        settings = {"speculate": "draft", "max_draft_tokens": rng.choice((1, 3, 16))}
        depths = EveryGuess(rows=64) if rng.random() < 0.3 else DraftPrices(toy_seconds)
        referee = Referee(seed, settings, depths=depths)
        blocks = referee.world.blocks
        referee.executor = toy = DraftingToy(blocks.n_blocks, blocks.block_tokens, rng, referee.world.config)
        try:
            referee.run()
        except Exception as error:
            raise AssertionError(f"world {seed}: {error!r}") from error
        stats = referee.core.stats()
        seen["right"] += toy.n_right
        seen["preemptions"] += stats.preemptions
        seen["hits"] += stats.prefix_hits_tokens
        seen["cut"] += len(referee.cut)
    assert min(seen.values()) > 0, f"these worlds no longer reach every corner: {seen}"


def test_the_drafter_is_right_in_random_worlds() -> None:
    """A stale slot, a wrong copy or a block of somebody else would make it wrong."""
    check(range(100))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(40))
def test_the_drafter_is_right_in_ten_thousand_worlds(shard: int) -> None:
    """The same for many more, in pieces of some ten seconds: `-k "[7]"` runs one of the forty."""
    check(range(shard, 10_000, 40))
