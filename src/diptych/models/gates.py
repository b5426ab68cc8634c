"""What bends a gate, or up where there is none, and gates that are joined with up in a form of their own: within bounds, or
squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Activation(Enum):
    """act in act(gate) * up, or in act(up) where there is no gate.

    XIELU: s x + a x^2 above 0, s x + b (exp(min(x, e)) - 1 - x) below, of a layer's own a and b, XIELU_SLOPE and XIELU_LEAST.
    CLAMPED: of gates, as `gates.CLAMPED` says.
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"
    RELU = "relu"
    SQUARED_RELU = "squared_relu"  # max(x, 0)^2
    XIELU = "xielu"
    CLAMPED = "clamped"
    SIGMOID = "sigmoid"  # of gates without up
    SOFTPLUS = "softplus"  # likewise, log(1 + e^x)
    TANH = "tanh"  # of heads behind a pooled state


XIELU_SLOPE = 0.5
XIELU_LEAST = -1e-6


@dataclass(frozen=True, slots=True)
class GateForm:
    """min(g sigmoid(alpha g), bound) (u + shift), of g = min(gate, limit) and u = up within +-min(limit, bound).

    curve: act(gate) up instead, whatever the numbers say, where no product's epilogue has that act.
    """

    alpha: float = 1.0
    limit: float = math.inf
    bound: float = math.inf
    shift: float = 0.0
    curve: Activation | None = None

    @property
    def most_up(self) -> float:
        """What up is held within on both sides."""
        return min(self.limit, self.bound)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """All four, as the kernels take them."""
        return self.alpha, self.limit, self.bound, self.shift


PLAIN = GateForm()
CLAMPED = GateForm(alpha=1.702, limit=7.0, shift=1.0)  # of gpt-oss and MiniMax M3
SQUARED = GateForm(curve=Activation.SQUARED_RELU)  # of BitNet
EXACT = GateForm(curve=Activation.GELU)  # of ModernBERT
