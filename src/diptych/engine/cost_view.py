"""The loaded model as the cost model sees it: its shape, and the bytes and dtype its weights really have here.

Joins `cost` (arithmetic) with `compute` (what was packed). Used by the phase report, the benchmarks and the lab.
"""

from __future__ import annotations

from diptych.compute.runner import Model
from diptych.cost.components import PhaseCost, cost_of
from diptych.cost.tables import kv_spec
from diptych.cost.workload import Workload
from diptych.ground.specs import QuantSpec

# bytes per parameter and dtype of the multiplication, by weight format; int4: a unit and a zero of 8 bits per 64
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.53125}
COMPUTE_DTYPE = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}


def quant_of(model: Model) -> QuantSpec:
    """How this model's weights are stored and multiplied on its backend."""
    fmt = model.weights_format
    return QuantSpec(
        name=fmt,
        weight_bytes=WEIGHT_BYTES[fmt],
        head_weight_bytes=WEIGHT_BYTES[model.head_format],
        compute=COMPUTE_DTYPE[fmt],
        attention_compute="fp32" if fmt == "fp32" else "bf16",
    )


class CostView:
    """FLOPs, bytes and the roofline time of any work on one loaded model."""

    def __init__(self, model: Model) -> None:
        self.spec = model.spec
        self.quant = quant_of(model)
        self.kv = kv_spec(model.kv_format)

    def cost(self, work: Workload) -> PhaseCost:
        """Components of one step."""
        return cost_of(self.spec, work, quant=self.quant, kv=self.kv)

    def bound_s(self, work: Workload, read_bytes_per_s: float, flops_per_s: float) -> float:
        """What the two ceilings allow for one step: the longer of bytes over bandwidth and operations over peak.

        flops_per_s is of the linear layers' dtype. It errs on the side of a shorter time: with int8 weights, attention
        is charged at the int8 rate too.
        """
        cost = self.cost(work)
        return max(cost.bytes / read_bytes_per_s, cost.flops / flops_per_s)
