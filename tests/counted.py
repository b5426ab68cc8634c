"""How many parameters the engine's loader asks a checkpoint for."""

from __future__ import annotations

import math
from typing import Any

from diptych.compute.loading.decoder import load_decoder
from diptych.compute.loading.random_weights import RandomSource, RandomTensor
from diptych.models.spec import ModelSpec


class _NothingLoader:
    """Takes every tensor and reads none."""

    is_balancing = False

    def numbers(self, tensor: Any) -> tuple[float, ...]:
        return (0.0,) * math.prod(tensor.shape)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _NamesAlone(RandomSource):
    """Tensors without numbers, which would be drawn from a digest of each name."""

    def tensor(self, name: str, *shape: int) -> RandomTensor:
        self._shapes[name] = shape
        return RandomTensor(name, shape, 0)


def loaded_parameters(spec: ModelSpec) -> int:
    """Elements of all tensors that are asked for."""
    source = _NamesAlone(0)
    load_decoder(source, _NothingLoader(), spec)
    return source.n_parameters
