"""The states in which a part is killed while requests run, how to see from outside that one is reached, and the requests."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence

from tests.cluster.test_serve import WORDS, Stream, wait_for

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import ServerProcess, check_account

N_ROUNDS = int(os.environ.get("DIPTYCH_KILL_ROUNDS", "2"))
STATES = ("queued", "prefilling", "transferring", "decoding")
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}  # of Ray
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


class Load:
    """Eight streams that begin at one time: prompts of several lengths, and answers of `max_tokens` with seeds of their own."""

    def __init__(self, server: ServerProcess, name: str, *, max_tokens: int) -> None:
        rng = random.Random(name)
        self._server, self._before = server, server.scrape()
        self.prompts = [f"{rng.random()} " + WORDS * rng.choice((1, 6, 20, 40)) for _ in range(8)]
        options = [{"seed": rng.randrange(2**32), "max_tokens": max_tokens, **SAMPLED} for _ in self.prompts]
        self._sampling = [SamplingParams(**one) for one in options]
        self.streams = [Stream(server, prompt, **one) for prompt, one in zip(self.prompts, options, strict=True)]

    @property
    def _is_over(self) -> bool:
        return not any(one.thread.is_alive() for one in self.streams)

    def wait_for(self, state: str, workers: Sequence[str]) -> None:
        """Until it is in that state at one of these workers, or over: a fast machine is not waited for in vain."""
        wait_for(lambda: any(self._is_in(state, one) for one in workers) or self._is_over, f"{workers} {state}")

    def _is_in(self, state: str, worker: str) -> bool:
        text = self._server.scrape()
        if state == "queued":
            return True
        if state == "decoding":
            return sum(one.n_events for one in self.streams) > 20
        if state == "prefilling":
            return gauge(text, "requests_reading", worker) + gauge(text, "sequences_running", worker) > 0
        name = "sent_bytes_total" if worker.startswith("prefill") else "received_bytes_total"
        return gauge(text, name, worker) > gauge(self._before, name, worker)

    def ended(self, one: LLM, timeout_s: float = 120.0) -> list[tuple[Stream, str]]:
        """Every stream with the text that one engine gives."""
        for stream in self.streams:
            stream.thread.join(timeout=timeout_s)
            assert not stream.thread.is_alive(), "a client hangs"
        wanted = one.generate(self.prompts, self._sampling)
        return [(stream, each.choices[0].text) for stream, each in zip(self.streams, wanted, strict=True)]

    def check(self, one: LLM) -> None:
        """No stream is cut short, and each has the text it would have had."""
        for stream, text in self.ended(one):
            assert stream.error is None, stream.error
            assert stream.text == text
            check_account(stream.end)


def gauge(text: str, name: str, worker: str) -> float:
    rows = re.findall(rf'^diptych_worker_{name}{{[^}}]*worker="{worker}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, rows))
