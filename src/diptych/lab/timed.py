"""What a calibration times, on a CPU and on a GPU: steps of a random model in turns, and an engine that climbs a ladder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from diptych.compute.ceilings import memory_ceiling
from diptych.compute.runner import Model, random_model
from diptych.cost.calibrated import CalibratedModel
from diptych.engine.cost_view import CostView
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.lab.fitted import TimedStep
from diptych.lab.ladder import Ladder
from diptych.lab.probe import StepProbe
from diptych.lab.rounds import Effort, measure

Progress = Callable[[str], None]


def timed_steps(
    model: Model,
    steps: Sequence[StepShape],
    effort: Effort,
    *,
    read_bytes_per_s: float | None = None,
    behind: StepShape | None = None,
    warm_ups: int = 0,
    takes_busy: bool,
) -> list[TimedStep]:
    """The steps in turns, so that a slow spell of the machine does not bend the fit at some sizes and not at others.

    read_bytes_per_s: of the memory; None: read in the same turns. behind: a step that runs before each prompt.
    warm_ups: times that each step runs before any counts.
    """
    longest = max(sum((s.start_pos + s.new_tokens + 32) * s.count for s in work.shapes) for work in steps)
    probe, view = StepProbe(model, max_tokens=longest), CostView(model)
    samplers = [probe.usual(work, behind=None if work.phase is Phase.DECODE else behind) for work in steps]
    for work in steps:
        step = probe.step(work)
        for _ in range(warm_ups):
            step()
    if read_bytes_per_s is None:
        samplers.append(lambda: 1.0 / memory_ceiling(model))
    rounds = measure(samplers, effort)
    if rounds.is_disturbed and not takes_busy:
        raise ConfigError(
            f"other programs used {rounds.others:.0%} of the cores while this machine was measured; nothing was written",
            hint="stop them and run it again, or keep such a profile with --busy",
        )
    rate = read_bytes_per_s or 1.0 / rounds.point(len(steps)).value
    return [
        TimedStep(view=view, work=work, measured=rounds.point(i), read_bytes_per_s=rate) for i, work in enumerate(steps)
    ]


@contextmanager
def open_ladder(
    shape: Mapping[str, Any], config: ComputeConfig, profile: Mapping[str, Any]
) -> Iterator[tuple[Ladder, CalibratedModel]]:
    """An engine on a random model, and the profile's prices of it."""
    with closing(random_model(shape, config, seed=0)) as model:
        view = CostView(model)
        predictor = CalibratedModel.from_profile(profile, view.spec, view.quant, kv=view.kv)
        yield Ladder(model, predictor), predictor
