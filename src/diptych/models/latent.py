"""Latent attention in a model's shape, an index that chooses what is attended to, what a cache keeps of a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """An index chooses what is attended to: the `most` positions of the highest scores, all while there are no more.

    block 1: of latent attention (DeepSeek Sparse Attention, arXiv:2512.02556). A position's score is the sum over n_heads of
    weight * max(q k, 0), its key k one for all heads; weights and queries are the token's own. Of queries and keys [head_dim]
    the first rope_dim turn, or in the checkpoint's order the last (turns_last), is_interleaved: neighbours together there.
    norm_eps: of the key's norm. is_own: the layer makes the choice; otherwise it takes that of the last layer before it that
    does.
    pool > 1: so many positions are chosen together, for the score of what their keys are together: their sum, number by number
    weighed by a softmax of gates of each token and offsets of the pool's places (GLM-5.3-Flash). The positions behind the last
    whole pool are seen, too, so `most` are where one is missing to a whole one.
    block > 1: of grouped queries (MiniMax M3). So many positions are chosen together, for each KV head by an index head of its
    own: the `most` / block blocks of the largest q k within them, among them the last `local` up to the token's own. Queries
    and keys are normed and turn as those of the layer.
    by_means: of grouped queries, too (Qwen4-Exp), for all KV heads together: whole blocks of the highest scores, which are sums
    over n_heads of max(q k, 0), their key the mean of those of the block, normed and turned to its first position; and those
    positions up to the token's own that make no whole block, so that `most` are seen at most.
    """

    most: int
    n_heads: int
    head_dim: int
    is_interleaved: bool = False
    turns_last: bool = False
    norm_eps: float = 1e-6
    is_own: bool = True
    pool: int = 1
    block: int = 1
    local: int = 0
    by_means: bool = False

    @property
    def n_blocks(self) -> int:
        """That are chosen."""
        return self.most // self.block

    @property
    def key_width(self) -> int:
        """Numbers that are kept of a token to find it by: its key, and in a pool what weighs that."""
        return self.head_dim * (1 if self.pool == 1 else 2)

    @property
    def n_pools(self) -> int:
        """That are chosen."""
        return (self.most + 1) // self.pool - 1

    @property
    def n_choices(self) -> int:
        """Numbers that a token's choice has."""
        if self.by_means:
            return self.n_blocks + 1
        return self.most if self.block == 1 else self.n_heads * self.n_blocks

    @property
    def n_weights(self) -> int:
        """Of a token's heads."""
        return self.n_heads if self.block == 1 else 0

    def n_matrices(self, n_inputs: int, hidden: int) -> int:
        """Parameters of the projections of a layer that has one: of queries, the key and its gates, the heads' weights."""
        return n_inputs * self.n_heads * self.head_dim + hidden * (self.key_width + self.n_weights)

    @property
    def n_small(self) -> int:
        """Parameters beside those: weight and bias of its key's norm, or weights of its queries' and its key's, and offsets."""
        return self.head_dim * (2 if self.pool == 1 else 2 + self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: ranks and head sizes. q_rank None: queries are projected directly. is_mixed: queries, and
    what gates the heads, read their latent as it is, too, behind its norm (A.X K2). norm_eps: of the norms of both latents.
    q_scale, kv_scale: what the latents of queries, and of keys and values, are multiplied by behind their norms.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    is_mixed: bool = False
    norm_eps: float = 1e-6
    q_scale: float = 1.0
    kv_scale: float = 1.0

    @property
    def q_inputs(self) -> int:
        """Numbers that queries are made of, where they have a rank."""
        return (self.q_rank or 0) * (2 if self.is_mixed else 1)

    @property
    def row(self) -> int:
        """Numbers of a token that are attended to: the latent, and the rotary part of the key."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a layer keeps of a token: for each head a key and a value; value_dim 0: the key serves as both, or is an index's.

    attended: of latents that an index chooses among, so many of a head's numbers; those behind are the index's key.
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
