"""The search behind `diptych plan --users`: see `sim.capacity` for what is tried; this file says in which order.

answer = search(ask, pools, link=Link(bytes_per_s=50e9), price_of=lambda setup: setup.hardware.usd_per_hour or 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diptych.cost.setup import Setup
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.sim.capacity import (
    FINALISTS,
    FINE,
    LONG,
    LONGEST,
    ROUGH,
    SCREENED,
    SHORT,
    WHOLE,
    Ask,
    Bisection,
    Fit,
    Trial,
    bisect_one,
    cost_per_hour,
    engines_for,
    fit_one,
    fluid_users,
    paced,
    pooled,
    run_one,
    uncached,
    with_engines,
)
from diptych.sim.link import Link
from diptych.sim.pools import MAX_ENGINES, Pool, Service
from diptych.sim.service import Report
from diptych.sim.workers import Mapped, workers

PriceOf = Callable[[Setup], float]
Tell = Callable[[str, int, int], object]  # what is being done, steps done, steps in all
N_STAGES = 7
CONFIRMED = 4  # layouts, the cheapest ones, that are simulated for longer
MOST_USERS = 4000  # simulated together
LONGER = (2, 4, 8, 16, 32, 64)  # times as long: messages for which pools might pay


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Engines for all users. users_each: what one engine holds alone (None for two pools). report: all of them at work;
    None where the layout was only sized. is_rough: its bisection was a short one.
    """

    service: Service
    cost: float
    readers_cost: float = 0.0  # of cost, what the pool that prefills takes
    users_each: int | None = None
    is_rough: bool = False
    report: Report | None = None
    holds: bool | None = None  # None: not simulated whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a number of users needs: n_cells times what is said here of one cell, whose users ask counts.

    colocated, pools: the cheapest first; best is the cheapest that holds.

    prefill_share: of the busy time of best, or of its pools together. engines_uncached: of the cheapest colocated layout,
    without a prefix cache. engines_low, engines_high: of the same, if steps are as short or as long as the prediction's 80 %
    interval; margin: its (low, high) factors. doubled: best with twice the users;
    confirmed: with these for longer. crossover_users: where pools become
    cheaper; crossover_message: how long messages would have to be (both None: nowhere that was looked).
    """

    ask: Ask
    n_cells: int
    best: Layout
    colocated: tuple[Layout, ...]
    pools: tuple[Layout, ...]
    too_slow: tuple[str, ...]  # setups that miss the limits with a single user
    prefill_share: float
    engines_uncached: int | None
    engines_low: int
    engines_high: int | None
    margin: tuple[float, float]
    doubled: Report
    confirmed: Report
    crossover_users: int | None
    crossover_message_tokens: int | None


def search(
    ask: Ask,
    candidates: Sequence[Pool],
    *,
    link: Link,
    price_of: PriceOf,
    processes: int = 1,
    tell: Tell | None = None,
) -> Answer:
    """The answer. ConfigError where no candidate meets the limits for a single user, or none is enough of.

    Where users are more than MOST_USERS, they are cells of equal size that are alike, and one of them is simulated.
    """
    n_cells = -(-ask.n_users // MOST_USERS)
    ask = replace(ask, n_users=-(-ask.n_users // n_cells))
    say = tell or (lambda words, done, of: None)
    with workers(processes) as mapped:
        chosen, too_slow = _screened(ask, candidates, price_of)
        say("one engine of each kind", 0, N_STAGES)
        rough = _bisected(ask, chosen, mapped, n_requests=SHORT, close=ROUGH)
        chosen = [pool for pool in chosen if rough[id(pool)]]
        if not chosen:
            raise ConfigError("no device of these holds a single user within the limits", hint="looser limits")
        chosen.sort(key=lambda pool: price_of(pool.setup) * pool.n_devices / rough[id(pool)])
        say("the best of them, longer", 1, N_STAGES)
        fine = _bisected(ask, chosen[:FINALISTS], mapped, n_requests=LONG, close=FINE, guesses=rough)
        say("all users", 2, N_STAGES)
        colocated = _colocated(ask, chosen, rough | fine, fine, mapped, price_of)
        say("two pools", 3, N_STAGES)
        pools = _pools(ask, chosen, link, mapped, price_of)
        holding = [layout for layout in (*colocated, *pools) if layout.holds]
        if not holding:
            raise ConfigError(
                "no layout of these holds all users within the limits", hint="other devices or looser limits"
            )
        say("the cheapest for longer", 4, N_STAGES)
        best, confirmed = _confirmed(ask, [*holding, _with_one_more(colocated[0], price_of)], mapped)
        say("without a prefix cache, with longer and shorter steps", 5, N_STAGES)
        base = colocated[0]
        low, high = _margin(base)
        counts, in_pools = _changed(ask, base, (low, high), [one for one in pools[:1] if one.holds], mapped)
        say("twice the users", 6, N_STAGES)
        twice = Trial(service=best.service, ask=ask, n_users=2 * ask.n_users, n_requests=WHOLE)
        (doubled,) = mapped(run_one, [twice])
    assert best.report is not None
    return Answer(
        ask=ask,
        n_cells=n_cells,
        best=best,
        colocated=tuple(colocated),
        pools=tuple(pools),
        too_slow=too_slow,
        prefill_share=prefill_share(best.report),
        engines_uncached=counts[0],
        engines_low=counts[1] or 1,
        engines_high=counts[2],
        margin=(low, high),
        doubled=doubled,
        confirmed=confirmed,
        crossover_users=_crossover(base, pools[0], in_pools) if in_pools else None,
        crossover_message_tokens=_crossover_message(ask, chosen, price_of),
    )


def prefill_share(report: Report) -> float:
    """Of the busy time of all engines."""
    pools = list(zip(report.pools, report.service.pools, strict=True))
    busy = sum((1.0 - one.busy["idle"]) * pool.n_devices for one, pool in pools)
    return sum(one.prefill_share * pool.n_devices for one, pool in pools) / busy if busy else 0.0


def _screened(ask: Ask, candidates: Sequence[Pool], price_of: PriceOf) -> tuple[list[Pool], tuple[str, ...]]:
    """The cheapest split of each device by the fluid model, and of these the cheapest devices."""
    best: dict[str, tuple[float, Pool]] = {}
    too_slow = []
    for pool in candidates:
        users = fluid_users(pool, ask)
        if users < 1.0:
            too_slow.append(pool.setup.label)
            continue
        cost = price_of(pool.setup) * pool.n_devices / min(users, ask.n_users)
        name = pool.setup.hardware.name
        if name not in best or cost < best[name][0]:
            best[name] = (cost, pool)
    ranked = sorted(best.values(), key=lambda pair: pair[0])
    if not ranked:
        raise ConfigError(
            f"with a single user none of {', '.join(too_slow) or 'no setup'} meets the limits",
            hint="looser limits or other devices",
        )
    return [pool for _, pool in ranked[:SCREENED]], tuple(dict.fromkeys(too_slow))


def _bisected(
    ask: Ask,
    pools: Sequence[Pool],
    mapped: Mapped,
    *,
    n_requests: int,
    close: float,
    guesses: dict[int, int] | None = None,
) -> dict[int, int]:
    """Users that one engine of each holds, by the pool's identity."""
    asked = [
        Bisection(
            service=Service(pool=pool),
            ask=ask,
            guess=fluid_users(pool, ask) if guesses is None else guesses[id(pool)],
            n_requests=n_requests,
            close=close,
            most=ask.n_users,
        )
        for pool in pools
    ]
    return {id(pool): users for pool, users in zip(pools, mapped(bisect_one, asked), strict=True)}


