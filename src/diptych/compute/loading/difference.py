"""What a layer of differential attention (arXiv:2410.05258) has beside usual heads: values of two, and what is taken away."""

from __future__ import annotations

import math

import torch

from diptych.compute.loading.layer_tensors import LayerTensors
from diptych.compute.loading.views import OnesTensor, PickedTensor, ScaledTensor
from diptych.compute.ops.contract import Experts, Heads, Linear, LinearParts, NormParts, Table, Vector, WeightTensor
from diptych.models.spec import AttentionLayer


def base_of(layer: int) -> float:
    """What the second half of a layer's heads is multiplied by before anything is learned; the norm behind knows it."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def of_two_heads(qkv: LinearParts, attention: AttentionLayer) -> LinearParts:
    """q, k, and of each KV head the values of two, half of all apart, behind each other: the same for both of them."""
    half, d = attention.n_kv_heads // 2, attention.head_dim
    pairs = torch.arange(2 * half * d).view(2, half, d).transpose(0, 1).reshape(half, 2 * d)
    rows = pairs.repeat(2, 1).reshape(-1)

    def with_both(tensors: tuple[WeightTensor, ...]) -> tuple[WeightTensor, ...]:
        return (*tensors[:2], *(PickedTensor(values, rows) for values in tensors[2:]))

    return LinearParts(weights=with_both(qkv.weights), biases=with_both(qkv.biases))


def load_difference(tensors: LayerTensors[Table, Vector, Linear, Heads, Experts], root: str) -> tuple[float, NormParts]:
    """What the second half of the heads is multiplied by and taken from the first, and the norm of what is left, by head."""
    attention, base = tensors.parts.attention, base_of(tensors.layer)

    def learned(i: int) -> float:
        names = (f"{root}lambda_{kind}{i}" for kind in "qk")
        q, k = (tensors.loader.numbers(tensors.source.tensor(name, attention.head_dim)) for name in names)
        return math.exp(sum(a * b for a, b in zip(q, k, strict=True)))

    norm = NormParts(weight=ScaledTensor(OnesTensor(attention.width), 1.0 - base))
    return learned(1) - learned(2) + base, norm
