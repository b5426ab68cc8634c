"""Layers whose index chooses what is attended to, on the torch backend: its keys, and the choice as a mask.

Legend: as in `ops`; n heads of the index, k queries, b blocks, p keys of a pool. The choice of entries is in `entries`.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from diptych.compute.ops.contract import AttentionSpec, RopeSpec
from diptych.compute.ops.torch.entries import TorchEntryOps
from diptych.compute.ops.torch.loader import TorchAttention, TorchNorm
from diptych.compute.ops.torch.queries import (
    Queries,
    best_blocks,
    best_pooled,
    best_pools,
    best_positions,
    index_scores,
    pooled,
    turned,
)


class TorchIndexOps(TorchEntryOps):
    """The part of `TorchOps` that is about them."""

    _device: torch.device
    _dtype: torch.dtype

    @abstractmethod
    def norm(self, x: torch.Tensor, weight: TorchNorm, *, eps: float, parts: int = 1) -> torch.Tensor:
        """h [T, D]."""

    @abstractmethod
    def _pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [slots, K, d] of a layer's cache, views."""

    @abstractmethod
    def _rotate(self, x_THd: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
        """[T, H, d], turned to the positions of the step."""

    @abstractmethod
    def _scaled_heads(self, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """q [T, H d], each head by its position."""

    def choose(self, h: torch.Tensor, low: torch.Tensor, attention: TorchAttention) -> None:
        """As a mask over all positions, of all heads or of each KV head."""
        spec, own, index = attention.spec, attention.index, attention.spec.own_index
        if index.entries is not None:
            return self.choose_entries(h, low, attention)
        assert own is not None
        assert own.key is not None
        assert own.norm is not None
        assert spec.rope is not None
        keys = self._index_keys(spec)
        k_Td = self.linear(h, own.key)
        if not index.by_means:
            k_Td = self._rotate(self.norm(k_Td, own.norm, eps=spec.index_eps)[:, None], spec.rope)[:, 0]
        keys[self._slots, : index.head_dim] = k_Td.to(keys.dtype)
        if own.gates is not None:
            assert own.offsets is not None
            keys[self._slots, index.head_dim :] = self.linear(h, own.gates).to(keys.dtype)
            self._pool_keys(keys, own.offsets)
        self._chosen = None
        longest = int(self._batch.context_tokens_S.max())
        if longest <= index.most:
            return
        q_Tnd = self._scaled_heads(self.linear(low, own.queries), own.scales).unflatten(-1, (index.n_heads, -1))
        q_Tnd = self._rotate(
            q_Tnd if own.q_norm is None else self.norm(q_Tnd, own.q_norm, eps=spec.norm_eps), spec.rope
        )
        weights_Tn = None if own.weights is None else self.linear(h, own.weights).float()
        n_masks = 1 if weights_Tn is not None or index.by_means else index.n_heads
        self._chosen = torch.zeros((len(h), n_masks, longest), dtype=torch.bool, device=self._device)
        for queries in self._queries.of(spec):
            n_sequences, n_seen = queries.slots.shape
            k_Bdc = keys[queries.slots, : index.head_dim].transpose(1, 2).float()
            q_Bknd = q_Tnd[queries.rows].unflatten(0, (n_sequences, -1))
            mask = None if queries.mask is None else queries.mask[:, 0]
            if weights_Tn is None:
                positions = self._positions[queries.rows].unflatten(0, (n_sequences, -1))
                if index.by_means:
                    k_Bbd = self.norm(pooled(k_Bdc, index.block).to(self._dtype), own.norm, eps=spec.index_eps)
                    firsts = torch.arange(k_Bbd.shape[1], device=self._device) * index.block
                    k_Bdb = turned(k_Bbd, firsts, spec.rope).transpose(1, 2).float()
                    chosen = best_pooled(q_Bknd, k_Bdb, positions, index, n_seen)[:, :, None]
                else:
                    chosen = best_blocks(q_Bknd, k_Bdc, positions, index)
            else:
                weights_Bkn = weights_Tn[queries.rows].unflatten(0, (n_sequences, -1))
                scores = index_scores(q_Bknd, k_Bdc[..., index.pool - 1 :: index.pool], weights_Bkn)
                if index.pool == 1:
                    chosen = best_positions(scores, mask, index.most)[:, :, None]
                else:
                    positions = self._positions[queries.rows].unflatten(0, (n_sequences, -1))
                    chosen = best_pools(scores, positions, index, n_seen)[:, :, None]
            self._chosen[queries.rows, :, :n_seen] = chosen.flatten(0, 1)

    def _pool_keys(self, keys: torch.Tensor, offsets_pd: torch.Tensor) -> None:
        """In the place of the last key of each pool that the step completes: what its keys are together. keys [slots, 2 d]."""
        pool, width = offsets_pd.shape
        ends = ((self._positions + 1) % pool == 0).nonzero()[:, 0]
        positions_np = self._positions[ends, None] - pool + 1 + torch.arange(pool, device=self._device)
        slots_np = self._slots_at(self._sequences()[ends, None], positions_np)
        k, gates = keys[slots_np].float().split(width, dim=-1)
        together = (torch.softmax(gates + offsets_pd, dim=1) * k).sum(dim=1)
        keys[self._slots[ends], :width] = together.to(keys.dtype)

    def _index_keys(self, spec: AttentionSpec) -> torch.Tensor:
        """[slots, d]: beside latents, or in a layer of their own."""
        if spec.index_place is not None:
            return self._pool(spec.index_place)[0][:, 0]
        assert spec.mla is not None
        return self._pool(spec.cache_layer)[0][:, 0, spec.mla.row :]

    def of_chosen(self, queries: Queries) -> torch.Tensor | None:
        """The mask of those that were chosen, too."""
        if self._chosen is None:
            return queries.mask
        n_sequences, n_seen = queries.slots.shape
        chosen = self._chosen[queries.rows, :, :n_seen].unflatten(0, (n_sequences, -1)).transpose(1, 2)
        return chosen if queries.mask is None else chosen & queries.mask