def _confirmed(ask: Ask, layouts: list[Layout], mapped: Mapped) -> tuple[Layout, Report]:
    """The cheapest layout that holds for longer too, as caches fill slowly and a queue that grows takes its time.

    Where none of those tried does, the one with most good requests.
    """
    tried = sorted(layouts, key=lambda layout: layout.cost)[:CONFIRMED]
    longer = min(max(WHOLE, 2 * ask.n_users), LONGEST)
    trials = [Trial(service=one.service, ask=ask, n_users=ask.n_users, n_requests=longer) for one in tried]
    pairs = list(zip(tried, mapped(run_one, trials), strict=True))
    good = [pair for pair in pairs if pair[1].good_share >= ask.good_share]
    best, report = good[0] if good else max(pairs, key=lambda pair: pair[1].good_share)
    return replace(best, report=best.report or report, holds=bool(good)), report


def _with_one_more(layout: Layout, price_of: PriceOf) -> Layout:
    """In case that a layout which was found on short simulations is a little too small."""
    service = with_engines(layout.service, layout.service.n_engines + 1)
    return replace(layout, service=service, cost=cost_per_hour(service, price_of), report=None, holds=None)


def _changed(
    ask: Ask, base: Layout, margin: tuple[float, float], pools: list[Layout], mapped: Mapped
) -> tuple[list[int | None], int]:
    """Engines without a prefix cache, with shorter and with longer steps; and the users that the pools hold as they are."""
    low, high = margin
    each = base.users_each or 1
    services = (uncached(base.service), paced(base.service, low), paced(base.service, high))
    asked = [
        Bisection(
            service=with_engines(service, 1), ask=ask, guess=guess, n_requests=SHORT, close=ROUGH, most=ask.n_users
        )
        for service, guess in zip(services, (each / 2, each / low, each / high), strict=True)
    ]
    asked += [
        Bisection(service=one.service, ask=ask, guess=ask.n_users, n_requests=LONG, close=FINE, most=3 * ask.n_users)
        for one in pools
    ]
    *users, in_pools = [*mapped(bisect_one, asked), 0][:4]
    return [engines_for(ask.n_users, one) if one * MAX_ENGINES >= ask.n_users else None for one in users], in_pools


