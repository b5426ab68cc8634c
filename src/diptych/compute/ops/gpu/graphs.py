"""Steps recorded once and replayed: one call in place of a launch for every kernel of every layer.

A graph is for a form: the sizes of a step, rounded up. Places of a step that nobody has write nothing and attend to nothing.
Bits are those of the same kernels launched one by one.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops.gpu.launch import power_of_two
from diptych.compute.ops.gpu.ops import Items, TritonOps, items_of, singles_of
from diptych.compute.ops.torch.step_numbers import StepNumbers, on_device
from diptych.ground.clock import MonotonicClock

logger = logging.getLogger("diptych.compute")

MOST_SEQUENCES = 512  # of a recorded step; larger ones keep the device busy as they are
MOST_FORMS = 64  # kept: each has the logits of its rows
MET_BEFORE = 2  # times, until such a step is recorded: that takes as long as three steps
LEAST_BLOCKS = 16


class MakeOps(Protocol):
    """What makes the ops of one step."""

    def __call__(self, batch: ForwardBatch, kv: TorchKVStore, *, numbers: StepNumbers, items: list[Items]) -> TritonOps:
        """On numbers that are on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes of a step: of its arrays, and tokens of the largest of its items of several tokens."""

    n_tokens: int
    n_sequences: int
    n_blocks: int
    n_logits: int
    n_singles: int
    n_several: int
    most_rows: int

    @classmethod
    def of(
        cls, batch: ForwardBatch, n_blocks: int, singles: np.ndarray, several: np.ndarray, item_tokens: int, few: int
    ) -> Form:
        """Rounded up. n_blocks: of the longest context; few: tokens of items that take the smallest tile."""
        most = int(several[:, 2].max(initial=0))
        return cls(
            n_tokens=rounded(batch.n_tokens),
            n_sequences=rounded(batch.n_sequences),
            n_blocks=max(LEAST_BLOCKS, power_of_two(n_blocks)),
            n_logits=rounded(len(batch.logits_rows_R)),
            n_singles=rounded(len(singles)),
            n_several=rounded(len(several)),
            most_rows=few if most <= few else item_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A graph, the numbers that it reads, and the logits that it leaves."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor
    logits_RV: torch.Tensor


@dataclass(slots=True)
class _OfStore:
    """refused: forms that there was no memory for."""

    refused: set[Form] = field(default_factory=set)
    recorded: OrderedDict[Form, _Recorded] = field(default_factory=OrderedDict)
    met: Counter[Form] = field(default_factory=Counter)


class StepGraphs:
    """The recorded steps of one model, for each of its stores.

    item_tokens: of the model's items (`ops.item_tokens_of`), and of those that take the smallest tile. most_tokens: of a
    recorded step; larger ones compute longer than they are launched.
    """

    def __init__(
        self,
        make_ops: MakeOps,
        walk: Callable[[TritonOps], torch.Tensor],
        device: torch.device,
        *,
        item_tokens: tuple[int, int],
        most_tokens: int,
    ) -> None:
        self._make_ops = make_ops
        self._walk = walk
        self._device = device
        self._item_tokens = item_tokens
        self._most_tokens = most_tokens
        self._stores: WeakKeyDictionary[TorchKVStore, _OfStore] = WeakKeyDictionary()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, batch: ForwardBatch, kv: TorchKVStore) -> torch.Tensor | None:
        """Logits [R, V], valid until the next step; None: a step of this kind is not recorded, or not yet."""
        singles = singles_of(batch)
        is_decode = len(singles) == batch.n_sequences
        if not self._is_recordable(batch, is_decode):
            return None
        item_tokens, few = self._item_tokens
        several = items_of(batch, item_tokens)
        # a table is as wide as the longest context that there ever was
        n_blocks = -(-int(batch.context_tokens_S.max()) // kv.block_tokens)
        form = Form.of(batch, n_blocks, singles, several, item_tokens, few)
        of_store = self._stores.setdefault(kv, _OfStore())
        if form in of_store.refused:
            return None
        recorded = of_store.recorded.get(form)
        if recorded is None:
            of_store.met[form] += 1
            if not is_decode and of_store.met[form] <= MET_BEFORE:
                return None
        arrays = padded(batch, singles, several, kv.block_tokens, form)
        if recorded is None:
            try:
                recorded = self._record(batch, kv, arrays, form)
            except torch.OutOfMemoryError as error:
                logger.warning("step not recorded form=%s reason=%s", form, error)
                of_store.refused.add(form)
                return None
            of_store.recorded[form] = recorded
            while len(of_store.recorded) > MOST_FORMS:
                of_store.recorded.popitem(last=False)
        else:
            on_device(arrays, self._device, recorded.numbers)
        of_store.recorded.move_to_end(form)
        recorded.graph.replay()
        return recorded.logits_RV[: len(batch.logits_rows_R)]

    def _is_recordable(self, batch: ForwardBatch, is_decode: bool) -> bool:
        if batch.states is not None or batch.adapters_S is not None or batch.both_ways_S is not None:
            return False
        if is_decode:
            return batch.n_sequences <= MOST_SEQUENCES
        return batch.n_tokens <= self._most_tokens

    def _record(self, batch: ForwardBatch, kv: TorchKVStore, arrays: list[np.ndarray], form: Form) -> _Recorded:
        clock = MonotonicClock()
        begin_s = clock.now_s()
        numbers = torch.empty(sum(array.size for array in arrays), dtype=torch.long, device=self._device)
        *fields, singles, several = on_device(arrays, self._device, numbers)
        most_tokens = form.n_blocks * kv.block_tokens
        items = [Items(singles, 1, most_tokens), Items(several, form.most_rows, most_tokens)]
        on_it = StepNumbers(*fields), [one for one in items if len(one.items_I4)]
        # compiles and allocates what a recording may not; what it writes, the replay writes again
        self._walk(self._make_ops(batch, kv, numbers=on_it[0], items=on_it[1]))
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_RV = self._walk(self._make_ops(batch, kv, numbers=on_it[0], items=on_it[1]))
        logger.debug("step recorded form=%s seconds=%.2f", form, clock.now_s() - begin_s)
        return _Recorded(graph, numbers, logits_RV)


def rounded(n: int) -> int:
    """Up to a power of two, from 8 on in steps of a sixteenth of it: at most a ninth of a step's places are nobody's."""
    if n <= 8:
        return power_of_two(n) if n else 0
    step = max(1, power_of_two(n) // 16)
    return -(-n // step) * step


def padded(
    batch: ForwardBatch, singles: np.ndarray, several: np.ndarray, block_tokens: int, form: Form
) -> list[np.ndarray]:
    """The numbers of a step and its items, with places of nobody behind them."""
    tokens, positions, slots, rows, table = StepNumbers.arrays(batch, block_tokens)
    return [
        _filled(tokens, (form.n_tokens,)),
        _filled(positions, (form.n_tokens,)),
        _filled(slots, (form.n_tokens,), -1),
        _filled(rows, (form.n_logits,)),
        _filled(table[:, : form.n_blocks], (form.n_sequences, form.n_blocks)),
        _filled(singles, (form.n_singles, 4)),
        _filled(several, (form.n_several, 4)),
    ]


def _filled(array: np.ndarray, shape: tuple[int, ...], rest: int = 0) -> np.ndarray:
    whole = np.full(shape, rest, dtype=np.int64)
    whole[tuple(map(slice, array.shape))] = array
    return whole
