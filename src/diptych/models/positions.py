"""How queries and keys are turned to their positions, and queries scaled by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions as the config gives them, settled for the longest sequence that will run (see `rope`).

    kind: default, linear, dynamic, proportional, llama3, yarn or longrope. theta: the base, already stretched for dynamic.
    trained_tokens: original_max_position_embeddings. divisors: longrope's factors, one per pair of dimensions, of
    `divisors_name` (short_factor or long_factor). n_turning: of proportional, how many pairs do turn. attention_factor
    multiplies cos and sin. query_slope: queries are scaled by position as `QueryScale` says, every trained_tokens.
    is_interleaved: neighbouring dimensions turn together in the checkpoint's order, not those half of rotary_dim apart.
    turns_back: they turn by the same angles the other way. is_learned: the checkpoint says of each pair by the exponential of
    what its turn per position is multiplied.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    trained_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0
    n_turning: int | None = None
    divisors: tuple[float, ...] = ()
    divisors_name: str | None = None
    query_slope: float = 0.0
    is_interleaved: bool = False
    turns_back: bool = False
    is_learned: bool = False


def slopes(n_heads: int, most: float) -> tuple[float, ...]:
    """What a score of each head loses for each position between query and key: powers of two from near 1 down to 2^-most.

    ALiBi (arXiv:2108.12409): of as many heads as a power of two a geometric row; of others every second number of the next
    such row, and then as many of those between as there are heads left.

    >>> slopes(4, 8.0)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> slopes(3, 8.0)
    (0.0625, 0.00390625, 0.25)
    """
    whole = 1 << (n_heads - 1).bit_length()
    row = [2.0 ** (-most * i / whole) for i in range(1, whole + 1)]
    return tuple(row if whole == n_heads else (row[1::2] + row[::2])[:n_heads])


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """What a score gains by how far the key lies from the query: numbers that each head has learned (arXiv:1910.10683, 2.1).

    n_buckets: as many numbers, half of them for keys behind the query. The nearer half of either has a number for each
    distance, the others one for distances ever more, up to `reach`; what lies further shares the last.
    """

    n_buckets: int
    reach: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """What a score gains of what query and key each say of the distance between them (DeBERTa, arXiv:2006.03654): products of
    either with a projection of the row that the distance has in a table of all layers.

    n_buckets: rows for either side, half of them of one distance each, the others of ever more up to `reach`; 0: `reach` rows
    of one distance each. is_shared: q's and k's own projections are the rows', too. is_normed: rows are normed first.
    """

    n_buckets: int
    reach: int
    is_shared: bool
    is_normed: bool

    @property
    def n_places(self) -> int:
        """Rows of the table."""
        return 2 * (self.n_buckets or self.reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Queries times 1 + slope * log(1 + (position + shift) // tokens), behind the rotary positions (arXiv:2501.19399)."""

    slope: float
    tokens: int
    shift: int = 0

    @property
    def numbers(self) -> tuple[float, int, int]:
        """All three, as the kernels take them."""
        return self.slope, self.tokens, self.shift
