"""How large what enters each projection is over a text, for a balance that sees more than weights say (`loading.balance`).

In trained models some channels of the residual stream are ten times as large as the others whatever the text, and no weight
says so (arXiv 2208.07339, 2211.10438). So the model as it is reads a text once, and each projection notes the root of the mean
square of each of its inputs, over rows of one size: each has a scale of its own in 8 bits, and the first tokens of a text,
whose rows may be a hundred times as large, count as much as the others.

It computes in fp32 with torch's products, whatever the backend is, and holds no weights: a matrix is read when it is multiplied
by, all rows of the text meet it at once, and of the table only the text's rows are read. What it finds does not depend on the
number of threads, as each computes outputs of its own with one.

    calibration = Calibration(name="a digest", windows=lambda: [[1, 5, 7]], most_bytes=2**30)
    checkpoint.measured = measured_inputs(blueprint, calibration.windows())
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.model import Blueprint
from diptych.compute.ops.contract import LinearParts, WeightTensor
from diptych.compute.ops.cpus import allowed_cpus, choose_cpus
from diptych.compute.ops.torch.device_codes import Weight
from diptych.compute.ops.torch.loader import TorchLinear, TorchLoader, TorchNorm
from diptych.compute.ops.torch.ops import TorchOps
from diptych.ground.clock import MonotonicClock
from diptych.ground.errors import CapacityError, ConfigError, EngineError, UnsupportedModel
from diptych.models.config import HfConfig
from diptych.models.pooling import sees_both_ways

logger = logging.getLogger("diptych.compute")

BLOCK_TOKENS = 32
CPU, DTYPE = torch.device("cpu"), torch.float32
PIECE_VALUES = 2**24  # of a matrix that lie in memory at one time
TASK_ROWS = 256  # outputs that one thread computes by itself; fixed, as sums may depend on their number
# an octave: what is noise to the balance is no other number then (`compute.model.Blueprint.revisions` is of the numbers)
STEPS = 32
# rows of the middle size that are taken for seen beside those of a text: a channel that was quiet in it may speak in another
PRIOR_ROWS = 4
SMALLEST, SMALLEST_ROW = 1e-60, 1e-30  # of a row's mean square in fp64 and fp32: one of zeros says nothing
# By format of the weights: how many directions of what meets a projection its rounding heeds, of as many as the text has tokens
DIRECTIONS = {"int4": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A text to read before weights are packed. name: which text, and as how many tokens; part of the name of packed weights.

    windows: token ids of texts, each read from its beginning; a LoadError says why there are none; None: nothing is read.
    is_asked: somebody said so, and weights are balanced in no other way. most_bytes: of memory.
    """

    name: str
    windows: Callable[[], Sequence[Sequence[int]]] | None
    is_asked: bool = False
    most_bytes: int | None = None


def calibrated(
    blueprint: Blueprint, calibration: Calibration, *, threads: int | None = None, n_directions: int = 0
) -> Mapping[str, torch.Tensor]:
    """What `measured_inputs` finds over the text; nothing where there is none, nor, and the log says why, where it cannot be
    read: there is no tokenizer, or too little memory. Raises that where somebody named the text.
    """
    if calibration.windows is None:
        return {}
    begin_s = (clock := MonotonicClock()).now_s()
    try:
        windows = calibration.windows()
        found = measured_inputs(
            blueprint, windows, threads=threads, most_bytes=calibration.most_bytes, n_directions=n_directions
        )
    except EngineError as error:
        if calibration.is_asked:
            raise
        logger.warning("channels are balanced by the weights alone, without a text: %s", error)
        return {}
    logger.info(
        "calibrated text=%s tokens=%d projections=%d seconds=%.2f",
        calibration.name, sum(map(len, windows)), len(found), clock.now_s() - begin_s,
    )  # fmt: skip
    return found


