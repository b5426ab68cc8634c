"""Streams beside each other, or in one row, and embeddings of n-grams, on the torch backend.

Legend: as in `ops`; n streams.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diptych.compute.ops.contract_streams import StreamOps
from diptych.compute.ops.torch.curves import connected, mixed
from diptych.compute.ops.torch.loader import TorchLinear, TorchNorm
from diptych.models.ngrams import NgramSpec

LEAST_MEETING = 1e-6  # of what a root is taken of


class TorchStreams(StreamOps[torch.Tensor, torch.Tensor, torch.Tensor, TorchNorm, TorchLinear]):
    """The part of `TorchOps` that is about them."""

    _token_ids: torch.Tensor  # [T]
    _dtype: torch.dtype

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

    def widen(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """[T, n D]."""
        return x.repeat(1, n)

    def renew(self, wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 D]."""
        return torch.cat([x, wide[:, x.shape[1] :]], dim=-1)

    def fold(self, h: torch.Tensor, weights: tuple[float, ...]) -> torch.Tensor:
        """[T, D]."""
        by = torch.tensor(weights, device=h.device)[:, None]
        return (h.unflatten(-1, (len(weights), -1)).float() * by).sum(dim=1).to(h.dtype)

    def inject(
        self, x: torch.Tensor, y: torch.Tensor, c: torch.Tensor, *, magnitude: float, scale: float
    ) -> torch.Tensor:
        """[T, n D]."""
        weights = magnitude * torch.sigmoid(scale * c.float())
        return x + (weights[..., None] * y[:, None]).flatten(1).to(x.dtype)

    def token_ids(self, width: int, end: int) -> torch.Tensor:
        """[T, width] fp32."""
        return (self._token_ids - end)[:, None].expand(-1, width).float()

    def ngrams(
        self, before: torch.Tensor, tables: tuple[torch.Tensor, ...], spec: NgramSpec, place: int
    ) -> torch.Tensor:
        """[T, width]: a table's rows are found in whole numbers of 64 bits."""
        ids, factors = self._token_ids.long(), spec.factors(place)
        mixed, has_ended, rows = ids * factors[0], torch.zeros_like(ids, dtype=torch.bool), []
        heads = iter(spec.heads(place))
        for i in range(spec.n_before):
            away = torch.where(has_ended, 0, before[:, i].long())
            has_ended = away == 0
            mixed = mixed ^ ((away + spec.end) * factors[i + 1])
            rows += [mixed % size + first for _, (size, first) in zip(range(spec.n_heads), heads, strict=False)]
        at, per_table = torch.stack(rows, dim=1), len(tables[0])
        found = tables[0].new_empty((*at.shape, spec.head_width))
        for number, table in enumerate(tables):
            own = at // per_table == number
            found[own] = table[at[own] - number * per_table]
        return found.flatten(1).to(self._dtype)

    def meet_keys(self, keys: torch.Tensor, queries: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[T, n D]."""
        width = values.shape[-1]
        met = (keys * queries).float().unflatten(-1, (-1, width)).sum(dim=-1) / width**0.5
        gate = torch.sigmoid(met.abs().clamp(min=LEAST_MEETING).sqrt() * met.sign())
        return (gate[..., None] * values[:, None]).flatten(1).to(values.dtype)
