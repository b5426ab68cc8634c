"""The container of GGUF files: what a header says, read within bounds, and where each tensor's bytes lie.

Owns the mapping of a file, or of all parts of a split one, and everything that can be wrong with a header: a count, an
offset, an alignment, a string or an array that reaches outside the file, a type that nobody reads, a part that is missing.
All of it is a LoadError, raised before anything of the size that a header claims is allocated. The reader of the `gguf`
package trusts counts and offsets and takes seconds for a large vocabulary, so it is not used; its dequantisation is
(`compute.formats.gguf`). Standard library only: the planner opens such files too.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

>>> open_gguf(Path("model.gguf")).metadata["general.architecture"]  # doctest: +SKIP
'llama'
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from diptych.ground.errors import LoadError
from diptych.models.files import BEGIN_BYTES, begins_otherwise

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SUFFIX = ".gguf"
PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(2**power for power in range(3, 13))
# far above any file there is, and few enough to be walked within a second
MOST_KEYS = 65_536
MOST_TENSORS = 262_144
MOST_STRINGS = (
    4_194_304  # in all arrays together: the largest vocabularies have 262,144 tokens and twice as many merges
)
MOST_PARTS = 4096
MOST_NAME_BYTES = 1024
MOST_TEXT_BYTES = 16 * 2**20  # the longest are chat templates and licences
MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor is stored: `elements` values in `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits per value, scales included."""
        return self.nbytes * 8 / self.elements

    @property
    def is_plain(self) -> bool:
        """Whether each value stands alone, as a float."""
        return self.elements == 1


# id -> type; sizes as in ggml-common.h of llama.cpp, held against the gguf package by tests/models/test_gguf_file.py
BLOCK_TYPES: dict[int, BlockType] = {
    number: BlockType(name, elements, nbytes)
    for number, name, elements, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2),
        (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
    )
}  # fmt: skip
UNREAD_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
                33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}  # fmt: skip
# ids in the metadata -> struct and array codes
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
FLOAT = "f"
LARGEST_FLOAT = 3.4028235e38
DAMAGED = "the file is damaged, or no GGUF file as others write it; download it again"
# parts that somebody holds, by path, number, inode, size and time
_HELD: WeakValueDictionary[tuple[str, int, int, int, int], _Part] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: in the file's part `part`, bytes [begin, begin + nbytes). shape: rows first, as in torch."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    part: int
    begin: int
    nbytes: int


