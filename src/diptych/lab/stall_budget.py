"""What a stall budget buys and costs, through a server: streams decode while a long prompt arrives.

    python -m diptych.lab.stall_budget --url http://127.0.0.1:8000 --streams 8 --prompt-tokens 3000

Run it against servers started with different `--stall-budget-ms` (and one without, with a large `--max-step-tokens`) and
compare. Reported: the gaps between tokens of the streams before and while the prompt is read, and the prompt's TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from diptych.ground.clock import MonotonicClock
from diptych.ground.config import at_least
from diptych.ground.errors import ConfigError
from diptych.lab.http_client import HttpClient, HttpFailure
from diptych.lab.load import carries_output, spread

CLOCK = MonotonicClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class StallConfig:
    """streams decode `new_tokens` each; after `lead_tokens` of the first stream the long prompt is sent.

    ConfigError where there is no stream, or none that is longer.
    """

    url: str
    api_key: str | None = None
    streams: int = 8
    prompt_tokens: int = 3000
    new_tokens: int = 400
    lead_tokens: int = 50
    vocab_size: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse streams behind which the prompt would never be sent."""
        at_least("streams", self.streams, 1)
        at_least("new tokens of a stream", self.new_tokens, self.lead_tokens + 1)


async def run_stall(config: StallConfig) -> dict[str, Any]:
    """One run; returns the numbers as one object."""
    client = HttpClient(config.url, api_key=config.api_key)
    noise = random.Random(config.seed)
    may_send = asyncio.Event()
    times_s: list[list[float]] = [[] for _ in range(config.streams)]

    async def stream(number: int) -> None:
        body = _body([noise.randrange(config.vocab_size) for _ in range(16)], config.new_tokens)
        async with aclosing(client.events("/v1/completions", body)) as events:
            async for data in events:
                if carries_output(json.loads(data)):
                    times_s[number].append(CLOCK.now_s())
                if number == 0 and len(times_s[0]) == config.lead_tokens:
                    may_send.set()
        may_send.set()  # an event may bring several tokens, so that there were fewer of them

    async def intruder() -> tuple[float, float]:
        await may_send.wait()
        prompt = [noise.randrange(config.vocab_size) for _ in range(config.prompt_tokens)]
        sent_s = CLOCK.now_s()
        await client.post("/v1/completions", _body(prompt, 1) | {"stream": False})
        return sent_s, CLOCK.now_s()

    try:
        prompt = asyncio.ensure_future(intruder())
        await asyncio.gather(prompt, *(stream(number) for number in range(config.streams)))
        sent_s, first_s = prompt.result()
    finally:
        await client.close()
    before, during = [], []
    for times in times_s:
        for sooner, later in pairwise(times):
            if later < sent_s:
                before.append(later - sooner)
            elif sooner < first_s:
                during.append(later - sooner)
    return {
        "streams": config.streams,
        "prompt_tokens": config.prompt_tokens,
        "itl_before_s": spread(before),
        "itl_during_s": spread(during) | {"max": max(during, default=None)},
        "ttft_s": first_s - sent_s,
        "gaps_during": len(during),
    }


def _body(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def main() -> None:
    """Read the options, run, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    try:
        found = asyncio.run(run_stall(StallConfig(**vars(parser.parse_args()))))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except HttpFailure as failure:
        sys.exit(f"error: {failure}\nhint: start `diptych serve`, or name another server with --url")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
