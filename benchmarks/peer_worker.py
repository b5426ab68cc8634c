"""What every peer's worker shares: the protocol, one JSON request per line on standard input, one JSON answer per line on
standard output, and the clock.

    {"op": "convert", "checkpoint": DIR, "weights": "q4_k_m"}          -> {"path"}, of a file that others read too
    {"op": "load", "checkpoint": DIR, "weights": "int8", "threads": 2} -> {"engine", "version", "details", "ways": [names]}
    {"op": "logits", "prompt": [ids], "probe": [ids]}                  -> {"logits": [one per probed id, up to one constant]}
    {"op": "warm", "prompts": [[ids], ...], "ways": [names]}           -> {}
    {"op": "run", "prompts": [[ids], ...], "new_tokens": N, "way": name}      -> {"prefill_s", "decode_s", "decode_tokens"}
    {"op": "mix", "prompts": [[ids], ...], "new_tokens": [N...], "way": name} -> {"wall_s", "output_tokens"}

A way is one of an engine's settings; peers.py tries them all and measures those that were fastest.

An error is answered as {"error": text}. Workers run in environments of their own and import nothing of Diptych.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

WAKING_TOKENS = 16  # of each prompt
WARM_TOKENS = 4  # written


class PeerWorker(ABC):
    """One engine: subclasses load it and step it; the clock is here, the same for all."""

    ways: tuple[str, ...] = ("default",)

    def convert(self, checkpoint: str, weights: str) -> dict[str, Any]:
        """The checkpoint in this engine's own format, once."""
        raise RuntimeError(f"nobody else reads what this engine makes of {checkpoint} in {weights}")

    @abstractmethod
    def load(self, checkpoint: str, weights: str, threads: int) -> dict[str, Any]:
        """Convert the checkpoint where needed (once), and load it."""

    @abstractmethod
    def logits(self, prompt: list[int], probe: list[int]) -> dict[str, Any]:
        """Logits after a prompt, of some ids."""

    def prepare(self, way: str, prompts: list[list[int]], lengths: list[int]) -> None:  # noqa: B027, most need nothing
        """Untimed: whatever a setting and a shape of work need."""

    @abstractmethod
    def begin(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """Hand the requests in: greedy, no end of sequence, lengths[i] tokens for prompts[i]."""

    @abstractmethod
    def step(self) -> Iterable[int]:
        """One step of the engine: the number of the request of every token that was written."""

    def warm(self, prompts: list[list[int]], ways: list[str]) -> dict[str, Any]:
        """Untimed: what is compiled, and memory that is touched, for a shape of work."""
        lengths = [WARM_TOKENS] * len(prompts)
        for way in ways:
            self.prepare(way, prompts, lengths)
            self._write(prompts, lengths)
        return {}

    def run(self, prompts: list[list[int]], new_tokens: int, way: str) -> dict[str, Any]:
        """Prompts to their first token, then all together, after a few tokens that wake the engine."""
        lengths = [new_tokens] * len(prompts)
        self.prepare(way, prompts, lengths)
        self._write([prompt[:WAKING_TOKENS] for prompt in prompts], [2] * len(prompts))
        first_s, total_s, at_first = self._write(prompts, lengths)
        return {"prefill_s": first_s, "decode_s": total_s - first_s, "decode_tokens": sum(lengths) - at_first}

    def mix(self, prompts: list[list[int]], new_tokens: list[int], way: str) -> dict[str, Any]:
        """All requests at once, each with its own length."""
        self.prepare(way, prompts, new_tokens)
        return {"wall_s": self._write(prompts, new_tokens)[1], "output_tokens": sum(new_tokens)}

    def _write(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, float, int]:
        """(seconds until every prompt has its first token, seconds in all, tokens written until then)."""
        counts, at_first, first_s = [0] * len(prompts), 0, 0.0
        begin_s = time.perf_counter()
        self.begin(prompts, lengths)
        while sum(counts) < sum(lengths):
            for number in self.step():
                counts[number] += 1
            if not at_first and all(counts):
                first_s, at_first = time.perf_counter() - begin_s, sum(counts)
        total_s = time.perf_counter() - begin_s
        if counts != lengths:
            raise RuntimeError(f"{counts} tokens came; {lengths} were asked for")
        return first_s, total_s, at_first


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made by `make` under another name first: no half-written one is ever found."""
    if not directory.exists():
        unfinished = directory.with_name(directory.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(directory)
    return directory


def python(*arguments: object) -> None:
    """This environment's Python in a process of its own (a converter's memory goes with it). RuntimeError when it fails."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"the conversion failed: {(done.stderr.strip() or 'without a word').splitlines()[-1]}")


def serve(worker: PeerWorker) -> None:
    """Answer until standard input ends. What the engine itself prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    verbs = {
        "convert": worker.convert, "load": worker.load, "logits": worker.logits, "warm": worker.warm, "run": worker.run,
        "mix": worker.mix,
    }  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request.pop("op")](**request)
        except (RuntimeError, ValueError, KeyError, OSError, TypeError, AttributeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
