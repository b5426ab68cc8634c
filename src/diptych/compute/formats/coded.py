"""Safetensors that another program quantised, as a `Source` of weights: values are kept where a kernel holds them.

A matrix is one under the name of a plain checkpoint (`model.layers.0.mlp.up_proj.weight`), whatever tensors it lies in. It is
handed out as codes (`WeightTensor.kept`) or dequantised; everything else is as in a plain checkpoint. Everything that can be
wrong with it is a LoadError before anything is loaded of it.

    checkpoint = CodedCheckpoint(directory, quantisation_of(config), dtype=torch.bfloat16)
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from diptych.compute.formats.layouts import companions_of_stack, open_matrix, open_stacked
from diptych.compute.formats.matrices import Matrix, RawTensors
from diptych.compute.formats.rotations import Rotations
from diptych.compute.formats.tensors import FLOATS, companions
from diptych.compute.loading.weights import Checkpoint, StackedTensor
from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.errors import LoadError
from diptych.ground.formats import ENGINE_WEIGHTS, mean_bytes
from diptych.models.quantised.fields import Quantisation
from diptych.models.quantised.method import CODES

# how names of scales of keys and values in a cache of 8 bits, which is not the engine's, end: of attention, or of a projection
OF_CACHE = (
    "k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "k_cache_scale", "v_cache_scale",
    "output_scale", "output_zero_point",
)  # fmt: skip
logger = logging.getLogger("diptych.compute")


class CodedTensor(WeightTensor):
    """A quantised matrix. dtype: of what `read` gives."""

    random_seed: int | None = None

    def __init__(self, name: str, shape: tuple[int, int], dtype: torch.dtype, matrix: Matrix) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.matrix = matrix
        self.kept = matrix.kept
        self.order = matrix.order if matrix.kept is not None else None

    def read(self) -> torch.Tensor:
        """Dequantised plainly in fp32, then rounded to dtype; new."""
        return self.matrix.values(slice(None)).to(self.dtype)

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """Some rows and the first columns."""
        return self.matrix.values(rows)[:, :n_columns].to(self.dtype)

    def codes(self) -> Codes:
        """As `kept` says."""
        return self.matrix.codes()


class CodedStack(StackedTensor):
    """Experts [E, n, k] in one tensor. dtype: of what `read` gives."""

    random_seed: int | None = None

    def __init__(self, checkpoint: CodedCheckpoint, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self._checkpoint = checkpoint

    def entry(self, index: int) -> CodedTensor:
        """The matrix of one expert."""
        return self._checkpoint.stacked(self.name, index)

    def read(self) -> torch.Tensor:
        """Dequantised; new."""
        return torch.stack([self.entry(e).read() for e in range(self.shape[0])])


class CodedCheckpoint(Checkpoint):
    """The quantised and the plain tensors of one folder. dtype: of dequantised values."""

    is_keeping = True

    def __init__(self, directory: Path, how: Quantisation, *, dtype: torch.dtype) -> None:
        super().__init__(directory)
        self.how = how
        self._dtype = dtype
        self._matrices: dict[str, CodedTensor] = {}
        self._coded: set[str] = set()  # the files' tensors that those lie in
        self._rotations = Rotations(self, sorted(self._file_of), how)

    def holds(self, name: str) -> bool:
        """Whether the files hold a tensor of that very name."""
        return super().has(name)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of a tensor of the files."""
        view = self._files[self._file_of[name]].get_slice(name)
        return tuple(view.get_shape()), str(view.get_dtype())

    def stored(self, name: str) -> torch.Tensor:
        """The values of a tensor of the files."""
        return self.read(name)

    def has(self, name: str) -> bool:
        """Whether there is a tensor, plain or quantised, that a plain checkpoint would call so."""
        return self.holds(name) or any(self.holds(name.removesuffix("weight") + suffix) for suffix in CODES)

    def tensor(self, name: str, *shape: int) -> WeightTensor:  # type: ignore[override]
        """The tensor of that name, checked against the shape the config gives. Raises LoadError."""
        matrix = None
        if len(shape) == 3 and self._is_stack(name):
            return self._stack(name, (shape[0], shape[1], shape[2]))
        if name.endswith(".weight") and len(shape) == 2:
            raw, prefix = self.place(name.removesuffix(".weight"))
            matrix = open_matrix(raw, prefix, (shape[0], shape[1]), self.how)
            matrix = self._rotations.applied(raw, prefix, (shape[0], shape[1]), matrix)
        if matrix is None:
            return self._plain(name, shape)
        parts = companions(self, prefix)
        self._used |= dict.fromkeys(parts, 0)
        self._coded.update(parts)
        if name not in self._matrices:
            self._matrices[name] = CodedTensor(name, (shape[0], shape[1]), self._dtype, matrix)
            self._matrices[name].measured = self.measured
        return self._matrices[name]

    def _plain(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        found = super().tensor(name, *shape)
        return self._rotations.with_plain(name, found, is_coded=self._is_coded)

    def _is_coded(self, module: str) -> bool:
        weight = f"{module}.weight"
        return not self.holds(weight) or self.header(weight)[1] not in FLOATS

    def _is_stack(self, name: str) -> bool:
        return self.how.method == "fp8" and self.holds(name) and self.header(name)[1] == "F8_E4M3"

    def _stack(self, name: str, shape: tuple[int, int, int]) -> CodedStack:
        found = self.header(name)[0]
        if found != shape:
            raise LoadError(
                f"tensor {name} has shape {list(found)} in the files; the config gives {list(shape)}",
                hint="config.json contradicts the weights; they must come from the same model",
            )
        parts = companions_of_stack(self, name)
        self._used |= dict.fromkeys(parts, 0)
        self._coded.update(parts)
        return CodedStack(self, name, shape, self._dtype)

    def stacked(self, name: str, index: int) -> CodedTensor:
        """One of the experts that lie in the tensor of that name. Raises LoadError."""
        own = f"{name}[{index}]"
        if own not in self._matrices:
            _, n, k = self.header(name)[0]
            matrix = open_stacked(self, name, index, (n, k), self.how)
            self._matrices[own] = CodedTensor(own, (n, k), self._dtype, matrix)
            self._matrices[own].measured = self.measured
        return self._matrices[own]

    def place(self, prefix: str) -> tuple[RawTensors, str]:
        """The tensors, and among them the prefix, of the matrix that lies under `prefix` in a plain checkpoint."""
        return self, prefix

    def differ(self, name: str, other: str) -> bool:
        """Whether both are there and hold different numbers; a quantised one beside a plain one does."""
        if not (self.has(name) and self.has(other)):
            return False
        return not (self.holds(name) and self.holds(other)) or super().differ(name, other)

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        """As of a plain checkpoint; LoadError also where no matrix was quantised."""
        if not self._matrices and self.how.kept is not None:
            raise LoadError(
                f"config.json in {self.directory} says that weights are quantised ({self.how.method}), and none of them is",
                hint="remove quantization_config, or download the files that belong to it",
            )
        self._rotations.check()
        self._used |= dict.fromkeys(self._rotations.used, 0)
        self._coded |= self._rotations.used
        super().finish(
            lambda name: (
                is_ignored(name)
                or self._is_no_bias(name)
                or self._is_of_cache(name)
                or name in self._rotations.stored  # beside another module, or of queries and keys
            )
        )

    def _is_of_cache(self, name: str) -> bool:
        """Whether it is a scale that only a cache of its publisher's has."""
        return name.rpartition(".")[2] in OF_CACHE or ".output_quantizer." in name

    def _is_no_bias(self, name: str) -> bool:
        """Whether it is one of zeros beside a quantised matrix: AutoGPTQ wrote those for every matrix without a bias."""
        matrix = f"{name.removesuffix('.bias')}.weight"
        return name.endswith(".bias") and matrix in self._matrices and not bool(self.read(name).any())

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors asked for, each matrix by its shape."""
        plain = sum(self._n_values(name) for name in self._used if name not in self._coded)
        return plain + sum(math.prod(matrix.shape) for matrix in self._matrices.values())

    @property
    def stored_dtype(self) -> torch.dtype:
        """That of dequantised values."""
        return self._dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as a plain checkpoint would have it."""
        return self._matrices[name].shape if name in self._matrices else super().shape_of(name)

    def log_formats(self, formats: Mapping[str, int]) -> None:
        """Say how the matrices lie in the files, as what they are kept, and why. formats: weights by the model's formats."""
        stored: Counter[str] = Counter()
        why: Counter[str] = Counter()
        stored_bytes = 0
        for tensor in self._matrices.values():
            stored[tensor.matrix.label] += math.prod(tensor.shape)
            stored_bytes += tensor.matrix.stored_bytes
            if tensor.kept is None:
                why[tensor.matrix.why] += 1
        if not stored:  # nothing is quantised but a cache, or all came from an earlier start's packed weights
            if self.how.kept is None and self.how.note:
                logger.info("weights: %s", self.how.note)
            return
        total = sum(formats.values())
        reasons = [f"{reason} ({n} matrices)" for reason, n in why.most_common()]
        kept_why = (
            "the kernels hold the file's values" if formats.keys() - ENGINE_WEIGHTS.keys() else "that was asked for"
        )
        logger.info(
            "weights stored=%s at %.2f bits per weight, kept=%s at %.2f, because %s%s",
            " ".join(f"{label}:{n / stored.total():.1%}" for label, n in stored.most_common()),
            8 * stored_bytes / stored.total(),
            " ".join(f"{name}:{n / total:.1%}" for name, n in Counter(formats).most_common()),
            8 * mean_bytes(formats),
            "; ".join(reasons) or kept_why,
            f"; {self.how.note}" if self.how.note else "",
        )
