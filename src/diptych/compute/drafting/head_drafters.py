"""Drafters that read the states of the model they draft for: EAGLE, one layer behind it, and Medusa, heads beside its own.

Legend: T rows of the step, D model dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from diptych.compute.batch import ForwardBatch
from diptych.compute.drafting.draft_store import DraftStore
from diptych.compute.drafting.drafter import Drafter, Followed, Job, Observe, PagedDrafter
from diptych.compute.kv_store import KVStore
from diptych.compute.model import Model, Want
from diptych.compute.ops.contract import Taps
from diptych.compute.sampling.sampler import SampledToken, Sampler
from diptych.ground.clock import Clock
from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.ground.step import Chunk, SequenceStart

Fuse = Callable[[torch.Tensor], torch.Tensor]  # the model's states [taps, T, D] as the rows that a head reads [T, D]


class EagleDrafter(PagedDrafter):
    """EAGLE: from the state behind token p and token p + 1 the state behind p + 1, and from that token p + 2.

    Position p of its store is that pair. True states are there only in the step that computes p: where it missed one (a cached
    prefix that it never read, a sequence that was given up for a while), it begins anew at the next block, with what it
    reads from there on.
    tokens_of: ids of its own vocabulary as the model's, None where they are the same.
    """

    def __init__(
        self,
        model: Model,
        store: DraftStore,
        sampler: Sampler,
        *,
        taps: tuple[int, ...],
        fuse: Fuse,
        again: Fuse = lambda states: states,
        tokens_of: torch.Tensor | None = None,
        vocab_size: int,
        clock: Clock,
        observe: Observe = lambda shape, seconds: None,
    ) -> None:
        super().__init__(model, store, sampler, most_rows=2**31, clock=clock, observe=observe, vocab_size=vocab_size)
        self.taps = taps
        self._fuse = fuse
        self._again = again  # its own states as what it reads next
        self._tokens_of = tokens_of

    def reads(self, chunk: Chunk) -> bool:
        """See Drafter."""
        if chunk.wanted_drafts is None:
            return False
        followed = self._followed.get(chunk.seq_id)
        if followed is None or chunk.phase is Phase.PREFILL:  # of a first chunk it is not known yet
            return True
        has_missed = followed.found is not None or followed.computed < chunk.start_pos
        return (
            not has_missed or -(-chunk.start_pos // self._store.block_tokens) * self._store.block_tokens < chunk.end_pos
        )

    def _job(
        self, followed: Followed, chunk: Chunk, given: Sequence[int], table_M: np.ndarray, *, rows: int
    ) -> Job | None:
        if chunk.wanted_drafts is None:
            return None
        block_tokens = self._store.block_tokens
        end = min(chunk.end_pos, len(followed.token_ids) - 1)  # of accepted drafts, and with the token behind
        if followed.computed < chunk.start_pos:
            followed.base = -(-chunk.start_pos // block_tokens)
        begin = max(chunk.start_pos, followed.base * block_tokens)
        room = self._model.spec.max_context_tokens - (end - followed.base * block_tokens) + 1
        if end <= begin or room < 1:
            followed.computed = max(end, followed.computed) if followed.base else followed.computed
            return None
        n_held = -(-end // block_tokens)
        wanted = min(chunk.wanted_drafts if given else 0, room)
        return Job(chunk.seq_id, followed, table_M, begin, end, n_held, wanted, shift=1)

    def _give(self, job: Job, states: torch.Tensor | None, first: int) -> None:
        assert states is not None, "the step has no states"
        job.given = states[:, first + job.begin : first + job.end]

    def _catch_up(self, jobs: Sequence[Job], tables: np.ndarray) -> None:
        fused = self._fuse(torch.cat([job.given for job in jobs if job.given is not None], dim=1))
        row = 0
        for job in jobs:
            n = job.end - job.begin
            job.given = fused[row : row + n]
            row += n
        super()._catch_up(jobs, tables)

    def _forward(self, jobs: Sequence[Job], batch: ForwardBatch, want: Want) -> Any:
        given = torch.cat([job.given for job in jobs if job.given is not None])
        taps = Taps(numbers=(0,))
        out = self._model.forward(batch, self._store.kv, want, given=given, taps=taps)  # type: ignore[call-overload]
        assert taps.states is not None
        last = torch.from_numpy(batch.query_start_S1[1:] - 1).to(torch.long)
        states = self._again(taps.states[0][last.to(taps.states.device)])
        for i, job in enumerate(jobs):
            job.given = states[i : i + 1]
        return self._as_ours(out, want)

    def _as_ours(self, out: Any, want: Want) -> Any:
        """In the model's vocabulary: what the drafter has no word for has no chance."""
        if self._tokens_of is None:
            return out
        if want is Want.BEST:
            return self._tokens_of[torch.tensor(out[0], dtype=torch.long)].tolist(), out[1]
        logits = torch.full((len(out), self._vocab_size), -torch.inf, dtype=out.dtype, device=out.device)
        logits[:, self._tokens_of.to(out.device)] = out
        return logits

    def _remember(self, job: Job) -> None:
        super()._remember(job)
        job.followed.fed = []  # computed from states that it guessed: again when the true ones are there


