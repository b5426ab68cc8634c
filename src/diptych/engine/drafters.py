"""From the name of a drafter to one that the executor can run: its checkpoint, whether it fits the model, what it costs.

A drafter is loaded as the model is (backend, threads, formats). One of another vocabulary is refused with both numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diptych.compute.draft_store import DraftStore, scratch_blocks
from diptych.compute.drafter import Drafter, DraftModel
from diptych.compute.model import Model
from diptych.compute.runner import load_model
from diptych.compute.sampler import Sampler
from diptych.compute.weights import resolve_model_dir
from diptych.cost.step_time import StepTimeModel
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.clock import Clock
from diptych.ground.config import MODEL_DRAFTERS, EngineConfig
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape

logger = logging.getLogger("diptych.engine")

MOST_SEQUENCES = 64  # that drafts are made for in one step; more leave no rows to fill
BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
# the drafters that ship beside a bundled model
BUNDLED_DRAFTERS = {"diptych-10m": {"draft": "diptych-1m-draft"}}


@dataclass(slots=True)
class OpenDrafter:
    """A drafter's weights, before there is a pool to draft for."""

    kind: str
    model: Model
    config: EngineConfig
    times: StepTimeModel = field(default_factory=StepTimeModel)  # of its own forwards

    @property
    def block_bytes(self) -> int:
        """What a block of the pool takes in the drafter's own store."""
        return self.model.kv_bytes_per_block(self.config.block_tokens)

    @property
    def most_sequences(self) -> int:
        """For how many sequences it drafts in one step."""
        return min(self.config.scheduler.max_running_sequences or MOST_SEQUENCES, MOST_SEQUENCES)

    @property
    def scratch_bytes(self) -> int:
        """What its store takes beside the pool's blocks."""
        per_sequence = scratch_blocks(self.config.block_tokens, self.config.scheduler.max_draft_tokens)
        return self.most_sequences * per_sequence * self.block_bytes

    def drafter(self, n_blocks: int, sampler: Sampler, *, clock: Clock) -> Drafter:
        """Ready to draft for a pool of `n_blocks`."""
        scheduler = self.config.scheduler
        store = DraftStore(
            self.model,
            n_blocks=n_blocks,
            block_tokens=self.config.block_tokens,
            most_sequences=self.most_sequences,
            most_drafts=scheduler.max_draft_tokens,
        )
        self.model.warm_up(store.kv)
        return DraftModel(
            self.model, store, sampler, most_rows=scheduler.max_step_tokens, clock=clock, observe=self.times.observe
        )

    def price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """Seconds that it takes in a step of this shape for so many drafts of each decode chunk: a forward for each depth."""
        n = sum(depth > 0 for depth in depths)
        if n == 0:
            return 0.0
        context_tokens = shape.decode_context_tokens // max(1, shape.decode_tokens)
        return max(depths) * self.times.estimate_s(StepShape.decode(batch=n, context_tokens=max(1, context_tokens)))


def open_drafter(
    config: EngineConfig, target: Model, *, directory: Path | None = None, tokenizer: Tokenizer | None = None
) -> OpenDrafter | None:
    """The drafter that `config` names, None where that is none that runs tensors. `auto`: the best that ships with the model.

    directory, tokenizer: of the target's checkpoint, where it has one. Raises ConfigError for a drafter that is not there or
    does not fit, LoadError for a checkpoint that cannot be read.
    """
    kind = config.scheduler.speculate
    if kind == "auto":
        kind = next((one for one in ("eagle", "medusa", "draft") if one in shipped(directory)), kind)
    if kind not in MODEL_DRAFTERS:
        return None
    folder = _folder(config, kind, directory)
    if tokenizer is not None:
        _refuse_other_words(Tokenizer.from_dir(folder), tokenizer, folder)
    model = load_model(folder, config.compute, max_context_tokens=config.max_context_tokens, beside=target)
    ours, theirs = target.spec.vocab_size, model.spec.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"the draft model {folder} has a vocabulary of {theirs} tokens; the model's has {ours}",
            hint="a draft model is of the same family and has the same tokenizer",
        )
    logger.info("drafter loaded kind=%s path=%s parameters=%d", kind, folder, model.n_parameters)
    return OpenDrafter(kind, model, config)


def _folder(config: EngineConfig, kind: str, directory: Path | None) -> Path:
    if config.draft_model is not None:
        return resolve_model_dir(config.draft_model)
    bundled = shipped(directory)
    if kind not in bundled:
        raise ConfigError(
            f"speculate is {kind!r}, and no draft model is given",
            hint="name its checkpoint: draft_model=..., --draft-model",
        )
    return BUNDLED / bundled[kind]


def shipped(directory: Path | None) -> Mapping[str, str]:
    """The drafters beside a model, by kind."""
    if directory is None or directory.parent != BUNDLED:
        return {}
    named = BUNDLED_DRAFTERS.get(directory.name, {})
    return {kind: name for kind, name in named.items() if (BUNDLED / name).is_dir()}


def _refuse_other_words(theirs: Tokenizer, ours: Tokenizer, folder: Path) -> None:
    """Raise ConfigError unless every token id says the same in both."""
    if theirs.vocab_size != ours.vocab_size:
        raise ConfigError(
            f"the tokenizer of the draft model {folder} has {theirs.vocab_size} tokens; the model's has {ours.vocab_size}",
            hint="a draft model has the same tokenizer",
        )
    differing = [i for i in range(ours.vocab_size) if ours.token(i) != theirs.token(i)]
    if differing:
        first = differing[0]
        raise ConfigError(
            f"the tokenizer of the draft model {folder} differs in {len(differing)} of {ours.vocab_size} tokens: "
            f"id {first} is {theirs.token(first)!r}, and {ours.token(first)!r} in the model's",
            hint="a draft model has the same tokenizer",
        )
