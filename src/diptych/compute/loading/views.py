"""Tensors made of a checkpoint's when they are read: in another order, joined, axes exchanged, blocks of 4 bits as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.formats import FP8_BLOCK, KEPT_MXFP4, STRIP_LANES, KeptFormat
from diptych.models.positions import Distances

MXFP4_BLOCK = 32  # values that share a scale
LEAST_KEPT = 1e-3  # of a channel, squared
# of the 16 codes (OCP Microscaling Formats 1.0): sign, two bits of exponent, one of mantissa
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127


def halves_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Where each dimension of a head comes from, so that neighbours that belong together lie rotary_dim / 2 apart."""
    turned = torch.arange(rotary_dim).view(-1, 2).T.reshape(-1)
    return torch.cat([turned, torch.arange(rotary_dim, head_dim)])


def second_half_first(n_rows: int) -> torch.Tensor:
    """Where each row comes from of two halves that change places."""
    return torch.arange(n_rows).roll(n_rows // 2)


def by_head_order(n_heads: int, n_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Where each row of q, k and v comes from that lie by KV head: the queries that share it, its key, its value."""
    group = n_heads // n_kv_heads
    rows = torch.arange((n_heads + 2 * n_kv_heads) * head_dim).view(n_kv_heads, group + 2, head_dim)
    return torch.cat([part.reshape(-1) for part in (rows[:, :group], rows[:, group], rows[:, group + 1])])


def rows_in_parts(n_parts: int, width: int) -> list[torch.Tensor]:
    """The rows of q, of k and of v, `width` each, that lie in parts: of each some queries, their values, their keys."""
    rows = torch.arange(3 * width).view(n_parts, 3, width // n_parts)
    return [rows[:, kind].reshape(-1) for kind in (0, 2, 1)]


def _keeps_strips(kept: KeptFormat | None, rows: torch.Tensor) -> bool:
    """Whether each strip of these rows lies within one block of fp8 still."""
    if kept is None or kept.kind != "fp8" or not kept.group:
        return True
    blocks = rows.view(-1, STRIP_LANES) // FP8_BLOCK
    return bool((blocks == blocks[:, :1]).all())


class PickedTensor(WeightTensor):
    """Some rows of another tensor, in an order of their own. What is left over is another view's."""

    _tensor: WeightTensor
    _rows: torch.Tensor

    def __init__(self, tensor: WeightTensor, rows: torch.Tensor) -> None:
        if isinstance(tensor, PickedTensor):
            rows = tensor._rows[rows]
            tensor = tensor._tensor
        self.name = f"{tensor.name}[{int(rows[0])}..]"
        self.shape = (len(rows), *tensor.shape[1:])
        self.dtype = tensor.dtype
        self.random_seed = None if tensor.random_seed is None else tensor.random_seed + int(rows[0]) + 1
        self.order = tensor.order
        self._tensor = tensor
        self._rows = self.row_order = rows
        self.kept = tensor.kept if _keeps_strips(tensor.kept, rows) else None

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """All of the checkpoint's rows, in the order there."""
        return self._tensor.stored

    def read(self) -> torch.Tensor:
        """A copy."""
        return self._tensor.read()[self._rows]

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """`read()[rows, :n_columns]`."""
        return self._tensor.read()[self._rows[rows], :n_columns]

    def codes(self) -> Codes:
        """A copy."""
        return self._tensor.codes().rows(self._rows)


class ReorderedTensor(PickedTensor):
    """Another tensor with the entries along its first axis in another order within each head."""

    def __init__(self, tensor: WeightTensor, order: torch.Tensor) -> None:
        heads = torch.arange(0, tensor.shape[0], len(order))
        super().__init__(tensor, (heads[:, None] + order).reshape(-1))
        self.name = tensor.name
        self.random_seed = tensor.random_seed  # random rows in another order are random rows


class JoinedTensor(WeightTensor):
    """The values of some tensors behind one another, as a vector, by the names of all: a packed bias is found by those."""

    def __init__(self, tensors: tuple[WeightTensor, ...]) -> None:
        self.name = "+".join(dict.fromkeys(one.name for tensor in tensors for one in tensor.stored))
        self.shape = (sum(math.prod(tensor.shape) for tensor in tensors),)
        self.dtype = tensors[0].dtype
        self.random_seed = tensors[0].random_seed
        self._tensors = tensors

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What each is made of."""
        return tuple(one for tensor in self._tensors for one in tensor.stored)

    def read(self) -> torch.Tensor:
        """A copy."""
        return torch.cat([tensor.read().reshape(-1) for tensor in self._tensors]).to(self.dtype)


class PowerTensor(WeightTensor):
    """E to the power of a small tensor, in fp32."""

    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, tensor: WeightTensor) -> None:
        self.name = tensor.name
        self.shape = tensor.shape
        self._tensor = tensor

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What they are the powers of."""
        return self._tensor.stored

    def read(self) -> torch.Tensor:
        """A new tensor."""
        return self._tensor.read().to(torch.float32).exp()


class SoftplusTensor(PowerTensor):
    """Log(1 + e^x) of a small tensor, in fp32."""

    def read(self) -> torch.Tensor:
        """A new tensor."""
        return torch.nn.functional.softplus(self._tensor.read().to(torch.float32))


class ScaledTensor(WeightTensor):
    """A small tensor times a number, and more, in fp32."""

    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, tensor: WeightTensor, factor: float, offset: float = 0.0) -> None:
        self.name = tensor.name
        self.shape = tensor.shape
        self._tensor = tensor
        self._factor = factor
        self._offset = offset

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What it is made of."""
        return self._tensor.stored

    def read(self) -> torch.Tensor:
        """A copy."""
        return self._tensor.read().to(torch.float32) * self._factor + self._offset


class ResidualTensor(WeightTensor):
    """By what a stream's channels are kept, or what is added to them, of learned numbers g [D] (Muse Spark): b = sigmoid(g / t)
    is added, and sqrt(1 - b^2), of at least LEAST_KEPT under the root, is kept.
    """

    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, tensor: WeightTensor, temperature: float, *, is_kept: bool) -> None:
        self.name = tensor.name
        self.shape = tensor.shape
        self._tensor = tensor
        self._temperature = temperature
        self._is_kept = is_kept

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What it is made of."""
        return self._tensor.stored

    def read(self) -> torch.Tensor:
        """A new tensor."""
        gate = self._tensor.read().to(torch.float32) / self._temperature
        added = gate.sigmoid()
        return ((-gate).sigmoid() * (1.0 + added)).clamp(min=LEAST_KEPT).sqrt() if self._is_kept else added


class OnesTensor(WeightTensor):
    """The weight [n] of a norm that has none."""

    name = "ones"
    dtype = torch.float32
    random_seed: int | None = None

    def __init__(self, n: int) -> None:
        self.shape = (n,)

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """Nothing."""
        return ()

    def read(self) -> torch.Tensor:
        """A new tensor."""
        return torch.ones(self.shape)


class NumbersTensor(WeightTensor):
    """Numbers [n] that no checkpoint needs to have, as they follow from what its config says."""

    name = "numbers"
    dtype = torch.float32
    random_seed: int | None = None

    def __init__(self, numbers: Sequence[float]) -> None:
        self.shape = (len(numbers),)
        self._numbers = tuple(numbers)

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """Nothing."""
        return ()

    def read(self) -> torch.Tensor:
        """A new tensor."""
        return torch.tensor(self._numbers, dtype=torch.float32)


class SinesTensor(WeightTensor):
    """A table of positions [n, width] that no checkpoint has: sines of falling frequencies, behind them their cosines, as
    tensor2tensor has them (arXiv:1706.03762, with the halves one behind the other).
    """

    name = "sines"
    dtype = torch.float32
    random_seed: int | None = None

    def __init__(self, n: int, width: int) -> None:
        self.shape = (n, width)

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """Nothing."""
        return ()

    def read(self) -> torch.Tensor:
        """A new tensor."""
        n, width = self.shape
        half = width // 2
        steps = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - 1)))
        angles = torch.arange(n).float()[:, None] * steps
        return torch.cat([angles.sin(), angles.cos(), torch.zeros(n, width % 2)], dim=1)


