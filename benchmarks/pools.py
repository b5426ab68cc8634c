"""What workers cost and what they buy, on one machine: the same load before one engine, two workers, and two pools.

python benchmarks/pools.py MODEL [--rounds 5] [--prompt-tokens 8000] [--streams 8] [--threads 2]

Three questions, each in turns, so that a machine that changes its mind changes it for all:
  overhead   two workers of half the threads against one engine with all of them: output tokens a second of `--streams` streams
  transfer   tokens whose keys and values went from one worker to another: GB/s of export and import (with checksums), ms per
             1,000 tokens, beside one memcpy of as many bytes
  stall      the 99th percentile of the gaps of running streams while prompts of `--prompt-tokens` arrive: one engine, one
             with a stall budget, pools
Prints JSON: every round, medians, and the command. Needs ray, and a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import httpx
import numpy as np

SETUPS = {
    "one": [],
    "one_with_budget": ["--stall-budget-ms", "50"],
    "workers": ["--workers", "2"],
    "pools": ["--prefill", "1", "--decode", "1"],
}


@contextlib.contextmanager
def server(model: str, threads: int, options: Sequence[str]) -> Iterator[httpx.Client]:
    """`diptych serve` with these options; a worker gets half the threads of an engine that is alone."""
    own = max(1, threads // 2) if {"--workers", "--prefill"} & set(options) else threads
    command = [
        sys.executable,
        "-m",
        "diptych",
        "serve",
        model,
        "--port",
        "0",
        "--threads",
        str(own),
        "--max-queue-s",
        "0",
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"no server: {' '.join(command)}")
        with httpx.Client(base_url=line.split()[-1], timeout=3600) as http:
            while http.get("/ready").status_code != 200:
                time.sleep(0.1)
            yield http
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def prompt_of(http: httpx.Client, n_tokens: int, seed: int) -> list[int]:
    """Token ids, so that a prompt is as long as it says."""
    rng = random.Random(seed)
    return [rng.randrange(300, 4000) for _ in range(n_tokens)]


def stream(http: httpx.Client, prompt: list[int], max_tokens: int, times: list[float]) -> None:
    """When each token came."""
    body = {
        "model": "any",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body["model"] = http.get("/v1/models").json()["data"][0]["id"]
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())


def run_streams(http: httpx.Client, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
    """All at once, each on a thread."""
    times: list[list[float]] = [[] for _ in prompts]
    threads = [
        threading.Thread(target=stream, args=(http, prompt, max_tokens, own))
        for prompt, own in zip(prompts, times, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def tokens_per_s(http: httpx.Client, n_streams: int, seed: int) -> float:
    """Output tokens a second of streams that begin together behind short prompts."""
    begin_s = time.perf_counter()
    times = run_streams(http, [prompt_of(http, 32, seed + n) for n in range(n_streams)], 128)
    return 128 * n_streams / (max(own[-1] for own in times) - begin_s)


def gap_p99_ms(http: httpx.Client, n_streams: int, prompt_tokens: int, seed: int) -> float:
    """Of streams that run while three long prompts arrive, one after the other."""
    times: list[list[float]] = [[] for _ in range(n_streams)]
    threads = [
        threading.Thread(target=stream, args=(http, prompt_of(http, 32, seed + n), 400, own))
        for n, own in enumerate(times)
    ]
    for thread in threads:
        thread.start()
    while not all(len(own) > 5 for own in times):
        time.sleep(0.01)
    begin_s = time.perf_counter()
    for n in range(3):
        stream(http, prompt_of(http, prompt_tokens, seed + 100 + n), 1, [])
    end_s = time.perf_counter()
    for thread in threads:
        thread.join()
    gaps = [later - earlier for own in times for earlier, later in itertools.pairwise(own) if begin_s <= later <= end_s]
    return float(np.percentile(gaps, 99) * 1e3)


def transfer(http: httpx.Client, prompt_tokens: int, seed: int) -> dict[str, float]:
    """Of one long prompt that is read by one worker and answered by another."""
    names = ("received_bytes", "received_tokens", "export_seconds", "import_seconds")
    before = [total(http, name) for name in names]
    stream(http, prompt_of(http, prompt_tokens, seed), 1, [])
    n_bytes, n_tokens, export_s, import_s = (total(http, name) - old for name, old in zip(names, before, strict=True))
    source = np.random.default_rng(0).integers(0, 255, int(n_bytes), dtype=np.uint8)
    target = np.empty_like(source)
    target[:] = 0
    begin_s = time.perf_counter()
    np.copyto(target, source)
    copy_s = time.perf_counter() - begin_s
    both_s = export_s + import_s
    return {
        "bytes": n_bytes,
        "gb_per_s": n_bytes / both_s / 1e9,
        "ms_per_1k_tokens": both_s / n_tokens * 1e6,
        "memcpy_gb_per_s": n_bytes / copy_s / 1e9,
        "times_a_memcpy": both_s / copy_s,
    }


def total(http: httpx.Client, name: str) -> float:
    """A counter, over all workers."""
    rows = re.findall(rf"^diptych_worker_{name}_total{{.*}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, rows))


def main() -> None:
    """Every setup in every round, and JSON at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, dict[str, list[object]]] = {name: {} for name in SETUPS}
    for number in range(options.rounds):
        for name, arguments in SETUPS.items():
            with server(options.model, options.threads, arguments) as http:
                tokens_per_s(http, 1, 999)  # pages and caches
                seed = 1000 * number
                results: dict[str, object] = {"tokens_per_s": tokens_per_s(http, options.streams, seed)}
                results["gap_p99_ms"] = gap_p99_ms(http, options.streams, options.prompt_tokens, seed + 500)
                if name == "pools":
                    results["transfer"] = transfer(http, options.prompt_tokens, seed + 900)
            for what, value in results.items():
                found[name].setdefault(what, []).append(value)
            print(number, name, results, file=sys.stderr, flush=True)
    medians = {
        name: {what: statistics.median(values) for what, values in own.items() if what != "transfer"}
        for name, own in found.items()
    }
    print(json.dumps({"command": sys.argv, "rounds": found, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
