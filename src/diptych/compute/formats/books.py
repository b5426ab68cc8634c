"""AQLM's matrices: each run of inputs is the sum of one vector of each of several codebooks, times a scale of its row.

codes int8 or int16 [n / a, k / b, C], of two's complement, codebooks [C, size, a, b] and scales [n / a, 1, 1, 1], for runs of
a outputs and b inputs. Source: aqlm 1.1.7 (`inference.py`, `utils.py`).
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import Dequantised, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, all_bytes, finite, require
from diptych.ground.errors import LoadError

MOST_BITS = 16  # of a code


class BookMatrix(Dequantised):
    """value = scale * (the sum of the vectors), in fp32."""

    why = "no kernel has codebooks"

    def __init__(self, raw: RawTensors, prefix: str, label: str) -> None:
        self._raw, self._prefix, self.label, self.stored_bytes = raw, prefix, label, all_bytes(raw, prefix)

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite."""
        raw, prefix = self._raw, self._prefix
        books = finite(raw, f"{prefix}.codebooks").float()
        n_books, size, n_rows, _ = books.shape
        runs = rows if n_rows == 1 else slice(None)
        codes = raw.stored(f"{prefix}.codes")[runs].long() & size - 1
        vectors = books[0][codes[..., 0]]
        for book in range(1, n_books):
            vectors += books[book][codes[..., book]]
        vectors *= finite(raw, f"{prefix}.scales")[runs].float()
        values = vectors.transpose(1, 2).reshape(len(codes) * n_rows, -1)
        return values if n_rows == 1 else values[rows]


def open_books(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> BookMatrix | None:
    """The matrix under `prefix`, checked against the shape that the config gives; None where it has no codes."""
    codes, books = f"{prefix}.codes", f"{prefix}.codebooks"
    if not raw.holds(codes):
        return None
    (n, k), found = shape, raw.header(books)[0] if raw.holds(books) else ()
    sides = found if len(found) == 4 else (1, 256, 1, 8)
    n_books, size, n_rows, n_inputs = sides
    bits = size.bit_length() - 1
    if size != 1 << bits or not 1 <= bits <= MOST_BITS or not n_books or not n_rows or not n_inputs:
        raise LoadError(
            f"tensor {books} has shape {list(found)}; vectors by codes of 1 to {MOST_BITS} bits are expected",
            hint=CONTRADICTION,
        )
    if n % n_rows or k % n_inputs:
        raise LoadError(
            f"{prefix} is {n} by {k}, which runs of {n_rows} by {n_inputs} do not divide", hint=CONTRADICTION
        )
    require(raw, books, sides, *FLOATS)
    require(raw, codes, (n // n_rows, k // n_inputs, n_books), "I8" if bits <= 8 else "I16")
    require(raw, f"{prefix}.scales", (n // n_rows, 1, 1, 1), *FLOATS)
    return BookMatrix(raw, prefix, f"aqlm-{n_books}x{bits}")
