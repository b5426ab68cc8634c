"""A loaded model as the engine sees it, and the blueprint a backend builds one from.

A backend module offers one function, `build_<backend>_model(blueprint, config) -> Model`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.decoder import DecoderWeights, family_named, head_name, load_decoder, prefix_of, run_decoder
from diptych.compute.kv_store import KVStore
from diptych.compute.ops.contract import Handle, Loader, Ops
from diptych.compute.ops.cpus import Placement
from diptych.compute.sampler import Weigh
from diptych.compute.weights import Checkpoint, RandomSource
from diptych.models.config import HfConfig
from diptych.models.read import read_model, refuse_unrun
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.compute")

# Of each logits row the likeliest token, the lowest id among equals, and its logit; NaN where the row holds no number.
Best = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Everything about a model but its numbers: its shape, the config behind it, and where the tensors come from."""

    spec: ModelSpec
    hf_config: dict[str, Any]
    source: Checkpoint | RandomSource

    def load(self, loader: Loader) -> DecoderWeights:
        """Hand every tensor to the loader and refuse a checkpoint that holds more than the config calls for."""
        weights = load_decoder(self.source, loader, self.spec)
        if isinstance(self.source, Checkpoint):
            ignored = (*family_named(self.spec).ignored, *(("lm_head.weight",) if self.spec.is_tied else ()))
            self.source.refuse_unused(lambda name: any(part in name for part in ignored))
            self.source.finish()
        return weights

    def forward(self, ops: Ops, weights: DecoderWeights) -> Handle:
        """The family's forward in the vocabulary of `ops`; logits [R, V]."""
        return run_decoder(ops, self.spec, weights)

    def revision(self, *formats: str) -> str:
        """SHA-256 over config, tensors and the formats that decide the numbers (weights, KV, backend, ...).

        Two models of equal revision write equal keys and values for equal tokens. Call after `load`.
        """
        digest = hashlib.sha256(json.dumps(self.hf_config, sort_keys=True).encode())
        digest.update(self.source.fingerprint().encode())
        # which rotary frequencies the context length chose
        digest.update(repr([layer.attention.rope for layer in self.spec.layers]).encode())
        digest.update(" ".join(formats).encode())
        return digest.hexdigest()


def draw_blueprint(
    hf_config: dict[str, Any],
    source: Checkpoint | RandomSource,
    *,
    path: str = "config.json",
    max_context_tokens: int | None = None,
    longrope: str = "auto",
) -> Blueprint:
    """The blueprint of a config whose family the engine runs; LoadError, UnsupportedModel for any other."""
    config = HfConfig(hf_config, path=path)
    refuse_unrun(config)
    spec = read_model(config, max_context_tokens, longrope=longrope)
    rope = spec.attention.rope
    if rope is not None and rope.divisors_name is not None:
        logger.info(
            "longrope factors=%s chosen=%s trained_tokens=%d max_context_tokens=%d",
            rope.divisors_name, "by max_context_tokens" if longrope == "auto" else "asked for", rope.trained_tokens,
            max_context_tokens or spec.max_context_tokens,
        )  # fmt: skip
    if spec.is_tied and _holds_another_head(source, spec):
        logger.warning(
            "%s ties the output projection to the embedding, but the files hold an lm_head with other values: "
            "the files' own is used, as transformers does", path,
        )  # fmt: skip
        spec = replace(spec, is_tied=False)
    return Blueprint(spec=spec, hf_config=hf_config, source=source)


def _holds_another_head(source: Checkpoint | RandomSource, spec: ModelSpec) -> bool:
    prefix = prefix_of(source, spec)
    name = head_name(source, prefix)
    if isinstance(source, RandomSource) or not source.has(name) or not source.has(f"{prefix}embed_tokens.weight"):
        return False
    head, table = source.read(name), source.read(f"{prefix}embed_tokens.weight")
    return head.dtype != table.dtype or not torch.equal(head, table)


class Model(ABC):
    """A model ready to run. One forward at a time."""

    spec: ModelSpec
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
