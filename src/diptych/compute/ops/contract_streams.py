"""The part of the op vocabulary that is about residual streams beside each other: how they begin, mix, and are joined.

Streams beside the residual stream are numbered: who begins one anew ends the one that had the number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

Stream = TypeVar("Stream")  # the residual stream x
Hidden = TypeVar("Hidden")  # every other activation
Vector = TypeVar("Vector")  # a norm's weight


class StreamOps(ABC, Generic[Stream, Hidden, Vector]):
    """What `contract.Ops` has of them."""

    @abstractmethod
    def branch(self, x: Stream, number: int, *, scale: float = 1.0) -> Stream:
        """Stream `number` [T, D] = scale * x, which stays as it is."""

    @abstractmethod
    def stream(self, h: Hidden, number: int, *, is_residual: bool = False) -> Stream:
        """Stream `number` [T, D] = h, a norm. is_residual: it takes the place of the residual stream."""

    @abstractmethod
    def match(self, y: Hidden, x: Stream, number: int, *, least: float) -> Stream:
        """Stream `number` [T, D] = y * sqrt(mean(x^2) / max(mean(y^2), least)): y as large as x."""

    @abstractmethod
    def predict(self, xs: tuple[Stream, ...], routed: Hidden, weight: Vector, *, scale: float) -> tuple[Stream, ...]:
        """x_i + sum over j of c_ij x_j, c [n n] = W tanh(scale * routed), routed [T, n], W [n n, n]; all may be written."""

    @abstractmethod
    def correct(
        self, xs: tuple[Stream, ...], y: Stream, routed: Hidden, weight: Vector, *, scale: float, active: int
    ) -> tuple[Stream, ...]:
        """x_i + c_i (y - x_active), c [n] = W tanh(scale * routed) + 1, W [n, n]; all xs may be written."""

    # Hyper-connections: `connections` says once how near all streams are to each weight, `gather` and `spread` read their part;
    # `mingle` stands in the place of `spread` where more outputs are a matrix by which streams mix.

    @abstractmethod
    def connections(self, xs: tuple[Stream, ...], weight: Vector, scale: Vector, base: Vector, *, eps: float) -> Hidden:
        """c [T, m] = s * (W x) / sqrt(mean(x^2) + eps) + base, fp32, of x [T, n D], all streams side by side; W [m, n D].

        scale: of the first n outputs, of the next n, and so on; the last of all that are left.
        """

    @abstractmethod
    def gather(self, xs: tuple[Stream, ...], c: Hidden, number: int, *, eps: float) -> Stream:
        """Stream `number` [T, D] = sum over i of (sigmoid(c_i) + eps) x_i."""

    @abstractmethod
    def spread(
        self, xs: tuple[Stream, ...], y: Hidden, c: Hidden, *, magnitude: float, eps: float
    ) -> tuple[Stream, ...]:
        """x_i + (magnitude * sigmoid(c_(n + i)) + eps) y, y [T, D]; all xs may be written."""

    @abstractmethod
    def mingle(
        self, xs: tuple[Stream, ...], y: Hidden, c: Hidden, *, magnitude: float, rounds: int, eps: float
    ) -> tuple[Stream, ...]:
        """sum over j of m_ji x_j + magnitude * sigmoid(c_(n + i)) y, y [T, D]; all xs may be written.

        m [n, n]: rows of c[2 n:] through a softmax, plus eps; then columns, and in rounds - 1 more rounds rows and columns, are
        divided by their sum plus eps (Sinkhorn and Knopp).
        """
