"""The loaded model as the cost model sees it: its shape, and the bytes and dtype its weights really have here.

Joins `cost` (arithmetic) with `compute` (what was packed). Used by the phase report, the benchmarks and the lab.
"""

from __future__ import annotations

from dataclasses import replace

from diptych.compute.ceilings import Ceilings
from diptych.compute.runner import Model
from diptych.cost.components import cost_of
from diptych.cost.phase_cost import ATTENTION, PhaseCost
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

    def bound_s(self, work: StepShape, ceilings: Ceilings) -> float:
        """What the two ceilings allow for one step: the longer of bytes over bandwidth and operations over peak."""
        return max(self.parts_s(work, ceilings))

    def parts_s(self, work: StepShape, ceilings: Ceilings) -> tuple[float, float]:
        """Seconds of a step's bytes, and of its operations: attention's at the peak of the dtype that it multiplies in."""
        cost = self.cost(work)
        others = sum(part.flops for part in cost.components if part.name not in ATTENTION)
        attention_s = (cost.flops - others) / (ceilings.attention_flops_per_s or ceilings.flops_per_s)
        return cost.bytes / ceilings.roof_bytes_per_s, others / ceilings.flops_per_s + attention_s
