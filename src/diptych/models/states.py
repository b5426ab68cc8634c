"""States of sequences: what is kept in place of keys and values, or beside them, in a model's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from diptych.models.gates import Activation

EXPONENTIAL_FLOPS = 15.0  # of 2 to the power of a product, as csrc/rows/states.inl computes it


class StateRule(Enum):
    """How a state moves on with a token."""

    DELTA = "delta"
    SSD = "ssd"
    CONVOLUTION = "convolution"
    TAPS = "taps"
    BENT_TAPS = "bent_taps"
    SELECTIVE = "selective"
    RG_LRU = "rg_lru"
    ENTRIES = "entries"


class StepNorms(Enum):
    """What norms a selective state's steps, before their second projection, its keys and its queries: nothing, norms without
    weights, or norms with them.
    """

    NONE = "none"
    BARE = "bare"
    WEIGHED = "weighed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A state of one size in place of keys and values: what was read of a sequence lies in it.

    Each value head has a matrix S [key_dim, value_dim] per sequence. rule: how it moves on.
    DELTA (arXiv:2412.06464): S = decay S + k (beta (v - (decay S)^T k))^T gives S^T q, which is normed over value_dim (with
    norm_eps, or the model's own), then gated. beta is most_weight times a sigmoid. fades_by_key: each row of S has a decay of
    its own (arXiv:2510.26692). least_decay: the logarithm of such a decay is that times a sigmoid (Ling 3.0); None: less a
    softplus, without a bound.
    SSD (Mamba-2, arXiv:2405.21060; its C, B and x are q, k and v): S = decay S + k (step v)^T gives S^T q + skip v, which is
    gated, then normed, over all heads or over each of n_norms equal parts of them (0: it is not); step is held within
    step_limits.
    SSD that is_steady (Lightning attention, arXiv:2501.08313): q, k and v are silu of what is projected, each step is 1, and a
    head's decay follows from its number and its layer's (`steady_decays`): S = decay S + k v^T gives S^T q, which is normed
    over all heads, then gated. It has no taps.
    CONVOLUTION: no matrix, key_dim is 0, heads are width alone: gate_out * taps(gate_in * v), as LFM2 has it.
    TAPS, BENT_TAPS: likewise taps(v), or silu of it: of n-grams (`ngrams`), or of what is `before` a selective state.
    SELECTIVE (Mamba-1, arXiv:2312.00752; its B, C and x are k, q and v): each row and column of S has a decay of its own, and
    each column a step: S = exp(-decay step) S + k (step v)^T gives S^T q + skip v, which is gated. v is silu of as many taps as
    tapped says, which are a state of their own; steps (by way of `rank` values), k and q are projected from it, and normed as
    step_norms says, with norm_eps. It has no taps itself; key heads are most often one, whose value heads are width alone, and
    of several each projects its own v alone.
    RG_LRU (a real-gated linear recurrent unit of Griffin, arXiv:2402.19427): each channel has one number, and there are no keys
    and queries: with r and i sigmoids of products of v, s = e^(-decay r) s + sqrt(1 - e^(-2 decay r)) i v is given as it is,
    but for a text's first token, which is i v. v is as many taps as tapped says, unbent; a head's products are of its own v.
    ENTRIES: sums of a softmax over n_taps tokens, which move on token by token (`latent.EntrySpec`): of each head, which is
    one of its series, and each of value_dim numbers the largest gate, the sum of weights, and the sum of what they weigh.
    gate: what the projection that gates goes through. rank: that one, and the decays by key, are projected in two steps with so
    many values between (0: in one each). q_scale, k_scale, v_scale, rate_scale: what q, k and v are multiplied by before their
    taps, and steps before they are shifted.
    n_key_heads: heads of q and k, each for as many value heads as come to it. n_taps: q, k and v of a token (of a convolution,
    what is gated) are sums over its own and the n_taps - 1 tokens before, by a weight for each channel and tap.
    """

    rule: StateRule = StateRule.DELTA
    n_key_heads: int
    key_dim: int
    n_value_heads: int
    value_dim: int
    n_taps: int
    n_norms: int = 1
    has_tap_bias: bool = False
    norm_eps: float | None = None
    most_weight: float = 1.0
    step_limits: tuple[float, float] = (0.0, math.inf)
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    rate_scale: float = 1.0
    fades_by_key: bool = False
    least_decay: float | None = None
    gate: Activation = Activation.SILU
    rank: int = 0
    is_steady: bool = False
    tapped: int = 0
    step_norms: StepNorms = StepNorms.NONE

    @property
    def is_selective(self) -> bool:
        """Whether it is Mamba-1's."""
        return self.rule is StateRule.SELECTIVE

    @property
    def is_unit(self) -> bool:
        """Whether it is of recurrent units."""
        return self.rule is StateRule.RG_LRU

    @property
    def is_by_channel(self) -> bool:
        """Whether each channel moves on by itself, which another state has tapped before."""
        return self.is_selective or self.is_unit

    @property
    def has_matrix(self) -> bool:
        """Whether its heads have one."""
        return self.rule in (StateRule.DELTA, StateRule.SSD) or self.is_by_channel

    @property
    def before(self) -> StateSpec | None:
        """The state that what it reads is made by; None where a layer has but one."""
        if not self.is_by_channel:
            return None
        return StateSpec(
            rule=StateRule.BENT_TAPS if self.is_selective else StateRule.TAPS,
            n_key_heads=self.n_key_heads,
            key_dim=0,
            n_value_heads=self.n_value_heads,
            value_dim=self.value_dim,
            n_taps=self.tapped,
            has_tap_bias=self.has_tap_bias,
        )

    @property
    def n_channels(self) -> int:
        """That taps are for: of q, k and v together; of states by channel v's."""
        return self.width if self.is_by_channel else 2 * self.n_key_heads * self.key_dim + self.width

    @property
    def n_inputs(self) -> int:
        """Of a token, that the taps' channels are made of."""
        return 3 * self.width if self.rule is StateRule.CONVOLUTION else self.n_channels

    @property
    def width(self) -> int:
        """Of what the value heads give."""
        return self.n_value_heads * self.value_dim

    @property
    def gate_width(self) -> int:
        """Of the projection that gates what the heads give."""
        return self.width if self.has_matrix else 0

    @property
    def n_rates(self) -> int:
        """Numbers of a token that say how much is new and what is left: beta and decay of each head, or its step; of a
        selective state k and q, of units both of each channel.
        """
        if self.is_selective:
            return self.n_key_heads * 2 * self.key_dim
        if self.is_unit:
            return 2 * self.width
        if self.is_steady:
            return 0
        per_head = {StateRule.DELTA: 1 if self.fades_by_key else 2, StateRule.SSD: 1}
        return per_head.get(self.rule, 0) * self.n_value_heads

    @property
    def n_decays(self) -> int:
        """Those of them that are projected by themselves: by key, of each head; of a selective state each channel's step."""
        if self.is_selective:
            return self.width
        return self.n_value_heads * self.key_dim if self.fades_by_key else 0

    @property
    def n_projected(self) -> int:
        """Outputs of all that reads a layer's input."""
        if self.is_by_channel:
            return self.n_inputs + self.gate_width
        of_decays = min(self.rank, self.n_decays) if self.rank else self.n_decays
        return self.n_inputs + (self.rank or self.gate_width) + self.n_rates + of_decays

    @property
    def n_second(self) -> int:
        """Parameters of second steps; of states by channel all that reads v, and steps."""
        if self.is_unit:
            return self.n_rates * self.value_dim
        if self.is_selective:
            return self.width * 2 * (self.key_dim + self.rank)
        return self.rank * (self.gate_width + self.n_decays)

    @property
    def n_small(self) -> int:
        """Parameters beside the projections: taps, numbers of each head, a norm."""
        if self.is_unit:  # taps, decays, biases of what reads v
            return self.width * (self.tapped + self.has_tap_bias + 1) + self.n_rates
        if self.is_selective:  # taps, decays, skips, shifts, norms
            norms = self.rank + self.n_rates if self.step_norms is StepNorms.WEIGHED else 0
            return self.width * (self.tapped + self.has_tap_bias + self.key_dim + 2) + norms
        if self.is_steady:
            return self.width
        taps, heads = self.n_channels * (self.n_taps + self.has_tap_bias), self.n_value_heads
        of_heads = {
            StateRule.DELTA: heads + (self.n_decays or heads) + self.value_dim,
            StateRule.SSD: 3 * heads + (self.width if self.n_norms else 0),
        }
        return taps + of_heads.get(self.rule, 0)

    @property
    def state_elements(self) -> int:
        """Numbers that are kept of a sequence: the heads' matrices, and the tokens that its taps still see."""
        return self.n_value_heads * self.n_rows * self.value_dim + self.n_seen * self.n_channels

    @property
    def n_rows(self) -> int:
        """Of a head's matrix."""
        return 3 if self.rule is StateRule.ENTRIES else self.key_dim

    @property
    def n_seen(self) -> int:
        """Tokens before a token that its taps see."""
        return 0 if self.rule is StateRule.ENTRIES else self.n_taps - 1

    @property
    def flops_each(self) -> float:
        """Of a token, for each number of the heads' matrices."""
        own = {
            StateRule.DELTA: 6.0,
            StateRule.SELECTIVE: 4.0 + EXPONENTIAL_FLOPS,
            StateRule.RG_LRU: 16.0 + 3 * EXPONENTIAL_FLOPS,
        }
        return own.get(self.rule, 4.0)

    @property
    def layer_elements(self) -> int:
        """The same with those of the state before it."""
        return self.state_elements + (0 if self.before is None else self.before.state_elements)


def steady_decays(n_heads: int, layer: int, n_layers: int) -> tuple[float, ...]:
    """How fast each head's steady state fades in a layer: e to minus that is left of it behind a token.

    The slopes of ALiBi for the numbers of the heads, less in each layer and next to nothing in the last (`get_slope_rate` of
    transformers' MiniMax, and of its published code).
    """
    factor = 1 - layer / (n_layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8.0 / n_heads * (head + 1)) * factor for head in range(n_heads))
