"""What layouts cost when users become more or messages longer, from what was simulated: where two pools begin to pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diptych.cost.setup import Setup
from diptych.sim.capacity import Ask, fluid_users
from diptych.sim.pools import Pool

LONGER = (2, 4, 8, 16, 32, 64)  # times as long: messages for which pools might pay
_STEPS = range(-40, 41)  # twentieths of a power of ten: users looked at, from a hundredth to a hundred times
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Of one pool: what one costs and how many users it holds, where another is added for each further so many."""

    cost: float
    users_each: float

    @classmethod
    def seen(cls, n_engines: int, cost: float, *, held: float, n_users: int) -> Engines:
        """Of a layout that n_users were simulated on, where so many are needed and held users are what they hold alone.

        What a single engine holds is a bisection of its own; here it is kept to where n_users need exactly n_engines.
        """
        most = n_users / (n_engines - 1) * (1.0 - 1e3 * _SLACK) if n_engines > 1 else math.inf
        return cls(cost=cost / n_engines, users_each=min(max(held / n_engines, n_users / n_engines), most))

    def cost_of(self, users: float) -> float:
        """Whole engines."""
        return math.ceil(users / self.users_each - _SLACK) * self.cost


Grown = tuple[Engines, ...]  # the pools of a layout


def cost_of(layout: Grown, users: float) -> float:
    """Engines of each pool growing by themselves."""
    return sum(engines.cost_of(users) for engines in layout)


def per_user(layout: Grown) -> float:
    """Of very many users."""
    return sum(engines.cost / engines.users_each for engines in layout)


def crossover_users(colocated: Sequence[Grown], pools: Sequence[Grown], n_users: int) -> int | None:
    """The least number of users from which two pools cost less for good, looked for up to a hundred times n_users."""
    found = None
    for step in _STEPS:
        users = max(1, round(n_users * 10 ** (step / 20)))
        if min(cost_of(one, users) for one in pools) >= min(cost_of(one, users) for one in colocated):
            found = None
        elif found is None:
            found = users
    return found


class Message(NamedTuple):
    """The shortest message, in tokens, from which two pools cost less; None where none does that was looked at.

    most_tokens: the longest that was looked at, where longer ones make conversations beyond every context.
    """

    tokens: int | None
    most_tokens: int | None = None


def crossover_message(ask: Ask, pools: Sequence[Pool], price_of: Callable[[Setup], float], *, excess: float) -> Message:
    """Of some times the asked length; what pools cost per user is the fluid model's.

    excess: what two pools cost now by the simulation, over what engines that do both cost. The fluid model knows no queue
    and no hand-off, so it says how this ratio changes with the length, and not what it is.
    """
    context = max(pool.scheduler.max_context_tokens for pool in pools)

    def ratio(longer: Ask) -> float:
        one = min(_fluid_per_user(pool, fluid_users(pool, longer), price_of) for pool in pools)
        reads = min(_fluid_per_user(pool, fluid_users(pool, longer, decodes=False), price_of) for pool in pools)
        writes = min(_fluid_per_user(pool, fluid_users(pool, longer, reads=False), price_of) for pool in pools)
        if not math.isfinite(reads + writes):
            return math.inf
        return (reads + writes) / one

    now = ratio(ask)
    if not math.isfinite(now) or now == 0.0:
        return Message(None)
    before = ask
    for times in LONGER:
        message = replace(ask.message, low=ask.message.low * times, high=ask.message.high * times)
        if ask.conversation_tokens(message.high, ask.output.high) > context:
            return Message(None, int(before.message_tokens))
        longer = replace(ask, message=message)
        if excess * ratio(longer) / now < 1.0:
            return Message(int(longer.message_tokens))
        before = longer
    return Message(None)


def _fluid_per_user(pool: Pool, users: float, price_of: Callable[[Setup], float]) -> float:
    return price_of(pool.setup) * pool.n_devices / users if users else math.inf
