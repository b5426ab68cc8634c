"""What steps of every size take right now: one small load through the very engine, the same every time.

    ladder = Ladder(model, predictor)
    climbs = [ladder.climb() for _ in range(5)]
    form = Form(predictor, climbs)
    form.at(climbs[-1:]).usual()(shape), form.host

Seven requests come one after the other has ended, with prompts of seven sizes; then sixteen one by one, and between two of
them the engine decodes. So half a second of it has prompts of each size alone and beside few and many sequences, and decode of
1 to 16, right behind a prompt and when the caches hold its weights again; then they end one by one, so many steps apart, the
shortest first: one number of sequences reads few tokens on the way up and many on the way down. Behind them an idle engine is
woken some times.

A profile says how steps of one size stand to those of another, on any model; a ladder says what some of them take in this
minute. A shared machine may be a tenth slower ten minutes later, and a profile's form has errors of its own: a prompt displaces
from the caches weights, and what the host reads, and the first decode steps behind it bring them back. That takes its time
whatever else a step does, the more the longer the prompt was: of a model of 20 MB on a Zen 5 the first step's kernels 10 us
behind 30 tokens, 60 behind 200 and 150 behind 600, and its host as much.
"""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import NamedTuple

import numpy as np

from diptych.compute.runner import Model
from diptych.control.scheduler import Predict
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.calibration import Host
from diptych.ground.clock import sleep_s
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.phase import Phase
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.lab.served import RequestsHost, Served, undisturbed

# rows of a step with a prompt: as odd as prompts are, but for a usual budget, which a step fills to the last row
SIZES = (30, 150, 90, 210, 256, 45, 600)
SEQUENCES = 16
DECODES = (24, *(SEQUENCES - 1) * (12,))  # behind each request; one sequence alone decodes longest
LAST_DECODES = 4  # of each number of sequences, as they end
APART = 1.5  # times the tokens, from which on two steps tell what tokens take
ALONE = 13  # tokens of each request that comes alone
IDLE_S, WOKEN_TOKENS, WAKES = 0.015, 90, 5
SETTLED = 9  # steps behind one with a prompt, from which on decode is as quick as it gets: a prompt fills the caches
LEAST_PRICE = 0.1  # of the profile's price, below which cheaper tokens bring no step
ODD = 1.5  # times its usual time, from which on a step was disturbed
Climbed = tuple[StepShape, float, float]  # and the seconds that it kept the engine, and those of its kernels
CONFIG = SchedulerConfig(max_step_tokens=1024, max_running_sequences=SEQUENCES)
BLOCKS = BlockConfig(n_blocks=512, block_tokens=16)


class Behind(NamedTuple):
    """Where a step stands: so many steps behind the last one with a prompt, which is 0 itself, and that one's rows."""

    steps: int
    rows: int

    @property
    def is_settled(self) -> bool:
        """Whether the caches hold again what decode reads."""
        return self.steps >= SETTLED


class Since:
    """Counts steps behind the last one with a prompt. Before any prompt everything has settled."""

    def __init__(self) -> None:
        self._last = Behind(SETTLED - 1, 1)

    def __call__(self, shape: StepShape) -> Behind:
        """Of the next step."""
        self._last = (
            Behind(0, shape.n_tokens) if shape.prefill_tokens else self._last._replace(steps=self._last.steps + 1)
        )
        return self._last


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """One time up. steps: see Climbed. coming_s: what each request took when it came. woken_s: from the instant a prompt of
    WOKEN_TOKENS was due, the engine being idle, to its token.
    """

    steps: tuple[Climbed, ...]
    coming_s: tuple[float, ...]
    woken_s: tuple[float, ...]

    @property
    def is_ending(self) -> list[bool]:
        """Of each step, whether a request ends with it."""
        sequences = [0, *(shape.n_sequences for shape, *_ in self.steps[::-1])]
        return [after < own for after, own in pairwise(sequences)][::-1]


