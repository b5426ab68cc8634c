"""What a number of users needs, as one screen of text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.cli.plan_json import plain
from diptych.cli.tables import duration, page, plain_table
from diptych.sim.search import Answer, Layout
from diptych.sim.service import Report

FULL = 0.98  # of the KV pool: from there on sequences wait for blocks or lose them


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
        "left_out": dict(left_out),
        "prefill_share_of_busy_time": found.prefill_share,
        "engines_without_prefix_cache": found.engines_uncached,
        "engines_low": found.engines_low,
        "engines_high": found.engines_high,
        "step_time_margin": list(found.margin),
        "crossover_users": found.crossover_users,
        "crossover_message_tokens": found.crossover_message_tokens,
        "pareto": plain(points),
    }


def _layout(layout: Layout) -> dict[str, Any]:
    report = layout.report
    return {
        "pools": [
            {"setup": pool.setup.label, "n_engines": pool.n_engines, "n_devices": pool.n_devices, "part": part}
            for pool, part in zip(layout.service.pools, _parts(layout), strict=True)
        ],
        "cost": layout.cost,
        "users_per_engine": layout.users_each,
        "is_rough": layout.is_rough,
        "holds": layout.holds,
        "good_share": None if report is None else report.good_share,
        "ttft_p95_s": None if report is None or report.ttft_s is None else report.ttft_s.p95,
        "tpot_p95_s": None if report is None or report.tpot_s is None else report.tpot_s.p95,
    }


def _parts(layout: Layout) -> tuple[str, ...]:
    return ("both phases",) if layout.service.readers is None else ("decode", "prefill")


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
    console.print(
        f"{cells}[bold]{ask.n_users:,} users of {best.service.pool.setup.model.name}[/bold]: messages of {ask.message.low} to "
        f"{ask.message.high} tokens, answers of {ask.output.low} to {ask.output.high}, {ask.turns} turns, thinking "
        f"{duration(ask.think_s)}; {ask.good_share:.0%} within TTFT {duration(ask.limits.ttft_s)}, "
        f"TPOT {duration(ask.limits.tpot_s)}"
    )
    phase, share = limiting_phase(found), found.prefill_share
    share = share if phase == "prefill" else 1.0 - share
    console.print(
        f"[bold]{phase} limits this service[/bold]: {share:.0%} of the time that engines work goes to {phase}"
    )
    each = "" if n == 1 else f" for each cell, {n * best.cost:.6g} together"
    console.print(f"[bold]buy {_words(best)}[/bold]: {best.cost:.4g} {unit}{each}")
    table = plain_table("", "layout", "users each", "cost", "good", "TTFT p95", "TPOT p95")
    for layout in (*found.colocated, *found.pools):
        table.add_row(*_row(layout, unit))
    console.print(table)
    _crossover(found, console.print)
    colocated = found.colocated[0]
    engines, without = colocated.service.n_engines, found.engines_uncached
    setup = colocated.service.pool.setup.label
    words = f"{without} in place of {engines}" if without is not None else "no number would do"
    console.print(f"prefix cache: without it {words} x ({setup})")
    console.print(f"twice the users: first breaks {breaks_first(found.doubled, found.ask.good_share)}")
    held = found.confirmed
    words = "holds" if held.good_share >= ask.good_share else "[bold]does not hold, nor does anything else tried[/bold]"
    console.print(
        f"for longer: {held.n_requests:,} requests in {held.duration_s / 60:.1f} minutes, {held.good_share:.1%} good: "
        f"what to buy {words}"
    )
    low, high = found.margin
    most = "any number" if found.engines_high is None else str(found.engines_high)
    console.print(
        f"how sure: steps take {low:.2f} to {high:.2f} times what is predicted (80 %), which makes {found.engines_low} to "
        f"{most} x ({setup})"
    )
    for name in found.too_slow:
        console.print(f"note: {name} misses the limits with a single user")
    for name, why in left_out.items():
        console.print(f"note: {name}: {why}")
    for source in dict.fromkeys(pool.setup.calibration.source for pool in best.service.pools):
        console.print(f"note: times: {source}")
    if best.service.pool.setup.model.moe is not None:
        console.print("note: expert, pipeline and attention-data parallel layouts are not tried")


def _words(layout: Layout) -> str:
    parts = []
    for pool, part in zip(layout.service.pools, _parts(layout), strict=True):
        which = "" if part == "both phases" else f" to {part}"
        split = f", {pool.setup.tp} to a copy of the model" if pool.setup.tp > 1 else ""
        parts.append(f"{pool.n_devices} x {pool.setup.hardware.name}{which}{split}")
    return " and ".join(parts)


def _row(layout: Layout, unit: str) -> tuple[str, ...]:
    report = layout.report
    users = "-" if layout.users_each is None else f"{'about ' if layout.is_rough else ''}{layout.users_each:,}"
    cost = f"{layout.cost:.4g} {'USD/h' if unit.startswith('USD') else 'devices'}"
    if report is None or report.ttft_s is None:
        return _words(layout), users, cost, "sized", "-", "-"
    tpot_s = None if report.tpot_s is None else report.tpot_s.p95
    good = f"{report.good_share:.1%}{'' if layout.holds else ' (misses)'}"
    return _words(layout), users, cost, good, duration(report.ttft_s.p95), duration(tpot_s)


def _crossover(found: Answer, say: Any) -> None:
    if found.crossover_users is not None:
        words = f"two pools cost less from about {found.crossover_users:,} users on"
    else:
        words = "two pools cost more than engines that do both, for up to a hundred times these users"
        if not any(layout.holds for layout in found.pools):
            words = "no two pools of these devices were found that hold"
    tokens = found.crossover_message_tokens
    if tokens is not None:
        words += f"; with longer messages from about {tokens:,} tokens on (a fluid estimate)"
    say(f"crossover: {words}")
