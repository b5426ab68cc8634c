"""Which queries of a step attend together on the torch backend, to which slots of the cache, and what an index thinks of those.

Legend: as in `ops`; k queries, n heads of an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops.contract import AttentionSpec, RopeSpec
from diptych.compute.ops.torch.loader import TorchRelated
from diptych.models.latent import IndexSpec

# queries of one sequence are attended in slices, so that masks and scores stay small whatever the chunk
QUERY_ROWS = 512
INDEX_PRODUCTS = 2**26  # of an index's queries and keys, at one time


@dataclass(frozen=True, slots=True)
class Queries:
    """Rows of the step that attend together: B sequences x n queries over C gathered slots.

    rows: slice of T. slots [B, C] into the pool. mask [B, 1, n, C]: True where a query may look; None: plain causal.
    positions [B, n]: the queries'.
    """

    rows: slice | torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor


class QueryGroups:
    """The queries of one step, in groups that are made when a layer first asks for them. table: [S, M]."""

    def __init__(self, batch: ForwardBatch, table: torch.Tensor, block_tokens: int, device: torch.device) -> None:
        self._batch = batch
        self._table = table
        self._block_tokens = block_tokens
        self._device = device
        self._made: dict[tuple[int | None, bool], list[Queries]] = {}

    def of(self, spec: AttentionSpec) -> list[Queries]:
        """Those of a layer."""
        key = spec.window, spec.is_chunked
        if key not in self._made:
            self._made[key] = list(self._group(spec))
        return self._made[key]

    def _group(self, spec: AttentionSpec) -> Iterator[Queries]:
        """All sequences with one query together; every longer one alone, in slices of QUERY_ROWS queries.

        What attends both ways is here whole: its context is its own tokens.
        """
        both_ways_S = self._batch.both_ways_S
        starts = self._batch.query_start_S1.tolist()
        contexts = self._batch.context_tokens_S.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        single = [s for s, count in enumerate(counts) if count == 1]
        if single:
            yield self._decode_group(single, [starts[s] for s in single], [contexts[s] for s in single], spec)
        for s, count in enumerate(counts):
            if count == 1:
                continue
            for row in range(0, count, QUERY_ROWS):
                n_rows = min(QUERY_ROWS, count - row)
                end = contexts[s] - count + row + n_rows  # positions of this slice: [end - n_rows, end)
                if both_ways_S is not None and both_ways_S[s]:
                    assert contexts[s] == count, "a sequence that attends both ways must come whole"
                    yield self._both_ways_slice(s, starts[s] + row, (row, end), count, spec.window)
                else:
                    yield self._prefill_slice(s, starts[s] + row, n_rows, end, spec)

    def _decode_group(self, sequences: list[int], rows: list[int], ends: list[int], spec: AttentionSpec) -> Queries:
        span = max(ends) if spec.window is None else min(spec.window, max(ends))
        end_S1 = torch.tensor(ends, device=self._device)[:, None]
        # [end - span, end): the last `span` positions of each sequence; those before its beginning are masked
        positions_SC = end_S1 - span + torch.arange(span, device=self._device)
        if spec.window is None:
            positions_SC = torch.arange(span, device=self._device).expand(len(ends), -1)
        is_seen_SC = (positions_SC >= 0) & (positions_SC < end_S1) & (positions_SC >= spec.first_seen(end_S1 - 1))
        table = self._table[torch.tensor(sequences, device=self._device)]
        # what is masked is multiplied, too, by nothing: of the sequence's own tokens, as elsewhere may lie what is no number
        slots_SC = self._slots_of(table, positions_SC.clamp(min=0).minimum(end_S1 - 1))
        mask = None if bool(is_seen_SC.all()) else is_seen_SC[:, None, None]
        return Queries(torch.tensor(rows, device=self._device), slots_SC, mask, end_S1 - 1)

    def _prefill_slice(self, sequence: int, row: int, n_rows: int, end: int, spec: AttentionSpec) -> Queries:
        first_query = end - n_rows
        begin = max(0, spec.first_seen(first_query))
        positions_C = torch.arange(begin, end, device=self._device)
        slots = self._slots_of(self._table[sequence][None], positions_C[None])
        query_n1 = torch.arange(first_query, end, device=self._device)[:, None]
        mask_nC = (positions_C <= query_n1) & (positions_C >= spec.first_seen(query_n1))
        return Queries(slice(row, row + n_rows), slots, mask_nC[None, None], query_n1.T)

    def _both_ways_slice(
        self, sequence: int, row: int, queries: tuple[int, int], n_tokens: int, window: int | None
    ) -> Queries:
        """Queries [begin, end) of a whole sequence, against `window` positions to either side."""
        positions_C = torch.arange(n_tokens, device=self._device)
        slots = self._slots_of(self._table[sequence][None], positions_C[None])
        query_n1 = torch.arange(*queries, device=self._device)[:, None]
        mask = None if window is None else ((positions_C - query_n1).abs() <= window)[None, None]
        return Queries(slice(row, row + queries[1] - queries[0]), slots, mask, query_n1.T)

    def _slots_of(self, table_BM: torch.Tensor, positions_BC: torch.Tensor) -> torch.Tensor:
        block_tokens = self._block_tokens
        return table_BM.gather(1, positions_BC // block_tokens) * block_tokens + positions_BC % block_tokens


def gained_by_distance(
    spec: AttentionSpec, distances: torch.Tensor | None, positions_Bn: torch.Tensor, n_keys: int
) -> torch.Tensor | None:
    """What scores gain by how far keys lie from queries [B, K, G n, C] (`distances`), less what they lose by it (slopes), over
    keys that begin with their sequence; None: nothing. distances: as `Loader.attention` has them.
    """
    if not spec.slopes and distances is None:
        return None
    assert spec.window is None, "keys that begin later"
    nearer_BnC = torch.arange(n_keys, device=positions_Bn.device) - positions_Bn[..., None]
    gained = torch.zeros((), device=positions_Bn.device)
    if distances is not None:
        reach = distances.shape[1] // 2
        gained = distances[:, nearer_BnC.clamp(-reach, reach) + reach].transpose(0, 1)
    if spec.slopes:
        gained = gained + torch.tensor(spec.slopes, device=positions_Bn.device).view(-1, 1, 1) * nearer_BnC[:, None]
    return gained.unflatten(1, (spec.n_kv_heads, -1)).flatten(2, 3)


def gained_by_contents(
    related: TorchRelated, q_BHnd: torch.Tensor, k_BHCd: torch.Tensor, positions_Bn: torch.Tensor
) -> torch.Tensor:
    """What scores gain of what queries and keys say of the distance between them [B, H, n, C] fp32, over keys that begin with
    their sequence.
    """
    n_heads, n_keys, reach = k_BHCd.shape[1], k_BHCd.shape[2], len(related.places) // 2
    behind_BnC = positions_Bn[..., None] - torch.arange(n_keys, device=positions_Bn.device)
    places = related.places[behind_BnC.clamp(-reach, reach) + reach][:, None].expand(-1, n_heads, -1, -1)
    of_queries = torch.matmul(q_BHnd, related.keys.transpose(1, 2)).gather(3, places)
    of_keys = torch.matmul(k_BHCd, related.queries.transpose(1, 2)).gather(3, places.transpose(2, 3))
    return of_queries.float() + of_keys.transpose(2, 3).float()


def index_scores(q_Bknd: torch.Tensor, k_Bdc: torch.Tensor, weights_Bkn: torch.Tensor) -> torch.Tensor:
    """[B, k, C] fp32 of k queries of n heads each, so many at a time that their products stay small."""
    n_sequences, n_queries, n_heads, _ = q_Bknd.shape
    at_once = max(1, INDEX_PRODUCTS // (n_sequences * n_heads * max(1, k_Bdc.shape[2])))
    parts = []
    for first in range(0, n_queries, at_once):
        q = q_Bknd[:, first : first + at_once].float()
        products = F.relu(torch.matmul(q.flatten(1, 2), k_Bdc)).unflatten(1, (-1, n_heads))
        weights = weights_Bkn[:, first : first + at_once, None]
        parts.append(torch.matmul(weights, products).squeeze(2))
    return torch.cat(parts, dim=1)


def best_positions(scores_Bkc: torch.Tensor, mask_Bkc: torch.Tensor | None, most: int) -> torch.Tensor:
    """[B, k, C] bool: the `most` highest scores of each query, of positions where it may look."""
    if mask_Bkc is not None:
        scores_Bkc = scores_Bkc.masked_fill(~mask_Bkc, float("-inf"))
    return _highest(scores_Bkc, most)


def best_blocks(
    q_Bknd: torch.Tensor, k_Bdc: torch.Tensor, positions_Bk: torch.Tensor, index: IndexSpec
) -> torch.Tensor:
    """[B, k, n, C] bool: the positions of the blocks that each head chooses, of which the last reach behind the query's own.

    C begins with position 0. A query that sees no more blocks than are chosen has all of them, and perhaps some behind it.
    """
    n_queries, n_heads, n_seen = q_Bknd.shape[1], q_Bknd.shape[2], k_Bdc.shape[2]
    n_blocks = -(-n_seen // index.block)
    seen_Bk1c = torch.arange(n_seen, device=q_Bknd.device) <= positions_Bk[..., None, None]
    behind_Bk1b = positions_Bk[..., None, None] // index.block - torch.arange(n_blocks, device=q_Bknd.device)
    at_once = max(1, INDEX_PRODUCTS // (len(q_Bknd) * n_heads * n_seen))
    parts = []
    for first in range(0, n_queries, at_once):
        own = slice(first, first + at_once)
        q = q_Bknd[:, own].float()
        scores = torch.matmul(q.flatten(1, 2), k_Bdc).unflatten(1, (-1, n_heads))
        scores = scores.masked_fill(~seen_Bk1c[:, own], float("-inf"))
        scores = F.pad(scores, (0, n_blocks * index.block - n_seen), value=float("-inf"))
        of_blocks = scores.unflatten(-1, (n_blocks, index.block)).amax(dim=-1)
        is_local = (behind_Bk1b[:, own] >= 0) & (behind_Bk1b[:, own] < index.local)
        chosen = _highest(of_blocks.masked_fill(is_local, float("inf")), index.n_blocks)
        parts.append(chosen.repeat_interleave(index.block, dim=-1)[..., :n_seen])
    return torch.cat(parts, dim=1)


def best_pools(scores_Bkp: torch.Tensor, positions_Bk: torch.Tensor, index: IndexSpec, n_seen: int) -> torch.Tensor:
    """[B, k, C] bool: the positions of the pools of the highest scores of each query, of those that are whole up to its own,
    and all behind the last of them.
    """
    device = scores_Bkp.device
    n_whole_Bk1 = (positions_Bk[..., None] + 1) // index.pool
    is_whole = torch.arange(scores_Bkp.shape[2], device=device) < n_whole_Bk1
    chosen = _highest(scores_Bkp.masked_fill(~is_whole, float("-inf")), index.n_pools) & is_whole
    of_pools = F.pad(chosen.repeat_interleave(index.pool, dim=-1), (0, index.pool))[..., :n_seen]
    positions_c = torch.arange(n_seen, device=device)
    return of_pools | ((positions_c >= n_whole_Bk1 * index.pool) & (positions_c <= positions_Bk[..., None]))


def pooled(k_Bdc: torch.Tensor, block: int) -> torch.Tensor:
    """[B, blocks, d]: the mean of the keys of each whole block."""
    whole = k_Bdc.shape[2] // block
    return k_Bdc[:, :, : whole * block].unflatten(2, (whole, block)).mean(dim=-1).transpose(1, 2)


def turned(x_Bcd: torch.Tensor, positions_c: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Keys as `RopeSpec` says, at these positions."""
    angles = positions_c[:, None].float() * torch.tensor(rope.inv_freq, device=x_Bcd.device)
    cos, sin = ((one * rope.attention_factor).to(x_Bcd.dtype) for one in (angles.cos(), angles.sin()))
    half = rope.rotary_dim // 2
    first, second, rest = x_Bcd[..., :half], x_Bcd[..., half : 2 * half], x_Bcd[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def best_pooled(
    q_Bknd: torch.Tensor, k_Bdb: torch.Tensor, positions_Bk: torch.Tensor, index: IndexSpec, n_seen: int
) -> torch.Tensor:
    """[B, k, n_seen] bool: the positions of the whole blocks of the highest scores, and those that make none yet."""
    whole_Bk1 = (positions_Bk[..., None] + 1) // index.block
    weights = torch.ones(q_Bknd.shape[:3], device=q_Bknd.device)
    is_whole = torch.arange(k_Bdb.shape[2], device=q_Bknd.device) < whole_Bk1
    chosen = best_positions(index_scores(q_Bknd, k_Bdb, weights), is_whole, index.n_blocks) & is_whole
    chosen = F.pad(chosen.repeat_interleave(index.block, dim=-1), (0, n_seen))[..., :n_seen]
    return chosen | (torch.arange(n_seen, device=q_Bknd.device) >= whole_Bk1 * index.block)


def _highest(scores: torch.Tensor, most: int) -> torch.Tensor:
    best = scores.topk(min(most, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