def measured_inputs(
    blueprint: Blueprint,
    windows: Sequence[Sequence[int]],
    *,
    threads: int | None = None,
    most_bytes: int | None = None,
    n_directions: int = 0,
) -> dict[str, torch.Tensor]:
    """fp32 [1 + n, K] for each tensor that is a projection or a part of one, by its name. In front the root of the mean square
    over all tokens, each row brought to a mean square of 1 first, to a 32nd of an octave; behind it the strongest n_directions
    of those rows, fewer where there are fewer rows, and none of what sees some tokens alone, as experts do.

    windows: token ids of texts, each read from its beginning. A tensor that no token has met (an expert that none was sent to),
    or only one that is no number, is left out. ConfigError for windows without a token, or with one that the model has not;
    CapacityError where more than most_bytes would be held.
    """
    most_tokens = blueprint.spec.max_context_tokens
    windows = [window[:most_tokens] for window in windows if len(window)]
    n_tokens = sum(map(len, windows))
    if not n_tokens:
        raise ConfigError("the text to calibrate with has 0 tokens; at least 1 is needed")
    largest = max(max(window) for window in windows)
    if largest >= blueprint.spec.vocab_size:
        raise ConfigError(
            f"the text to calibrate with has token {largest}; the model has {blueprint.spec.vocab_size}",
            hint="the tokenizer is of another model",
        )
    loader = _Reading(most_bytes)
    with _single_threads():
        kv = _cache(blueprint, windows, loader)
        weights = blueprint.load(loader)
        with ThreadPoolExecutor(
            max_workers=threads or choose_cpus(None, "auto", allowed_cpus()).threads,
            initializer=torch.set_num_threads,
            initargs=(1,),
        ) as pool:
            ops = _Watching(pool, _batch(blueprint, windows, kv), kv, n_directions=n_directions, hold=loader.hold)
            with torch.no_grad():
                blueprint.forward(ops, weights)
    sizes = {key: seen.size for key, seen in ops.seen.items()}
    found = {
        key: torch.cat([size[None], ops.seen[key].directions])
        for key, size in sizes.items()
        if bool((size.isfinite() & (size > 0)).all())
    }
    return {name: found[key] for key, names in loader.names.items() if key in found for name in names}


def sent(measured: Mapping[str, torch.Tensor]) -> tuple[list[tuple[list[str], int, int]], bytes]:
    """What was measured as a head and a payload, for `received`: names that share numbers, their shape, and all of those."""
    shared: dict[int, list[str]] = {}
    for name, size in measured.items():
        shared.setdefault(id(size), []).append(name)
    sizes = [measured[names[0]] for names in shared.values()]
    head = [(names, *size.shape) for names, size in zip(shared.values(), sizes, strict=True)]
    return head, b"".join(size.numpy().tobytes() for size in sizes)


def received(head: Sequence[tuple[Sequence[str], int, int]], payload: bytes) -> dict[str, torch.Tensor]:
    """What was `sent`."""
    found: dict[str, torch.Tensor] = {}
    begin = 0
    for names, *shape in head:
        n_bytes = 4 * math.prod(shape)
        found |= dict.fromkeys(
            names, torch.frombuffer(bytearray(payload[begin : begin + n_bytes]), dtype=torch.float32).view(shape)
        )
        begin += n_bytes
    return found


