"""A recorded run (`control/recording.py`): its requests as a load, and the run itself once more, decision by decision.

load = recorded_load(Path("run.jsonl"))            # the same requests at the same times, for any service
assert rerun(recorder.lines(), predict_s=p) == []  # the simulator with the run's own step times plans what the run did
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

from diptych.control.recording import decode
from diptych.control.scheduler import Predict
from diptych.ground.bounds import Bound, shown
from diptych.ground.clock import VirtualClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError, EngineError
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.ground.step import StepPlan, StepResult
from diptych.metrics import Limits
from diptych.sim.cluster import Cluster, Group
from diptych.sim.counterfactual import Drafted, Machine, Minutes, Past, Seen, times_of
from diptych.sim.drafts import RecordedDrafts, Verified
from diptych.sim.load import Due
from diptych.sim.tally import Tally

# a request is put in line this long before the step that saw it first: far less than any step, far more than rounding
_BEFORE_S = 1e-9
_INSTANT = Bound(float, -1e12, 1e12, "seconds")
Kind = TypeVar("Kind")


@dataclass(slots=True)
class Recorded:
    """What a recording holds: requests with the beginning of the step that saw them first, plans, results, beginnings."""

    config: SchedulerConfig
    blocks: BlockConfig
    seed: int
    requests: list[Due] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)  # of every call of begin_step
    plans: list[tuple[int, StepPlan]] = field(default_factory=list)  # with the place of its beginning
    results: list[StepResult] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    other_calls: set[str] = field(default_factory=set)
    _unseen: list[Request] = field(default_factory=list)
    _are_refused: list[bool | None] = field(default_factory=list)  # of all submitted; None in files of earlier versions

    def take(self, entry: dict[str, Any]) -> None:
        """One line after the head."""
        call, args = entry["call"], decode(entry["args"])
        if call == "submit":
            self._unseen.append(_is(Request, args[0]))
            self._are_refused.append(entry["kwargs"].get("is_refused"))
        elif call == "begin_step":
            begin_s = args[0]
            _INSTANT.take("the step's begin", begin_s, ConfigError)
            self.requests += [(begin_s - _BEFORE_S, request) for request in self._unseen]
            self._unseen = []
            plan = decode(entry["kwargs"]["plan"])
            if plan is not None and self._is_open:
                raise ValueError(f"step {plan.step_id} begins before the one before it ended")
            if plan is not None:
                self.plans.append((len(self.begins_s), _is(StepPlan, plan)))
            self.begins_s.append(begin_s)
        elif call == "end_step":
            result = _is(StepResult, args[0])
            plan = self.plans[-1][1] if self._is_open else None
            mine = [one.seq_id for one in result.results]
            if plan is None or plan.step_id != result.step_id or [one.seq_id for one in plan.chunks] != mine:
                raise ValueError(f"the result of step {result.step_id} follows no plan of it")
            _INSTANT.take("the step's end", args[1], ConfigError)
            self.results.append(result)
            self.ends_s.append(args[1])
        else:
            if call == "abort_step" and self._is_open:
                self.plans.pop()  # what it planned did not happen
            self.other_calls.add(str(call))

    @property
    def _is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return len(self.plans) > len(self.results)

    def sequences(self) -> list[list[int]]:
        """The numbers of each request's sequences; none where it was refused or never began.

        A sequence is known by its number alone: every choice of a request that was taken has the next one. Where a file does
        not say who was refused, numbers rise in the order of submission, and a start tells its prompt.
        """
        started = {one.seq_id: one.prompt_token_ids for _, plan in self.plans for one in plan.starts}
        if None in self._are_refused:
            return self._by_prompts(sorted(started.items()))
        found, first = [], 0
        for (_, request), is_refused in zip(self.requests, self._are_refused, strict=False):
            last = first if is_refused else first + request.sampling.n
            found.append([number for number in range(first, last) if number in started])
            first = last
        return found

    def _by_prompts(self, started: SequenceOf[tuple[int, SequenceOf[int]]]) -> list[list[int]]:
        found, place = [], 0
        for _, request in self.requests:
            mine, last = [], place + request.sampling.n
            while place < min(last, len(started)) and started[place][1] == request.prompt_token_ids:
                mine.append(started[place][0])
                place += 1
            found.append(mine)
        return found

    def verified(self) -> dict[int, Verified]:
        """Of each sequence what it wrote, and what steps verified behind how many tokens of it."""
        found: dict[int, tuple[list[int], dict[int, SequenceOf[int]]]] = {}
        for (_, plan), result in zip(self.plans, self.results, strict=False):
            for chunk, one in zip(plan.chunks, result.results, strict=True):
                outputs, guesses = found.setdefault(one.seq_id, ([], {}))
                if chunk.draft_token_ids:
                    guesses[len(outputs)] = chunk.draft_token_ids
                outputs += one.token_ids
        return {seq_id: Verified(*one) for seq_id, one in found.items()}

    def drafts(self) -> RecordedDrafts:
        """What was verified, for the same requests."""
        made, verified = RecordedDrafts(), self.verified()
        for (_, request), sequences in zip(self.requests, self.sequences(), strict=True):
            made.expect(request.request_id, [verified[one] for one in sequences if one in verified])
        return made

    def output_tokens(self) -> list[int]:
        """Of each request its longest choice, at least 1."""
        written = {seq_id: len(one.outputs) for seq_id, one in self.verified().items()}
        return [max((1, *(written.get(one, 0) for one in sequences))) for sequences in self.sequences()]


def read_recording(lines: Iterator[str], *, name: str = "the recording") -> Recorded:
    """ConfigError with the line for one that cannot be read."""
    number = 1
    try:
        head = json.loads(next(lines))["core"]
        config, blocks = _is(SchedulerConfig, decode(head["config"])), _is(BlockConfig, decode(head["blocks"]))
        found = Recorded(config=config, blocks=blocks, seed=_is(int, head["seed"]))
        for line in lines:
            number += 1
            found.take(json.loads(line))
    except (
        ValueError,
        TypeError,
        KeyError,
        LookupError,
        AttributeError,
        StopIteration,
        RecursionError,
        EngineError,
    ) as error:
        raise unreadable(name, number, error) from None
    return found


def _is(kind: type[Kind], value: object) -> Kind:
    """The value. ValueError where it is another."""
    if not isinstance(value, kind):
        raise ValueError(f"it has {shown(value)} in the place of a {kind.__name__}")
    return value


def unreadable(name: str, number: int, error: Exception) -> ConfigError:
    """What is wrong with a line of a recording, in words; `error` is what reading it raised."""
    if isinstance(error, StopIteration):
        return ConfigError(f"{name} is empty; a recording begins with a line that says which engine it is of")
    if isinstance(error, json.JSONDecodeError):
        words = "it is not JSON"
    else:
        words = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"{name} line {number} cannot be read: {words}")


def is_recording(path: Path) -> bool:
    """Whether this file begins as a recording does. ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b'{"core"')
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None


