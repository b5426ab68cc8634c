"""Rank 0 of an engine on ranks, in a state that it stays in until it is killed or another rank is, for test_ranks.

Arguments: loading | prefilling | decoding | idle; how many ranks; where the others join, if they are started elsewhere. It says
the state when it is in it, and ends with status 1 and an error when a rank is gone.
"""

from __future__ import annotations

import os
import sys

from diptych.engine.llm import LLM
from diptych.ground.clock import sleep_s
from diptych.ground.errors import EngineError
from diptych.ground.request import SamplingParams

ENDLESS = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)


class Told:
    """Says the state once."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.is_told = False

    def __call__(self, *_: object) -> None:
        if not self.is_told:
            self.is_told = True
            print(self.state, flush=True)


def hold_loading(told: Told) -> None:
    """Each piece of the checkpoint takes long, so that a rank can be killed between two."""
    told()
    sleep_s(0.2)


def leave(error: EngineError) -> None:
    """An engine that waits is told without a step."""
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


def main(state: str, ranks: int, address: str | None = None) -> None:
    """Into the state, and on in it."""
    told = Told(state)
    llm = LLM(
        "bundled",
        tp=ranks,
        tp_address=address,
        threads=1 if address else ranks,
        max_context_tokens=2048,
        enable_prefix_cache=False,
        progress=lambda done, total: hold_loading(told) if state == "loading" else None,
    )
    if state == "idle":
        llm.loaded.model.on_loss(leave)
        told()
        while True:
            sleep_s(60)
    prompt = list(range(300, 2300)) if state == "prefilling" else "Once upon a time"
    while True:
        if state == "prefilling":
            told()
        llm.generate([prompt], ENDLESS if state == "decoding" else SamplingParams(max_tokens=1), on_delta=told)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
