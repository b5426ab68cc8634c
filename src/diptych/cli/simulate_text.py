"""A simulated service as a page of text, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from diptych.cli.plan_json import plain
from diptych.cli.tables import amount, duration, page, plain_table
from diptych.cost.planner import gpu_notes
from diptych.ground.bounds import counted
from diptych.sim.pools import Pool, Service
from diptych.sim.service import Report

REASONS = {
    "PromptTooLong": "longer than the context or the KV pool",
    "CapacityError": "too many tokens were waiting",
}


def as_json(report: Report, note: str) -> dict[str, Any]:
    """The report under its own names; the service in short."""
    found: dict[str, Any] = plain(report)
    service = report.service
    found["service"] = {
        "n_engines": service.n_engines,
        "n_devices": service.n_devices,
        "router": service.router,
        "link": plain(service.link),
        "local_prefill_s": None if service.link is None else service.local_prefill_s,
        "pools": [
            {
                "setup": pool.setup.label,
                "kv": pool.setup.kv.name,
                "n_engines": pool.n_engines,
                "kv_tokens": pool.kv_tokens,
                "scheduler": plain(pool.scheduler),
                "drafts": plain(pool.drafts),
                "times": pool.setup.calibration.source,
                "notes": _gpu_notes(pool),
            }
            for pool in service.pools
        ],
    }
    return {"load": note} | found


def show(report: Report, note: str) -> None:
    """The whole page."""
    console, service = page(), report.service
    for pool in service.pools:
        _pool(console, service, pool)
    if service.link is not None:
        console.print(
            f"link: {amount(service.link.bytes_per_s)}B/s each way of an engine, {duration(service.link.latency_s)} late; "
            f"read where it is answered: what takes {duration(service.local_prefill_s)} at most"
        )
    console.print(f"load: {note}", markup=False)
    _requests(console, report)
    _latencies(console, report)
    _engines(console, report)
    show_times(console, service)


def show_times(console: Console, service: Service) -> None:
    """Where its prices come from."""
    sources = {pool.setup.calibration.source: pool for pool in service.pools}
    for source, pool in sources.items():
        where = (
            ""
            if len(sources) == 1
            else " where answers are written"
            if pool is service.pool
            else " where prompts are read"
        )
        console.print(f"note: times{where}: {source}")
    for note in dict.fromkeys(note for pool in service.pools for note in _gpu_notes(pool)):
        console.print(f"note: {note}", markup=False)
    if service.request_s:
        console.print(
            f"note: {duration(service.request_s)} of each request pass between its client and the scheduler, in its queue"
        )


def _gpu_notes(pool: Pool) -> tuple[str, ...]:
    return gpu_notes(pool.setup.model, pool.setup.hardware, pool.setup.calibration)


def _pool(console: Console, service: Service, pool: Pool) -> None:
    """What one pool is made of."""
    config, part = pool.scheduler, ""
    if service.readers is not None:
        part = "decode on " if pool is service.pool else "prefill on "
    copies = f"{counted(pool.n_engines, 'engine')}, {service.router}: " if pool.n_engines > 1 else ""
    console.print(f"[bold]{part}{copies}{escape(pool.setup.label)}[/bold], KV {pool.setup.kv.name}")
    budget = "" if config.stall_budget_s is None else f", stall budget {duration(config.stall_budget_s)}"
    console.print(
        f"each: a KV pool of {counted(pool.kv_tokens, 'token', ',')}, "
        f"{counted(config.max_running_sequences or 0, 'sequence')} at one time "
        f"({pool.places_reason}), steps of {counted(config.max_step_tokens, 'token')} at most{budget}, "
        f"prefix cache {'on' if config.enable_prefix_cache else 'off'}"
    )
    if pool.drafts is not None:
        stated = pool.drafts
        console.print(
            f"speculation: at most {stated.draft_tokens} drafted, as many as pay, at a stated acceptance of "
            f"{stated.acceptance:g}; drafting one costs {stated.draft_cost:g} decode steps"
        )


def _requests(console: Console, report: Report) -> None:
    console.print(
        f"{counted(report.n_requests, 'request', ',')} in {duration(report.duration_s)}: {report.n_complete:,} completed, "
        f"{report.requests_per_s:.3g} a second; {report.output_tokens_per_s:,.0f} output tokens a second, "
        f"{report.total_tokens_per_s:,.0f} with prompts"
    )
    if report.n_failed:
        console.print(f"{report.n_failed:,} failed")
    for name, count in sorted(report.refused.items()):
        console.print(f"refused: {count:,} ({REASONS.get(name, name)})")
    limits = report.limits
    asked = [("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s), ("end to end", limits.e2e_s)]
    words = ", ".join(f"{name} {duration(limit)}" for name, limit in asked if limit is not None)
    if words:
        console.print(
            f"goodput within {words}: {report.goodput_requests_per_s:.3g} requests a second, {report.good_share:.1%} of all"
        )


def _latencies(console: Console, report: Report) -> None:
    table = plain_table("latency of what completed", "", "mean", "p50", "p90", "p95", "p99", "max")
    rows = (
        ("queue", report.queue_s),
        ("time to first token", report.ttft_s),
        ("time per output token", report.tpot_s),
        ("inter-token latency", report.itl_s),
        ("end to end", report.e2e_s),
    )
    for name, found in rows:
        if found is not None:
            values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
            table.add_row(name, *(duration(value) for value in values))
    if table.rows:
        console.print(table)


def _engines(console: Console, report: Report) -> None:
    names = ("",) if len(report.pools) == 1 else ("decode pool: ", "prefill pool: ")
    for name, pool in zip(names, report.pools, strict=True):
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in pool.busy.items())
        console.print(f"{name}the engines' time: {shares} (mixed: steps with both)")
        console.print(
            f"{name}{counted(pool.n_steps, 'step', ',')} of {counted(pool.sequences_per_step, 'sequence', '.3g')}; KV "
            f"in use {pool.kv_share:.1%}, "
            f"at most {pool.kv_peak:.1%}; {counted(pool.preemptions, 'preemption', ',')}; {pool.waiting_peak:,} waiting at most"
        )
    if report.hand_off_s is not None:
        console.print(
            f"{counted(report.n_sent, 'prompt', ',')} handed over, {amount(report.sent_bytes)}B of keys and values; last byte "
            f"{duration(report.hand_off_s.p50)} after the last chunk (p50), {duration(report.hand_off_s.p99)} (p99)"
        )
    if report.prefix_query_tokens:
        share = report.prefix_hit_tokens / report.prefix_query_tokens
        console.print(f"prefix cache: {share:.1%} of {report.prefix_query_tokens:,} prompt tokens found")
    per_million = report.usd_per_million_output_tokens
    if report.usd_per_hour is not None and per_million is not None:
        console.print(
            f"at {report.usd_per_hour:.4g} USD an hour: {per_million:.3g} USD per million output tokens, "
            f"{report.usd_per_million_tokens:.3g} with prompts"
        )
