"""Where two pools begin to pay: at the users that were simulated it says what was simulated, elsewhere it counts engines."""

from __future__ import annotations

import pytest

from diptych.cost.setup import setup_of
from diptych.metrics import Limits
from diptych.sim.capacity import Ask
from diptych.sim.growth import Engines, Message, cost_of, crossover_message, crossover_users, per_user
from diptych.sim.pools import Pool
from diptych.workload import LengthRange


@pytest.mark.parametrize("held", [1, 770, 1000, 4000])
def test_engines_grow_through_what_was_simulated(held: int) -> None:
    """Whatever a bisection of one engine said: two engines were found to serve 1,000 users, so 1,000 need two."""
    seen = Engines.seen(2, 5.8, held=held, n_users=1000)
    assert seen.cost_of(1000) == pytest.approx(5.8)
    assert seen.cost_of(1) == pytest.approx(2.9)
    assert seen.cost_of(100_000) >= 5.8 * 50


def test_a_cheaper_pair_in_the_table_is_a_crossover_behind_us() -> None:
    """The old line said 5,798 users where the pair cost less at 1,000 already."""
    alone = (Engines.seen(2, 5.8, held=1550, n_users=1000),)
    pair = (
        Engines.seen(1, 2.9, held=1100, n_users=1000),
        Engines.seen(2, 2.2, held=1100, n_users=1000),
    )
    assert cost_of(pair, 1000) < cost_of(alone, 1000)
    found = crossover_users([alone], [pair], 1000)
    assert found is None or found <= 1000


def test_pools_that_pay_later_are_found_later() -> None:
    """Cheap in the large and dear in the small: the count says from where on, for good."""
    alone = (Engines.seen(2, 6.0, held=2000, n_users=1000),)
    pair = (Engines.seen(1, 3.0, held=1400, n_users=1000), Engines.seen(1, 3.0, held=9000, n_users=1000))
    assert per_user(pair) < per_user(alone)
    found = crossover_users([alone], [pair], 1000)
    assert found is not None
    assert found > 1000
    assert cost_of(pair, found) < cost_of(alone, found)
    dear = (Engines.seen(1, 6.0, held=1000, n_users=1000), Engines.seen(1, 6.0, held=1000, n_users=1000))
    assert crossover_users([alone], [dear], 1000) is None


def asked(turns: int, high: int) -> Ask:
    return Ask(
        n_users=100,
        think_s=10.0,
        turns=turns,
        message=LengthRange(low=high, high=high),
        output=LengthRange(low=50, high=100),
        limits=Limits(ttft_s=1.0, tpot_s=0.08),
        system_tokens=200,
    )


@pytest.mark.parametrize(("turns", "high", "most"), [(8, 1000, 16_000), (8, 8000, 16_000), (16, 5000, 5000)])
def test_messages_are_made_longer_as_far_as_a_conversation_fits(turns: int, high: int, most: int) -> None:
    """Sixty-four times the length went beyond the context without a word, and beyond any prompt the answer was lost."""
    pools = [Pool.of(setup_of("llama-3.1-8b", "h100-80gb-sxm"))]
    assert pools[0].scheduler.max_context_tokens == 131_072
    found = crossover_message(asked(turns, high), pools, lambda setup: 1.0, excess=1e9)
    assert found == Message(None, most)
    assert turns * (most + 100) + 200 <= 131_072 < turns * (2 * most + 100) + 200


def test_a_length_that_pays_is_found_before_the_context_ends() -> None:
    pools = [Pool.of(setup_of("llama-3.1-8b", "h100-80gb-sxm"))]
    assert crossover_message(asked(2, 500), pools, lambda setup: 1.0, excess=1e-9) == Message(1000)
    short = crossover_message(asked(2, 10), pools, lambda setup: 1.0, excess=1e9)
    assert short == Message(None), "all lengths were looked at"