class RaisedTensor(WeightTensor):
    """Rows of a small table, each with the first row of another one added."""

    random_seed: int | None = None

    def __init__(self, tensor: WeightTensor, others: WeightTensor) -> None:
        self.name = tensor.name
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._tensor = tensor
        self._others = others

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """Both tables'."""
        return (*self._tensor.stored, *self._others.stored)

    def read(self) -> torch.Tensor:
        """A new tensor."""
        return (self._tensor.read().float() + self._others.read()[0].float()).to(self.dtype)


class DistancesTensor(WeightTensor):
    """What scores gain by the distance from the query to the key, [H, 2 reach + 1], of a table of buckets [n_buckets, H]."""

    def __init__(self, tensor: WeightTensor, distances: Distances) -> None:
        self.name = f"{tensor.name} by distance"
        self.shape = (tensor.shape[1], 2 * distances.reach + 1)
        self.dtype = tensor.dtype
        self.random_seed = tensor.random_seed
        self._tensor = tensor
        self._distances = distances

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """The table's."""
        return self._tensor.stored

    def read(self) -> torch.Tensor:
        """A new tensor."""
        half = self._distances.n_buckets // 2
        narrow, reach = half // 2, self._distances.reach
        steps = torch.arange(-reach, reach + 1)
        # in fp32, operation by operation as transformers has it: a distance at the edge of a bucket may fall on either side
        farther = torch.log(steps.abs().float() / narrow) / math.log(reach / narrow) * (half - narrow)
        wide = (narrow + farther.clamp(min=0).long()).clamp(max=half - 1)
        buckets = torch.where(steps.abs() < narrow, steps.abs(), wide) + (steps > 0) * half
        return self._tensor.read()[buckets].T


