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
from diptych.compute.ops.gpu.attention import attend, few_tokens, item_tokens
from diptych.compute.ops.gpu.index import cache_keys, highest, score
from diptych.compute.ops.gpu.latents import (
    attend_latents,
    cache_latents,
    multiply_heads,
)
from diptych.compute.ops.gpu.products import mix, multiply
from diptych.compute.ops.gpu.rows import rms_norm, rotate_and_cache
from diptych.compute.ops.torch.device_codes import JoinedWeight, Weight
from diptych.compute.ops.torch.loader import TorchAttention, TorchExperts, TorchLinear, TorchNorm
from diptych.compute.ops.torch.ops import TorchOps
from diptych.compute.ops.torch.routing import route
from diptych.compute.ops.torch.step_numbers import on_device
from diptych.models.gpu_kernels import GATES, kind_of_experts, missing_for
from diptych.models.spec import AttentionLayer, ModelSpec


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


def group_of(spec: AttentionSpec | AttentionLayer) -> int:
    """Query heads that meet the same keys."""
    return spec.n_heads // spec.n_kv_heads if spec.mla is None else spec.n_heads


def item_tokens_of(spec: ModelSpec) -> tuple[int, int]:
    """Tokens of an item of several in a recorded step, and of one that takes the smallest tile, whatever the layer."""
    groups = {group_of(layer.attention) for layer in spec.layers if not layer.attention.is_absent}
    return item_tokens(min(groups)), few_tokens(max(groups))


