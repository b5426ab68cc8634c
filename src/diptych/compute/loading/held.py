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
from diptych.compute.ops.contract import LinearParts, MixtureParts, Role, WeightTensor
from diptych.compute.ops.cpu.handles import ExpertsHandle, LinearHandle, TableHandle, is_table_too
from diptych.compute.ops.cpu.kernels import is_available
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.compute.ops.cpu.packing import Packer
from diptych.compute.ops.cpu.parts import Rows
from diptych.compute.runner import open_blueprint
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import told_of
from diptych.ground.formats import KeptFormat
from diptych.models.mlp import MoeSpec

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
    packer = loader.weigher
    return Held(
        nbytes=dict(packer.nbytes),
        scratch=packer.scratch * loader.placement.threads,
        dense=dict(packer.n_values - loader.n_expert_values),
        experts=dict(loader.n_expert_values),
        main_format=packer.main_format,
        head_format=packer.main_format if handles.head is None else handles.head.format,
    )


class _Weigher(Packer):
    """Decides as the packer does, and counts bytes where that would pack."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.nbytes: Counter[str] = Counter()
        self.scratch = 0  # of one thread: that of its largest layer
        self.is_routed = False  # weights take some of the rows

    def add(
        self,
        shape: Any,
        whole: Any,
        key: str,
        parts: LinearParts,
        rows: Rows | None,
        weights_format: str,
        kept: KeptFormat | None,
    ) -> tuple[int, bool]:
        self.nbytes[weights_format] += shape.packed_bytes
        scratch = self.program.linear_scratch_bytes(
            shape, MANY_ROWS, is_routed=self.is_routed, threads=self.threads_on.threads
        )
        self.scratch = max(self.scratch, scratch)
        return 0, True


class _Measure(CpuLoader):
    """The same of what is no projection."""

    packs_by = _Weigher

    def __init__(self, config: ComputeConfig, source: Source) -> None:
        super().__init__(config, source)
        assert isinstance(self.packer, _Weigher)
        self.weigher = self.packer

    def experts(self, spec: MoeSpec, parts: MixtureParts, *, role: Role | None = None) -> ExpertsHandle:
        self.weigher.is_routed = True
        handle = super().experts(spec, parts, role=role)
        self.weigher.is_routed = False
        return handle

    def table(self, tensor: WeightTensor, *, head: LinearHandle | None) -> TableHandle | LinearHandle:
        if head is not None and is_table_too(head, tensor):
            return head
        self.weigher.nbytes[TABLE] += tensor.dtype.itemsize * tensor.shape[0] * tensor.shape[1]
        return TableHandle(index=0, width=tensor.shape[1])

    def _vector(self, tensor: WeightTensor, offset: float = 0.0, *, rows: slice = slice(None)) -> int:
        del offset
        self.weigher.nbytes[VECTORS] += 4 * len(range(*rows.indices(math.prod(tensor.shape))))
        return 0

    def _add_vector(self, values: torch.Tensor) -> int:
        self.weigher.nbytes[VECTORS] += 4 * values.numel()
        return 0
