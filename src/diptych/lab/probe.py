"""Times single steps of a model, of any shape, without a scheduler: the lab's instrument.

A step is a list of `ChunkShape`s, as the cost model describes it, so that what is measured and what is predicted are the
same object. KV of positions before a chunk is whatever the pool holds: times do not depend on the values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.runner import Model
from diptych.cost.workload import ChunkShape, Workload
from diptych.ground.clock import MonotonicClock
from diptych.ground.errors import CapacityError

NOISY_SPREAD = 0.15  # (third quartile - first) / median beyond which a point proves nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Repeated timings of one thing. spread: interquartile range over the median."""

    median_s: float
    low_s: float
    high_s: float
    spread: float
    repeats: int

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Measured:
        """Summary of at least one timing."""
        ordered = sorted(times_s)
        median = statistics.median(ordered)
        n = len(ordered)
        return cls(
            median_s=median,
            low_s=ordered[0],
            high_s=ordered[-1],
            spread=(ordered[(3 * (n - 1)) // 4] - ordered[(n - 1) // 4]) / median if median else 0.0,
            repeats=n,
        )

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too unsteady to conclude anything from this."""
        return self.spread > NOISY_SPREAD


def measure(work: Callable[[], object], *, repeats: int, warm_ups: int = 1) -> Measured:
    """Time `work` `repeats` times after `warm_ups` untimed runs."""
    clock = MonotonicClock()
    for _ in range(warm_ups):
        work()
    times_s = []
    for _ in range(repeats):
        begin_s = clock.now_s()
        work()
        times_s.append(clock.now_s() - begin_s)
    return Measured.of(times_s)


class StepProbe:
    """A model with a KV pool of `max_tokens` positions, of which steps of any shape are timed."""

    def __init__(self, model: Model, *, max_tokens: int, block_tokens: int = 32) -> None:
        self.model = model
        self.block_tokens = block_tokens
        # each sequence may waste part of a block; 64 sequences are more than any experiment runs
        self._kv = model.make_kv(-(-max_tokens // block_tokens) + 64, block_tokens)

    def step(self, work: Workload) -> Callable[[], torch.Tensor]:
        """A function that runs this step once. Raises CapacityError when the pool is too small for its contexts."""
        batch = self._batch([shape for shape in work.shapes for _ in range(shape.count)])
        return lambda: self.model.forward(batch, self._kv)

    def time(self, work: Workload, *, repeats: int) -> Measured:
        """Wall time of one forward step, logits included."""
        return measure(self._synced(self.step(work)), repeats=repeats)

    def time_prompt(self, n_tokens: int, *, chunk_tokens: int, repeats: int) -> Measured:
        """Wall time of a whole prompt, read in chunks of at most `chunk_tokens`."""
        steps = []
        for start in range(0, n_tokens, chunk_tokens):
            size = min(chunk_tokens, n_tokens - start)
            shape = ChunkShape(new_tokens=size, start_pos=start, samples=start + size == n_tokens)
            steps.append(self._synced(self.step(Workload(shapes=(shape,)))))
        return measure(lambda: [step() for step in steps], repeats=repeats)

    def _synced(self, step: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            logits = step()
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)

        return run

    def _batch(self, shapes: Sequence[ChunkShape]) -> ForwardBatch:
        n_blocks_S = [-(-(shape.start_pos + shape.new_tokens) // self.block_tokens) for shape in shapes]
        if sum(n_blocks_S) > self._kv.n_blocks:
            raise CapacityError(f"the step needs {sum(n_blocks_S)} KV blocks; the probe has {self._kv.n_blocks}")
        table_SM = np.zeros((len(shapes), max(n_blocks_S)), dtype=np.int32)
        first = 0
        for row, n_blocks in zip(table_SM, n_blocks_S, strict=True):
            row[:n_blocks] = np.arange(first, first + n_blocks)
            first += n_blocks
        lens_S = np.array([shape.new_tokens for shape in shapes], dtype=np.int32)
        query_start_S1 = np.concatenate([[0], np.cumsum(lens_S)]).astype(np.int32)
        seq_T = np.repeat(np.arange(len(shapes), dtype=np.int32), lens_S)
        starts_S = np.array([shape.start_pos for shape in shapes], dtype=np.int32)
        positions_T = np.arange(len(seq_T), dtype=np.int32) - query_start_S1[seq_T] + starts_S[seq_T]
        slots_T = table_SM[seq_T, positions_T // self.block_tokens] * self.block_tokens
        return ForwardBatch(
            token_ids_T=(positions_T * 7919 + seq_T * 104729) % self.model.spec.vocab_size,
            positions_T=positions_T,
            slots_T=slots_T + positions_T % self.block_tokens,
            query_start_S1=query_start_S1,
            context_tokens_S=starts_S + lens_S,
            block_table_SM=table_SM,
            logits_rows_R=np.array(
                [end - 1 for end, shape in zip(query_start_S1[1:], shapes, strict=True) if shape.samples],
                dtype=np.int32,
            ),
        )