def _colocated(
    ask: Ask, pools: Sequence[Pool], users: dict[int, int], fine: dict[int, int], mapped: Mapped, price_of: PriceOf
) -> list[Layout]:
    """Every device's layout; those of the finalists simulated whole, with one engine more where they do not hold."""
    sized = [with_engines(Service(pool=pool), engines_for(ask.n_users, users[id(pool)])) for pool in pools]
    finalists = [place for place, pool in enumerate(pools) if id(pool) in fine]
    fits = [
        Fit(service=sized[place], ask=ask, n_requests=WHOLE, price=price_of(pools[place].setup)) for place in finalists
    ]
    found = dict(zip(finalists, mapped(fit_one, fits), strict=True))
    layouts = []
    for place, pool in enumerate(pools):
        report = found.get(place)
        service = sized[place] if report is None else report.service
        layouts.append(
            Layout(
                service=service,
                cost=cost_per_hour(service, price_of),
                users_each=users[id(pool)],
                is_rough=id(pool) not in fine,
                report=report,
                holds=None if report is None else report.good_share >= ask.good_share,
            )
        )
    return sorted(layouts, key=lambda layout: (not layout.holds, layout.cost))


def _pools(ask: Ask, pools: Sequence[Pool], link: Link, mapped: Mapped, price_of: PriceOf) -> list[Layout]:
    """The cheapest pairs by the fluid model, fitted whole."""
    pairs: list[tuple[float, Service]] = []
    for reader in pools:
        for decoder in pools:
            service = pooled(reader, decoder, link)
            is_local = _reads_in(decoder, ask) <= service.local_prefill_s
            reads, decodes = fluid_users(reader, ask, decodes=False), fluid_users(decoder, ask, reads=is_local)
            if reads < 1.0 or decodes < 1.0:
                continue
            service = with_engines(service, engines_for(ask.n_users, decodes), engines_for(ask.n_users, reads))
            pairs.append((cost_per_hour(service, price_of), service))
    pairs.sort(key=lambda pair: pair[0])
    fits = [
        Fit(
            service=service,
            ask=ask,
            n_requests=LONG,
            price=price_of(service.pool.setup) * service.pool.setup.tp,
            reader_price=_reader_price(service, price_of),
        )
        for _, service in pairs[:FINALISTS]
    ]
    layouts = [
        Layout(
            service=report.service,
            cost=cost_per_hour(report.service, price_of),
            readers_cost=_reader_price(report.service, price_of)
            * (report.service.n_engines - report.service.pool.n_engines),
            report=report,
            holds=report.good_share >= ask.good_share,
        )
        for report in mapped(fit_one, fits)
    ]
    return sorted(layouts, key=lambda layout: (not layout.holds, layout.cost))


