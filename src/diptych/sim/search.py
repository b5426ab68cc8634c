"""The search behind `diptych plan --users`: see `sim.capacity` for what is tried; this file says in which order.

answer = search(ask, pools, link=Link(bytes_per_s=50e9), price_of=lambda setup: setup.hardware.usd_per_hour or 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from diptych.sim.growth import Engines, Grown, Message, crossover_message, crossover_users, per_user
from diptych.sim.link import Link
from diptych.sim.pools import MAX_ENGINES, Pool, Service
from diptych.sim.service import Report
from diptych.sim.workers import Mapped, workers

PriceOf = Callable[[Setup], float]
Tell = Callable[[str, int, int], object]  # what is being done, steps done, steps in all
N_STAGES = 7
CONFIRMED = 4  # layouts, the cheapest ones, that are simulated for longer
MOST_USERS = 4000  # simulated together
FARTHEST = 100  # times the users, for the crossover
MOST_RAISED = 3  # engines added, one by one, where nothing holds for longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Engines for all users. users_each: what one engine holds alone (None for two pools). report: all of them at work;
    None where the layout was only sized, or is another with one engine more (is_raised). longer: the same for longer.
    is_rough: its bisection was a short one. holds: by the longest of them; None where there is none.
    """

    service: Service
    cost: float
    readers_cost: float = 0.0  # of cost, what the pool that prefills takes
    users_each: int | None = None
    is_rough: bool = False
    is_raised: bool = False
    report: Report | None = None
    longer: Report | None = None
    holds: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a number of users needs: n_cells times what is said here of one cell, whose users ask counts.

    colocated, pools: what holds first, then the cheapest; best is the cheapest that holds.

    prefill_share: of the busy time of best, of its pools together. engines_uncached: of the first colocated layout,
    without a prefix cache. if_quick, if_slow: best, if steps are as short or as long as the prediction's 80 % interval, None
    where no number would do; margin: its (low, high) factors. doubled: best with twice the users; confirmed: with these for
    longer. crossover_users: from where on pools cost less; crossover_message_tokens: how long messages would have to be
    (None: nowhere that was looked, or for users here already); most_message_tokens: the longest that were looked at, where
    longer ones fit no context. too_weak: setups of which more than MAX_ENGINES would be needed.
    """

    ask: Ask
    n_cells: int
    best: Layout
    colocated: tuple[Layout, ...]
    pools: tuple[Layout, ...]
    too_slow: tuple[str, ...]  # setups that miss the limits with a single user
    too_weak: tuple[str, ...]
    prefill_share: float
    engines_uncached: int | None
    if_quick: Service
    if_slow: Service | None
    margin: tuple[float, float]
    doubled: Report
    confirmed: Report
    crossover_users: int | None
    crossover_message_tokens: int | None
    most_message_tokens: int | None


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
    ask.check_context(max((pool.scheduler.max_context_tokens for pool in candidates), default=0))
    n_cells = -(-ask.n_users // MOST_USERS)
    ask = replace(ask, n_users=-(-ask.n_users // n_cells))
    say = tell or (lambda words, done, of: None)
    with workers(processes) as mapped:
        chosen, too_slow = _screened(ask, candidates, price_of)
        say("one engine of each kind", 0, N_STAGES)
        rough = _by_pool(chosen, mapped(bisect_one, _bisections(ask, chosen, n_requests=SHORT, close=ROUGH)))
        chosen = [pool for pool in chosen if rough[id(pool)]]
        if not chosen:
            raise ConfigError("no device of these holds a single user within the limits", hint="looser limits")
        chosen.sort(key=lambda pool: price_of(pool.setup) * pool.n_devices / rough[id(pool)])
        say("the best of them, longer", 1, N_STAGES)
        finalists = chosen[:FINALISTS]
        finer = mapped(bisect_one, _bisections(ask, finalists, n_requests=LONG, close=FINE, guesses=rough))
        fits = mapped(fit_one, _pool_fits(ask, chosen, link, price_of))  # other processes begin with them meanwhile
        fine = _by_pool(finalists, finer)
        say("all users", 2, N_STAGES)
        layouts = _colocated(ask, chosen, rough | fine, fine, mapped, price_of)
        say("two pools", 3, N_STAGES)
        layouts += _pools(ask, fits, price_of)
        layouts = with_cheaper(ask, layouts, mapped, price_of)
        if not any(layout.holds for layout in layouts):
            raise none_holds(layouts)
        say("the cheapest for longer", 4, N_STAGES)
        layouts = _for_longer(ask, layouts, mapped, price_of)
        best = layouts[0]
        colocated = [layout for layout in layouts if layout.service.readers is None]
        pools = [layout for layout in layouts if layout.service.readers is not None]
        say("without a prefix cache, with longer and shorter steps", 5, N_STAGES)
        margin = _margin(best)
        twice = mapped(
            run_one, [Trial(service=best.service, ask=ask, n_users=2 * ask.n_users, n_requests=WHOLE)]
        )  # begins meanwhile
        beyond = _beyond(ask, colocated, pools)
        held = mapped(bisect_one, beyond.values())  # begins meanwhile, too
        changed = _changed(ask, best, colocated[0], margin, mapped)
        say("twice the users", 6, N_STAGES)
        (doubled,) = twice
        users_held = dict(zip(beyond, held, strict=True))
    assert best.longer is not None
    users, message = _crossover(ask, colocated, pools, users_held, chosen, price_of)
    shown = {one.service.pool.setup.label for one in colocated}
    return Answer(
        ask=ask,
        n_cells=n_cells,
        best=best,
        colocated=tuple(colocated),
        pools=tuple(pools),
        too_slow=too_slow,
        too_weak=tuple(pool.setup.label for pool in chosen if pool.setup.label not in shown),
        prefill_share=prefill_share(best.longer),
        engines_uncached=changed.engines_uncached,
        if_quick=changed.if_quick,
        if_slow=changed.if_slow,
        margin=margin,
        doubled=doubled,
        confirmed=best.longer,
        crossover_users=users,
        crossover_message_tokens=message.tokens,
        most_message_tokens=message.most_tokens,
    )


def none_holds(layouts: Iterable[Layout]) -> ConfigError:
    """How near the nearest comes."""
    tried = [(one.report.good_share, one.service.label) for one in layouts if one.report is not None]
    share, label = max(tried, default=(None, ""))
    nearest = "" if share is None else f"; the nearest, {label}, keeps {share:.1%} of requests within them"
    return ConfigError(
        f"no layout of these holds all users within the limits{nearest}",
        hint="other devices, looser limits (--slo) or a smaller --share",
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


def _bisections(
    ask: Ask, pools: Sequence[Pool], *, n_requests: int, close: float, guesses: dict[int, int] | None = None
) -> list[Bisection]:
    """For the users that one engine of each holds."""
    return [
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


def _by_pool(pools: Sequence[Pool], found: Iterable[int]) -> dict[int, int]:
    """Users that one engine of each holds, by the pool's identity."""
    return {id(pool): users for pool, users in zip(pools, found, strict=True)}


