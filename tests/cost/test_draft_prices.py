"""Acceptance learned, depths bought while they pay, and asking rarely where they do not."""

from __future__ import annotations

import random

import pytest

from diptych.cost.drafts.acceptance import MOST_DEPTH, Acceptance, chances_at, expected_tokens
from diptych.cost.drafts.depths import choose_depths
from diptych.cost.drafts.drafter_trials import DrafterCost
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape


def test_chances_fall_with_depth_and_follow_what_came():
    """A guess is judged whether or not it was sent, so that a bad time ends by itself; and one token deeper than it held."""
    own = Acceptance(Acceptance())
    first = own.chances(MOST_DEPTH)
    assert first == sorted(first, reverse=True)
    own.learn(2, 3)
    assert own.chances(2) > first[:2]
    assert own.chances(3)[2] < first[2] * 1.2
    for _ in range(40):
        own.learn(0, 1)
    assert own.chances(MOST_DEPTH) == [], "hopeless"
    assert own.worth(4) == 0.0
    assert own.chances(MOST_DEPTH, 1) == first, "another confidence is another matter"
    for _ in range(6):
        own.learn(1, 1)
    assert own.chances(1)[0] > 0.5


def test_a_new_sequence_begins_with_what_others_have_learned():
    """Every short answer began with the same hope, and paid for it again."""
    prices = DraftPrices(lambda shape: 1.0)
    for _ in range(40):
        one = prices.begin("lookup")
        for _ in range(10):
            one.learn(0, 1)
    assert prices.begin("lookup").worth(8) < 0.1
    assert prices.begin("prediction").worth(8) > 1.0


def test_depth_is_bought_while_it_pays():
    """Rows for nothing are all taken, rows at full price never, and the likelier sequence gets them first."""
    sure, unsure = chances_at(0.9, 8), chances_at(0.3, 8)
    choose = {"n_sure": 2, "most_rows": 100}
    assert choose_depths([sure, unsure], price_s=lambda depths: 1.0, **choose) == [8, 8]
    assert choose_depths([sure, unsure], price_s=lambda depths: 2.0 + sum(depths), **choose) == [0, 0]
    depths = choose_depths([sure, unsure], price_s=lambda depths: 1.0 + 0.1 * sum(depths), **choose)
    assert depths[0] > depths[1]
    assert choose_depths([sure, unsure], price_s=lambda depths: 1.0, n_sure=2, most_rows=3) == [3, 0]
    over = {"price_s": lambda depths: 1.0 + 0.01 * sum(depths), "limit_s": 1.05}
    assert sum(choose_depths([sure, unsure], **choose, **over)) == 4
    assert choose_depths([[], []], price_s=lambda depths: 1.0, **choose) == [0, 0]


def test_the_drafters_time_is_counted():
    """A drafter as slow as the model gains nothing, however often it is right."""
    shape = StepShape.decode(batch=2, context_tokens=100)

    def depths(draft_s):
        prices = DraftPrices(lambda shape: 1.0, drafters=[DrafterCost(draft_s=draft_s)])
        options = [[(prices.begin_asked(["draft"])[0], 4, 1)] for _ in range(2)]
        return [n for _, n in prices.ask(options, shape=shape, most_rows=64, limit_s=None)]

    assert depths(None) == [4, 4]
    assert depths(lambda shape, depths: 1.0 * max(depths)) == [1, 1], "to see whether it holds what it promises"
    assert 2 < sum(depths(lambda shape, depths: 0.15 * max(depths))) < 8


def test_a_drafter_that_does_not_pay_is_tried_now_and_then():
    """Nothing is drafted in vain for long, and luck that turns is seen."""
    prices = DraftPrices(lambda shape: 1.0, drafters=[DrafterCost(draft_s=lambda shape, depths: 0.1 * max(depths))])
    (own,), shape = prices.begin_asked(["draft"]), StepShape.decode(batch=1, context_tokens=100)
    asked = []
    for step in range(600):
        ((_, depth),) = prices.ask([[(own, 4, 1)]], shape=shape, most_rows=64, limit_s=None)
        asked.append(depth)
        if depth:
            own.learn(depth if step >= 200 else 0, depth, 1)
    assert sum(asked[50:200]) <= 12
    assert set(asked[50:200]) == {0, 1}
    assert asked[-100:] == [4] * 100


