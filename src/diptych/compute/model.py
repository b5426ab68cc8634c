"""A loaded model as the engine sees it, and the blueprint a backend builds one from.

A backend module offers one function, `build_<backend>_model(blueprint, config) -> Model`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal, overload

import numpy as np
import torch

from diptych.compute.adapters import Adapter
from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.kv_store import KVStore
from diptych.compute.loading.decoder import load_decoder
from diptych.compute.loading.naming import family_named, head_name, prefix_of, table_name
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Loader, Ops, Stream, Table, Taps, Vector
from diptych.compute.ops.cpus import Placement
from diptych.compute.sampling.drawing import Weighed
from diptych.compute.walk.decoder import run_decoder
from diptych.compute.walk.layer_weights import DecoderWeights
from diptych.ground.errors import EngineError, told_of
from diptych.ground.version import VERSION
from diptych.models.config import HfConfig
from diptych.models.read import family_of, read_model
from diptych.models.spec import ModelSpec
from diptych.models.stored import unused_names

logger = logging.getLogger("diptych.compute")

# Of each logits row the likeliest token, the lowest id among equals, and its logit; NaN where the row holds one.
Best = tuple[list[int], list[float]]


class Want(Enum):
    """What a forward is for."""

    BEST = auto()
    LOGITS = auto()
    HIDDEN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Everything about a model but its numbers: its shape, the config behind it, and where the tensors come from."""

    spec: ModelSpec
    hf_config: dict[str, Any]
    source: Source

    def load(
        self, loader: Loader[Table, Vector, Linear, Heads, Experts]
    ) -> DecoderWeights[Table, Vector, Linear, Heads, Experts]:
        """Hand every tensor to the loader and refuse a checkpoint that holds more than the config calls for."""
        with told_of(self.source.origin):
            return self._load(loader)

    def _load(
        self, loader: Loader[Table, Vector, Linear, Heads, Experts]
    ) -> DecoderWeights[Table, Vector, Linear, Heads, Experts]:
        weights = load_decoder(self.source, loader, self.spec)
        loader.finish()
        # layers behind the last are there to draft
        decoder = HfConfig(self.hf_config).decoder
        config = self.hf_config if decoder is None else decoder.raw
        n_behind = config.get("num_nextn_predict_layers") or self.hf_config.get("num_nextn_predict_layers") or 0
        behind = tuple(f".layers.{self.spec.n_blocks + i}." for i in range(int(n_behind)))
        tied = (f"{family_named(self.spec).names.head}.weight",) if self.spec.is_tied else ()
        ignored = (*unused_names(self.spec), *tied, *behind)
        self.source.finish(lambda name: any(part in name for part in ignored))
        return weights

    def forward(
        self,
        ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
        weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
    ) -> Hidden:
        """The family's forward in the vocabulary of `ops`; logits [R, V]."""
        return run_decoder(ops, self.spec, weights)

    @property
    def has_multiplied(self) -> bool:
        """Whether a converter has multiplied weights by what the checkpoint's config says (Falcon-H1 in GGUF files)."""
        return family_named(self.spec).has_pairs and self.source.is_plain

    def revisions(self, *decides: Sequence[str]) -> tuple[str, ...]:
        """For each of these SHA-256 over config, tensors, this version, and what else decides the bits: formats, backend,
        kernels, device. The files are sampled once.

        Two models of equal revision write equal keys and values for equal tokens. Call after `load`.
        """
        files = hashlib.sha256(json.dumps(self.hf_config, sort_keys=True).encode())
        files.update(self.source.fingerprint().encode())
        # which rotary frequencies the context length chose
        files.update(repr([layer.attention.rope for layer in self.spec.layers]).encode())
        digests = []
        for each in decides:
            digest = files.copy()
            digest.update("\n".join((VERSION, *each)).encode())
            digests.append(digest.hexdigest())
        return tuple(digests)


def draw_blueprint(
    hf_config: dict[str, Any],
    source: Source,
    *,
    path: str = "config.json",
    max_context_tokens: int | None = None,
    longrope: str = "auto",
) -> Blueprint:
    """The blueprint of a config whose family the engine runs; LoadError, UnsupportedModel for any other."""
    config = HfConfig(hf_config, path=path)
    family_of(config)
    spec = read_model(config, max_context_tokens, longrope=longrope)
    rope = spec.attention.rope
    if rope is not None and rope.divisors_name is not None:
        logger.info(
            "longrope factors=%s chosen=%s trained_tokens=%d max_context_tokens=%d",
            rope.divisors_name, "by max_context_tokens" if longrope == "auto" else "asked for", rope.trained_tokens,
            max_context_tokens or spec.max_context_tokens,
        )  # fmt: skip
    if spec.is_tied and spec.has_head and _holds_another_head(source, spec):
        logger.warning(
            "%s ties the output projection to the embedding, but the files hold an lm_head with other values: "
            "the files' own is used, as transformers does", path,
        )  # fmt: skip
        spec = replace(spec, is_tied=False)
    return Blueprint(spec=_with_some_head(source, spec), hf_config=hf_config, source=source)


def _with_some_head(source: Source, spec: ModelSpec) -> ModelSpec:
    """Of a model without an output projection, the embedding stands where it would be and nobody draws from it."""
    if spec.has_head and (prefix_of(source, spec) or spec.is_tied or source.has(head_name(source, spec))):
        return spec
    logger.info("the checkpoint has no output projection: it gives embeddings, scores or labels, and writes no text")
    return replace(spec, is_tied=True, has_head=False)