class TritonOps(TorchOps):
    """The ops of one step. numbers and items: on the device already, of a step that is recorded."""

    def __init__(
        self, batch: ForwardBatch, kv: TorchKVStore, *, items: list[Items] | None = None, **fields: Any
    ) -> None:
        super().__init__(batch, kv, **fields)
        self._items: dict[int, list[Items]] = {}
        self._recorded = items
        self._listed: torch.Tensor | None = None  # [T, most], of the last choice; None: all
        # rows with an adapter, whose part comes before what is fused for all others
        self._apart = torch.cat([rows for rows, _ in self._adapted]) if self._adapted else None

    def norm(self, x: torch.Tensor, weight: TorchNorm, *, eps: float, parts: int = 1) -> torch.Tensor:
        """h [T, D]."""
        if parts > 1 or weight.is_centred or weight.bias is not None:
            return super().norm(x, weight, eps=eps, parts=parts)
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, weight.weight, eps).view(x.shape)

    def _multiply(self, h: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(h, weight, bias)

    def _gated(self, h: torch.Tensor, weight: TorchLinear, tokens: torch.Tensor | None) -> torch.Tensor:
        kind = None if weight.activation is None else GATES.get(weight.activation)
        assert not isinstance(weight.weight, JoinedWeight), "the loader puts a gate into one format"
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
        weights_Tk, chosen_Tk = route(logits, experts, self._token_ids)
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
            v_scale=spec.v_scale,
        )
        if spec.query_scale is not None:
            q_THd = (q_THd * self._scales(spec.query_scale)[:, None, None]).to(q_THd.dtype)
        return q_THd

    def _prepared(self, qkv: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """qkv with what the kernel does not do: norms over more than a head, and values that are keys or are normed."""
        spec = attention.spec
        is_wide = spec.qk_norm in (QkNorm.FULL, QkNorm.HEADS, QkNorm.CENTRED)
        if not is_wide and (not spec.owns_kv or (spec.has_v and not spec.has_v_norm)):
            return qkv
        n_q, n_k, n_v = spec.n_heads * spec.head_dim, *(spec.n_kv_heads * d for d in (spec.head_dim, spec.value_dim))
        q, rest = qkv[:, :n_q], qkv[:, n_q:]
        if is_wide:
            q = self._normed(q, spec.n_heads, attention.q_norm, spec)
        if not spec.owns_kv:
            return q
        k, v = rest[:, :n_k], rest[:, -n_v:]
        if spec.has_v_norm:
            v = rms_norm(v.reshape(-1, spec.value_dim), None, spec.norm_eps).view(v.shape)
        return torch.cat([q, self._normed(k, spec.n_kv_heads, attention.k_norm, spec) if is_wide else k, v], dim=1)

    def _normed(self, x: torch.Tensor, n_heads: int, norm: TorchNorm | None, spec: AttentionSpec) -> torch.Tensor:
        if spec.qk_norm is QkNorm.FULL:
            return self._norm(x.contiguous(), norm, spec)
        return self._norm(x.unflatten(-1, (n_heads, -1)), norm, spec).flatten(1)

    def cache_latents(self, kv: torch.Tensor, attention: TorchAttention) -> None:
        """Latent and rotary key side by side, in their slots."""
        spec, latent = attention.spec, attention.latent
        assert latent is not None
        assert latent.norm is not None
        assert spec.rope is not None
        if not spec.rope.inv_freq:  # the kernel turns some dimensions at least
            super().cache_latents(kv, attention)
            return
        norm, turn = latent.norm.weight, self._turns(spec.rope)
        cache_latents(kv, self._slots, self._pool(spec.cache_layer)[0], weight=norm, turn=turn, eps=spec.norm_eps)

    def choose(self, h: torch.Tensor, low: torch.Tensor, attention: TorchAttention) -> None:
        """As lists of positions, where some see more than are chosen."""
        spec, own, index = attention.spec, attention.index, attention.spec.own_index
        if self._attends_by_torch(spec):
            super().choose(h, low, attention)
            return
        assert spec.mla is not None
        assert spec.rope is not None
        assert own is not None
        assert own.weights is not None
        assert own.key is not None
        assert own.norm is not None
        latents, turn, begin = self._pool(spec.cache_layer)[0], self._turns(spec.rope), spec.mla.row
        k = self.norm(self.linear(h, own.key), own.norm, eps=spec.index_eps)
        cache_keys(k, self._slots, latents, begin=begin, turn=turn)
        self._listed = None
        items = self._items_of(item_tokens(group_of(spec)))
        longest = max(one.most_tokens for one in items)
        if longest <= index.most:
            return
        none = latents[..., : index.head_dim]  # nothing is written to it
        q = rotate_and_cache(
            self.linear(low, own.queries),
            self._slots,
            none,
            none,
            n_heads=index.n_heads,
            head_dim=index.head_dim,
            owns_kv=False,
            turn=turn,
            norms=None,
            is_turned_first=False,
            eps=spec.norm_eps,
            v_scale=1.0,
        )
        weights = self.linear(h, own.weights).float()
        scores = torch.full((len(h), longest), float("-inf"), dtype=torch.float32, device=h.device)
        for one in items:
            score(
                q,
                weights,
                latents,
                scores,
                one.items_I4,
                self._table,
                begin=begin,
                block_tokens=self._kv.block_tokens,
                most_rows=one.most_rows,
            )
        self._listed = highest(scores, index.most)

    def absorb(self, q: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """q [T, H, r + p]."""
        spec, latent = attention.spec, attention.latent
        assert latent is not None
        assert spec.rope is not None
        if not spec.rope.inv_freq or latent.keys is None:
            return super().absorb(q, attention)
        if spec.query_scale is not None:
            q = (q * self._scales(spec.query_scale)[:, None]).to(q.dtype)
        q = self._scaled_heads(q, latent.scales)
        return multiply_heads(q.unflatten(-1, (spec.n_heads, -1)), latent.keys, turn=self._turns(spec.rope))

    def expand(self, a: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """[T, H v]."""
        assert attention.latent is not None
        if attention.latent.keys is None:
            return super().expand(a, attention)
        return multiply_heads(a.unflatten(-1, (attention.spec.n_heads, -1)), attention.latent.values).flatten(1)

    def attention(self, q_THd: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """a [T, H dv], of latent attention [T, H r]."""
        spec, mla = attention.spec, attention.spec.mla
        if self._attends_by_torch(spec):
            return super().attention(q_THd, attention)
        keys, values = self._pool(spec.cache_layer)
        width = spec.value_dim if mla is None else mla.kv_rank
        out = torch.empty((len(q_THd), spec.n_heads * width), dtype=q_THd.dtype, device=q_THd.device)
        for one in self._items_of(item_tokens(group_of(spec))):
            if mla is not None:
                attend_latents(
                    q_THd,
                    keys,
                    out,
                    one.items_I4,
                    self._table,
                    rank=mla.kv_rank,
                    block_tokens=self._kv.block_tokens,
                    most_rows=one.most_rows,
                    most_tokens=one.most_tokens,
                    scale=spec.scale,
                    chosen=None if spec.index is None else self._listed,
                )
                continue
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

    def _attends_by_torch(self, spec: AttentionSpec) -> bool:
        return missing_for(spec) is not None or self._batch.both_ways_S is not None

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
