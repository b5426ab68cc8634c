"""Checkpoints on disk: found, mapped and checked; tensors read when asked, as views of the mapped file.

Owns everything that can be wrong with a file: a missing or damaged one, a tensor that is absent, of another shape than the
config says, of a dtype that is not 32- or 16-bit float, or one the config does not call for. All of it is a LoadError.
Never runs code from a checkpoint, never unpickles.

    checkpoint = Checkpoint(resolve_model_dir("some/model"))
    weight = checkpoint.tensor("model.norm.weight", 576)     # checked now, read by weight.read()
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError

from diptych.compute.loading.mapped_file import MappedFile
from diptych.compute.loading.mapped_pages import give_pages_back
from diptych.compute.ops.contract import WeightTensor
from diptych.ground.errors import LoadError
from diptych.ground.formats import mean_bytes
from diptych.models.files import first_line, safetensors_header, weight_files

logger = logging.getLogger("diptych.compute")

ID_DTYPES = {"I64": torch.int64, "I32": torch.int32}
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAMPLE_BYTES = 256  # of the end of each file, into the revision: tells two fine-tunes of one shape apart
SAMPLED_VALUES = 64  # of the middle of each tensor, likewise
# mapped pages of tensors already read are given back whenever this much has been read since the last time
RESIDENT_BYTES = 8 * 2**20
Progress = Callable[[int, int], None]
Meanwhile = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """Bytes [N] in a mapped file of `directory`, and the XXH3-64 that they were written with."""

    name: str
    directory: Path
    values: np.ndarray
    checksum: int

    def checked(self) -> np.ndarray:
        """The bytes, read here. LoadError where they are not the ones that were written."""
        if xxhash.xxh3_64_intdigest(self.values.data) != self.checksum:
            raise self.damage()
        return self.values

    @property
    def in_pass(self) -> int | None:
        """The checksum for the kernels' pass over the bytes, which takes whole stripes; None: checked here."""
        if self.values.nbytes >= 256 and self.values.nbytes % 64 == 0:
            return self.checksum
        self.checked()
        return None

    def damage(self) -> LoadError:
        """That the checksum is another."""
        return LoadError(
            f"tensor {self.name} in {self.directory} does not have its checksum: the file was damaged",
            hint="copy the folder again, or write it again with `diptych quantize`",
        )


class Source(Protocol):
    """Where a model's weights come from: a checkpoint, one that was packed before, or random numbers.

    origin: the folder or the file, as errors name it.
    is_balanceable: whether its numbers may be read and scaled (`compute.loading.balance`) before they are packed.
    is_keeping: whether it may hold matrices whose values a kernel keeps (`WeightTensor.kept`).
    is_lasting: whether nobody changes its files, so that packed weights may be used where they are mapped.
    is_plain: whether matrices lie as [outputs, inputs] and a stacked q, k and v one behind the other, whatever the family's own
    files have.
    measured: what `compute.loading.calibration` found out before anything is read, which is the tensors' own then.
    unchecked: what was handed out before its checksum was taken, for a loader to check with all it reads, on all threads;
    `finish` checks what is left.
    meanwhile: called once by a loader while it reads packed weights, which needs no interpreter.
    """

    origin: str
    is_balanceable: bool
    is_keeping: bool
    is_lasting: bool
    is_plain: bool
    measured: Mapping[str, torch.Tensor]
    unchecked: list[Saved]
    meanwhile: Meanwhile | None

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def tensor(self, name: str, *shape: int) -> WeightTensor:
        """The tensor of that name; LoadError when it is missing or of another shape."""
        ...

    def raw(self, name: str, *shape: int, n_values: int) -> WeightTensor:
        """A tensor of bytes that stand for so many values; LoadError when it is missing, of another shape or no bytes."""
        ...

    def ids(self, name: str, *shape: int, below: int) -> WeightTensor:
        """A tensor of whole numbers from 0 to below that, which are no parameters. LoadError as `tensor`, or, when it is read,
        for others.
        """
        ...

    def differ(self, name: str, other: str) -> bool:
        """Whether both tensors are there and hold different numbers."""
        ...

    def whole_numbers(self, name: str) -> list[int] | None:
        """A small tensor of whole numbers, which is no parameter; None where there is none of that name."""
        ...

    def find_packed(self, key: str, nbytes: int) -> Saved | None:
        """The bytes of a weight that was packed and saved under `key`; None where it must be packed from its tensors."""
        ...

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        """All that the model wants was read. LoadError where more is there than was asked for and `is_ignored` excuses."""
        ...

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors asked for, each counted once."""
        ...

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that most elements are stored in."""
        ...

    def fingerprint(self) -> str:
        """A digest that differs where the numbers differ."""
        ...


