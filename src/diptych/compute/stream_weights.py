"""The handles of what some decoders have beside attention and MLP: streams, branches, embeddings of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diptych.compute.ops.contract import Linear, Table, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWeights(Generic[Vector, Linear]):
    """A low-rank branch beside attention."""

    left: Linear
    right: Linear
    norm: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingWeights(Generic[Vector, Linear]):
    """How a layer mixes streams, by what is routed. output: weighs what the gate of the layer's embedding reads."""

    norm: Vector
    router: Linear
    predict: Vector
    correct: Vector
    output: Vector | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection(Generic[Vector]):
    """A hyper-connection of all streams, as `StreamOps.connections` takes it."""

    weight: Vector
    scale: Vector
    base: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEmbedding(Generic[Vector, Linear]):
    """What becomes of a layer's own embedding: gated by the stream, projected, normed."""

    gate: Linear
    projection: Linear
    norm: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsWeights(Generic[Table, Vector, Linear]):
    """Embeddings of all layers: a table, and what the beginning of the stream adds."""

    table: Table
    projection: Linear
    norm: Vector
