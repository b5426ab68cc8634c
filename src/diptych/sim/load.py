"""What the simulated service is asked: requests that come by themselves, or from users who wait for their answers.

Nobody reads the tokens, so they are as cheap as can be: one id repeated. Two prompts share a prefix exactly where their
ids are equal, which is all that the prefix cache sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

from diptych.cost.adapters import Loras
from diptych.ground.bounds import Bound
from diptych.ground.config import at_least
from diptych.ground.errors import ConfigError
from diptych.ground.request import AdapterRef, Request, SamplingParams
from diptych.sim.executor import DRAWN_TOKEN
from diptych.workload import LengthRange, Trace, WorkloadItem, WorkloadSpec, items_of

# prompts' own ids and those of shared prefixes must not meet, nor the one that simulated answers are made of
_OWN_BASE, _SHARED_BASE, _PAST_BASE = DRAWN_TOKEN + 1, 1 << 40, 1 << 50


# of one prompt: each is held in memory while it is served, and no context is as long
MOST_PROMPT_TOKENS = 1 << 24
MOST_TURNS = 10_000
SAMPLED = 500  # requests that tell how long those of a load are

Due = tuple[float, Request]  # the instant at which it comes to the service, in seconds, and the request


class Load(Protocol):
    """Where requests come from."""

    n_requests: int  # to come in all, at most: nobody is answered after those, whoever would still send
    shares_prefixes: bool  # whether a prefix cache could find anything
    n_parts: int  # into which it can be dealt, at most

    def part(self, number: int, of: int) -> Load:
        """Every so-manieth request or user."""
        ...

    def start(self) -> Iterator[Due]:
        """Requests that come whatever happens, in order of time."""
        ...

    def histories(self) -> Iterator[tuple[int, ...]]:
        """Tokens that engines have cached before anything comes, the latest last."""
        ...

    def after(self, request: Request, at_s: float, *, output_tokens: int) -> Due | None:
        """What follows the end of a request, if anything; output_tokens is 0 when it was refused."""
        ...


@lru_cache(maxsize=4096)
def _exactly(output_tokens: int) -> SamplingParams:
    """Write so many tokens."""
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)


def request_of(item: WorkloadItem, arrival_s: float) -> Request:
    """One item of a workload as a request."""
    if item.prompt_tokens > MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"request {item.index} has a prompt of {item.prompt_tokens} tokens; at most {MOST_PROMPT_TOKENS} can be simulated",
            hint="leave it out of the trace",
        )
    ids: list[int] = []
    for prefix_id in item.prefix_ids:
        ids += (_SHARED_BASE + prefix_id,) * item.prefix_block_tokens
    del ids[item.prompt_tokens :]
    ids += (_OWN_BASE + item.index,) * (item.prompt_tokens - len(ids))
    return Request(
        request_id=str(item.index),
        prompt_token_ids=tuple(ids),
        sampling=_exactly(item.output_tokens),
        arrival_s=arrival_s,
        adapter=item.adapter,
    )


class AdaptedLoad:
    """Another load whose requests have one of several adapters in turn, a user always the same."""

    def __init__(self, load: Load, loras: Loras, n_parameters: int) -> None:
        self._load, self._loras, self._n_parameters = load, loras, n_parameters
        self.n_requests, self.n_parts = load.n_requests, load.n_parts
        self.shares_prefixes = load.shares_prefixes
        self._refs = [
            AdapterRef(name=f"adapter {number}", number=number, revision=str(number), n_parameters=n_parameters)
            for number in range(loras.count)
        ]

    def part(self, number: int, of: int) -> AdaptedLoad:
        """Every so-manieth request or user."""
        return AdaptedLoad(self._load.part(number, of), self._loras, self._n_parameters)

    def start(self) -> Iterator[Due]:
        """Requests that come whatever happens."""
        return map(self._adapted, self._load.start())

    def histories(self) -> Iterator[tuple[int, ...]]:
        """What was cached before."""
        return self._load.histories()

    def after(self, request: Request, at_s: float, *, output_tokens: int) -> Due | None:
        """What follows the end of a request."""
        due = self._load.after(request, at_s, output_tokens=output_tokens)
        return None if due is None else self._adapted(due)

    def _adapted(self, due: Due) -> Due:
        at_s, request = due
        turn = int(request.request_id.partition(".")[0])  # a user's number, or the request's own
        return at_s, replace(request, adapter=self._refs[turn % len(self._refs)])


class OpenLoad:
    """Requests that come by themselves, in order of time: those of a trace or a spec are read or made one by one.

    speed: gaps between arrivals are so many times shorter.
    """

    def __init__(
        self,
        items: Iterable[WorkloadItem] | Trace | WorkloadSpec,
        *,
        shares_prefixes: bool,
        speed: float = 1.0,
        dealt: tuple[int, int] = (0, 1),
    ) -> None:
        self._items = items if isinstance(items, WorkloadSpec | Trace) else tuple(items)
        self._speed = speed
        self._dealt = dealt  # (which part, of how many)
        n = len(self._items) if isinstance(self._items, tuple) else self._items.n_requests
        self.n_parts = n
        self.n_requests = len(range(dealt[0], n, dealt[1]))
        self.shares_prefixes = shares_prefixes

    def part(self, number: int, of: int) -> OpenLoad:
        """Every so-manieth of them."""
        return OpenLoad(self._items, shares_prefixes=self.shares_prefixes, speed=self._speed, dealt=(number, of))

    def start(self) -> Iterator[Due]:
        """All of them."""
        items = items_of(self._items) if isinstance(self._items, WorkloadSpec) else self._items
        number, of = self._dealt
        for item in islice(items, number, None, of):
            at_s = item.at_s / self._speed
            yield at_s, request_of(item, at_s)

    def histories(self) -> Iterator[tuple[int, ...]]:
        """None."""
        return iter(())

    def after(self, request: Request, at_s: float, *, output_tokens: int) -> Due | None:
        """Nothing."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsersSpec:
    """People in conversations. Each sends a message, reads the answer, thinks, and sends the next one behind all that
    was said; after `turns` messages, or where the context is full, a new conversation.

    Think times are exponential with mean think_s; so is the wait before everyone's first message. `message` and `output`
    are lengths in tokens; system_tokens stand before every conversation, the same for all.
    n_requests: how many come from all users together, in order of time. is_midway: everyone begins somewhere in a
    conversation whose history is cached already, as in a service that has run for long.
    """

    n_users: int
    n_requests: int
    think_s: float
    turns: int
    message: LengthRange
    output: LengthRange
    system_tokens: int = 0
    seed: int = 0
    is_midway: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        at_least("users", self.n_users, 1)
        at_least("requests", self.n_requests, 1)
        at_least("system tokens", self.system_tokens, 0)
        Bound(int, 1, MOST_TURNS, "messages").take("turns", self.turns, ConfigError)
        longest = self.system_tokens + self.message.high
        if self.is_midway:
            longest += (self.turns - 1) * (self.message.high + self.output.high)
        if longest > MOST_PROMPT_TOKENS:
            raise ConfigError(f"a prompt may have {longest} tokens; at most {MOST_PROMPT_TOKENS} can be simulated")
        if not 0.0 <= self.think_s < float("inf"):
            raise ConfigError(f"think time is {self.think_s} s; it must be 0 or more")