class MedusaDrafter(Drafter):
    """Medusa: head i guesses the token i + 1 places behind the next one from the last state, all in one small forward."""

    def __init__(
        self,
        model: Model,
        kv: KVStore,
        sampler: Sampler,
        *,
        n_heads: int,
        taps: tuple[int, ...],
        fuse: Fuse,
        clock: Clock,
        observe: Observe = lambda shape, seconds: None,
    ) -> None:
        self._model = model
        self._kv = kv  # for form's sake: nothing is kept
        self._sampler = sampler
        self._n_heads = n_heads
        self.taps = taps
        self._fuse = fuse
        self._clock = clock
        self._observe = observe

    def begin(self, start: SequenceStart) -> None:
        """Nothing is kept of a sequence."""

    def end(self, seq_id: int) -> None:
        """Nothing was kept."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """No blocks."""

    def follow(self, chunks: Sequence[Chunk], token_ids: Sequence[Sequence[int]]) -> None:
        """Nothing."""

    def reads(self, chunk: Chunk) -> bool:
        """See Drafter: the last state, where a guess is wanted."""
        return bool(chunk.wanted_drafts) and chunk.samples

    def propose(
        self,
        chunks: Sequence[Chunk],
        token_ids: Sequence[Sequence[int]],
        tables_CM: np.ndarray,
        states: torch.Tensor | None = None,
    ) -> Mapping[int, Sequence[int]]:
        """See Drafter."""
        begin_s = self._clock.now_s()
        asked: list[
            tuple[Chunk, int, int]
        ] = []  # chunk, its row that gave the newest token, where the first guess stands
        row = 0
        for chunk, given in zip(chunks, token_ids, strict=True):
            n = len(chunk.token_ids)
            if chunk.wanted_drafts and given:
                last = len(given) - 1 if chunk.phase is Phase.DECODE else n - 1
                asked.append((chunk, row + last, chunk.start_pos + last + 2))
            row += n
        self.n_read = len(asked)
        if not asked:
            return {}
        assert states is not None, "the step has no states"
        logits_kRV = self._logits(states[:, torch.tensor([row for _, row, _ in asked], device=states.device)])
        drafts = self._draw(asked, logits_kRV)
        shape = StepShape([ChunkShape(Phase.DECODE, 1, 1, True, len(asked))])
        self._observe(shape, self._clock.now_s() - begin_s)
        return drafts

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[heads, R, V]."""
        n = states.shape[1]
        ones = np.ones(n, dtype=np.int32)
        batch = ForwardBatch(
            token_ids_T=np.zeros(n, dtype=np.int32),
            query_start_S1=np.arange(n + 1, dtype=np.int32),
            context_tokens_S=ones,
            block_table_SM=np.zeros((n, 1), dtype=np.int32),
            logits_rows_R=np.zeros(0, dtype=np.int32),
        )
        taps = Taps(numbers=tuple(range(self._n_heads)))
        self._model.forward(batch, self._kv, Want.LOGITS, given=self._fuse(states), taps=taps)
        assert taps.states is not None
        return taps.states

    def _draw(self, asked: Sequence[tuple[Chunk, int, int]], logits_kRV: torch.Tensor) -> dict[int, list[int]]:
        """Head after head, as each stands behind the guess of the one before."""
        drafts: dict[int, list[int]] = {chunk.seq_id: [] for chunk, _, _ in asked}
        alive = list(range(len(asked)))
        for i, logits_RV in enumerate(logits_kRV):
            alive = [k for k in alive if i < (asked[k][0].wanted_drafts or 0)]
            if not alive:
                break
            seq_ids, positions = [asked[k][0].seq_id for k in alive], [asked[k][2] + i for k in alive]
            rows = logits_RV if len(alive) == len(logits_RV) else logits_RV[alive]
            over = []
            for k, seq_id, token in zip(alive, seq_ids, self._sampler.sample(rows, seq_ids, positions), strict=True):
                if isinstance(token, SampledToken):
                    drafts[seq_id].append(token.token_id)
                if not isinstance(token, SampledToken) or token.is_complete:
                    over.append(k)
            alive = [k for k in alive if k not in over]
        for chunk, _, position in asked:
            self._sampler.rewind(chunk.seq_id, position)
        return drafts


def normed(weight_D: torch.Tensor, eps: float) -> Fuse:
    """The model's last norm of its last layer's state [1, T, D]: what its output projection reads."""

    def fuse(states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states[-1], weight_D.shape, weight_D.to(states.device), eps)

    return fuse


def fused(model: Model, kv: KVStore, after: Fuse) -> Fuse:
    """EAGLE-3's fc over three states side by side, then `after`."""

    def fuse(states: torch.Tensor) -> torch.Tensor:
        n = states.shape[1]
        batch = ForwardBatch(
            token_ids_T=np.zeros(n, dtype=np.int32),
            query_start_S1=np.arange(n + 1, dtype=np.int32),
            context_tokens_S=np.ones(n, dtype=np.int32),
            block_table_SM=np.zeros((n, 1), dtype=np.int32),
            logits_rows_R=np.zeros(0, dtype=np.int32),
        )
        taps = Taps(numbers=(0,))
        given = states.transpose(0, 1).reshape(n, -1).contiguous()
        model.forward(batch, kv, Want.LOGITS, given=given, taps=taps)
        assert taps.states is not None
        return after(taps.states[0])

    return fuse
