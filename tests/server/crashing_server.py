"""`diptych` with a device that fails at step CRASH_AT_STEP: what a broken kernel does to a server.

Steps count from where CRASH_WITH sequences (1) decode in one, so that no stream is still on its way.
"""

from __future__ import annotations

import os

from diptych.cli import main
from diptych.engine.executor import ModelExecutor
from diptych.ground.phase import Phase
from diptych.ground.step import StepPlan, StepResult

AT_STEP, WITH = int(os.environ["CRASH_AT_STEP"]), int(os.environ.get("CRASH_WITH", "1"))
_execute = ModelExecutor.execute
_first: list[int] = []


def execute(self: ModelExecutor, plan: StepPlan) -> StepResult:
    if not _first and sum(chunk.phase is Phase.DECODE for chunk in plan.chunks) >= WITH:
        _first.append(plan.step_id)
    if _first and plan.step_id >= _first[0] + AT_STEP:
        raise RuntimeError("the device fell over")
    return _execute(self, plan)


ModelExecutor.execute = execute  # type: ignore[method-assign]
main()
