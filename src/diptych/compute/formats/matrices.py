"""Quantised matrices of other programs, whatever tensors they lie in: integer codes, fp8 or entries of a table, with scales.

`layouts` makes them of a file's tensors.

Legend: n outputs, k inputs, G scales of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from diptych.compute.loading.finite import are_finite
from diptych.compute.loading.views import FP4_VALUES
from diptych.compute.ops.contract_parts import Codes
from diptych.compute.ops.torch.device_codes import halved_powers
from diptych.ground.errors import LoadError
from diptych.ground.formats import (
    FP8_BLOCK,
    HALVES,
    KEPT_MXFP4,
    KEPT_NVFP4,
    LEAST_WHOLE,
    NESTED_INPUTS,
    STRIP_LANES,
    WIDE_BITS,
    KeptFormat,
    group_held,
)

NAN_E4M3 = 0x7F  # the bits of the first that is no scale: behind it are the negative ones
NAN_E8M0 = 0xFF
LEAST_FP8 = 2.0**-100  # scale of codes of fp8 that kernels multiply, and the inverse of the largest
SCALE_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


class RawTensors(Protocol):
    """The file's tensors under their own names."""

    def holds(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype as safetensors names it)."""
        ...

    def stored(self, name: str) -> torch.Tensor:
        """The values as they are stored."""
        ...


class Matrix(Protocol):
    """One quantised matrix [n, k]. label: of its layout."""

    label: str
    stored_bytes: int

    @property
    def kept(self) -> KeptFormat | None:
        """The kernels' format that holds its values."""
        ...

    @property
    def order(self) -> torch.Tensor | None:
        """As of a `WeightTensor`."""
        ...

    @property
    def why(self) -> str:
        """Why `kept` is None."""
        ...

    def codes(self) -> Codes:
        """As codes of `kept`."""
        ...

    def values(self, rows: slice) -> torch.Tensor:
        """Rows of it in fp32, dequantised plainly."""
        ...


