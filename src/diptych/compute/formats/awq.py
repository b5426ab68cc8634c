"""AWQ's four layouts of codes of 4 bits, and by other names Quark's, which is the first, and AutoGPTQ's `marlin`, the last.

`gemm`: words along the outputs, with zero points. `gemv`: words along the inputs. `gemv_fast`: words of 16 bits in the order of
a kernel, with what code 0 stands for in place of zero points. `marlin`: words of 16 inputs by 64 outputs as a GPU's tensor
cores take them, around code 8. Sources: AutoAWQ 0.2.9 (`awq/modules/linear/gemm.py`, `gemv.py`, `gemv_fast.py`, `marlin.py`),
AutoGPTQ 0.7 (`nn_modules/qlinear/qlinear_marlin.py`), Quark 0.6 to 0.13 (`torch/utils/pack.py`).

Legend: n outputs, k inputs, G scales of a row.
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, RawTensors
from diptych.compute.formats.tensors import (
    CONTRADICTION,
    FLOATS,
    all_bytes,
    require,
    require_groups,
    unpack_words,
)
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation

# AutoAWQ packs column 8 c + AWQ_ORDER[i] of eight into nibble i of a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_NAMES, _QUARK_NAMES = ("qweight", "scales", "qzeros"), ("weight", "weight_scale", "weight_zero_point")
_GPTQ_NAMES = ("B", "s")
PER_WORD = 8
MARLIN_ROWS, MARLIN_INPUTS = 64, 16  # that share a tile of `marlin`
FAST_ROWS, FAST_INPUTS = 4, 64  # that share the words of `gemv_fast`


def open_awq(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """The matrix under `prefix`, checked against the shape that the config gives."""
    n, k = shape
    group = k if how.group is None else how.group
    require_groups(prefix, k, group)
    if how.layout == "gemv":
        return _gemv(raw, prefix, shape, group)
    if how.layout == "gemv_fast":
        return _gemv_fast(raw, prefix, shape, group)
    if how.layout == "marlin":
        return _marlin(raw, prefix, shape, group, how.method)
    if n % PER_WORD:
        raise LoadError(f"{prefix} has {n} outputs, of which words of 32 bits hold 8 each", hint=CONTRADICTION)
    return _gemm(raw, prefix, shape, group, how)


def places_in_word(how: Quantisation) -> torch.Tensor:
    """Which nibble of a word each of its eight codes is."""
    return torch.arange(PER_WORD) if how.is_ordered else torch.argsort(torch.tensor(AWQ_ORDER))


def _gemm(raw: RawTensors, prefix: str, shape: tuple[int, int], group: int, how: Quantisation) -> CodedMatrix:
    """qweight [k, n / 8], qzeros [G, n / 8], scales [G, n]; nibbles of a word in AWQ_ORDER.

    Quark's: weight, weight_zero_point and weight_scale (in its mode "awq" AutoAWQ's names), in that order or in none, signed or
    not.
    """
    n, k = shape
    groups, names = k // group, _QUARK_NAMES if how.method == "quark" else _AWQ_NAMES
    weight, scales, zeros = (f"{prefix}.{name}" for name in names)
    require(raw, weight, (k, n // PER_WORD), "I32")
    require(raw, scales, (groups, n), *FLOATS)
    has_zeros = how.has_zeros or raw.holds(zeros)
    if has_zeros:
        require(raw, zeros, (groups, n // PER_WORD), "I32")
    order = places_in_word(how)
    middle = 8 if how.is_signed else 0  # both codes and zero points have two's complement

    def unpacked(name: str) -> torch.Tensor:
        return (unpack_words(raw.stored(name), 4)[..., order].flatten(1).T ^ middle).contiguous()

    def parts() -> CodedParts:
        return CodedParts(
            scales=raw.stored(scales).T.contiguous(), zeros=unpacked(zeros) if has_zeros else None, group=group
        )

    label = "quark-4" if how.method == "quark" else "awq-4"
    return CodedMatrix(prefix, shape, 4, label, lambda: unpacked(weight), parts, all_bytes(raw, prefix))


def _gemv(raw: RawTensors, prefix: str, shape: tuple[int, int], group: int) -> CodedMatrix:
    """qweight [n, k / 8], qzeros [n, W], scales [n, 8 W], of which the first G are meant."""
    n, k = shape
    weight, scales, zeros = (f"{prefix}.{name}" for name in _AWQ_NAMES)
    if k % PER_WORD:
        raise LoadError(f"{prefix} has {k} inputs, of which words of 32 bits hold 8 each", hint=CONTRADICTION)
    words, groups = _zero_words(k, group), k // group
    require(raw, weight, (n, k // PER_WORD), "I32")
    require(raw, scales, (n, PER_WORD * words), *FLOATS)
    require(raw, zeros, (n, words), "I32")

    def parts() -> CodedParts:
        of_groups = unpack_words(raw.stored(zeros), 4).flatten(1)[:, :groups].contiguous()
        return CodedParts(scales=raw.stored(scales)[:, :groups].contiguous(), zeros=of_groups, group=group)

    def codes() -> torch.Tensor:
        return unpack_words(raw.stored(weight), 4).flatten(1)

    return CodedMatrix(prefix, shape, 4, "awq-gemv-4", codes, parts, all_bytes(raw, prefix))


def _gemv_fast(raw: RawTensors, prefix: str, shape: tuple[int, int], group: int) -> CodedMatrix:
    """qweight int16 [n / 4, k], scales and qzeros [8 W, n], of which the first G are meant; value = scale * code + qzeros."""
    n, k = shape
    weight, scales, minima = (f"{prefix}.{name}" for name in _AWQ_NAMES)
    _require_tiles(prefix, shape, "gemv_fast", FAST_ROWS, FAST_INPUTS)
    rows, groups = PER_WORD * _zero_words(k, group), k // group
    require(raw, weight, (n // FAST_ROWS, k), "I16")
    for name in (scales, minima):
        require(raw, name, (rows, n), *FLOATS)

    def parts() -> CodedParts:
        each, least = (raw.stored(name)[:groups].T.contiguous() for name in (scales, minima))
        return CodedParts(scales=each, zeros=None, group=group, minima=least)

    def codes() -> torch.Tensor:
        # four rows by 64 inputs lie one row after another, four codes to a word
        blocks = unpack_words(raw.stored(weight), 4).view(n // FAST_ROWS, k // FAST_INPUTS, FAST_ROWS, FAST_INPUTS)
        # of 32 inputs in a row: pairs b of eights a, their evens before their odds
        by_part = blocks.transpose(1, 2).reshape(n, k // 32, 4, 2, 4)  # b, place in a pair, a
        return by_part.permute(0, 1, 4, 2, 3).reshape(n, k)

    return CodedMatrix(prefix, shape, 4, "awq-gemv-fast-4", codes, parts, all_bytes(raw, prefix))


def _require_tiles(prefix: str, shape: tuple[int, int], layout: str, rows: int, inputs: int) -> None:
    n, k = shape
    if n % rows or k % inputs:
        raise LoadError(
            f"{prefix} is {n} by {k}; in the layout {layout} {rows} rows and {inputs} inputs share their words",
            hint=CONTRADICTION,
        )


def _marlin(raw: RawTensors, prefix: str, shape: tuple[int, int], group: int, method: str) -> CodedMatrix:
    """qweight [k / 16, 2 n], scales [G, n]; of AutoGPTQ B and s."""
    n, k = shape
    weight, scales = (f"{prefix}.{name}" for name in (_GPTQ_NAMES if method == "gptq" else _AWQ_NAMES[:2]))
    _require_tiles(prefix, shape, "marlin", MARLIN_ROWS, MARLIN_INPUTS)
    require(raw, weight, (k // MARLIN_INPUTS, 2 * n), "I32")
    require(raw, scales, (k // group, n), *FLOATS)

    def parts() -> CodedParts:
        stored = raw.stored(scales)
        # runs of 64 rows lie by their place in 8; where a row has one scale, runs of 32 by pairs of a place in 8
        of_rows = stored.view(n // 32, 4, 4, 2).transpose(1, 2) if group == k else stored.view(-1, 8, 8).transpose(1, 2)
        return CodedParts(scales=of_rows.reshape(k // group, n).T.contiguous(), zeros=None, group=group)

    def codes() -> torch.Tensor:
        # [16 inputs, 64 rows, row in 8, pair of inputs in 8, 16 of the rows, input in a pair, 8 of these rows, 8 of the inputs]
        tiles = unpack_words(raw.stored(weight), 4).view(k // MARLIN_INPUTS, n // MARLIN_ROWS, 8, 4, 4, 2, 2, 2)
        return tiles.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(n, k)

    return CodedMatrix(prefix, shape, 4, f"{method}-marlin-4", codes, parts, all_bytes(raw, prefix))


def _zero_words(k: int, group: int) -> int:
    """Words of zero points in a row: of groups below 128 so many more that they end with 1024 inputs."""
    multiple = {64: 2, 32: 4}.get(group, 1)
    return multiple * -(-(k // group) // (PER_WORD * multiple))
