"""What it costs a step that the server remembers its last minutes (`server/watch/recent.py`), beside a server that does not.

python benchmarks/recent_cost.py --concurrency 1 16 64

A closed loop runs offline with the memory on; the steps and requests it was told of are then told to a fresh one, and timed:
the median of nine replays. The same once more with the bound on chunks reached, so that every step lets an old one go.
"""

from __future__ import annotations

import argparse
import random
from statistics import median

from diptych.engine.engine import OpenRequest
from diptych.engine.llm import LLM
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import EngineConfig
from diptych.lab.http_cost import offline_tokens_per_s
from diptych.metrics import StepRecord
from diptych.server.watch import recent
from diptych.server.watch.recent import Recent

CLOCK = MonotonicClock()
NEW_TOKENS, PROMPT_TOKENS, VOCAB = 64, 128, 4000


def replay_s(llm: LLM, steps: list[StepRecord], taken: list[OpenRequest], *, most_chunks: int) -> float:
    """Seconds to remember a run."""
    engine = llm.engine
    kept = Recent(engine, keep_s=120.0, machine=None)
    tell_step, tell_request, tell_end = engine.book.on_step.pop(), engine.on_submit.pop(), engine.on_end.pop()
    recent.MAX_CHUNKS = most_chunks
    begin_s = CLOCK.now_s()
    for step in steps:
        tell_step(step)
    for one in taken:
        tell_request(one)
        tell_end(one)
    spent_s = CLOCK.now_s() - begin_s
    assert kept.minutes().steps
    return spent_s


def measure(llm: LLM, concurrency: int, noise: random.Random) -> str:
    """One closed loop and its replays, as a line of text."""
    n_requests = max(8, 3 * concurrency)
    prompts = [[noise.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(n_requests)]
    steps: list[StepRecord] = []
    taken: list[OpenRequest] = []
    llm.engine.book.on_step.append(steps.append)
    llm.engine.on_submit.append(taken.append)
    begin_s = CLOCK.now_s()
    offline_tokens_per_s(llm, prompts, new_tokens=NEW_TOKENS, concurrency=concurrency)
    wall_s = CLOCK.now_s() - begin_s
    llm.engine.book.on_step.remove(steps.append)
    llm.engine.on_submit.remove(taken.append)
    free_s = median(replay_s(llm, steps, taken, most_chunks=1 << 40) for _ in range(9))
    full_s = median(replay_s(llm, steps, taken, most_chunks=8 * concurrency) for _ in range(9))
    n_steps = len(steps)
    return (
        f"concurrency {concurrency}: {wall_s / n_steps * 1e3:.2f} ms per step, remembering {free_s / n_steps * 1e6:.2f} us, "
        f"with the memory full {full_s / n_steps * 1e6:.2f} us, {full_s / wall_s:.3%} of the time"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    given = parser.parse_args()
    llm = LLM.from_pretrained(given.model, EngineConfig(max_context_tokens=512))
    noise = random.Random(0)
    measure(llm, 4, noise)  # the first steps of a process are slow
    for concurrency in given.concurrency:
        print(measure(llm, concurrency, noise), flush=True)


if __name__ == "__main__":
    main()
