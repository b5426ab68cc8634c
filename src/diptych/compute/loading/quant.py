"""Quantised checkpoints: weights packed once for the cpu backend, saved, and loaded back without repeating the work.

A folder with config.json (its `quantization_config` names this method), the tokenizer's files, and one model.safetensors:
packed projections as bytes under `packed:<names joined by +>`, everything else as it was. The file's metadata keeps the
original tensors' shapes, so that the same checks hold as for a plain checkpoint, and a checksum of every tensor, which is
checked when the tensor is read.

    save_quantised("HuggingFaceTB/SmolLM2-135M", Path("out"), weights="int4")
    load_model("out", ComputeConfig())
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
import xxhash

from diptych.compute.formats.mlx import MlxCheckpoint
from diptych.compute.loading.hub import resolve_model_dir
from diptych.compute.loading.weights import Checkpoint, FileTensor, Progress, Saved
from diptych.compute.model import Blueprint, draw_blueprint
from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.cpu.handles import INT4_GROUP
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, ConfigError, LoadError
from diptych.ground.formats import KeptFormat
from diptych.models.config import HfConfig, read_config_file
from diptych.models.contents import EXPONENTS, INPUT_ORDER, PACKED
from diptych.models.files import INDEX_FILE, WHOLE_FILE
from diptych.models.quantised.fields import Quantisation
from diptych.models.quantised.method import MLX, OWN, own_section
from diptych.models.read import family_of, reads_mxfp4

STORED = ("int8", "int4")
# raised when the packed form of csrc/packing/pack.cpp changes, or the form in which weights are packed: 4: balanced
# (loading.balance), by what both sides of a norm agree on
PACKED_LAYOUT = 4
CHECKSUMS = "xxh3_64"  # in the file's metadata: tensor name -> XXH3-64 of its bytes
KEPT = (
    "kept_formats"  # in the file's metadata: packed weight -> the format of its values, where they are the file's own
)
PLAIN = "is_plain"  # in the file's metadata: as the `Source` was that it was made of
ALIGNMENT = 64
PIECE_BYTES = 2**21  # a huge page
LARGE_BYTES = 2**20  # of a tensor that is checked with the others
TENSOR_TYPES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
                torch.int32: "I32"}  # fmt: skip
COPIED = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model", "vocab.txt", "LICENSE*",
          "[0-9]*_*/config.json")  # fmt: skip
NOT_COPIED = ("config.json", INDEX_FILE)


def stored_weights(config: HfConfig) -> str | None:
    """int8 or int4 for a checkpoint that `save_quantised` wrote, None for any other. LoadError for another layout."""
    section = own_section(config.raw)
    if section is None:
        return None
    if (section.get("packed_layout"), section.get("group")) != (PACKED_LAYOUT, INT4_GROUP):
        raise LoadError(
            f"{config.path} says that the packed weights have layout {section.get('packed_layout')} in groups of "
            f"{section.get('group')}; this version reads layout {PACKED_LAYOUT} in groups of {INT4_GROUP}",
            hint="write the checkpoint again with `diptych quantize`",
        )
    weights = section.get("weights")
    if weights not in STORED:
        raise LoadError(f"{config.path} says that weights are packed as {weights!r}; {' and '.join(STORED)} are read")
    return str(weights)


class PackedTensor(WeightTensor):
    """A WeightTensor of which only the packed form is on disk."""

    random_seed: int | None = None

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kept: KeptFormat | None, order: torch.Tensor | None
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.kept = kept
        self.order = order

    def read(self) -> torch.Tensor:
        """Always a LoadError: the loader found no packed weight of this tensor's group."""
        raise LoadError(f"tensor {self.name} is stored packed, but not as this model uses it")


