"""The states in which a part is killed while requests run, and how to see from outside that one is reached."""

from __future__ import annotations

import os
import re

from tests.cluster.test_serve import Stream

from server_process import ServerProcess

N_ROUNDS = int(os.environ.get("DIPTYCH_KILL_ROUNDS", "2"))
STATES = ("queued", "prefilling", "transferring", "decoding")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


def gauge(text: str, name: str, worker: str) -> float:
    rows = re.findall(rf'^diptych_worker_{name}{{[^}}]*worker="{worker}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, rows))


def is_in(server: ServerProcess, worker: str, state: str, streams: list[Stream], before: str) -> bool:
    """Whether the load is in that state at that worker now; before: the metrics when it began."""
    text = server.scrape()
    if state == "queued":
        return True
    if state == "decoding":
        return sum(one.n_events for one in streams) > 20
    if state == "prefilling":
        return gauge(text, "requests_reading", worker) + gauge(text, "sequences_running", worker) > 0
    name = "sent_bytes_total" if worker.startswith("prefill") else "received_bytes_total"
    return gauge(text, name, worker) > gauge(before, name, worker)
