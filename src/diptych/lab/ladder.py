"""What steps of every size take right now: one small load through the very engine, the same every time.

    ladder = Ladder(model, predictor)
    level = level_of(predictor, ladder.climb())
    level.predict_s(shape), level.host

Sixteen requests come one by one, with prompts that make steps of seven sizes, and between two of them the engine decodes. So
half a second of it has prompts of each size beside few and many sequences, and decode of 1 to 16. Behind them an idle engine is
woken some times.

A profile says how steps of one size stand to those of another, on any model; a ladder says what some of them take in this
minute. A shared machine may be a tenth slower ten minutes later, and a profile's form has errors of its own.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from diptych.compute.runner import Model
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Host
from diptych.ground.clock import sleep_s
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.lab.served import Served, undisturbed
from diptych.metrics import StepRecord
from diptych.sim.counterfactual import times_of

# Rows of a step with a prompt: as odd as prompts are, but for a usual budget, which a step fills to the last row.
SIZES = (30, 45, 90, 150, 210, 256, 600)
SEQUENCES = 16
DECODES = 8  # between two requests
IDLE_S, WOKEN_TOKENS, WAKES = 0.015, 90, 5
ODD = 1.5  # times its usual time, from which on a step was disturbed
CONFIG = SchedulerConfig(max_step_tokens=1024, max_running_sequences=SEQUENCES)
BLOCKS = BlockConfig(n_blocks=512, block_tokens=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """One time up. steps: (shape, seconds until the next step could begin, seconds of kernels in it). woken_s: from the
    instant a prompt of WOKEN_TOKENS was due, the engine being idle, to its token.
    """

    steps: tuple[tuple[StepShape, float, float], ...]
    woken_s: tuple[float, ...]


class Ladder:
    """An engine of its own on the model, which only climbs."""

    def __init__(self, model: Model, predictor: CalibratedModel) -> None:
        self._served = Served(model, CONFIG, BLOCKS, predictor.predict_s)
        self._vocab_size = model.spec.vocab_size
        self._random = random.Random(0)
        self._n_requests = 0

    def climb(self) -> Climb:
        """Less than a second on a model of ten million weights; a step takes what it takes."""
        # all of them end with the same step; made before, as what makes a prompt is not the engine's
        requests = [
            self._request(size - number, new_tokens=(SEQUENCES - number) * (1 + DECODES))
            for number, size in enumerate(islice(cycle(SIZES), SEQUENCES))
        ]
        prompts = [self._request(WOKEN_TOKENS, new_tokens=1) for _ in range(WAKES)]
        with undisturbed():
            steps = self._climb(requests)
            woken_s = tuple(self._wake_s(one) for one in prompts)
        return Climb(
            steps=tuple(
                (shape, kept_s, step.device_s)
                for step, (shape, kept_s) in zip(
                    steps, times_of((s.begin_s, s.end_s, s.shape) for s in steps), strict=True
                )
            ),
            woken_s=woken_s,
        )

    def _climb(self, requests: Sequence[Request]) -> list[StepRecord]:
        served = self._served
        served.steps.clear()
        for request in requests:
            served.stepper.submit(replace(request, arrival_s=served.clock.now_s()))
            for _ in range(1 + DECODES):
                served.stepper.step()
        return list(served.steps)

    def _wake_s(self, request: Request) -> float:
        served = self._served
        due_s = served.clock.now_s() + IDLE_S
        sleep_s(IDLE_S)
        served.stepper.submit(replace(request, arrival_s=due_s))
        served.stepper.step()
        served.stepper.step()  # there is nothing left to do
        return served.steps[-1].end_s - due_s

    def _request(self, n_tokens: int, *, new_tokens: int) -> Request:
        self._n_requests += 1
        return Request(
            request_id=f"{self._n_requests}",
            prompt_token_ids=tuple(self._random.choices(range(self._vocab_size), k=n_tokens)),
            sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
            arrival_s=0.0,
        )


def host_of(climbs: Sequence[Climb]) -> Host:
    """What the scheduler, the executor and the sampler add to steps: the median of each kind of step. A request that comes
    takes its time behind the step before, and counts as its prompt's.
    """
    steps = [
        (shape, kept_s - kernels_s, after is not None and after[0].prefill_tokens > 0)
        for climb in climbs
        for (shape, kept_s, kernels_s), after in zip(climb.steps, [*climb.steps[1:], None], strict=True)
    ]
    decode = _medians((shape.decode_tokens, rest_s) for shape, rest_s, _ in steps if not shape.prefill_tokens)
    sequence_s, step_s = (max(0.0, value) for value in _line(decode))
    known = Host(step_s=step_s, sequence_s=sequence_s)
    reading = _medians(
        (shape.prefill_tokens, rest_s - known.time_s(shape)) for shape, rest_s, _ in steps if shape.prefill_tokens
    )
    prompt_token_s, prompt_s = (max(0.0, value) for value in _line(reading))
    coming = [rest_s - known.time_s(shape) for shape, rest_s, is_joined in steps if is_joined]
    return replace(known, prompt_token_s=prompt_token_s, prompt_s=prompt_s + max(0.0, statistics.median(coming)))


def _medians(pairs: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The median of what belongs to each number."""
    seen: dict[int, list[float]] = {}
    for number, value in pairs:
        seen.setdefault(number, []).append(value)
    return [(number, statistics.median(each)) for number, each in sorted(seen.items())]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and height of the line through points, in relative error."""
    x, y = (np.array(each, dtype=float) for each in zip(*points, strict=True))
    slope, height = np.polyfit(x, y, 1, w=1.0 / np.maximum(y, 1e-6))
    return float(slope), float(height)


class Level:
    """Prices of a profile, the kernels' times what they took on the way up a ladder, and the host's time of that engine."""

    def __init__(self, predictor: CalibratedModel, climbs: Sequence[Climb]) -> None:
        self._predictor = predictor
        self.host = host_of(climbs)
        kernels = [
            (shape, kernels_s / self._kernels_s(shape)) for climb in climbs for shape, _, kernels_s in climb.steps
        ]
        # of steps with prompts and of those without: the log of rows, and times the profile's price
        self._times: dict[bool, tuple[np.ndarray, np.ndarray]] = {}
        for has_prompt in (False, True):
            found = _medians((shape.n_tokens, times) for shape, times in kernels if _has_prompt(shape) is has_prompt)
            rows, usual = (np.array(each, dtype=float) for each in zip(*found, strict=True))
            # an answer's time is the mean of its steps, small delays among them; of a long one no more than ODD is believed
            over = [
                times / np.interp(shape.n_tokens, rows, usual)
                for shape, times in kernels
                if _has_prompt(shape) is has_prompt
            ]
            self._times[has_prompt] = np.log(rows), usual * float(np.minimum(over, ODD).mean())
        usual_s = self.predict_s(StepShape.prefill(batch=1, new_tokens=WOKEN_TOKENS))
        woken_s = statistics.median(woken_s for climb in climbs for woken_s in climb.woken_s)
        self.host = replace(self.host, wake_s=max(0.0, woken_s - usual_s))

    def predict_s(self, shape: StepShape) -> float:
        """Seconds of a step."""
        times = float(np.interp(np.log(shape.n_tokens), *self._times[_has_prompt(shape)]))
        return times * self._kernels_s(shape) + self.host.time_s(shape)

    def _kernels_s(self, shape: StepShape) -> float:
        return self._predictor.predict_s(shape) - self._predictor.calibration.host.time_s(shape)


def _has_prompt(shape: StepShape) -> bool:
    return shape.prefill_tokens > 0
