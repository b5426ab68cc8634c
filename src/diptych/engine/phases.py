"""The two phases as an API, for people who build on them or study them.

    phases = TwoPhase("bundled")
    state = phases.prefill(token_ids)        # the whole prompt in parallel: builds the KV cache
    token_id, logits = phases.decode(state)  # one token from the cache: its KV is added, the next logits come back

A `PhaseState` can be inspected (keys and values per layer as [B, H, T, d]), forked, truncated, saved and loaded.
`decode_without_cache` recomputes the whole sequence for each token: the difference is what the cache is for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.kv_store import KVStore
from diptych.compute.loading.quant import CHECKSUMS, checksum, checksums_of
from diptych.engine.load import LoadedModel, opened
from diptych.engine.pool_size import size_pool
from diptych.ground.bounds import Bound, counted, ids, shown
from diptych.ground.config import EngineConfig
from diptych.ground.errors import CapacityError, ConfigError, LoadError, PromptTooLong, RequestError

FORMAT = "diptych-phase-state-2"  # 2: with checksums
_CHUNK = Bound(int, 1, None, "tokens per chunk", is_optional=True)
_KEPT = Bound(int, 1, None, "tokens that stay")


@dataclass(slots=True)
class PhaseState:
    """One sequence between two calls. Every token in `token_ids` has its KV in `block_ids`; made by TwoPhase only.

    logits: [V] fp32, over the token that comes next. owner: whose pool the blocks are of; None once they were given back.
    """

    token_ids: list[int]
    logits: torch.Tensor
    block_ids: list[int] = field(repr=False)
    owner: TwoPhase | None = field(repr=False, compare=False)
    place: int | None = field(default=None, repr=False)  # of its state, where the model has some


class TwoPhase:
    """A model, a KV pool and the two verbs. Blocks are private to their state: forks copy them.

    For one thread. `close` gives everything back at once; `with TwoPhase(...) as phases` does so at its end.
    """

    def __init__(
        self, model: str | Path | LoadedModel = "bundled", config: EngineConfig | None = None, **settings: Any
    ) -> None:
        """Load a checkpoint unless it is loaded. settings: as for `LLM`."""
        self.loaded, config = opened(model, config, settings)
        if config.loras:
            raise ConfigError("loras is set; TwoPhase runs the model as it is", hint="use LLM for adapters")
        self.model = self.loaded.model
        self._owns_model = not isinstance(model, LoadedModel)
        size = size_pool(self.model, config)
        self.max_context_tokens = size.context_tokens
        self._kv: KVStore | None = self.model.make_kv(size.n_blocks, config.block_tokens, size.n_places)
        self._free_block_ids = list(range(size.n_blocks - 1, -1, -1))
        self._free_places = list(range(self._kv.n_places - 1, -1, -1))

    @classmethod
    def from_pretrained(cls, model: str | Path = "bundled", *arguments: Any, **settings: Any) -> TwoPhase:
        """The same by another name, as in `transformers`."""
        return cls(model, *arguments, **settings)

    @property
    def kv(self) -> KVStore:
        """The pool. CapacityError once all was given back."""
        if self._kv is None:
            raise CapacityError("this TwoPhase is closed", hint="make another one")
        return self._kv

    def close(self) -> None:
        """Give everything back: KV memory, threads, weights, rank processes. A model given as a LoadedModel stays loaded.

        A second time does nothing. What is asked of it or its states afterwards raises CapacityError; `free` does nothing.
        """
        if self._kv is None:
            return
        self._kv = None
        if self._owns_model:
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.loaded.tokenizer.encode(text)

    def prefill(self, token_ids: Sequence[int], *, chunk_tokens: int | None = None) -> PhaseState:
        """Compute the KV of a whole prompt, at once or in chunks of `chunk_tokens`, and the logits after it."""
        state = PhaseState(token_ids=[], logits=torch.empty(0), block_ids=[], owner=self)
        try:
            self.extend(state, token_ids, chunk_tokens=chunk_tokens)
        except BaseException:
            self.free(state)
            raise
        return state

    def extend(self, state: PhaseState, token_ids: Sequence[int], *, chunk_tokens: int | None = None) -> None:
        """Add known tokens to a state (a prefill that starts at its end)."""
        token_ids = self._checked(state, token_ids)
        if not token_ids:
            raise RequestError("prompt has 0 tokens; at least 1 is needed")
        size = int(_CHUNK.take("chunk_tokens", chunk_tokens, RequestError) or len(token_ids))
        for start in range(0, len(token_ids), size):
            self._compute(state, list(token_ids[start : start + size]))

    def decode(self, state: PhaseState, token_id: int | None = None) -> tuple[int, torch.Tensor]:
        """Write one token: `token_id`, or the likeliest by `state.logits`. Returns it and the logits [V] after it."""
        self._check_owner(state)
        (chosen,) = self._checked(state, [int(torch.argmax(state.logits)) if token_id is None else token_id])
        self._compute(state, [chosen])
        return chosen, state.logits

    def logits_at_every_position(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] fp32: what the model expects after each token of a text (for measuring its loss)."""
        state = PhaseState(token_ids=[], logits=torch.empty(0), block_ids=[], owner=self)
        token_ids = self._checked(state, token_ids)
        try:
            return self._forward(state, list(token_ids), np.arange(len(token_ids), dtype=np.int32)).clone()
        finally:
            self.free(state)

    def decode_without_cache(self, token_ids: Sequence[int]) -> tuple[int, torch.Tensor]:
        """The naive way: recompute the whole sequence for one token. Returns the likeliest token and its logits [V]."""
        state = self.prefill(token_ids)
        self.free(state)
        return int(torch.argmax(state.logits)), state.logits

    def keys_values(self, state: PhaseState, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [B=1, H=n_kv_heads, T, d] (keys after rotary embedding)."""
        self._check_owner(state)
        spec = self.model.spec
        layer = int(Bound(int, 0, spec.n_layers - 1, "layer").take("layer", layer, RequestError) or 0)
        attention = spec.layers[layer].attention
        if attention.state is not None or attention.is_absent:
            what = "has no attention" if attention.is_absent else "keeps a state in place of keys and values"
            others = f"layers {list(spec.kv_layers)} keep those" if spec.kv_layers else "no layer keeps those"
            raise RequestError(
                f"layer {layer} {what}; {others}",
                param="layer",
            )
        keys_KTd, values_KTd = self.kv.read(spec.kv_place(layer), state.block_ids, len(state.token_ids))
        return keys_KTd[None], values_KTd[None]

    def fork(self, state: PhaseState) -> PhaseState:
        """An independent copy: decoding one does not touch the other."""
        self._check_owner(state)
        child = PhaseState(token_ids=list(state.token_ids), logits=state.logits.clone(), block_ids=[], owner=self)
        try:
            child.block_ids = self._take_blocks(len(state.block_ids))
            self.kv.copy_blocks(list(zip(state.block_ids, child.block_ids, strict=True)))
            if state.place is not None:
                child.place = self._take_place()
                self.kv.write_state(child.place, self.kv.read_state(state.place))
        except BaseException:
            self.free(child)
            raise
        return child

    def truncate(self, state: PhaseState, n_tokens: int) -> None:
        """Forget all but the first n_tokens; the logits after the last one kept are computed again."""
        self._check_owner(state)
        n_tokens = int(_KEPT.take("n_tokens", n_tokens, RequestError) or 0)
        if n_tokens > len(state.token_ids):
            raise RequestError(f"n_tokens is {n_tokens}; the state holds {len(state.token_ids)}", param="n_tokens")
        kept = state.token_ids[:n_tokens]
        again = 0 if self.kv.n_places else n_tokens - 1  # a state cannot be read backwards
        del state.token_ids[again:]
        self._give_back_blocks(state, n_tokens if again else 0)
        self._compute(state, kept[again:])

    def free(self, state: PhaseState) -> None:
        """Give the state's blocks back; nothing can be done with the state afterwards. Freed twice is freed once."""
        if state.owner is not None:
            self._check_owner(state)
        state.token_ids.clear()
        if self._kv is not None:
            self._give_back_blocks(state, 0)
            self._give_back_place(state)
        state.owner = None

    def save(self, state: PhaseState, path: Path | str) -> None:
        """Write tokens, logits, keys and values to a safetensors file, with a checksum of each."""
        self._check_owner(state)
        tensors = {
            "token_ids": torch.tensor(state.token_ids, dtype=torch.int64),
            "logits": state.logits.detach().cpu().contiguous(),
        }
        for layer in range(len(self.model.spec.caches)):
            keys, values = self.kv.read(layer, state.block_ids, len(state.token_ids))
            tensors[f"layers.{layer}.keys"] = keys.detach().cpu().contiguous()
            tensors[f"layers.{layer}.values"] = values.detach().cpu().contiguous().clone()  # latents: the same tensor
        if state.place is not None:
            tensors["state"] = self.kv.read_state(state.place).detach().cpu()
        # the file is renamed into place: a device of that name would be replaced
        if Path(path).exists() and not Path(path).is_file():
            raise RequestError(f"{path} is no regular file; a state is written to one", param="path")
        checksums = json.dumps({name: checksum(tensor) for name, tensor in tensors.items()})
        metadata = {"format": FORMAT, "revision": self.model.revision, CHECKSUMS: checksums}
        try:
            save_file(tensors, str(path), metadata=metadata)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"cannot write the state to {path}: {error}", param="path") from error

    def load_state(self, path: Path | str) -> PhaseState:
        """Read what `save` wrote. Raises LoadError for a damaged file or one of another model."""
        try:
            with safe_open(str(path), framework="pt") as file:
                saved = _Saved(path, file, self.model.revision)
                token_ids = self._saved_token_ids(path, saved.tensor("token_ids"))
                logits = saved.tensor("logits", (self.model.spec.vocab_size,), torch.float32).to(self.model.device)
                state = PhaseState(token_ids=token_ids, logits=logits, block_ids=[], owner=self)
                self._load_blocks(saved, state)
        except (OSError, SafetensorError) as error:
            raise LoadError(f"cannot read the state in {path}: {error}") from error
        return state

    def _saved_token_ids(self, path: Path | str, saved: torch.Tensor) -> list[int]:
        if saved.dtype is not torch.int64 or saved.ndim != 1 or not 1 <= len(saved) <= self.max_context_tokens:
            raise LoadError(
                f"token_ids in {path} is {saved.dtype} of shape {tuple(saved.shape)}; "
                f"1 to {self.max_context_tokens} ids of torch.int64 are needed"
            )
        vocab_size = self.model.spec.vocab_size
        if not 0 <= int(saved.min()) <= int(saved.max()) < vocab_size:
            raise LoadError(f"{path} has token id {int(saved.max())}; ids are between 0 and {vocab_size - 1}")
        return [int(token_id) for token_id in saved]

    def _load_blocks(self, saved: _Saved, state: PhaseState) -> None:
        """Take blocks for the state and fill them; nothing is taken when anything is wrong."""
        state.block_ids = self._take_blocks(-(-len(state.token_ids) // self.kv.block_tokens))
        try:
            for layer in range(len(self.model.spec.caches)):
                keys, values = (
                    saved.tensor(f"layers.{layer}.{name}", (len(one), len(state.token_ids), one.shape[2]), one.dtype)
                    for name, one in zip(("keys", "values"), self.kv.read(layer, [0], 1), strict=True)
                )
                self.kv.write(layer, state.block_ids, keys, values)
            if self.kv.n_places:
                state.place = self._take_place()
                sample = self.kv.read_state(state.place)
                self.kv.write_state(state.place, saved.tensor("state", tuple(sample.shape), sample.dtype))
        except BaseException:
            self._give_back_blocks(state, 0)
            self._give_back_place(state)
            raise

    def _check_owner(self, state: PhaseState) -> None:
        """A freed state has no blocks, and the blocks of another pool hold other sequences here."""
        if not isinstance(state, PhaseState):
            raise RequestError(f"state is {shown(state)}; it must be one that prefill, fork or load_state gave")
        if state.owner is None:
            raise RequestError("the state was freed; nothing of it is left", hint="fork a state to keep a copy of it")
        if state.owner is not self:
            hint = "save it there and load it here"
            raise RequestError("the state belongs to another TwoPhase, in whose pool its blocks lie", hint=hint)

    def _checked(self, state: PhaseState, token_ids: Sequence[int]) -> tuple[int, ...]:
        self._check_owner(state)
        checked = ids("prompt", token_ids, RequestError, n_ids=self.model.spec.vocab_size)
        total = len(state.token_ids) + len(checked)
        if total > self.max_context_tokens:
            raise PromptTooLong(
                f"the sequence would have {counted(total, 'token')}; at most {self.max_context_tokens} fit"
            )
        return checked

    def _compute(self, state: PhaseState, token_ids: list[int]) -> None:
        state.logits = self._forward(state, token_ids, np.array([len(token_ids) - 1], dtype=np.int32))[0].clone()

    def _forward(self, state: PhaseState, token_ids: list[int], logits_rows_R: np.ndarray) -> torch.Tensor:
        start, end = len(state.token_ids), len(state.token_ids) + len(token_ids)
        missing = -(-end // self.kv.block_tokens) - len(state.block_ids)
        state.block_ids += self._take_blocks(max(0, missing))
        batch = ForwardBatch(
            token_ids_T=np.array(token_ids, dtype=np.int32),
            query_start_S1=np.array([0, end - start], dtype=np.int32),
            context_tokens_S=np.array([end], dtype=np.int32),
            block_table_SM=np.array([state.block_ids], dtype=np.int32),
            logits_rows_R=logits_rows_R,
            states=self._places_of(state, start) if self.kv.n_places else None,
        )
        logits_RV = self.model.forward(batch, self.kv)
        state.token_ids += token_ids
        return logits_RV

    def _places_of(self, state: PhaseState, start: int) -> StatePlaces:
        if state.place is None:
            state.place = self._take_place()
        return StatePlaces.of(np.array([state.place if start else -1]), np.array([state.place]))

    def _take_place(self) -> int:
        if not self._free_places:
            raise CapacityError(
                f"all {self.kv.n_places} places for states of sequences are taken",
                hint="free states that are no longer needed, or raise kv_memory_bytes",
            )
        return self._free_places.pop()

    def _give_back_place(self, state: PhaseState) -> None:
        if state.place is not None:
            self._free_places.append(state.place)
            state.place = None

    def _take_blocks(self, n_blocks: int) -> list[int]:
        if n_blocks > len(self._free_block_ids):
            raise CapacityError(
                f"{n_blocks} KV blocks are needed; {len(self._free_block_ids)} of {self.kv.n_blocks} are free",
                hint="free states that are no longer needed, or raise kv_memory_bytes",
            )
        return [self._free_block_ids.pop() for _ in range(n_blocks)]

    def _give_back_blocks(self, state: PhaseState, n_tokens: int) -> None:
        kept = -(-n_tokens // self.kv.block_tokens)
        self._free_block_ids += reversed(state.block_ids[kept:])
        del state.block_ids[kept:]


class _Saved:
    """An open file that `save` wrote for a model of that revision. Raises LoadError where it is not."""

    def __init__(self, path: Path | str, file: Any, revision: str) -> None:
        self._path, self._file = path, file
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise LoadError(f"{path} is not a saved state (format {metadata.get('format')!r}; {FORMAT!r} is needed)")
        if metadata.get("revision") != revision:
            raise LoadError(
                f"{path} was saved by another model or format: {json.dumps(metadata.get('revision'))}",
                hint="a state can only be loaded by the very model, weights and KV format that made it",
            )
        try:
            self._checksums = checksums_of(metadata)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise LoadError(f"{path} has no list of checksums: {error}", hint="save the state again") from error

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, which must be what `save` writes for this model, with no bit changed."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        if (shape is not None and tuple(tensor.shape) != shape) or (dtype is not None and tensor.dtype is not dtype):
            raise LoadError(
                f"{name} in {self._path} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                f"{dtype} of shape {shape} is needed"
            )
        if checksum(tensor) != self._checksums.get(name):
            raise LoadError(
                f"{name} in {self._path} does not have its checksum: the file was damaged", hint="save the state again"
            )
        return tensor
