"""What scores gain by distance, as tensors: numbers that heads have learned, or rows that queries and keys meet (DeBERTa)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from diptych.compute.loading.layer_tensors import LayerTensors
from diptych.compute.loading.naming import norm_parts
from diptych.compute.loading.views import DistancesTensor, ScaledTensor
from diptych.compute.ops.contract import Experts, Heads, Linear, LinearParts, NormParts, Table, Vector, WeightTensor
from diptych.compute.ops.contract_parts import RelatedParts
from diptych.models.positions import Related
from diptych.models.spec import AttentionLayer


class PlacesTensor(WeightTensor):
    """The row of each distance from a key to a query [2 reach + 1], from -reach on; no checkpoint has it."""

    name = "places"
    dtype = torch.float32
    random_seed: int | None = None

    def __init__(self, related: Related, reach: int) -> None:
        self.shape = (2 * reach + 1,)
        self._related = related
        self._reach = reach

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """Nothing."""
        return ()

    def read(self) -> torch.Tensor:
        """A new tensor."""
        steps, half = torch.arange(-self._reach, self._reach + 1), self._related.n_places // 2
        buckets = steps
        if self._related.n_buckets:
            # in fp32, operation by operation as transformers has it: a distance at the edge of a bucket may fall on either side
            middle = half // 2
            sizes = torch.where((steps < middle) & (steps > -middle), middle - 1, steps.abs())
            widest = torch.log(torch.tensor((self._related.reach - 1) / middle))
            farther = torch.ceil(torch.log(sizes / middle) / widest * (middle - 1)) + middle
            buckets = torch.where(sizes <= middle, steps.float(), farther * steps.sign()).long()
        return (buckets + half).clamp(0, 2 * half - 1).float()


class PlaceRows:
    """Rows of distances [n_places, D] behind their norm, if any, made once for all heads of a layer."""

    def __init__(self, rows: WeightTensor, norm: NormParts | None, eps: float) -> None:
        self.rows, self._norm, self._eps = rows, norm, eps

    @property
    def made_of(self) -> tuple[WeightTensor, ...]:
        """Tensors of the checkpoint, or views of them."""
        if self._norm is None:
            return (self.rows,)
        return (self.rows, self._norm.weight, *(() if self._norm.bias is None else (self._norm.bias,)))

    @cached_property
    def values(self) -> torch.Tensor:
        """fp32."""
        rows = self.rows.read().float()
        if self._norm is None:
            return rows
        bias = None if self._norm.bias is None else self._norm.bias.read().float()
        return torch.nn.functional.layer_norm(rows, rows.shape[1:], self._norm.weight.read().float(), bias, self._eps)


class RelatedTensor(WeightTensor):
    """Rows of distances as one head's projection [d, D] with its bias [d], if any, makes them [n_places, d], times a number."""

    dtype = torch.float32

    def __init__(self, rows: PlaceRows, projection: LinearParts, head: slice, *, scale: float) -> None:
        (self._weight,) = projection.weights
        self._bias = projection.biases[0] if projection.biases else None
        self.name = f"{self._weight.name}[{head.start}:{head.stop} of distances]"
        self.shape = (rows.rows.shape[0], head.stop - head.start)
        seed = rows.rows.random_seed
        self.random_seed = None if seed is None else seed + head.start + 1
        self._rows, self._head, self._scale = rows, head, scale

    @property
    def stored(self) -> tuple[WeightTensor, ...]:
        """What it is made of."""
        parts = (*self._rows.made_of, self._weight, *(() if self._bias is None else (self._bias,)))
        return tuple(one for part in parts for one in part.stored)

    def read(self) -> torch.Tensor:
        """A new tensor."""
        weight = self._weight.read()[self._head].float()
        bias = None if self._bias is None else self._bias.read()[self._head].float()
        return torch.nn.functional.linear(self._rows.values, weight, bias) * self._scale


def by_distance(layer: LayerTensors[Table, Vector, Linear, Heads, Experts], root: str) -> dict[str, Any]:
    """Of `Loader.attention` what scores gain by distance. root: where the layer's attention lies."""
    spec, name = layer.parts.attention, f"{layer.of_model}{layer.names.distances}.weight"
    found: dict[str, Any] = {"distances": None, "related": None}
    if spec.distances is not None:
        table = layer.source.tensor(name, spec.distances.n_buckets, spec.n_heads)
        found["distances"] = DistancesTensor(table, spec.distances)
    if spec.related is not None:
        found["related"] = _related(layer, spec, spec.related, root, name)
    return found


def _related(
    layer: LayerTensors[Table, Vector, Linear, Heads, Experts],
    spec: AttentionLayer,
    related: Related,
    root: str,
    name: str,
) -> RelatedParts:
    """Rows of the model's, of which every layer makes its own by projections of queries and keys, or by those of rows alone."""
    hidden, width = layer.spec.hidden, spec.head_dim
    norm = norm_parts(layer.source, f"{layer.of_model}encoder.LayerNorm", layer.spec) if related.is_normed else None
    rows = PlaceRows(layer.source.tensor(name, related.n_places, hidden), norm, layer.spec.norm_eps)
    q, k = layer.names.qkv[:2] if related.is_shared else layer.names.of_distances
    made, beside = [], [*rows.made_of]
    for one, has_bias in ((k, spec.has_k_bias), (q, True)):
        projection = layer.linear(root, (one,), (spec.n_heads * width,), hidden, has_bias=has_bias)
        beside += [] if related.is_shared else projection.biases
        heads = (slice(head * width, (head + 1) * width) for head in range(spec.n_heads))
        of_heads = (RelatedTensor(rows, projection, head, scale=spec.scale) for head in heads)
        made.append(tuple(LinearParts(weights=(tensor,)) for tensor in of_heads))
    places = PlacesTensor(related, layer.spec.max_context_tokens - 1)
    return RelatedParts(keys=made[0], queries=made[1], places=places, beside=tuple(beside))


def unadapted(qkv: LinearParts, spec: AttentionLayer) -> LinearParts:
    """Projections of q, k and v, of which no adapter changes the first two where rows of distances were made by them, too."""
    if spec.related is None or not spec.related.is_shared:
        return qkv
    q, k, *rest = qkv.weights
    return replace(qkv, weights=(ScaledTensor(q, 1.0), ScaledTensor(k, 1.0), *rest))
