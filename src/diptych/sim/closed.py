"""Services under a fixed number of streams, as most published numbers are taken: who was answered sends again at once.

Such a loop has no clock of its own: what comes next follows the end of a step. So what the scheduler decides does not
depend on how long steps take, and one run of the real scheduler (`schedule_of`) serves every model, device and constant:
`Schedule.times` prices its steps. `tests/sim/test_closed.py` holds that to a simulation with the same prices.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from diptych.cost.fitting.recipes import USUAL, Scheduling
from diptych.ground.config import BlockConfig, SchedulerConfig, at_least
from diptych.ground.errors import ConfigError
from diptych.ground.events import Event, FinishEvent, TokenEvent
from diptych.ground.phase import Phase
from diptych.ground.request import Request
from diptych.ground.shape import ChunkShape, StepShape
from diptych.metrics import StepRecord
from diptych.sim.engine import SimulatedEngine
from diptych.sim.executor import DRAWN_TOKEN
from diptych.sim.load import request_of
from diptych.workload import LengthRange, WorkloadItem

# steps alike are priced together: by how many sequences decode, and by how far the sums stand apart, as a share
_ALIKE = 0.08
BLOCK_TOKENS = 64
LONGEST_RUN = 128  # of decode steps that are taken at once: their contexts differ by so many tokens


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
    scheduling: Scheduling = USUAL
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
    """What the scheduler decided: kinds of steps with one shape each, and how many of each kind stand in the mean request's
    TTFT, in its TPOT, and in the whole run, which wrote output_tokens.
    """

    kinds: tuple[StepShape, ...]
    in_ttft: tuple[float, ...]
    in_tpot: tuple[float, ...]
    in_all: tuple[int, ...]
    output_tokens: int

    def times(self, predict_s: Callable[[StepShape], float], *, request_s: float = 0.0) -> Times:
        """Give every step its price. request_s: from a client to the scheduler, as `cost.calibration` has it."""
        prices = [predict_s(shape) for shape in self.kinds]
        return Times(
            request_s + sum(map(mul, prices, self.in_ttft)),
            sum(map(mul, prices, self.in_tpot)),
            self.output_tokens / sum(map(mul, prices, self.in_all)),
        )


@lru_cache(maxsize=1024)
def schedule_of(loop: ClosedLoop) -> Schedule:
    """Run the engine's scheduler through a closed loop, every step as long as any other. ConfigError where none fits."""
    longest = loop.input.high + loop.output.high
    kv_tokens = loop.kv_tokens or loop.streams * (longest + BLOCK_TOKENS)
    if kv_tokens < longest:
        raise ConfigError(f"the KV pool is {kv_tokens} tokens; one request takes {longest}")
    scheduling = loop.scheduling
    config = SchedulerConfig(
        max_step_tokens=scheduling.step_tokens,
        max_running_sequences=min(loop.streams, scheduling.max_running or loop.streams),
        prefills_alone=scheduling.prefills_alone,
        max_waiting_tokens=(loop.streams + 1) * longest,
        max_context_tokens=longest,
        enable_prefix_cache=False,
    )
    run = _Run(loop, config, BlockConfig(n_blocks=-(-kv_tokens // BLOCK_TOKENS), block_tokens=BLOCK_TOKENS))
    run.serve()
    kinds, numbers = _kinds(run.steps)
    n_steps = sum(count for _, count in run.steps)
    # weight of the requests that do, by changes at each step
    reading, writing = [0.0] * (n_steps + 1), [0.0] * (n_steps + 1)
    for wave, weight in _waves(run.served, loop):
        writers = sum(one.output_tokens > 1 for one in wave)
        for one in wave:
            reading[one.came] += weight / len(wave)
            reading[one.first] -= weight / len(wave)
            if one.output_tokens > 1:
                share = weight / writers / (one.output_tokens - 1)
                writing[one.first] += share
                writing[one.last] -= share
    reads, writes = list(accumulate(accumulate(reading))), list(accumulate(accumulate(writing)))
    in_ttft, in_tpot, in_all, step = [0.0] * len(kinds), [0.0] * len(kinds), [0] * len(kinds), 0
    for kind, (_, count) in zip(numbers, run.steps, strict=True):
        last = step + count - 1
        in_ttft[kind] += reads[last] - (reads[step - 1] if step else 0.0)
        in_tpot[kind] += writes[last] - (writes[step - 1] if step else 0.0)
        in_all[kind] += count
        step += count
    written = sum(one.output_tokens for one in run.served)
    return Schedule(tuple(kinds), tuple(in_ttft), tuple(in_tpot), tuple(in_all), written)


def _waves(served: Sequence[_Served], loop: ClosedLoop) -> list[tuple[Sequence[_Served], float]]:
    """Who came first, in between and last, with the shares that they have of a run of `of_each` requests per stream.

    All streams begin at once, so the first wait longest; behind the last nobody comes.
    """
    ordered = sorted(served, key=lambda one: one.came)
    streams = loop.streams
    if len(ordered) <= streams:  # there is no other wave
        return [(ordered, 1.0)]
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


@dataclass(slots=True)
class _Served:
    """Steps that were over when a request came, had its first token, and its last."""

    came: int
    output_tokens: int
    first: int = 0
    last: int = 0


class _Run:
    """One engine and its clients. Steps are kept by what their price depends on, many alike as one entry with a count."""

    def __init__(self, loop: ClosedLoop, config: SchedulerConfig, blocks: BlockConfig) -> None:
        self.steps: list[tuple[tuple[int, ...], int]] = []
        self.served: list[_Served] = []
        self._loop = loop
        self._random = random.Random(f"closed loop {loop.seed}")
        self._open: dict[str, _Served] = {}
        self._n_sent = self._n_steps = 0
        self._door: deque[Request] = deque()  # sent, and not yet seen by the scheduler
        self._polled = 0  # steps that were over when the scheduler last looked
        self._engine = SimulatedEngine(
            config, blocks, predict_s=_one_second, on_events=self._on_events, on_step=self._on_step
        )

    def serve(self) -> None:
        """All requests, to the end."""
        self._send(self._loop.streams)
        engine, n_over = self._engine, 0
        while True:
            closed_for = self._open_door()
            run = engine.core.foreseen(token_id=DRAWN_TOKEN, limit=min(closed_for, LONGEST_RUN))
            if run is not None:
                engine.core.commit_run(run.n_steps, token_id=DRAWN_TOKEN)
                decode, context = run.shape.decode_tokens, run.shape.decode_context_tokens
                self._add((decode, 0, 0, 0, 0, context + decode * (run.n_steps - 1) // 2), run.n_steps)
            elif not engine.stepper.step():
                return
            if len(self.served) > n_over:
                self._send(len(self.served) - n_over)
                n_over = len(self.served)

    def _open_door(self) -> int:
        """Let in those who were sent and whom the scheduler looks for now; else for how many steps it will not."""
        door, engine, now = self._door, self._engine, self._n_steps
        if not door:
            return LONGEST_RUN
        closed_for = self._closed_for()
        if closed_for and engine.core.has_work:
            return closed_for
        ahead = self._loop.scheduling.ahead_steps if engine.core.has_work else 0
        places = self._loop.scheduling.at_once if now else None
        while door and (not ahead or self._open[door[0].request_id].came + ahead <= now):
            if places is not None:
                if not places:
                    return 1
                places -= 1
            engine.stepper.submit(door.popleft())
        return LONGEST_RUN

    def _closed_for(self) -> int:
        scheduling, now, came = self._loop.scheduling, self._n_steps, self._open[self._door[0].request_id].came
        polls_in = (self._polled - now) % scheduling.poll_steps
        if 0 < scheduling.poll_prompts <= len(self._door):
            polls_in = 0
        closed_for = max(polls_in, came + scheduling.ahead_steps - now, 0)
        if scheduling.gather_steps:
            n_running = self._engine.core.running_and_waiting[0]
            gathered = n_running + sum(len(request.prompt_token_ids) for request in self._door)
            if gathered < scheduling.gather_tokens:
                closed_for = max(closed_for, came + scheduling.gather_steps - now)
        return closed_for

    def _send(self, n_requests: int) -> None:
        loop = self._loop
        for _ in range(min(n_requests, loop.n_requests - self._n_sent)):
            item = WorkloadItem(
                index=self._n_sent,
                at_s=0.0,
                prompt_tokens=loop.input.draw(self._random),
                output_tokens=loop.output.draw(self._random),
            )
            self._n_sent += 1
            request = request_of(item, float(self._n_sent))  # the order of arrival; the instant matters to nobody
            self._open[request.request_id] = _Served(self._n_steps, item.output_tokens)
            self._door.append(request)

    def _add(self, gist: tuple[int, ...], n_steps: int) -> None:
        self.steps.append((gist, n_steps))
        self._n_steps += n_steps

    def _on_step(self, step: StepRecord) -> None:
        self._add(_gist(step.shape), 1)
        if step.shape.prefill_tokens:
            self._polled = self._n_steps

    def _on_events(self, events: list[Event]) -> None:
        """Called when the step has been added."""
        for event in events:
            if type(event) is TokenEvent and event.position == 0:
                self._open[event.request_id].first = self._n_steps
            elif type(event) is FinishEvent:
                self._engine.book.take(event.request_id)
                served = self._open.pop(event.request_id)
                served.last = self._n_steps
                self.served.append(served)


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


def _kinds(steps: Sequence[tuple[tuple[int, ...], int]]) -> tuple[list[StepShape], list[int]]:
    """Steps that are nearly alike become one kind with their mean; and the kind of every entry."""
    members: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    keys = [_key(gist) for gist, _ in steps]
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


def _mean_shape(alike: Sequence[tuple[tuple[int, ...], int]]) -> StepShape:
    n = sum(count for _, count in alike)
    decode, prompts, ends, new, before, context = (
        round(sum(gist[i] * count for gist, count in alike) / n) for i in range(6)
    )
    chunks = []
    if decode:
        chunks.append(ChunkShape(Phase.DECODE, 1, max(context // decode - 1, 0), True, decode))
    for samples, count in ((True, min(ends, prompts)), (False, prompts - min(ends, prompts))):
        if count:
            share = max(new // prompts, 1)
            chunks.append(ChunkShape(Phase.PREFILL, share, before // prompts, samples, count))
    return StepShape(chunks)
