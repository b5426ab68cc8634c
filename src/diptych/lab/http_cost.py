"""What HTTP costs: the same closed loop through a server and through an engine in this process, in turns.

    diptych serve MODEL --weights int8 &
    python -m diptych.lab.http_cost MODEL --weights int8 --url http://127.0.0.1:8000 --concurrency 16 --pairs 5

Machines change their speed within minutes, so every pair runs back to back (offline, HTTP) and the cost is the median of the
pairs' ratios. The server has the same model and settings; while one side runs, the other sleeps. Both count output tokens
from the first submission to the last token. The HTTP side includes this client, on the same cores unless elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any

from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.errors import EngineError
from diptych.ground.request import SamplingParams
from diptych.lab.http_client import HttpClient, HttpFailure
from diptych.lab.load import LoadConfig, run_load, summarize

if TYPE_CHECKING:  # a server is looked for before torch is loaded
    from diptych.engine.engine import OutputDelta
    from diptych.engine.llm import LLM

CLOCK = MonotonicClock()


def offline_tokens_per_s(llm: LLM, prompts: list[list[int]], *, new_tokens: int, concurrency: int) -> float:
    """Keep `concurrency` requests in the engine until all prompts are answered; text is made as for a client."""
    engine, sampling = llm.engine, SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    left = list(reversed(prompts))
    n_open = n_tokens = 0

    def on_delta(delta: OutputDelta) -> None:
        nonlocal n_open, n_tokens
        n_tokens += len(delta.token_ids)
        n_open -= delta.finish_reason is not None

    begin_s = CLOCK.now_s()
    while left or n_open:
        while left and n_open < concurrency:
            engine.submit(engine.make_request(left.pop(), sampling, arrival_s=CLOCK.now_s()), on_delta)
            n_open += 1
        engine.step()
    return n_tokens / (CLOCK.now_s() - begin_s)


def http_tokens_per_s(config: LoadConfig) -> float:
    """The same through the server. Raises RuntimeError when a request failed, as the rate would mean nothing."""
    summary = summarize(config, asyncio.run(run_load(config)))
    if summary["failed"]:
        raise RuntimeError(f"requests failed: {summary['failed']}")
    return summary["output_tokens_per_s"]


def run_pairs(llm: LLM, config: LoadConfig, *, pairs: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """`pairs` turns of both sides after one short turn each to warm up; fresh prompts every time."""
    assert config.concurrency is not None
    assert config.vocab_size is not None
    prompt_tokens, new_tokens = config.prompt_tokens[0], config.new_tokens[0]
    rows = []
    for number in range(pairs + 1):
        is_warm_up = number == 0
        n_requests = config.concurrency if is_warm_up else config.requests
        turn = replace(config, seed=config.seed + number, requests=n_requests)
        noise = random.Random(turn.seed)
        prompts = [[noise.randrange(config.vocab_size) for _ in range(prompt_tokens)] for _ in range(n_requests)]
        offline = offline_tokens_per_s(llm, prompts, new_tokens=new_tokens, concurrency=config.concurrency)
        http = http_tokens_per_s(turn)
        if not is_warm_up:
            rows.append((offline, http))
            progress(f"offline {offline:.1f} http {http:.1f} output tokens/s, cost {1 - http / offline:.1%}")
    costs = sorted(1 - http / offline for offline, http in rows)
    return {
        "concurrency": config.concurrency,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "requests": config.requests,
        "offline_tokens_per_s": median(offline for offline, _ in rows),
        "http_tokens_per_s": median(http for _, http in rows),
        "cost": median(costs),
        "cost_range": [costs[0], costs[-1]],
        "rows": rows,
    }


def main() -> None:
    """Read the options, run, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=4000, help="prompts are random token ids below this")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-context-tokens", type=int)
    given = parser.parse_args()
    try:
        found = measured(given)
    except EngineError as error:
        sys.exit(f"error: {error}")
    except (HttpFailure, RuntimeError) as error:
        sys.exit(f"error: {error}\nhint: start `diptych serve` with the same model, or name another server with --url")
    print(json.dumps(found))


async def _ask(url: str, api_key: str | None) -> None:
    """Raises HttpFailure where no server answers."""
    client = HttpClient(url, api_key=api_key)
    try:
        await client.get("/v1/models")
    finally:
        await client.close()


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """What the options ask for. The server is asked before the model is loaded."""
    asyncio.run(_ask(given.url, given.api_key))
    compute = ComputeConfig(weights=given.weights)
    llm = import_module("diptych.engine.llm").LLM.from_pretrained(
        given.model, EngineConfig(compute=compute, max_context_tokens=given.max_context_tokens)
    )
    config = LoadConfig(
        url=given.url,
        api_key=given.api_key,
        requests=given.requests,
        concurrency=given.concurrency,
        prompt_tokens=(given.prompt_tokens, given.prompt_tokens),
        new_tokens=(given.new_tokens, given.new_tokens),
        vocab_size=given.vocab_size,
    )
    return run_pairs(llm, config, pairs=given.pairs, progress=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
