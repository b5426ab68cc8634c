"""Recorded runs: every call to an `EngineCore` and the plans it gave, as JSON lines that replay to identical plans.

    recorder = Recorder(core)         # then call recorder.submit, begin_step, ... in core's place
    differences = replay(recorder.lines(), predict_s=...)   # [] when every plan is the same

A learned or measured `predict_s` must answer in the replay as it did in the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from diptych.control.loop import EngineCore
from diptych.control.scheduler import Predict
from diptych.control.speculation import Depths
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import EngineError
from diptych.ground.events import Event
from diptych.ground.phase import FinishReason, Phase
from diptych.ground.request import (
    AdapterRef,
    FreeReasoning,
    Pool,
    Pooling,
    Request,
    SamplingParams,
    Segment,
    StructuredSpec,
)
from diptych.ground.step import BlockCopy, Chunk, ChunkResult, SequenceStart, StepPlan, StepResult, TokenLogprobs

_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        AdapterRef, BlockConfig, BlockCopy, Chunk, ChunkResult, FinishReason, FreeReasoning, Phase, Pool, Pooling, Request,
        SamplingParams, SchedulerConfig, Segment, SequenceStart, StepPlan, StepResult, StructuredSpec, TokenLogprobs,
    )
}  # fmt: skip
# most of what is written: nothing else is asked of it
_PLAIN = frozenset((int, float, str, bool, type(None)))


@cache
def _names(cls: type) -> tuple[str, ...] | None:
    """The fields of a class that are written; None of what is neither a dataclass nor a named tuple of `ground`."""
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls) if field.init)
    return Chunk._fields if cls is Chunk else None


def encode(value: object) -> Any:
    """A dataclass or named tuple of `ground` as JSON values: {"type": name, field: value}; tuples become lists.

    What follows from other fields (a plan's shape) is not written.
    """
    cls: Any = type(value)
    if cls in _PLAIN:
        return value
    names = _names(cls)
    if names is not None:
        return {"type": cls.__name__} | {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return {"type": type(value).__name__, "value": value.value}
    if isinstance(value, EngineError):
        return {"type": "error", "message": value.message}
    if isinstance(value, bytes):
        return {"type": "bytes", "hex": value.hex()}
    if isinstance(value, Mapping):
        return {"type": "map", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """The inverse of `encode`; only the named types of `ground` can be made."""
    if isinstance(value, list):
        return tuple([item if type(item) in _PLAIN else decode(item) for item in value])
    if not isinstance(value, dict):
        return value
    kind = value["type"]
    if kind == "error":
        return EngineError(value["message"])
    if kind == "bytes":
        return bytes.fromhex(value["hex"])
    if kind == "map":
        return {decode(k): decode(v) for k, v in value["items"]}
    cls = _TYPES[kind]
    if issubclass(cls, Enum):
        return cls(value["value"])
    return cls(**{name: decode(item) for name, item in value.items() if name != "type"})


class Recorder:
    """Stands before an `EngineCore` that has not been used yet and keeps every call and every plan.

    What a core takes and gives never changes, so it is kept as it is, and written when somebody asks: a recorded step costs
    a microsecond more than any other, where encoding it would take as long as a small model's step.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._unwritten: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        head = {"config": encode(core.config), "blocks": encode(core.block_config)}
        self._lines = [json.dumps({"core": head | {"model_revision": core.model_revision, "seed": core.seed}})]

    def lines(self) -> list[str]:
        """The recording so far, one JSON object per call."""
        for call, args, kwargs in self._unwritten:
            named = {name: encode(value) for name, value in kwargs.items()}
            self._lines.append(json.dumps({"call": call, "args": encode(args), "kwargs": named}))
        self._unwritten.clear()
        return list(self._lines)

    def submit(self, request: Request) -> list[Event]:
        """As EngineCore.submit; a refused request is recorded too, and that it was."""
        is_refused = True
        try:
            events = self.core.submit(request)
            is_refused = False
        finally:
            self._keep("submit", request, is_refused=is_refused)
        return events

    def cancel(self, request_id: str, now_s: float, *, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """As EngineCore.cancel."""
        self._keep("cancel", request_id, now_s, reason=reason)
        return self.core.cancel(request_id, now_s, reason=reason)

    def finish(
        self, request_id: str, index: int, now_s: float, *, reason: FinishReason, output_tokens: int | None = None
    ) -> list[Event]:
        """As EngineCore.finish."""
        self._keep("finish", request_id, index, now_s, reason=reason, output_tokens=output_tokens)
        return self.core.finish(request_id, index, now_s, reason=reason, output_tokens=output_tokens)

    def abort_step(self, now_s: float, *, error: EngineError) -> list[Event]:
        """As EngineCore.abort_step."""
        self._keep("abort_step", now_s, error=error)
        return self.core.abort_step(now_s, error=error)

    def reset_prefix_cache(self) -> None:
        """As EngineCore.reset_prefix_cache."""
        self._keep("reset_prefix_cache")
        self.core.reset_prefix_cache()

    def begin_step(self, now_s: float) -> tuple[StepPlan | None, list[Event]]:
        """As EngineCore.begin_step; the plan is recorded."""
        plan, events = self.core.begin_step(now_s)
        self._keep("begin_step", now_s, plan=plan)
        return plan, events

    def end_step(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """As EngineCore.end_step; the result is recorded."""
        self._keep("end_step", result, now_s)
        return self.core.end_step(plan, result, now_s)

    def _keep(self, call: str, *args: object, **kwargs: object) -> None:
        self._unwritten.append((call, args, kwargs))


def replay(lines: list[str], *, predict_s: Predict | None = None, depths: Depths | None = None) -> list[str]:
    """Run a recording again on a fresh core; one line of text per plan that differs. depths: fresh, as in the run."""
    head = json.loads(lines[0])["core"]
    core = EngineCore(
        decode(head["config"]),
        decode(head["blocks"]),
        model_revision=head["model_revision"],
        predict_s=predict_s,
        seed=head["seed"],
        depths=depths,
    )
    differences: list[str] = []
    plan: StepPlan | None = None
    for line in lines[1:]:
        entry = json.loads(line)
        call, args = entry["call"], decode(entry["args"])
        kwargs = {name: decode(value) for name, value in entry["kwargs"].items()}
        if call == "begin_step":
            plan, _ = core.begin_step(*args)
            if plan != kwargs["plan"]:
                differences.append(f"recorded {kwargs['plan']}\nreplayed {plan}")
                return differences  # what follows belongs to another plan
        elif call == "end_step":
            assert plan is not None
            core.end_step(plan, *args)
        elif call == "submit":
            try:
                core.submit(*args)
            except EngineError:
                continue  # refused in the run as well, or the plans will differ
        else:
            getattr(core, call)(*args, **kwargs)
    return differences
