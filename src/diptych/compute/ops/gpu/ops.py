"""The op vocabulary on a GPU in 16 bits: torch's ops, and in place of those that a step's time goes to, our kernels.

What a row gets does not depend on what else the step computes, so the bits of an answer are the same however it was batched,
chunked or cached. Nothing here waits for the device or asks the host, so steps can be recorded and replayed (`graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops.contract import AttentionSpec, QkNorm
from diptych.compute.ops.gpu.attention import FEW, LARGEST_HEAD, attend, item_tokens
from diptych.compute.ops.gpu.products import CURVES, GATES, mix, multiply
from diptych.compute.ops.gpu.rows import rms_norm, rotate_and_cache
from diptych.compute.ops.step_numbers import on_device
from diptych.compute.ops.torch_loader import TorchAttention, TorchExperts, TorchLinear, TorchNorm
from diptych.compute.ops.torch_ops import TorchOps, route
from diptych.models.spec import AttentionLayer, ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class Items:
    """What attention's programs take on: items [I, 4] (`attention.attend`), tokens of the largest and of the longest
    context among them.
    """

    items_I4: torch.Tensor
    most_rows: int
    most_tokens: int


def singles_of(batch: ForwardBatch) -> np.ndarray:
    """Items [I, 4] of the sequences that have one row."""
    starts, counts = batch.query_start_S1[:-1], np.diff(batch.query_start_S1)
    of = np.flatnonzero(counts == 1)
    return np.stack([of, starts[of], np.ones_like(of), batch.context_tokens_S[of] - 1], axis=1).astype(np.int64)


def items_of(batch: ForwardBatch, size: int) -> np.ndarray:
    """Items [I, 4] of all other sequences, of `size` tokens at most, those of the longest contexts first."""
    starts, counts = batch.query_start_S1[:-1], np.diff(batch.query_start_S1)
    first = batch.context_tokens_S - counts
    rows = [
        (s, starts[s] + row, min(size, counts[s] - row), first[s] + row)
        for s in np.flatnonzero(counts > 1)
        for row in range(0, counts[s], size)
    ]
    items = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return items[np.argsort(-items[:, 3], kind="stable")]


def has_kernels_for(spec: AttentionSpec | AttentionLayer) -> bool:
    """Whether a layer attends by our kernels."""
    if spec.mla is not None or spec.state is not None or spec.index is not None:
        return False
    if spec.head_dim > LARGEST_HEAD or not _has_usual_values(spec):
        return False
    return item_tokens(spec.head_dim, spec.n_heads // spec.n_kv_heads) > 0


def _has_usual_values(spec: AttentionSpec | AttentionLayer) -> bool:
    return spec.value_dim == spec.head_dim and spec.v_scale == 1.0


def item_tokens_of(spec: ModelSpec) -> tuple[int, int] | None:
    """Tokens of an item of several, and of one that takes the smallest tile; None: the layers differ."""
    found = {
        (item_tokens(one.head_dim, one.n_heads // one.n_kv_heads), FEW // (one.n_heads // one.n_kv_heads))
        for one in (layer.attention for layer in spec.layers)
        if not one.is_absent
    }
    return found.pop() if len(found) == 1 else None


def kind_of_experts(spec: MoeSpec) -> int | None:
    """What the kernel makes of the sums of such experts; None: it has no such thing."""
    return None if spec.limit is not None else (GATES if spec.is_gated else CURVES).get(spec.activation)


class TritonOps(TorchOps):
    """The ops of one step. numbers and items: on the device already, of a step that is recorded."""

    def __init__(
        self, batch: ForwardBatch, kv: TorchKVStore, *, items: list[Items] | None = None, **fields: Any
    ) -> None:
        super().__init__(batch, kv, **fields)
        self._items: dict[int, list[Items]] = {}
        self._recorded = items
        # rows with an adapter, whose part comes before what is fused for all others
        self._apart = torch.cat([rows for rows, _ in self._adapted]) if self._adapted else None

    def norm(self, x: torch.Tensor, weight: TorchNorm, *, eps: float, parts: int = 1) -> torch.Tensor:
        """h [T, D]."""
        if parts > 1 or weight.is_centred or weight.bias is not None:
            return super().norm(x, weight, eps=eps, parts=parts)
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, weight.weight, eps).view(x.shape)

    def _multiply(self, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(h, weight, bias)

    def _gated(self, h: torch.Tensor, weight: TorchLinear, tokens: torch.Tensor | None) -> torch.Tensor:
        kind = None if weight.activation is None else GATES.get(weight.activation)
        if kind is None:
            return super()._gated(h, weight, tokens)
        y = multiply(h, weight.weight, weight.bias, kind=kind)
        rows = self._rows_apart(tokens)
        if rows is not None:
            y[rows] = super()._gated(h[rows], weight, rows if tokens is None else tokens[rows])
        return y

    def _rows_apart(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Those with an adapter, among the step's tokens (None: all of them); None: there are none."""
        if self._apart is None:
            return None
        rows = self._apart if tokens is None else torch.isin(tokens, self._apart).nonzero()[:, 0]
        return rows if len(rows) else None

    def linear_add(self, h: torch.Tensor, weight: TorchLinear, x: torch.Tensor) -> torch.Tensor:
        """x + h W^T + b [T, D]."""
        y = multiply(h, weight.weight, weight.bias, added=x)
        if self._apart is not None:
            y[self._apart] = x[self._apart] + self._product(h[self._apart], weight, self._apart)
        return y

    def experts(self, h: torch.Tensor, experts: TorchExperts, *, routed: torch.Tensor | None = None) -> torch.Tensor:
        """The gated sum of the chosen experts [T, D]."""
        kind = kind_of_experts(experts.spec)
        if experts.stacked is None or kind is None or not len(h):
            return super().experts(h, experts, routed=routed)
        by_torch = None if self._apart is None else super().experts(h, experts, routed=routed)
        router = experts.router
        logits = multiply(h if routed is None else routed, router.weight, router.bias, dtype=torch.float32)
        weights_Tk, chosen_Tk = route(logits, experts)
        if experts.spec.weighs_input:
            h = (h[:, None] * weights_Tk[..., None]).to(h.dtype).flatten(0, 1)
            weights_Tk = torch.ones_like(weights_Tk)
        y = mix(h, *experts.stacked, chosen_Tk, weights_Tk.contiguous(), kind=kind)
        if by_torch is not None:
            y[self._apart] = by_torch[self._apart]
        return y

    def _scores(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        y = multiply(h, weight.weight, weight.bias, dtype=torch.float32)
        rows = self._rows_apart(self._logits_rows)
        if rows is not None:
            y[rows] = self._product(h[rows], weight, self._logits_rows[rows]).float()
        return y

    def rotate_and_cache(self, qkv: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """q [T, H, d]; k and v go to their slots."""
        spec = attention.spec
        if not _has_usual_values(spec):
            return super().rotate_and_cache(qkv, attention)
        is_of_heads = spec.qk_norm in (QkNorm.HEAD, QkNorm.TURNED)
        keys, values = self._pool(spec.cache_layer)
        q_THd = rotate_and_cache(
            self._prepared(qkv, attention),
            self._slots,
            keys,
            values,
            n_heads=spec.n_heads,
            head_dim=spec.head_dim,
            owns_kv=spec.owns_kv,
            turn=None if spec.rope is None else self._turns(spec.rope),
            norms=_norms(attention) if is_of_heads else None,
            is_turned_first=spec.qk_norm is QkNorm.TURNED,
            eps=spec.norm_eps,
        )
        if spec.query_scale is not None:
            q_THd = (q_THd * self._scales(spec.query_scale)[:, None, None]).to(q_THd.dtype)
        return q_THd

    def _prepared(self, qkv: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """qkv with what the kernel does not do: norms over more than a head, and values that are keys or are normed."""
        spec = attention.spec
        is_wide = spec.qk_norm in (QkNorm.FULL, QkNorm.HEADS)
        if not is_wide and (not spec.owns_kv or (spec.has_v and not spec.has_v_norm)):
            return qkv
        n_q, n_kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        q, rest = qkv[:, :n_q], qkv[:, n_q:]
        if is_wide:
            q = self._normed(q, spec.n_heads, attention.q_norm, spec)
        if not spec.owns_kv:
            return q
        k, v = rest[:, :n_kv], rest[:, -n_kv:]
        if spec.has_v_norm:
            v = rms_norm(v.reshape(-1, spec.head_dim), None, spec.norm_eps).view(v.shape)
        return torch.cat([q, self._normed(k, spec.n_kv_heads, attention.k_norm, spec) if is_wide else k, v], dim=1)

    def _normed(self, x: torch.Tensor, n_heads: int, norm: TorchNorm | None, spec: AttentionSpec) -> torch.Tensor:
        if spec.qk_norm is QkNorm.FULL:
            return self._norm(x.contiguous(), norm, spec)
        return self._norm(x.unflatten(-1, (n_heads, -1)), norm, spec).flatten(1)

    def attention(self, q_THd: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """a [T, H d]."""
        spec = attention.spec
        if not has_kernels_for(spec) or self._batch.both_ways_S is not None:
            return super().attention(q_THd, attention)
        keys, values = self._pool(spec.cache_layer)
        out = torch.empty((len(q_THd), spec.n_heads * spec.head_dim), dtype=q_THd.dtype, device=q_THd.device)
        for one in self._items_of(item_tokens(spec.head_dim, spec.n_heads // spec.n_kv_heads)):
            attend(
                q_THd,
                keys,
                values,
                out,
                one.items_I4,
                self._table,
                block_tokens=self._kv.block_tokens,
                most_rows=one.most_rows,
                most_tokens=one.most_tokens,
                scale=spec.scale,
                window=spec.window,
                is_chunked=spec.is_chunked,
                softcap=spec.softcap,
                sinks=attention.sinks,
            )
        return out

    def _items_of(self, size: int) -> list[Items]:
        """Those of sequences with one row, and of all others in items of at most `size` tokens."""
        if self._recorded is not None:
            return self._recorded
        if size not in self._items:
            arrays = [singles_of(self._batch), items_of(self._batch, size)]
            longest = int(self._batch.context_tokens_S.max(initial=0))
            self._items[size] = [
                Items(tensor, int(array[:, 2].max()), longest)
                for array, tensor in zip(arrays, on_device(arrays, self._device), strict=True)
                if len(array)
            ]
        return self._items[size]


def _norms(attention: TorchAttention) -> tuple[torch.Tensor, torch.Tensor]:
    assert attention.q_norm is not None, "a spec with q/k norm is loaded with its weights"
    k_norm = attention.k_norm or attention.q_norm  # where a layer has no keys of its own there is none
    return attention.q_norm.weight, k_norm.weight


def runs_without_the_host(spec: ModelSpec) -> bool:
    """Whether the walk asks the device nothing on its way, so that its steps can be recorded."""
    if any(isinstance(one.mlp, MoeSpec) and kind_of_experts(one.mlp) is None for one in spec.layers):
        return False
    return not spec.state_layers and all(
        has_kernels_for(layer.attention) for layer in spec.layers if not layer.attention.is_absent
    )
