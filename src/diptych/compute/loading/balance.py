"""Weights in a form that rows of int8 suit: what two neighbours share is divided between them before they are packed.

Activations are quantised per row (x ~ scale * q with scale = max |x| / 127), so one channel of large values takes the levels
of all others. Between a norm and the projections that read it, between up and down, and between v and o, a channel may be
divided by m on one side and multiplied by m on the other, and nothing changes in exact arithmetic (SmoothQuant's identity,
arXiv 2211.10438). Here m comes from the weights alone. Between up and down, and v and o:

    log2 m = share * log2 |giver| - (1 - share) * log2 |taker|

|giver| is a norm weight or a mean over a row, |taker| a mean over a column, both geometric: that mean alone splits into a
factor of the row and one of the column. So a model and its exact reparametrisation come to the same form, whatever was done
at the other sites.

What a norm reads has large channels of its own that no weight tells, and training makes the norm's weights small there: to
divide by those would bring the channels back (Gemma 3 270M wrote noise). So of a norm only that counts on which both sides
agree, how far |giver| lies above the middle channel's and |taker| below, the lesser of the two, or the other way round.

It needs no text, costs nothing when the model runs, and cannot see activations that are large where no weight says so. Where a
text was read before (`compute.loading.calibration`), as it is where nobody says otherwise, |giver| is what was measured of the
channel instead, with a share of a half.

    norm, (gate_up,) = balance_norm(norm, (gate_up,), offset=0.0)
    gate_up, down = balance_gated(gate_up, down)

Without a gate a factor passes through max(x, 0) as it is and through its square as a square (`balance_curve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diptych.compute.ops.contract import LinearParts, NormParts, WeightTensor
from diptych.models.gates import Activation
from diptych.models.spec import AttentionLayer

# What of a channel's size stays in the weights; the rest goes to the activations. LAB.md, quality of the number formats.
SHARE = 0.5
DEGREES = {Activation.RELU: 1, Activation.SQUARED_RELU: 2}  # f(m x) = m^degree f(x) for m > 0
SAMPLES = 1024  # values that a mean is taken over; 256 give int4 5 % more divergence
LARGEST_SHIFT = 24  # for a channel that one side ignores: the other side's numbers must not take levels from the rest


class ScaledTensor(WeightTensor):
    """Another tensor times 2^rows down its first axis and 2^columns along its last, when it is read.

    `offset` is what the model adds to the values: (values + offset) is scaled, and values so that it comes out are given.
    A matrix in bf16 stays bf16, which loses nothing beside int8 and takes no more memory than its file; all else is fp32.
    """

    random_seed: int | None = None

    def __init__(
        self,
        plain: WeightTensor,
        *,
        rows: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        offset: float = 0.0,
    ) -> None:
        self.name = plain.name
        self.shape = plain.shape
        self.row_order = plain.row_order
        is_matrix = len(plain.shape) == 2
        self.dtype = torch.bfloat16 if is_matrix and plain.dtype == torch.bfloat16 else torch.float32
        self.plain = plain
        self.rows = rows
        self.columns = columns
        self._offset = offset

    def read(self) -> torch.Tensor:
        """The scaled values, a new tensor."""
        return self._scaled(self.plain.read().detach(), slice(None))

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """The same of some rows: no others are scaled."""
        return self._scaled(self.plain.part(rows, self.shape[1]).detach(), rows)[:, :n_columns]

    def _scaled(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        if self._offset:
            values = values.to(torch.float32) + self._offset
        scaled = torch.empty(values.shape, dtype=self.dtype)
        if self.columns is not None:
            values = torch.mul(values, self.columns.exp2(), out=scaled)  # in fp32, rounded once
        if self.rows is not None:
            factors = self.rows.exp2()[rows]  # of all: a slice's last elements may have other bits
            torch.mul(values, factors if values.ndim == 1 else factors[:, None], out=scaled)
        return scaled.sub_(self._offset) if self._offset else scaled


@dataclass(frozen=True, slots=True)
class Exponents:
    """log2 of what each output [N] and then each input [K] of a projection is multiplied by, joined when they are asked for:
    adapters and copies do, not every start. rows: outputs of each tensor with theirs. None: nothing is shared.
    """

    rows: tuple[tuple[int, torch.Tensor | None], ...]
    n_inputs: int
    columns: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: LinearParts) -> Exponents:
        """Those of a projection as it will be packed."""
        rows, columns = [], None
        for part in parts.weights:
            own = part if isinstance(part, ScaledTensor) else None
            rows.append((part.shape[0], None if own is None else own.rows))
            columns = columns if own is None or own.columns is None else own.columns
        return cls(tuple(rows), parts.n_inputs, columns)

    def read(self) -> torch.Tensor:
        """fp32 [N + K]."""
        every = (*self.rows, (self.n_inputs, self.columns))
        return torch.cat([torch.zeros(n) if one is None else one.float() for n, one in every])


def directions_of(parts: LinearParts) -> torch.Tensor | None:
    """fp32 [n, K]: what was measured of what meets the projection, as its columns are scaled; None: nothing was."""
    for part in parts.weights:
        plain, columns = (part.plain, part.columns) if isinstance(part, ScaledTensor) else (part, None)
        found = plain.inputs
        if found is not None and len(found) > 1:
            return found[1:].contiguous() if columns is None else found[1:] * (-columns).exp2().float()
    return None


def balance_norm(
    norm: NormParts, readers: Sequence[LinearParts], *, offset: float
) -> tuple[NormParts, tuple[LinearParts, ...]]:
    """A norm and all projections that read it."""
    taking = [part for reader in readers for part in reader.weights]
    given, own, taken = _measured(taking), norm.weight.read().detach().float() + offset, _mean_log2(taking, axis=0)
    shifts = _agreed(_log2(own), taken) if given is None else _shifts(given, taken)
    scaled = tuple(_scaled(reader, columns=shifts) for reader in readers)
    bias = None if norm.bias is None else ScaledTensor(norm.bias, rows=-shifts)
    return replace(norm, weight=ScaledTensor(norm.weight, rows=-shifts, offset=offset), bias=bias), scaled


def balance_gated(gate_up: LinearParts, down: LinearParts) -> tuple[LinearParts, LinearParts]:
    """gate and up (the latter's half of the rows), and down: act(gate) * up is linear in up."""
    ffn = down.n_inputs
    given = _measured(down.weights)
    if given is None:
        given = _means_of_last(gate_up.weights, ffn)
    shifts = _shifts(given, _mean_log2(down.weights, axis=0))
    return _scaled(gate_up, rows=-shifts), _scaled(down, columns=shifts)


def balance_curve(up: LinearParts, down: LinearParts, activation: Activation) -> tuple[LinearParts, LinearParts]:
    """Up and down of an MLP without a gate, where a factor before the curve is one behind it, to some power."""
    degree = DEGREES.get(activation)
    if degree is None:
        return up, down
    given = _measured(down.weights)
    given = _mean_log2(up.weights, axis=1) if given is None else given / degree
    shifts = _shifts(given, _mean_log2(down.weights, axis=0) / degree)
    return _scaled(up, rows=-shifts), _scaled(down, columns=degree * shifts)


def balance_values(qkv: LinearParts, o: LinearParts, attention: AttentionLayer) -> tuple[LinearParts, LinearParts]:
    """v (the last rows) and o: attention is linear in v. Query heads of a group share the channels of their v."""
    n_kv, d = attention.n_kv_heads, attention.value_dim
    group = attention.n_heads // n_kv
    given, taken = (
        None if sizes is None else sizes.view(n_kv, group, d).nanmean(1).view(-1)
        for sizes in (_measured(o.weights), _mean_log2(o.weights, axis=0))
    )
    if given is None:
        given = _means_of_last(qkv.weights, n_kv * d)
    assert taken is not None
    shifts = _shifts(given, taken)
    columns = shifts.view(n_kv, 1, d).expand(n_kv, group, d).reshape(-1)
    return _scaled(qkv, rows=-shifts), _scaled(o, columns=columns)


def _shifts(giver: torch.Tensor, taker: torch.Tensor) -> torch.Tensor:
    """log2 m."""
    return _with_zeros(SHARE * giver - (1.0 - SHARE) * taker, giver, taker)


def _agreed(giver: torch.Tensor, taker: torch.Tensor) -> torch.Tensor:
    """log2 m, of what both sides say."""
    above, below = giver - giver.nanmedian(), taker.nanmedian() - taker
    agreed = torch.where(above * below > 0.0, above.sign() * torch.minimum(above.abs(), below.abs()), 0.0)
    return _with_zeros(agreed, giver, taker)


def _with_zeros(shifts: torch.Tensor, giver: torch.Tensor, taker: torch.Tensor) -> torch.Tensor:
    """Where one side is all zero (NaN here), the other's numbers are made small."""
    shifts = torch.where(giver.isnan(), torch.full_like(shifts, -LARGEST_SHIFT), shifts)
    return torch.where(taker.isnan(), torch.full_like(shifts, LARGEST_SHIFT), shifts)


def _measured(tensors: Sequence[WeightTensor]) -> torch.Tensor | None:
    """log2 of what entered them over a text, which is the same for all of them; None where nobody has measured it."""
    plain = (tensor.plain if isinstance(tensor, ScaledTensor) else tensor for tensor in tensors)
    sizes = next((tensor.inputs for tensor in plain if tensor.inputs is not None), None)
    return None if sizes is None else _log2(sizes[0])


def _mean_log2(tensors: Sequence[WeightTensor], *, axis: int) -> torch.Tensor:
    """Mean log2 |w| over `axis`, of a sample; of several tensors, over their rows together (axis 0) or one after another.

    Zeros do not count; NaN where nothing does. Factors put on at other sites are left out: they move all means alike.
    """
    tensors = [tensor.plain if isinstance(tensor, ScaledTensor) else tensor for tensor in tensors]
    if axis == 1:
        return torch.cat([_log2(tensor.part(slice(None), SAMPLES).detach()).nanmean(1) for tensor in tensors])
    n = max(4, SAMPLES // len(tensors))
    sampled = [tensor.part(_every(tensor.shape[0], n), tensor.shape[1]).detach() for tensor in tensors]
    return _log2(torch.cat(sampled)).nanmean(0)


def _means_of_last(tensors: Sequence[WeightTensor], n: int) -> torch.Tensor:
    """Of stacked tensors the means of the last n rows; tensors that have none of them are not read."""
    first = len(tensors)
    while first and sum(tensor.shape[0] for tensor in tensors[first:]) < n:
        first -= 1
    return _mean_log2(tensors[first:], axis=1)[-n:]


def _every(rows: int, n: int) -> slice:
    """n rows, spread evenly; all where there are fewer."""
    step = max(1, rows // n)
    return slice(0, min(rows, n * step), step)


def _log2(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32, copy=True).abs_().log2_().nan_to_num_(torch.nan, posinf=torch.nan, neginf=torch.nan)


def _scaled(
    parts: LinearParts, *, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> LinearParts:
    """The projection with its last rows (and biases) and its columns scaled; a part that stays as it was is left alone."""
    by_part = _by_part(rows, [part.shape[0] for part in parts.weights])
    weights = tuple(_tensor(part, own, columns) for part, own in zip(parts.weights, by_part, strict=True))
    biases = tuple(_tensor(bias, own, None) for bias, own in zip(parts.biases, by_part, strict=False))
    return LinearParts(weights=weights, biases=biases)


def _by_part(rows: torch.Tensor | None, sizes: Sequence[int]) -> list[torch.Tensor | None]:
    """The exponents of the last rows of stacked parts of these sizes, by part: of rows before them 0; None: all are."""
    if rows is None:
        return [None] * len(sizes)
    at, found = len(rows) - sum(sizes), list[torch.Tensor | None]()
    for size in sizes:
        own = rows[max(at, 0) : max(at + size, 0)]
        at += size
        if len(own) < size and len(own):
            own = torch.cat([own.new_zeros(size - len(own)), own])
        found.append(own if own.any() else None)
    return found


def _tensor(tensor: WeightTensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> WeightTensor:
    if rows is None and columns is None:
        return tensor
    if isinstance(tensor, ScaledTensor):  # other sites' factors come on top
        rows, columns, tensor = _sum(tensor.rows, rows), _sum(tensor.columns, columns), tensor.plain
    return ScaledTensor(tensor, rows=rows, columns=columns)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