class Dequantised:
    """A `Matrix` that no kernel holds, so that it becomes floats. label: of the layout; why: what kernels lack."""

    kept: KeptFormat | None = None
    order: torch.Tensor | None = None
    label: str
    why: str

    def codes(self) -> Codes:
        """There are none."""
        raise NotImplementedError(f"{self.label} has no codes that a kernel holds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedParts:
    """Scales [n, G] and zero points [n, G] in units of codes, whole or not (None: the middle), and which each input has.

    minima [n, G]: in place of zero points, what code 0 stands for. group: inputs in order that share one; index [k]: of each
    input, where they do not lie in order (act-order).
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    index: torch.Tensor | None = None
    minima: torch.Tensor | None = None


class CodedMatrix:
    """A matrix of `bits`-bit codes: value = scale * (code - zero), or scale * code + minimum."""

    def __init__(
        self, name: str, shape: tuple[int, int], bits: int, label: str,
        read_codes: Callable[[], torch.Tensor], read_parts: Callable[[], CodedParts], stored_bytes: int,
        *, meets_int8_rows: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.shape, self.bits, self.label, self.stored_bytes = name, shape, bits, label, stored_bytes
        self._meets_int8_rows = meets_int8_rows  # as its publisher runs it: activations of 8 bits, a scale for each row
        self._read_codes, self._read_parts = read_codes, read_parts

    @cached_property
    def parts(self) -> CodedParts:
        """Read once for each use. LoadError for scales and zeros that cannot be meant."""
        parts = self._read_parts()
        if not all(are_finite(one) for one in (parts.scales, parts.minima) if one is not None):
            raise LoadError(
                f"{self.name} has a scale that is not finite", hint="the checkpoint is damaged; download it again"
            )
        return parts

    def _forget_parts(self) -> None:
        """They are small beside the codes, but those of all matrices together are a good part of the model."""
        self.__dict__.pop("parts", None)

    @property
    def middle(self) -> int:
        """The code that stands for 0 where there are no zero points."""
        return 1 << (self.bits - 1)

    @property
    def kept(self) -> KeptFormat | None:
        """By the file's groups and zeros."""
        return self._settled[0]

    @property
    def order(self) -> torch.Tensor | None:
        """Inputs of a group beside one another (act-order); None where they are."""
        return self._settled[1]

    @property
    def why(self) -> str:
        """Why `kept` is None."""
        return self._settled[2]

    @cached_property
    def _settled(self) -> tuple[KeptFormat | None, torch.Tensor | None, str]:
        """(kept, order, why)."""
        parts = self.parts
        index, group = parts.index, parts.group
        order = None if index is None else torch.argsort(index, stable=True).to(torch.int32)
        why = f"no kernel has groups of {group}"
        if index is not None and not bool((index.sort().values == torch.arange(len(index)) // group).all()):
            kept, why = None, "its groups are of several sizes"
        else:
            kept = self._kept_by(parts)
        self._forget_parts()
        return kept, order, why

    def _kept_by(self, parts: CodedParts) -> KeptFormat | None:
        k = self.shape[1]
        held, scale = group_held(parts.group if parts.group < k else 128), SCALE_TYPES[parts.scales.dtype]
        # every zero point is the middle
        is_symmetric = parts.minima is None and (parts.zeros is None or bool((parts.zeros == self.middle).all()))
        if held is None:
            return None
        if self._meets_int8_rows and is_symmetric and parts.group >= k:
            return KeptFormat(kind="int8")
        if is_symmetric:
            grid = "signed"
        elif parts.minima is None:
            is_whole = parts.zeros is None or not parts.zeros.is_floating_point()
            grid = "zeros" if self.bits == 4 and is_whole else "minima"
        else:  # of 8 bits level 0 is in the middle of the codes, and what that stands for may have more bits than the file's
            are_alike = scale in HALVES and parts.minima.dtype == parts.scales.dtype
            grid = "minima16" if are_alike and self.bits < 8 else "minima"
        return KeptFormat(kind=f"group{self.bits}", group=held, scale=scale, grid=grid, is_wide=self.bits >= WIDE_BITS)

    def codes(self) -> Codes:
        """Scales once for each of the kernels' groups, so that the file's larger groups stay what they are."""
        kept, parts, k = self.kept, self.parts, self.shape[1]
        assert kept is not None, self.name
        if kept.kind == "int8":
            self._forget_parts()
            return Codes(codes=self._read_codes(), scales=parts.scales.float())

        def by_group(values: torch.Tensor) -> torch.Tensor:
            n_groups = -(-k // kept.group)
            repeats = n_groups if parts.group >= k else parts.group // kept.group
            return values.repeat_interleave(repeats, 1)[:, :n_groups]

        offsets = None
        if kept.grid == "zeros":
            offsets = by_group(self._zeros().to(torch.uint8))
        elif kept.grid == "minima16":
            assert parts.minima is not None
            offsets = by_group(parts.minima)
        elif kept.grid == "minima":
            # of code 0, or of 8 bits level 0: at most 11 bits times 9, exact in fp32 for scales of 16 bits
            none = self.middle if self.bits == 8 else 0
            stored, minima = parts.scales.float(), parts.minima
            offsets = by_group(
                stored * (none - self._zeros().float()) if minima is None else stored * none + minima.float()
            )
        codes = self._read_codes()
        self._forget_parts()
        return Codes(
            codes=codes if self.order is None else codes[:, self.order.long()],
            scales=by_group(parts.scales),
            offsets=offsets,
        )

    def _zeros(self) -> torch.Tensor:
        zeros = self.parts.zeros
        return torch.full_like(self.parts.scales, self.middle, dtype=torch.int32) if zeros is None else zeros

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        parts, k = self.parts, self.shape[1]
        index = torch.arange(k) // parts.group if parts.index is None else parts.index
        scales, codes = parts.scales[rows].float()[:, index], self._read_codes()[rows].float()
        zeros = None if parts.minima is not None else self._zeros()[rows]
        if rows.indices(self.shape[0])[1] == self.shape[0]:  # pieces come in order, and this is the last
            self._forget_parts()
        if parts.minima is not None:
            return scales * codes + parts.minima[rows].float()[:, index]
        assert zeros is not None
        return scales * (codes - zeros.float()[:, index])


class ScaledMatrix:
    """fp8 (E4M3) times scales: value = scale * q, in fp32. block: rows and inputs that share one; None: a row or all of it."""

    order: torch.Tensor | None = None

    def __init__(
        self, name: str, raw: RawTensors, scale: str, block: tuple[int, int] | None, label: str, stored_bytes: int
    ) -> None:
        self._name, self._raw, self._scale, self._block, self.label = name, raw, scale, block, label
        self.stored_bytes = stored_bytes

    @cached_property
    def kept(self) -> KeptFormat | None:
        """A kernel has a scale of each row, or of blocks that strips of outputs lie within."""
        return None if self.why else KeptFormat(kind="fp8", group=0 if self._block is None else FP8_BLOCK)

    @cached_property
    def why(self) -> str:
        """Why `kept` is None."""
        n = self._raw.header(self._name)[0][0]
        if self._block is not None and (any(size % FP8_BLOCK for size in self._block) or n % STRIP_LANES):
            rows, inputs = self._block
            return f"no kernel has blocks of {rows} by {inputs} on {n} rows"
        used = self._scales[self._scales != 0]
        low, high = (1.0, 1.0) if used.numel() == 0 else (float(used.min()), float(used.max()))
        if low < LEAST_FP8 or high > 1 / LEAST_FP8:
            return f"scales from {low:.2g} to {high:.2g} leave what the kernels hold"
        return ""

    @cached_property
    def _scales(self) -> torch.Tensor:
        """[rows or blocks of them or 1, blocks of inputs or 1] fp32. LoadError for one that is not finite."""
        stored = self._raw.stored(self._scale)
        scales = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
        if not are_finite(scales):
            raise LoadError(
                f"{self._scale} has a scale that is not finite", hint="the checkpoint is damaged; download it again"
            )
        return scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        """Scales of rows, of each block of inputs."""
        at = rows if self._block is None else rows // self._block[0]
        return self._scales[at.clamp(max=len(self._scales) - 1)]

    def codes(self) -> Codes:
        """E4M3 as its bits."""
        stored = self._bits(slice(None))
        n, k = stored.shape
        scales = self._of(torch.arange(n))
        if self._block is not None:
            scales = scales.repeat_interleave(self._block[1] // FP8_BLOCK, 1)[:, : -(-k // FP8_BLOCK)]
        return Codes(codes=stored, scales=scales.contiguous())

    def _bits(self, rows: slice) -> torch.Tensor:
        """LoadError for one that is no number."""
        stored = self._raw.stored(self._name)[rows].view(torch.uint8)  # MLX has words of four
        if bool(((stored & NAN_E4M3) == NAN_E4M3).any()):
            raise LoadError(
                f"{self._name} has a value that is no number", hint="the checkpoint is damaged; download it again"
            )
        return stored

    def values(self, rows: slice) -> torch.Tensor:
        """fp32; LoadError for a scale that is not finite."""
        values = self._bits(rows).view(torch.float8_e4m3fn).float()
        scales = self._of(torch.arange(self._raw.header(self._name)[0][0])[rows])
        if self._block is None:
            return values * scales
        by_input = torch.arange(values.shape[1]) // self._block[1]
        return values * scales[:, by_input.clamp(max=scales.shape[1] - 1)]


class Fp4Matrix:
    """E2M1 values in groups: value = q * scale, a power of two (groups of 32) or E4M3 times one of the whole matrix (16).

    whole: the tensor of the latter, which MLX does not have; divides: the group's scale is divided by it.
    """

    order: torch.Tensor | None = None
    why = ""

    def __init__(
        self,
        name: str,
        raw: RawTensors,
        codes: str,
        scales: str,
        whole: str | None,
        *,
        divides: bool,
        stored_bytes: int,
        group: int,
    ) -> None:
        self.name, self._raw = name, raw
        self._codes, self._scales, self._whole, self._divides = codes, scales, whole, divides
        self._has_powers = group == 32
        self.kept: KeptFormat | None = KEPT_MXFP4 if self._has_powers else KEPT_NVFP4
        self.label, self.stored_bytes = "mxfp4" if self._has_powers else "nvfp4", stored_bytes

    def codes(self) -> Codes:
        """The kernels' levels are twice E2M1's."""
        codes = self._unpacked(slice(None))
        if self._has_powers:
            return Codes(codes=codes, scales=self._bytes(slice(None)))
        factor = self._factor
        n_factors = -(-codes.shape[1] // NESTED_INPUTS)
        half = (0.5 / factor if self._divides else 0.5 * factor).expand(len(codes), n_factors)
        return Codes(codes=codes, scales=self._bytes(slice(None)), factors=half.contiguous())

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        codes, stored = self._unpacked(rows), self._bytes(rows)
        if self._has_powers:
            scales = 2 * halved_powers(stored).float()
        else:
            scales = stored.view(torch.float8_e4m3fn).float()
            scales = scales / self._factor if self._divides else scales * self._factor
        values = torch.tensor(FP4_VALUES, dtype=torch.float32)[codes.long()].view(len(codes), scales.shape[1], -1)
        return (values * scales[..., None]).flatten(1)

    def _unpacked(self, rows: slice) -> torch.Tensor:
        pairs = self._raw.stored(self._codes)[rows].view(torch.uint8)  # MLX has words of eight codes
        return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)

    def _bytes(self, rows: slice) -> torch.Tensor:
        """Scales as their bits. LoadError for one that is negative or not finite."""
        stored = self._raw.stored(self._scales).view(torch.uint8)[rows].contiguous()
        if bool((stored == NAN_E8M0 if self._has_powers else stored >= NAN_E4M3).any()):
            raise LoadError(
                f"{self._scales} has a scale that is negative or not finite",
                hint="the checkpoint is damaged; download it again",
            )
        return stored

    @cached_property
    def _factor(self) -> torch.Tensor:
        if self._whole is None:
            return torch.tensor(1.0)
        factor = self._raw.stored(self._whole).float().reshape(())
        if not LEAST_WHOLE < float(factor) < 1 / LEAST_WHOLE:
            raise LoadError(
                f"{self._whole} is {float(factor)}; a scale between {LEAST_WHOLE} and {1 / LEAST_WHOLE} is expected",
                hint="the checkpoint is damaged; download it again",
            )
        return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """What bitsandbytes says of a matrix of 4 bits beside its tensors. block: values in a row that share a scale.

    nested_block: scales in a row that share one, where they have codes of 8 bits themselves; offset: added to those.
    """

    kind: str
    block: int
    nested_block: int | None
    offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTable:
    """A table of fractions as the kernels hold it: whole numbers of 8 bits, of which `unit` are one."""

    unit: int
    levels: tuple[int, ...]


# Of nf4 the unit is the one up to 127 that leaves normal weights in blocks of 64 the least squared error, 0.46 % of their root
# mean square (LAB.md); of fp4 the one with which all fractions but the least, a 192nd, are whole.
LEVEL_TABLES = {
    "nf4": LevelTable(unit=112, levels=(-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112)),
    "fp4": LevelTable(unit=120, levels=(0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30)),
}


class TableMatrix:
    """Entries of a table of 16 fractions, times the scale of each `block` values of all rows in turn: in fp32.

    Kept, each fraction is the nearest of the kernels' levels, and the scale of a block is that of its groups, in bf16.
    """

    order: torch.Tensor | None = None

    def __init__(
        self, name: str, raw: RawTensors, shape: tuple[int, int], state: TableState, stored_bytes: int
    ) -> None:
        self._raw, self._name, self._shape, self._state = raw, name, shape, state
        self.label, self.stored_bytes = f"bitsandbytes-{state.kind}", stored_bytes

    @cached_property
    def kept(self) -> KeptFormat | None:
        """By what a row and a block have in common: a group lies within one block, which may hold several rows."""
        group = group_held(math.gcd(self._shape[1], self._state.block))
        if group is None or not self._has_known_table:
            return None
        return KeptFormat(kind="group4", group=group, scale="bf16", grid=self._state.kind)

    @property
    def _has_known_table(self) -> bool:
        known = LEVEL_TABLES[self._state.kind]
        return bool(((known.unit * self._part("quant_map") - torch.tensor(known.levels)).abs() <= 0.5).all())

    @property
    def why(self) -> str:
        """Why `kept` is None."""
        if not self._has_known_table:
            return f"its table is not that of {self._state.kind}"
        return f"no kernel has the groups that rows of {self._shape[1]} and blocks of {self._state.block} share"

    def codes(self) -> Codes:
        """Levels for fractions, and so the scales divided by as many as are one."""
        kept, (n, k) = self.kept, self._shape
        assert kept is not None, self._name
        stored = self._raw.stored(self._name).flatten().view(torch.uint8)
        of_blocks = (self._read_scales() / LEVEL_TABLES[self._state.kind].unit).to(torch.bfloat16)
        scales = of_blocks.repeat_interleave(self._state.block // kept.group)
        scales = scales[: n * k // kept.group].view(n, -1)  # the last block may be short
        return Codes(codes=torch.stack((stored >> 4, stored & 15), -1).view(n, k), scales=scales)

    @cached_property
    def _scales(self) -> torch.Tensor:
        return self._read_scales()

    def _read_scales(self) -> torch.Tensor:
        """Of all blocks, fp32."""
        stored, state = self._part("absmax"), self._state
        if state.nested_block is None:
            return stored.float()
        scales = self._part("nested_quant_map").index_select(0, stored.int())
        of_each = self._part("nested_absmax").repeat_interleave(state.nested_block)[: len(scales)]
        return scales * of_each + state.offset

    def _part(self, suffix: str) -> torch.Tensor:
        """A tensor beside the codes. LoadError for floats that are not finite."""
        found = self._raw.stored(f"{self._name}.{suffix}")
        if found.is_floating_point() and not are_finite(found):
            raise LoadError(
                f"{self._name}.{suffix} has a number that is not finite",
                hint="the checkpoint is damaged; download it again",
            )
        return found

    def values(self, rows: slice) -> torch.Tensor:
        """fp32; LoadError for a scale or an entry that is not finite."""
        (n, k), block = self._shape, self._state.block
        begin, end, step = rows.indices(n)
        first, last = begin * k // block, -(-end * k // block)
        stored = self._raw.stored(self._name).flatten().view(torch.uint8)[first * block // 2 : last * block // 2]
        table = self._part("quant_map")
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)  # of a byte: the upper half comes first
        found = pairs.index_select(0, stored.int()).flatten()
        found = torch.nn.functional.pad(found, (0, (last - first) * block - len(found)))
        found = (found.view(-1, block) * self._scales[first:last, None]).flatten()
        return found[begin * k - first * block :][: (end - begin) * k].view(-1, k)[::step]