class Ladder:
    """An engine of its own on the model, which only climbs."""

    def __init__(self, model: Model, predictor: CalibratedModel) -> None:
        self._served = Served(model, CONFIG, BLOCKS, predictor.predict_s)
        self._vocab_size = model.spec.vocab_size
        self._random = random.Random(0)
        self._n_requests = 0

    def climb(self) -> Climb:
        """Less than a second on a model of ten million weights; a step takes what it takes."""
        # made before, as what makes a prompt is not the engine's
        first = self._request(WOKEN_TOKENS, new_tokens=SETTLED)
        alone = [self._request(size, new_tokens=ALONE) for size in SIZES]
        sizes = [size - number for number, size in enumerate(islice(cycle(SIZES), SEQUENCES))]
        last = [(1 + sorted(sizes).index(size)) * LAST_DECODES for size in sizes]
        requests = [
            self._request(size, new_tokens=sum(1 + n for n in DECODES[number:]) + last[number])
            for number, size in enumerate(sizes)
        ]
        prompts = [self._request(WOKEN_TOKENS, new_tokens=1) for _ in range(WAKES)]
        with undisturbed():
            steps = self._climb(first, alone, requests)
            coming_s = tuple(filter(None, self._served.coming_s))
            woken_s = tuple(self._wake_s(one) for one in prompts)
        return Climb(steps=steps, coming_s=coming_s, woken_s=woken_s)

    def alone_s(self) -> float:
        """What a decode step of one sequence takes beside its kernels, the median of some tens."""
        served = self._served
        served.steps.clear()
        served.coming_s.clear()
        with undisturbed():
            self._serve(self._request(WOKEN_TOKENS, new_tokens=ALONE * SETTLED))
        settled = zip(served.steps[SETTLED:-1], served.kept_s()[SETTLED:-1], strict=True)
        return statistics.median(kept_s - step.device_s for step, kept_s in settled)

    def _climb(self, first: Request, alone: Sequence[Request], requests: Sequence[Request]) -> tuple[Climbed, ...]:
        served = self._served
        self._serve(first)  # wakes the engine, and is over before the others come
        served.steps.clear()
        served.coming_s.clear()
        ends = set()  # steps behind which nothing runs, so that nothing tells what the end took: they are left out
        for request in alone:
            self._serve(request)
            ends.add(len(served.steps) - 1)
        for request, n_decodes in zip(requests, DECODES, strict=True):
            served.stepper.submit(
                request
            )  # when it is due is of no interest: to write that down takes as long as to take it
            for _ in range(1 + n_decodes):
                served.stepper.step()
        while served.stepper.step():
            pass
        return tuple(
            (step.shape, kept_s, step.device_s)
            for i, (step, kept_s) in enumerate(zip(served.steps, served.kept_s(), strict=True))
            if i not in ends
        )

    def _serve(self, request: Request) -> None:
        self._served.stepper.submit(request)
        while self._served.stepper.step():
            pass

    def _wake_s(self, request: Request) -> float:
        served = self._served
        due_s = served.clock.now_s() + IDLE_S
        coming = replace(request, arrival_s=due_s)
        sleep_s(IDLE_S)
        served.stepper.submit(coming)
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


def host_of(
    climbs: Iterable[Climb], *, counts: Callable[[Behind], bool] = lambda behind: True, token_s: float = 0.0
) -> tuple[Host, RequestsHost]:
    """What the scheduler, the executor and the sampler add to steps, the median of each kind; and what requests take between
    them. counts: of decode's steps, which. token_s: what each token of decode's context takes of the host, which is not in it.
    """
    decode: list[tuple[StepShape, float]] = []
    with_prompts: list[tuple[StepShape, float]] = []
    ending: list[tuple[StepShape, float]] = []
    coming_s: list[float] = []
    for climb in climbs:
        coming_s += climb.coming_s
        count = Since()
        for (shape, kept_s, kernels_s), is_ending in zip(climb.steps, climb.is_ending, strict=True):
            behind, step = count(shape), (shape, kept_s - kernels_s - shape.decode_context_tokens * token_s)
            if is_ending:
                ending.append(step)
            elif not behind.steps:
                with_prompts.append(step)
            elif counts(behind):
                decode.append(step)
    sequence_s, step_s = (
        max(0.0, value) for value in _line(_medians((shape.decode_tokens, rest_s) for shape, rest_s in decode))
    )
    known = Host(step_s=step_s, sequence_s=sequence_s)
    reading = _medians((shape.prefill_tokens, rest_s - known.time_s(shape)) for shape, rest_s in with_prompts)
    prompt_token_s, prompt_s = (max(0.0, value) for value in _line(reading))
    end_s = max(0.0, statistics.median(rest_s - known.time_s(shape) for shape, rest_s in ending))
    host = replace(known, prompt_token_s=prompt_token_s, prompt_s=prompt_s)
    return host, RequestsHost(come_s=statistics.median(coming_s), end_s=end_s)


