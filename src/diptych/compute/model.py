"""A loaded model as the engine sees it, and the blueprint a backend builds one from.

A backend module offers one function, `build_<backend>_model(blueprint, config) -> Model`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore
from diptych.compute.models.decoder import DecoderSpec, DecoderWeights, Family, load_decoder, run_decoder
from diptych.compute.ops.contract import Handle, Loader, Ops
from diptych.compute.ops.cpus import Placement
from diptych.compute.sampler import Weigh
from diptych.compute.weights import Checkpoint, RandomSource

# Of each logits row the likeliest token, the lowest id among equals, and its logit; NaN where the row holds no number.
Best = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Everything about a model but its numbers: checked config, family, and where the tensors come from."""

    family: Family
    spec: DecoderSpec
    hf_config: dict[str, Any]
    source: Checkpoint | RandomSource

    def load(self, loader: Loader) -> DecoderWeights:
        """Hand every tensor to the loader and refuse a checkpoint that holds more than the config calls for."""
        weights = load_decoder(self.family, self.source, loader, self.spec)
        if isinstance(self.source, Checkpoint):
            has_own_head = not self.spec.is_tied
            ignored = self.family.ignored if has_own_head else (*self.family.ignored, "lm_head.weight")
            self.source.refuse_unused(lambda name: any(part in name for part in ignored))
            self.source.finish()
        return weights

    def forward(self, ops: Ops, weights: DecoderWeights) -> Handle:
        """The family's forward in the vocabulary of `ops`; logits [R, V]."""
        return run_decoder(self.family, ops, self.spec, weights)

    def revision(self, *formats: str) -> str:
        """SHA-256 over config, tensors and the formats that decide the numbers (weights, KV, backend, ...).

        Two models of equal revision write equal keys and values for equal tokens. Call after `load`.
        """
        digest = hashlib.sha256(json.dumps(self.hf_config, sort_keys=True).encode())
        digest.update(self.source.fingerprint().encode())
        # which rotary frequencies the context length chose
        digest.update(repr([layer.rope for layer in self.spec.attention]).encode())
        digest.update(" ".join(formats).encode())
        return digest.hexdigest()


class Model(ABC):
    """A model ready to run. One forward at a time."""

    spec: DecoderSpec
    hf_config: dict[str, Any]
    backend_name: str
    weights_format: str  # fp32 | bf16 | int8 | int4, of the layers
    head_format: str  # of the output projection
    kv_format: str
    revision: str
    weight_bytes: int  # read by a decode step: all but an embedding table that is not the head
    n_parameters: int
    threads: int
    placement: Placement  # of the kernels' threads; no CPUs where the backend leaves that to the system
    device: torch.device  # where logits are
    argmax: Callable[[torch.Tensor], Sequence[int]] | None = None  # a faster arg-max of the backend, if it has one
    weigh: Weigh | None = None  # a faster softmax and draw of the backend, if it has one
    # forward for steps that want nothing but the likeliest tokens, if the backend can do without writing the logits
    forward_best: Callable[[ForwardBatch, KVStore], Best] | None = None

    @abstractmethod
    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block in all layers."""

    @abstractmethod
    def make_kv(self, n_blocks: int, block_tokens: int) -> KVStore:
        """An empty cache of this model; CapacityError when there is no memory for it."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv: KVStore) -> torch.Tensor:
        """Logits [R, V] fp32 of the batch's logits rows on `device`; writes the batch's keys and values to kv.

        The logits are valid until the next forward.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the weights' memory back; the model is not used afterwards."""
