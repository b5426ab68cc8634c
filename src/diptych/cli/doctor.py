"""`diptych doctor --url`: reads a running server's metrics and names what makes it slow, with the numbers."""

from __future__ import annotations

import json
from typing import Annotated

import httpx
import typer

from diptych.cli import options
from diptych.cli.asked import headers_of
from diptych.ground.bounds import Bound
from diptych.ground.clock import sleep_s
from diptych.ground.config import env_text
from diptych.ground.errors import ConfigError
from diptych.insight.diagnosis import Diagnosis, Scrape, diagnose, read_scrape

app = options.command_app()
SHOWN = (
    ("requests", "", "requests answered"),
    ("refused", "", "requests refused (503)"),
    ("ttft_s.p50", "s", "time to first token, p50"),
    ("ttft_s.p99", "s", "time to first token, p99"),
    ("queue_s.mean", "s", "queue, mean"),
    ("prefill_s.mean", "s", "prefill, mean"),
    ("itl_s.p50", "s", "between tokens, p50"),
    ("itl_s.p99", "s", "between tokens, p99"),
    ("prompt_tokens.mean", "", "prompt tokens, mean"),
    ("output_tokens.mean", "", "output tokens, mean"),
    ("prefix_hit_share", "%", "prompt tokens from the cache"),
    ("running", "", "running now"),
    ("waiting", "", "waiting now"),
    ("kv_usage", "%", "KV cache in use"),
    ("preemptions", "", "preemptions"),
)
WINDOW = Bound(float, 0.0, 1e6, "seconds")
ABOUT = (("ttft", "time to first token"), ("tokens_per_s", "tokens per second"), ("refusals", "refusals"))


@app.command()
def doctor(
    url: Annotated[
        str, typer.Option(help="the server: Diptych, or any that exports vLLM's metric names")
    ] = "http://127.0.0.1:8000",
    api_key: options.ApiKey = None,
    window_s: Annotated[
        float, typer.Option(help="look at this many seconds; 0: everything since the server started")
    ] = 0.0,
    as_json: options.AsJson = False,
) -> None:
    """Say whether TTFT or tokens per second are bad, why, and what to do."""
    WINDOW.take("--window-s", window_s, ConfigError)
    key = api_key or env_text("API_KEY")
    scrape = fetch(url, key)
    if window_s > 0:
        sleep_s(window_s)
        scrape = fetch(url, key).since(scrape)
    diagnosis = diagnose(scrape)
    print(json.dumps(diagnosis.as_json()) if as_json else text_of(diagnosis))


def fetch(url: str, key: str | None) -> Scrape:
    """One scrape. Raises ConfigError when the server cannot be reached or its metrics are not ours to read."""
    address = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        answer = httpx.get(address, headers=headers_of(key), timeout=10.0, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"cannot read {address}: {error}", hint="is the server running, and is the url right"
        ) from error
    if answer.status_code != 200:
        raise ConfigError(f"{address} answers {answer.status_code}", hint="give --api-key when the server asks for one")
    try:
        scrape = read_scrape(answer.text)
    except ValueError as error:
        raise ConfigError(f"{address} is no Prometheus text: {error}") from error
    if not scrape.histograms:
        raise ConfigError(
            f"{address} has none of the metrics this command knows", hint="names begin with diptych_ or vllm:"
        )
    return scrape


def text_of(diagnosis: Diagnosis) -> str:
    """A few lines for a person."""
    numbers = diagnosis.numbers
    seen = (numbers["requests"], numbers["refused"], numbers["itl_s.p50"])  # a stream may be older than a window
    if not any(seen) and not diagnosis.findings:
        return "no request was answered in this time, so there is nothing to judge"
    lines = ["numbers"]
    for name, unit, label in SHOWN:
        value = numbers.get(name)
        if value is not None:
            lines.append(f"  {label:<30}{_shown(value, unit):>12}")
    if seen[0] != 1 or numbers["itl_s.p50"] is not None:  # one value alone is exact
        lines.append("  (percentiles are estimates, within the buckets that the server counts in; means are exact)")
    for about, title in ABOUT:
        found = [one for one in diagnosis.findings if one.about == about]
        lines.append(f"{title}: {'nothing stands out' if not found else ', then '.join(one.cause for one in found)}")
        for one in found:
            lines += [f"  {one.cause}: {one.evidence}", f"    {one.advice}"]
    return "\n".join(lines)


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"
    return f"{value:.0%}" if unit == "%" else f"{value:.0f}"
