"""Services under a fixed number of streams, as most published numbers are taken: who was answered sends again at once.

Such a loop has no clock of its own: what comes next follows the end of a step. So what the scheduler decides does not
depend on how long steps take, and one run of the real scheduler (`schedule_of`) serves every model, device and constant:
`Schedule.times` prices its steps. `tests/sim/test_closed.py` holds that to a simulation with the same prices.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from diptych.ground.config import BlockConfig, SchedulerConfig, at_least
from diptych.ground.errors import ConfigError
from diptych.ground.events import Event, FinishEvent
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.metrics import RequestRecord, StepRecord
from diptych.sim.engine import SimulatedEngine
from diptych.sim.load import request_of
from diptych.workload import LengthRange, WorkloadItem

# steps alike are priced together: by how many sequences decode, and by how far the sums stand apart, as a share
_ALIKE = 0.08
BLOCK_TOKENS = 64
MOST_REQUESTS = 96  # of a schedule whose times are kept: medians need no more

Instant = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`streams` clients that send `n_requests` in all, standing for a run of `of_each` requests per stream.

    kv_tokens: of the pool; None: so large that nobody waits for it.
    """

    streams: int
    input: LengthRange
    output: LengthRange
    n_requests: int
    of_each: int = 10
    max_step_tokens: int = 8192
    kv_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        at_least("streams", self.streams, 1)
        at_least("requests", self.n_requests, 1)