class RecordedLoad:
    """Its requests; each writes as many tokens as it did. Tokens are the real ones, so prefixes are as they were."""

    shares_prefixes = True

    def __init__(self, requests: list[Due]) -> None:
        self._requests = requests
        self.n_requests = self.n_parts = len(requests)

    def part(self, number: int, of: int) -> RecordedLoad:
        """Every so-manieth of them."""
        return RecordedLoad(self._requests[number::of])

    def start(self) -> Iterator[Due]:
        """All of them."""
        return iter(self._requests)

    def histories(self) -> Iterator[tuple[int, ...]]:
        """None: the recording begins with an empty cache."""
        return iter(())

    def after(self, request: Request, at_s: float, *, output_tokens: int) -> Due | None:
        """Nothing: what followed is in the recording with its time."""
        return None


def recorded_load(path: Path, *, limit: int | None = None, speed: float = 1.0) -> RecordedLoad:
    """The requests of a recording in order of arrival, the first at 0 s. ConfigError for a damaged or empty one.

    One that was cancelled or refused comes too and writes what it wrote, one token at least.
    """
    with path.open(encoding="utf-8") as file:
        recorded = read_recording(iter(file), name=path.name)
    known = zip(recorded.requests, recorded.output_tokens(), strict=True)
    pairs = sorted(known, key=lambda pair: pair[0][1].arrival_s)
    if not pairs:
        raise ConfigError(f"{path.name} has 0 requests; a trace needs at least 1")
    first_s = pairs[0][0][1].arrival_s
    requests = []
    for number, ((_, request), tokens) in enumerate(islice(pairs, limit)):
        at_s = (request.arrival_s - first_s) / speed
        sampling = replace(
            request.sampling, max_tokens=tokens, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=()
        )
        plain = replace(request, request_id=str(number), arrival_s=at_s, sampling=sampling, prediction_token_ids=())
        requests.append((at_s, plain))
    return RecordedLoad(requests)


class _Rerun:
    """An executor that gives each step the result and the time it had, and stops at the first plan that differs."""

    def __init__(self, recorded: Recorded, clock: VirtualClock) -> None:
        self._recorded = recorded
        self._clock = clock
        self._n_steps = 0

    @property
    def n_missing(self) -> int:
        """Recorded steps that were not run."""
        return len(self._recorded.results) - self._n_steps

    def execute(self, plan: StepPlan) -> StepResult:
        """The recorded result. Raises ConfigError after a plan that is another: what follows belongs to it."""
        if not self.n_missing:
            raise ConfigError(f"recorded nothing\nsimulated {plan}")
        place, known = self._recorded.plans[self._n_steps]
        if _unasked(plan) != _unasked(known):
            raise ConfigError(f"recorded {known}\nsimulated {plan}")
        result, begins_s = self._recorded.results[self._n_steps], self._recorded.begins_s
        self._n_steps += 1
        if place + 1 < len(begins_s):
            self._clock.advance(max(0.0, begins_s[place + 1] - self._clock.now_s()))
        return result