class GgufArray:
    """An array in the metadata, read when asked: a planner needs no vocabulary."""

    def __init__(
        self, path: Path, mapped: mmap.mmap, kind: int, count: int, begin: int, ends: array[int] | None = None
    ) -> None:
        self._path = path
        self._mapped = mapped
        self._kind = kind
        self._begin = begin
        self._ends = ends  # of texts, from `begin` on
        self.count = count

    @property
    def is_text(self) -> bool:
        """Whether it holds strings."""
        return self._kind == STRING

    def values(self) -> list[Any]:
        """All values. LoadError for a string that is no UTF-8."""
        if self.is_text:
            return self._texts()
        cursor = _Cursor(self._path, self._mapped, self._begin)
        found = array(SCALARS[self._kind].replace("?", "B"))
        found.frombytes(cursor.bytes(self.count * found.itemsize))
        if self._kind == BOOL:
            return [bool(value) for value in found]
        return [shortest(value) for value in found] if SCALARS[self._kind] == FLOAT else found.tolist()

    def stored(self) -> tuple[bytes, array[int]]:
        """Texts as they lie in the file, each with the 8 bytes of its length before it, and where in that each of them ends."""
        ends = self._ends or array("Q")
        return self._mapped[self._begin : self._begin + (ends[-1] if ends else 0)], ends

    def _texts(self) -> list[str]:
        mapped, at, read = self._mapped, self._begin, struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(self.count):  # their lengths were checked when the header was
                begin = at + 8
                at = begin + read(mapped, at)[0]
                texts.append(mapped[begin:at].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise LoadError(f"text {len(texts)} of an array in {self._path} is no UTF-8: {error}") from None
        return texts


class GgufFile:
    """The header of a GGUF file with all its parts, which stay mapped while this, or a view of them, lives."""

    def __init__(self, parts: list[_Part]) -> None:
        self.paths = tuple(part.path for part in parts)
        self.metadata: dict[str, Any] = parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._parts = parts  # held, so that who opens the file meanwhile gets them too
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    raise LoadError(f"tensor {tensor.name} is twice in {self.path}", hint=DAMAGED)
                self.tensors[tensor.name] = tensor

    @property
    def path(self) -> Path:
        """The file, or the first part."""
        return self.paths[0]

    @property
    def file_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part.mapped) for part in self._parts)

    @cached_property
    def layer_values(self) -> Counter[str]:
        """Values of each type in the matrices of layers."""
        found: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                found[tensor.type.name] += math.prod(tensor.shape)
        return found

    def mapped(self, part: int) -> mmap.mmap:
        """The bytes of a part."""
        return self._parts[part].mapped

    def floats(self, name: str) -> list[float] | None:
        """The values of a small F32 tensor; None where there is none. LoadError where it has another type."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            raise LoadError(
                f"tensor {name} in {self.path} is {tensor.type.name} {list(tensor.shape)}; one row of F32 is read"
            )
        values = array("f")
        values.frombytes(self.mapped(tensor.part)[tensor.begin : tensor.begin + tensor.nbytes])
        return [shortest(value) for value in values]


def is_gguf(path: Path) -> bool:
    """Whether the path is a file that calls itself GGUF, by its first bytes or by its name. Opening a pipe would wait."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC or path.suffix == SUFFIX
    except OSError:
        return False