def _for_longer(ask: Ask, layouts: list[Layout], mapped: Mapped, price_of: PriceOf) -> list[Layout]:
    """All of them, the cheapest that holds first: caches fill slowly and a queue that grows takes its time.

    The cheapest are simulated for longer, until one holds; where none does, with an engine more. A layout that was found
    on short simulations may be a little too small, so the cheapest of one pool is tried with an engine more besides.
    """
    n_requests = min(max(WHOLE, 2 * ask.n_users), LONGEST)

    def judged(some: list[Layout]) -> list[Layout]:
        trials = [Trial(service=one.service, ask=ask, n_users=ask.n_users, n_requests=n_requests) for one in some]
        reports = mapped(run_one, trials)
        return [
            replace(one, longer=report, holds=report.good_share >= ask.good_share)
            for one, report in zip(some, reports, strict=True)
        ]

    line = sorted((one for one in layouts if one.holds), key=lambda one: one.cost)
    others = [one for one in layouts if not one.holds]
    raised = [_with_one_more(one, price_of) for one in line if one.service.readers is None][:1]
    line = sorted(line + raised, key=lambda one: one.cost)
    done: list[Layout] = []
    while line and not any(one.holds for one in done):
        done += judged(line[:CONFIRMED])
        del line[:CONFIRMED]
    for _ in range(MOST_RAISED):
        if any(one.holds for one in done):
            break
        best = max(done, key=lambda one: 0.0 if one.longer is None else one.longer.good_share)
        done += judged([_with_one_more(best, price_of)])
    found = [one for one in (*done, *line, *others) if one.report is not None or one.holds or one.holds is None]
    cheapest = min((one.cost for one in found if one.holds), default=math.inf)
    # what was only raised stands in the table if it is what to buy, or the only one of its kind that holds
    found = [one for one in found if one.report is not None or not one.is_raised or one.cost <= cheapest]
    return sorted(found, key=lambda one: (not one.holds, one.longer is None, one.cost))


