"""The files of a model: which of a folder hold its weights, what their headers say, what is said of paths that are no model.

>>> [path.name for path in weight_files(Path("model"))]  # doctest: +SKIP
['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import MAX_JSON_BYTES, read_json

INDEX_FILE = "model.safetensors.index.json"
WHOLE_FILE = "model.safetensors"
A_MODEL = "a model is a folder with config.json and *.safetensors, a GGUF file, or a name on the Hugging Face hub"
LFS_POINTER = b"version https://git-lfs"
BEGIN_BYTES, SHOWN_BYTES = 64, 16
MOST_NUMBERS_BYTES = 64


def has_weights(folder: Path) -> bool:
    """Whether the folder holds any: a config alone, or with an index, is enough to plan with."""
    return any(folder.glob("*.safetensors"))


def model_files(path: Path | None) -> Path | None:
    """The GGUF file or the folder to look into, of a path that names a model; None where a config is all there is."""
    if path is None or path.suffix != ".json":
        return path
    return path.parent if path.name == "config.json" and has_weights(path.parent) else None


def weight_files(folder: Path) -> list[Path]:
    """Those that the index names, else the one that there is. LoadError where one is missing, or none can be told."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise LoadError(f"{index} has no weight_map", hint="download the file again")
        names = sorted({str(value) for value in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise LoadError(f"{index} names a file outside its folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise LoadError(
                f"{len(missing)} of {len(names)} files that {index} names are missing, the first is {missing[0]}",
                hint="download them too",
            )
        return [folder / name for name in names]
    if (folder / WHOLE_FILE).is_file():
        return [folder / WHOLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise LoadError(
            f"{folder} holds {len(files)} safetensors files and no index; one file or an index is needed",
            hint="pickled checkpoints (*.bin, *.pth) are not read; convert them to safetensors",
        )
    return files


def safetensors_header(path: Path) -> dict[str, Any]:
    """Names, dtypes, shapes and places, whole numbers all of them: 8 bytes of length, then JSON (the safetensors format).

    LoadError where it is none, or where a tensor lies behind the end of the file.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            file_bytes = file.seek(0, 2)
            if 8 + size > file_bytes:
                file.seek(0)
                reason = f"its header reaches to byte {8 + size}; the file has {file_bytes}"
                raise _of_another_kind(path, file.read(BEGIN_BYTES)) or ValueError(reason)
            if size > MAX_JSON_BYTES:
                raise ValueError(f"a header of {size} bytes; at most {MAX_JSON_BYTES} are read")
            file.seek(8)
            header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name == "__metadata__" and isinstance(tensor, dict):
                continue
            begin, end = tensor["data_offsets"]
            numbers = (begin, end, *tensor["shape"])
            if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers) or begin > end:
                raise ValueError(f"the shape or the place of tensor {name} is none")
            if 8 + size + end > file_bytes:
                raise ValueError(f"tensor {name} reaches to byte {8 + size + end}; the file has {file_bytes}")
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{path} is damaged or cut short: {error}", hint="download the file again") from error
    return dict(header)


def stored_numbers(path: Path, tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """The few whole numbers of a tensor that is named so in the file's header; nothing where it holds others, or more."""
    begin, end = tensor["data_offsets"]
    if tensor.get("dtype") != "I64" or end - begin > MOST_NUMBERS_BYTES:
        return ()
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little") + begin)
        return tuple(array("q", file.read((end - begin) // 8 * 8)))


def begins_otherwise(path: Path, begin: bytes, expected: str) -> LoadError:
    """What is said of a file that does not begin as its kind does."""
    return _of_another_kind(path, begin) or LoadError(
        f"{path} begins with {begin[:SHOWN_BYTES]!r}, not with {expected}", hint="download the file again"
    )


def _of_another_kind(path: Path, begin: bytes) -> LoadError | None:
    """Of what people have in a file's place: the text by which git LFS knows it, the page that a server answered with."""
    if begin.startswith(LFS_POINTER):
        return LoadError(
            f"{path} is the pointer of git LFS to a file, not the file", hint="fetch the file with `git lfs pull`"
        )
    if begin.lstrip()[:1] == b"<":
        return LoadError(
            f"{path} is a page of HTML or XML: it begins with {begin[:SHOWN_BYTES]!r}", hint="download the file again"
        )
    return None


def first_line(error: BaseException) -> str:
    """What a library says of a file or of the hub, in a line."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^Got: \w+: (\[Errno -?\d+\] )?", "", line)  # the hub's client puts its own error's name first


def no_model(path: Path) -> LoadError:
    """What is said of a path that is there, and is neither a GGUF file nor a folder with a config."""
    if path.is_dir():
        hint = "download config.json and the tokenizer's files too" if has_weights(path) else A_MODEL
        return LoadError(f"{path} holds no config.json and no GGUF file", hint=hint)
    is_part = path.suffix == ".safetensors" or path.name == "config.json"
    hint = f"give its folder, {path.parent}" if is_part else A_MODEL
    return LoadError(f"{path} is a file that is no GGUF", hint=hint)
