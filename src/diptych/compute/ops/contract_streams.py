"""The part of the op vocabulary that is about residual streams beside each other: how they begin, mix, and are joined.

Streams beside the residual stream are numbered: who begins one anew ends the one that had the number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from diptych.models.ngrams import NgramSpec

Stream = TypeVar("Stream")  # the residual stream x
Hidden = TypeVar("Hidden")  # every other activation
Vector = TypeVar("Vector")  # a norm's weight
Linear = TypeVar("Linear")  # a projection
Table = TypeVar("Table")  # an embedding


class StreamOps(ABC, Generic[Stream, Hidden, Table, Vector, Linear]):
    """What `contract.Ops` has of them."""

    @abstractmethod
    def branch(self, x: Stream, number: int, *, scale: float = 1.0) -> Stream:
        """Stream `number` [T, D] = scale * x, which stays as it is."""

    @abstractmethod
    def stream(self, h: Hidden, number: int, *, is_residual: bool = False) -> Stream:
        """Stream `number` [T, D] = h, a norm or what `fold` gives. is_residual: it takes the place of the residual stream."""

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

    # Streams in one row, x [T, n D]: norms and projections read all of them, as of any row.

    @abstractmethod
    def widen(self, x: Stream, n: int) -> Stream:
        """[T, n D]: n streams in one row, each of them x, which stays as it is."""

    @abstractmethod
    def renew(self, wide: Stream, x: Stream) -> Stream:
        """[T, 2 D]: two streams in one row, the first of them x now; wide may be written, and nobody reads it again."""

    @abstractmethod
    def fold(self, h: Hidden, weights: tuple[float, ...]) -> Hidden:
        """[T, D]: the sum, by so many weights, of streams that lie in one row."""

    @abstractmethod
    def injections(self, h: Hidden, weight: Linear) -> Hidden:
        """c [T, n] = h W^T, for `inject`: it lasts until the next is made."""

    @abstractmethod
    def inject(self, x: Stream, y: Hidden, c: Hidden, *, magnitude: float, scale: float) -> Stream:
        """x_i + magnitude * sigmoid(scale * c_i) y, of each stream of x [T, n D]; x may be written."""

    # N-grams of tokens, as `NgramSpec` says.

    @abstractmethod
    def token_ids(self, width: int, end: int) -> Hidden:
        """[T, width] fp32: in each column the token's id, less `end`."""

    @abstractmethod
    def ngrams(self, before: Hidden, tables: tuple[Table, ...], spec: NgramSpec, place: int) -> Hidden:
        """[T, width]: rows of the token's n-grams, head after head, in the table of the place-th layer that has one.

        before [T, longest - 1]: ids of the tokens before it, the last one first, less `end`. tables: rows of the one table,
        equally many in each but the last.
        """

    @abstractmethod
    def meet_keys(self, keys: Hidden, queries: Hidden, values: Hidden) -> Hidden:
        """[T, n D]: values [T, D] times a sigmoid for each of n streams of keys and queries [T, n D], which are norms.

        It is of m = sum(key query) / sqrt(D), bent: sqrt(max(|m|, 1e-6)) with m's sign.
        """
