"""compressed-tensors' sparse matrices: values that are not zero, with a mask of where they belong, or in Marlin's tiles of 2:4.

With a mask, `compressed` has the values row after row (two of four in `sparse-24-bitmask`, any number in `sparse-bitmask`) and
`bitmask` u8 [n, k / 8] a bit for each input, the lowest first. They are codes of a layout that is read without sparsity, too,
or plain floats. `marlin-24` has signed codes of 4 or 8 bits in groups, of which zeros are written in again: the kernels have no
sparsity, so the file's values are kept and take the room of others.

Sources: compressed-tensors 0.12 (`compressors/sparse_compressors`, `compressors/sparse_quantized_compressors/marlin_24.py`,
`utils/permutations_24.py`, `utils/semi_structured_conversions.py`); newer versions write neither.

Legend: n outputs, k inputs, G scales of a row.
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, Dequantised, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, Made, Overlaid, all_bytes, require, unpack_words
from diptych.ground.errors import LoadError

VALUES = (*FLOATS, "F8_E4M3", "I8")
DAMAGED = "the checkpoint is damaged; download it again"
TILE = 16  # of Marlin: inputs of which two of four are kept, and outputs
RUN = 64  # outputs that its order mixes
ORDERS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}  # of neighbours in a word, by bits
SCALE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight scales in turn, where a row has several


class SparseFloats(Dequantised):
    """Plain floats with zeros between them."""

    why = "no kernel leaves zeros out"
    label = "sparse"

    def __init__(self, raw: RawTensors, weight: str, stored_bytes: int) -> None:
        self._raw, self._weight, self.stored_bytes = raw, weight, stored_bytes

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        return self._raw.stored(self._weight)[rows].float()


def with_zeros(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> Overlaid:
    """The tensors of the matrix, with `weight` in place of `compressed`. LoadError for what does not fit the shape."""
    compressed, mask, offsets = (f"{prefix}.{one}" for one in ("compressed", "bitmask", "row_offsets"))
    (n, k), (found, dtype) = shape, raw.header(compressed)
    require(raw, mask, (n, -(-k // 8)), "U8")
    if raw.holds(offsets):
        if len(found) != 1 or found[0] > n * k or dtype not in VALUES:
            require(raw, compressed, (n * k,), *VALUES)
        require(raw, offsets, (n,), "I64")
    else:
        require(raw, compressed, (n, k // 2), *VALUES)
    sides = f"{prefix}.shape"
    if raw.holds(sides):
        require(raw, sides, (2, 1) if raw.header(sides)[0] == (2, 1) else (2,), "I64", "I32")
        if raw.stored(sides).flatten().tolist() != list(shape):
            raise LoadError(
                f"tensor {sides} is {raw.stored(sides).flatten().tolist()}; config.json calls for {list(shape)}",
                hint=CONTRADICTION,
            )

    def dense() -> torch.Tensor:
        stored, values = raw.stored(mask), raw.stored(compressed).flatten()
        is_there = torch.stack([stored >> bit & 1 for bit in range(8)], -1).flatten(1)[:, :k].bool()
        if int(is_there.sum()) != len(values):
            raise LoadError(
                f"{mask} has {int(is_there.sum())} bits for the {len(values)} values of {compressed}", hint=DAMAGED
            )
        # of fp8 as bytes: torch places no others by a mask
        found = torch.zeros(shape, dtype=torch.uint8 if values.element_size() == 1 else values.dtype)
        found[is_there] = values.view(found.dtype)
        return found.view(values.dtype)

    return Overlaid(raw, {f"{prefix}.weight": Made(shape, dtype, dense), compressed: None})


def open_marlin(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> CodedMatrix:
    """weight_packed [k / 32, n * bits / 2], scale_packed [G, n], meta int16 [k / 32, 2 n]."""
    n, k = shape
    packed, scale, places = (f"{prefix}.{one}" for one in ("weight_packed", "scale_packed", "meta"))
    if n % RUN or k % (2 * TILE):
        raise LoadError(
            f"{prefix} is {n} by {k}; in Marlin's tiles of 2:4 outputs come in {RUN} and inputs in {2 * TILE}",
            hint=CONTRADICTION,
        )
    bits = 8 if raw.header(packed)[0] == (k // 32, 4 * n) else 4
    require(raw, packed, (k // 32, n * bits // 2), "I32")
    groups = raw.header(scale)[0][0] if raw.holds(scale) and raw.header(scale)[0] else 1
    require(raw, scale, (groups, n), *FLOATS)
    require(raw, places, (k // 32, 2 * n), "I16")
    if groups < 1 or k % groups:
        raise LoadError(f"tensor {scale} has {groups} scales a row, which {k} inputs are not", hint=CONTRADICTION)

    def codes() -> torch.Tensor:
        kept = _out_of_tiles(unpack_words(raw.stored(packed), bits).flatten(1), bits, n)
        found = torch.full((n * k // 4, 4), 1 << bits - 1, dtype=torch.uint8)  # which stands for 0
        return found.scatter_(1, _places(raw.stored(places), n, k), kept.reshape(-1, 2)).view(n, k)

    def parts() -> CodedParts:
        stored = raw.stored(scale)
        if groups > 2:  # in order where a group has all inputs that are kept
            stored = stored.view(groups, -1, 8)[..., torch.tensor(SCALE_ORDER).argsort()].reshape(groups, n)
        return CodedParts(scales=stored.T.contiguous(), zeros=None, group=k // groups)

    return CodedMatrix(prefix, shape, bits, f"marlin-24-{bits}", codes, parts, all_bytes(raw, prefix))


def _out_of_tiles(stored: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """u8 [k / 32, 16 n] in Marlin's order -> u8 [n, k / 2]."""
    order = ORDERS[bits]
    flat = torch.empty(RUN * TILE, dtype=torch.int64)  # where each of four tiles, as they lie, comes from
    for lane in range(32):
        column, row = lane // 4, lane % 4
        begin = 256 * (column // 2) + 8 * (column % 2)
        own = [begin + 16 * (2 * row + one) + 4 * block for block in (0, 1) for one in (0, 1, 8, 9)]
        of_lane = torch.tensor([place + step for step in range(4) for place in own])
        flat[32 * lane : 32 * lane + 32] = of_lane.view(-1, len(order))[:, list(order)].flatten()
    tiles = torch.empty_like(stored).view(-1, RUN * TILE)
    tiles[:, flat] = stored.view(-1, RUN * TILE)
    return tiles.view(-1, n // TILE, TILE, TILE).permute(1, 3, 0, 2).reshape(n, -1)


def _places(stored: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """int16 in CUTLASS's order -> int64 [n * k / 4, 2]: which two of four inputs are there."""
    row, column = torch.arange(n)[:, None], torch.arange(k // 16)[None]
    row = row // 64 * 64 + row // 2 % 2 * 32 + row // 8 % 8 * 4 + row % 2 * 2 + row // 4 % 2
    # of two rows and two columns what is off the diagonal changes places
    step = (column % 2 - row % 2).expand(n, k // 16)
    row, column = row + step, column - step
    words = stored.flatten()[column // 2 * 2 * n + row * 2 + column % 2].int() & 0xFFFF
    nibbles = torch.stack([words >> shift & 15 for shift in range(0, 16, 4)], -1).flatten()
    return torch.stack((nibbles & 3, nibbles >> 2), -1).long()
