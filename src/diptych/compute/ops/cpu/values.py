"""The handles of activations that the cpu backend records with: the residual stream, and all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.compute.ops.cpu.handles import VectorHandle

# What a projection is, by what it reads (its time is counted under this name).
CATEGORIES = {
    "norm": "qkv", "residual": "qkv", "gated norm": "qkv", "joined": "qkv", "projection": "o", "attention": "o",
    "gated heads": "o", "gate": "down", "experts": "down", "folded": "qkv", "ngrams": "qkv",
    "bent": "qkv",
}  # fmt: skip


@dataclass(slots=True)
class ResidualStream:
    """The residual stream's buffer; version counts the writes, so that a late reader of an old value is caught.

    is_whole: each rank has all columns of its own, which nobody else writes.
    """

    buffer: int
    width: int
    version: int = 0
    is_whole: bool = False


@dataclass(slots=True)
class Value:
    """An activation. `kind` says what made it; `emit` records that into a buffer once the consumer's need is known."""

    kind: str
    width: int
    source: ResidualStream | None = None
    source_version: int = 0
    buffer: int | None = None  # fp32, where it lies already
    emit_rows: Callable[[int], None] | None = None
    emit_f32: Callable[[int], None] | None = None
    emit_bf16: Callable[[int], None] | None = None  # where rounding before a quantisation is worth half the traffic
    is_shared: bool = False  # by ranks, each of which writes its columns
    rows: dict[str, int] = field(default_factory=dict)
    norm: tuple[VectorHandle, float] | None = None  # of `buffer`, and its eps
