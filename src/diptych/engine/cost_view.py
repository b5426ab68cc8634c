"""The loaded model as the cost model sees it: its shape, and the bytes and dtype its weights really have here.

Joins `cost` (arithmetic) with `compute` (what was packed). Used by the phase report, the benchmarks and the lab.
"""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.runner import Model
from diptych.cost.components import PhaseCost, cost_of
from diptych.cost.tables import kv_spec
from diptych.ground.formats import engine_quant, mean_bytes, mix_of
from diptych.ground.shape import StepShape


class CostView:
    """FLOPs, bytes and the roofline time of any work on one loaded model."""

    def __init__(self, model: Model) -> None:
        self.spec = model.spec
        quant = engine_quant(model.weights_format, model.head_format)
        experts = model.expert_formats
        others = {name: n - experts.get(name, 0) for name, n in model.formats.items() if n > experts.get(name, 0)}
        self.quant = replace(
            quant,
            weight_bytes=mean_bytes(others or model.formats),
            expert_weight_bytes=mean_bytes(experts) if experts else None,
            mix=mix_of(others, usual=model.weights_format),
            expert_mix=mix_of(experts, usual=model.weights_format),
        )
        self.kv = kv_spec(model.kv_format)

    def cost(self, work: StepShape) -> PhaseCost:
        """Components of one step, latent attention in the one form that the engine has."""
        return cost_of(self.spec, work, quant=self.quant, kv=self.kv, is_ours=True)

    def bound_s(self, work: StepShape, read_bytes_per_s: float, flops_per_s: float) -> float:
        """What the two ceilings allow for one step: the longer of bytes over bandwidth and operations over peak.

        flops_per_s is of the linear layers' dtype. It errs on the side of a shorter time: with int8 weights, attention
        is charged at the int8 rate too.
        """
        cost = self.cost(work)
        return max(cost.bytes / read_bytes_per_s, cost.flops / flops_per_s)
