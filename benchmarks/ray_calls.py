"""What a token costs on its way from a worker to the door: an actor that hands out whole steps, against Ray Serve.

python benchmarks/ray_calls.py [--streams 8] [--steps 500] [--step-ms 10]     # needs: pip install "ray[serve]"

A worker makes a token for each of some streams every few milliseconds. `actor`: the door fetches what happened, one call after
the other, all streams in one answer (as `diptych.cluster.rays` does). `serve`: each stream is a streaming call of a deployment,
as Ray Serve offers it, without its HTTP proxy. Told: milliseconds from a token's making to the door having it, and processor
time of door and worker per token. One machine, no model: only the way is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from diptych.ground.config import quiet_ray

quiet_ray(is_local=True)
import psutil  # noqa: E402
import ray  # noqa: E402  # it reads its environment when it is imported
from ray import serve  # noqa: E402


@ray.remote(concurrency_groups={"news": 1, "door": 1})
class Worker:
    """Hands out what happened since the last call."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._made: list[tuple[int, float]] = []

    @ray.method(concurrency_group="door")
    def begin(self, n_streams: int, n_steps: int, step_s: float) -> int:
        """Make tokens from now on; answers the process."""
        threading.Thread(target=self._make, args=(n_streams, n_steps, step_s), daemon=True).start()
        return psutil.Process().pid

    def _make(self, n_streams: int, n_steps: int, step_s: float) -> None:
        for _ in range(n_steps):
            time.sleep(step_s)
            with self._wake:
                self._made += [(stream, time.perf_counter()) for stream in range(n_streams)]
                self._wake.notify_all()

    @ray.method(concurrency_group="news")
    def fetch(self) -> list[tuple[int, float]]:
        """As soon as there is something."""
        with self._wake:
            self._wake.wait_for(lambda: self._made, timeout=0.5)
            made, self._made = self._made, []
            return made


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Deployment:
    """The same tokens, each stream an answer of its own."""

    def pid(self) -> int:
        """Of the replica."""
        return psutil.Process().pid

    async def stream(self, n_steps: int, step_s: float) -> AsyncIterator[float]:
        """When each token was made."""
        for _ in range(n_steps):
            await asyncio.sleep(step_s)
            yield time.perf_counter()


def cpu_s(*pids: int) -> float:
    """Processor time of these processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def by_actor(options: argparse.Namespace) -> tuple[list[float], float]:
    """Delays, and processor seconds of both sides."""
    worker: Any = Worker.remote()
    own = psutil.Process().pid
    pid = ray.get(worker.begin.remote(options.streams, options.steps, options.step_ms / 1e3))
    before_s, delays = cpu_s(own, pid), list[float]()
    while len(delays) < options.streams * options.steps:
        made = ray.get(worker.fetch.remote())
        now_s = time.perf_counter()
        delays += [now_s - at_s for _, at_s in made]
    used_s = cpu_s(own, pid) - before_s
    ray.kill(worker)
    return delays, used_s


async def by_serve(handle: Any, options: argparse.Namespace) -> tuple[list[float], float]:
    """Delays, and processor seconds of both sides."""
    pids = psutil.Process().pid, await handle.pid.remote()
    before_s, delays = cpu_s(*pids), list[float]()

    async def read() -> None:
        async for at_s in handle.options(stream=True).stream.remote(options.steps, options.step_ms / 1e3):
            delays.append(time.perf_counter() - at_s)

    await asyncio.gather(*(read() for _ in range(options.streams)))
    return delays, cpu_s(*pids) - before_s


def told(delays: list[float], used_s: float) -> dict[str, float]:
    """In the units of a reader."""
    cuts = statistics.quantiles(delays, n=100)
    per_token_us = used_s / len(delays) * 1e6
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3, "cpu_us_per_token": per_token_us}


def main() -> None:
    """Both in turn, five times, and JSON at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(proxy_location="Disabled")
    handle = serve.run(Deployment.bind(), route_prefix=None)
    rounds: dict[str, list[dict[str, float]]] = {"actor": [], "serve": []}
    for number in range(options.rounds):
        rounds["actor"].append(told(*by_actor(options)))
        rounds["serve"].append(told(*asyncio.run(by_serve(handle, options))))
        print(number, {name: own[-1] for name, own in rounds.items()}, file=sys.stderr, flush=True)
    medians = {
        name: {what: statistics.median(one[what] for one in own) for what in own[0]} for name, own in rounds.items()
    }
    print(json.dumps({"command": sys.argv, "rounds": rounds, "medians": medians}, indent=1))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
