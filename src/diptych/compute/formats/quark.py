"""What of Quark's tensors is its own: names of the modules that made them, whole numbers of 4 bits by row.

Source: amd-quark 0.13 (`torch/utils/pack.py`, `torch/export/constants.py`, `torch/export/nn/modules/realquantizer.py`).

Legend: n outputs, k inputs.
"""

from __future__ import annotations

from functools import partial

import torch

from diptych.compute.formats.awq import PER_WORD, open_awq, places_in_word
from diptych.compute.formats.matrices import CodedMatrix, CodedParts, RawTensors
from diptych.compute.formats.tensors import FLOATS, Made, Overlaid, all_bytes, require, unpack_words
from diptych.models.quantised.fields import Quantisation

QUANTISERS = {
    f"weight_quantizer.{level}{one}": f"weight_{one}{'_2' if level == '1.' else ''}"
    for level in ("", "0.", "1.")
    for one in ("scale", "zero_point")
}


def with_quantisers(raw: RawTensors, prefix: str) -> RawTensors:
    """Quark's tensors by the names of `weight_scale` where they have those of the modules that made them.

    As its versions 0.11 and later write them for some models: `weight_quantizer.scale`, and of two types
    `weight_quantizer.0.scale` and `.1.scale`. Source: amd-quark 0.13, `torch/export/constants.py`.
    """
    made: dict[str, Made | None] = {}
    for theirs, ours in QUANTISERS.items():
        name = f"{prefix}.{theirs}"
        if raw.holds(name) and not raw.holds(f"{prefix}.{ours}"):
            made |= {f"{prefix}.{ours}": Made(*raw.header(name), partial(raw.stored, name)), name: None}
    return Overlaid(raw, made) if made else raw


def open_words(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> CodedMatrix:
    """Of groups as AutoAWQ's `gemm` has them. Of rows weight [n, k / 8], along the inputs, weight_scale [n] and
    weight_zero_point [n / 8], in the same order within a word; the last word of either is filled up.
    """
    if how.group is not None:
        return open_awq(raw, prefix, shape, how)
    (n, k), order = shape, places_in_word(how)
    weight, scales, zeros = (f"{prefix}.weight{one}" for one in ("", "_scale", "_zero_point"))
    require(raw, weight, (n, -(-k // PER_WORD)), "I32")
    require(raw, scales, (n,), *FLOATS)
    has_zeros = raw.holds(zeros)
    if has_zeros:
        require(raw, zeros, (-(-n // PER_WORD),), "I32")
    middle = 8 if how.is_signed else 0  # both codes and zero points have two's complement

    def unpacked(words: torch.Tensor, n_values: int) -> torch.Tensor:
        return unpack_words(words, 4)[..., order].flatten(1)[:, :n_values] ^ middle

    def parts() -> CodedParts:
        of_rows = unpacked(raw.stored(zeros)[None], n).view(n, 1) if has_zeros else None
        return CodedParts(scales=raw.stored(scales).view(n, 1), zeros=of_rows, group=k)

    def codes() -> torch.Tensor:
        return unpacked(raw.stored(weight), k)

    return CodedMatrix(prefix, shape, 4, "quark-4", codes, parts, all_bytes(raw, prefix))
