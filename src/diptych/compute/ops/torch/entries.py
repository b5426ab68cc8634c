"""Rows that all heads meet as they are, and entries beside them (DeepSeek V4), on the torch backend.

Legend: as in `ops`; d a row's width, E entries, n series of an entry, k queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore, TorchStates
from diptych.compute.ops.contract import AttentionSpec
from diptych.compute.ops.torch.loader import TorchAttention, TorchEntries, TorchLinear
from diptych.compute.ops.torch.queries import Queries, QueryGroups, best_positions, index_scores
from diptych.compute.ops.torch.states import groups_of
from diptych.models.latent import EntrySpec

NO_GATE = float("-inf")


def turned_end(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], *, is_back: bool = False) -> torch.Tensor:
    """x [.., d] fp32 whose last numbers turn, neighbours together, by (cos, sin) [.., half] that fit before them."""
    cos, sin = turns
    sin = -sin if is_back else sin
    width = 2 * cos.shape[-1]
    first, second = x[..., -width::2], x[..., x.shape[-1] - width + 1 :: 2]
    end = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., : x.shape[-1] - width], end], dim=-1)


def move_entries(
    x_TC: torch.Tensor,
    offsets: torch.Tensor,
    entries: EntrySpec,
    states: TorchStates,
    batch: ForwardBatch,
    positions_T: torch.Tensor,
) -> torch.Tensor:
    """[T, d] fp32: what ends with a token, zeros where nothing does; x has the series and their gates."""
    assert batch.states is not None, "a step of a model with states names their places"
    n = entries.n_series
    values_Tnd, gates_Tnd = (one.unflatten(-1, (n, -1)) for one in x_TC.float().chunk(2, dim=-1))
    offsets_tnd = offsets.unflatten(-1, (n, -1))
    out = torch.zeros_like(values_Tnd[:, 0])
    for sequences, pieces in groups_of(batch):
        sums, tails = states.read([int(batch.states.reads_S[s]) for s in sequences])
        for rows, places in pieces:
            numbers = torch.arange(len(x_TC), device=x_TC.device)[rows].unflatten(0, (len(sequences), -1))
            first = 0
            while first < numbers.shape[1]:  # as far as an entry reaches; of several sequences each has one row
                at_B = positions_T[numbers[:, first]] % entries.tokens
                end = min(numbers.shape[1], first + entries.tokens - int(at_B[0])) if len(sequences) == 1 else 1
                own = numbers[:, first:end]
                places_Bk = positions_T[own] % entries.tokens
                sums = _begun(sums, at_B, positions_T[own[:, 0]])
                sums = _taken(sums, gates_Tnd[own] + offsets_tnd[places_Bk], values_Tnd[own])
                done = places_Bk[:, -1] == entries.tokens - 1
                out[own[:, -1][done]] = sums[done, -1, 2] / sums[done, -1, 1]
                first = end
            for place in places:
                states.write([place], sums, tails)
        states.write([int(batch.states.writes_S[s]) for s in sequences], sums, tails)
    return out


def _begun(sums: torch.Tensor, at_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Sums [B, n, 3, d] where an entry begins, with what the one before has left for it; others as they are."""
    fresh = torch.zeros_like(sums)
    fresh[:, :, 0] = NO_GATE
    begun = fresh.clone()
    if sums.shape[1] == 2:
        begun[:, 1] = torch.where((positions_B == 0)[:, None, None], fresh[:, 0], sums[:, 0])
    return torch.where((at_B == 0)[:, None, None, None], begun, sums)


def _taken(sums: torch.Tensor, gates_Bknd: torch.Tensor, values_Bknd: torch.Tensor) -> torch.Tensor:
    most = torch.maximum(sums[:, :, 0], gates_Bknd.amax(dim=1))
    kept, weights = torch.exp(sums[:, :, 0] - most), torch.exp(gates_Bknd - most[:, None])
    both = (sums[:, :, 1] * kept + weights.sum(dim=1), sums[:, :, 2] * kept + (weights * values_Bknd).sum(dim=1))
    return torch.stack([most, *both], dim=2)


