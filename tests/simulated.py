"""What tests of simulated services share: people, and a machine whose steps are easily reckoned."""

from __future__ import annotations

from diptych.ground.shape import StepShape
from diptych.sim.load import UsersSpec
from diptych.workload import LengthRange

USERS = UsersSpec(
    n_users=12,
    n_requests=80,
    think_s=2.0,
    turns=4,
    message=LengthRange(low=50, high=300),
    output=LengthRange(low=20, high=90),
    system_tokens=200,
    seed=2,
)


def seconds(shape: StepShape) -> float:
    """10 ms a step and 0.1 ms a row."""
    return 0.01 + 1e-4 * shape.n_tokens
