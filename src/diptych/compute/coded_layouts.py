"""How other programs lay out a quantised matrix in safetensors: AWQ, GPTQ, compressed-tensors, and fp8 with scales.

Each layout gives the numbers as its file has them: integer codes with scales and zero points (`CodedMatrix`), which the kernels
keep, or fp8 values with scales, which become floats. Sources of the layouts: AutoAWQ `awq/modules/linear/gemm.py`, GPTQModel
`nn_modules/qlinear`, compressed-tensors `compressors`, transformers `integrations/finegrained_fp8.py`.

Legend: n outputs, k inputs, G scales of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from diptych.compute.ops.contract import Codes
from diptych.ground.errors import LoadError
from diptych.ground.formats import WIDE_BITS, KeptFormat, group_held
from diptych.models.quantised import Quantisation

# AutoAWQ packs column 8 c + AWQ_ORDER[i] of eight into nibble i of a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SCALE_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
INTEGERS = {torch.int32, torch.int64}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedParts:
    """Scales [n, G] and zero points [n, G] in units of codes (None: the middle), and which of them each input has.

    group: inputs in order that share one; index [k]: of each input, where they do not lie in order (act-order).
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    index: torch.Tensor | None = None


class CodedMatrix:
    """A matrix of `bits`-bit codes: value = scale * (code - zero), as all of these layouts have it."""

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
        """Read once: small beside the codes. LoadError for scales and zeros that cannot be meant."""
        parts = self._read_parts()
        if not bool(torch.isfinite(parts.scales).all()):
            raise LoadError(
                f"{self.name} has a scale that is not finite", hint="the checkpoint is damaged; download it again"
            )
        return parts

    @property
    def middle(self) -> int:
        """The code that stands for 0 where there are no zero points."""
        return 1 << (self.bits - 1)

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero point is the middle."""
        return self.parts.zeros is None or bool((self.parts.zeros == self.middle).all())

    @cached_property
    def kept(self) -> KeptFormat | None:
        """By the file's groups and zeros."""
        k, parts = self.shape[1], self.parts
        held, scale = group_held(parts.group if parts.group < k else 128), SCALE_TYPES[parts.scales.dtype]
        if held is None or not self._has_whole_groups:
            return None
        if self._meets_int8_rows and self.is_symmetric and parts.group >= k:
            return KeptFormat(kind="int8")
        grid = "signed" if self.is_symmetric else "zeros" if self.bits == 4 else "minima"
        return KeptFormat(kind=f"group{self.bits}", group=held, scale=scale, grid=grid, is_wide=self.bits >= WIDE_BITS)

    @cached_property
    def order(self) -> torch.Tensor | None:
        """Inputs of a group beside one another (act-order); None where they are."""
        index = self.parts.index
        return None if index is None else torch.argsort(index, stable=True).to(torch.int32)

    @property
    def _has_whole_groups(self) -> bool:
        index, group = self.parts.index, self.parts.group
        return index is None or bool((index.sort().values == torch.arange(len(index)) // group).all())

    @property
    def why(self) -> str:
        """Why `kept` is None."""
        if not self._has_whole_groups:
            return "its groups are of several sizes"
        return f"no kernel has groups of {self.parts.group}"

    def codes(self) -> Codes:
        """Scales once for each of the kernels' groups, so that the file's larger groups stay what they are."""
        kept, parts, k = self.kept, self.parts, self.shape[1]
        assert kept is not None, self.name
        if kept.kind == "int8":
            return Codes(codes=self._read_codes(), scales=parts.scales.float())

        def by_group(values: torch.Tensor) -> torch.Tensor:
            n_groups = -(-k // kept.group)
            repeats = n_groups if parts.group >= k else parts.group // kept.group
            return values.repeat_interleave(repeats, 1)[:, :n_groups]

        offsets = None
        if kept.grid == "zeros":
            offsets = by_group(self._zeros().to(torch.uint8))
        elif kept.grid == "minima":  # at most 11 bits times 9: exact in fp32 for scales of 16 bits
            offsets = by_group(parts.scales.float() * (self.middle - self._zeros().float()))
        codes = self._read_codes()
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
        scales, zeros = parts.scales[rows].float(), self._zeros()[rows].float()
        return scales[:, index] * (self._read_codes()[rows].float() - zeros[:, index])


class ScaledMatrix:
    """fp8 values times scales of rows and inputs: value = scale * q, in fp32."""

    kept: KeptFormat | None = None
    order: torch.Tensor | None = None
    why = "no kernel multiplies fp8; bf16 rounds the product of a value and its scale to 8 bits, and the value has 4"

    def __init__(self, name: str, raw: RawTensors, scale: str, block: tuple[int, int], label: str) -> None:
        self._name, self._raw, self._scale, self._block, self.label = name, raw, scale, block, label
        self.stored_bytes = _nbytes(raw, name) + _nbytes(raw, scale)

    def codes(self) -> Codes:
        """There are none."""
        raise NotImplementedError(self._name)

    def values(self, rows: slice) -> torch.Tensor:
        """fp32; LoadError for a scale that is not finite."""
        scales = self._raw.stored(self._scale).float()
        if not bool(torch.isfinite(scales).all()):
            raise LoadError(
                f"{self._scale} has a scale that is not finite", hint="the checkpoint is damaged; download it again"
            )
        values = self._raw.stored(self._name)[rows].float()
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
        by_row = torch.arange(self._raw.header(self._name)[0][0])[rows] // self._block[0]
        by_input = torch.arange(values.shape[1]) // self._block[1]
        return values * scales[by_row.clamp(max=len(scales) - 1)][:, by_input.clamp(max=scales.shape[1] - 1)]


def open_matrix(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Matrix | None:
    """The quantised matrix under `prefix`, checked against the shape that the config gives; None where there is none."""
    if how.method == "awq" and raw.holds(f"{prefix}.qweight"):
        return _awq(raw, prefix, shape, how)
    if how.method == "gptq" and raw.holds(f"{prefix}.qweight"):
        return _gptq(raw, prefix, shape, how)
    if raw.holds(f"{prefix}.weight_packed"):
        return _packed(raw, prefix, shape)
    weight = f"{prefix}.weight"
    if not raw.holds(weight):
        return None
    dtype = raw.header(weight)[1]
    if dtype == "F8_E4M3":
        return _fp8(raw, prefix, shape, how)
    if dtype == "I8":
        return _int8(raw, prefix, shape)
    return None


def _awq(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """qweight [k, n / 8], qzeros [G, n / 8], scales [G, n]; nibbles of a word in AWQ_ORDER."""
    n, k = shape
    group = k if how.group is None else how.group
    if k % group != 0:
        raise LoadError(f"{prefix} has {k} inputs, which groups of {group} do not divide", hint=_CONTRADICTION)
    groups = k // group
    _require(raw, f"{prefix}.qweight", (k, n // 8), "I32")
    _require(raw, f"{prefix}.scales", (groups, n), *_FLOATS)
    has_zeros = raw.holds(f"{prefix}.qzeros")
    if has_zeros:
        _require(raw, f"{prefix}.qzeros", (groups, n // 8), "I32")
    order = torch.argsort(torch.tensor(AWQ_ORDER))

    def unpacked(name: str) -> torch.Tensor:
        return unpack_words(raw.stored(f"{prefix}.{name}"), 4)[..., order].flatten(1).T.contiguous()

    def parts() -> CodedParts:
        return CodedParts(
            scales=raw.stored(f"{prefix}.scales").T.contiguous(),
            zeros=unpacked("qzeros") if has_zeros else None,
            group=group,
        )

    return CodedMatrix(prefix, shape, 4, "awq-4", lambda: unpacked("qweight"), parts, _all_bytes(raw, prefix))


def _gptq(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """qweight [k * bits / 32, n] along the inputs, qzeros [G, n * bits / 32] along the outputs, scales [G, n], g_idx [k]."""
    (n, k), bits = shape, how.bits or 4
    group = k if how.group is None else how.group
    groups, per_word = -(-k // group), 32 // bits
    if n % per_word or k % per_word:
        raise LoadError(
            f"{prefix} is {n} by {k}; words of 32 bits hold {per_word} codes, which must divide both",
            hint=_CONTRADICTION,
        )
    _require(raw, f"{prefix}.qweight", (k // per_word, n), "I32")
    _require(raw, f"{prefix}.qzeros", (groups, n // per_word), "I32")
    _require(raw, f"{prefix}.scales", (groups, n), *_FLOATS)
    if raw.holds(f"{prefix}.g_idx"):
        _require(raw, f"{prefix}.g_idx", (k,), "I32", "I64")

    def codes() -> torch.Tensor:
        return unpack_words(raw.stored(f"{prefix}.qweight"), bits).permute(1, 0, 2).reshape(n, k)

    def parts() -> CodedParts:
        zeros = unpack_words(raw.stored(f"{prefix}.qzeros"), bits).flatten(1).T.to(torch.int32) + how.zero_added
        index = _index(raw, f"{prefix}.g_idx", group, groups)
        return CodedParts(
            scales=raw.stored(f"{prefix}.scales").T.contiguous(), zeros=zeros.contiguous(), group=group, index=index
        )

    return CodedMatrix(prefix, shape, bits, f"gptq-{bits}", codes, parts, _all_bytes(raw, prefix))


def _packed(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> CodedMatrix:
    """weight_packed [n, k * bits / 32], weight_scale [n, G], weight_zero_point [n * bits / 32, G]; 2^(bits-1) was added."""
    n, k = shape
    found, dtype = raw.header(f"{prefix}.weight_packed")
    bits = next((bits for bits in (4, 8) if found == (n, -(-k * bits // 32))), None)
    if bits is None or dtype != "I32":
        raise LoadError(
            f"tensor {prefix}.weight_packed is {dtype} {list(found)}; {n} by {k} codes of 4 or 8 bits are expected",
            hint=_CONTRADICTION,
        )
    scales, group = _row_scales(raw, prefix, shape)
    zero_name, per_word = f"{prefix}.weight_zero_point", 32 // bits
    has_zeros = raw.holds(zero_name)
    if has_zeros:
        _require(raw, zero_name, (-(-n // per_word), k // group), "I32")

    def codes() -> torch.Tensor:
        return unpack_words(raw.stored(f"{prefix}.weight_packed"), bits).flatten(1)[:, :k]

    def parts() -> CodedParts:
        zeros = (
            unpack_words(raw.stored(zero_name), bits).permute(0, 2, 1).reshape(-1, k // group)[:n]
            if has_zeros
            else None
        )
        index = _index(raw, f"{prefix}.weight_g_idx", group, k // group)
        return CodedParts(scales=scales(), zeros=zeros, group=group, index=index)

    return CodedMatrix(prefix, shape, bits, f"pack-quantized-{bits}", codes, parts, _all_bytes(raw, prefix))


def _int8(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> CodedMatrix:
    """weight int8 [n, k], weight_scale [n, G] or one, weight_zero_point likewise."""
    _require(raw, f"{prefix}.weight", shape, "I8")
    scales, group = _row_scales(raw, prefix, shape)
    zero_name = f"{prefix}.weight_zero_point"

    def parts() -> CodedParts:
        zeros = None
        if raw.holds(zero_name):
            zeros = (raw.stored(zero_name).to(torch.int32) + 128).reshape(-1, shape[1] // group).expand(shape[0], -1)
        return CodedParts(scales=scales(), zeros=zeros, group=group)

    def codes() -> torch.Tensor:
        return raw.stored(f"{prefix}.weight").view(torch.uint8) ^ 128

    return CodedMatrix(prefix, shape, 8, "int-quantized-8", codes, parts, _all_bytes(raw, prefix), meets_int8_rows=True)


def _fp8(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> ScaledMatrix:
    """weight fp8 E4M3 [n, k] with weight_scale_inv or weight_scale (a factor, both): one, of rows, or of blocks."""
    n, k = shape
    _require(raw, f"{prefix}.weight", shape, "F8_E4M3")
    scale = next((name for name in (f"{prefix}.weight_scale_inv", f"{prefix}.weight_scale") if raw.holds(name)), None)
    if scale is None:
        raise LoadError(f"{prefix}.weight is fp8 and has no scale beside it", hint="the checkpoint is incomplete")
    found = raw.header(scale)[0]
    rows, inputs = how.block or (128, 128)
    if found in ((), (1,), (1, 1)):
        return ScaledMatrix(f"{prefix}.weight", raw, scale, (n, k), "fp8-tensor")
    if found in ((n,), (n, 1)):
        return ScaledMatrix(f"{prefix}.weight", raw, scale, (1, k), "fp8-channel")
    _require(raw, scale, (-(-n // rows), -(-k // inputs)), *_FLOATS)
    return ScaledMatrix(f"{prefix}.weight", raw, scale, (rows, inputs), f"fp8-{rows}x{inputs}")


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [a, b] -> uint8 [a, b, 32 / bits], the lowest bits first."""
    stored = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return stored if bits == 8 else torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


_FLOATS = ("F16", "BF16", "F32")
_CONTRADICTION = "config.json contradicts the weights; they must come from the same model"
_SUFFIXES = (
    "qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "weight_scale_inv", "input_scale", "input_zero_point",
)  # fmt: skip


def companions(raw: RawTensors, prefix: str) -> list[str]:
    """All tensors of the file that belong to the matrix."""
    return [name for name in (f"{prefix}.{suffix}" for suffix in _SUFFIXES) if raw.holds(name)]


def _row_scales(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> tuple[Callable[[], torch.Tensor], int]:
    """(weight_scale [n, G] when asked, inputs that share one). compressed-tensors: G of a row, or one for all."""
    n, k = shape
    name = f"{prefix}.weight_scale"
    if not raw.holds(name):
        raise LoadError(f"tensor {name} is missing beside {prefix}'s codes", hint="the checkpoint is incomplete")
    found = raw.header(name)[0]
    groups = found[1] if len(found) == 2 else 1
    if found not in ((), (1,), (n,), (n, groups)) or groups < 1 or k % groups != 0:
        raise LoadError(
            f"tensor {name} has shape {list(found)}; {n} rows of {k} inputs in equal groups are expected",
            hint=_CONTRADICTION,
        )
    _require(raw, name, found, *_FLOATS)
    return lambda: raw.stored(name).reshape(-1, groups).expand(n, groups).contiguous(), k // groups


def _index(raw: RawTensors, name: str, group: int, groups: int) -> torch.Tensor | None:
    """The group of each input; None where they lie in order. LoadError for one that is not there."""
    if not raw.holds(name):
        return None
    index = raw.stored(name).to(torch.int64)
    if bool((index == torch.arange(len(index)) // group).all()) or bool((index == -1).all()):
        return None
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise LoadError(
            f"tensor {name} names groups from {low} to {high}; 0 to {groups - 1} are there",
            hint="the checkpoint is damaged; download it again",
        )
    return index


def _require(raw: RawTensors, name: str, shape: tuple[int, ...], *dtypes: str) -> None:
    if not raw.holds(name):
        raise LoadError(
            f"tensor {name} is missing; shape {list(shape)} is expected", hint="the checkpoint is incomplete"
        )
    found, dtype = raw.header(name)
    if found != shape or dtype not in dtypes:
        raise LoadError(
            f"tensor {name} is {dtype} {list(found)}; {' or '.join(dtypes)} {list(shape)} is expected by config.json and its "
            "quantization_config",
            hint=_CONTRADICTION,
        )


_ITEM_BITS = {"I32": 32, "F32": 32, "I64": 64, "F16": 16, "BF16": 16, "I8": 8, "U8": 8, "F8_E4M3": 8}


def _nbytes(raw: RawTensors, name: str) -> int:
    shape, dtype = raw.header(name)
    count = 1
    for size in shape:
        count *= size
    return count * _ITEM_BITS.get(dtype, 8) // 8


def _all_bytes(raw: RawTensors, prefix: str) -> int:
    return sum(_nbytes(raw, name) for name in companions(raw, prefix))