@contextmanager
def _single_threads() -> Iterator[None]:
    """Torch's own threads cut sums as many of them there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cache(blueprint: Blueprint, windows: Sequence[Sequence[int]], loader: _Reading) -> TorchKVStore:
    """Room for all windows, one behind the other."""
    spec = blueprint.spec
    n_blocks = sum(map(_n_blocks, windows))
    loader.hold(n_blocks * BLOCK_TOKENS * sum(cache.elements for cache in spec.caches) * DTYPE.itemsize)
    loader.hold(len(windows) * spec.state_elements * DTYPE.itemsize)
    return TorchKVStore(
        heads=[cache.sizes for cache in spec.caches],
        n_blocks=n_blocks,
        block_tokens=BLOCK_TOKENS,
        dtype=DTYPE,
        device=CPU,
        revision="",
        forms=spec.states,
        n_places=len(windows),
    )


def _n_blocks(window: Sequence[int]) -> int:
    return -(-len(window) // BLOCK_TOKENS)


def _batch(blueprint: Blueprint, windows: Sequence[Sequence[int]], kv: TorchKVStore) -> ForwardBatch:
    """All windows in one step."""
    lens = np.array([len(window) for window in windows], dtype=np.int32)
    ends = np.cumsum([_n_blocks(window) for window in windows])
    table = np.zeros((len(windows), max(map(_n_blocks, windows))), dtype=np.int32)
    for row, window, end in zip(table, windows, ends, strict=True):
        row[: _n_blocks(window)] = np.arange(end - _n_blocks(window), end)
    places = np.arange(len(windows))
    return ForwardBatch(
        token_ids_T=np.concatenate([np.array(window, dtype=np.int32) for window in windows]),
        query_start_S1=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        context_tokens_S=lens,
        block_table_SM=table,
        logits_rows_R=np.arange(int(lens.sum()), dtype=np.int32) if blueprint.spec.has_head else np.zeros(0, np.int32),
        both_ways_S=np.ones(len(windows), dtype=np.int32) if _sees_both_ways(blueprint) else None,
        states=StatePlaces.of(np.full(len(windows), -1), places) if kv.n_places else None,
    )


def _sees_both_ways(blueprint: Blueprint) -> bool:
    """As far as the files tell: of a folder with code of its own, for which encoders are refused, the plain family is read."""
    try:
        return sees_both_ways(HfConfig(blueprint.hf_config))
    except UnsupportedModel:
        return False


class _Seen:
    """What has met one projection."""

    def __init__(self, n_inputs: int) -> None:
        self.directions = torch.empty(0, n_inputs)
        self._squares: torch.Tensor | float = 0.0
        self._rows = 0

    def add(self, h: torch.Tensor) -> None:
        """Rows [n, K]."""
        squares = h.double().square()
        self._squares = self._squares + (squares / squares.mean(-1, keepdim=True).clamp(min=SMALLEST)).sum(0)
        self._rows += len(h)

    @property
    def size(self) -> torch.Tensor:
        """The root of the mean square [K]."""
        squares = torch.as_tensor(self._squares)
        middle = (squares / self._rows).sqrt().mean()
        size = ((squares + PRIOR_ROWS * middle**2) / (self._rows + PRIOR_ROWS)).sqrt()
        return (size.log2().mul(STEPS).round() / STEPS).exp2().float()


def _strongest(h: torch.Tensor, n: int) -> torch.Tensor:
    """fp32 [n, K] of bf16: sums of the rows [T, K], each brought to a mean square of 1 first, that hold as much of their
    squares as any n could (subspace iteration, arXiv 0909.4061); the rows where there are no more, none where one is no number.
    """
    rows = h / h.square().mean(-1, keepdim=True).clamp(min=SMALLEST_ROW).sqrt()
    if not bool(rows.isfinite().all()):
        return h.new_empty(0, h.shape[1])
    if len(rows) > n:
        gram = (rows @ rows.T).double()
        basis = torch.eye(len(rows), dtype=torch.float64)[:: max(1, len(rows) // (2 * n))].T
        for _ in range(3):
            basis = torch.linalg.qr(gram @ basis).Q
        vectors = torch.linalg.eigh(basis.T @ gram @ basis).eigenvectors[:, -n:]
        rows = (basis @ vectors).T.to(DTYPE) @ rows
    return rows.bfloat16().to(DTYPE)


class _Unread:
    """A matrix [N, K] that is read when it is multiplied by."""

    def __init__(self, tensors: Sequence[WeightTensor]) -> None:
        self.tensors = tensors
        self.n_outputs = sum(tensor.shape[0] for tensor in tensors)

    def __len__(self) -> int:
        return self.n_outputs

    def product(self, h: torch.Tensor, pool: ThreadPoolExecutor) -> torch.Tensor:
        """H W^T [n, N] of h [n, K]: each piece of W is read while threads multiply by the one before."""
        y = h.new_empty(len(h), self.n_outputs)
        begin, k = 0, h.shape[1]
        working: list[Future[None]] = []
        for tensor in self.tensors:
            step = max(1, PIECE_VALUES // k // TASK_ROWS) * TASK_ROWS
            for first in range(0, tensor.shape[0], step):
                values = tensor.part(slice(first, min(first + step, tensor.shape[0])), k)
                _wait(working)
                working = [
                    pool.submit(
                        _multiply, h, values[row : row + TASK_ROWS], y[:, begin + row : begin + row + TASK_ROWS]
                    )
                    for row in range(0, len(values), TASK_ROWS)
                ]
                begin += len(values)
        _wait(working)
        return y


def _wait(working: Sequence[Future[None]]) -> None:
    for one in working:
        one.result()


def _multiply(h: torch.Tensor, values: torch.Tensor, y: torch.Tensor) -> None:
    # a copy, as a mapped file's numbers may lie anywhere, and sums may depend on that
    y[:, : len(values)] = torch.nn.functional.linear(h, values.to(DTYPE, copy=True))


class _Rows:
    """A table [V, D] of which rows are read when they are asked for."""

    def __init__(self, tensor: WeightTensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return self._tensor.shape[0]

    def new_empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """As of a tensor."""
        return torch.empty(shape, dtype=DTYPE)

    def __getitem__(self, at: torch.Tensor | int) -> torch.Tensor:
        """[*at, D]."""
        ids = torch.as_tensor(at)
        width = self._tensor.shape[1]
        own, places = ids.unique(return_inverse=True)
        rows = [self._tensor.part(slice(row, row + 1), width).to(DTYPE) for row in own.tolist()]
        return torch.cat(rows)[places.flatten()].view(*ids.shape, width)


class _Reading(TorchLoader):
    """Notes which tensors a handle is made of, by the id of its matrix, and holds no more than it has to, and may."""

    def __init__(self, most_bytes: int | None) -> None:
        super().__init__(CPU, DTYPE)
        self.names: dict[int, tuple[str, ...]] = {}
        self._most_bytes = most_bytes
        self._held_bytes = 0

    def hold(self, nbytes: int) -> None:
        """CapacityError where that is too much beside what is held."""
        self._held_bytes += nbytes
        if self._most_bytes is not None and self._held_bytes > self._most_bytes:
            raise CapacityError(
                f"to calibrate takes more than {self._held_bytes} bytes of memory; {self._most_bytes} may be used",
                hint="free memory, name a shorter text (--calibrate), or pack the model elsewhere (`diptych quantize`)",
            )

    def table(self, tensor: WeightTensor, *, head: TorchLinear | None) -> torch.Tensor:
        """Whose rows are not read yet."""
        return cast("torch.Tensor", _Rows(tensor))

    def router(self, parts: LinearParts) -> TorchLinear:
        """Watched as any projection: it sees every row that experts share."""
        return TorchLinear(self._weight(parts.weights), self._stack(parts.biases) if parts.biases else None)

    def _weight(self, tensors: tuple[WeightTensor, ...], *, is_gate: bool = False) -> Weight:
        weight = _Unread(tensors)
        self.names[id(weight)] = tuple(tensor.name for tensor in tensors)
        return cast("Weight", weight)

    def _stack(self, tensors: tuple[WeightTensor, ...]) -> torch.Tensor:
        self.hold(DTYPE.itemsize * sum(int(np.prod(tensor.shape)) for tensor in tensors))
        return super()._stack(tensors)


class _Watching(TorchOps):
    """Notes all rows that a matrix meets, and makes no logits."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        batch: ForwardBatch,
        kv: TorchKVStore,
        *,
        n_directions: int,
        hold: Callable[[int], None],
    ) -> None:
        super().__init__(batch, kv, device=CPU, dtype=DTYPE, wants_hidden=True)
        self._n_tokens, self._n_directions, self._hold = batch.n_tokens, n_directions, hold
        self.seen: dict[int, _Seen] = {}
        self._workers = pool

    def head(self, x: torch.Tensor, norm: TorchNorm | None, weight: TorchLinear | None, **rest: Any) -> torch.Tensor:
        """H [R, D], which the logits would be made of."""
        h = super().head(x, norm, weight, **rest)
        if weight is not None and len(h):
            self._note(weight.weight, h)
        return h

    def _note(self, weight: Weight, h: torch.Tensor) -> None:
        seen = self.seen.setdefault(id(weight), _Seen(h.shape[1]))
        if self._n_directions and len(h) == self._n_tokens and not len(seen.directions):
            self._hold(DTYPE.itemsize * self._n_directions * h.shape[1])
            seen.directions = _strongest(h, self._n_directions)
        seen.add(h)

    def _multiply(self, h: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(weight, _Unread):
            return super()._multiply(h, weight, bias)
        rows = h.flatten(0, -2)
        if not len(rows):
            return h.new_empty(*h.shape[:-1], len(weight))
        self._note(cast("Weight", weight), rows)
        y = weight.product(rows.contiguous(), self._workers).view(*h.shape[:-1], -1)
        return y if bias is None else y + bias
