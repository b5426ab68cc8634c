"""The cost room's old name of a step's shape (`diptych.ground.shape`)."""

from diptych.ground.shape import ChunkShape
from diptych.ground.shape import StepShape as Workload

__all__ = ["ChunkShape", "Workload"]