def _with_one_more(layout: Layout, price_of: PriceOf) -> Layout:
    """Of the kind that is late."""
    pool, readers = layout.service.pool, layout.service.readers
    report = layout.longer or layout.report
    is_reading = readers is not None and report is not None and report.late_share["ttft"] > report.late_share["tpot"]
    n_readers = None if readers is None else readers.n_engines + is_reading
    service = with_engines(layout.service, pool.n_engines + (not is_reading), n_readers)
    return replace(
        layout,
        service=service,
        cost=cost_per_hour(service, price_of),
        readers_cost=_readers_cost(service, price_of),
        report=None,
        longer=None,
        holds=None,
        is_raised=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """What one change makes of a layout."""

    engines_uncached: int | None
    if_quick: Service
    if_slow: Service | None


def _beyond(ask: Ask, colocated: list[Layout], pools: list[Layout]) -> dict[int, Bisection]:
    """By the layout's identity: how many users it holds as it is, for the crossover: the cheapest pools, and engines of which
    one holds all who ask. Of these the search looked no further, and what they could hold besides is what makes them cheap.
    """
    alone = [one for one in colocated if one.holds and (one.users_each or 0) >= ask.n_users]
    found = {
        id(one): Bisection(
            service=with_engines(one.service, 1),
            ask=ask,
            guess=fluid_users(one.service.pool, ask),
            n_requests=SHORT,
            close=ROUGH,
            most=FARTHEST * ask.n_users,
            known=ask.n_users,
        )
        for one in alone
    }
    for one in pools[:1]:
        if one.holds:
            found[id(one)] = Bisection(
                service=one.service,
                ask=ask,
                guess=max(ask.n_users, _fluid_pools(one.service, ask)) if alone else ask.n_users,
                n_requests=LONG,
                close=FINE,
                most=(FARTHEST if alone else 3) * ask.n_users,
                known=0
                if one.report is None or one.report.good_share < ask.good_share
                else ask.n_users,  # from its fit
            )
    return found


def _fluid_pools(service: Service, ask: Ask) -> float:
    """Users of two pools without queues."""
    decoder, reader = service.pool, service.readers
    assert reader is not None
    is_local = _reads_in(decoder, ask) <= service.local_prefill_s
    decodes = decoder.n_engines * fluid_users(decoder, ask, reads=is_local)
    return decodes if is_local else min(decodes, reader.n_engines * fluid_users(reader, ask, decodes=False))


def _changed(ask: Ask, best: Layout, colocated: Layout, margin: tuple[float, float], mapped: Mapped) -> _Changed:
    """Engines without a prefix cache; and what to buy with shorter and with longer steps."""

    def held(service: Service, guess: float, most: int, n_requests: int = SHORT) -> Bisection:
        return Bisection(service=service, ask=ask, guess=guess, n_requests=n_requests, close=ROUGH, most=most)

    each = colocated.users_each or 1
    asked = [held(with_engines(uncached(colocated.service), 1), each / 2, ask.n_users)]
    for pace in margin:
        service = paced(best.service, pace)
        if service.readers is None:
            asked.append(held(with_engines(service, 1), (best.users_each or 1) / pace, ask.n_users))
        else:
            asked.append(held(service, ask.n_users / pace, 4 * ask.n_users, n_requests=WHOLE))
    without, quick, slow = mapped(bisect_one, asked)
    if best.service.readers is None:  # one engine was bisected, of a service that holds
        n = best.service.n_engines
        quick, slow = n * quick, n * slow
    n_without = engines_for(ask.n_users, without) if without * MAX_ENGINES >= ask.n_users else None
    return _Changed(
        engines_uncached=None if n_without is None else max(n_without, colocated.service.n_engines),
        if_quick=_grown(best.service, min(1.0, ask.n_users / max(1, quick))),
        if_slow=_grown(best.service, max(1.0, ask.n_users / slow)) if slow * MAX_ENGINES >= ask.n_users else None,
    )


def _grown(service: Service, times: float) -> Service:
    """So many times the engines in every pool."""
    decoders, readers = service.pool, service.readers
    n_readers = None if readers is None else math.ceil(readers.n_engines * times)
    return with_engines(service, math.ceil(decoders.n_engines * times), n_readers)


def _colocated(
    ask: Ask, pools: Sequence[Pool], users: dict[int, int], fine: dict[int, int], mapped: Mapped, price_of: PriceOf
) -> list[Layout]:
    """Every device's layout; those of the finalists simulated whole, with one engine more where they do not hold.

    A device of which more are needed than can be simulated has none. ConfigError where all are such.
    """
    pools = [pool for pool in pools if ask.n_users <= users[id(pool)] * MAX_ENGINES] or pools
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
    return layouts


def with_cheaper(ask: Ask, layouts: list[Layout], mapped: Mapped, price_of: PriceOf) -> list[Layout]:
    """All of them; what was only sized and would cost less than all that holds is simulated whole, too.

    Finalists are the cheapest for each user, and whole engines of another kind may fit these users better.
    """
    cheapest = min((one.cost for one in layouts if one.holds), default=math.inf)
    places = [place for place, one in enumerate(layouts) if one.holds is None and one.cost < cheapest]
    services = [layouts[place].service for place in places]
    fits = [Fit(service=one, ask=ask, n_requests=WHOLE, price=price_of(one.pool.setup)) for one in services]
    found = list(layouts)
    for place, report in zip(places, mapped(fit_one, fits), strict=True):
        found[place] = replace(
            layouts[place],
            service=report.service,
            cost=cost_per_hour(report.service, price_of),
            report=report,
            holds=report.good_share >= ask.good_share,
        )
    return found


def _pool_fits(ask: Ask, pools: Sequence[Pool], link: Link, price_of: PriceOf) -> list[Fit]:
    """The cheapest pairs by the fluid model, to be fitted whole."""
    pairs: list[tuple[float, Service]] = []
    for reader in pools:
        for decoder in pools:
            service = pooled(reader, decoder, link)
            is_local = _reads_in(decoder, ask) <= service.local_prefill_s
            reads, decodes = fluid_users(reader, ask, decodes=False), fluid_users(decoder, ask, reads=is_local)
            if min(reads, decodes) < max(1.0, ask.n_users / MAX_ENGINES):
                continue
            service = with_engines(service, engines_for(ask.n_users, decodes), engines_for(ask.n_users, reads))
            pairs.append((cost_per_hour(service, price_of), service))
    pairs.sort(key=lambda pair: pair[0])
    return [
        Fit(
            service=service,
            ask=ask,
            n_requests=LONG,
            price=price_of(service.pool.setup),
            reader_price=0.0 if service.readers is None else price_of(service.readers.setup),
        )
        for _, service in pairs[:FINALISTS]
    ]


def _pools(ask: Ask, fitted: Iterable[Report], price_of: PriceOf) -> list[Layout]:
    """Two pools that were fitted."""
    return [
        Layout(
            service=report.service,
            cost=cost_per_hour(report.service, price_of),
            readers_cost=_readers_cost(report.service, price_of),
            report=report,
            holds=report.good_share >= ask.good_share,
        )
        for report in fitted
    ]


def _readers_cost(service: Service, price_of: PriceOf) -> float:
    return 0.0 if service.readers is None else price_of(service.readers.setup) * service.readers.n_devices


def _reads_in(pool: Pool, ask: Ask) -> float:
    """Seconds to read a usual message behind its cached history."""
    shape = StepShape.prefill(
        batch=1, new_tokens=max(1, int(ask.message_tokens)), cached_tokens=int(ask.history_tokens)
    )
    return pool.setup.model_of_time().predict_s(shape)


def _margin(layout: Layout) -> tuple[float, float]:
    """The 80 % interval of the step that decides: of the phase that takes most time, as full as it was on average."""
    report = layout.longer or layout.report
    assert report is not None
    tokens = max(1, int(report.prompt_tokens / max(1, report.n_complete)))
    if prefill_share(report) > 0.5:
        pool = layout.service.readers or layout.service.pool
        new = max(1, int((report.prompt_tokens - report.cached_tokens) / max(1, report.n_complete)))
        shape = StepShape.prefill(batch=1, new_tokens=new, cached_tokens=tokens - new)
    else:
        pool = layout.service.pool
        decodes = report.pools[0]  # the pool that decodes
        shape = StepShape.decode(batch=max(1, round(decodes.sequences_per_step)), context_tokens=tokens)
    cost = pool.setup.model_of_time().predict(shape)
    return cost.low_s / cost.total_s, cost.high_s / cost.total_s


def _crossover(
    ask: Ask,
    colocated: list[Layout],
    pools: list[Layout],
    held: Mapping[int, int],
    chosen: Sequence[Pool],
    price_of: PriceOf,
) -> tuple[int | None, Message]:
    """(users, messages) from which two pools cost less; none where not one of either kind holds.

    At the users asked for this is what the table says. held: users by the identity of a layout, where they were counted.
    """
    alone = [
        _seen(ask, one, held.get(id(one), (one.users_each or 1) * one.service.n_engines))
        for one in colocated
        if one.holds
    ]
    # the cheapest was bisected; of the others no more is known than that they hold
    paired = [_seen(ask, one, held.get(id(one), ask.n_users)) for one in pools if one.holds]
    if not alone or not paired:
        return None, Message(None)
    excess = min(map(per_user, paired)) / min(map(per_user, alone))
    message = crossover_message(ask, chosen, price_of, excess=excess) if excess > 1.0 else Message(None)
    return crossover_users(alone, paired, ask.n_users), message


def _seen(ask: Ask, layout: Layout, held: float) -> Grown:
    pool, readers = layout.service.pool, layout.service.readers
    found = [Engines.seen(pool.n_engines, layout.cost - layout.readers_cost, held=held, n_users=ask.n_users)]
    if readers is not None:
        found.append(Engines.seen(readers.n_engines, layout.readers_cost, held=held, n_users=ask.n_users))
    return tuple(found)