def profile_host(predictor: CalibratedModel, climbs: Sequence[Climb]) -> Host:
    """As a profile has it, which knows neither what a step stands behind nor what a request is: decode's median over all steps,
    and what requests take with their prompts.
    """
    host, requests_s = host_of(climbs)
    prompt_s = host.prompt_s + requests_s.come_s + requests_s.end_s
    return replace(host, prompt_s=prompt_s, wake_s=Form(predictor, climbs).host.wake_s)


class TokenPrice(NamedTuple):
    """Seconds that a token of decode's context takes beside the profile's price: of the kernels, and of the host, whose own
    memory keys and values displace.
    """

    kernels_s: float = 0.0
    host_s: float = 0.0


def token_price_of(predictor: CalibratedModel, climbs: Iterable[Climb]) -> TokenPrice:
    """What makes the same number of sequences, settled, take as many times the price over few tokens, on a climb's way up, as
    over many on its way down. What of a step is its sequences' and what their tokens', one number of tokens for each number of
    sequences cannot say: five short sequences came out 5 % long.
    """
    found: list[tuple[float, float]] = []
    for climb in climbs:
        ways: dict[int, tuple[list[tuple[float, ...]], list[tuple[float, ...]]]] = {}
        count, n_prompts = Since(), sum(shape.prefill_tokens > 0 for shape, *_ in climb.steps)
        for (shape, kept_s, kernels_s), is_ending in zip(climb.steps, climb.is_ending, strict=True):
            n_prompts -= shape.prefill_tokens > 0
            if count(shape).is_settled and not is_ending:
                step = kernels_s, kept_s - kernels_s, kernels_price_s(predictor, shape), shape.decode_context_tokens
                ways.setdefault(shape.n_sequences, ([], []))[n_prompts == 0].append(step)
        for up, down in ways.values():
            if up and down:
                (few_s, few_host_s, few_price_s, few), (many_s, many_host_s, many_price_s, many) = (
                    np.median(way, axis=0).tolist() for way in (up, down)
                )
                if many > APART * few and many_s / few_s < many / few:
                    kernels_s = (many_s * few_price_s - few_s * many_price_s) / (few_s * many - many_s * few)
                    least_s = (few_price_s - many_price_s) / (many - few)  # with which a token takes no time at all
                    found.append((max(kernels_s, least_s), (many_host_s - few_host_s) / (many - few)))
    if not found:
        return TokenPrice()
    kernels_s, host_s = (statistics.median(each) for each in zip(*found, strict=True))
    return TokenPrice(kernels_s=kernels_s, host_s=max(0.0, host_s))


def kernels_price_s(predictor: CalibratedModel, shape: StepShape) -> float:
    """A profile's price without the host's part."""
    return predictor.predict_s(shape) - predictor.calibration.host.time_s(shape)


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


class _Curve:
    """By rows, straight between the medians of each number of them over the logarithm."""

    def __init__(self, found: Iterable[tuple[int, float]] = ()) -> None:
        rows, usual = zip(*(_medians(found) or [(1, 0.0)]), strict=True)
        self._rows, self._usual = np.log(rows), np.array(usual)

    def __call__(self, rows: int) -> float:
        return float(np.interp(math.log(rows), self._rows, self._usual))


