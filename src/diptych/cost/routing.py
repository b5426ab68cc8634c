"""How many experts of a mixture the tokens of a step touch.

>>> round(expected_experts(64, 6, 8), 1)
34.9
"""

from __future__ import annotations

from functools import lru_cache

from diptych.ground.errors import ConfigError
from diptych.models.mlp import MoeSpec


def touched_experts(moe: MoeSpec, n_tokens: int, *, skew: float | None = None) -> float:
    """Experts with weights that at least one of n tokens meets, on average; skew: if not the mixture's own."""
    found = expected_experts(moe.n_scored, moe.experts_per_token, n_tokens, skew=moe.skew if skew is None else skew)
    return found * moe.n_experts / moe.n_scored


def expected_experts(n_experts: int, experts_per_token: int, n_tokens: int, *, skew: float = 0.0) -> float:
    """Distinct experts that n_tokens touch: E (1 - (1 - k/E)^N) for uniform routing.

    skew > 0 gives expert i a popularity proportional to (i+1)^-skew (k/E on average, never above 1).
    """
    if n_experts < 1 or not 1 <= experts_per_token <= n_experts:
        raise ConfigError(f"experts per token is {experts_per_token}; it must be between 1 and {n_experts}")
    share = experts_per_token / n_experts
    if skew == 0.0:
        return float(n_experts * (1.0 - (1.0 - share) ** n_tokens))
    return _expected_of(n_experts, experts_per_token, n_tokens, skew)


@lru_cache(maxsize=4096)
def _expected_of(n_experts: int, experts_per_token: int, n_tokens: int, skew: float) -> float:
    return sum(1.0 - (1.0 - chance) ** n_tokens for chance in _popularity(n_experts, experts_per_token, skew))


@lru_cache(maxsize=32)
def _popularity(n_experts: int, experts_per_token: int, skew: float) -> tuple[float, ...]:
    weights = [(i + 1.0) ** -skew for i in range(n_experts)]
    chances = [0.0] * n_experts
    left, free = float(experts_per_token), list(range(n_experts))
    while free:  # water-fill: an expert cannot be chosen more than once per token
        scale = left / sum(weights[i] for i in free)
        full = [i for i in free if weights[i] * scale >= 1.0]
        if not full:
            for i in free:
                chances[i] = weights[i] * scale
            break
        for i in full:
            chances[i] = 1.0
        left -= len(full)
        free = [i for i in free if chances[i] == 0.0]
    return tuple(chances)