class IdsTensor(WeightTensor):
    """Whole numbers from 0 to below `below`, of a tensor of a file, or made where there is none."""

    random_seed: int | None = None

    def __init__(self, tensor: WeightTensor | torch.Tensor, below: int, name: str = "ids") -> None:
        self.name = name if isinstance(tensor, torch.Tensor) else tensor.name
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self._tensor, self._below = tensor, below

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """As in the file."""
        return () if isinstance(self._tensor, torch.Tensor) else self._tensor.stored

    def read(self) -> torch.Tensor:
        """LoadError where one is out of bounds."""
        values = self._tensor if isinstance(self._tensor, torch.Tensor) else self._tensor.read()
        least, most = (int(one) for one in torch.aminmax(values))
        if least < 0 or most >= self._below:
            wrong = least if least < 0 else most
            raise LoadError(f"tensor {self.name} holds {wrong}; its numbers must be from 0 to below {self._below}")
        return values


class FileTensor(WeightTensor):
    """A WeightTensor in a mapped safetensors file."""

    random_seed: int | None = None

    def __init__(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._checkpoint = checkpoint

    def read(self) -> torch.Tensor:
        """A view of the mapped file."""
        return self._checkpoint.read(self.name)


class StackedTensor(WeightTensor):
    """Matrices stacked in one tensor that are handed out one by one, each with codes of its own."""

    def entry(self, index: int) -> WeightTensor:
        """One of them."""
        raise NotImplementedError(f"{self.name} has no entry {index}")


def entry_of(tensor: WeightTensor, index: int) -> WeightTensor:
    """Entry `index` along the first axis."""
    return tensor.entry(index) if isinstance(tensor, StackedTensor) else SlicedTensor(tensor, index)


class SlicedTensor(WeightTensor):
    """Entry `index` along the first axis of another tensor, for checkpoints that stack their experts."""

    def __init__(self, tensor: WeightTensor, index: int) -> None:
        self.name = f"{tensor.name}[{index}]"
        self.shape = tensor.shape[1:]
        self.dtype = tensor.dtype
        self.random_seed = None if tensor.random_seed is None else tensor.random_seed + index + 1
        self.measured = tensor.measured
        self._tensor = tensor
        self._index = index

    def read(self) -> torch.Tensor:
        """A view of the stacked tensor's entry."""
        return self._tensor.read()[self._index]


class Checkpoint:
    """The safetensors files of one folder. Keeps them mapped while it, or a tensor read from it, lives.

    Loading holds the pages of one tensor, not of the file: those of tensors read before go back to the page cache, from
    where they return should anyone read them again.
    """

    is_balanceable = True
    is_keeping = False  # experts in MXFP4 are kept
    is_lasting = False
    is_plain = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.origin = str(directory)
        self._files: dict[str, MappedFile] = {}  # by their names
        self._file_of: dict[str, str] = {}  # tensor name -> file name
        self._used: dict[str, int] = {}  # tensor name -> bytes
        self._values: dict[str, int] = {}  # name of a tensor of bytes -> values
        self._read: set[str] = set()
        self._read_bytes = 0
        self._file_bytes = 0
        self._resident: dict[str, torch.Tensor] = {}  # by name, read since pages were last given back
        self._resident_bytes = 0
        self._given_back: dict[str, torch.Tensor] = {}  # whose pages went back then
        self.unchecked: list[Saved] = []
        self.meanwhile: Meanwhile | None = None
        self.progress: Progress | None = None
        self.measured: Mapping[str, torch.Tensor] = {}  # by tensor: see `WeightTensor`
        for path in weight_files(directory):
            self._open(path)

    @property
    def is_of_mlx(self) -> bool:
        """Whether mlx-lm wrote it."""
        return any((file.metadata() or {}).get("format") == "mlx" for file in self._files.values())

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of that name."""
        return name in self._file_of

    def tensor(self, name: str, *shape: int) -> FileTensor:
        """The tensor `name`, checked against the shape the config gives. Raises LoadError."""
        tensor = self._checked(name, shape, FLOAT_DTYPES)
        tensor.measured = self.measured
        return tensor

    def raw(self, name: str, *shape: int, n_values: int) -> FileTensor:
        """The bytes of `name`, checked likewise."""
        tensor = self._checked(name, shape, {"U8": torch.uint8})
        self._values[name] = n_values
        tensor.measured = self.measured
        return tensor

    def ids(self, name: str, *shape: int, below: int) -> WeightTensor:
        """Of any width."""
        tensor = self._checked(name, shape, ID_DTYPES)
        self._values[name] = 0
        return IdsTensor(tensor, below)

    def _checked(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype]) -> FileTensor:
        if name not in self._file_of:
            raise LoadError(
                f"tensor {name} is missing from {self.directory} ({len(self._file_of)} tensors); "
                f"the config expects it with shape {list(shape)}",
                hint="the download may be incomplete, or config.json belongs to another model",
            )
        file_name = self._file_of[name]
        view = self._files[file_name].get_slice(name)
        found, dtype_name = tuple(view.get_shape()), view.get_dtype()
        if found != shape:
            raise LoadError(
                f"tensor {name} in {file_name} has shape {list(found)}; the config expects {list(shape)}",
                hint="config.json contradicts the weights; they must come from the same model",
            )
        if dtype_name not in dtypes:
            raise LoadError(
                f"tensor {name} in {file_name} has dtype {dtype_name}; {', '.join(dtypes)} can be read",
                hint="use the unquantised checkpoint and choose the weight format with --weights",
            )
        dtype = dtypes[dtype_name]
        self._used[name] = math.prod(shape) * dtype.itemsize
        return FileTensor(self, name, found, dtype)

    def read(self, name: str) -> torch.Tensor:
        """The values of a checked tensor as a view of the mapped file; counts towards progress once."""
        if self._resident_bytes >= RESIDENT_BYTES:
            self._give_pages_back()
        tensor = self._resident.get(name)
        if tensor is not None:
            return tensor
        tensor = self._resident[name] = self._view(name)
        self._resident_bytes += tensor.nbytes
        if name not in self._read:
            self._read.add(name)
            self._read_bytes += tensor.nbytes
            if self.progress is not None:
                self.progress(self._read_bytes, max(self._file_bytes, self._read_bytes))
        return tensor

    def _view(self, name: str) -> torch.Tensor:
        """That of the last time where it is at hand: to make one costs more than to pack what is small."""
        tensor = self._resident.get(name, self._given_back.get(name))
        if tensor is not None:
            return tensor
        try:
            return self._files[self._file_of[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"cannot read tensor {name} in {self.directory}: {first_line(error)}") from error

    def differ(self, name: str, other: str) -> bool:
        """Whether both tensors are there and hold different numbers."""
        if not (self.has(name) and self.has(other)):
            return False
        left, right = self.read(name), self.read(other)
        return left.dtype != right.dtype or not torch.equal(left, right)

    def whole_numbers(self, name: str) -> list[int] | None:
        """A small tensor of whole numbers; None where there is none of that name."""
        if not self.has(name):
            return None
        found = self._files[self._file_of[name]].get_tensor(name)
        return [int(one) for one in found.flatten().tolist()]

    def find_packed(self, key: str, nbytes: int) -> Saved | None:
        """None: nothing is packed here."""
        return None

    def log_formats(self, formats: Mapping[str, int]) -> None:
        """Say as what the weights are kept where experts are stored in MXFP4. formats: weights by the model's formats."""
        total = sum(formats.values())
        logger.info(
            "weights kept=%s at %.2f bits per weight, because the experts are stored in MXFP4 (4.25) and the others plainly",
            " ".join(f"{name}:{n / total:.1%}" for name, n in Counter(formats).most_common()),
            8 * mean_bytes(formats),
        )

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        """All is loaded: the pages go back, and progress is complete even if the files hold tensors that nobody reads.

        LoadError when the files hold tensors that nobody asked for and `is_ignored` does not excuse.
        """
        self._refuse_unused(is_ignored)
        self._give_pages_back()
        if self.progress is not None:
            self.progress(self._file_bytes, self._file_bytes)

    def _give_pages_back(self) -> None:
        for tensor in (*self._given_back.values(), *self._resident.values()):
            give_pages_back(tensor)
        # the last ones read may be used only from now on (gate while up is read): their pages go back again the next time
        self._given_back, self._resident, self._resident_bytes = self._resident, {}, 0

    def _refuse_unused(self, is_ignored: Callable[[str], bool]) -> None:
        unused = sorted(name for name in self._file_of if name not in self._used and not is_ignored(name))
        if unused:
            raise LoadError(
                f"{self.directory} holds {len(unused)} tensors that its config does not call for, "
                f"the first is {unused[0]}",
                hint="config.json contradicts the weights; they must come from the same model",
            )

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors asked for, each counted once; of bytes, the values that they stand for."""
        return sum(map(self._n_values, self._used))

    def _n_values(self, name: str) -> int:
        return self._values.get(name, math.prod(self._shape(name)))

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that most elements of the files are stored in, of those that can be read."""
        held = dict.fromkeys(FLOAT_DTYPES, 0)
        for name, file_name in self._file_of.items():
            view = self._files[file_name].get_slice(name)
            if view.get_dtype() in held:
                held[view.get_dtype()] += math.prod(view.get_shape())
        return FLOAT_DTYPES[max(held, key=lambda dtype: held[dtype])]

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and dtypes, sizes of files, and a sample of the bytes of each tensor.

        A fine-tune changes nearly all numbers of the tensors that it changes, so a page of each tells two of them apart.
        """
        digest = hashlib.sha256()
        for name in sorted(self._used):
            file = self._files[self._file_of[name]]
            view = file.get_slice(name)
            digest.update(f"{name} {view.get_shape()} {view.get_dtype()}\n".encode())
            digest.update(file.middle(name, SAMPLED_VALUES))
        for file_name in sorted(self._files):
            path = self.directory / file_name
            size = path.stat().st_size
            digest.update(f"{file_name} {size}\n".encode())
            with path.open("rb") as end:
                end.seek(max(0, size - SAMPLE_BYTES))
                digest.update(end.read(SAMPLE_BYTES))
        add_measured(digest, self.measured)
        return digest.hexdigest()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(self.directory / name for name in sorted(self._files))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the files; of one in blocks of MXFP4, the shape of what they hold, as gpt-oss stacks it."""
        if name not in self._file_of and f"{name}_blocks" in self._file_of:
            n, rows, *columns = self._shape(f"{name}_blocks")
            return n, 2 * math.prod(columns), rows
        return tuple(self._shape(name))

    def _shape(self, name: str) -> Sequence[int]:
        shape: Sequence[int] = self._files[self._file_of[name]].get_slice(name).get_shape()
        return shape

    def _open(self, path: Path) -> None:
        try:
            file = MappedFile(path)
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            safetensors_header(path)  # says more
            raise LoadError(
                f"{path} is damaged or cut short ({path.stat().st_size} bytes): {first_line(error)}",
                hint="download the file again",
            ) from error
        self._files[path.name] = file
        self._file_bytes += path.stat().st_size
        for name in names:
            if name in self._file_of:
                raise LoadError(f"tensor {name} is in both {self._file_of[name]} and {path.name}")
            self._file_of[name] = path.name


def add_measured(digest: Any, measured: Mapping[str, torch.Tensor]) -> None:
    """What was measured decides the packed numbers as the files do."""
    for name in sorted(measured):
        digest.update(f"{name}\n".encode())
        digest.update(measured[name].numpy().tobytes())
