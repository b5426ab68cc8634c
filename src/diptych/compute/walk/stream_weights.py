"""The handles of what some decoders have beside attention and MLP: streams, branches, embeddings of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diptych.compute.ops.contract import Heads, Linear, Table, Vector


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedConnection(Generic[Vector, Linear]):
    """How the streams in one row are read: their norms, and what gates them. inject: what says how much is added to each; None
    where nothing is.
    """

    norm: Vector
    down: Linear
    up: Linear
    inject: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramWeights(Generic[Table, Vector, Linear, Heads]):
    """A layer's embeddings of n-grams: the place-th of them. taps: of what they give, moved on as states are."""

    place: int
    tables: tuple[Table, ...]
    key: Linear
    value: Linear
    key_norm: Vector
    query_norm: Vector
    taps_norm: Vector
    taps: Heads
