"""What a number of users needs, as one screen of text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from diptych.cli.plan_json import plain
from diptych.cli.simulate_text import show_times
from diptych.cli.tables import duration, page, plain_table
from diptych.cost.layout import PLAIN
from diptych.ground.bounds import counted
from diptych.sim.pools import MAX_ENGINES, Service
from diptych.sim.search import Answer, Layout
from diptych.sim.service import Report

FULL = 0.98  # of the KV pool: from there on sequences wait for blocks or lose them
WIDEST_NAME = 56  # of a layout in one line: the table beside it is as wide again


def as_json(found: Answer, unit: str, left_out: Mapping[str, str], points: object = None) -> dict[str, Any]:
    """The answer under its own names; a layout by its engines and its numbers."""
    return {
        "ask": plain(found.ask),
        "n_cells": found.n_cells,
        "unit_of_cost": unit,
        "limiting_phase": limiting_phase(found),
        "breaks_first": breaks_first(found.doubled, found.ask.good_share),
        "confirmed_good_share": found.confirmed.good_share,
        "confirmed_s": found.confirmed.duration_s,
        "best": _layout(found.best),
        "colocated": [_layout(layout) for layout in found.colocated],
        "pools": [_layout(layout) for layout in found.pools],
        "too_slow": list(found.too_slow),
        "too_weak": list(found.too_weak),
        "left_out": dict(left_out),
        "prefill_share_of_busy_time": found.prefill_share,
        "engines_without_prefix_cache": found.engines_uncached,
        "if_steps_are_quick": _engines(found.if_quick),
        "if_steps_are_slow": None if found.if_slow is None else _engines(found.if_slow),
        "step_time_margin": list(found.margin),
        "crossover_users": found.crossover_users,
        "crossover_message_tokens": found.crossover_message_tokens,
        "most_message_tokens": found.most_message_tokens,
        "pareto": plain(points),
    }


def _engines(service: Service) -> list[dict[str, Any]]:
    return [
        {"setup": pool.setup.label, "n_engines": pool.n_engines, "n_devices": pool.n_devices, "part": part}
        for pool, part in zip(service.pools, _parts(service), strict=True)
    ]


def _layout(layout: Layout) -> dict[str, Any]:
    report = layout.report or layout.longer
    return {
        "pools": _engines(layout.service),
        "cost": layout.cost,
        "users_per_engine": layout.users_each,
        "is_rough": layout.is_rough,
        "holds": layout.holds,
        "good_share": None if layout.report is None else layout.report.good_share,
        "good_share_for_longer": None if layout.longer is None else layout.longer.good_share,
        "ttft_p95_s": None if report is None or report.ttft_s is None else report.ttft_s.p95,
        "tpot_p95_s": None if report is None or report.tpot_s is None else report.tpot_s.p95,
    }


def _parts(service: Service) -> tuple[str, ...]:
    return ("both phases",) if service.readers is None else ("decode", "prefill")


def limiting_phase(found: Answer) -> str:
    """Where the engines' busy time goes."""
    return "prefill" if found.prefill_share > 0.5 else "decode"


def breaks_first(report: Report, good_share: float) -> str:
    """What stops a service that has too much to do."""
    if report.good_share >= good_share:
        return "nothing: it still holds"
    late = report.late_share
    first = max(late, key=lambda name: late[name])
    why = "steps are too long"
    if report.kv_peak >= FULL or report.preemptions:
        why = "the KV pool is full"
    elif report.waiting_peak:
        why = f"{report.waiting_peak:,} requests wait in line at one engine"
    if sum(report.refused.values()) > 0.5 * (1.0 - report.good_share) * report.n_requests:
        return f"requests are refused ({sum(report.refused.values()):,} of {report.n_requests:,}): {why}"
    return f"the limit on {first.upper()}, missed by {late[first]:.0%} of requests: {why}"