class RowsTensor(WeightTensor):
    """Rows [begin, end) of a matrix, by themselves."""

    def __init__(self, tensor: WeightTensor, begin: int, end: int) -> None:
        self.name = f"{tensor.name}[{begin}:{end}]"
        self.shape = (end - begin, *tensor.shape[1:])
        self.dtype = tensor.dtype
        self.random_seed = None if tensor.random_seed is None else tensor.random_seed + begin + 1
        self.measured = tensor.measured
        self._tensor = tensor
        self._rows = slice(begin, end)

    def read(self) -> torch.Tensor:
        """A view."""
        return self._tensor.read()[self._rows]


class TransposedTensor(WeightTensor):
    """A matrix that a checkpoint stores as [inputs, outputs]."""

    def __init__(self, tensor: WeightTensor) -> None:
        self.name = tensor.name
        self.shape = tensor.shape[::-1]
        self.dtype = tensor.dtype
        self.random_seed = tensor.random_seed
        self.measured = tensor.measured
        self._tensor = tensor

    def read(self) -> torch.Tensor:
        """A copy, rows contiguous: of one input, too, whose stride `contiguous()` leaves as it is."""
        return self._tensor.read().T.clone(memory_format=torch.contiguous_format)


class Mxfp4Tensor(WeightTensor):
    """Entry `index` of stacked matrices [E, N, K] in MXFP4, as its codes or as bf16, which holds every value exactly.

    blocks [E, N, K / 32, 16] bytes of two codes, the lower bits first; scales [E, N, K / 32]: powers of two, biased by 127.
    """

    random_seed: int | None = None
    kept = KEPT_MXFP4
    order: torch.Tensor | None = None

    def __init__(self, name: str, blocks: WeightTensor, scales: WeightTensor, index: int) -> None:
        self.name = f"{name}[{index}]"
        self.shape = (blocks.shape[1], blocks.shape[2] * MXFP4_BLOCK)
        self.dtype = torch.bfloat16
        self.measured = blocks.measured
        self._blocks = blocks
        self._scales = scales
        self._index = index

    def read(self) -> torch.Tensor:
        """A new tensor."""
        return self._values(slice(None))

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """`read()[rows, :n_columns]`."""
        return self._values(rows)[:, :n_columns]

    def codes(self) -> Codes:
        """New tensors."""
        pairs = self._blocks.read()[self._index]
        codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)
        return Codes(codes=codes, scales=self._scales.read()[self._index])

    def _values(self, rows: slice) -> torch.Tensor:
        codes = self._blocks.read()[self._index, rows]
        exponents = self._scales.read()[self._index, rows].to(torch.int32) - SCALE_BIAS
        table = torch.tensor(FP4_VALUES, dtype=torch.float32)
        values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).flatten(-2)
        return torch.ldexp(values, exponents[..., None]).to(torch.bfloat16).flatten(1)


class SpacedTensor(WeightTensor):
    """Taps [channels, 1, n] of inputs that stand `apart` from each other, as of all: [channels, (n - 1) apart + 1], fp32."""

    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, tensor: WeightTensor, apart: int) -> None:
        n_channels, *_, n_taps = tensor.shape
        self.name = tensor.name
        self.shape = (n_channels, (n_taps - 1) * apart + 1)
        self._tensor = tensor
        self._apart = apart

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What it is made of."""
        return self._tensor.stored

    def read(self) -> torch.Tensor:
        """Zeros between them."""
        taps = torch.zeros(self.shape)
        taps[:, :: self._apart] = self._tensor.read().flatten(1).to(torch.float32)
        return taps


class ShiftingTensor(WeightTensor):
    """Taps [n, n + 1] of which channel i has the input of i + 1 tokens before, fp32."""

    name = "shifts"
    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, n: int) -> None:
        self.shape = (n, n + 1)

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """Nothing."""
        return ()

    def read(self) -> torch.Tensor:
        """One in each row."""
        return torch.eye(*self.shape).flip(1).roll(-1, 1)