class QuantisedCheckpoint(Checkpoint):
    """A folder that `save_quantised` wrote. Plain tensors as in any checkpoint, packed ones handed to the loader."""

    is_balanceable = False  # done before it was packed

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        first = next(iter(self._file_of.values()), None)  # None: the files hold no tensors
        self.metadata: dict[str, str] = {} if first is None else self._files[first].metadata() or {}
        metadata = self.metadata
        try:
            shapes = json.loads(metadata["packed_shapes"])
            self._packed = {str(name): tuple(int(n) for n in shape) for name, shape in shapes.items()}
            self._checksums = checksums_of(metadata)
            kept = {key: KeptFormat.named(name) for key, name in json.loads(metadata.get(KEPT, "{}")).items()}
            self._kept = {name: (one, key) for key, one in kept.items() for name in key.split("+")}
            for name, found in list(self._kept.items()):  # of what some rows are kept in, the rest may be, too
                self._kept.setdefault(name.partition("[")[0], found)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise LoadError(
                f"{directory} has no list of packed shapes and checksums: {error}",
                hint="write the checkpoint again with `diptych quantize`",
            ) from error
        self.is_plain = metadata.get(PLAIN) == "true"
        self._packed_used: set[str] = set()
        self._intact: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is there in either form."""
        return super().has(name) or name in self._packed

    def tensor(self, name: str, *shape: int) -> FileTensor | PackedTensor:  # type: ignore[override]
        """The tensor `name`, checked against the shape the config gives. Raises LoadError."""
        kept, key = self._kept.get(name, (None, ""))
        if super().has(name) or name not in self._packed:
            tensor = super().tensor(name, *shape)
            tensor.kept = kept  # of an embedding that is packed too, as the head
            return tensor
        if self._packed[name] != shape:
            raise LoadError(
                f"packed tensor {name} has shape {list(self._packed[name])}; the config expects {list(shape)}",
                hint="config.json contradicts the weights; they must come from the same model",
            )
        self._packed_used.add(name)
        order = self._order(key, shape[1]) if len(shape) == 2 else None  # a bias stands in the key too
        return PackedTensor(name, shape, torch.bfloat16, kept, order)

    def _order(self, key: str, n_inputs: int) -> torch.Tensor | None:
        saved = self.find_packed(key + INPUT_ORDER, 4 * n_inputs)
        return None if saved is None else torch.from_numpy(np.frombuffer(saved.checked(), dtype=np.int32).copy())

    def read(self, name: str) -> torch.Tensor:
        """The values as a view of the mapped file; LoadError where their bytes are not the ones that were written.

        Of large ones `finish` says so, or the loader before it: they are read on one thread here, and on all there.
        """
        tensor = super().read(name)
        if name not in self._intact:
            saved = self._saved(name, tensor)
            if tensor.nbytes < LARGE_BYTES:
                saved.checked()
            else:
                self.unchecked.append(saved)
            self._intact.add(name)
        return tensor

    def _saved(self, name: str, tensor: torch.Tensor) -> Saved:
        if name not in self._checksums:
            raise LoadError(f"{self.directory} has no checksum of tensor {name}: the file was damaged")
        return Saved(name=name, directory=self.directory, values=_bytes_of(tensor), checksum=self._checksums[name])

    def differ(self, name: str, other: str) -> bool:
        """Whether both are there: of a tied head nothing is kept but the embedding."""
        return self.has(name) and self.has(other)

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        """As `Checkpoint.finish`; LoadError, too, where bytes that nobody has checked are not the ones that were written."""
        for saved in self.unchecked:
            saved.checked()
        self.unchecked.clear()
        super().finish(is_ignored)

    def find_packed(self, key: str, nbytes: int) -> Saved | None:
        """The packed bytes as a view of the mapped file; None when the weight is not packed under this key."""
        name = PACKED + key
        if name not in self._file_of:
            return None
        packed = super().read(name)
        if packed.dtype != torch.uint8 or packed.ndim != 1 or packed.numel() != nbytes:
            raise LoadError(f"{name} holds {packed.numel()} bytes; its shape calls for {nbytes}")
        self._used[name] = nbytes
        return self._saved(name, packed)

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors asked for in their unpacked shapes."""
        plain = sum(self._n_values(name) for name in self._used if not name.startswith(PACKED))
        return plain + sum(math.prod(self._packed[name]) for name in self._packed_used)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def checksum(tensor: torch.Tensor) -> int:
    """XXH3-64 of a tensor's bytes."""
    return xxhash.xxh3_64_intdigest(_bytes_of(tensor).data)


def checksums_of(metadata: Mapping[str, str]) -> dict[str, int]:
    """Checksums of a file's tensors by name. KeyError, ValueError, TypeError or AttributeError where they are none."""
    try:
        return {str(name): int(value) for name, value in json.loads(metadata[CHECKSUMS]).items()}
    except (OverflowError, RecursionError) as error:  # of Infinity, and of lists in lists
        raise ValueError(str(error)) from error