def show(found: Answer, unit: str, left_out: Mapping[str, str]) -> None:
    """The screen."""
    console, ask, best = page(), found.ask, found.best
    n = found.n_cells
    cells = "" if n == 1 else f"{n:,} cells, each with a router of its own, of which one was simulated: "
    e2e = "" if ask.limits.e2e_s is None else f", {duration(ask.limits.e2e_s)} in all"
    console.print(
        f"{cells}[bold]{counted(ask.n_users, 'user', ',')} of {escape(best.service.pool.setup.model.name)}[/bold]: messages of "
        f"{ask.message.low} to {ask.message.high} tokens, answers of {ask.output.low} to {ask.output.high}, {ask.turns} turns, "
        f"thinking {duration(ask.think_s)}; {ask.good_share:.0%} within TTFT {duration(ask.limits.ttft_s)}, "
        f"TPOT {duration(ask.limits.tpot_s)}{e2e}"
    )
    phase, share = limiting_phase(found), found.prefill_share
    share = share if phase == "prefill" else 1.0 - share
    console.print(
        f"[bold]{phase} limits this service[/bold]: {share:.0%} of the time that engines work goes to {phase}"
    )
    each = "" if n == 1 else f" for each cell, {n * best.cost:.6g} together"
    advice = "buy" if best.holds else "nothing that was tried holds for longer; the nearest is"
    console.print(f"[bold]{advice} {_words(best.service)}[/bold]: {best.cost:.4g} {unit}{each}")
    unit_short = "USD/h" if unit.startswith("USD") else unit
    table = plain_table("", "layout", "users each", unit_short, "good", "longer", "TTFT p95", "TPOT p95")
    for layout in (*found.colocated, *found.pools):
        table.add_row(*row_of(layout, ask.n_users))
    console.print(table)
    if any(layout.holds is False for layout in (*found.colocated, *found.pools)):
        console.print(f"(no): less than {ask.good_share:.0%} of requests are good, so it is not what to buy")
    console.print(f"crossover: {_crossover(found)}")
    colocated = found.colocated[0]
    engines, without = colocated.service.n_engines, found.engines_uncached
    words = "no number would do in place of" if without is None else f"{without} in place of"
    words = f"the same {engines}" if without == engines else f"{words} {engines}"
    console.print(f"prefix cache: without it {words} x ({escape(colocated.service.pool.setup.label)})")
    is_held = found.doubled.good_share >= ask.good_share
    words = "it still holds" if is_held else f"first breaks {breaks_first(found.doubled, ask.good_share)}"
    console.print(f"twice the users: {words}")
    held = found.confirmed
    words = "holds" if best.holds else "does not hold"
    console.print(
        f"for longer: {counted(held.n_requests, 'request', ',')} in {duration(held.duration_s)}, {held.good_share:.1%} good: "
        f"{_words(best.service)} {words}"
    )
    console.print(f"how sure: {_sure(found)}")
    for name in found.too_slow:
        console.print(f"note: {escape(name)} misses the limits with a single user")
    for name in found.too_weak:
        console.print(f"note: more than {MAX_ENGINES:,} x ({escape(name)}) would be needed")
    context, longest = (
        best.service.pool.scheduler.max_context_tokens,
        ask.conversation_tokens(ask.message.high, ask.output.high),
    )
    if longest > context:
        console.print(
            f"note: a conversation may have {longest:,} tokens, and the context holds {context:,}: a message that it cannot "
            "hold is refused, which counts as missed"
        )
    for name, why in left_out.items():
        console.print(escape(f"note: {why}" if why.startswith(name) else f"note: {name}: {why}"))
    show_times(console, best.service)
    setup = best.service.pool.setup
    if setup.layout != PLAIN:
        console.print(f"note: {setup.split}: priced by formulas that no measurement was fitted to")
    elif setup.model.moe is not None:
        console.print("note: other layouts of the experts are tried when asked for: --ep, --dp-attention, --pp")


