"""Measures the two phases apart, through the same scheduler, executor and sampler that serve requests.

Each point is a static batch: B prompts prefilled to their first token, then decoded together. Rates are medians over
repeats; every point carries the bandwidth measured just before and after it, and its share of the roofline. A long context
need not be read first: blocks of a short prompt are taken in for it as if another engine had handed them over.
"""

from __future__ import annotations

import gc
import itertools
import random
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from diptych.compute.ceilings import Ceilings, arithmetic_ceilings, machine_ceilings, read_ceiling
from diptych.compute.kv_store import KVPayload
from diptych.compute.runner import Model
from diptych.control.loop import EngineCore
from diptych.engine.cost_view import CostView
from diptych.engine.executor import ModelExecutor
from diptych.engine.load import LoadedModel, make_machinery
from diptych.ground.clock import Clock, MonotonicClock
from diptych.ground.config import EngineConfig
from diptych.ground.errors import CapacityError, ConfigError
from diptych.ground.events import ArrivalEvent, Event
from diptych.ground.handoff import HandOff
from diptych.ground.phase import Phase
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.metrics import EventBook
from diptych.stepper import Stepper

Progress = Callable[[str], None]
MAX_STEP_TOKENS = 16384
SAMPLE_TOKENS = 512  # read once, for the blocks that stand behind a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and extremes of repeated measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median=statistics.median(values), min=min(values), max=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePoint:
    """One phase of one static batch. fraction_of_ceiling: time the roofline allows over the time measured, median of runs.

    bound: the roof that it is of, "memory", "cache" or "arithmetic". behind_tokens: of each sequence, whose keys and values
    were there before. context_tokens: per sequence, at the end of prefill and at the middle of decode.
    read_bytes_per_s: the bandwidth measured around this point, of the cache where one holds the weights.
    """

    phase: str
    batch: int
    prompt_tokens: int
    behind_tokens: int
    context_tokens: int
    new_tokens: int
    tokens_per_s: Spread
    fraction_of_ceiling: float
    bound: str
    time_s: Spread
    bound_s: float
    read_bytes_per_s: float
    host_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything `diptych bench --json` prints."""

    model: str
    backend: str
    weights: str
    kv: str
    threads: int
    ceilings: Ceilings
    results: tuple[PhasePoint, ...]
    load_s: float
    peak_rss_bytes: int

    def as_json(self) -> dict[str, object]:
        """Plain dicts and lists."""
        return asdict(self)


@dataclass(slots=True)
class _Run:
    """One repetition of one static batch: times of the prefill and of every decode step."""

    prefill_s: float
    decode_s: float
    decode_tokens: int  # written after the last prompt had its first token
    device_s: float
    total_s: float
    read_bytes_per_s: float = 0.0  # the bandwidth just before and after, averaged


class StaticBench:
    """Runs static batches on one model. Prompts are seeded random ids, so that no prefix is ever cached by accident.

    loaded: where the model came with its words and its folder, which drafters are found by.
    """

    def __init__(
        self, model: Model, *, name: str, load_s: float, config: EngineConfig, loaded: LoadedModel | None = None
    ) -> None:
        self._model = model
        self._loaded = loaded
        self._name = name
        self._load_s = load_s
        self._config = config
        self._clock: Clock = MonotonicClock()
        self._random = random.Random(config.seed)
        self._cost = CostView(model)

    def run(
        self,
        *,
        prompt_tokens: Sequence[int],
        batches: Sequence[int],
        new_tokens: int,
        repeats: int,
        progress: Progress,
        behind_tokens: Sequence[int] = (0,),
    ) -> BenchReport:
        """Measure every prompt length at every batch size, behind every number of tokens (whole blocks, else ConfigError)."""
        longest, most = max(behind_tokens) + max(prompt_tokens) + new_tokens, self._model.spec.max_context_tokens
        if longest > most:
            raise ConfigError(
                f"the longest point has {longest} tokens, prompt and answer; {most} is the most this model has positions for",
                hint="ask for fewer: --prompt-tokens, --new-tokens, --behind",
            )
        block_tokens = self._config.block_tokens
        for behind in behind_tokens:
            if behind % block_tokens:
                nearest = behind // block_tokens * block_tokens
                raise ConfigError(
                    f"{behind} tokens behind a prompt are no whole blocks of {block_tokens}", hint=f"{nearest} would be"
                )
        ceilings = machine_ceilings(self._model)
        points: list[PhasePoint] = []
        for behind, length, batch in itertools.product(behind_tokens, prompt_tokens, batches):
            progress(f"prompt {length} x batch {batch}" + (f" behind {behind}" if behind else ""))
            # arithmetic does not change its speed, but a measurement of it may be disturbed: keep the best
            flops_per_s, of_attention = arithmetic_ceilings(self._model)
            if flops_per_s > ceilings.flops_per_s:
                ceilings = replace(ceilings, flops_per_s=flops_per_s, attention_flops_per_s=of_attention)
            points += self._point(behind, length, batch, new_tokens, repeats, ceilings)
        return BenchReport(
            model=self._name,
            backend=self._model.backend_name,
            weights=self._model.weights_format,
            kv=self._model.kv_format,
            threads=self._model.threads,
            ceilings=ceilings,
            results=tuple(points),
            load_s=self._load_s,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def _point(
        self, behind: int, length: int, batch: int, new_tokens: int, repeats: int, ceilings: Ceilings
    ) -> list[PhasePoint]:
        context = behind + length + new_tokens
        config = replace(
            self._config,
            max_context_tokens=max(context, 2),
            scheduler=replace(
                self._config.scheduler,
                max_running_sequences=batch,
                # one step reads all prompts where memory allows, so that the phases stay apart
                max_step_tokens=max(self._config.scheduler.max_step_tokens, min(batch * length, MAX_STEP_TOKENS)),
                enable_prefix_cache=False,
            ),
        )
        machinery = make_machinery(self._model, config, clock=self._clock, loaded=self._loaded)
        static = _StaticBatch(machinery.core, machinery.executor, self._clock)
        if behind:
            static.read_sample(self._prompts(min(behind, SAMPLE_TOKENS), 1)[0])
        static.run(
            self._prompts(behind + length, batch), min(new_tokens, 4), behind
        )  # warms caches and grows the buffers
        runs, around = [], [read_ceiling(self._model)]
        for _ in range(repeats):
            run = static.run(self._prompts(behind + length, batch), new_tokens, behind)
            around.append(read_ceiling(self._model))
            # memory changes speed within seconds on shared machines, so each run has a ceiling of its own
            run.read_bytes_per_s = 0.5 * (around[-2] + around[-1])
            runs.append(run)
        prefill = StepShape.prefill(batch=batch, new_tokens=length, cached_tokens=behind)
        points = [self._phase_point(Phase.PREFILL, behind, length, batch, 1, runs, [prefill], ceilings)]
        if new_tokens > 1:
            decode = [StepShape.decode(batch=batch, context_tokens=behind + length + i) for i in range(1, new_tokens)]
            points.append(self._phase_point(Phase.DECODE, behind, length, batch, new_tokens, runs, decode, ceilings))
        gc.collect()  # the pool of this point goes before the next one's comes
        return points

    def _phase_point(
        self,
        phase: Phase,
        behind: int,
        length: int,
        batch: int,
        new_tokens: int,
        runs: list[_Run],
        work: list[StepShape],
        ceilings: Ceilings,
    ) -> PhasePoint:
        is_prefill = phase is Phase.PREFILL
        times_s = [run.prefill_s if is_prefill else run.decode_s for run in runs]
        tokens = [batch * length if is_prefill else run.decode_tokens for run in runs]
        read_bytes_per_s = statistics.median(run.read_bytes_per_s for run in runs)
        parts = [self._cost.parts_s(step, ceilings.reading(read_bytes_per_s)) for step in work]
        read_s, compute_s = (sum(seconds) for seconds in zip(*parts, strict=True))
        bounds_s = [
            sum(self._cost.bound_s(step, ceilings.reading(run.read_bytes_per_s)) for step in work) for run in runs
        ]
        return PhasePoint(
            phase=phase.value,
            batch=batch,
            prompt_tokens=length,
            behind_tokens=behind,
            context_tokens=behind + length + (0 if is_prefill else new_tokens // 2),
            new_tokens=new_tokens,
            tokens_per_s=Spread.of([n / time_s for n, time_s in zip(tokens, times_s, strict=True)]),
            fraction_of_ceiling=statistics.median(b_s / time_s for b_s, time_s in zip(bounds_s, times_s, strict=True)),
            time_s=Spread.of(times_s),
            bound_s=statistics.median(bounds_s),
            bound=ceilings.roof if read_s >= compute_s else "arithmetic",
            read_bytes_per_s=read_bytes_per_s,
            host_fraction=statistics.median(1.0 - run.device_s / run.total_s for run in runs),
        )

    def _prompts(self, length: int, batch: int) -> list[tuple[int, ...]]:
        vocab = self._model.spec.vocab_size
        return [tuple(self._random.randrange(vocab) for _ in range(length)) for _ in range(batch)]


class _StaticBatch:
    """Submits a batch at once and steps until all have finished."""

    def __init__(self, core: EngineCore, executor: ModelExecutor, clock: Clock) -> None:
        self._core = core
        self._executor = executor
        self._clock = clock
        self._n = 0
        self._sample: KVPayload | None = None

    def read_sample(self, prompt: tuple[int, ...]) -> None:
        """Read one prompt of whole blocks, for what `run` takes in behind its own."""
        stepper = Stepper(self._core, self._executor, self._clock, fold=lambda _: None)
        request = self._request(prompt, 2, self._clock.now_s())
        self._core.submit_prefill(request)
        while self._core.blocks_of(request.request_id)[1] < len(prompt):
            stepper.step()
        self._sample = self._executor.export_blocks(self._core.blocks_of(request.request_id)[0])
        self._core.sent(request.request_id)

    def run(self, prompts: list[tuple[int, ...]], new_tokens: int, behind: int = 0) -> _Run:
        """The first `behind` tokens of each prompt are not read: their keys and values are the sample's, again and again."""
        events: list[Event] = []
        stepper = Stepper(self._core, self._executor, self._clock, fold=events.extend)
        requests = [self._request(prompt, new_tokens, self._clock.now_s()) for prompt in prompts]
        for request in requests if behind else ():
            self._take_in(request, behind)
        begin_s = self._clock.now_s()
        for request in requests:
            if behind:
                prompt_tokens = len(request.prompt_token_ids)
                events.append(
                    ArrivalEvent(request_id=request.request_id, at_s=begin_s, prompt_tokens=prompt_tokens, n=1)
                )
                events += self._core.settle(request.request_id, behind, begin_s, has_state=True)  # whatever lies there
            else:
                stepper.submit(request)
        while stepper.step():
            pass
        end_s = self._clock.now_s()
        book = EventBook()
        book.fold(events)
        times = [record.token_times_s() for record in book.records.values()]
        prefill_end_s = max(times_s[0] for times_s in times)
        return _Run(
            prefill_s=prefill_end_s - begin_s,
            decode_s=max(end_s - prefill_end_s, 1e-9),
            decode_tokens=sum(at_s > prefill_end_s for times_s in times for at_s in times_s),
            device_s=book.device_s,
            total_s=end_s - begin_s,
        )

    def _request(self, prompt: tuple[int, ...], new_tokens: int, at_s: float) -> Request:
        self._n += 1
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        return Request(request_id=f"bench-{self._n}", prompt_token_ids=prompt, sampling=sampling, arrival_s=at_s)

    def _take_in(self, request: Request, behind: int) -> None:
        sample = self._sample
        assert sample is not None
        if self._core.reserve(HandOff.of(request)) is None:
            raise CapacityError(
                f"the KV pool has no room for the {behind} tokens behind every prompt", hint="lower --batch"
            )
        block_ids = self._core.blocks_of(request.request_id)[0][: behind // sample.header.block_tokens]
        for first in range(0, len(block_ids), len(sample.checksums)):
            some = block_ids[first : first + len(sample.checksums)]
            part = replace(sample, checksums=sample.checksums[: len(some)], data_NB=sample.data_NB[: len(some)])
            self._executor.import_blocks(some, part)
