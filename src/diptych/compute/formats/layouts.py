"""How other programs lay out a quantised matrix in safetensors: GPTQ, compressed-tensors, fp8, modelopt, MLX, BitNet, Gemma;
and which file beside this one knows it for the others.

Each layout gives the numbers as its file has them: integer codes with scales and zero points (`CodedMatrix`), which the kernels
keep, or fp8 values with scales, which become floats. Sources of the layouts: GPTQModel `nn_modules/qlinear`,
compressed-tensors `compressors`, transformers `integrations/finegrained_fp8.py` and `gemma_quant.py`,
modelopt `torch/export/quant_utils.py`, MLX `backend/cpu/quantized.cpp`.

Legend: n outputs, k inputs, G scales of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from diptych.compute.formats import ternary
from diptych.compute.formats.awq import open_awq
from diptych.compute.formats.bitsandbytes import open_bitsandbytes
from diptych.compute.formats.books import open_books
from diptych.compute.formats.exl3 import open_exl3
from diptych.compute.formats.four_over_six import open_four_over_six
from diptych.compute.formats.fp6 import open_fp6
from diptych.compute.formats.fp_quant import open_fp_quant
from diptych.compute.formats.hqq import open_hqq
from diptych.compute.formats.matrices import (
    CodedMatrix,
    CodedParts,
    Fp4Matrix,
    Matrix,
    RawTensors,
    ScaledMatrix,
)
from diptych.compute.formats.quanto import open_quanto
from diptych.compute.formats.quark import open_words, with_quantisers
from diptych.compute.formats.sinq import open_sinq
from diptych.compute.formats.sparse import SparseFloats, open_marlin, with_zeros
from diptych.compute.formats.stacks import Fp8Entry
from diptych.compute.formats.tensors import (
    CONTRADICTION,
    FLOATS,
    PLANES,
    all_bytes,
    nbytes_of,
    require,
    require_groups,
    unpack_planes,
    unpack_words,
)
from diptych.compute.formats.ternary import TernaryMatrix
from diptych.compute.formats.torchao import in_rows, open_integers, with_inputs_scaled
from diptych.compute.formats.vectors import open_vectors
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation
from diptych.models.quantised.method import BESIDE_STACKS, METAL, MLX

MLX_BITS = (2, 3, 4, 5, 6, 8)


def open_matrix(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Matrix | None:
    """The quantised matrix under `prefix`, checked against the shape that the config gives; None where there is none."""
    if how.method == "compressed-tensors" and raw.holds(f"{prefix}.compressed"):
        return _sparse(raw, prefix, shape, how)
    if how.method == "awq" and raw.holds(f"{prefix}.qweight"):
        return open_awq(raw, prefix, shape, how)
    if how.method == "gptq" and how.layout == "marlin":
        return open_awq(raw, prefix, shape, how) if raw.holds(f"{prefix}.B") else None
    if how.method == "gptq" and raw.holds(f"{prefix}.qweight"):
        return _gptq(raw, prefix, shape, how)
    if how.method == "bitnet":
        return _bitnet(raw, prefix, shape, how)
    if how.method == "hqq":
        return open_hqq(raw, prefix, shape, all_bytes(raw, prefix))
    if how.method == "torchao":
        is_coded = raw.holds(f"{prefix}._weight_qdata")
        return with_inputs_scaled(raw, prefix, shape, _torchao(raw, prefix, shape, how)) if is_coded else None
    if how.method == "aqlm":
        return open_books(raw, prefix, shape)
    if how.method == "sinq":
        return open_sinq(raw, prefix, shape, how)
    if how.method == "fouroversix":
        return open_four_over_six(raw, prefix, shape, how)
    if how.method == "fp_quant":
        return open_fp_quant(raw, prefix, shape, how)
    if how.method == "exl3":
        return open_exl3(raw, prefix, shape)
    if how.method == "vptq":
        return open_vectors(raw, prefix, shape, how)
    if how.method == "quanto":
        return open_quanto(raw, prefix, shape)
    if how.method == "gemma":
        return _gemma(raw, prefix, shape)
    if raw.holds(f"{prefix}.weight_packed"):
        return _words(raw, prefix, shape, how)
    weight = f"{prefix}.weight"
    if not raw.holds(weight):
        return None
    if how.method == "bitsandbytes":
        return open_bitsandbytes(raw, prefix, shape)
    dtype = raw.header(weight)[1]
    if how.method in (MLX, METAL):
        offsets = f"{prefix}.{'biases' if how.method == MLX else 'qbiases'}"
        return _mlx(raw, prefix, shape, offsets) if raw.holds(f"{prefix}.scales") else None
    if how.method == "quark":
        raw = with_quantisers(raw, prefix)
    if how.method == "quark" and dtype == "U8" and raw.header(weight)[0] == (shape[0], 3 * shape[1] // 4):
        return open_fp6(raw, prefix, shape, weight, is_e3m2=how.layout == "fp6_e3m2")
    if how.method in ("modelopt", "quark") and dtype == "U8":
        return _fp4(raw, prefix, shape, how)
    if how.method == "quark" and dtype == "I32":
        return open_words(raw, prefix, shape, how)
    if dtype == "F8_E4M3":
        return _fp8(raw, weight, shape, how)
    if how.method == "fp8" and dtype == "I8":
        return _fp4(raw, prefix, shape, how)
    if dtype == "I8":
        return _int8(raw, prefix, shape, how)
    return None


def open_stacked(raw: RawTensors, name: str, index: int, shape: tuple[int, int], how: Quantisation) -> ScaledMatrix:
    """One of the experts that lie in one tensor of fp8."""
    return _fp8(Fp8Entry(raw, name, index, None if how.block is None else how.block[0]), name, shape, how)


def _gptq(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """qweight [k * bits / 32, n] along the inputs, qzeros [G, n * bits / 32] along the outputs, scales [G, n], g_idx [k]."""
    (n, k), qweight, scales = shape, f"{prefix}.qweight", f"{prefix}.scales"
    words, groups = (
        raw.header(name)[0][0] if raw.holds(name) and raw.header(name)[0] else 0 for name in (qweight, scales)
    )
    scheme = how.scheme_of(prefix, words, groups, k)
    bits, group = scheme.bits, k if scheme.group is None else scheme.group
    has_planes = how.layout == "planes"
    groups, run = -(-k // group), 32 if has_planes and len(PLANES[bits]) > 1 else 32 // math.gcd(32, bits)
    if n % run or k % run:
        raise LoadError(
            f"{prefix} is {n} by {k}; whole words of 32 bits hold {run} codes, which must divide both",
            hint=CONTRADICTION,
        )
    require(raw, qweight, (k * bits // 32, n), "I32")
    require(raw, f"{prefix}.qzeros", (groups, n * bits // 32), "I32")
    require(raw, scales, (groups, n), *FLOATS)
    if how.has_order or raw.holds(f"{prefix}.g_idx"):
        require(raw, f"{prefix}.g_idx", (k,), "I32", "I64")
    held = 8 if bits == 7 else bits  # of 7 bits there is no kernel, and 64 more on both sides is the same number
    added = (1 << held - 1) - (1 << bits - 1)

    def codes() -> torch.Tensor:
        words = raw.stored(qweight).T
        return (unpack_planes(words, bits) if has_planes else unpack_words(words, bits).flatten(1)) + added

    def parts() -> CodedParts:
        stored = raw.stored(f"{prefix}.qzeros")
        points = unpack_planes(stored, bits) if has_planes else _zero_points(stored, bits, how.zero_added)
        zeros = points.T.to(torch.int32) + added
        index = _index(raw, f"{prefix}.g_idx", group, groups)
        return CodedParts(scales=raw.stored(scales).T.contiguous(), zeros=zeros.contiguous(), group=group, index=index)

    return CodedMatrix(prefix, shape, held, f"gptq-{bits}", codes, parts, all_bytes(raw, prefix))


def _zero_points(stored: torch.Tensor, bits: int, one: int) -> torch.Tensor:
    """uint8 [G, n]. one: what the first layout took off them before they were stored, 1 or 0.

    Off a whole word at a time, so that a 0 borrowed of what lies behind it, to which the carry gives it back; of 3 bits, which
    run over words, off each by itself.
    """
    if 8 % bits:
        return (unpack_words(stored, bits).flatten(1) + one) & (1 << bits) - 1
    return unpack_words(stored + sum(one << shift for shift in range(0, 32, bits)), bits).flatten(1)


def _mlx(raw: RawTensors, prefix: str, shape: tuple[int, int], offsets: str) -> Matrix:
    """weight u32 [n, k * bits / 32], scales and offsets (what code 0 stands for) [n, G]; bits and groups follow from those.

    In its modes MXFP4, NVFP4 and MXFP8 scales u8 alone, exponents of 32 inputs or E4M3 of 16, and 4 or 8 bits of a float.
    """
    n, k = shape
    weight, scales = f"{prefix}.weight", f"{prefix}.scales"
    for name in (weight, scales):
        if len(raw.header(name)[0]) != 2:
            require(raw, name, shape)
    if raw.header(scales)[1] == "U8":
        return _mlx_floats(raw, prefix, shape)
    (found, dtype), groups = raw.header(weight), raw.header(scales)[0][-1]
    words = found[-1]
    bits = next((bits for bits in MLX_BITS if words * 32 == k * bits), None)
    if bits is None or k % 32 or not groups or k % groups:
        raise LoadError(
            f"tensor {weight} is {dtype} {list(found)} with {groups} scales a row; {n} by {k} codes of {MLX_BITS[0]} to "
            f"{MLX_BITS[-1]} bits in equal groups are expected",
            hint=CONTRADICTION,
        )
    require(raw, weight, (n, words), "U32")
    for name in (scales, offsets):
        require(raw, name, (n, groups), *FLOATS)

    def codes() -> torch.Tensor:
        return unpack_words(raw.stored(weight).view(torch.int32), bits).flatten(1)

    def parts() -> CodedParts:
        least = raw.stored(offsets)
        return CodedParts(scales=raw.stored(scales), zeros=None, group=k // groups, minima=least)

    return CodedMatrix(prefix, shape, bits, f"mlx-{bits}", codes, parts, all_bytes(raw, prefix))


def _mlx_floats(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> Fp4Matrix | ScaledMatrix:
    """Codes of 4 bits in words of eight, of 8 bits in words of four."""
    n, k = shape
    weight, scales, nbytes = f"{prefix}.weight", f"{prefix}.scales", all_bytes(raw, prefix)
    group = 16 if raw.header(scales)[0] == (n, k // 16) and k >= 16 else 32
    bits = 8 if group == 32 and raw.header(weight)[0] == (n, k // 4) else 4
    require_groups(prefix, k, group)
    require(raw, weight, (n, k * bits // 32), "U32")
    require(raw, scales, (n, k // group), "U8")
    if bits == 8:
        return ScaledMatrix(weight, raw, scales, (1, group), "mxfp8", nbytes)
    return Fp4Matrix(prefix, raw, weight, scales, None, divides=False, stored_bytes=nbytes, group=group)


def _sparse(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Matrix:
    """compressed and bitmask in place of weight, whatever that is."""
    dense, nbytes = with_zeros(raw, prefix, shape), all_bytes(raw, prefix)
    matrix = open_matrix(dense, prefix, shape, how) or SparseFloats(dense, f"{prefix}.weight", nbytes)
    matrix.stored_bytes = nbytes
    return matrix


def _words(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Matrix:
    """weight_packed: of floats in bytes, of whole numbers in words, with their places where only some are there."""
    if raw.holds(f"{prefix}.scale_packed"):
        return open_marlin(raw, prefix, shape)
    found, dtype = raw.header(f"{prefix}.weight_packed")
    if dtype != "U8":
        return _packed(raw, prefix, shape, how)
    if found == (shape[0], 3 * shape[1] // 4):
        return open_fp6(raw, prefix, shape, f"{prefix}.weight_packed")
    return _fp4(raw, prefix, shape, how)


def _packed(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """weight_packed [n, k * bits / 32], weight_scale [n, G], weight_zero_point [n * bits / 32, G]; 2^(bits-1) was added."""
    n, k = shape
    found, dtype = raw.header(f"{prefix}.weight_packed")
    bits = next((bits for bits in (4, 8) if found == (n, -(-k * bits // 32))), None)
    if bits is None or dtype != "I32":
        raise LoadError(
            f"tensor {prefix}.weight_packed is {dtype} {list(found)}; {n} by {k} codes of 4 or 8 bits are expected",
            hint=CONTRADICTION,
        )
    scales, group = _row_scales(raw, prefix, shape, how)
    zero_name, per_word, order = f"{prefix}.weight_zero_point", 32 // bits, f"{prefix}.weight_g_idx"
    has_zeros = how.has_zeros or raw.holds(zero_name)
    if has_zeros:
        require(raw, zero_name, (-(-n // per_word), k // group), "I32")
    if raw.holds(order):
        require(raw, order, (k,), "I32", "I64")

    def codes() -> torch.Tensor:
        return unpack_words(raw.stored(f"{prefix}.weight_packed"), bits).flatten(1)[:, :k]

    def parts() -> CodedParts:
        zeros = (
            unpack_words(raw.stored(zero_name), bits).permute(0, 2, 1).reshape(-1, k // group)[:n]
            if has_zeros
            else None
        )
        index = _index(raw, order, group, k // group)
        return CodedParts(scales=scales(), zeros=zeros, group=group, index=index)

    return CodedMatrix(prefix, shape, bits, f"pack-quantized-{bits}", codes, parts, all_bytes(raw, prefix))


def _int8(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """weight int8 [n, k], weight_scale [n, G] or one, weight_zero_point likewise."""
    require(raw, f"{prefix}.weight", shape, "I8")
    scales, group = _row_scales(raw, prefix, shape, how)
    zero_name = f"{prefix}.weight_zero_point"
    has_zeros = how.has_zeros or raw.holds(zero_name)
    if has_zeros:
        require(raw, zero_name, raw.header(f"{prefix}.weight_scale")[0], "I8", "I32")

    def parts() -> CodedParts:
        zeros = None
        if has_zeros:
            zeros = (raw.stored(zero_name).to(torch.int32) + 128).reshape(-1, shape[1] // group).expand(shape[0], -1)
        return CodedParts(scales=scales(), zeros=zeros, group=group)

    def codes() -> torch.Tensor:
        return raw.stored(f"{prefix}.weight").view(torch.uint8) ^ 128

    meets = how.meets_int8_rows or how.method != "quark"
    return CodedMatrix(prefix, shape, 8, "int-quantized-8", codes, parts, all_bytes(raw, prefix), meets_int8_rows=meets)


def _fp4(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Fp4Matrix:
    """weight_packed, or modelopt's and Quark's weight, u8 [n, k / 2], the lower nibble first.

    NVFP4: weight_scale E4M3 [n, k / 16] and one of all: weight_global_scale, which divides, or modelopt's and Quark's
    weight_scale_2, which multiplies. MXFP4: weight_scale u8 [n, k / 32], exponents; of DeepSeek V4's experts scale, and weight
    is i8.
    """
    n, k = shape
    codes, scale = (
        f"{prefix}.weight" if how.method in ("modelopt", "quark", "fp8") else f"{prefix}.weight_packed",
        f"{prefix}.scale" if how.method == "fp8" else f"{prefix}.weight_scale",
    )
    found = raw.header(scale)[1] if raw.holds(scale) else "F8_E4M3"
    group = 32 if found in ("U8", "F8_E8M0") else 16
    require_groups(prefix, k, group)
    require(raw, codes, (n, k // 2), "I8" if how.method == "fp8" else "U8")
    require(raw, scale, (n, k // group), *(("F8_E4M3",) if group == 16 else ("U8", "F8_E8M0")))
    whole = None
    if group == 16:
        is_factor = how.method in ("modelopt", "quark")
        whole = f"{prefix}.weight_scale_2" if is_factor else f"{prefix}.weight_global_scale"
        found_whole = raw.header(whole)[0] if raw.holds(whole) else (1,)
        require(raw, whole, () if found_whole == () else (1,), "F32")
    divides = how.method not in ("modelopt", "quark")
    nbytes = all_bytes(raw, prefix)
    return Fp4Matrix(prefix, raw, codes, scale, whole, divides=divides, stored_bytes=nbytes, group=group)


def _torchao(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> Matrix:
    """_weight_qdata, fp8 or int8, [n, k], and _weight_scale [n, G], or of fp8 one, or of blocks; of 4 bits two to a byte."""
    codes, scale, whole = (f"{prefix}._weight_{one}" for one in ("qdata", "scale", "per_tensor_scale"))
    dtype, nbytes = raw.header(codes)[1], all_bytes(raw, prefix)
    if dtype == "F8_E4M3":
        return _fp8(in_rows(raw, scale, shape), codes, shape, how, scales=(scale,))
    if dtype != "U8":
        return open_integers(raw, prefix, shape, how, nbytes)
    n, k = shape
    group = 32 if raw.holds(scale) and raw.header(scale)[1] == "F8_E8M0" else 16
    require_groups(prefix, k, group)
    raw = in_rows(raw, scale, shape)
    require(raw, codes, (n, k // 2), "U8")
    require(raw, scale, (n, k // group), "F8_E4M3" if group == 16 else "F8_E8M0")
    if raw.holds(whole):
        require(raw, whole, (), "F32")
    factor = whole if raw.holds(whole) else None
    return Fp4Matrix(prefix, raw, codes, scale, factor, divides=False, stored_bytes=nbytes, group=group)


def _fp8(
    raw: RawTensors, weight: str, shape: tuple[int, int], how: Quantisation, *, scales: tuple[str, ...] = ()
) -> ScaledMatrix:
    """weight fp8 E4M3 [n, k] with weight_scale_inv or weight_scale (a factor, both): one, of rows, of blocks, of 32 inputs.

    Of the last (MXFP8) u8, exponents. DeepSeek V4 calls it scale.
    """
    n, k = shape
    require(raw, weight, shape, "F8_E4M3")
    scale = next((one for one in scales or _scales_beside(weight) if raw.holds(one)), None)
    if scale is None:
        raise LoadError(f"{weight} is fp8 and has no scale beside it", hint="the checkpoint is incomplete")
    found, nbytes = raw.header(scale)[0], nbytes_of(raw, weight) + nbytes_of(raw, scale)
    stored = found
    if len(found) == 4 and found[1] == found[3] == 1:  # modelopt's, of blocks
        found = (found[0], found[2])
    rows, inputs = how.block or (128, 128)
    if raw.header(scale)[1] in ("U8", "F8_E8M0") and found == (n, k // 32) and k % 32 == 0:
        return ScaledMatrix(weight, raw, scale, (1, 32), "mxfp8", nbytes)
    require(raw, scale, stored, *FLOATS, "F8_E8M0")
    if found in ((), (1,)) or (found == (1, 1) and how.block is None):
        return ScaledMatrix(weight, raw, scale, None, "fp8-tensor", nbytes)
    if found in ((n,), (n, 1)):
        return ScaledMatrix(weight, raw, scale, None, "fp8-channel", nbytes)
    if found != (-(-n // rows), -(-k // inputs)):
        require(raw, scale, (-(-n // rows), -(-k // inputs)), *FLOATS, "F8_E8M0")
    return ScaledMatrix(weight, raw, scale, (rows, inputs), f"fp8-{rows}x{inputs}", nbytes)


def _scales_beside(weight: str) -> tuple[str, str, str]:
    return f"{weight}_scale_inv", f"{weight}_scale", f"{weight.removesuffix('.weight')}.scale"


def _gemma(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> CodedMatrix | None:
    """weight int8 [n, k], or u8 [n, k * bits / 8], the lowest bits first, and weight_scale [n, G]; 2^(bits-1) was added.

    Of embeddings embedding_quantized and embedding_scale.
    """
    is_table = raw.holds(f"{prefix}.embedding_quantized")
    codes_name, scale = (
        f"{prefix}.{one}"
        for one in (("embedding_quantized", "embedding_scale") if is_table else ("weight", "weight_scale"))
    )
    if not raw.holds(codes_name) or raw.header(codes_name)[1] in FLOATS:
        return None
    (n, k), (found, dtype) = shape, raw.header(codes_name)
    bits = next((bits for bits in (2, 4) if dtype == "U8" and found == (n, -(-k * bits // 8))), 8)
    if bits == 8:
        require(raw, codes_name, shape, "I8")
    groups = raw.header(scale)[0][-1] if raw.holds(scale) and len(raw.header(scale)[0]) == 2 else 1
    require(raw, scale, (n, groups), *FLOATS)
    if groups < 1 or k % groups:
        raise LoadError(f"tensor {scale} has {groups} scales a row, which {k} inputs are not", hint=CONTRADICTION)

    def codes() -> torch.Tensor:
        stored = raw.stored(codes_name).view(torch.uint8)
        if bits == 8:
            return stored ^ 128
        return torch.stack([stored >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(1)[:, :k]

    def parts() -> CodedParts:
        return CodedParts(scales=raw.stored(scale).contiguous(), zeros=None, group=k // groups)

    return CodedMatrix(prefix, shape, bits, f"gemma-{bits}", codes, parts, all_bytes(raw, prefix))


def _bitnet(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> TernaryMatrix | None:
    """weight u8 [n / 4, k], or floats [n, k], and weight_scale, one number; without that, plain floats, rounded or not."""
    weight, scale, (n, k) = f"{prefix}.weight", f"{prefix}.weight_scale", shape
    if not raw.holds(weight):
        return None
    dtype, nbytes = raw.header(weight)[1], all_bytes(raw, prefix)
    if how.is_online and not raw.holds(scale):
        if not how.rounds(prefix):
            return None
        require(raw, weight, shape, *FLOATS)
        return TernaryMatrix("bitnet-online", nbytes, _FLOAT_TYPES[dtype], ternary.rounded(raw, weight))
    if dtype != "U8" and not raw.holds(scale):
        return None
    found = raw.header(scale)[0] if raw.holds(scale) else (1,)
    require(raw, scale, () if found == () else (1,), *FLOATS)
    kind = torch.float32 if how.divides else _FLOAT_TYPES[raw.header(scale)[1]]
    if dtype != "U8":
        require(raw, weight, shape, *FLOATS)
        return TernaryMatrix("bitnet-unpacked", nbytes, kind, ternary.unpacked(raw, weight, scale, divides=how.divides))
    if n % ternary.PER_BYTE:
        raise LoadError(f"{prefix} has {n} outputs, of which bytes hold {ternary.PER_BYTE} each", hint=CONTRADICTION)
    require(raw, weight, (n // ternary.PER_BYTE, k), "U8")
    return TernaryMatrix("bitnet-packed", nbytes, kind, ternary.packed(raw, weight, scale, divides=how.divides))


_FLOAT_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def companions_of_stack(raw: RawTensors, name: str) -> list[str]:
    """All tensors of the file that belong to stacked experts."""
    return [name, *(one for one in (f"{name}{suffix}" for suffix in BESIDE_STACKS) if raw.holds(one))]


def _row_scales(
    raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation
) -> tuple[Callable[[], torch.Tensor], int]:
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
            hint=CONTRADICTION,
        )
    if groups > 1 and k // groups not in how.groups:
        named = " or ".join(map(str, how.groups)) or "whole rows"
        raise LoadError(
            f"tensor {name} has a scale for each {k // groups} of {k} inputs; quantization_config names {named}",
            hint=CONTRADICTION,
        )
    require(raw, name, found, *FLOATS)
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