class Loop:
    """Sequences that decode with drafts at a stated acceptance; counts tokens, seconds, guesses and questions of price."""

    def __init__(self, batch: int, acceptance: float, real_s, predict_s=None, *, seed: int = 1) -> None:
        self.rng, self.acceptance, self.real_s = random.Random(seed), acceptance, real_s
        self.n_asked = 0

        def counted(shape):
            self.n_asked += 1
            return (predict_s or real_s)(shape)

        self.prices = DraftPrices(counted)
        self.batch = batch
        self.shape = StepShape([ChunkShape(Phase.DECODE, 1, 100, True) for _ in range(batch)])
        self.estimates = [self.prices.begin("scripted") for _ in range(batch)]
        self.tokens, self.seconds, self.n_guessed = 0, 0.0, 0

    def steps(self, n: int) -> Loop:
        for _ in range(n):
            self.step()
        return self

    def step(self) -> None:
        depths, right = [0] * self.batch, [0] * self.batch
        is_due = self.prices.is_due(self.batch)
        if is_due:
            self.n_guessed += self.batch
            guesses = [(estimate, MOST_DEPTH, 1) for estimate in self.estimates]
            depths = self.prices.choose(guesses, shape=self.shape, most_rows=128, limit_s=None)
            right = [self.n_right() for _ in range(self.batch)]
        drafted = self.shape.with_drafts(depths)
        step_s = self.real_s(drafted)
        self.prices.observe(drafted, step_s)
        self.seconds += step_s
        for i, estimate in enumerate(self.estimates):
            kept = min(depths[i], right[i])
            self.tokens += 1 + kept
            if is_due:
                estimate.learn(min(right[i], kept + 1), kept + 1, 1)
                estimate.kept(kept)

    def n_right(self) -> int:
        n = 0
        while n < MOST_DEPTH and self.rng.random() < self.acceptance:
            n += 1
        return n

    @property
    def gain(self) -> float:
        return self.tokens / self.seconds * self.real_s(self.shape) / self.batch


def flat(shape) -> float:
    """Eight rows at the price of one, then by the row: decode as we know it."""
    return max(1.0, shape.n_tokens / 8)


PREDICTIONS = {"right": flat, "free": lambda shape: 1.0, "dear": lambda shape: 1.0 + 0.3 * shape.n_tokens}


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("predicted", PREDICTIONS)
def test_speculation_never_costs_much_at_any_batch_and_acceptance(batch, acceptance, predicted):
    """With right prices, with a prediction that thinks rows are free, and with one that thinks them dear."""
    gain = Loop(batch, acceptance, flat, PREDICTIONS[predicted]).steps(600).gain
    assert gain >= 0.97
    if predicted == "right":
        assert Loop(batch, acceptance, flat).steps(60).gain >= 0.99
        if batch == 1:
            assert gain > 0.9 * expected_tokens(chances_at(acceptance, 7))


def test_what_the_price_refuses_is_asked_rarely():
    """At a full batch, guessing and asking at every step cost more than they ever gave."""
    loop = Loop(64, 0.9, lambda shape: 1e-5 * shape.n_tokens).steps(300)
    assert loop.gain == pytest.approx(1.0, abs=1e-3), "a few drafts now and then, to see what they cost"
    assert loop.n_guessed < 300 * 64 / 10
    asked = loop.n_asked - 300  # the loop's own, of `observe`
    assert asked < 300


def test_a_refusal_ends_when_chances_rise():
    """A text that begins to quote must not wait long for its speed."""
    loop = Loop(1, 0.0, flat).steps(100)
    assert loop.tokens <= 102
    loop.acceptance = 1.0
    tokens = loop.tokens
    loop.steps(40)
    assert loop.tokens - tokens > 150


def test_a_drafted_shape_is_the_step_it_stands_for():
    """Rows, contexts and pairs as the plan's own shape has them."""
    plain = StepShape([ChunkShape(Phase.DECODE, 1, 9, True), ChunkShape(Phase.DECODE, 1, 20, True)])
    prefill = ChunkShape(Phase.PREFILL, 8, 0, False)
    assert plain.plus(prefill).with_drafts([3, 0]) == StepShape(
        [ChunkShape(Phase.DECODE, 4, 9, True), ChunkShape(Phase.DECODE, 1, 20, True), prefill]
    )
    assert plain.with_drafts([0, 2]).n_logits_rows == 4


def test_one_disturbed_measurement_does_not_end_drafts():
    """The first step with drafts took 30 times as long while the machine did something else: no draft for a thousand steps."""
    loop = Loop(1, 0.9, flat)
    for _ in range(20):
        loop.prices.observe(StepShape.decode(batch=1, context_tokens=100), 1.0)
    loop.prices.observe(StepShape([ChunkShape(Phase.DECODE, 8, 100, True)]), 30.0)
    assert loop.steps(200).tokens > 400


