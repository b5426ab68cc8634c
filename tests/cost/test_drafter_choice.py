"""Several drafters of one executor: the one that gives most for its time is followed, and the others cost next to nothing.

Time and acceptance are scripted, as in `test_drafter_trials.py`.
"""

from __future__ import annotations

import pytest
from tests.cost.test_drafter_trials import World, flat

from diptych.cost.drafts.acceptance import chances_at, expected_tokens
from diptych.cost.drafts.drafter_trials import Asking, DrafterCost
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape

GOOD, DEAR, WRONG = (0.8, 0.1), (0.8, 0.9), (0.1, 0.1)  # acceptance, and what a forward takes


def best_gain(acceptance: float, draft_s: float, batch: int = 1) -> float:
    """Of the best depth, known beforehand."""

    def gain_at(depth: int) -> float:
        took_s = flat(StepShape([ChunkShape(Phase.DECODE, 1 + depth, 100, True)] * batch)) + draft_s * depth
        return (
            expected_tokens(chances_at(acceptance, depth))
            * flat(StepShape.decode(batch=batch, context_tokens=1))
            / took_s
        )

    return max(gain_at(depth) for depth in range(17))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("good", [0, 1, 2])
def test_each_is_followed_where_it_is_the_best(good, batch):
    """The first that was named was asked for ever; now whoever gives most, wherever it stands in the row."""
    costs = [DEAR, WRONG]
    costs.insert(good, GOOD)
    (acceptance, draft_s), *others = costs
    world = World(batch=batch, acceptance=acceptance, draft_s=draft_s, others=others).steps(300)
    world.steps(700)
    assert sum(good in by for by in world.by[300:]) > 0.9 * 700
    seconds, off_s = world.seconds, world.off_s
    world.steps(1000)
    assert (world.off_s - off_s) / (world.seconds - seconds) > 0.85 * best_gain(*GOOD, batch)


def test_it_changes_when_another_becomes_better():
    """A text that the one knows ends, and one that the other knows begins."""
    world = World(acceptance=0.9, draft_s=0.1, others=[(0.1, 0.1)]).steps(500)
    assert {0} in world.by[-20:]
    world.acceptance, world.others = 0.1, [0.9]
    world.steps(1500)
    assert world.by[-100:].count({1}) > 90
    world.acceptance, world.others = 0.9, [0.1]
    world.steps(1500)
    assert world.by[-100:].count({0}) > 90


@pytest.mark.parametrize("length", [20, 10**9])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("others", [[WRONG, WRONG], [DEAR, DEAR], [(0.0, 2.0), (0.0, 2.0)], [GOOD, WRONG]])
def test_however_many_there_are_the_bound_holds(others, batch, length):
    """One purse pays for all of them: three drafters may not lose three times as much, at any moment."""
    world = World(batch=batch, acceptance=0.1, draft_s=0.4, tap_s=0.1, length=length, others=others)
    for _ in range(600):
        world.step()
        assert world.seconds <= world.bound_s, len(world.asked)


def test_where_none_pays_they_are_asked_for_next_to_nothing():
    """Trials of three drafters become as rare as those of one."""
    world = World(acceptance=0.1, draft_s=0.4, tap_s=0.05, others=[WRONG, (0.1, 0.9)]).steps(3000)
    seconds, off_s = world.seconds, world.off_s
    world.steps(3000)
    assert (world.off_s - off_s) / (world.seconds - seconds) > 0.99


def test_new_sequences_are_followed_by_whoever_is_best_for_their_kind():
    """Prompts are read by one drafter, and the right one."""
    world = World(acceptance=0.1, draft_s=0.1, others=[(0.9, 0.1)], length=200).steps(1500)
    own = world.begin()
    assert [one.state for one in own.estimates] == [Asking.GIVEN_UP, Asking.PAYS]
    assert world.prices.read(own.estimates, 500, 0) == (1, 0)


def test_one_that_never_answers_is_given_up():
    """A drafter that died in the executor was asked for ever, and no other had a turn."""
    prices = DraftPrices(flat, drafters=[DrafterCost(), DrafterCost()])
    dead, other = prices.begin_asked(["dead", "other"])
    asked = []
    for start in range(100, 400):
        shape = StepShape.decode(batch=1, context_tokens=start)
        ((number, n),) = prices.ask([[(dead, 8, 0), (other, 8, 0)]], shape=shape, most_rows=64, limit_s=None)
        asked.append(number if n else None)
        if n and number == 1:
            other.learn(n, n)
            other.kept(n)
            prices.observe_drafting(shape, [n], 0.1, n_read=1, drafter=1)
    assert asked[0] == 0
    assert asked[-100:].count(1) > 90


def test_a_head_is_tried_where_it_can_begin():
    """An EAGLE head reads from the next block on: until there it was asked in vain, in place of one that paid."""
    heads = DrafterCost(draft_s=lambda shape, depths: 0.01 * max(depths), begins_every=32)
    prices = DraftPrices(flat, drafters=[DrafterCost(draft_s=lambda shape, depths: 0.1 * max(depths)), heads])
    first, second = prices.begin_asked(["draft", "eagle"])
    tried = []
    for start in range(100, 300):
        shape = StepShape([ChunkShape(Phase.DECODE, 1, start, True)])
        ((number, n),) = prices.ask([[(first, 8, 0), (second, 8, 0)]], shape=shape, most_rows=64, limit_s=None)
        estimate = (first, second)[number]
        estimate.learn(0 if number else n, n)
        if number == 0:
            estimate.kept(n)
        elif second.n_judged == 1:
            tried.append(start)
        prices.observe_drafting(shape, [n], (0.01 if number else 0.1) * n, n_read=1, drafter=number)
    assert tried
    assert all(start % 32 == 0 for start in tried)


@pytest.mark.parametrize("times", [5.0, 100.0])
def test_a_cold_first_forward_does_not_end_a_drafter_whose_time_is_known(times):
    """One first draft of nineteen milliseconds emptied the purse and the belief, and nothing was asked for 3000 tokens."""
    prices = DraftPrices(
        flat, drafters=[DrafterCost(draft_s=lambda shape, depths: 0.1 * max(depths), is_measured=True)]
    )
    world = World(acceptance=0.8, draft_s=0.1, prices=prices)
    world.draft_s = [0.1 * times]
    while not any(world.asked):
        world.step()
    world.draft_s = [0.1]
    world.steps(100)
    assert sum(map(bool, world.asked[-50:])) > 40


def test_what_is_taken_once_is_not_priced_for_each_draft():
    """What fusion and the first forward take was learned as a factor, at a depth of one: two drafts seemed to take four."""
    cost = DrafterCost(draft_s=lambda shape, depths: 0.1 * max(depths), is_measured=True)
    prices = DraftPrices(flat, drafters=[cost])
    shape = StepShape([ChunkShape(Phase.DECODE, 1, 100, True)])
    for _ in range(20):
        prices.observe_drafting(shape, [1], 0.1 + 0.3, n_read=1)
    (candidate,) = prices._asker._candidates
    assert candidate.draft_s(shape, [7]) == pytest.approx(0.3 + 7 * 0.1)