def _holds_another_head(source: Source, spec: ModelSpec) -> bool:
    return source.differ(head_name(source, spec), table_name(source, spec))


class Model(ABC):
    """A model ready to run. One forward at a time."""

    spec: ModelSpec
    hf_config: dict[str, Any]
    backend_name: str
    keeps_bits: (
        bool  # whether an answer's bits depend on nothing but what the revision is of: not on the batch, not on chunks
    )
    weights_format: str  # fp32 | bf16 | int8 | int4 | a kept format's name: of most weights of the layers
    formats: Mapping[str, int]  # weights of the layers by format
    expert_formats: Mapping[str, int]  # those of experts among them
    head_format: str  # of the output projection
    kv_format: str
    revision: str
    lineage: str  # as the revision, but of what the kernels do alike: its bits may differ in the last places
    weight_bytes: int  # all but an embedding table that is not the head, of which a step reads single rows
    n_parameters: int
    threads: int
    instruction_set: str  # whose kernels compute it; part of the revision
    placement: Placement  # of the kernels' threads; no CPUs where the backend leaves that to the system
    device: torch.device  # where logits are

    @abstractmethod
    def kv_bytes_per_block(self, block_tokens: int) -> int:
        """Bytes of one block in all layers."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence in all layers; 0 where the model has none."""

    @abstractmethod
    def make_kv(self, n_blocks: int, block_tokens: int, n_places: int = 1) -> KVStore:
        """An empty cache of this model; CapacityError when there is no memory for it. n_places: for states, if it has any."""

    @overload
    def forward(
        self,
        batch: ForwardBatch,
        kv: KVStore,
        want: Literal[Want.LOGITS, Want.HIDDEN] = Want.LOGITS,
        *,
        given: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        batch: ForwardBatch,
        kv: KVStore,
        want: Literal[Want.BEST],
        *,
        given: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> Best: ...

    @abstractmethod
    def forward(
        self,
        batch: ForwardBatch,
        kv: KVStore,
        want: Want = Want.LOGITS,
        *,
        given: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor | Best:
        """What is wanted of the batch's logits rows; writes the batch's keys and values to kv.

        LOGITS: [R, V] fp32 on `device`, valid until the next forward; to be drawn from by `argmax` and `weigh`.
        BEST: of each row the likeliest token, for steps that want nothing else; a backend may get by without logits.
        HIDDEN: [R, D] fp32 on `device`, the final norm's output, of which the head makes the logits. Where the head is
        int8 its channels are those of the balanced norm (`compute.loading.balance`), each the checkpoint's over a constant.
        given: [T, width] fp32, what a walk with an input reads. taps: what else is handed out, of a decoder the residual stream
        behind the layers of these numbers; not with HIDDEN.
        """

    def warm_up(self, kv: KVStore) -> None:
        """Run one token over block 0 and the first place of a state, whose contents are lost.

        A first step pays for threads, room for activations, pages of code and of the cache: milliseconds to tens of them,
        which belong to loading and not to the first request's prefill. A prefill before it made the first request no
        faster, and a start 40 to 70 ms longer over 0.9 GB of weights (hundreds on a machine that others use).
        """
        chunk = ForwardBatch(
            token_ids_T=np.zeros(1, dtype=np.int32),
            query_start_S1=np.array([0, 1], dtype=np.int32),
            context_tokens_S=np.ones(1, dtype=np.int32),
            block_table_SM=np.zeros((1, 1), dtype=np.int32),
            logits_rows_R=np.zeros(int(self.spec.has_head), dtype=np.int32),  # of a model that only gives states none
            states=StatePlaces.of(np.array([-1]), np.zeros(1)) if kv.n_places else None,
        )
        self.forward(chunk, kv, Want.BEST)

    @abstractmethod
    def settle(self, *, waits: bool = False) -> None:
        """The start is over: weights in a mapped file may move to memory, beside the steps, which see no difference.

        waits: until they have, as who measures steps wants them alone.
        """

    @abstractmethod
    def argmax(self, logits_RV: torch.Tensor) -> Sequence[int]:
        """The likeliest id of each row of logits on `device`, the lowest among equals; that of a NaN where there is one."""

    @abstractmethod
    def weigh(
        self, logits_RV: np.ndarray, rows: Sequence[int], temperatures: Sequence[float], quantiles: Sequence[float]
    ) -> Sequence[Weighed]:
        """For each named row of logits on the CPU a token of softmax(logits / temperature), by inverse CDF at its quantile."""

    def on_loss(self, tell: Callable[[EngineError], object]) -> Callable[[], object]:
        """Have `tell` called, on any thread, when a process that computes a part of this model is gone; also without a step.

        Returns the function that ends it.
        """
        return lambda: None

    @abstractmethod
    def add_adapter(self, adapter: Adapter) -> int:
        """Take an adapter in, between forwards; its number in `ForwardBatch.adapters_S`. LoadError where it does not fit."""

    @abstractmethod
    def drop_adapter(self, number: int) -> None:
        """Give an adapter's memory back, between forwards. Its number may be given to another."""

    @abstractmethod
    def adapter_bytes(self, number: int) -> int:
        """Memory that an adapter takes."""

    @abstractmethod
    def close(self) -> None:
        """Give the weights' memory back; the model is not used afterwards."""