def _reader_price(service: Service, price_of: PriceOf) -> float:
    assert service.readers is not None
    return price_of(service.readers.setup) * service.readers.setup.tp


def _reads_in(pool: Pool, ask: Ask) -> float:
    """Seconds to read a usual message behind its cached history."""
    shape = StepShape.prefill(
        batch=1, new_tokens=max(1, int(ask.message_tokens)), cached_tokens=int(ask.history_tokens)
    )
    return pool.setup.model_of_time().predict_s(shape)


def _margin(layout: Layout) -> tuple[float, float]:
    """The 80 % interval of the step that decides: a decode step as full as it was on average."""
    batch = 1 if layout.report is None else max(1, round(layout.report.sequences_per_step))
    setup, ask_tokens = layout.service.pool.setup, 1024
    if layout.report is not None:
        ask_tokens = max(1, int(layout.report.prompt_tokens / max(1, layout.report.n_complete)))
    cost = setup.model_of_time().predict(StepShape.decode(batch=batch, context_tokens=ask_tokens))
    return cost.low_s / cost.total_s, cost.high_s / cost.total_s


def _crossover(base: Layout, pooled: Layout, in_pools: int) -> int | None:
    """The least number of users from which two pools cost less for good, engines of each pool growing by themselves.

    in_pools: users that the pools hold as they are. Looked for up to a hundred times as many.
    """
    readers, decoders = pooled.service.readers, pooled.service.pool
    assert readers is not None
    assert base.users_each is not None
    found = None
    for step in range(-40, 41):
        users = max(1, round(in_pools * 10 ** (step / 20)))
        one = math.ceil(users / base.users_each) * base.cost / base.service.n_engines
        two = sum(
            math.ceil(users * pool.n_engines / in_pools) * cost / pool.n_engines
            for pool, cost in ((readers, pooled.readers_cost), (decoders, pooled.cost - pooled.readers_cost))
        )
        if two >= one:
            found = None
        elif found is None:
            found = users
    return found


def _crossover_message(ask: Ask, pools: Sequence[Pool], price_of: PriceOf) -> int | None:
    """The shortest message, of some times the asked length, at which two pools of the fluid model cost less per user."""
    for times in LONGER:
        message = replace(ask.message, low=ask.message.low * times, high=ask.message.high * times)
        longer = replace(ask, message=message)
        one = min((_per_user(pool, fluid_users(pool, longer), price_of) for pool in pools), default=math.inf)
        reads = min(_per_user(pool, fluid_users(pool, longer, decodes=False), price_of) for pool in pools)
        writes = min(_per_user(pool, fluid_users(pool, longer, reads=False), price_of) for pool in pools)
        if reads + writes < one:
            return int(longer.message_tokens)
    return None


def _per_user(pool: Pool, users: float, price_of: PriceOf) -> float:
    return price_of(pool.setup) * pool.n_devices / users if users else math.inf
