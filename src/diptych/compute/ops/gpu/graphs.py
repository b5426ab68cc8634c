"""Decode steps recorded once and replayed: one call in place of a launch for every kernel of every layer.

A graph is for a number of sequences and of blocks of the longest, both rounded up; places of a step that nobody has write
nothing and attend to nothing. Bits are those of the same kernels launched one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops.gpu.ops import Items, TritonOps, singles
from diptych.compute.ops.torch_ops import StepNumbers, on_device
from diptych.ground.clock import MonotonicClock

logger = logging.getLogger("diptych.compute")

MOST_SEQUENCES = 512  # of a recorded step; larger ones keep the device busy as they are
LEAST_BLOCKS = 16


class MakeOps(Protocol):
    """What makes the ops of one step."""

    def __call__(self, batch: ForwardBatch, kv: TorchKVStore, *, numbers: StepNumbers, singles: Items) -> TritonOps:
        """On numbers that are on the device."""
        ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, the numbers that it reads, and the logits that it leaves."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor
    logits_SV: torch.Tensor


class DecodeGraphs:
    """The recorded steps of one model, for each of its stores."""

    def __init__(self, make_ops: MakeOps, walk: Callable[[TritonOps], torch.Tensor], device: torch.device) -> None:
        self._make_ops = make_ops
        self._walk = walk
        self._device = device
        self._recorded: WeakKeyDictionary[TorchKVStore, dict[tuple[int, int], _Recorded]] = WeakKeyDictionary()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, batch: ForwardBatch, kv: TorchKVStore) -> torch.Tensor | None:
        """Logits [S, V] of a step of one token for each sequence, valid until the next; None: it is another kind of step."""
        if not is_decode(batch):
            return None
        size = rounded(batch.n_sequences), max(LEAST_BLOCKS, power_of_two(batch.block_table_SM.shape[1]))
        of_store = self._recorded.setdefault(kv, {})
        if size not in of_store:
            of_store[size] = self._record(kv, *size)
        recorded = of_store[size]
        on_device(step_arrays(batch, kv.block_tokens, *size), self._device, recorded.numbers)
        recorded.graph.replay()
        return recorded.logits_SV[: batch.n_sequences]

    def _record(self, kv: TorchKVStore, n_sequences: int, n_blocks: int) -> _Recorded:
        clock = MonotonicClock()
        begin_s = clock.now_s()
        batch = empty_step(n_sequences, n_blocks)
        arrays = step_arrays(batch, kv.block_tokens, n_sequences, n_blocks, n_real=0)
        numbers = torch.empty(sum(array.size for array in arrays), dtype=torch.long, device=self._device)
        *fields, items_I4 = on_device(arrays, self._device, numbers)
        on_it, items = StepNumbers(*fields), Items(items_I4, 1, n_blocks * kv.block_tokens)
        self._walk(
            self._make_ops(batch, kv, numbers=on_it, singles=items)
        )  # compiles and allocates what a recording may not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_SV = self._walk(self._make_ops(batch, kv, numbers=on_it, singles=items))
        logger.info("step recorded sequences=%d blocks=%d seconds=%.2f", n_sequences, n_blocks, clock.now_s() - begin_s)
        return _Recorded(graph, numbers, logits_SV)


def is_decode(batch: ForwardBatch) -> bool:
    """Whether each sequence has one token, all are drawn from in their order, and nothing else is asked."""
    n = batch.n_sequences
    if batch.n_tokens != n or n > MOST_SEQUENCES or batch.states is not None:
        return False
    if batch.adapters_S is not None or batch.both_ways_S is not None:
        return False
    return np.array_equal(batch.logits_rows_R, np.arange(n))


def power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << (n - 1).bit_length()


def rounded(n: int) -> int:
    """Up to a power of two, from 8 on to one in eight parts of it: at most a ninth of a step's places are nobody's."""
    step = max(1, power_of_two(n) // 16)
    return power_of_two(n) if n <= 8 else -(-n // step) * step


def empty_step(n_sequences: int, n_blocks: int) -> ForwardBatch:
    """A step that has the form of those that are recorded."""
    return ForwardBatch(
        token_ids_T=np.zeros(n_sequences, dtype=np.int32),
        query_start_S1=np.arange(n_sequences + 1, dtype=np.int32),
        context_tokens_S=np.ones(n_sequences, dtype=np.int32),
        block_table_SM=np.zeros((n_sequences, n_blocks), dtype=np.int32),
        logits_rows_R=np.arange(n_sequences, dtype=np.int32),
    )


def step_arrays(
    batch: ForwardBatch, block_tokens: int, n_sequences: int, n_blocks: int, n_real: int | None = None
) -> list[np.ndarray]:
    """The numbers of a step and its items, with places of nobody behind its sequences, or behind the first `n_real`."""
    n, width = batch.block_table_SM.shape
    n_real = n if n_real is None else n_real
    padded = empty_step(n_sequences, n_blocks)
    padded.token_ids_T[:n] = batch.token_ids_T
    padded.context_tokens_S[:n] = batch.context_tokens_S
    padded.block_table_SM[:n, :width] = batch.block_table_SM
    arrays = StepNumbers.arrays(padded, block_tokens)
    arrays[2] = np.where(np.arange(n_sequences) < n_real, arrays[2], -1)  # slots
    items = singles(padded)
    items[items[:, 0] >= n_real, 2:] = 0
    return [*arrays, items]
