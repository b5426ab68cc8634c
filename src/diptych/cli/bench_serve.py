"""`diptych bench serve --url`: load for any OpenAI-compatible server, with latencies that count from when a request was due."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.cli import options, working
from diptych.cli.options import check_writable
from diptych.ground.config import env_text
from diptych.ground.errors import ConfigError
from diptych.lab.load import DEFINITIONS, LoadConfig, SentRequest, run_load, summarize
from diptych.lab.pictures import check_picture
from diptych.workload import LengthRange

app = options.command_app()


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="the server, such as http://127.0.0.1:8000")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="model name to send (default: none)")] = None,
    api_key: options.ApiKey = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat")] = "completions",
    requests: Annotated[int, typer.Option(min=1, help="how many requests")] = 100,
    rate: Annotated[float | None, typer.Option(help="open loop: Poisson arrivals per second")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="closed loop: requests in flight (default: 1, without --rate)")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="N or LOW:HIGH")] = "128",
    new_tokens: Annotated[str, typer.Option(help="N or LOW:HIGH")] = "64",
    shared_prefix_tokens: Annotated[
        int, typer.Option(min=0, help="tokens that all prompts begin with, before their own")
    ] = 0,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="send random token ids below this (exact lengths)")
    ] = None,
    seed: Annotated[int, typer.Option(help="arrivals, lengths and prompts")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="ask for exactly --new-tokens")] = True,
    ttft_ms: Annotated[float | None, typer.Option(help="objective for goodput")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="objective for goodput")] = None,
    timeout_s: Annotated[float, typer.Option(help="give up on a request after this")] = 600.0,
    as_json: options.AsJson = False,
    out: Annotated[Path | None, typer.Option(help="write the JSON, with every request, to this file")] = None,
    picture: Annotated[Path | None, typer.Option(help="write a picture (.png, .svg, .pdf)")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="say what each number means")] = False,
) -> None:
    """Send a seeded load and report latency, rates and goodput."""
    if rate is not None and concurrency is not None:
        raise ConfigError("both --rate and --concurrency are set; give one (open loop or closed loop)")
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate is {rate}; it must be greater than 0")
    for name, value in (("--timeout-s", timeout_s), ("--ttft-ms", ttft_ms), ("--tpot-ms", tpot_ms)):
        if value is not None and not 0.0 < value < math.inf:  # JSON knows no infinity
            raise ConfigError(f"{name} is {value}; it must be a number greater than 0")
    if explain and as_json:
        raise ConfigError("--explain words the numbers of the page, and --json prints none", hint="give one of them")
    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"endpoint is {endpoint!r}; it must be completions or chat")
    if endpoint == "chat" and vocab_size is not None:
        raise ConfigError("--vocab-size sends token ids, and a chat has texts alone", hint="leave it out")
    prompt, answer = (
        LengthRange.parse(prompt_tokens, "--prompt-tokens"),
        LengthRange.parse(new_tokens, "--new-tokens"),
    )
    config = LoadConfig(
        url=url,
        model=model,
        api_key=api_key or env_text("API_KEY"),
        endpoint=endpoint,
        requests=requests,
        rate_per_s=rate,
        concurrency=concurrency if rate is None else None,
        prompt_tokens=(prompt.low, prompt.high),
        new_tokens=(answer.low, answer.high),
        shared_prefix_tokens=shared_prefix_tokens,
        vocab_size=vocab_size,
        seed=seed,
        ignores_eos=ignore_eos,
        ttft_objective_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_objective_s=None if tpot_ms is None else tpot_ms / 1e3,
        timeout_s=timeout_s,
    )
    check_picture(picture)
    check_writable(out)
    check_writable(picture)
    outcomes = _run(config, is_quiet=as_json)
    summary = summarize(config, outcomes)
    if as_json:
        print(json.dumps(summary))
    else:
        _print(summary, is_explained=explain)
    # files last, so that one that cannot be written costs no answer
    if out is not None:
        out.write_text(json.dumps(summary | {"outcomes": [_row(one) for one in outcomes]}, indent=1) + "\n")
    if picture is not None:
        working.draw(outcomes, summary, picture)
    if summary["answered"] == 0:
        print("error: no request was answered", file=sys.stderr)
        raise typer.Exit(1)


def _run(config: LoadConfig, *, is_quiet: bool) -> list[SentRequest]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=is_quiet) as progress:
        bar = progress.add_task("requests", total=config.requests)
        return asyncio.run(run_load(config, on_done=lambda outcome: progress.advance(bar)))


def _row(one: SentRequest) -> dict[str, Any]:
    return {
        "number": one.number, "due_s": one.due_s, "sent_s": one.sent_s, "end_s": one.end_s, "event_s": one.event_s,
        "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens, "cached_tokens": one.cached_tokens,
        "error": one.error, "status": one.status, "timings": one.timings,
    }  # fmt: skip


def _print(summary: dict[str, Any], *, is_explained: bool) -> None:
    failed = ", ".join(f"{number} x {what}" for what, number in summary["failed"].items()) or "none"
    print(f"answered {summary['answered']} of {summary['requests']} in {summary['wall_s']:.2f} s; failed: {failed}")
    for error in summary["first_errors"].values():
        print(f"  for example {error}")
    for name in ("request_rate_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "goodput_per_s", "attainment"):
        value = summary[name]
        print(f"  {name:<22}{'-' if value is None else f'{value:10.2f}'}")
    print(f"  {'milliseconds':<22}{'p50':>10}{'p95':>10}{'p99':>10}{'mean':>10}")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "lag_s"):
        cells = "".join(f"{'-' if value is None else f'{value * 1e3:.2f}':>10}" for value in summary[name].values())
        print(f"  {name.removesuffix('_s'):<22}{cells}")
    if is_explained:
        for name, text in DEFINITIONS.items():
            print(f"  {name}: {text}")