class UsersLoad:
    """A closed loop: nobody sends before the answer to the last message is there."""

    def __init__(self, spec: UsersSpec, *, dealt: tuple[int, int] = (0, 1)) -> None:
        number, of = dealt
        self.spec = spec
        self.n_parts = min(spec.n_users, spec.n_requests)
        self.n_requests = len(range(number, spec.n_requests, of))
        self.shares_prefixes = spec.turns > 1 or spec.system_tokens > 0
        users = range(number, spec.n_users, of)
        self._random = {user: random.Random(f"user {spec.seed} {user}") for user in users}
        self._turns = dict.fromkeys(users, 0)  # of the conversation now
        self._histories: dict[int, tuple[int, ...]] = {}
        for user in self._random if spec.is_midway else ():
            self._begin_midway(user)
        self._n_sent = 0

    def part(self, number: int, of: int) -> UsersLoad:
        """Every so-manieth of them."""
        return UsersLoad(self.spec, dealt=(number, of))

    def start(self) -> Iterator[Due]:
        """Everyone's first message."""
        for at_s, user in sorted((self._think(user), user) for user in self._random):
            yield self._send(user, at_s, self._histories.get(user, ()))

    def histories(self) -> Iterator[tuple[int, ...]]:
        """What was said before, of each user."""
        return iter(self._histories.values())

    def _begin_midway(self, user: int) -> None:
        spec, rng = self.spec, self._random[user]
        self._turns[user] = rng.randrange(spec.turns)
        said: tuple[int, ...] = (_SHARED_BASE,) * spec.system_tokens
        for turn in range(self._turns[user]):
            own = _PAST_BASE + user * spec.turns + turn
            said += (own,) * spec.message.draw(rng) + (DRAWN_TOKEN,) * spec.output.draw(rng)
        if self._turns[user]:
            self._histories[user] = said

    def after(self, request: Request, at_s: float, *, output_tokens: int) -> Due:
        """The same user's next message, behind what was said so far."""
        user = int(request.request_id.partition(".")[0])
        history = request.prompt_token_ids + (DRAWN_TOKEN,) * output_tokens
        if output_tokens == 0 or self._turns[user] >= self.spec.turns:
            history, self._turns[user] = (), 0
        return self._send(user, at_s + self._think(user), history)

    def _think(self, user: int) -> float:
        return self._random[user].expovariate(1.0 / self.spec.think_s) if self.spec.think_s else 0.0

    def _send(self, user: int, at_s: float, history: tuple[int, ...]) -> Due:
        spec, rng = self.spec, self._random[user]
        number = self._n_sent
        self._n_sent += 1
        self._turns[user] += 1
        before = history or (_SHARED_BASE,) * spec.system_tokens
        request = Request(
            request_id=f"{user}.{number}",
            prompt_token_ids=before + (_OWN_BASE + number,) * spec.message.draw(rng),
            sampling=_exactly(spec.output.draw(rng)),
            arrival_s=at_s,
        )
        return at_s, request


def usual_context(load: Load) -> int:
    """Tokens of a sequence when it ends, on average: of users' conversations, else of the first SAMPLED requests."""
    if isinstance(load, UsersLoad):
        spec = load.spec
        turn = (spec.message.low + spec.message.high + spec.output.low + spec.output.high) / 2
        return int(spec.system_tokens + (spec.turns + 1) / 2 * turn)
    ends = [len(one.prompt_token_ids) + one.sampling.max_tokens for _, one in islice(load.start(), SAMPLED)]
    return sum(ends) // len(ends)
