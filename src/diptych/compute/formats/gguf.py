"""GGUF files as a `Source` of weights: tensors by the names of a Hugging Face checkpoint, dequantised when asked.

Plain floats (F32, F16, BF16) are views of the mapped file. Blocks become 16- or 32-bit floats, some rows at a time, by the
`gguf` package, whose formulas are those of llama.cpp; what it is given was checked by `models.gguf.file`. Only one tensor
is held in full at a time, and its pages of the file go back when it is read.

    checkpoint = GgufCheckpoint(open_gguf(Path("model.gguf")), dtype=torch.bfloat16)
    weight = checkpoint.tensor("model.layers.0.mlp.up_proj.weight", 5632, 2048).read()
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from diptych.compute.formats.gguf_codes import FEW_BITS, codes_of, values_of
from diptych.compute.formats.gguf_lattices import LATTICES
from diptych.compute.loading.mapped_pages import give_pages_back
from diptych.compute.loading.weights import (
    FLOAT_DTYPES,
    SAMPLE_BYTES,
    Meanwhile,
    Progress,
    Saved,
    add_measured,
)
from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.errors import LoadError
from diptych.ground.formats import LEAST_WHOLE, KeptFormat, gguf_kept, mean_bytes
from diptych.models.gguf.architectures import architecture_of
from diptych.models.gguf.checkpoint import BLOCK, is_beside, scales_beside
from diptych.models.gguf.file import BlockType, GgufFile, GgufTensor
from diptych.models.gguf.layers import CURVES, curve_of, number_of_curve
from diptych.models.gguf.places import Place, joined_place, place_of
from diptych.models.gguf.states import value_heads

logger = logging.getLogger("diptych.compute")

# values whose codes are taken apart, or that are dequantised, at one time: few enough that what numpy makes on the way stays in
# the cache (measured: 2**18 to 2**20; of 2**15 to 2**18, 2**17 is up to four times as fast as the last, which some types fit)
PIECE_VALUES = 2**19
DEQUANTISED_VALUES = 2**17


class GgufTensorView(WeightTensor):
    """A WeightTensor in a GGUF file. dtype: of what `read` gives."""

    random_seed: int | None = None

    def __init__(
        self, checkpoint: GgufCheckpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: Place
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.measured = checkpoint.measured
        self._checkpoint = checkpoint
        self._place = place
        self.kept = checkpoint.kept(place) if len(shape) == 2 else None
        if self.kept is not None and place.heads == "inputs":
            self.order = checkpoint.inputs_of(shape[1]).argsort().to(torch.int32)

    def codes(self) -> Codes:
        """As the blocks have them, rows in our order."""
        return self._checkpoint.codes(self._place, self.shape)

    def read(self) -> torch.Tensor:
        """The values: of a plain tensor a view of the mapped file, else made now."""
        return self._checkpoint.read(self._place, self.shape, self.dtype)

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """Some rows and the first columns, of which only the blocks are dequantised."""
        return self._checkpoint.read(self._place, self.shape, self.dtype, rows=rows, n_columns=n_columns)


class NumberView(WeightTensor):
    """A number of the metadata, as a tensor of one."""

    kept: KeptFormat | None = None
    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, name: str, number: float) -> None:
        self.name, self.shape, self._number = name, (1,), number

    def read(self) -> torch.Tensor:
        """New."""
        return torch.tensor([self._number])


class GgufCheckpoint:
    """The tensors of a GGUF file. `dtype`: of what blocks become; `table_dtype`: of the embedding, which is kept as it is read.

    Rows of q and k come in the order of the Hugging Face checkpoint, norms without what the converter added.
    """

    is_balanceable = True
    is_keeping = True
    is_lasting = False
    is_plain = True  # the converter sees to it

    def __init__(self, file: GgufFile, *, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
        self.file = file
        self.origin = str(file.path)
        self.progress: Progress | None = None
        self.measured: Mapping[str, torch.Tensor] = {}
        self.unchecked: list[Saved] = []
        self.meanwhile: Meanwhile | None = None
        self._kind = architecture_of(file)
        self._dtype = dtype
        self._table_dtype = table_dtype
        self._used: dict[str, tuple[int, ...]] = {}  # our name -> shape
        self._places: set[str] = set()  # their names of tensors asked for
        self._parts: dict[
            tuple[str, int | None], set[tuple[int, int]]
        ] = {}  # rows asked for of tensors that join several
        self._read_bytes = 0
        self._read: set[Place] = set()
        self._resident: list[torch.Tensor] = []

    def has(self, name: str) -> bool:
        """Whether the file holds that tensor; what is stacked (experts, heads of latent attention) is asked for one by one."""
        place = place_of(name, self._kind)
        return place is not None and joined_place(place, 0, self.file.tensors).name in self.file.tensors

    def tensor(self, name: str, *shape: int) -> GgufTensorView | NumberView:
        """The tensor `name`, checked against the shape that the metadata gives. Raises LoadError."""
        number = number_of_curve(name, self.file)
        if number is not None:
            self._used[name] = shape
            return NumberView(name, number)
        place = place_of(name, self._kind)
        place = None if place is None else joined_place(place, shape[0], self.file.tensors)
        stored = self.file.tensors.get(place.name) if place is not None else None
        if place is None or stored is None:
            raise LoadError(
                f"tensor {place.name if place else name} is missing from {self.file.path} ({len(self.file.tensors)} "
                f"tensors); its metadata calls for shape {list(shape)}",
                hint="the file may be incomplete, or of another kind than its architecture says",
            )
        found = stored.shape if place.expert is None else stored.shape[1:]
        if place.begin is not None:
            found = (shape[0], *found[1:])  # `joined_place` has seen to the rows
        if [n for n in found if n != 1] == [n for n in shape if n != 1]:
            found = shape  # the converter leaves axes of one out, and adds some
        if len(shape) == 1 and stored.type.name in FLOAT_DTYPES and math.prod(found) == shape[0]:
            found = shape  # a norm by group
        if found != shape or (place.expert is not None and place.expert >= stored.shape[0]):
            raise LoadError(
                f"tensor {stored.name} in {self.file.path} has shape {list(stored.shape)}; {list(shape)} is expected"
                + ("" if place.expert is None else f" of expert {place.expert}"),
                hint="the file's metadata contradicts its tensors",
            )
        self._used[name] = shape
        self._places |= {stored.name, *scales_beside(stored)}
        if place.begin is not None:
            self._parts.setdefault((stored.name, place.expert), set()).add((place.begin, place.begin + shape[0]))
        dtype = FLOAT_DTYPES.get(stored.type.name)
        if dtype is None or place.heads is not None or place.added:
            is_table = stored.name == "token_embd.weight"
            dtype = dtype or (self._table_dtype if is_table else self._dtype)
            dtype = torch.float32 if place.added else dtype
        return GgufTensorView(self, name, shape, dtype, place)

    def read(
        self,
        place: Place,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rows: slice = slice(None),
        n_columns: int | None = None,
    ) -> torch.Tensor:
        """The values of a checked tensor, or some rows and the first columns of it; counts towards progress once."""
        stored, raw = self._opened(place)
        n_columns = shape[-1] if n_columns is None else min(n_columns, shape[-1])
        if place.heads == "inputs":  # all of them are read, to be put in order
            whole = self.read(replace(place, heads=None), shape, dtype, rows=rows)
            return whole[:, self.inputs_of(shape[1])[:n_columns]]
        order, place_scale = self._rows_of(place, shape[0]), self._scale_of(place)
        plain = FLOAT_DTYPES.get(stored.type.name)
        if plain is not None:
            values = raw.view(plain).view(-1, *shape[1:])[order][rows]
            values = values if values.ndim == 1 else values[:, :n_columns]
        else:
            blocks = raw.view(-1, shape[-1] // stored.type.elements * stored.type.nbytes)
            blocks = blocks[order][rows] if len(shape) > 1 else blocks
            blocks = blocks[:, : -(-n_columns // stored.type.elements) * stored.type.nbytes]
            values = dequantised(blocks, stored.type, dtype if place_scale == 1.0 else torch.float32)[:, :n_columns]
            values = values if place_scale == 1.0 else (values * place_scale).to(dtype)
            values = values if len(shape) > 1 else values[0]
        if place.is_negative:
            return -values.to(torch.float32)
        return values if not place.added else values.to(torch.float32) - place.added

    def kept(self, place: Place) -> KeptFormat | None:
        """What holds a tensor's blocks."""
        if place.added:
            return None
        return gguf_kept(self.file.tensors[place.name].type.name, self.file.layer_values)

    def codes(self, place: Place, shape: tuple[int, ...]) -> Codes:
        """A tensor's blocks taken apart, some rows at a time; `kept` says what they are."""
        stored, raw = self._opened(place)
        blocks = raw.view(-1, shape[1] // stored.type.elements * stored.type.nbytes)[self._rows_of(place, shape[0])]
        step = max(1, (1 if stored.type.name in LATTICES else 8) * PIECE_VALUES // shape[1])
        parts = [codes_of(blocks[begin : begin + step], stored.type.name) for begin in range(0, shape[0], step)]
        offsets = [part.offsets for part in parts if part.offsets is not None]
        factors = [part.factors for part in parts if part.factors is not None]
        return Codes(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            offsets=torch.cat(offsets) if offsets else None,
            factors=torch.cat(factors) * self._scale_of(place) if factors else None,
        )

    def _scale_of(self, place: Place) -> float:
        """What a matrix of NVFP4 is multiplied by as a whole, or each of its experts. LoadError for what is no such number."""
        found = next(
            (name for name in scales_beside(self.file.tensors[place.name])[:1] if name in self.file.tensors), None
        )
        if found is None:
            return 1.0
        scales = self.file.floats(found) or []
        matrices = 1 if place.expert is None else self.file.tensors[place.name].shape[0]
        index = 0 if place.expert is None or len(scales) == 1 else place.expert
        if len(scales) not in (1, matrices) or not LEAST_WHOLE < scales[index] < 1 / LEAST_WHOLE:
            raise LoadError(
                f"{found} in {self.file.path} has {len(scales)} scales for {matrices} matrices, {scales[index:][:1]} of "
                f"matrix {index}; numbers between {LEAST_WHOLE} and {1 / LEAST_WHOLE} are expected",
                hint="the file is damaged; download it again",
            )
        return scales[index]

    def _opened(self, place: Place) -> tuple[GgufTensor, torch.Tensor]:
        """The tensor and its bytes, mapped; those of the one before go back, and progress is told."""
        stored = self.file.tensors[place.name]
        for tensor in self._resident:  # views are read again from the file should anyone still need them
            give_pages_back(tensor)
        raw = self._bytes(stored, place.expert)
        self._resident = [raw]
        if place not in self._read:
            self._read.add(place)
            self._read_bytes += raw.nbytes
            if self.progress is not None:
                self.progress(self._read_bytes, max(self.file.file_bytes, self._read_bytes))
        return stored, raw

    def _bytes(self, stored: GgufTensor, expert: int | None) -> torch.Tensor:
        """The stored bytes, of one expert where asked, as a view of the mapped file."""
        begin, nbytes = stored.begin, stored.nbytes
        if expert is not None:
            nbytes //= stored.shape[0]
            begin += expert * nbytes
        return torch.frombuffer(self.file.mapped(stored.part), dtype=torch.uint8, count=nbytes, offset=begin)

    def _rows_of(self, place: Place, n_rows: int) -> slice | torch.Tensor:
        """Where our rows lie: the converter puts row i of a head's first half beside row i of its second."""
        begin = place.begin or 0
        if place.heads in (None, "inputs"):
            return slice(begin, begin + n_rows)
        if place.heads == "v":
            n_key_heads, n_value_heads, width = value_heads(self.file)
            width = width if n_rows >= n_value_heads * width else 1  # else one number of each head
            first = n_rows - n_value_heads * width
            return torch.cat([torch.arange(first), first + tiles(n_key_heads, n_value_heads, width)])
        key = "attention.head_count" if place.heads == "q" else "attention.head_count_kv"
        prefix = self.file.metadata["general.architecture"]
        n_heads = self.file.metadata.get(f"{prefix}.{key}") or self.file.metadata[f"{prefix}.attention.head_count"]
        if not isinstance(n_heads, int):  # layers with a state, or an MLP alone, have none
            by_layer, block = n_heads.values(), BLOCK.match(place.name)
            own = by_layer[int(block[1])] if block is not None and int(block[1]) < len(by_layer) else 0
            n_heads = own or max(by_layer)
        return begin + torch.arange(n_rows).view(n_heads, -1, 2).transpose(1, 2).reshape(-1)

    def inputs_of(self, n_inputs: int) -> torch.Tensor:
        """Where the inputs of a row lie that come by value head. LoadError where they are not as many."""
        n_key_heads, n_value_heads, width = value_heads(self.file)
        if n_value_heads * width != n_inputs:
            raise LoadError(f"{self.file.path} has {n_value_heads} value heads of {width} for {n_inputs} inputs")
        return tiles(n_key_heads, n_value_heads, width)

    def raw(self, name: str, *shape: int, n_values: int) -> GgufTensorView:
        """Never: a GGUF file's blocks have types of their own."""
        raise LoadError(f"{self.file.path} has no tensor of bytes {name}")

    def differ(self, name: str, other: str) -> bool:
        """Never: a file with an output projection of its own says that it is not tied."""
        return False

    def ids(self, name: str, *shape: int, below: int) -> WeightTensor:
        """Never: no architecture that is read has any."""
        raise LoadError(f"{name} is not read from GGUF")

    def whole_numbers(self, name: str) -> list[int] | None:
        """None: no converter writes any."""
        return None

    def find_packed(self, key: str, nbytes: int) -> Saved | None:
        """None: nothing is packed here."""
        return None

    def finish(self, is_ignored: Callable[[str], bool]) -> None:
        """All is loaded. LoadError when the file holds tensors that nobody asked for."""
        unused = sorted(
            name for name in self.file.tensors if name not in self._places and not is_beside(name, self.file)
        )
        if unused:
            raise LoadError(
                f"{self.file.path} holds {len(unused)} tensors that its architecture does not call for, "
                f"the first is {unused[0]}",
                hint="the file is of a newer or another model than its architecture says",
            )
        for (name, expert), parts in self._parts.items():
            held = self.file.tensors[name].shape[0 if expert is None else 1]
            if sum(end - begin for begin, end in parts) != held:
                raise LoadError(
                    f"tensor {name} in {self.file.path} joins {held} rows; its metadata calls for "
                    f"{' and '.join(f'{begin} to {end - 1}' for begin, end in sorted(parts))} of them",
                    hint="the file's metadata contradicts its tensors",
                )
        for tensor in self._resident:
            give_pages_back(tensor)
        if self.progress is not None:
            self.progress(self.file.file_bytes, self.file.file_bytes)

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors asked for, each counted once."""
        return sum(math.prod(shape) for shape in self._used.values())

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that most elements are stored in; of blocks, the one they become."""
        held: Counter[torch.dtype] = Counter()
        for tensor in self.file.tensors.values():
            held[FLOAT_DTYPES.get(tensor.type.name, self._dtype)] += math.prod(tensor.shape)
        return held.most_common(1)[0][0]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return self.file.paths

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that was asked for."""
        return self._used[name]

    def fingerprint(self) -> str:
        """SHA-256 over what was made of the file, its tensors' names, shapes and types, sizes, and a sample of each tensor.

        A fine-tune may leave most tensors as they were, so what one of them holds tells nothing of the others.
        """
        digest = hashlib.sha256(f"gguf {self._dtype} {self._table_dtype}\n".encode())
        for name, tensor in sorted(self.file.tensors.items()):
            digest.update(f"{name} {tensor.shape} {tensor.type.name}\n".encode())
            middle = tensor.begin + tensor.nbytes // 2
            digest.update(
                self.file.mapped(tensor.part)[middle : min(middle + SAMPLE_BYTES, tensor.begin + tensor.nbytes)]
            )
        for name in CURVES:
            if f"xielu.{name}" in self.file.metadata:
                digest.update(f"{name} {curve_of(name, self.file)}\n".encode())
        for number in range(len(self.file.paths)):
            mapped = self.file.mapped(number)
            digest.update(f"{number} {len(mapped)}\n".encode())
            digest.update(mapped[-SAMPLE_BYTES:])
        add_measured(digest, self.measured)
        return digest.hexdigest()

    def log_formats(self, formats: Mapping[str, int]) -> None:
        """Say how the weights lie in the file, as what those of the layers are kept, and why. formats: weights by format."""
        values: Counter[BlockType] = Counter()
        for tensor in self.file.tensors.values():
            if len(tensor.shape) > 1:
                values[tensor.type] += math.prod(tensor.shape)
        total = sum(formats.values())
        why = "the backend multiplies that"
        if any(name.startswith(("group", "gpu")) for name in formats):
            lost = ", but not those of experts that join several formats, or plain ones" if "bf16" in formats else ""
            why = f"the kernels hold the file's values{lost}"
        elif any(not kind.is_plain for kind in values):
            why = "that was asked for"
        logger.info(
            "weights stored=%s at %.2f bits per weight, kept=%s at %.2f, because %s",
            " ".join(f"{kind.name}:{n / values.total():.1%}" for kind, n in values.most_common()),
            sum(kind.bits * n for kind, n in values.items()) / values.total(),
            " ".join(f"{name}:{n / total:.1%}" for name, n in Counter(formats).most_common()),
            8 * mean_bytes(formats),
            why,
        )


def tiles(n_key_heads: int, n_value_heads: int, width: int) -> torch.Tensor:
    """Where what lies by value head is in a file that has the first of each key head before all the seconds."""
    return torch.arange(n_value_heads * width).view(-1, n_key_heads, width).transpose(0, 1).reshape(-1)


def dequantised(raw: torch.Tensor, kind: BlockType, dtype: torch.dtype) -> torch.Tensor:
    """Rows of blocks as rows of floats of `dtype`. Bounded: some DEQUANTISED_VALUES at a time besides what it returns."""
    quants, types = import_module("gguf.quants"), import_module("gguf.constants").GGMLQuantizationType
    rows, width = raw.shape[0], raw.shape[1] // kind.nbytes * kind.elements
    values = torch.empty((rows, width), dtype=dtype)
    step = max(1, DEQUANTISED_VALUES // width)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite: what it makes is seen by whoever cannot hold it
        for begin in range(0, rows, step):
            if kind.name in FEW_BITS:
                values[begin : begin + step] = values_of(raw[begin : begin + step], kind.name)
                continue
            # as one row: of several the library takes 16 at a time, whose calls cost more than short rows' numbers
            piece = quants.dequantize(raw[begin : begin + step].reshape(1, -1).numpy(), types[kind.name])
            values[begin : begin + step] = torch.from_numpy(piece).view(-1, width)
    return values