def _late_of(found: Iterable[tuple[Behind, float]]) -> list[_Curve]:
    """What steps right behind prompts take longer, by how far behind and by the prompt's rows, of which a climb has each number
    once or twice.
    """
    pairs: list[list[tuple[int, float]]] = [[] for _ in range(SETTLED)]
    for behind, late_s in found:
        if 0 < behind.steps < SETTLED:
            pairs[behind.steps].append((behind.rows, max(0.0, late_s)))
    return [_Curve(_smoothed(_medians(one))) for one in pairs]


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The median of each with its neighbours."""
    last = len(points) - 1
    return [
        (x, statistics.median(value for _, value in points[max(0, i - 1) : min(last, i + 1) + 1]))
        for i, (x, _) in enumerate(points)
    ]


class Form:
    """What many climbs say together of steps, beside a profile's prices: by size, by tokens of context, by how far behind how
    long a prompt, and how they scatter.

    A climb has two or three prompts of a size, which stand as far apart as machines move; so a minute is told by one number for
    each phase, its pace, and what sizes make of it by all climbs.
    """

    def __init__(self, predictor: CalibratedModel, climbs: Sequence[Climb]) -> None:
        # a cache's price of keys and values ends at once where they no longer fit, and the machine knows no such edge
        self._predictor = predictor.with_kv_in_memory()
        self._token = token_price_of(self._predictor, climbs)
        self.host, self.requests_s = host_of(
            climbs, counts=lambda behind: behind.is_settled, token_s=self._token.host_s
        )
        self._sizes = dict.fromkeys(Phase, _Curve())
        self._late = self._late_host = [_Curve()] * SETTLED
        for _ in range(2):  # a climb's pace is what is left beside its sizes, and sizes what is left beside the pace
            self._fit(climbs)
        at = [(self.at([climb]), climb) for climb in climbs]
        self.scatter = {phase: Scatter() for phase in Phase}
        for level, climb in at:
            usual_s = level.usual()
            for (shape, kept_s, _), is_ending in zip(climb.steps, climb.is_ending, strict=True):
                price_s = usual_s(shape)
                if not is_ending:
                    self.scatter[shape.phase].add(price_s, kept_s)
        woken = StepShape.prefill(batch=1, new_tokens=WOKEN_TOKENS)
        waking = [woken_s - level.expected()(woken) for level, climb in at for woken_s in climb.woken_s]
        self.host = replace(self.host, wake_s=max(0.0, statistics.median(waking) - self.requests_s.come_s))

    def at(self, climbs: Sequence[Climb]) -> Level:
        """Prices at the pace of these climbs."""
        paces = [self._pace(climb) for climb in climbs]
        return Level(self, {phase: statistics.median(pace[phase] for pace in paces) for phase in Phase})

    def usual_s(self, shape: StepShape, behind: Behind, pace: float) -> float:
        """Seconds of a step, the median."""
        return self._kernels_s(shape, behind) * math.exp(pace) + self.host_s(shape, behind)

    def host_s(self, shape: StepShape, behind: Behind) -> float:
        """The host's part of it."""
        return self._settled_host_s(shape) + _at(self._late_host, behind)

    def _fit(self, climbs: Sequence[Climb]) -> None:
        paced = [(self._pace(climb), self._noted(climb)) for climb in climbs]
        noted = [(pace, *step) for pace, steps in paced for step in steps]
        for phase in Phase:
            self._sizes[phase] = _Curve(
                (shape.n_tokens, math.log(kernels_s / self._price_s(shape)) - pace[phase])
                for pace, shape, behind, kernels_s, _ in noted
                if shape.phase is phase and (behind.is_settled or not behind.steps)
            )
        self._late = _late_of(
            (behind, kernels_s / math.exp(pace[Phase.DECODE]) - self._sized_s(shape))
            for pace, shape, behind, kernels_s, _ in noted
        )
        self._late_host = _late_of(
            (behind, rest_s - self._settled_host_s(shape)) for _, shape, behind, _, rest_s in noted
        )

    def _pace(self, climb: Climb) -> dict[Phase, float]:
        """By phase, the log of how many times the profile's price steps take beside their size and place."""
        left: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        for shape, behind, kernels_s, _ in self._noted(climb):
            left[shape.phase].append(math.log(kernels_s / self._kernels_s(shape, behind)))
        return {phase: statistics.median(times) for phase, times in left.items()}

    def _noted(self, climb: Climb) -> list[tuple[StepShape, Behind, float, float]]:
        """Steps, where each stands behind a prompt, and the seconds of its kernels and of the rest."""
        count = Since()
        return [(shape, count(shape), kernels_s, kept_s - kernels_s) for shape, kept_s, kernels_s in climb.steps]

    def _kernels_s(self, shape: StepShape, behind: Behind) -> float:
        """At the pace of the profile."""
        return self._sized_s(shape) + _at(self._late, behind)

    def _sized_s(self, shape: StepShape) -> float:
        return self._price_s(shape) * math.exp(self._sizes[shape.phase](shape.n_tokens))

    def _price_s(self, shape: StepShape) -> float:
        price_s = kernels_price_s(self._predictor, shape)
        # what tokens take less than the profile says of most sizes was more than a step of another: its log was none
        return max(price_s + shape.decode_context_tokens * self._token.kernels_s, LEAST_PRICE * price_s)

    def _settled_host_s(self, shape: StepShape) -> float:
        return self.host.time_s(shape) + shape.decode_context_tokens * self._token.host_s


