"""VPTQ's matrices: each run of outputs at an input is a vector of a codebook, and one of a second added to it.

`indices` i32 [runs, n / length, words] has the codes of a run of inputs, each with that of the second codebook above it, bit
after bit. Codebooks `centroids.weight` and `res_centroids.weight` [runs, size * length]. Inputs before those runs (outliers)
have `outlier_indices` i16 [1, n / length, outliers] and `outlier_centroids.weight`. `perm` i16 [k] says where an input lies;
`weight_scale` and `weight_bias` [k] are of inputs. Outputs are filled up to whole vectors.
Source: vptq 0.0.5 (`ops/quant_gemm.py`, `utils/pack.py`).
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import Dequantised, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, all_bytes, finite, require
from diptych.ground.errors import LoadError
from diptych.models.quantised.fields import Quantisation, Vectors

IN_16_BITS = ("I16", "U16", "F16")  # whole numbers without a sign, whatever they are called


class VectorMatrix(Dequantised):
    """value = (a vector's number + another's) * the input's scale + its shift, in fp32."""

    why = "no kernel has codebooks"

    def __init__(self, raw: RawTensors, prefix: str, how: Vectors) -> None:
        self._raw, self._prefix, self._how = raw, prefix, how
        self.label, self.stored_bytes = (
            f"vptq-{how.size}" + (f"-{how.rest}" if how.rest else ""),
            all_bytes(raw, prefix),
        )

    def values(self, rows: slice) -> torch.Tensor:
        """fp32. LoadError for a number that is not finite, or an order that is none."""
        raw, prefix, how = self._raw, self._prefix, self._how
        values = self._runs(rows)
        if how.outliers:
            codes = raw.stored(f"{prefix}.outlier_indices").view(torch.int16).to(torch.int64) & 0xFFFF
            last = int(codes.max())
            if last >= how.outlier_size:
                raise LoadError(f"{prefix}.outlier_indices has a code of {last}; {how.outlier_size} vectors are there",
                                hint=CONTRADICTION)  # fmt: skip
            books = self._books("outlier_centroids", how.outlier_length)
            values = torch.cat((self._chosen(books, codes, how.outlier_length, rows), values), 1)
        if how.has_order:
            order = raw.stored(f"{prefix}.perm").view(torch.int16).to(torch.int64) & 0xFFFF
            places = torch.argsort(order)
            if not bool((order[places] == torch.arange(len(order))).all()):
                raise LoadError(f"{prefix}.perm is no order of {len(order)} inputs", hint=CONTRADICTION)
            values = values[:, places]
        if how.has_norm:
            scale, shift = (finite(raw, f"{prefix}.weight_{one}").float() for one in ("scale", "bias"))
            values = values * scale + shift
        return values

    def _runs(self, rows: slice) -> torch.Tensor:
        how, (bits, more) = self._how, self._how.code_bits
        codes = _unpacked(self._raw.stored(f"{self._prefix}.indices"), bits + more, how.run)
        values = self._chosen(self._books("centroids", how.length), codes & how.size - 1, how.length, rows)
        if how.rest:
            values += self._chosen(self._books("res_centroids", how.length), codes >> bits, how.length, rows)
        return values

    def _books(self, name: str, length: int) -> torch.Tensor:
        """fp32 [runs, vectors, length]."""
        return finite(self._raw, f"{self._prefix}.{name}.weight").float().unflatten(1, (-1, length))

    def _chosen(self, books: torch.Tensor, codes: torch.Tensor, length: int, rows: slice) -> torch.Tensor:
        """Rows of [n, runs * run] of codes [runs, n / length, run]; only vectors that reach into them are looked up."""
        first, last, _ = rows.indices(self._how.sides[0])
        begin = first // length
        each = [book[of[begin : -(-last // length)]] for book, of in zip(books, codes, strict=True)]
        values = torch.cat([one.transpose(1, 2).flatten(0, 1) for one in each], 1)
        return values[first - begin * length : last - begin * length : rows.step]


def open_vectors(raw: RawTensors, prefix: str, shape: tuple[int, int], how: Quantisation) -> VectorMatrix | None:
    """The matrix under `prefix`, checked against the shape that the config gives; None where it has no codes."""
    indices, vectors = f"{prefix}.indices", how.vectors_of(prefix)
    if not raw.holds(indices):
        return None
    if vectors is None:
        raise LoadError(f"config.json does not say how {prefix} is quantised (config_for_layers)", hint=CONTRADICTION)
    (n, k), runs = shape, vectors.runs
    if vectors.sides != shape or vectors.outliers + runs * vectors.run != k:
        raise LoadError(
            f"{prefix} is {n} by {k}; quantization_config has {vectors.sides[0]} by {vectors.sides[1]}, in {runs} runs of "
            f"{vectors.run} inputs and {vectors.outliers} outliers",
            hint=CONTRADICTION,
        )
    words = -(-vectors.run * sum(vectors.code_bits) // 32)
    require(raw, indices, (runs, -(-n // vectors.length), words), "I32", "U32")
    require(raw, f"{prefix}.centroids.weight", (runs, vectors.size * vectors.length), *FLOATS)
    if vectors.rest:
        require(raw, f"{prefix}.res_centroids.weight", (runs, vectors.rest * vectors.length), *FLOATS)
    if vectors.outliers:
        length = vectors.outlier_length
        require(raw, f"{prefix}.outlier_indices", (1, -(-n // length), vectors.outliers), *IN_16_BITS)
        require(raw, f"{prefix}.outlier_centroids.weight", (1, vectors.outlier_size * length), *FLOATS)
    if vectors.has_order:
        require(raw, f"{prefix}.perm", (k,), *IN_16_BITS)
    for one in ("weight_scale", "weight_bias") if vectors.has_norm else ():
        require(raw, f"{prefix}.{one}", (k,), *FLOATS)
    return VectorMatrix(raw, prefix, vectors)


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [..., words] -> int64 [..., count], the lowest bits first, codes of up to 32 bits across words."""
    stored = torch.nn.functional.pad(words.view(torch.int32).to(torch.int64) & 0xFFFFFFFF, (0, 1))
    places = torch.arange(count) * bits
    word, shift = places // 32, places % 32
    low = stored[..., word] >> shift
    high = torch.where(shift + bits > 32, stored[..., word + 1] << 32 - shift, 0)
    return (low | high) & (1 << bits) - 1
