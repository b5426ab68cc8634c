"""Streams beside each other on the torch backend: what `contract_streams` asks of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.compute.ops.contract_streams import StreamOps
from diptych.compute.ops.torch_curves import connected, mixed
from diptych.compute.ops.torch_loader import TorchNorm


class TorchStreams(StreamOps[torch.Tensor, torch.Tensor, TorchNorm]):
    """The part of `TorchOps` that is about streams: each op makes new tensors, or hands out the very same."""

    def branch(self, x: torch.Tensor, number: int, *, scale: float = 1.0) -> torch.Tensor:
        """A tensor of its own where it is not the very same."""
        del number
        return x if scale == 1.0 else x * scale

    def stream(self, h: torch.Tensor, number: int, *, is_residual: bool = False) -> torch.Tensor:
        """The very same."""
        del number, is_residual
        return h

    def match(self, y: torch.Tensor, x: torch.Tensor, number: int, *, least: float) -> torch.Tensor:
        """[T, D]."""
        del number
        wanted, found = (one.float().square().mean(dim=-1, keepdim=True) for one in (x, y))
        return (y * (wanted.sqrt() / found.clamp(min=least).sqrt())).to(x.dtype)

    def predict(
        self, xs: tuple[torch.Tensor, ...], routed: torch.Tensor, weight: TorchNorm, *, scale: float
    ) -> tuple[torch.Tensor, ...]:
        """n of [T, D]."""
        n, together = len(xs), torch.stack(xs, dim=1)
        coefficients = F.linear(torch.tanh(routed.float() * scale), weight.weight).unflatten(-1, (n, n))
        mixed = torch.baddbmm(together, coefficients.to(together.dtype), together)
        return tuple(mixed.unbind(dim=1))

    def correct(
        self,
        xs: tuple[torch.Tensor, ...],
        y: torch.Tensor,
        routed: torch.Tensor,
        weight: TorchNorm,
        *,
        scale: float,
        active: int,
    ) -> tuple[torch.Tensor, ...]:
        """n of [T, D]."""
        coefficients = (F.linear(torch.tanh(routed.float() * scale), weight.weight) + 1.0).to(y.dtype)
        news = y - xs[active]
        return tuple(x + coefficients[:, i, None] * news for i, x in enumerate(xs))

    def connections(
        self, xs: tuple[torch.Tensor, ...], weight: TorchNorm, scale: TorchNorm, base: TorchNorm, *, eps: float
    ) -> torch.Tensor:
        """c [T, m] fp32."""
        return connected(torch.cat(xs, dim=-1), weight.weight, scale.weight, base.weight, n=len(xs), eps=eps)

    def gather(self, xs: tuple[torch.Tensor, ...], c: torch.Tensor, number: int, *, eps: float) -> torch.Tensor:
        """[T, D]."""
        del number
        weights = torch.sigmoid(c[:, : len(xs), None]) + eps
        return (weights * torch.stack(xs, dim=1)).sum(dim=1).to(xs[0].dtype)

    def spread(
        self, xs: tuple[torch.Tensor, ...], y: torch.Tensor, c: torch.Tensor, *, magnitude: float, eps: float
    ) -> tuple[torch.Tensor, ...]:
        """n of [T, D]."""
        weights = magnitude * torch.sigmoid(c[:, len(xs) : 2 * len(xs)]) + eps
        return tuple((x + weights[:, i, None] * y).to(x.dtype) for i, x in enumerate(xs))

    def mingle(
        self,
        xs: tuple[torch.Tensor, ...],
        y: torch.Tensor,
        c: torch.Tensor,
        *,
        magnitude: float,
        rounds: int,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        """n of [T, D]."""
        n, together = len(xs), torch.stack(xs, dim=1).float()
        new = magnitude * torch.sigmoid(c[:, n : 2 * n, None]) * y.float()[:, None]
        mingled = torch.baddbmm(new, mixed(c, n, rounds=rounds, eps=eps).transpose(1, 2), together)
        return tuple(mingled.to(y.dtype).unbind(dim=1))
