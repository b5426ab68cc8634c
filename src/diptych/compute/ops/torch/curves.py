"""Activations and gates on the torch backend."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from diptych.models.gates import Activation, GateForm


def xielu(x: torch.Tensor, numbers: tuple[float, ...]) -> torch.Tensor:
    """As `Activation` says, of its numbers."""
    above, below, slope, least = numbers
    return slope * x + torch.where(x > 0, above * x * x, below * (torch.expm1(x.clamp(max=least)) - x))


def mixed(c: torch.Tensor, n: int, *, rounds: int, eps: float) -> torch.Tensor:
    """[T, n, n] fp32 of what connections say of how streams mix, as `StreamOps.mingle` says."""
    m = torch.softmax(c[:, 2 * n :].unflatten(-1, (n, n)), dim=-1) + eps
    for dim in (-2, *(-1, -2) * (rounds - 1)):
        m = m / (m.sum(dim=dim, keepdim=True) + eps)
    return m


def connected(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, n: int, eps: float
) -> torch.Tensor:
    """[T, m] fp32 of all n streams side by side, as `StreamOps.connections` says."""
    x = x.float()
    of_outputs = scale[(torch.arange(len(base), device=scale.device) // n).clamp(max=len(scale) - 1)]
    return of_outputs * F.linear(x, weight) * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) + base


def activated(gate: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """act(gate)."""
    if activation is Activation.SILU:
        return F.silu(gate)
    if activation is Activation.SIGMOID:
        return torch.sigmoid(gate)
    if activation is Activation.SOFTPLUS:
        return F.softplus(gate.float()).to(gate.dtype)
    if activation in (Activation.RELU, Activation.SQUARED_RELU):
        return F.relu(gate) ** (2 if activation is Activation.SQUARED_RELU else 1)
    return F.gelu(gate, approximate="none" if activation is Activation.GELU else "tanh")


def bent(gate_up: torch.Tensor, form: GateForm) -> torch.Tensor:
    """As `GateForm` says, of gate and up side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    if form.curve is not None:
        return activated(gate, form.curve) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.most_up, form.most_up)
    return (gate * torch.sigmoid(gate * form.alpha)).clamp(max=form.bound) * (up + form.shift)
