"""What loaders are given: tensors of a checkpoint, and the parts of a layer that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol

import torch

from diptych.ground.formats import KeptFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A matrix [n, k] as its file quantised it, in the terms of a `KeptFormat`.

    codes: uint8 [n, k], one to a byte (8 bits: 128 + level; fp8: E4M3's bits). scales [n, groups] in the format's type;
    offsets [n, groups]: uint8 zeros, float32 minima, `minima16` in the type of the scales, or None. Scales `e8m0` are uint8,
    its bits, of which half is meant. Of scale `s8` both are int8, of `e4m3` scales uint8, its bits, and `factors` has what
    those of 256 inputs are multiplied by: float16 [n, 2 blocks], of scales and then of minima, or where there are none float32
    [n, blocks].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def rows(self, own: slice | torch.Tensor) -> Codes:
        """Some of them."""
        return Codes(
            codes=self.codes[own],
            scales=self.scales[own],
            offsets=None if self.offsets is None else self.offsets[own],
            factors=None if self.factors is None else self.factors[own],
        )


class WeightTensor(Protocol):
    """One tensor of a checkpoint, checked by name and shape, read when asked. Slices are free.

    kept: the format of the kernels that holds its values as the file has them, for `codes`; None: there are none but `read`'s.
    order: int32 [k], which input of the layer meets each input of `codes`; None: they come in order.
    row_order: which row of the file each row is, where they were put in another order; None: they were not.
    measured: by name, of this and other tensors, what met each column over a text (`compute.loading.calibration`).
    """

    kept: KeptFormat | None = None
    order: torch.Tensor | None = None
    row_order: torch.Tensor | None = None
    measured: Mapping[str, torch.Tensor] = MappingProxyType({})

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    random_seed: (
        int | None
    )  # not None: no file; the values are random, `read` makes them, and a backend may make its own

    def read(self) -> torch.Tensor:
        """The values on the CPU in the file's dtype, a view of the mapped file where there is one; do not write to it."""
        ...

    def part(self, rows: slice, n_columns: int) -> torch.Tensor:
        """`read()[rows, :n_columns]` of a matrix; a source that has to make the values makes no others."""
        return self.read()[rows, :n_columns]

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What a copy of the checkpoint holds of it: the tensor itself, or those that a view of several is made of."""
        return (self,)

    @property
    def inputs(self) -> torch.Tensor | None:
        """fp32 [1 + n, k], what was measured: how large what meets each column is, and n directions of it; None: nobody has."""
        found = (one.measured.get(self.name) for one in self.stored)
        return next((one for one in found if one is not None), None)

    def codes(self) -> Codes:
        """The values as codes of `kept`."""
        kept = self.kept
        raise NotImplementedError(f"{self.name} has no codes of {kept}")


class Split(Enum):
    """How a projection is divided among ranks: each has some of the outputs, or sums over some of the inputs."""

    OUTPUTS = "outputs"  # "column parallel": q, k, v, gate, up, head
    INPUTS = "inputs"  # "row parallel": o, down


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a projection is in the model: its sites (q, k, v, o, gate, up, down, head) with their outputs, in order.

    An adapter is attached to a site, ranks divide by `split`. layer None: not in a layer. Of a mixture, the role is that
    of each of its experts. is_shared: other layers may have it, too, so that no adapter of one of them can be attached.
    """

    sites: tuple[tuple[str, int], ...]
    split: Split
    layer: int | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearParts:
    """W [N, K] as tensors stacked along N (q, k, v), and the bias [N] as tensors stacked the same way, or ()."""

    weights: tuple[WeightTensor, ...]
    biases: tuple[WeightTensor, ...] = ()

    @property
    def n_outputs(self) -> int:
        """N."""
        return sum(part.shape[0] for part in self.weights)

    @property
    def n_inputs(self) -> int:
        """K."""
        return self.weights[0].shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormParts:
    """A norm's weight [D] and bias [D]. is_centred: the mean is taken away first (LayerNorm), otherwise RMSNorm."""

    weight: WeightTensor
    bias: WeightTensor | None = None
    is_centred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexParts:
    """What an index chooses by, of n heads of d: queries [n d, q_rank] of what latent queries are made of; of the layer's input
    the key [d, D], with a norm, and the heads' weights [n, D].

    Of blocks there are no weights, queries [n d, D] are of the layer's input and normed, too. norm_offset: as `Loader.norm` has
    it, of both norms. Of pools there is one of gates [d, D] of the layer's input, and offsets [pool, d]. Of entries there are
    those that keys are, in place of a key and its norm. scales [2 n]: as `Loader.latent_attention` has them.
    """

    queries: LinearParts
    key: LinearParts | None = None
    norm: NormParts | None = None
    weights: LinearParts | None = None
    q_norm: NormParts | None = None
    norm_offset: float = 0.0
    gates: tuple[LinearParts, ...] = ()
    offsets: WeightTensor | None = None
    entries: EntryParts | None = None
    scales: WeightTensor | None = None

    @property
    def of_input(self) -> tuple[LinearParts, ...]:
        """What reads the layer's input, of an index beside latents."""
        series = None if self.entries is None else self.entries.series
        return tuple(one for one in (self.key, series, self.weights, *self.gates) if one is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedParts:
    """What scores gain of contents and distances (`Related`): of each head [n_places, d] what its queries meet, and what its
    keys do, both times the scores' scale; places [2 reach + 1]: the row of each distance from a key to a query, from -reach on.
    beside: of what the first two are made, those tensors that nothing else is made of but them.
    """

    keys: tuple[LinearParts, ...]
    queries: tuple[LinearParts, ...]
    places: WeightTensor
    beside: tuple[WeightTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryParts:
    """What entries are made of, `EntrySpec` has them so, of n series of d: of the layer's input the series and their gates
    [2 n d, D], offsets [tokens, n d], and the norm [d] of what they become.
    """

    series: LinearParts
    offsets: WeightTensor
    norm: NormParts


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleParts:
    """What moves a layer's states on, beside what is projected: taps [channels, .., n_taps] with a bias [channels]; of each
    head [H] the factor in the exponent of its decay, what shifts its rate (by key: [H d]), and what of its value it gives
    besides; the norm over value_dim. Of a selective state decays [H v, d], shifts and skips [H v], of recurrent units decays
    [H v]. None: the rule, or the layer, has none.
    """

    taps: WeightTensor | None = None
    tap_bias: WeightTensor | None = None
    decay: WeightTensor | None = None
    shift: WeightTensor | None = None
    skip: WeightTensor | None = None
    norm: NormParts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """One expert: gate_up [2F, D] (gate rows first), down [D, F]."""

    gate_up: LinearParts
    down: LinearParts


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureParts:
    """A mixture: its router [E, D] and its experts; where the spec has them choice_bias [E], scales [E], table [V, k], and
    behind [D], by which an expert's outputs are multiplied before they are normed.
    """

    router: LinearParts
    experts: tuple[ExpertParts, ...]
    choice_bias: WeightTensor | None = None
    scales: WeightTensor | None = None
    table: WeightTensor | None = None
    behind: WeightTensor | None = None
