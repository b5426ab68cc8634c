"""How large what enters each projection is over a text, for a balance that sees more than weights say (`compute.balance`).

In trained models some channels of the residual stream are ten times as large as the others whatever the text, and no weight
says so (arXiv 2208.07339, 2211.10438). So the model as it is reads some windows of a text on the torch backend, and each
projection notes the root of the mean square of each of its inputs.

    save_quantised("model", Path("packed"), weights="int8", measure=partial(measured_inputs, windows=windows))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.model import Blueprint
from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.device_codes import Weight
from diptych.compute.ops.torch_loader import TorchLoader
from diptych.compute.ops.torch_ops import TorchOps
from diptych.ground.errors import ConfigError

BLOCK_TOKENS = 32
CPU = torch.device("cpu")


def measured_inputs(
    blueprint: Blueprint,
    windows: Sequence[Sequence[int]],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, torch.Tensor]:
    """fp32 [K] for each tensor that is a projection or a part of one, by its name: the root of the mean square over all tokens.

    windows: token ids of texts, each read from its beginning. The whole model is held in bf16 where the checkpoint is, else in
    fp32. A tensor that no token has met (an expert that none was sent to) is left out. ConfigError for windows
    without a token.
    """
    longest = max((len(window) for window in windows), default=0)
    if longest == 0:
        raise ConfigError("the text to calibrate with has 0 tokens; at least 1 is needed")
    dtype = torch.bfloat16 if blueprint.source.stored_dtype == torch.bfloat16 else torch.float32
    loader = _Naming(CPU, dtype)
    weights = blueprint.load(loader)
    spec, n_blocks = blueprint.spec, -(-longest // BLOCK_TOKENS)
    kv = TorchKVStore(
        heads=[cache.sizes for cache in spec.caches],
        n_blocks=n_blocks,
        block_tokens=BLOCK_TOKENS,
        dtype=dtype,
        device=CPU,
        revision="",
        forms=spec.states,
        n_places=1,
    )
    seen: dict[int, _Seen] = {}
    for number, window in enumerate(windows):
        batch = ForwardBatch(
            token_ids_T=np.array(window, dtype=np.int32),
            query_start_S1=np.array([0, len(window)], dtype=np.int32),
            context_tokens_S=np.array([len(window)], dtype=np.int32),
            block_table_SM=np.arange(n_blocks, dtype=np.int32)[None],
            logits_rows_R=np.arange(len(window), dtype=np.int32),
            states=StatePlaces.of(np.array([-1]), np.array([0])) if kv.n_places else None,
        )
        with torch.no_grad():
            blueprint.forward(_Watching(seen, batch, kv, device=CPU, dtype=dtype), weights)
        progress(number + 1, len(windows))
    return {name: seen[key].size for key, names in loader.names.items() if key in seen for name in names}


class _Seen:
    """What has met one projection."""

    def __init__(self) -> None:
        self._squares: torch.Tensor | float = 0.0
        self._tokens = 0

    def add(self, h: torch.Tensor) -> None:
        """Rows [n, K]."""
        self._squares = self._squares + h.double().square().sum(0)
        self._tokens += len(h)

    @property
    def size(self) -> torch.Tensor:
        """The root of the mean square [K]."""
        return torch.as_tensor(self._squares / self._tokens).sqrt().float()


class _Naming(TorchLoader):
    """Notes which tensors a handle was made of, by the id of its matrix."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.names: dict[int, tuple[str, ...]] = {}

    def _weight(self, tensors: tuple[WeightTensor, ...], *, is_gate: bool = False) -> Weight:
        weight = super()._weight(tensors, is_gate=is_gate)
        self.names[id(weight)] = tuple(tensor.name for tensor in tensors)
        return weight


class _Watching(TorchOps):
    """Notes all rows that a matrix meets."""

    def __init__(self, seen: dict[int, _Seen], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen = seen

    def _multiply(self, h: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if len(h):
            self._seen.setdefault(id(weight), _Seen()).add(h.flatten(0, -2))
        return super()._multiply(h, weight, bias)
