"""What inner values go through."""

from __future__ import annotations

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
