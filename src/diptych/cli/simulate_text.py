"""A simulated service as a page of text, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from diptych.cli.plan_json import plain
from diptych.cli.tables import duration, page, plain_table
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
        "setup": service.setup.label,
        "kv": service.setup.kv.name,
        "n_engines": service.n_engines,
        "n_devices": service.n_devices,
        "router": service.router,
        "kv_tokens": service.kv_tokens,
        "scheduler": plain(service.scheduler),
        "drafts": plain(service.drafts),
        "times": service.setup.calibration.source,
    }
    return {"load": note} | found


def show(report: Report, note: str) -> None:
    """The whole page."""
    console, service = page(), report.service
    config = service.scheduler
    copies = f"{service.n_engines} engines, {service.router}: " if service.n_engines > 1 else ""
    console.print(f"[bold]{copies}{service.setup.label}[/bold], KV {service.setup.kv.name}")
    budget = "" if config.stall_budget_s is None else f", stall budget {duration(config.stall_budget_s)}"
    console.print(
        f"each: a KV pool of {service.kv_tokens:,} tokens, {config.max_running_sequences} sequences at one time "
        f"({service.places_reason}), steps of {config.max_step_tokens} tokens at most{budget}, "
        f"prefix cache {'on' if config.enable_prefix_cache else 'off'}"
    )
    if service.drafts is not None:
        stated = service.drafts
        console.print(
            f"speculation: at most {stated.draft_tokens} drafted, as many as pay, at a stated acceptance of "
            f"{stated.acceptance:g}; drafting one costs {stated.draft_cost:g} decode steps"
        )
    console.print(f"load: {note}")
    _requests(console, report)
    _latencies(console, report)
    _engines(console, report)
    console.print(f"note: times: {service.setup.calibration.source}")


def _requests(console: Console, report: Report) -> None:
    console.print(
        f"{report.n_requests:,} requests in {duration(report.duration_s)}: {report.n_complete:,} completed, "
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
    console.print(table)


def _engines(console: Console, report: Report) -> None:
    shares = ", ".join(f"{name} {share:.1%}" for name, share in report.busy.items())
    console.print(f"the engines' time: {shares} (mixed: steps with both)")
    console.print(
        f"{report.n_steps:,} steps of {report.sequences_per_step:.3g} sequences; KV in use {report.kv_share:.1%}, "
        f"at most {report.kv_peak:.1%}; {report.preemptions:,} preemptions; {report.waiting_peak:,} waiting at most"
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
