"""Latent attention in a model's shape, an index that chooses what is attended to, what a cache keeps of a token."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.models.states import StateRule, StateSpec

GROUP_TOKENS = 16  # of a cache: no more of them share the row of an entry


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySpec:
    """Entries, each of so many tokens of a sequence, which are attended to beside the tokens of a window (DeepSeek V4): a sum
    of what is projected for each token, number by number weighed by a softmax of gates, which are projected, too, and offsets
    of the tokens' places; normed, and turned as the first of them. There is one once all its tokens are there. overlaps: the
    tokens of the entry before are in each, too, by projections of their own.
    """

    tokens: int
    overlaps: bool = False

    @property
    def n_series(self) -> int:
        """Of numbers of a token, each as wide as an entry and with gates of its own."""
        return 2 if self.overlaps else 1

    @property
    def shared_by(self) -> int:
        """Tokens that have room for one entry together."""
        return min(self.tokens, GROUP_TOKENS)

    def state(self, width: int) -> StateSpec:
        """What is kept of a sequence for entries so wide: the sums so far."""
        return StateSpec(
            rule=StateRule.ENTRIES,
            n_key_heads=1,
            key_dim=0,
            n_value_heads=self.n_series,
            value_dim=width,
            n_taps=self.tokens,
        )

    def n_small(self, width: int) -> int:
        """Parameters of entries so wide beside projections: the norm, and offsets."""
        return width * (1 + self.tokens * self.n_series)


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
    those positions up to the token's own that make no whole block, so that `most` are seen at most.
    entries: `most` of the layer's entries are chosen, whose keys are entries themselves, of numbers of their own. Neighbours at
    the end of queries and keys turn together, as in the layer's rows.
    is_apart: of latents that layers may share (Mistral Large 4). Its queries are made of the layer's input by a LayerNorm of
    its own, and scaled by head as the layer's; its keys lie in a layer of the cache of their own.
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
    entries: EntrySpec | None = None
    is_apart: bool = False

    @property
    def n_unchosen(self) -> int:
        """So many positions a token sees, by tokens or by entries, before its index has to choose."""
        return self.most if self.entries is None else (self.most + 1) * self.entries.tokens - 1

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
        return n_inputs * self.n_heads * self.head_dim + hidden * (self.n_key_inputs + self.n_weights)

    @property
    def n_key_inputs(self) -> int:
        """Outputs of the projections that keys are made of."""
        return self.key_width if self.entries is None else 2 * self.entries.n_series * self.head_dim

    def n_small(self, hidden: int) -> int:
        """Parameters beside those: weight and bias of its key's norm, or weights of its queries' and its key's, and offsets."""
        if self.entries is not None:
            return self.entries.n_small(self.head_dim)
        of_input = self.is_apart * 2 * (hidden + self.n_heads)
        return self.head_dim * (2 if self.pool == 1 else 2 + self.pool) + of_input


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: ranks and head sizes. q_rank None: queries are projected directly. is_mixed: queries, and
    what gates the heads, read their latent as it is, too, behind its norm (A.X K2). norm_eps: of the norms of both latents.
    q_scale, kv_scale: what the latents of queries, and of keys and values, are multiplied by behind their norms.
    n_groups > 0: there is no latent (DeepSeek V4). All heads meet one row as it is, key and value, normed as a whole, whose end
    turns, neighbours together; queries are normed by head, without weights; what heads give is turned back, and projected by
    so many groups of heads, v_dim numbers for each head of them.
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
    n_groups: int = 0

    @property
    def norm_width(self) -> int:
        """Of a row, so many numbers are normed together."""
        return self.row if self.n_groups else self.kv_rank

    def n_inner(self, n_heads: int) -> int:
        """Parameters between a row and what the output projection reads."""
        if self.n_groups:
            return n_heads * self.row * (n_heads * self.v_dim // self.n_groups)
        return self.kv_rank * n_heads * (self.nope_dim + self.v_dim)

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

    attended: of latents that an index chooses among, or of rows beside entries, so many of a head's numbers. Those behind are a
    part of an entry, whose row so many tokens share (shared_by, 0: there are none), and the index's key.
    """

    n_heads: int
    head_dim: int
    value_dim: int
    attended: int | None = None
    shared_by: int = 0

    @property
    def entries_each(self) -> float:
        """Rows of entries for each token."""
        return 1.0 / self.shared_by if self.shared_by else 0.0

    @property
    def attended_width(self) -> int:
        """Numbers of a head that are attended to."""
        return self.head_dim if self.attended is None else self.attended

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, and how wide keys and values are, as caches take them."""
        return self.n_heads, self.head_dim, self.value_dim

    @property
    def order(self) -> tuple[int, ...]:
        """Behind those, where tokens lie one by one: what is attended to of a head, and tokens that share a row, if any do."""
        return () if self.attended is None else (self.attended, self.shared_by) if self.shared_by else (self.attended,)

    @property
    def elements(self) -> int:
        """Numbers per token."""
        return self.n_heads * (self.head_dim + self.value_dim)
