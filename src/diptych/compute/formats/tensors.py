"""Tensors of a quantised checkpoint: which belong to a matrix, whether one is as it should be, codes out of its words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from diptych.compute.formats.matrices import RawTensors
from diptych.compute.loading.finite import are_finite
from diptych.ground.errors import LoadError
from diptych.models.quantised.method import BESIDE_CODES, BESIDE_HQQ, CODES

FLOATS = ("F16", "BF16", "F32")
CONTRADICTION = "config.json contradicts the weights; they must come from the same model"
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}  # bits of each, by those of a code
_ITEM_BITS = {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "F16": 16, "BF16": 16, "I16": 16}  # else 8


def companions(raw: RawTensors, prefix: str) -> list[str]:
    """All tensors of the file that belong to the matrix."""
    beside = (*BESIDE_CODES, *(BESIDE_HQQ if raw.holds(f"{prefix}.W_q") else ("scale",)))
    names = dict.fromkeys(f"{prefix}.{suffix}" for suffix in ("weight", *CODES, *beside))
    return [name for name in names if raw.holds(name)]


def nbytes_of(raw: RawTensors, name: str) -> int:
    """Of one tensor."""
    shape, dtype = raw.header(name)
    return math.prod(shape) * _ITEM_BITS.get(dtype, 8) // 8


def all_bytes(raw: RawTensors, prefix: str) -> int:
    """Of all tensors that belong to the matrix."""
    return sum(nbytes_of(raw, name) for name in companions(raw, prefix))


def require(raw: RawTensors, name: str, shape: tuple[int, ...], *dtypes: str) -> None:
    """LoadError where there is no tensor of that name, shape and one of the types."""
    if not raw.holds(name):
        raise LoadError(
            f"tensor {name} is missing; shape {list(shape)} is expected", hint="the checkpoint is incomplete"
        )
    found, dtype = raw.header(name)
    if found != shape or dtype not in dtypes:
        raise LoadError(
            f"tensor {name} is {dtype} {list(found)}; {' or '.join(dtypes)} {list(shape)} is expected by config.json and its "
            "quantization_config",
            hint=CONTRADICTION,
        )


def require_groups(prefix: str, n_inputs: int, group: int) -> None:
    """LoadError where groups of so many inputs do not divide a matrix's rows."""
    if n_inputs % group:
        raise LoadError(f"{prefix} has {n_inputs} inputs, which groups of {group} do not divide", hint=CONTRADICTION)


def finite(raw: RawTensors, name: str) -> torch.Tensor:
    """The stored values. LoadError for a number that is not finite."""
    found = raw.stored(name)
    if not are_finite(found):
        raise LoadError(f"{name} has a number that is not finite", hint="the checkpoint is damaged; download it again")
    return found


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [a, b] -> uint8 [a, b, 32 / bits], lowest bits first; of 3, 5 and 6 bits, some across words, [a, b / bits, 32].

    int16 likewise, of bits that divide 8.
    """
    if 8 % bits:
        runs, mask = words.unflatten(1, (-1, bits)), (1 << bits) - 1
        codes = torch.empty(*runs.shape[:2], 32, dtype=torch.uint8)
        for i in range(32):
            word, shift = divmod(bits * i, 32)
            code = runs[..., word] >> shift & mask
            if shift + bits > 32:  # arithmetic shifts: what came down of the sign is no part of it
                code = code & (1 << 32 - shift) - 1 | runs[..., word + 1] << 32 - shift & mask
            codes[..., i] = code
        return codes
    stored = words.contiguous().view(torch.uint8).view(*words.shape, words.element_size())
    if bits == 8:
        return stored
    return torch.stack([stored >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(-2)


def unpack_planes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [a, b] -> uint8 [a, b / bits * 32]: of 32 codes first words with their lowest 4 (or 8, or 2) bits each, behind them
    those with 2 more, and with 1 more, as far as they have them (GPTQModel's `gptq_p`).
    """
    runs, at, found = words.unflatten(1, (-1, bits)), 0, 0
    codes = torch.zeros(*runs.shape[:2], 32, dtype=torch.uint8)
    for width in PLANES[bits]:
        plane = unpack_words(runs[..., at : at + width].flatten(1), width)
        codes |= plane.reshape(codes.shape) << found
        at, found = at + width, found + width
    return codes.flatten(1)


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the files have in another form. read: its values."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


class Overlaid:
    """`RawTensors` of which some are made of others, or hidden (None)."""

    def __init__(self, raw: RawTensors, made: Mapping[str, Made | None]) -> None:
        self._raw, self._made = raw, made

    def holds(self, name: str) -> bool:
        """Whether it is there, or is made."""
        return self._made[name] is not None if name in self._made else self._raw.holds(name)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Of what is made, too."""
        made = self._made.get(name)
        return self._raw.header(name) if made is None else (made.shape, made.dtype)

    def stored(self, name: str) -> torch.Tensor:
        """Of what is made, new."""
        made = self._made.get(name)
        return self._raw.stored(name) if made is None else made.read()