def _at(late: Sequence[_Curve], behind: Behind) -> float:
    return late[behind.steps](behind.rows) if 0 < behind.steps < SETTLED else 0.0


class Scatter:
    """How steps took longer or shorter than their price, one after the other: a slow spell lasts for some steps.

    Most are off by a share of it. Some lose their core, for as long as somebody else has it: such a delay is an absolute time
    and comes once in so much time, whether steps are long or short.
    """

    def __init__(self) -> None:
        self._ends_s: list[float] = []  # of the steps on a line on which each lasts as long as its price
        self._times: list[float] = []  # taken over price
        self._late_s: list[float] = []  # by which step it was delayed
        self._capped_s = 0.0

    def add(self, price_s: float, taken_s: float) -> None:
        """The next step."""
        is_delayed = taken_s > ODD * price_s
        self._ends_s.append((self._ends_s[-1] if self._ends_s else 0.0) + price_s)
        self._times.append(1.0 if is_delayed else taken_s / price_s)
        self._late_s.append(taken_s - price_s if is_delayed else 0.0)
        self._capped_s += min(taken_s, ODD * price_s)

    @property
    def mean(self) -> float:
        """Taken over price, of all together; of a long delay no more than ODD is believed."""
        return self._capped_s / self._ends_s[-1]

    def drawn(self, start: float) -> Callable[[float], float]:
        """Seconds of steps of these prices, one after the other, from `start` of the line on."""
        n, whole_s = len(self._ends_s), self._ends_s[-1]
        at_s, place = start * whole_s, bisect_right(self._ends_s, start * whole_s)

        def taken_s(price_s: float) -> float:
            nonlocal at_s, place
            times, late_s = self._times[place % n], 0.0
            at_s += price_s
            while self._ends_s[place % n] + place // n * whole_s <= at_s:
                late_s += self._late_s[place % n]
                place += 1
            return times * price_s + late_s

        return taken_s


class Level:
    """Prices of steps in one minute. What prices a step must be asked of one after the other."""

    def __init__(self, form: Form, pace: Mapping[Phase, float]) -> None:
        self._form = form
        self._pace = pace

    def usual(self) -> Predict:
        """Seconds of the next step: the median."""
        count = Since()
        return lambda shape: self._form.usual_s(shape, count(shape), self._pace[shape.phase])

    def host(self) -> Predict:
        """Its part that is the host's."""
        count = Since()
        return lambda shape: self._form.host_s(shape, count(shape))

    def expected(self) -> Predict:
        """The mean."""
        usual_s = self.usual()
        return lambda shape: usual_s(shape) * self._form.scatter[shape.phase].mean

    def drawn(self, seed: int) -> Predict:
        """Scattered as the climbs' steps were."""
        usual_s, start = self.usual(), random.Random(seed)
        drawn = {phase: scatter.drawn(start.random()) for phase, scatter in self._form.scatter.items()}
        return lambda shape: drawn[shape.phase](usual_s(shape))