@pytest.mark.parametrize("times", [2.5, 6.0])
def test_a_first_step_of_a_size_may_be_cold(times):
    """Six rows took twice as long the first time, seemed dear for ever, and drafts stayed at half of what paid."""
    loop, seen = Loop(1, 0.95, flat), set()

    def cold(shape: StepShape) -> float:
        is_cold = shape.n_tokens not in seen and shape.n_tokens > 1
        seen.add(shape.n_tokens)
        return flat(shape) * (times if is_cold else 1.0)

    loop.real_s = cold
    loop.steps(60)
    tokens, seconds = loop.tokens, loop.seconds
    loop.steps(200)
    assert (loop.tokens - tokens) / (loop.seconds - seconds) > 0.9 * expected_tokens(chances_at(0.95, 7))


def test_a_choice_of_depth_asks_for_few_prices():
    """Six shapes were made and priced for each choice, and each step has two: a tenth of a small model's step."""
    n_priced = 0

    def counted(shape: StepShape) -> float:
        nonlocal n_priced
        n_priced += shape.n_tokens > 1
        return flat(shape)

    prices = DraftPrices(counted, drafters=[DrafterCost(draft_s=lambda shape, depths: 0.01 * max(depths))])
    (own,) = prices.begin_asked(["draft"])
    for start in range(300, 700):
        if start == 500:
            n_priced = 0
        shape = StepShape([ChunkShape(Phase.DECODE, 1, start, True)])
        choice = {"shape": shape, "most_rows": 64, "limit_s": None}
        depths = prices.choose([(own, 7, 1)], **choice)
        prices.ask([[(own, 7, 1)]], **choice)
        own.learn(7, 7, 1)
        own.kept(depths[0])
        longer = shape.with_drafts(depths)
        prices.observe(longer, flat(longer))
    assert n_priced < 200 * 2, "one to learn from what the step took"


def test_what_a_step_takes_without_drafts_is_seen_at_its_own_size():
    """The last sequences of a batch made plain steps of sixteen seem dearer by half, so drafts that lost seemed to pay."""

    def real_s(shape: StepShape) -> float:
        return 0.1 * shape.n_tokens  # rows are free for nobody

    loop = Loop(16, 0.7, real_s, lambda shape: 0.1 * shape.n_sequences)
    for _ in range(50):
        loop.prices.observe(StepShape.decode(batch=1, context_tokens=100), 0.3)
    assert loop.steps(300).gain > 0.9


def test_depth_that_was_never_judged_is_as_likely_as_the_last():
    """Where nine of ten held, the next deeper was taken for 0.6 and hardly ever drafted."""
    own = Acceptance()
    for _ in range(200):
        own.learn(2, 2)
    assert own.chances(8)[7] > 0.5
    for _ in range(50):
        own.learn(2, 3)
    assert len(own.chances(8)) == 2, "the third never held"


def test_steps_without_drafts_are_looked_at_rarely_where_they_are_known():
    """To learn what they take was a hundredth of a small model's step; another size is looked at all the same."""
    n_looked = 0

    def counted(shape: StepShape) -> float:
        nonlocal n_looked
        n_looked += 1
        return 1e-3

    prices = DraftPrices(counted)
    prices.begin("lookup")
    for _ in range(40):
        prices.observe(StepShape.decode(batch=4, context_tokens=100), 1e-3)
    n_looked = 0
    for _ in range(160):
        prices.observe(StepShape.decode(batch=4, context_tokens=100), 1e-3)
    assert n_looked <= 20
    prices.observe(StepShape.decode(batch=5, context_tokens=100), 1e-3)
    assert n_looked <= 22


def test_drafts_that_seem_to_take_less_than_nothing_are_doubted():
    """What a step takes without drafts was measured while others used the machine; then every step had drafts, which seemed
    to pay, and what it takes without was never seen again.
    """
    loop = Loop(4, 0.8, lambda shape: 1e-3 * shape.n_tokens**1.3)
    for _ in range(20):
        loop.prices.observe(StepShape.decode(batch=4, context_tokens=100), 2.3 * 1e-3 * 4**1.3)
    loop.steps(40)
    tokens, seconds = loop.tokens, loop.seconds
    loop.steps(200)
    assert (loop.tokens - tokens) / (loop.seconds - seconds) >= 0.97 * 4 / (1e-3 * 4**1.3)
