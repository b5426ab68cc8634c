"""Where the time of a served load went, beside what the cost model says of each part.

    parts = parts_of(run, predict_s, host_s)
    parts.phases[Phase.DECODE].kernels.error

A run's wall time is its steps (begin to commit), what the host does between two of them, and the time without work. The
kernels' part of a step is what the executor counts; all else while there is work is the host's: the scheduler, the
executor's tables, the sampler, the commit, the coming of requests, and, in a closed loop, the clients, who live on the same
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab.served import WITH_PROMPTS, RequestsHost, Served

Seconds = Callable[[StepShape], float]


@dataclass(slots=True)
class Part:
    """Seconds over all steps."""

    measured_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, measured_s: float, predicted_s: float) -> None:
        """One step's."""
        self.measured_s += measured_s
        self.predicted_s += predicted_s

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0 if self.measured_s else 0.0


@dataclass(slots=True)
class PhaseParts:
    """Of all steps of a phase. Prompts make a step one of prefill, with decode beside them or without."""

    steps: int = 0
    kernels: Part = field(default_factory=Part)
    host: Part = field(default_factory=Part)

    @property
    def total(self) -> Part:
        """Both parts."""
        whole = Part()
        for one in (self.kernels, self.host):
            whole.add(one.measured_s, one.predicted_s)
        return whole


@dataclass(slots=True)
class Parts:
    """Of one run, or of several added up."""

    phases: dict[Phase, PhaseParts] = field(default_factory=lambda: {phase: PhaseParts() for phase in Phase})

    def add(self, other: Parts) -> None:
        """Another run's steps."""
        for phase, mine in self.phases.items():
            theirs = other.phases[phase]
            mine.steps += theirs.steps
            mine.kernels.add(theirs.kernels.measured_s, theirs.kernels.predicted_s)
            mine.host.add(theirs.host.measured_s, theirs.host.predicted_s)

    @property
    def total(self) -> Part:
        """All of it: the time in which there was work."""
        whole = Part()
        for one in self.phases.values():
            whole.add(one.total.measured_s, one.total.predicted_s)
        return whole


def parts_of(run: Served, predict_s: Seconds, host_s: Seconds, requests_s: RequestsHost = WITH_PROMPTS) -> Parts:
    """What its steps took, by phase and part. What a request costs when it comes is its prompt's, whenever that is, and its end
    decode's. host_s: the host's part of predict_s. requests_s: what requests cost beside it.
    """
    parts = Parts()
    prefill, decode = (parts.phases[phase].host for phase in (Phase.PREFILL, Phase.DECODE))
    for step, kept_s, coming_s in zip(run.steps, run.kept_s(), run.coming_s, strict=True):
        mine, predicted_host_s = parts.phases[step.shape.phase], host_s(step.shape)
        mine.steps += 1
        mine.kernels.add(step.device_s, predict_s(step.shape) - predicted_host_s)
        mine.host.add(kept_s - step.device_s, predicted_host_s)
        prefill.add(coming_s, 0.0)
    prefill.add(0.0, run.n_requests * requests_s.come_s)
    decode.add(0.0, run.n_requests * requests_s.end_s)
    return parts