class TorchEntryOps(ABC):
    """The part of `TorchOps` that is about them."""

    _batch: ForwardBatch
    _kv: TorchKVStore
    _positions: torch.Tensor  # [T]
    _slots: torch.Tensor  # [T]
    _table: torch.Tensor  # [S, M]
    _queries: QueryGroups
    _chosen: torch.Tensor | None

    @abstractmethod
    def linear(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """y [T, N]."""

    def cache_row(self, kv: torch.Tensor, attention: TorchAttention) -> None:
        """`cache_latents` of a row that is met as it is."""
        latent, keys = attention.latent, self._rows_of(attention.spec)
        assert latent is not None
        assert latent.norm is not None
        row = kv.shape[-1]
        rows = turned_end(
            _normed(kv, latent.norm.weight, attention.spec), self._angles(attention.spec, self._positions)
        )
        keys[self._slots, :row] = rows.to(keys.dtype)

    def cache_entries(self, h: torch.Tensor, attention: TorchAttention) -> None:
        """A part of each in the rows of the tokens that share it."""
        spec, latent, keys = attention.spec, attention.latent, self._rows_of(attention.spec)
        assert latent is not None
        assert latent.entries is not None
        assert spec.entries is not None
        made = self._made(h, latent.entries, spec, spec.entries, spec.entry_places[0])
        shared_by, row = spec.entries.shared_by, spec.head_dim
        share = row // shared_by
        keys[self._slots, row : row + share] = 0.0
        ends = ((self._positions + 1) % spec.entries.tokens == 0).nonzero()[:, 0]
        before = torch.arange(1 - shared_by, 1, device=ends.device)
        slots = self._slots_at(self._sequences()[ends, None], self._positions[ends, None] + before)
        keys[slots, row : row + share] = made[ends].unflatten(-1, (shared_by, share)).to(keys.dtype)

    def choose_entries(self, h: torch.Tensor, low: torch.Tensor, attention: TorchAttention) -> None:
        """`choose` of entries, as a mask over all of them."""
        spec, own, keys = attention.spec, attention.index, self._rows_of(attention.spec)
        index = spec.own_index
        assert own is not None
        assert own.weights is not None
        assert own.entries is not None
        assert index.entries is not None
        tokens, behind = index.entries.tokens, keys.shape[-1] - index.head_dim
        made = self._made(h, own.entries, spec, index.entries, spec.entry_places[1])
        is_end = (self._positions + 1) % tokens == 0
        keys[self._slots, behind:] = torch.where(is_end[:, None], made, 0.0).to(keys.dtype)
        self._chosen = None
        n_entries = int(self._batch.context_tokens_S.max()) // tokens
        if n_entries <= index.most:
            return
        q_Tnd = self.linear(low, own.queries).unflatten(-1, (index.n_heads, -1)).float()
        cos, sin = self._angles(spec, self._positions)
        q_Tnd = turned_end(q_Tnd, (cos[:, None], sin[:, None])).to(low.dtype)
        weights_Tn = self.linear(h, own.weights).float()
        self._chosen = torch.zeros((len(h), 1, n_entries), dtype=torch.bool, device=h.device)
        for queries in self._queries.of(spec):
            sequences_B = self._sequences_of(queries)
            ends_E = (torch.arange(n_entries, device=h.device) + 1) * tokens - 1
            slots = self._slots_at(sequences_B[:, None], ends_E[None])
            q_Bknd = q_Tnd[queries.rows].unflatten(0, (len(sequences_B), -1))
            weights_Bkn = weights_Tn[queries.rows].unflatten(0, (len(sequences_B), -1))
            scores = index_scores(q_Bknd, keys[slots, behind:].transpose(1, 2).float(), weights_Bkn)
            is_whole = self._are_whole(queries, len(sequences_B), tokens, n_entries)
            chosen = best_positions(scores, is_whole, index.most) & is_whole
            self._chosen[queries.rows, 0] = chosen.flatten(0, 1)

    def with_entries(
        self, queries: Queries, k_BKCd: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the window with entries behind them, and the mask of both."""
        if spec.entries is None:
            return k_BKCd, queries.mask
        keys, tokens, shared_by = self._rows_of(spec), spec.entries.tokens, spec.entries.shared_by
        n_entries = int(self._batch.context_tokens_S.max()) // tokens
        if n_entries == 0:
            return k_BKCd, queries.mask
        sequences_B = self._sequences_of(queries)
        last = (torch.arange(n_entries, device=keys.device) + 1) * tokens - 1
        positions = last[:, None] + torch.arange(1 - shared_by, 1, device=keys.device)
        slots = self._slots_at(sequences_B[:, None, None], positions[None])  # [B, E, shared_by]
        row = spec.head_dim
        entries = keys[slots, row : row + row // shared_by].flatten(2).to(k_BKCd.dtype)
        mask = self._are_whole(queries, len(sequences_B), tokens, n_entries)
        if spec.index is not None and self._chosen is not None:
            mask = mask & self._chosen[queries.rows, 0].unflatten(0, (len(sequences_B), -1))
        near = queries.mask
        if near is None:
            near = torch.ones((1, 1, 1, k_BKCd.shape[2]), dtype=torch.bool, device=mask.device)
        near = near.expand(len(mask), 1, mask.shape[1], -1)
        return torch.cat([k_BKCd, entries[:, None]], dim=2), torch.cat([near, mask[:, None]], dim=-1)

    def turn_queries(self, q: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """`absorb` of rows that are met as they are: q [T, H, d]."""
        spec = attention.spec
        cos, sin = self._angles(spec, self._positions)
        q_THd = F.rms_norm(q.unflatten(-1, (spec.n_heads, -1)).float(), (spec.head_dim,), eps=spec.norm_eps)
        return turned_end(q_THd, (cos[:, None], sin[:, None])).to(q.dtype)

    def expand_groups(self, a: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """`expand` of rows that are met as they are: [T, H v]."""
        spec, latent = attention.spec, attention.latent
        assert latent is not None
        cos, sin = self._angles(spec, self._positions)
        a_THd = a.unflatten(-1, (spec.n_heads, -1)).float()
        turned = turned_end(a_THd, (cos[:, None], sin[:, None]), is_back=True).to(a.dtype)
        return torch.einsum(
            "tgk,gnk->tgn", turned.flatten(1).unflatten(-1, (len(latent.values), -1)), latent.values
        ).flatten(1)

    def _made(
        self, h: torch.Tensor, own: TorchEntries, spec: AttentionSpec, entries: EntrySpec, place: int
    ) -> torch.Tensor:
        """[T, d] fp32: entries that end with a token, normed and turned as their first."""
        x = self.linear(h, own.series)
        made = move_entries(x, own.offsets, entries, self._kv.states[place], self._batch, self._positions)
        firsts = (self._positions + 1 - entries.tokens).clamp(min=0)
        return turned_end(_normed(made, own.norm.weight, spec), self._angles(spec, firsts))

    def _angles(self, spec: AttentionSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, half] in fp32."""
        assert spec.rope is not None
        angles = positions[:, None].float() * torch.tensor(spec.rope.inv_freq, device=positions.device)
        return angles.cos() * spec.rope.attention_factor, angles.sin() * spec.rope.attention_factor

    def _rows_of(self, spec: AttentionSpec) -> torch.Tensor:
        """[slots, width] of a layer's cache, a view."""
        return self._kv.layers[spec.cache_layer][0].flatten(0, 1)[:, 0]

    def _sequences(self) -> torch.Tensor:
        """[T]: whose each token is."""
        ends = torch.tensor(self._batch.query_start_S1[1:-1], device=self._positions.device).long()
        numbers = torch.arange(len(self._positions), device=self._positions.device)
        return torch.bucketize(numbers, ends, right=True)

    def _sequences_of(self, queries: Queries) -> torch.Tensor:
        """[B]."""
        return self._sequences()[queries.rows].unflatten(0, (len(queries.slots), -1))[:, 0]

    def _slots_at(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of positions of sequences; beyond a sequence's tokens that of its last: what is masked has to be numbers, too."""
        block = self._kv.block_tokens
        ends_S = torch.tensor(self._batch.context_tokens_S, device=positions.device)
        positions = positions.minimum(ends_S[sequences] - 1)
        return self._table[sequences, positions // block] * block + positions % block

    def _are_whole(self, queries: Queries, n_sequences: int, tokens: int, n_entries: int) -> torch.Tensor:
        """[B, k, E]: which entries each query may see."""
        positions_Bk = self._positions[queries.rows].unflatten(0, (n_sequences, -1))
        return torch.arange(n_entries, device=positions_Bk.device) < ((positions_Bk + 1) // tokens)[..., None]


def _normed(x: torch.Tensor, weight: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, spec.norm_eps)
