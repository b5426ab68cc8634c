"""What the server's telemetry costs when nobody watches: its share of the engine's time, per step and per token.

python benchmarks/telemetry_cost.py MODEL --weights int8 --concurrency 1 16 64

A closed loop runs offline with a listener that only keeps the events; the same events are then given to `Telemetry`, as the
server's engine thread would, and timed. The share is that time over the wall time of the loop, the median of five replays.
"""

from __future__ import annotations

import argparse
import random
from statistics import median

from diptych.engine.llm import LLM
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.events import Event, StepEndEvent
from diptych.lab.http_cost import offline_tokens_per_s
from diptych.metrics import EventBook
from diptych.server.watch.telemetry import Telemetry
from diptych.server.watch.timelines import Timelines

CLOCK = MonotonicClock()
NEW_TOKENS, PROMPT_TOKENS, VOCAB = 64, 128, 4000


def replay_s(batches: list[list[Event]]) -> float:
    """Seconds to fold the events into the engine's book and count them, with the timelines that a server keeps."""
    book = EventBook()
    telemetry = Telemetry(book)
    Timelines(telemetry, kept=256)
    begin_s = CLOCK.now_s()
    for batch in batches:
        book.fold(batch)
        telemetry.on_events(batch)
    return CLOCK.now_s() - begin_s


def measure(llm: LLM, concurrency: int, noise: random.Random) -> str:
    """One closed loop and five replays, as a line of text."""
    n_requests = max(8, 3 * concurrency)
    prompts = [[noise.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(n_requests)]
    batches: list[list[Event]] = []
    stop = llm.engine.listen(batches.append)
    begin_s = CLOCK.now_s()
    rate = offline_tokens_per_s(llm, prompts, new_tokens=NEW_TOKENS, concurrency=concurrency)
    wall_s = CLOCK.now_s() - begin_s
    stop()
    cost_s = median(replay_s(batches) for _ in range(5))
    n_steps = sum(isinstance(event, StepEndEvent) for batch in batches for event in batch)
    return (
        f"concurrency {concurrency}: {rate:.0f} output tokens/s, {wall_s / n_steps * 1e3:.2f} ms per step, telemetry "
        f"{cost_s / n_steps * 1e6:.1f} us per step, {cost_s / (n_requests * NEW_TOKENS) * 1e6:.2f} us per token, "
        f"{cost_s / wall_s:.2%} of the time"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    given = parser.parse_args()
    config = EngineConfig(compute=ComputeConfig(weights=given.weights), max_context_tokens=512)
    llm = LLM.from_pretrained(given.model, config)
    noise = random.Random(0)
    measure(llm, 4, noise)  # the first steps of a process are slow
    for concurrency in given.concurrency:
        print(measure(llm, concurrency, noise), flush=True)


if __name__ == "__main__":
    main()
