"""Weights of other programs as a GPU holds them: their codes in words, and what stands beside a group of them.

Legend: N outputs, K inputs, G groups of a row, W words of a row; E matrices that are stacked, where there are several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diptych.compute.ops.contract_parts import Codes
from diptych.ground.formats import DEVICE_MIDDLES, KEPT_BITS, NESTED_INPUTS, WORD_INPUTS, DeviceFormat, KeptFormat

SCALE_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """W [N, K], or several stacked [E, N, K], as codes of `format`.

    words [N, W] int32: word j of a block of 32 has input i 32 + j in its bits from i `format.bits` on. Filled up with codes 0
    behind K. heads, outputs beside one another: scales of fp32 [G, N]; words int32 [G, N] of a scale of 16 bits and an offset
    in the upper half; words int32 [G / 2, N] of what two groups have, the first in the lower half: scales, or nested ones in
    the lower byte of a half and their minima in the upper. more: fp32 offsets [G, N], or of nested ones what 256 inputs share,
    [K / 256, N]: fp32, or with minima int32 of two fp16.
    """

    words: torch.Tensor
    heads: torch.Tensor
    more: torch.Tensor | None
    format: DeviceFormat
    n_inputs: int

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int | slice) -> CodedWeight:
        """One or some of those that are stacked."""
        more = None if self.more is None else self.more[index]
        return CodedWeight(self.words[index], self.heads[index], more, self.format, self.n_inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return *self.words.shape[:-1], self.n_inputs

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it is made of."""
        return (self.words, self.heads) if self.more is None else (self.words, self.heads, self.more)

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(one.nbytes for one in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedWeight:
    """Matrices [n, K] behind one another along their outputs, each in its own format."""

    pieces: tuple[torch.Tensor | CodedWeight, ...]

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def nbytes(self) -> int:
        """Of all."""
        return sum(piece.nbytes for piece in self.pieces)


Weight = torch.Tensor | CodedWeight | JoinedWeight


def on_device(codes: Codes, kept: KeptFormat, device: torch.device) -> CodedWeight:
    """Codes of `kept`, for which there is a `DeviceFormat`, in that."""
    form = DeviceFormat.of(kept)
    assert form is not None, kept.name
    values, k = codes.codes.to(device), codes.codes.shape[1]
    if form.grid == "signed" and kept.is_grouped:
        values = values + (DEVICE_MIDDLES[form.bits] - (1 << (KEPT_BITS[kept.kind] - 1)))
    heads, more = _beside(codes, kept, form)
    blocks = -(-k // form.inputs)
    n_groups = 1 if not form.group else blocks * form.inputs // form.group
    more_groups = -(-k // NESTED_INPUTS) if form.scale == "s8" else n_groups
    if form.scale == "s8" or (form.scale != "f32" and not form.has_offsets):
        heads, n_groups = _in_twos(heads), n_groups // 2
    return CodedWeight(
        _words(values, form, blocks),
        _by_group(heads, n_groups, device),
        None if more is None else _by_group(more, more_groups, device),
        form,
        k,
    )


def halved_powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 128) in bf16, half of what E8M0 says, as scales of `e8m0` are."""
    wide = exponents.to(torch.int32)
    small = torch.tensor(0x20, dtype=torch.int32) << wide.clamp(max=1)
    return torch.where(wide < 2, small, (wide - 1) << 7).to(torch.int16).view(torch.bfloat16)


def empty_stack(one: CodedWeight, n: int) -> CodedWeight:
    """Room for n matrices of the form of one."""
    words, heads, *more = (
        torch.empty((n, *tensor.shape), dtype=tensor.dtype, device=tensor.device) for tensor in one.tensors
    )
    return CodedWeight(words, heads, more[0] if more else None, one.format, one.n_inputs)


def joined(pieces: list[CodedWeight]) -> CodedWeight:
    """Matrices of one format and as many inputs behind one another."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    more = None if first.more is None else torch.cat([one.more for one in pieces if one.more is not None], dim=-1)
    words, heads = torch.cat([one.words for one in pieces]), torch.cat([one.heads for one in pieces], dim=-1)
    return CodedWeight(words, heads, more, first.format, first.n_inputs)


def _words(values: torch.Tensor, form: DeviceFormat, blocks: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(values, (0, blocks * form.inputs - values.shape[1]))
    by_word = padded.view(len(values), blocks, -1, WORD_INPUTS)
    words = torch.zeros((len(values), blocks, WORD_INPUTS), dtype=torch.int32, device=values.device)
    for i in range(by_word.shape[2]):
        words |= by_word[:, :, i].to(torch.int32) << (form.bits * i)
    return words.flatten(1)


def _beside(codes: Codes, kept: KeptFormat, form: DeviceFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Heads and more [N, groups]."""
    scales, offsets = halved_powers(codes.scales) if kept.scale == "e8m0" else codes.scales, codes.offsets
    if form.scale == "s8":
        assert codes.factors is not None
        heads = scales.to(torch.int16) & 255
        if offsets is None:
            return heads, codes.factors
        return heads | (offsets.to(torch.int16) << 8), codes.factors.contiguous().view(torch.int32)
    dtype: Any = SCALE_DTYPES[form.scale]
    scales = scales.to(dtype)
    if offsets is None:
        return scales, None
    held = offsets.to(dtype)
    assert torch.equal(held.to(offsets.dtype), offsets), f"{form.name} does not hold its offsets"
    if form.scale == "f32":
        return scales, held
    return torch.stack((scales, held), -1).contiguous().view(torch.int32).squeeze(-1), None


def _in_twos(of_groups: torch.Tensor) -> torch.Tensor:
    """16 bits [N, groups] -> int32 [N, groups / 2]."""
    return torch.nn.functional.pad(of_groups, (0, of_groups.shape[1] % 2)).contiguous().view(torch.int32)


def _by_group(of_rows: torch.Tensor, n_groups: int, device: torch.device) -> torch.Tensor:
    """[N, groups] -> [n_groups, N]."""
    turned = of_rows.to(device).T
    return torch.nn.functional.pad(turned, (0, 0, 0, n_groups - len(turned))).contiguous()
