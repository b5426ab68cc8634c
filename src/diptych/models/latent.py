"""Latent attention in a model's shape: its widths, the index that chooses what it attends to, what a cache keeps of a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """An index chooses what latent attention attends to (DeepSeek Sparse Attention, arXiv:2512.02556): the `most` positions of
    the highest scores, all while there are no more.

    A position's score is the sum over n_heads of weight * max(q k, 0), its key k one for all heads; weights and queries are the
    token's own. Of queries and keys [head_dim] the first rope_dim turn, is_interleaved: neighbours together in the checkpoint's
    order. is_own: the layer makes the choice; otherwise it takes that of the last layer before it that does.
    """

    most: int
    n_heads: int
    head_dim: int
    is_interleaved: bool = False
    is_own: bool = True

    def n_matrices(self, hidden: int, q_rank: int) -> int:
        """Parameters of the projections of a layer that has one: of queries, the key, the heads' weights."""
        return q_rank * self.n_heads * self.head_dim + hidden * (self.head_dim + self.n_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: ranks and head sizes. q_rank None: queries are projected directly. index: what chooses the
    positions that are attended to; None: all are.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index: IndexSpec | None = None

    @property
    def own_index(self) -> IndexSpec | None:
        """The index that the layer has itself, if it has one."""
        return self.index if self.index is not None and self.index.is_own else None

    @property
    def row(self) -> int:
        """Numbers of a token that are attended to: the latent, and the rotary part of the key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a layer keeps of a token: for each head a key and a value; value_dim 0: the key serves as both.

    attended: where an index chooses what is attended to, so many of a head's numbers are; those behind are the index's key.
    """

    n_heads: int
    head_dim: int
    value_dim: int
    attended: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, and how wide keys and values are, as caches take them."""
        return self.n_heads, self.head_dim, self.value_dim

    @property
    def elements(self) -> int:
        """Numbers per token."""
        return self.n_heads * (self.head_dim + self.value_dim)
