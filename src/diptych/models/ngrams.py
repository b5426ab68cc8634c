"""Embeddings of n-grams of tokens that some layers add to the residual streams (Qwen4-Exp's PLE), in a model's shape.

An n-gram is found by a hash, as the class of transformers has it: each token's id times an odd factor of the layer's own,
joined by exclusive or, modulo a prime of each head's own.

>>> spec = NgramSpec(layers=(0,), width=8, longest=3, n_heads=2, least_rows=10, multiple=8, seed=1, parts=2, vocab=50, end=2,
...                  n_taps=4)
>>> spec.heads(0), spec.rows(0)
(((11, 0), (13, 11), (17, 24), (19, 41)), 64)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from diptych.models.states import StateRule, StateSpec

MASK = 2**64 - 1
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64
OF_LAYER = 10_007  # what a layer adds to the seed
TAPPED_HEAD = 64  # channels that are summed together, where their number allows it


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """In `layers`: rows of n_heads for each length from 2 tokens to `longest`, `width` numbers together, projected to a value
    and a key for each stream; the stream's own meets the key, which gates the value; and what this gives is added as it is and,
    normed, by sums over n_taps tokens that stand `longest` apart.

    least_rows: of each head's own; multiple: of a layer's table; seed: of the factors; parts: tensors that files have a table
    in. vocab: of tokens. end: the token that ends a text; nothing before it counts.
    """

    layers: tuple[int, ...]
    width: int
    longest: int
    n_heads: int
    least_rows: int
    multiple: int
    seed: int
    parts: int
    vocab: int
    end: int
    n_taps: int

    @property
    def n_before(self) -> int:
        """Tokens before its own that an n-gram may have."""
        return self.longest - 1

    @property
    def all_heads(self) -> int:
        """Of all lengths."""
        return self.n_before * self.n_heads

    @property
    def head_width(self) -> int:
        """Of a row."""
        return self.width // self.all_heads

    def heads(self, place: int) -> tuple[tuple[int, int], ...]:
        """Of the place-th of the layers: how many rows each head has, and which is its first."""
        n = self.all_heads
        sizes = _primes(self.least_rows, n * len(self.layers))[n * place : n * (place + 1)]
        return tuple((size, sum(sizes[:i])) for i, size in enumerate(sizes))

    def rows(self, place: int) -> int:
        """Of the table of the place-th of the layers."""
        return -(-sum(size for size, _ in self.heads(place)) // self.multiple) * self.multiple

    def factors(self, place: int) -> tuple[int, ...]:
        """Of an n-gram's tokens, the last one first."""
        bound = max(1, (2**63 - 1) // max(self.vocab, 1) // 2)
        seeds = (self.seed + OF_LAYER * place + GAMMA * (i + 1) for i in range(self.longest))
        return tuple(2 * (_splitmix(one & MASK) % bound) + 1 for one in seeds)

    @property
    def n_seen(self) -> int:
        """Taps of tokens that stand beside each other, of which those between are 0."""
        return (self.n_taps - 1) * self.longest + 1

    @property
    def table_elements(self) -> int:
        """Numbers of all tables."""
        return self.head_width * sum(self.rows(place) for place in range(len(self.layers)))

    def n_matrices(self, hidden: int, n_streams: int) -> int:
        """Parameters of the projections of all layers."""
        return len(self.layers) * self.width * hidden * (n_streams + 1)

    def n_vectors(self, hidden: int, n_streams: int) -> int:
        """Of their norms and taps."""
        return len(self.layers) * hidden * n_streams * (3 + self.n_taps)


def ngram_states(spec: NgramSpec, width: int) -> tuple[StateSpec, ...]:
    """What is kept of a sequence: inputs of each layer's taps, `width` channels, and last for all of them the ids of tokens."""
    head = math.gcd(width, TAPPED_HEAD)
    of_taps = StateSpec(
        rule=StateRule.BENT_TAPS,
        n_key_heads=width // head,
        key_dim=0,
        n_value_heads=width // head,
        value_dim=head,
        n_taps=spec.n_seen,
    )
    of_ids = StateSpec(
        rule=StateRule.TAPS, n_key_heads=1, key_dim=0, n_value_heads=1, value_dim=spec.n_before, n_taps=spec.longest
    )
    return (*(of_taps for _ in spec.layers), of_ids)


def _splitmix(value: int) -> int:
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=8)
def _primes(least: int, n: int) -> tuple[int, ...]:
    """The first n from `least` on."""
    found: list[int] = []
    at = least
    while len(found) < n:
        if at > 1 and all(at % divisor for divisor in range(2, math.isqrt(at) + 1)):
            found.append(at)
        at += 1
    return tuple(found)
