"""What the cpu backend will hold of a checkpoint's weights, by its own loader: every tensor is asked for and no matrix is read.

>>> what_is_held(Path("model.gguf")).nbytes["group4-g32-f16-zeros"]  # doctest: +SKIP
21504000
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diptych.compute.loading.decoder import load_decoder
from diptych.compute.loading.quant import QuantisedCheckpoint
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import LinearParts, WeightTensor
from diptych.compute.ops.cpu.handles import LinearHandle, TableHandle, is_table_too
from diptych.compute.ops.cpu.kernels import is_available
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.compute.runner import open_blueprint
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import told_of

# beside the formats: norms and the like, and an embedding that is not the head
VECTORS, TABLE = "fp32 vectors", "embedding"
MANY_ROWS = 2**20  # more than any kernel takes at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """nbytes: by format, VECTORS and TABLE. dense, experts: weights of the layers by format, of experts and of all others.

    scratch: what the threads that multiply work in, all of them together, once a long prompt has passed.
    """

    nbytes: Mapping[str, int]
    scratch: int
    dense: Mapping[str, int]
    experts: Mapping[str, int]
    main_format: str
    head_format: str


def what_is_held(path: Path, weights: str = "auto") -> Held | None:
    """Of a model's file or folder, by the format that is asked for. None without the kernels; raises as loading does."""
    if not is_available()[0]:
        return None
    opened = open_blueprint(path, ComputeConfig(backend="cpu", weights=weights))
    blueprint, source = opened.blueprint, opened.blueprint.source
    loader = _Measure(opened.config, source)
    if isinstance(source, QuantisedCheckpoint):  # of which only who packs asks for everything
        with told_of(source.origin):
            handles = load_decoder(source, loader, blueprint.spec)
    else:
        handles = blueprint.load(loader)
    return Held(
        nbytes=dict(loader.nbytes),
        scratch=loader.scratch * loader.placement.threads,
        dense=dict(loader.n_values - loader.of_experts),
        experts=dict(loader.of_experts),
        main_format=loader.main_format,
        head_format=loader.main_format if handles.head is None else handles.head.format,
    )


class _Measure(CpuLoader):
    """Decides as the loader does, and counts bytes where that would pack."""

    def __init__(self, config: ComputeConfig, source: Source) -> None:
        super().__init__(config, source)
        self.nbytes: Counter[str] = Counter()
        self.scratch = 0  # of one thread: that of its largest layer
        self.is_routed = False  # weights take some of the rows
        self.of_experts: Counter[str] = Counter()

    def experts(self, *args: Any, **kwargs: Any) -> Any:
        before = self.n_values.copy()
        self.is_routed = True
        handle = super().experts(*args, **kwargs)
        self.is_routed = False
        self.of_experts += self.n_values - before
        return handle

    def table(self, tensor: WeightTensor, *, head: LinearHandle | None) -> TableHandle | LinearHandle:
        if head is not None and is_table_too(head, tensor):
            return head
        self.nbytes[TABLE] += tensor.dtype.itemsize * tensor.shape[0] * tensor.shape[1]
        return TableHandle(index=0, width=tensor.shape[1])

    def _vector(self, tensor: WeightTensor, offset: float = 0.0, *, rows: slice = slice(None)) -> int:
        del offset
        self.nbytes[VECTORS] += 4 * len(range(*rows.indices(math.prod(tensor.shape))))
        return 0

    def _add_vector(self, values: torch.Tensor) -> int:
        self.nbytes[VECTORS] += 4 * values.numel()
        return 0

    def _add(self, shape: Any, *args: Any) -> tuple[int, bool]:
        weights_format: str = args[-2]
        self.nbytes[weights_format] += shape.packed_bytes
        threads = self.placement.threads
        scratch = self.program.linear_scratch_bytes(shape, MANY_ROWS, is_routed=self.is_routed, threads=threads)
        self.scratch = max(self.scratch, scratch)
        return 0, True

    def _note_exponents(self, key: str, parts: LinearParts, *, is_packed: bool) -> None:
        pass
