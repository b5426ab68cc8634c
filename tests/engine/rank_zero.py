"""A process that decodes on ranks until it is killed, for test_ranks. Argument: how many; it says when it has begun."""

from __future__ import annotations

import sys

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams

if __name__ == "__main__":
    ranks = int(sys.argv[1])
    llm = LLM("bundled", tp=ranks, threads=ranks, max_context_tokens=2048)
    endless = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
    told: list[bool] = []

    def tell(number: int, delta: object) -> None:
        if not told:
            told.append(True)
            print("decoding", flush=True)

    while True:
        llm.generate("Once upon a time", endless, on_delta=tell)