@dataclass(frozen=True, slots=True)
class Times:
    """What clients of a closed loop saw: means over requests, and tokens per second of the whole run."""

    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the scheduler decided: kinds of steps with one shape each, runs of (kind, steps), and where requests begin and end.

    requests: (instant it came, of its first token, of its last one, its output tokens, its weight), an instant being the run
    and the steps of that run that were over. output_tokens: of all requests.
    """

    kinds: tuple[StepShape, ...]
    runs: tuple[tuple[int, int], ...]
    requests: tuple[tuple[Instant, Instant, Instant, int, float], ...]
    output_tokens: int

    def times(self, predict_s: Callable[[StepShape], float]) -> Times:
        """Give every step its price."""
        prices = [predict_s(shape) for shape in self.kinds]
        step_s = [prices[kind] for kind, _ in self.runs]
        begin_s = [0.0, *accumulate(prices[kind] * count for kind, count in self.runs)]
        step_s.append(0.0)

        def at(instant: Instant) -> float:
            return begin_s[instant[0]] + instant[1] * step_s[instant[0]]

        ttft_s = tpot_s = ttft_weight = tpot_weight = 0.0
        for came, first, last, tokens, weight in self.requests:
            first_s = at(first)
            ttft_s += weight * (first_s - at(came))
            ttft_weight += weight
            if tokens > 1:
                tpot_s += weight * (at(last) - first_s) / (tokens - 1)
                tpot_weight += weight
        return Times(ttft_s / ttft_weight, tpot_s / (tpot_weight or 1.0), self.output_tokens / begin_s[-1])


@lru_cache(maxsize=1024)
def schedule_of(loop: ClosedLoop) -> Schedule:
    """Run the engine's scheduler through a closed loop, every step as long as any other. ConfigError where none fits."""
    longest = loop.input.high + loop.output.high
    kv_tokens = loop.kv_tokens or loop.streams * (longest + BLOCK_TOKENS)
    if kv_tokens < longest:
        raise ConfigError(f"the KV pool is {kv_tokens} tokens; one request takes {longest}")
    config = SchedulerConfig(
        max_step_tokens=loop.max_step_tokens,
        max_running_sequences=loop.streams,
        max_waiting_tokens=(loop.streams + 1) * longest,
        max_context_tokens=longest,
        enable_prefix_cache=False,
    )
    run = _Run(loop, config, BlockConfig(n_blocks=-(-kv_tokens // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS))
    run.serve()
    kinds, numbers = _kinds(run.steps)
    runs: list[tuple[int, int]] = []
    for kind in numbers:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    begins = [0, *accumulate(count for _, count in runs)]

    def instant(at_s: float) -> Instant:
        step = round(at_s)
        run = bisect_right(begins, step) - 1
        return run, step - begins[run]

    requests = []
    for wave, weight in _waves(run.records, loop):
        kept = wave[:: max(1, len(wave) // MOST_REQUESTS)]
        for one in kept:
            times = one.token_times_s()
            ends = instant(one.arrival_s), instant(times[0]), instant(times[-1])
            requests.append((*ends, len(times), weight / len(kept)))
    return Schedule(tuple(kinds), tuple(runs), tuple(requests), sum(one.output_tokens for one in run.records))


def _waves(records: Sequence[RequestRecord], loop: ClosedLoop) -> list[tuple[Sequence[RequestRecord], float]]:
    """Who came first, in between and last, with the shares that they have of a run of `of_each` requests per stream.

    All streams begin at once, so the first wait longest; behind the last nobody comes.
    """
    ordered = sorted(records, key=lambda one: one.arrival_s)
    streams = loop.streams
    if len(ordered) < 3 * streams:
        share = min(1.0, 1.0 / loop.of_each)
        waves = [(ordered[:streams], share), (ordered[streams:], 1.0 - share)]
    else:
        share = min(1.0 / 3.0, 1.0 / loop.of_each)
        waves = [
            (ordered[:streams], share), (ordered[streams:-streams], 1.0 - 2.0 * share), (ordered[-streams:], share)
        ]  # fmt: skip
    return [(wave, weight) for wave, weight in waves if wave]


def _one_second(shape: StepShape) -> float:
    return 1.0


class _Run:
    """One engine and its clients. Every step's gist and every request's record are kept."""

    def __init__(self, loop: ClosedLoop, config: SchedulerConfig, blocks: BlockConfig) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.records: list[RequestRecord] = []
        self._loop = loop
        self._random = random.Random(f"closed loop {loop.seed}")
        self._n_sent = 0
        self._engine = SimulatedEngine(
            config, blocks, predict_s=_one_second, on_events=self._on_events, on_step=self._on_step
        )

    def serve(self) -> None:
        """All requests, to the end."""
        self._send(self._loop.streams)
        n_over = 0
        while self._engine.stepper.step():
            self._send(len(self.records) - n_over)
            n_over = len(self.records)

    def _send(self, n_requests: int) -> None:
        loop = self._loop
        for _ in range(min(n_requests, loop.n_requests - self._n_sent)):
            item = WorkloadItem(
                index=self._n_sent,
                at_s=self._engine.clock.now_s(),
                prompt_tokens=loop.input.draw(self._random),
                output_tokens=loop.output.draw(self._random),
            )
            self._n_sent += 1
            self._engine.stepper.submit(request_of(item, item.at_s))

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is FinishEvent:
                record = self._engine.book.take(event.request_id)
                assert record is not None
                self.records.append(record)

    def _on_step(self, step: StepRecord) -> None:
        self.steps.append(_gist(step.shape))


def _gist(shape: StepShape) -> tuple[int, ...]:
    """The sums of a step that its price depends on: decoding sequences and their context; prompts, their ends, new
    tokens, tokens before, sampled rows.
    """
    decode = shape.decode_tokens
    return (
        decode,
        shape.n_sequences - decode,
        shape.n_logits_rows - decode,
        shape.prefill_tokens,
        shape.prefill_start_tokens,
        shape.decode_context_tokens,
    )


def _kinds(steps: Sequence[tuple[int, ...]]) -> tuple[list[StepShape], list[int]]:
    """Steps that are nearly alike become one kind with their mean; and the kind of every step."""
    members: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    keys = [_key(step) for step in steps]
    for key, step in zip(keys, steps, strict=True):
        members.setdefault(key, []).append(step)
    place = {key: number for number, key in enumerate(members)}
    return [_mean_shape(alike) for alike in members.values()], [place[key] for key in keys]


def _key(step: tuple[int, ...]) -> tuple[int, ...]:
    decode, prompts, ends, new, before, context = step
    return (_bin(decode), prompts, ends, _bin(new), _bin(before // 1024), _bin(context) // 3)


def _bin(value: int) -> int:
    """Small numbers as they are, large ones in steps of _ALIKE."""
    return value if value < 8 else 8 + int(math.log(value / 8.0) / _ALIKE)


def _mean_shape(alike: Sequence[tuple[int, ...]]) -> StepShape:
    n = len(alike)
    decode, prompts, ends, new, before, context = (round(sum(column) / n) for column in zip(*alike, strict=True))
    chunks = []
    if decode:
        chunks.append(ChunkShape(Phase.DECODE, 1, max(context // decode - 1, 0), True, decode))
    for samples, count in ((True, min(ends, prompts)), (False, prompts - min(ends, prompts))):
        if count:
            share = max(new // prompts, 1)
            chunks.append(ChunkShape(Phase.PREFILL, share, before // prompts, samples, count))
    return StepShape(chunks)
