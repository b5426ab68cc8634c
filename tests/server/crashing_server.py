"""`diptych` with a device that fails at step CRASH_AT_STEP: what a broken kernel does to a server. For test_trouble."""

from __future__ import annotations

import os

from diptych.cli import main
from diptych.engine.executor import ModelExecutor
from diptych.ground.step import StepPlan, StepResult

_execute = ModelExecutor.execute


def execute(self: ModelExecutor, plan: StepPlan) -> StepResult:
    if plan.step_id >= int(os.environ["CRASH_AT_STEP"]):
        raise RuntimeError("the device fell over")
    return _execute(self, plan)


ModelExecutor.execute = execute  # type: ignore[method-assign]
main()