def save_quantised(
    model: str | Path,
    directory: Path,
    *,
    weights: str,
    threads: int | None = None,
    progress: Progress | None = None,
    measure: Callable[[Blueprint], Mapping[str, torch.Tensor]] | None = None,
) -> int:
    """Pack the checkpoint `model` into `directory` (made here, must be empty); returns the bytes of its weights file.

    measure: how large what enters each tensor is (`loading.calibration`), for the balance of channels; None: by weights alone.

    Raises ConfigError for a format that is not int8 or int4 or a folder in use, LoadError for a bad checkpoint, CapacityError
    where the folder cannot be written; then nothing of it is left.
    """
    if weights not in STORED:
        raise ConfigError(f"weights is {weights!r}; a quantised checkpoint holds {' or '.join(STORED)}")
    directory = directory.absolute()  # "." has no name to make another of
    _refuse_used(directory)
    source = resolve_model_dir(model)
    hf_config = read_config_file(source / "config.json")
    config_path = str(source / "config.json")
    parsed = HfConfig(hf_config, path=config_path)
    section, of_mlx = parsed.section("quantization_config").raw, hf_config.get("quantization")
    if (section or isinstance(of_mlx, dict)) and not reads_mxfp4(parsed):
        method = section.get("quant_method", MLX if isinstance(of_mlx, dict) else None)
        raise LoadError(
            f"{config_path} says that its weights are quantised already, with {method!r}",
            hint="name the unquantised checkpoint",
        )
    checkpoint = _plain(source, parsed)
    if measure is not None:  # of another one, which is read and forgotten
        checkpoint.measured = measure(draw_blueprint(hf_config, _plain(source, parsed), path=config_path))
    checkpoint.progress = progress
    loader = CpuLoader(ComputeConfig(backend="cpu", weights=weights, threads=threads), checkpoint)
    blueprint = draw_blueprint(hf_config, checkpoint, path=config_path)
    blueprint.load(loader)

    # made beside its place and renamed, so that a full disk or a killed process leaves nothing that looks like a checkpoint
    unfinished = directory.with_name(f".{directory.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        changed = {**hf_config, "tie_word_embeddings": blueprint.spec.is_tied}
        written = _write_folder(unfinished, changed, weights, loader, checkpoint)
        unfinished.rename(directory)
    except OSError as error:
        raise CapacityError(
            f"cannot write {directory}: {error.strerror or error}",
            hint=f"the packed weights take about {loader.program.weight_bytes / 1e6:.0f} MB; name a folder that has room",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return written


def _plain(directory: Path, config: HfConfig) -> Checkpoint:
    """Of plain floats, those of a folder that mlx-lm left in 16 bits too."""
    checkpoint = Checkpoint(directory)
    if not checkpoint.is_of_mlx:
        return checkpoint
    return MlxCheckpoint(directory, Quantisation(method=MLX), dtype=torch.float32, family=family_of(config))


def _refuse_used(directory: Path) -> None:
    try:
        if directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty", hint="name a new folder")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be a folder: {error.strerror}", hint="name a new folder") from error


def _write_folder(
    directory: Path, hf_config: Mapping[str, Any], weights: str, loader: CpuLoader, checkpoint: Checkpoint
) -> int:
    for pattern in COPIED:
        for path in sorted(checkpoint.directory.glob(pattern)):
            name = path.relative_to(checkpoint.directory)
            if str(name) not in NOT_COPIED:
                copy = directory / name
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
    written = write_tensors(directory / WHOLE_FILE, loader, checkpoint)
    section = {"quant_method": OWN, "weights": weights, "packed_layout": PACKED_LAYOUT, "group": INT4_GROUP}
    text = json.dumps({**hf_config, "quantization_config": section}, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    return written


class TensorSource(Protocol):
    """The checkpoint whose tensors were packed."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that was asked for."""
        ...

    def fingerprint(self) -> str:
        """A digest that differs where the numbers differ."""
        ...


def write_tensors(path: Path, loader: CpuLoader, source: TensorSource, **metadata: str) -> int:
    """The safetensors file, tensor by tensor, so that no second copy of the weights is held; returns its bytes."""
    shapes = {name: source.shape_of(name) for key in loader.packer.packed for name in _stored_names(key)}
    parts: dict[str, Callable[[], torch.Tensor]] = {
        PACKED + key: partial(_blob, loader, index) for key, index in loader.packer.packed.items()
    }
    parts |= {
        PACKED + key + EXPONENTS: partial(_raw, exponents.read()) for key, exponents in loader.packer.exponents.items()
    }
    parts |= {PACKED + key + INPUT_ORDER: partial(_raw, order) for key, order in loader.packer.orders.items()}
    parts |= {name: tensor.read for name, tensor in loader.plain.items()}
    header: dict[str, Any] = {}
    checksums = {}
    at = 0
    for name, read in parts.items():
        tensor = read()
        end = at + tensor.nbytes
        header[name] = {
            "dtype": TENSOR_TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]
        }  # fmt: skip
        checksums[name] = checksum(tensor)
        at = end
    kept = {key: one.name for key, one in loader.packer.kept.items()}
    header["__metadata__"] = {
        "format": "pt", "packed_shapes": json.dumps(shapes), CHECKSUMS: json.dumps(checksums), KEPT: json.dumps(kept),
        PLAIN: json.dumps(loader.source.is_plain),
        **metadata,
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        _write_in_pieces(
            file, chain((len(text).to_bytes(8, "little"), text), (_bytes_of(read()).data for read in parts.values()))
        )
        os.fsync(file.fileno())
    return path.stat().st_size


def _write_in_pieces(file: BinaryIO, parts: Iterable[bytes | memoryview]) -> None:
    """Each piece at a multiple of its size: what a file system keeps of it in memory can then be mapped as huge pages."""
    piece, held = bytearray(PIECE_BYTES), 0
    for part in parts:
        left = memoryview(part)
        while left:
            n = min(len(left), PIECE_BYTES - held)
            piece[held : held + n] = left[:n]
            held, left = held + n, left[n:]
            if held == PIECE_BYTES:
                _write_all(file, memoryview(piece))
                held = 0
    _write_all(file, memoryview(piece)[:held])


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while piece:  # a disk that is nearly full takes a part, and says so at the next
        piece = piece[file.write(piece) :]


def _blob(loader: CpuLoader, index: int) -> torch.Tensor:
    return torch.from_dlpack(loader.program.packed_blob(index))


def _raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _stored_names(key: str) -> list[str]:
    """The checkpoint's names in a key; an entry of a stacked tensor belongs to the whole stack."""
    return [name.split("[")[0] for name in key.split("+")]
