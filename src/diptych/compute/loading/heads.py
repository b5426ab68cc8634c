"""What the loaders of a layer's attention share: the handles that they give, and what is cut of its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch

from diptych.compute.loading.layer_tensors import LayerTensors
from diptych.compute.loading.views import PickedTensor, ReorderedTensor, ScaledTensor
from diptych.compute.ops.contract import (
    Experts,
    Heads,
    Linear,
    LinearParts,
    NormParts,
    Table,
    Vector,
    WeightTensor,
)
from diptych.compute.ops.contract_parts import Split
from diptych.compute.walk.part_weights import LatentWeights, SelectiveWeights, StateWeights, UnitWeights
from diptych.models.gates import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads(Generic[Vector, Linear, Heads]):
    """The handles of a layer's attention, as `LayerWeights` has them."""

    handle: Heads
    qkv: (
        Linear
        | LatentWeights[Vector, Linear]
        | StateWeights[Vector, Linear]
        | SelectiveWeights[Vector, Linear, Heads]
        | UnitWeights[Linear, Heads]
    )
    o: Linear
    gate: Linear | None = None
    difference: float | None = None
    o_norm: Vector | None = None
    o_norms: int = 1
    gates_normed: bool = False
    has_index: bool = False


class HeadTensors(LayerTensors[Table, Vector, Linear, Heads, Experts]):
    """What is common to layers of any kind of attention."""

    def gate(self, parts: LinearParts, activation: Activation) -> Linear:
        """What the heads are multiplied by, behind an activation."""
        return self.loader.gate(parts, activation, role=self.role(Split.OUTPUTS, attention_gate=parts.n_outputs))

    def sinks(self, root: str) -> WeightTensor | None:
        """A number of each head that its scores compete with, where the layer has them. root: where its attention lies."""
        attention = self.parts.attention
        if not attention.has_sinks:
            return None
        return self.source.tensor(f"{root}{self.spelt(root, self.names.sinks)}", attention.n_heads)

    def norm_over(self, name: str, width: int, scale: float = 1.0) -> NormParts:
        """A norm without a bias over some width, whose weight is multiplied by scale."""
        weight = self.source.tensor(f"{name}.weight", width)
        return NormParts(weight=weight if scale == 1.0 else ScaledTensor(weight, scale))


def picked(parts: LinearParts, rows: torch.Tensor) -> LinearParts:
    """Some rows of each tensor."""
    weights, biases = (tuple(PickedTensor(one, rows) for one in some) for some in (parts.weights, parts.biases))
    return LinearParts(weights=weights, biases=biases)


def stacked(*parts: LinearParts) -> LinearParts:
    """One below the other."""
    return LinearParts(
        weights=tuple(one for part in parts for one in part.weights),
        biases=tuple(one for part in parts for one in part.biases),
    )


def reordered(parts: LinearParts, order: torch.Tensor) -> LinearParts:
    """Each tensor's rows in that order, within each head."""
    weights, biases = (tuple(ReorderedTensor(one, order) for one in some) for some in (parts.weights, parts.biases))
    return LinearParts(weights=weights, biases=biases)