def _words(service: Service) -> str:
    parts = []
    for pool, part in zip(service.pools, _parts(service), strict=True):
        which = "" if part == "both phases" else f" to {part}"
        layout = f" ({pool.setup.split})" if pool.setup.layout != PLAIN else ""
        split = f", {pool.setup.n_devices} to a copy of the model{layout}" if pool.setup.n_devices > 1 else ""
        parts.append(f"{pool.n_devices} x {pool.setup.hardware.name}{which}{split}")
    return " and ".join(parts)


def row_of(layout: Layout, n_users: int) -> tuple[str, ...]:
    """Of the table."""
    report, users = layout.report or layout.longer, "-"
    if layout.users_each is not None:  # the search looked no further than those who ask
        more = " or more" if layout.users_each >= n_users else ""
        users = f"{'about ' if layout.is_rough else ''}{layout.users_each:,}{more}"
    cost = f"{layout.cost:.4g}"
    parts = [
        f"{'' if part == 'both phases' else part + ' '}{pool.n_devices} x {pool.setup.hardware.name}"
        f"{f' ({pool.setup.split})' if pool.setup.n_devices > 1 else ''}"
        for pool, part in zip(layout.service.pools, _parts(layout.service), strict=True)
    ]
    name = ", ".join(parts)
    if len(name) > WIDEST_NAME:
        name = ",\n".join(parts)
    if report is None or report.ttft_s is None:
        return name, users, cost, "sized", "-", "-", "-"
    tpot_s = None if report.tpot_s is None else report.tpot_s.p95
    fails = "" if layout.holds else " (no)"
    good = "-" if layout.report is None else f"{layout.report.good_share:.1%}{'' if layout.longer else fails}"
    longer = "-" if layout.longer is None else f"{layout.longer.good_share:.1%}{fails}"
    return name, users, cost, good, longer, duration(report.ttft_s.p95), duration(tpot_s)


def _crossover(found: Answer) -> str:
    """In words that say what the table says."""
    users, n_users = found.crossover_users, found.ask.n_users
    pooled = [layout.cost for layout in found.pools if layout.holds]
    alone = [layout.cost for layout in found.colocated if layout.holds]
    if not pooled:
        return "no two pools of these devices were found that hold"
    if not alone:
        return "only two pools hold"
    if min(pooled) < min(alone):
        since = (
            f", and do from about {counted(users, 'user', ',')} on"
            if users is not None
            else ", though not for all greater numbers"
        )
        return f"two pools cost less for these users{since}"
    as_much = "as much as" if min(pooled) == min(alone) else "more than"
    words = f"for these users two pools cost {as_much} engines that do both"
    if users is not None and users > n_users:
        words += f"; they cost less from about {counted(_round(users), 'user', ',')} on"
    else:
        words += ", and for up to a hundred times as many"
    tokens = found.crossover_message_tokens
    if tokens is not None:
        words += f"; or with messages of {counted(tokens, 'token', ',')} and more (an estimate without queues)"
    elif found.most_message_tokens is not None:
        words += (
            f"; messages longer than {found.most_message_tokens:,} tokens were not looked at, as "
            f"{found.ask.turns} turns of them fit no context"
        )
    return words


def _round(number: int) -> int:
    """To two digits: it was looked for in steps of an eighth."""
    return int(float(f"{number:.2g}"))


def _sure(found: Answer) -> str:
    """About what is to be bought: which numbers of it the interval of the prediction would make."""
    low, high = found.margin
    words = f"steps take {low:.2f} to {high:.2f} times what is predicted (80 %); "
    quick, slow = found.if_quick, found.if_slow
    if slow is None:
        return f"{words}with the longest of these no number of {_words(found.best.service)} would do"
    if _words(quick) == _words(slow):
        return f"{words}over all of that it stays {_words(quick)}"
    return f"{words}with the shortest it would be {_words(quick)}, with the longest {_words(slow)}"