def _unasked(plan: StepPlan) -> StepPlan:
    """Without what the executor's drafters were asked for: their guesses are the recorded ones, and nobody asks again."""
    if all(chunk.wanted_drafts is None for chunk in plan.chunks):
        return plan
    chunks = tuple(chunk._replace(wanted_drafts=None, drafter=0) for chunk in plan.chunks)
    return replace(plan, chunks=chunks)


def rerun(lines: list[str], *, predict_s: Predict | None = None) -> list[str]:
    """Simulate a recorded run with its own arrivals and step times; one line of text for the first plan that differs.

    predict_s: what its stall budget asked; None where it had none to ask. Drafts are those of the run. ConfigError for
    a run in which requests were ended from outside.
    """
    recorded = read_recording(iter(lines))
    if recorded.other_calls:
        calls = ", ".join(sorted(recorded.other_calls))
        raise ConfigError(
            f"the run has calls of {calls}; only one that served its requests to their end can be simulated"
        )
    group = Group(
        n_engines=1,
        config=recorded.config,
        blocks=recorded.blocks,
        predict_s=predict_s or _at_once,
        drafts=recorded.drafts(),
    )
    cluster = Cluster([group], tally=Tally(Limits()), seed=recorded.seed, leaps=False)
    engine = cluster.members[0].engine
    executor = engine.stepper.executor = _Rerun(recorded, engine.clock)
    try:
        # what a prediction guessed is among the drafts of the run: it is not to guess again beside them
        unguessed = [(at_s, replace(request, prediction_token_ids=())) for at_s, request in recorded.requests]
        cluster.run(RecordedLoad(unguessed))
    except ConfigError as error:
        return [error.message]
    return [f"{executor.n_missing} recorded steps were not simulated"] if executor.n_missing else []


def _at_once(shape: StepShape) -> float:
    """Fits every stall budget, as no prediction does."""
    return 0.0


def _drafted(one: Verified) -> tuple[Drafted, ...]:
    """How many of each guess held, as far as its answer went."""
    outputs = one.outputs
    found = []
    for place, guess in one.guesses.items():
        pairs = zip(guess, outputs[place:], strict=False)
        found.append(Drafted(place, len(guess), sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))))
    return tuple(found)


def minutes_of(lines: Iterator[str], *, name: str = "the recording", machine: Machine | None = None) -> Minutes:
    """A recording as the minutes that `sim.counterfactual` runs again. ConfigError with the line for one that cannot be read.

    A request counts as over at its last token.
    """
    recorded = read_recording(lines, name=name)
    steps: list[tuple[float, float, StepShape]] = []
    chunks: dict[int, tuple[float, int]] = {}  # of each sequence: its first chunk's instant and place
    tokens: dict[int, list[tuple[float, int]]] = {}
    for (place, plan), result, end_s in zip(recorded.plans, recorded.results, recorded.ends_s, strict=False):
        begin_s = recorded.begins_s[place]
        steps.append((begin_s, end_s, plan.shape))
        for chunk in plan.chunks:
            chunks.setdefault(chunk.seq_id, (begin_s, chunk.start_pos))
        for one in result.results:
            tokens.setdefault(one.seq_id, []).extend((end_s, token_id) for token_id in one.token_ids)
    pasts, verified = [], recorded.verified()
    for (_, request), sequences in zip(recorded.requests, recorded.sequences(), strict=True):
        if not sequences:
            continue  # refused, or never begun
        begin_s, cached = chunks.get(sequences[0], (request.arrival_s, 0))
        written = [tokens.get(sequence, []) for sequence in sequences]
        ends_s = [one[-1][0] for one in written if one]
        first_s = min((one[0][0] for one in written if one), default=None)
        gaps = [(one[-1][0] - one[0][0], len(one) - 1) for one in written if len(one) > 1]
        seen = Seen(
            queue_s=begin_s - request.arrival_s,
            prefill_s=(begin_s if first_s is None else first_s) - begin_s,
            ttft_s=None if first_s is None else first_s - request.arrival_s,
            tpot_s=sum(time_s for time_s, _ in gaps) / sum(n for _, n in gaps) if gaps else None,
        )
        outputs = tuple(tuple(token_id for _, token_id in one) for one in written)
        over_s = max(ends_s, default=None)
        pasts.append(
            Past(
                request=request,
                came_s=request.arrival_s,
                outputs=outputs,
                cached_tokens=cached,
                end_s=over_s,
                seen=seen,
                drafts=tuple(_drafted(verified[one]) if one in verified else () for one in sequences),
            )
        )
    return Minutes(
        config=recorded.config,
        blocks=recorded.blocks,
        requests=tuple(sorted(pasts, key=lambda past: past.request.arrival_s)),
        steps=times_of(steps),
        machine=machine,
        seed=recorded.seed,
    )
