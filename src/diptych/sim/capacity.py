"""How many devices a number of users needs: the simulator, searched.

    answer = search(ask, candidates, ...)      # `sim.search`; candidates: pools, one for each device and split worth trying

A layout is judged by simulating people in mid-conversation, their histories cached, until so many requests have come: it
holds when the asked share of them meets the limits. One that cannot any more is given up (`run_if_good`). Steps of the search:

1. every setup is estimated by a fluid model (`fluid_users`): the best few are simulated;
2. what one engine holds is bisected, over short simulations; the better half goes on to longer ones;
3. the number of engines follows and is simulated whole, of the others where it costs less; one that fails gets an engine more;
4. two pools: for each pair of devices what one engine of each kind holds, estimated, then simulated whole and trimmed.

Same arguments, same answer, however many processes work on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.cost.setup import Setup
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.metrics import Limits
from diptych.sim.link import Link
from diptych.sim.load import UsersLoad, UsersSpec
from diptych.sim.pools import MAX_ENGINES, Pool, Service
from diptych.sim.service import Report, is_good, simulate, simulate_if_good
from diptych.workload import LengthRange

SCREENED, FINALISTS = 4, 2  # layouts that are simulated, and that are simulated long
SHORT, LONG, WHOLE = 240, 500, 800  # requests of a simulation
LONGEST = 3000  # of the one that confirms the answer, two for each user where that is fewer
WARM_SHARE = 0.25  # of them come before the count begins, while engines fill
ROUGH, FINE = 0.15, 0.06  # how close a bisection ends, relative
MOST_FITS = 6  # simulations to find the numbers of engines of a layout
BLOCK_TOKENS, MOST_BLOCKS = 32, 1024  # of a conversation; what its last one leaves empty is a thousandth of it
MAX_LOAD = 0.9  # of a prefill engine's time; beyond, its queue is what limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """People, and what they expect. good_share: of requests that must meet all limits."""

    n_users: int
    think_s: float
    turns: int
    message: LengthRange
    output: LengthRange
    limits: Limits
    system_tokens: int = 0
    good_share: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a share that is none; the users check the rest."""
        if not 0.0 < self.good_share < 1.0:
            raise ConfigError(f"the share that must be good is {self.good_share:g}; it must be between 0 and 1")
        if self.limits.ttft_s is None or self.limits.tpot_s is None:
            raise ConfigError("a capacity needs limits on both phases", hint="for example --slo ttft=1s,tpot=80ms")
        self._users(self.n_users, 1)

    def load(self, n_users: int, n_requests: int) -> UsersLoad:
        """So many of them, until so many requests have come."""
        return UsersLoad(self._users(n_users, n_requests))

    def _users(self, n_users: int, n_requests: int) -> UsersSpec:
        return UsersSpec(
            n_users=n_users,
            n_requests=n_requests,
            think_s=self.think_s,
            turns=self.turns,
            message=self.message,
            output=self.output,
            system_tokens=self.system_tokens,
            seed=self.seed,
            is_midway=True,
        )

    @property
    def message_tokens(self) -> float:
        """On average."""
        return (self.message.low + self.message.high) / 2

    @property
    def output_tokens(self) -> float:
        """On average."""
        return (self.output.low + self.output.high) / 2

    @property
    def history_tokens(self) -> float:
        """Before a message, on average."""
        return self.system_tokens + (self.turns - 1) / 2 * (self.message_tokens + self.output_tokens)

    def conversation_tokens(self, message_tokens: int, output_tokens: int) -> int:
        """Of one whose messages and answers all have these lengths, the last answer included."""
        return self.system_tokens + self.turns * (message_tokens + output_tokens)

    @property
    def block_tokens(self) -> int:
        """Of the KV blocks that are simulated: a server's, or as many times more as keep conversations within MOST_BLOCKS.

        A block costs the simulator a microsecond or two each time that somebody takes it, fills it or looks for it.
        """
        blocks = -(-self.conversation_tokens(self.message.high, self.output.high) // BLOCK_TOKENS)
        return BLOCK_TOKENS << max(0, (-(-blocks // MOST_BLOCKS) - 1).bit_length())

    def check_context(self, context_tokens: int) -> None:
        """Refuse conversations of which none fits: every one of them would end in a refusal, whatever is bought."""
        shortest = self.conversation_tokens(self.message.low, self.output.low)
        if shortest > context_tokens:
            raise ConfigError(
                f"a conversation has {shortest:,} tokens at least ({self.turns} turns of {self.message.low} and "
                f"{self.output.low}, {self.system_tokens} before them); the context holds {context_tokens:,}",
                hint="fewer --turns, shorter messages (--prompt) or answers (--output)",
            )

    def cycle_s(self, tpot_s: float) -> float:
        """From one message of a user to the next."""
        return self.think_s + self.output_tokens * tpot_s


def fluid_users(pool: Pool, ask: Ask, *, reads: bool = True, decodes: bool = True) -> float:
    """Users that one engine holds in a steady state without queues; 0 where not even one is within the limits.

    Each token waits for its share of others' prefills: TPOT = decode(B) / (1 - rate prefill), B = rate output TPOT.
    """
    predict_s = pool.setup.model_of_time().predict_s
    ttft_s, tpot_s = ask.limits.ttft_s, ask.limits.tpot_s
    assert ttft_s is not None
    assert tpot_s is not None
    context = max(1, int(ask.history_tokens + ask.message_tokens + ask.output_tokens / 2))

    def prefill_s(cached_share: float) -> float:
        cached = int(cached_share * ask.history_tokens)
        new = max(1, int(ask.history_tokens + ask.message_tokens) - cached)
        return predict_s(StepShape.prefill(batch=1, new_tokens=new, cached_tokens=cached)) if reads else 0.0

    def users(batch: int) -> float:
        """With so many sequences in a step; the cache holds what they leave of the pool, shared by all who think."""
        decode_s = predict_s(StepShape.decode(batch=batch, context_tokens=context))
        held, share = 0.0, float(pool.scheduler.enable_prefix_cache)
        for _ in range(4):
            # B = rate output TPOT and TPOT = decode + rate prefill TPOT, so TPOT = decode + B prefill / output
            step_s = decode_s + batch * prefill_s(share) / ask.output_tokens
            if step_s > tpot_s or step_s > decode_s / (1.0 - MAX_LOAD):
                return 0.0
            held = batch / (ask.output_tokens * step_s) * ask.cycle_s(step_s)
            spare_tokens = pool.kv_tokens - batch * context
            share = min(share, spare_tokens / max(1.0, held * ask.history_tokens))
        return held

    if pool.setup.calibration.request_s + prefill_s(1.0) > ttft_s:
        return 0.0
    if not decodes:
        return MAX_LOAD / prefill_s(0.5) * ask.cycle_s(tpot_s)
    low, high = 0, min(pool.scheduler.max_running_sequences or 1, pool.kv_tokens // context)
    while low < high:
        batch = (low + high + 1) // 2
        low, high = (batch, high) if users(batch) else (low, batch - 1)
    return users(low) if low else _one_by_one(pool, ask, context, prefill_s)


def _one_by_one(pool: Pool, ask: Ask, context: int, prefill_s: Callable[[float], float]) -> float:
    """Users where prompts take nearly all the time, so that less than one sequence decodes on average; 0 as `fluid_users`."""
    decode_s = pool.setup.model_of_time().predict_s(StepShape.decode(batch=1, context_tokens=context))
    assert ask.limits.tpot_s is not None
    if decode_s > ask.limits.tpot_s or pool.kv_tokens < context:
        return 0.0
    held, share = 0.0, float(pool.scheduler.enable_prefix_cache)
    for _ in range(4):
        held = MAX_LOAD / (prefill_s(share) + ask.output_tokens * decode_s) * ask.cycle_s(decode_s)
        share = min(share, (pool.kv_tokens - context) / max(1.0, held * ask.history_tokens))
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One simulation to make: a service, users, requests. Small enough to send to another process.

    is_warm: requests of the first quarter are served and not counted.
    """

    service: Service
    ask: Ask
    n_users: int
    n_requests: int
    is_warm: bool = True

    def run(self) -> Report:
        """What came of it."""
        ask = self.ask
        return simulate(self.service, ask.load(self.n_users, self.n_requests), limits=ask.limits, from_s=self._from_s)

    def run_if_good(self) -> Report | None:
        """None where the asked share of requests does not meet the limits, which is often known early."""
        ask = self.ask
        load = ask.load(self.n_users, self.n_requests)
        return simulate_if_good(self.service, load, limits=ask.limits, good_share=ask.good_share, from_s=self._from_s)

    def holds(self) -> bool:
        """Whether the asked share of them does, and no more."""
        ask = self.ask
        load = ask.load(self.n_users, self.n_requests)
        return is_good(self.service, load, limits=ask.limits, good_share=ask.good_share, from_s=self._from_s)

    @property
    def _from_s(self) -> float:
        assert self.ask.limits.tpot_s is not None
        cycle_s = self.ask.cycle_s(self.ask.limits.tpot_s / 2)
        return self.is_warm * WARM_SHARE * self.n_requests * cycle_s / self.n_users


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The most users that a service holds, within `close` of itself. guess: where to begin; most: not beyond.

    known: users that it is known to hold, by a simulation as long; 0: not one.
    """

    service: Service
    ask: Ask
    guess: float
    n_requests: int
    close: float
    most: int
    known: int = 0

    def run(self) -> int:
        """0 where a single user is too many."""
        low, high = 0, self.most + 1  # holds, does not
        at = min(max(1, int(self.guess)), self.most)
        # whoever asks for `most` would buy an engine more if it were called too many without a look
        while high - low > 1 and (high > self.most or high - low > self.close * max(low, 1)):
            if (
                at == self.known
                or Trial(service=self.service, ask=self.ask, n_users=at, n_requests=self.n_requests).holds()
            ):
                low = at
            else:
                high = at
            near = int(low * 1.25) + 1 if high > self.most else (low + high) // 2 if low else int(high * 0.7)
            at = min(max(near, low + 1), high - 1)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fewest engines around the service's own numbers that hold all users. Prices: of one device of each pool."""

    service: Service
    ask: Ask
    n_requests: int
    price: float
    reader_price: float = 0.0

    def run(self) -> Report:
        """Of the cheapest service that holds; of the last one tried where none does."""
        tried: dict[tuple[int, int], Report | None] = {}  # None: does not hold, beside what does
        at = (self.service.pool.n_engines, 0 if self.service.readers is None else self.service.readers.n_engines)
        holding: list[Report] = []
        for _ in range(MOST_FITS):
            trial = self._trial(at)
            report = trial.run_if_good() if holding else trial.run()  # why it does not hold tells what to raise
            tried[at] = report
            if report is not None and self._holds(report):
                holding.append(report)
            after = self._after(at, report, tried)
            if after is None:
                break
            at = after
        if not holding:
            assert report is not None
            return report
        return min(holding, key=lambda one: self._cost(one.service))

    def _after(
        self, at: tuple[int, int], report: Report | None, tried: dict[tuple[int, int], Report | None]
    ) -> tuple[int, int] | None:
        """What to try next: an engine less of the costlier kind while it holds, one more of the kind that is late."""
        decoders, readers = at
        if self._holds(report):
            if not readers and decoders != self.service.pool.n_engines:
                return None  # raised to here, or an engine less, and a simulation of so few requests may not take more away
            fewer = [(decoders - 1, readers)] if decoders > 1 else []
            if readers > 1:
                of_decoder, of_reader = self._engine_prices()
                fewer.insert(0 if of_reader > of_decoder else len(fewer), (decoders, readers - 1))
            return next((one for one in fewer if one not in tried), None)
        if any(self._holds(one) for one in tried.values()):
            decoders_before, readers_before = min(
                (key for key, one in tried.items() if self._holds(one)), key=lambda key: sum(key)
            )
            other = (
                (decoders_before, readers_before - 1)
                if decoders < decoders_before
                else (decoders_before - 1, readers_before)
            )
            return other if other not in tried and min(other) >= 1 else None
        assert report is not None
        late = report.late_share
        step = max(1, round(0.1 * decoders))
        is_reading = readers and late["ttft"] > late["tpot"]
        return (decoders, readers + 1) if is_reading else (decoders + step, readers)

    def _trial(self, at: tuple[int, int]) -> Trial:
        service = with_engines(self.service, at[0], at[1] or None)
        return Trial(service=service, ask=self.ask, n_users=self.ask.n_users, n_requests=self.n_requests)

    def _holds(self, report: Report | None) -> bool:
        return report is not None and report.good_share >= self.ask.good_share

    def _engine_prices(self) -> list[float]:
        """Of one engine of each pool, all its devices together."""
        prices = zip(self.service.pools, (self.price, self.reader_price), strict=False)
        return [pool.setup.n_devices * price for pool, price in prices]

    def _cost(self, service: Service) -> float:
        return sum(pool.n_engines * each for pool, each in zip(service.pools, self._engine_prices(), strict=True))


def fit_one(asked: Fit) -> Report:
    """For a map over processes."""
    return asked.run()


def bisect_one(asked: Bisection) -> int:
    """For a map over processes."""
    return asked.run()


def run_one(asked: Trial) -> Report:
    """For a map over processes."""
    return asked.run()


def engines_for(n_users: int, each: float) -> int:
    """Engines that hold so many users; ConfigError beyond what is simulated."""
    n = math.ceil(n_users / each) if each > 0 else MAX_ENGINES + 1
    if n > MAX_ENGINES:
        raise ConfigError(
            f"{n_users} users need more than {MAX_ENGINES} engines of this kind, of which one holds {each:.3g}",
            hint="a faster device, looser limits or fewer users",
        )
    return n


def pooled(reader: Pool, decoder: Pool, link: Link) -> Service:
    """Two pools."""
    return Service(pool=decoder, readers=reader, link=link)


def with_engines(service: Service, n_engines: int, n_readers: int | None = None) -> Service:
    """The same with other numbers."""
    readers = service.readers
    if readers is not None and n_readers is not None:
        readers = replace(readers, n_engines=n_readers)
    return replace(service, pool=replace(service.pool, n_engines=n_engines), readers=readers)


def paced(service: Service, pace: float) -> Service:
    """The same with steps that take longer or shorter than predicted."""
    readers = None if service.readers is None else replace(service.readers, pace=pace)
    return replace(service, pool=replace(service.pool, pace=pace), readers=readers)


def uncached(service: Service) -> Service:
    """The same without a prefix cache."""
    scheduler = replace(service.pool.scheduler, enable_prefix_cache=False)
    return replace(service, pool=replace(service.pool, scheduler=scheduler))


def cost_per_hour(service: Service, price_of: Callable[[Setup], float]) -> float:
    """Of all devices: USD, or devices where prices are not known (price_of says which)."""
    return sum(pool.n_devices * price_of(pool.setup) for pool in service.pools)
