"""What workers cost and what they buy, on one machine: the same load before one engine, two workers, and two pools.

python benchmarks/pools.py [MODEL] [--rounds 5] [--prompt-tokens 8000] [--streams 8] [--threads 2] [--prompts 1]
                           [--questions overhead transfer stall] [--setups one one_with_budget workers pools]

MODEL: a path, or a shape with random weights: `bundled` (the bundled model's, at any length), a llama or qwen2 of
benchmarks/random_checkpoint.py, or `thin:llama-3.2-1b`: the bundled model's with that one's keys and values, so that as many
bytes travel as there, and prompts are read soon. Three questions, each setup in turn in every round:
  overhead   two workers of half the threads against one engine with all of them: output tokens a second of `--streams`
             streams, and prompt tokens a second of two prompts that come together
  transfer   keys and values of prompts that went from one worker to another: GB/s and ms per 1,000 tokens, and how often it
             takes as long as one memcpy: numpy's, of as many bytes, by one thread, between memory that both was touched,
             measured behind every prompt and, as hand-offs are, beside one. The two ends (export: gather, checksums, sending;
             import: checking and scatter) work at one time, on cores of their own, so a stream of parcels is as fast as the
             slower (`times_a_memcpy`); `both_times_a_memcpy` is the processor time of both. A byte is read and written once
             at each end
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
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from random_checkpoint import write_checkpoint, write_tokenizer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diptych.engine.load import bundled_dir
from diptych.models.named import SHAPES

SETUPS = {
    "one": [],
    "one_with_budget": ["--stall-budget-ms", "50"],
    "workers": ["--workers", "2"],
    "pools": ["--prefill", "1", "--decode", "1"],
}
QUESTIONS = ("overhead", "transfer", "stall")
START_S = 300.0
# of each engine: of a larger pool the system has not provided all when prompts come, and a new page takes longer than a copy
KV_BYTES = 2**30
WORDS_OF_MODEL = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def checkpoint(model: str, context_tokens: int, directory: Path) -> Path:
    """Where the model lies; a shape is written there with random weights, and with as many positions as are needed."""
    is_thin, model = model.startswith("thin:"), model.removeprefix("thin:")
    if model != "bundled" and model not in SHAPES:
        return Path(model)
    is_bundled = is_thin or model == "bundled"
    config = json.loads((bundled_dir() / "config.json").read_text()) if is_bundled else dict(SHAPES[model])
    if is_thin:
        thick = SHAPES[model]
        n_heads = thick["num_key_value_heads"]
        head_dim = thick.get("head_dim") or thick["hidden_size"] // thick["num_attention_heads"]
        config |= {"num_key_value_heads": n_heads, "num_attention_heads": n_heads, "head_dim": head_dim}
        config["num_hidden_layers"] = thick["num_hidden_layers"]
    config["max_position_embeddings"] = max(context_tokens, config["max_position_embeddings"])
    write_checkpoint(config, directory)
    if not is_bundled:
        write_tokenizer(config["vocab_size"], directory)
    for name in WORDS_OF_MODEL if is_bundled else ():
        shutil.copy(bundled_dir() / name, directory / name)
    return directory


@contextlib.contextmanager
def server(model: Path, threads: int, context_tokens: int, options: Sequence[str]) -> Iterator[Client]:
    """`diptych serve` with these options; a worker gets half the threads of an engine that is alone."""
    own = max(1, threads // 2) if {"--workers", "--prefill"} & set(options) else threads
    settings = ["--port", "0", "--threads", str(own), "--max-queue-s", "0", "--max-context-tokens", str(context_tokens)]
    settings += ["--kv-memory-bytes", str(KV_BYTES)]
    command = [sys.executable, "-m", "diptych", "serve", str(model), *settings, "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"no server: {' '.join(command)}")
        with httpx.Client(base_url=line.split()[-1], timeout=600) as http:
            begin_s = time.perf_counter()
            while http.get("/ready").status_code != 200:
                if process.poll() is not None or time.perf_counter() - begin_s > START_S:
                    raise SystemExit(f"the server is not ready: {' '.join(command)}")
                time.sleep(0.1)
            yield Client(http)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Client:
    """Streams before one server. Prompts are ids, so that they are as long as they say, and never come twice."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._model = http.get("/v1/models").json()["data"][0]["id"]
        self._rng = random.Random(0)

    def stream(self, prompt_tokens: int, max_tokens: int, times: list[float], stop: threading.Event) -> None:
        """Adds to `times` when each token came; ends early where told to."""
        prompt = [self._rng.randrange(300, 4000) for _ in range(prompt_tokens)]
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = {"model": self._model, "prompt": prompt, **options}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"the server refused: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if '"error"' in line:
                        raise SystemExit(f"a stream failed: {line}")
                    times.append(time.perf_counter())
                if stop.is_set():
                    return

    def together(self, n: int, prompt_tokens: int, max_tokens: int) -> float:
        """Seconds from the first request to the last token of n streams that begin at one time."""
        never, times = threading.Event(), [list[float]() for _ in range(n)]
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(n) as pool:
            for one in [pool.submit(self.stream, prompt_tokens, max_tokens, own, never) for own in times]:
                one.result()
        return max(own[-1] for own in times) - begin_s

    def gap_p99_ms(self, n_streams: int, n_prompts: int, prompt_tokens: int, output_tokens: int) -> float:
        """Of streams that run as long as prompts arrive, one after the other."""
        stop, times = threading.Event(), [list[float]() for _ in range(n_streams)]
        with ThreadPoolExecutor(n_streams) as pool:
            running = [pool.submit(self.stream, 32, output_tokens, own, stop) for own in times]
            try:
                while not all(len(own) > 5 for own in times):
                    check(running)
                    time.sleep(0.01)
                begin_s = time.perf_counter()
                for _ in range(n_prompts):
                    self.stream(prompt_tokens, 1, [], stop)
                end_s = time.perf_counter()
                if any(one.done() for one in running):
                    print("a stream ended before the prompts were read: its gaps are too few", file=sys.stderr)
            finally:
                stop.set()
            check(running)
        # a stream that stands still until the end has its gap all the same
        runs = [[*(at_s for at_s in own if at_s < end_s), end_s] for own in times]
        gaps = [later - earlier for own in runs for earlier, later in itertools.pairwise(own) if later >= begin_s]
        return float(np.percentile(gaps, 99) * 1e3)

    def transfers(self, n: int, prompt_tokens: int) -> dict[str, float]:
        """Medians over n prompts, in turns with a memcpy, after one that is not counted."""
        self.transfer(prompt_tokens)
        found = [self.transfer(prompt_tokens) for _ in range(n)]
        return {what: statistics.median(one[what] for one in found) for what in found[0]}

    def transfer(self, prompt_tokens: int) -> dict[str, float]:
        """Of one long prompt that is read by one worker and answered by another."""
        names = ("received_bytes", "received_tokens", "export_seconds", "import_seconds")
        before = [self._total(name) for name in names]
        self.stream(prompt_tokens, 1, [], threading.Event())
        while self._total("received_tokens") == before[1]:
            time.sleep(0.1)  # the worker tells its numbers after the step
        n_bytes, n_tokens, export_s, import_s = (
            self._total(name) - old for name, old in zip(names, before, strict=True)
        )
        both_s, slower_s, copy_s = export_s + import_s, max(export_s, import_s), memcpy_s(int(n_bytes))
        beside_s = self._memcpy_beside_s(int(n_bytes), prompt_tokens)
        return {
            "bytes": n_bytes,
            "gb_per_s": n_bytes / slower_s / 1e9,
            "ms_per_1k_tokens": both_s / n_tokens * 1e6,
            "export_ms_per_1k_tokens": export_s / n_tokens * 1e6,
            "import_ms_per_1k_tokens": import_s / n_tokens * 1e6,
            "memcpy_gb_per_s": n_bytes / copy_s / 1e9,
            "memcpy_beside_gb_per_s": n_bytes / beside_s / 1e9,
            "times_a_memcpy": slower_s / copy_s,
            "times_a_memcpy_beside": slower_s / beside_s,
            "both_times_a_memcpy": both_s / copy_s,
            "export_times_a_memcpy": export_s / copy_s,
            "import_times_a_memcpy": import_s / copy_s,
        }

    def _memcpy_beside_s(self, n_bytes: int, prompt_tokens: int) -> float:
        """A memcpy while a prompt is read, as hand-offs are: who computes beside it takes its share of the memory."""
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self.stream, prompt_tokens, 1, [], threading.Event())
            copy_s = memcpy_s(n_bytes)
            if reading.done():
                print("the prompt was read before the memcpy ended", file=sys.stderr)
            reading.result()
        return copy_s

    def _total(self, name: str) -> float:
        """A counter, over all workers."""
        text = self._http.get("/metrics").text
        return sum(map(float, re.findall(rf"^diptych_worker_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)))


def check(running: Sequence[Future[None]]) -> None:
    """Raise what a stream failed of: nobody waits for one that is dead."""
    for one in running:
        if one.done() and one.exception() is not None:
            one.result()


def memcpy_s(n_bytes: int) -> float:
    """The median of five copies between memory that both were touched."""
    source = np.random.default_rng(0).integers(0, 255, n_bytes, dtype=np.uint8)
    target, found = np.zeros_like(source), []
    for _ in range(5):
        begin_s = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def measured(client: Client, name: str, options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, float]:
    """What is asked of one setup in one round."""
    tell("warming up")
    client.together(options.streams, 256, 8)
    results: dict[str, float] = {}
    if "overhead" in options.questions:
        tell("streams together")
        seconds = client.together(options.streams, 32, 128)
        results["output_tokens_per_s"] = 128 * options.streams / seconds
        tell("prompts together")
        results["prompt_tokens_per_s"] = 2 * 1024 / client.together(2, 1024, 1)
    if "stall" in options.questions:
        tell("streams beside long prompts")
        results["gap_p99_ms"] = client.gap_p99_ms(
            options.streams, options.prompts, options.prompt_tokens, options.prompt_tokens
        )
    if "transfer" in options.questions and name == "pools":
        tell("transfer")
        results |= client.transfers(5, options.prompt_tokens)
    return results


def main() -> None:
    """Every setup in every round, and JSON at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--prompts", type=int, default=1, help="long ones that arrive beside the streams")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--setups", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server ends with it
    context_tokens = max(options.prompt_tokens, 1024) + 64
    found: dict[str, dict[str, list[float]]] = {name: {} for name in options.setups}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
    with tempfile.TemporaryDirectory() as directory, bar:
        task = bar.add_task("", total=options.rounds * len(options.setups))
        model = checkpoint(options.model, context_tokens, Path(directory))
        for number in range(options.rounds):
            for name in options.setups:

                def tell(what: str, head: str = f"round {number + 1} {name}") -> None:
                    bar.update(task, description=f"{head}: {what}")

                tell("starting")
                with server(model, options.threads, context_tokens, SETUPS[name]) as client:
                    results = measured(client, name, options, tell)
                for what, value in results.items():
                    found[name].setdefault(what, []).append(value)
                bar.console.print(number, name, {what: round(value, 3) for what, value in results.items()})
                bar.advance(task)
    medians = {
        name: {what: statistics.median(values) for what, values in own.items()} for name, own in found.items() if own
    }
    print(json.dumps({"command": sys.argv, "rounds": found, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
