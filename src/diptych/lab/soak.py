"""An hour of mixed load with random aborts: memory flat, no lost block, no lost request.

    python -m diptych.lab.soak --url http://127.0.0.1:8000 --minutes 60 [--pid PID] [--think-s 4]

Every request sent must get exactly one final answer or one error. Prints one line a minute and exits 1 when a promise broke.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from diptych.ground.clock import MonotonicClock
from diptych.lab.http_client import HttpClient, HttpFailure

CLOCK = MonotonicClock()
REPORT_S = 60.0
# after warming up, resident memory may grow by this much over the whole run
MAX_GROWTH_SHARE = 0.10
WARM_SHARE = 0.2
# in the first minutes the KV pool is written for the first time and allocators fill their own pools
MIN_MEMORY_RUN_S = 600.0


@dataclass(slots=True)
class SoakResult:
    """What was sent and what came back; rss_bytes by minute where the process is known."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[int] = field(default_factory=list)
    blocks_left: int = 0
    stale_connections: int = 0
    problems: list[str] = field(default_factory=list)


def random_body(noise: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body: lengths, options and shapes as a mixed public would send them."""
    words = " ".join(noise.choice(("river", "town", "bird", "train", "book")) for _ in range(noise.randint(1, 400)))
    shared: dict[str, Any] = {
        "max_tokens": noise.randint(1, 120),
        "temperature": noise.choice((0.0, 0.7, 1.2)),
        "n": noise.choice((1, 1, 1, 2, 4)),
        "seed": noise.randrange(1000),
        "stream": True,
    }
    kind = noise.randrange(6)
    if kind == 0:
        shared |= {"logprobs": 3}
    if kind == 1:
        shared |= {"stop": ["the", "\n"]}
    if kind == 2:
        shared |= {"structured_outputs": {"regex": "[a-z ]{5,40}[.]"}}
    if kind >= 4:
        shared.pop("logprobs", None)
        return "/v1/chat/completions", shared | {"messages": [{"role": "user", "content": words}]}
    return "/v1/completions", shared | {"prompt": words}


async def run_soak(
    url: str,
    *,
    seconds: float,
    clients: int,
    seed: int,
    api_key: str | None,
    pid: int | None,
    think_s: float = 0.0,
) -> SoakResult:
    """Send for `seconds`, one request after the other from each client; a fifth of the streams are left half-way.

    think_s: how long a client pauses between two requests on average (0: not at all). HttpFailure when no server answers.
    """
    result = SoakResult()
    client = HttpClient(url, api_key=api_key)
    await client.get("/health")  # without a server there is nothing to soak
    end_s = CLOCK.now_s() + seconds

    async def worker(number: int) -> None:
        noise = random.Random(seed * 1000 + number)
        while CLOCK.now_s() < end_s:
            path, body = random_body(noise)
            leaves_after = noise.randint(1, 30) if noise.random() < 0.2 else None
            result.sent += 1
            result.outcomes[await _one(client, path, body, leaves_after)] += 1
            if think_s > 0.0:
                await asyncio.sleep(noise.expovariate(1.0 / think_s))

    async def watch() -> None:
        while CLOCK.now_s() < end_s:
            await asyncio.sleep(min(REPORT_S, max(0.1, seconds / 10)))
            if pid is not None:
                result.rss_bytes.append(_rss_bytes(pid))
            rss = f" rss_bytes={result.rss_bytes[-1]}" if result.rss_bytes else ""
            print(f"sent={result.sent} {dict(result.outcomes)}{rss}", flush=True)

    await asyncio.gather(watch(), *(worker(number) for number in range(clients)))
    await _check(client, result, judges_memory=seconds >= MIN_MEMORY_RUN_S)
    result.stale_connections = client.n_stale
    await client.close()
    return result


async def _one(client: HttpClient, path: str, body: dict[str, Any], leaves_after: int | None) -> str:
    finished: set[int] = set()
    n_events = 0
    try:
        async with aclosing(client.events(path, body)) as events:
            async for data in events:
                n_events += 1
                for choice in json.loads(data)["choices"]:
                    if choice["finish_reason"] is not None:
                        if choice["index"] in finished:
                            return "finished twice"
                        finished.add(choice["index"])
                if n_events == leaves_after:
                    return "left"
    except HttpFailure as failure:
        return f"error {failure.status}" if failure.status is not None else f"broken: {failure}"
    return "answered" if len(finished) == body["n"] else "lost choice"


async def _check(client: HttpClient, result: SoakResult, *, judges_memory: bool) -> None:
    for _ in range(200):
        text = (await client.get("/metrics")).decode()
        result.blocks_left = _sample(text, 'diptych_kv_blocks{state="in_use"}')
        open_sequences = _sample(text, "diptych_sequences_running") + _sample(text, "diptych_sequences_waiting")
        if result.blocks_left == 0 and open_sequences == 0:
            break
        await asyncio.sleep(0.1)
    else:
        result.problems.append(f"{result.blocks_left} blocks and {open_sequences} sequences are left")
    if sum(result.outcomes.values()) != result.sent:
        result.problems.append(f"{result.sent} sent, {sum(result.outcomes.values())} ended")
    allowed = {"answered", "left", "error 503"}
    result.problems += [f"{number} x {name}" for name, number in result.outcomes.items() if name not in allowed]
    warm = result.rss_bytes[int(len(result.rss_bytes) * WARM_SHARE) :]
    if judges_memory and len(warm) >= 3 and warm[-1] > warm[0] * (1 + MAX_GROWTH_SHARE):
        result.problems.append(f"memory grew from {warm[0]} to {warm[-1]} bytes")


def _sample(text: str, name: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith(f"{name} ")), f"{name} 0")
    return int(float(line.rpartition(" ")[2]))


def _rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def main() -> None:
    """Read the options, run, say what broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--think-s", type=float, default=0.0, help="average pause between a client's requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    given = parser.parse_args()
    run = run_soak(
        given.url,
        seconds=given.minutes * 60,
        clients=given.clients,
        seed=given.seed,
        api_key=given.api_key,
        pid=given.pid,
        think_s=given.think_s,
    )
    try:
        result = asyncio.run(run)
    except HttpFailure as failure:
        sys.exit(f"error: {failure}\nhint: start `diptych serve`, or name another server with --url")
    print(json.dumps({one.name: getattr(result, one.name) for one in fields(result)}))
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