def find_gguf(path: Path) -> Path | None:
    """A GGUF file: `path` itself, or the one model in a folder that has no config.json. None where there is none."""
    if not path.is_dir():
        return path if is_gguf(path) else None
    if (path / "config.json").exists():
        return None
    names = [file for file in path.glob(f"*{SUFFIX}") if file.is_file() and not file.name.startswith("mmproj")]
    firsts = [file for file in names if (part := PART.match(file.name)) is None or int(part["number"]) == 1]
    if len(firsts) > 1:
        raise LoadError(
            f"{path} holds {len(firsts)} GGUF models, {firsts[0].name} and {firsts[1].name} among them", hint="name one"
        )
    return firsts[0] if firsts else None


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file, or all parts of the split file that `path` is one of, and read the headers. Raises LoadError."""
    first = _part(path, 0)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return GgufFile([first])
    named = PART.match(path.name)
    if named is None or type(count) is not int or int(named["count"]) != count or not 1 < count <= MOST_PARTS:
        raise LoadError(
            f"{path} says it is one of {count} parts, which its name does not",
            hint="give the first part, under its own name: <model>-00001-of-0000N.gguf",
        )
    names = [path.with_name(f"{named['stem']}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]
    missing = [name for name in names if not name.is_file()]
    if missing:
        raise LoadError(
            f"{len(missing)} of {count} parts are missing, the first is {missing[0]}", hint="download them too"
        )
    parts = [_part(name, number) for number, name in enumerate(names)]
    for number, part in enumerate(parts):
        found = part.metadata.get("split.no"), part.metadata.get("split.count")
        if found != (number, count):
            raise LoadError(
                f"{part.path} says it is part {found[0]} of {found[1]}; its name says {number} of {count}",
                hint="give each part its own name back",
            )
    file = GgufFile(parts)
    expected = file.metadata.get("split.tensors.count", len(file.tensors))
    if expected != len(file.tensors):
        raise LoadError(
            f"{path} names {expected} tensors; its {count} parts hold {len(file.tensors)}",
            hint="the parts are of different files; download them again",
        )
    return file


def _part(path: Path, number: int) -> _Part:
    """A part, whose header is walked once while anybody holds it: weights and words of a model lie in one file."""
    try:
        status = path.stat()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error
    key = (str(path), number, status.st_ino, status.st_size, status.st_mtime_ns)
    found = _HELD.get(key)
    if found is not None:
        return found
    try:
        found = _HELD[key] = _Part(path, number)
    except LoadError as error:
        raise LoadError(error.message, hint=error.hint or DAMAGED) from error
    return found


class _Part:
    """One file: its header, checked."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.mapped = _map(path)
        cursor = _Cursor(path, self.mapped)
        if self.mapped[: len(MAGIC)] != MAGIC[: len(self.mapped)]:
            raise begins_otherwise(path, self.mapped[:BEGIN_BYTES], MAGIC.decode())
        cursor.take(len(MAGIC))
        version = cursor.number("I")
        if version not in VERSIONS:
            is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "is big-endian" if is_big else f"has GGUF version {version}"
            raise LoadError(
                f"{path} {what}; little-endian versions {' and '.join(map(str, VERSIONS))} are read",
                hint="take another file of the model, or convert its Hugging Face checkpoint again with llama.cpp",
            )
        n_tensors = cursor.count("tensors", MOST_TENSORS)
        n_keys = cursor.count("metadata keys", MOST_KEYS)
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = cursor.text(MOST_NAME_BYTES)
            if key in self.metadata:
                raise LoadError(f"metadata key {key!r} is twice in {path}")
            self.metadata[key] = cursor.value(key)
        self.tensors = self._read_tensors(cursor, n_tensors, number)

    def _read_tensors(self, cursor: _Cursor, n_tensors: int, number: int) -> list[GgufTensor]:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment not in ALIGNMENTS:
            raise LoadError(f"general.alignment in {self.path} is {alignment!r}; a power of two from 8 to 4096 is read")
        infos = [cursor.tensor() for _ in range(n_tensors)]
        start = -(-cursor.at // alignment) * alignment
        tensors, reached = [], 0
        for name, shape, block_type, offset in sorted(infos, key=lambda info: info[3]):
            nbytes = math.prod(shape) // block_type.elements * block_type.nbytes
            begin = start + offset
            if offset % alignment or offset < reached:
                why = (
                    f"is no multiple of {alignment}"
                    if offset % alignment
                    else f"lies in the tensor before it, to {reached}"
                )
                raise LoadError(
                    f"tensor {name} in {self.path} begins at {offset}, which {why}", hint="download the file again"
                )
            if begin + nbytes > len(self.mapped):
                raise LoadError(
                    f"tensor {name} in {self.path} reaches to byte {begin + nbytes}; the file has {len(self.mapped)}",
                    hint="the download was cut short; download the file again",
                )
            reached = offset + nbytes
            tensors.append(GgufTensor(name, shape, block_type, number, begin, nbytes))
        return tensors


class _Cursor:
    """Reads a header from its begin to its end, and never past the end of the file."""

    def __init__(self, path: Path, mapped: mmap.mmap, at: int = 0) -> None:
        self._path = path
        self._mapped = mapped
        self._strings = 0
        self.at = at

    def take(self, n: int) -> int:
        """Where the next n bytes begin; they are in the file."""
        begin, self.at = self.at, self.at + n
        if self.at > len(self._mapped):
            raise LoadError(
                f"the header of {self._path} reaches to byte {self.at}; the file has {len(self._mapped)}",
                hint="the file was cut short or damaged; download it again",
            )
        return begin

    def bytes(self, n: int) -> bytes:
        """The next n bytes."""
        begin = self.take(n)
        return self._mapped[begin : self.at]

    def number(self, code: str) -> Any:
        """The next number of a struct code; a float of 32 bits as the shortest decimal that is the same."""
        raw = self.bytes(struct.calcsize(f"<{code}"))
        if code == "?" and raw not in (b"\0", b"\1"):
            raise LoadError(f"a truth value in the header of {self._path} is {raw[0]}; it must be 0 or 1")
        (value,) = struct.unpack(f"<{code}", raw)
        return shortest(value) if code == FLOAT else value

    def count(self, what: str, limit: int) -> int:
        """The next count of things."""
        found = int(self.number("Q"))
        if found > limit:
            raise LoadError(
                f"the header of {self._path} names {found} {what}; at most {limit} are read",
                hint="the file is damaged; download it again",
            )
        return found

    def text(self, limit: int = MOST_TEXT_BYTES) -> str:
        """The next string."""
        raw = self.bytes(self.count("bytes of one text", limit))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise LoadError(f"a text in the header of {self._path} is no UTF-8: {error}") from None

    def value(self, key: str) -> Any:
        """The next value with its type before it. An array is passed over, to be read later."""
        kind = self.number("I")
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise LoadError(f"{key} in {self._path} has type {kind}; types 0 to {max(SCALARS)} are known")
        inner, count = self.number("I"), self.number("Q")
        begin, ends = self.at, None
        if inner in SCALARS:
            self.take(count * struct.calcsize(f"<{SCALARS[inner]}"))
        elif inner == STRING:
            ends = self._pass_strings(key, count)
        else:
            raise LoadError(f"{key} in {self._path} is an array of type {inner}; numbers and texts are read")
        return GgufArray(self._path, self._mapped, inner, count, begin, ends)

    def _pass_strings(self, key: str, count: int) -> array[int]:
        """Where each of them ends, from here on."""
        self._strings += count
        if self._strings > MOST_STRINGS:
            raise LoadError(f"{key} in {self._path} has {count} texts; at most {MOST_STRINGS} are read in all")
        mapped, last, read = self._mapped, len(self._mapped) - 8, struct.Struct("<Q").unpack_from
        ends = array("Q")
        begin = at = self.at
        for _ in range(count):  # a vocabulary has half a million: nothing but this in the loop
            if at > last:
                break
            n = read(mapped, at)[0]
            if n > MOST_TEXT_BYTES:
                raise LoadError(f"a text of {key} in {self._path} has {n} bytes; at most {MOST_TEXT_BYTES} are read")
            at += 8 + n
            ends.append(at - begin)
        else:
            self.take(at - self.at)
            return ends
        self.take(at + 8 - self.at)  # says where the file ended
        return ends

    def tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """The next tensor's name, shape, type, and offset into the data."""
        name = self.text(MOST_NAME_BYTES)
        n_dimensions = self.number("I")
        if not 1 <= n_dimensions <= MOST_DIMENSIONS:
            raise LoadError(
                f"tensor {name} in {self._path} has {n_dimensions} dimensions; 1 to {MOST_DIMENSIONS} are read"
            )
        shape = tuple(reversed([int(self.number("Q")) for _ in range(n_dimensions)]))
        number, offset = self.number("I"), self.number("Q")
        block_type = BLOCK_TYPES.get(number)
        if block_type is None:
            raise LoadError(
                f"tensor {name} in {self._path} has type {UNREAD_TYPES.get(number, number)}; "
                f"{', '.join(known.name for known in BLOCK_TYPES.values())} are read",
                hint="take a file of the model in one of these types",
            )
        if not all(0 < n < 2**40 for n in shape) or shape[-1] % block_type.elements:
            raise LoadError(
                f"tensor {name} in {self._path} has shape {list(shape)}; sizes must be greater than 0, "
                f"and rows of {block_type.name} hold a multiple of {block_type.elements} values"
            )
        return name, shape, block_type, offset


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise LoadError(f"{path} has 0 bytes", hint="download the file again")
            # pages are private, so that tensors over them count as writable for numpy and torch; nobody writes to them
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from error


def shortest(value: float) -> float:
    """A 32-bit float as the shortest decimal that is the same: 1e-05, not 9.999999747378752e-06."""
    for digits in range(6, 10):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded) < LARGEST_FLOAT and struct.pack("<f", rounded) == struct.pack("<f", value):
            return rounded
    return value
