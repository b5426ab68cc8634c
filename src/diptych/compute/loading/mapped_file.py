"""One safetensors file: opened and checked by safetensors, its tensors given out as views of a mapping of our own.

safetensors makes a storage for each tensor, which takes 21 us; a view of one that spans the file takes 3, and a small model has
thousands.

    file = MappedFile(path)
    values = file.get_tensor("model.norm.weight")
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

# of whole bytes, as torch calls them; tensors of others are safetensors' to read
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class MappedFile:
    """What `safe_open` gives, with `keys`, `metadata` and `get_slice` its own. The file stays mapped while a view of it lives.

    Raises SafetensorError or OSError where the file is none or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(
            str(path), framework="pt"
        )  # refuses places that do not fill the file, in their order
        self.keys, self.metadata, self.get_slice = self._file.keys, self._file.metadata, self._file.get_slice
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header: dict[str, Any] = json.loads(file.read(size))
            n_bytes = file.seek(0, 2)
        self._begin = 8 + size
        self._storage = torch.UntypedStorage.from_file(str(path), False, n_bytes)
        self._bytes: np.ndarray = self._view(torch.uint8, 0, (n_bytes,)).numpy()

    def get_tensor(self, name: str) -> torch.Tensor:
        """The values [shape], a view of the mapped file; do not write to it. Raises SafetensorError where there are none."""
        found = self._place(name)
        if found is None or found[1] % found[0].itemsize:  # no view begins between two elements
            made: torch.Tensor = self._file.get_tensor(name)
            return made
        dtype, begin = found
        return self._view(dtype, begin, self._header[name]["shape"])

    def middle(self, name: str, n: int) -> bytes:
        """Bytes of (at most) n values, from the middle one on, as they lie in the file."""
        found = self._place(name)
        if found is None:
            values = self.get_tensor(name).flatten()
            return values[len(values) // 2 :][:n].view(torch.uint8).numpy().tobytes()
        dtype, begin = found
        total = math.prod(self._header[name]["shape"])
        first, last = total // 2, min(total, total // 2 + n)
        return self._bytes[begin + first * dtype.itemsize : begin + last * dtype.itemsize].tobytes()

    def _view(self, dtype: torch.dtype, begin: int, shape: Sequence[int]) -> torch.Tensor:
        view: Any = torch.empty(0, dtype=dtype)
        made: torch.Tensor = view.set_(self._storage, begin // dtype.itemsize, shape)
        return made

    def _place(self, name: str) -> tuple[torch.dtype, int] | None:
        """(dtype, first byte in the file) of a tensor; None: safetensors is to read it, or to say that it is not there."""
        entry = self._header.get(name)
        dtype = None if entry is None else DTYPES.get(entry["dtype"])
        return None if entry is None or dtype is None else (dtype, self._begin + entry["data_offsets"][0])
