"""What steps of every size take right now: one small load through the very engine, the same every time.

    ladder = Ladder(model, predictor)
    level = level_of(predictor, ladder.climb())
    level.predict_s(shape), level.host

Sixteen requests come one by one, with prompts of seven sizes, and between two of them the engine decodes. So a second of it
has prompts of each size beside few and many sequences, and decode of 1 to 16. Behind them an idle engine is woken some times.

A profile says how steps of one size stand to those of another, on any model; a ladder says what some of them take in this
minute. A shared machine may be a tenth slower ten minutes later, and a profile's form has errors of its own.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
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

SIZES = (16, 45, 90, 150, 210, 256, 640)
SEQUENCES = 16
DECODES = 8  # between two requests
IDLE_S, WOKEN_TOKENS, WAKES = 0.015, 90, 5
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
        with undisturbed():
            steps = self._climb()
            woken_s = tuple(self._wake_s() for _ in range(WAKES))
        return Climb(
            steps=tuple(
                (shape, kept_s, step.device_s)
                for step, (shape, kept_s) in zip(
                    steps, times_of((s.begin_s, s.end_s, s.shape) for s in steps), strict=True
                )
            ),
            woken_s=woken_s,
        )

    def _climb(self) -> list[StepRecord]:
        served = self._served
        served.steps.clear()
        for number, size in enumerate(islice(cycle(SIZES), SEQUENCES)):
            # all of them end with the same step
            self._submit(size, new_tokens=(SEQUENCES - number) * (1 + DECODES), arrival_s=served.clock.now_s())
            for _ in range(1 + DECODES):
                served.stepper.step()
        return list(served.steps)

    def _wake_s(self) -> float:
        served = self._served
        due_s = served.clock.now_s() + IDLE_S
        sleep_s(IDLE_S)
        self._submit(WOKEN_TOKENS, new_tokens=1, arrival_s=due_s)
        served.stepper.step()
        served.stepper.step()  # there is nothing left to do
        return served.steps[-1].end_s - due_s

    def _submit(self, n_tokens: int, *, new_tokens: int, arrival_s: float) -> None:
        self._n_requests += 1
        self._served.stepper.submit(
            Request(
                request_id=f"{self._n_requests}",
                prompt_token_ids=tuple(self._random.choices(range(self._vocab_size), k=n_tokens)),
                sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
                arrival_s=arrival_s,
            )
        )


def host_of(climbs: Sequence[Climb]) -> Host:
    """What the scheduler, the executor and the sampler add to steps: the median of each kind of step.

    What is left of a whole climb is what its prompts cost, requests that come and go included.
    """
    rest_s: dict[tuple[int, int], list[float]] = {}  # by decoding sequences and prompt tokens
    for climb in climbs:
        for shape, kept_s, kernels_s in climb.steps[:-1]:  # with the last all requests end
            rest_s.setdefault((shape.decode_tokens, shape.prefill_tokens), []).append(kept_s - kernels_s)
    kinds = {kind: statistics.median(each) for kind, each in rest_s.items()}
    decode = [(n, rest) for (n, prompt), rest in kinds.items() if not prompt]
    sequence_s, step_s = (max(0.0, value) for value in _line(decode))
    prompts = [(prompt, rest - n * sequence_s) for (n, prompt), rest in kinds.items() if prompt]
    prompt_token_s = max(0.0, _line(prompts)[0])
    known = Host(step_s=step_s, sequence_s=sequence_s, prompt_token_s=prompt_token_s)
    left = [
        sum(kept_s - kernels_s - known.time_s(shape) for shape, kept_s, kernels_s in climb.steps) for climb in climbs
    ]
    return Host(
        step_s=step_s,
        sequence_s=sequence_s,
        prompt_s=max(0.0, statistics.median(left) / SEQUENCES),
        prompt_token_s=prompt_token_s,
    )


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
        seen: dict[tuple[bool, int], list[float]] = {}  # by phase, and sequences that decode or tokens of the prompt
        for climb in climbs:
            for shape, _, kernels_s in climb.steps:
                kind = (shape.prefill_tokens > 0, shape.prefill_tokens or shape.decode_tokens)
                seen.setdefault(kind, []).append(kernels_s / self._kernels_s(shape))
        self._sizes = {
            is_prompt: np.log([size for one, size in sorted(seen) if one is is_prompt]) for is_prompt in (False, True)
        }
        self._times = {
            is_prompt: np.array([statistics.median(seen[kind]) for kind in sorted(seen) if kind[0] is is_prompt])
            for is_prompt in (False, True)
        }
        usual_s = self.predict_s(StepShape.prefill(batch=1, new_tokens=WOKEN_TOKENS))
        woken_s = statistics.median(woken_s for climb in climbs for woken_s in climb.woken_s)
        self.host = replace(self.host, wake_s=max(0.0, woken_s - usual_s))

    def predict_s(self, shape: StepShape) -> float:
        """Seconds of a step."""
        is_prompt = shape.prefill_tokens > 0
        size = np.log(shape.prefill_tokens or shape.decode_tokens)
        times = float(np.interp(size, self._sizes[is_prompt], self._times[is_prompt]))
        return times * self._kernels_s(shape) + self.host.time_s(shape)

    def _kernels_s(self, shape: StepShape) -> float:
        return self._predictor.predict_s(shape) - self._predictor.calibration.host.time_s(shape)
