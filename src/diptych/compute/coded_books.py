"""AQLM's matrices: each run of inputs is the sum of one vector of each of several codebooks, times a scale of its row.

codes int8 or int16 [n / a, k / b, C], of two's complement, codebooks [C, size, a, b] and scales [n / a, 1, 1, 1], for runs of
a outputs and b inputs. Source: aqlm 1.1.7 (`inference.py`, `utils.py`).
"""

from __future__ import annotations

from functools import cached_property

import torch

from diptych.compute.coded_matrices import RawTensors
from diptych.compute.coded_tensors import CONTRADICTION, FLOATS, all_bytes, require
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.errors import LoadError
from diptych.ground.formats import KeptFormat

MOST_BITS = 16  # of a code


class BookMatrix:
    """value = scale * (the sum of the vectors), in fp32."""

    kept: KeptFormat | None = None
    order: torch.Tensor | None = None
    why = "no kernel has codebooks"

    def __init__(self, raw: RawTensors, prefix: str, label: str) -> None:
        self._raw, self._prefix, self.label, self.stored_bytes = raw, prefix, label, all_bytes(raw, prefix)

    def codes(self) -> Codes:
        """There are none."""
        raise NotImplementedError(f"{self._prefix} has no codes")

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite."""
        return self._of_runs(rows) if self._books.shape[2] == 1 else self._of_runs(slice(None))[rows]

    def _of_runs(self, runs: slice) -> torch.Tensor:
        books = self._books
        n_books, size, n_rows, n_inputs = books.shape
        codes = self._raw.stored(f"{self._prefix}.codes")[runs].long() & size - 1
        vectors = torch.zeros(*codes.shape[:2], n_rows, n_inputs)
        for book in range(n_books):
            vectors += books[book][codes[..., book]]
        vectors *= self._finite("scales")[runs].float()
        return vectors.transpose(1, 2).reshape(codes.shape[0] * n_rows, -1)

    @cached_property
    def _books(self) -> torch.Tensor:
        return self._finite("codebooks").float()

    def _finite(self, part: str) -> torch.Tensor:
        found = self._raw.stored(f"{self._prefix}.{part}")
        if not bool(torch.isfinite(found).all()):
            raise LoadError(
                f"{self._prefix}.{part} has a number that is not finite",
                hint="the checkpoint is damaged; download it again",
            )
        return found


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
