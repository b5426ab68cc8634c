"""From the name of a drafter to one that the executor can run: its checkpoint, whether it fits the model, what it costs.

A drafter is loaded as the model is (backend, threads, formats). One of another vocabulary is refused with both numbers.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from diptych.compute.drafting.draft_store import DraftStore, scratch_blocks
from diptych.compute.drafting.drafter import Drafter, DraftModel, rehearse
from diptych.compute.drafting.head_drafters import EagleDrafter, Fuse, MedusaDrafter, fused, normed
from diptych.compute.drafting.heads import EagleBlueprint, FusionBlueprint, HeadSource, MedusaBlueprint, TargetTensors
from diptych.compute.loading.hub import resolve_model
from diptych.compute.model import Model
from diptych.compute.runner import build, load_model, open_blueprint
from diptych.compute.sampling.sampler import Sampler
from diptych.control.scheduler import Predict
from diptych.cost.drafts.depths import FARTHEST
from diptych.cost.drafts.drafter_trials import DrafterCost
from diptych.cost.drafts.measured import MeasuredDraftPrices
from diptych.cost.drafts.prices import DraftPrices
from diptych.cost.step_time import StepTimeModel
from diptych.engine.calibration_text import calibration_of
from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.words import tokenizer_of
from diptych.ground.clock import Clock
from diptych.ground.config import BALANCED, MODEL_DRAFTERS, ComputeConfig, EngineConfig
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.models.config import read_json
from diptych.models.heads import EagleSpec, MedusaSpec, kind_of_heads, read_eagle, read_medusa

logger = logging.getLogger("diptych.engine")

_LEARNED_ALL, _LEARNED_EVERY = 64, 8  # forwards of a drafter
_REHEARSED_DRAFTS = 4
_REHEARSALS, _REHEARSED_S = 5, 0.1  # at most, and for how long; two at least, the first of which warms
MOST_SEQUENCES = 64  # that drafts are made for in one step; more leave no rows to fill
BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
# the drafters that ship beside a bundled model
BUNDLED_DRAFTERS = {
    "diptych-10m": {"draft": "diptych-1m-draft", "medusa": "diptych-10m-medusa", "eagle": "diptych-10m-eagle"}
}


@dataclass(slots=True, kw_only=True)
class OpenDrafter(ABC):
    """A drafter's weights, before there is a pool to draft for."""

    model: Model
    config: EngineConfig
    kind: str = ""
    times: StepTimeModel = field(default_factory=StepTimeModel)  # of its own forwards
    _n_forwards: int = 0
    _rehearsed: list[tuple[StepShape, float]] | None = None  # in a rehearsal: its forwards

    @property
    def most_drafts(self) -> int:
        """Of one sequence and step."""
        return self.config.scheduler.max_draft_tokens

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
        return self.most_sequences * scratch_blocks(self.config.block_tokens, self.most_drafts) * self.block_bytes

    @property
    @abstractmethod
    def state_width(self) -> int:
        """Of the states that it reads; 0 where it reads none."""

    @abstractmethod
    def _make(self, n_blocks: int, sampler: Sampler, *, clock: Clock) -> Drafter:
        """To draft for a pool of `n_blocks`."""

    def drafter(self, n_blocks: int, sampler: Sampler, *, clock: Clock) -> Drafter:
        """Ready to draft for a pool of `n_blocks`: it has run, so that its first draft takes no longer than others and
        `times` knows what its forwards take where nobody disturbs, the least of some.
        """
        drafter = self._make(n_blocks, sampler, clock=clock)
        rounds: list[list[tuple[StepShape, float]]] = []
        begin_s = clock.now_s()
        while len(rounds) < 2 or (len(rounds) < _REHEARSALS and clock.now_s() - begin_s < _REHEARSED_S):
            self._rehearsed = []
            rehearse(
                drafter, block_tokens=self.config.block_tokens, n_drafts=min(_REHEARSED_DRAFTS, self.most_drafts),
                width=self.state_width, device=self.model.device,
            )  # fmt: skip
            rounds.append(self._rehearsed)
        self._rehearsed = None
        for same in zip(*rounds, strict=True):
            self.times.observe(same[0][0], min(took_s for _, took_s in same))
        self.model.settle()
        return drafter

    @property
    def cost(self) -> DrafterCost:
        """What its drafts cost, as far as its own forwards taught."""
        return DrafterCost(draft_s=self.price_s, most_drafts=self.most_drafts, is_measured=True)

    def price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """Seconds that it takes in a step of this shape for so many drafts of each decode chunk: a forward for each depth."""
        n = sum(depth > 0 for depth in depths)
        return max(depths) * self._forward_s(shape, n) if n else 0.0

    def learn(self, shape: StepShape, measured_s: float) -> None:
        """A forward of it took so long. To learn takes as long as a small head, so of many forwards some are enough."""
        if self._rehearsed is not None:
            self._rehearsed.append((shape, measured_s))
            return
        self._n_forwards += 1
        if self._n_forwards <= _LEARNED_ALL or self._n_forwards % _LEARNED_EVERY == 0:
            self.times.observe(shape, min(measured_s, FARTHEST * self.times.estimate_s(shape)))

    def _forward_s(self, shape: StepShape, n: int) -> float:
        context_tokens = shape.decode_context_tokens // max(1, shape.decode_tokens)
        return self.times.estimate_s(StepShape.decode(batch=n, context_tokens=max(1, context_tokens)))

    def _store(self, n_blocks: int) -> DraftStore:
        return DraftStore(
            self.model,
            n_blocks=n_blocks,
            block_tokens=self.config.block_tokens,
            most_sequences=self.most_sequences,
            most_drafts=self.most_drafts,
        )


@dataclass(slots=True, kw_only=True)
class OpenDraftModel(OpenDrafter):
    """A second model; vocab_size: of the target."""

    vocab_size: int

    @property
    def cost(self) -> DrafterCost:
        """It reads what it has missed of a sequence, too."""
        return replace(super(OpenDraftModel, self).cost, read_s=self.read_s)

    def read_s(self, n_tokens: int) -> float:
        """Seconds to read so many tokens at once."""
        return self.times.estimate_s(StepShape.prefill(batch=1, new_tokens=n_tokens))

    @property
    def state_width(self) -> int:
        """See OpenDrafter."""
        return 0

    def _make(self, n_blocks: int, sampler: Sampler, *, clock: Clock) -> Drafter:
        """See OpenDrafter."""
        store = self._store(n_blocks)
        most_rows = self.config.scheduler.max_step_tokens
        return DraftModel(
            self.model, store, sampler, most_rows=most_rows, clock=clock, observe=self.learn,
            vocab_size=self.vocab_size,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class OpenEagle(OpenDrafter):
    """An EAGLE head; `fusion` is EAGLE-3's fc."""

    eagle: EagleSpec
    blueprint: EagleBlueprint
    fusion: Model | None
    vocab_size: int
    norm_eps: float

    @property
    def cost(self) -> DrafterCost:
        """What it has missed is gone: it begins with a block of the store."""
        return replace(super(OpenEagle, self).cost, begins_every=self.config.block_tokens)

    @property
    def state_width(self) -> int:
        """See OpenDrafter."""
        return self.eagle.target_hidden

    def _make(self, n_blocks: int, sampler: Sampler, *, clock: Clock) -> Drafter:
        """See OpenDrafter."""
        eagle, source = self.eagle, self.blueprint.source
        again: Fuse = _as_is
        if self.fusion is None:
            fuse = normed(self.blueprint.target.norm(), self.norm_eps)
        else:
            if eagle.norms_residual:
                weight = source.tensor("layers.0.hidden_norm.weight", eagle.layer.hidden).read().float()
                eps = eagle.layer.norm_eps
                again = lambda states: F.rms_norm(states, weight.shape, weight.to(states.device), eps)  # noqa: E731
            fuse = fused(self.fusion, self.fusion.make_kv(1, self.config.block_tokens), again)
        tokens_of = None
        if eagle.layer.vocab_size != self.vocab_size:
            offsets = source.integers("d2t", eagle.layer.vocab_size)
            tokens_of = offsets + offsets.new_tensor(range(len(offsets)))
            if int(tokens_of.min()) < 0 or int(tokens_of.max()) >= self.vocab_size:
                raise ConfigError(
                    f"d2t names token {int(tokens_of.max())}; the model's vocabulary has {self.vocab_size}",
                    hint="heads are made for one model and no other",
                )
        return EagleDrafter(
            self.model, self._store(n_blocks), sampler, taps=eagle.taps, fuse=fuse, again=again, tokens_of=tokens_of,
            vocab_size=self.vocab_size, clock=clock, observe=self.learn,
        )  # fmt: skip


def _as_is(states: Any) -> Any:
    return states


@dataclass(slots=True, kw_only=True)
class OpenMedusa(OpenDrafter):
    """Medusa heads, which keep nothing."""

    medusa: MedusaSpec
    fuse: Fuse
    taps: tuple[int, ...]

    @property
    def most_drafts(self) -> int:
        """One of each head."""
        return min(self.medusa.n_heads, self.config.scheduler.max_draft_tokens)

    @property
    def block_bytes(self) -> int:
        """Nothing."""
        return 0

    @property
    def state_width(self) -> int:
        """See OpenDrafter."""
        return self.medusa.hidden

    def _make(self, n_blocks: int, sampler: Sampler, *, clock: Clock) -> Drafter:
        """See OpenDrafter."""
        kv = self.model.make_kv(1, self.config.block_tokens)
        return MedusaDrafter(
            self.model, kv, sampler, n_heads=self.medusa.n_heads, taps=self.taps, fuse=self.fuse, clock=clock,
            observe=self.learn,
        )  # fmt: skip

    def price_s(self, shape: StepShape, depths: Sequence[int]) -> float:
        """One forward, however deep."""
        n = sum(depth > 0 for depth in depths)
        return self._forward_s(shape, n) if n else 0.0


def open_drafters(
    config: EngineConfig, target: Model, *, directory: Path | None = None, tokenizer: Tokenizer | None = None
) -> list[OpenDrafter]:
    """The drafters that `config` names, [] where there is none that runs tensors; `auto` names all that are at hand.

    directory, tokenizer: of the target's checkpoint, where it has one. Raises ConfigError for a drafter that is not there or
    does not fit, LoadError for a checkpoint that cannot be read.
    """
    return [
        _open(kind, folder, config, target, directory, tokenizer) for kind, folder in _named(config, directory).items()
    ]


def _named(config: EngineConfig, directory: Path | None) -> dict[str, Path]:
    """Which drafters are to be opened, and where they lie. `auto`: those that are named, else those beside the model."""
    kind, bundled = config.scheduler.speculate, shipped(directory)
    if kind not in (*MODEL_DRAFTERS, "auto"):
        return {}
    if kind != "auto":
        folder = _folder(config, kind, directory)
        holds = _kind_of(folder)
        if holds not in (kind, "draft"):
            raise ConfigError(
                f"speculate is {kind!r}, and {folder} holds {holds} heads",
                hint=f"--speculate {holds}, or another folder",
            )
        return {kind: folder}
    if config.draft_model is None:
        return {kind: BUNDLED / bundled[kind] for kind in MODEL_DRAFTERS if kind in bundled}
    found: dict[str, Path] = {}
    for name in config.draft_model.split(","):
        folder = resolve_model(name.strip())
        kind = _kind_of(folder)
        if kind in found:
            raise ConfigError(
                f"draft_model names two drafters of the kind {kind}, {found[kind]} and {folder}; auto takes one of each",
                hint="leave one out",
            )
        found[kind] = folder
    return {kind: found[kind] for kind in MODEL_DRAFTERS if kind in found}


def _kind_of(folder: Path) -> str:
    """What a checkpoint drafts as: heads say so in their config, and anything else is a model."""
    if folder.is_file():
        return "draft"
    kind = kind_of_heads(read_json(folder / "config.json"))
    if kind is None and HeadSource(folder).has("fc.weight"):  # EAGLE-1 calls itself a Llama
        return "eagle"
    return kind or "draft"


def _open(
    kind: str, folder: Path, config: EngineConfig, target: Model, directory: Path | None, tokenizer: Tokenizer | None
) -> OpenDrafter:
    config = replace(config, compute=_in_one_process(config.compute))
    if kind == "draft":
        opened = _open_model(config, target, folder, tokenizer)
    else:
        if directory is None:
            raise ConfigError(
                f"speculate is {config.scheduler.speculate!r}, and the model is random weights without a checkpoint; {kind} "
                "heads read its embedding, norm and output head",
                hint="lookup and draft work with every model",
            )
        if folder.is_file():
            raise ConfigError(
                f"the {kind} heads {folder} are a GGUF file; heads are read from safetensors",
                hint="give the folder with config.json and *.safetensors; the model itself may be a GGUF file",
            )
        opened = (_open_eagle if kind == "eagle" else _open_medusa)(config, target, folder, directory)
    opened.kind = kind
    logger.info("drafter loaded kind=%s path=%s parameters=%d", kind, folder, opened.model.n_parameters)
    return opened


def _in_one_process(compute: ComputeConfig) -> ComputeConfig:
    """A drafter runs on the first rank alone: what it guesses is the same, and a small forward is not worth its meetings."""
    threads = None if compute.threads is None else compute.threads // compute.tp
    return replace(compute, tp=1, threads=threads)


def _open_model(config: EngineConfig, target: Model, folder: Path, tokenizer: Tokenizer | None) -> OpenDrafter:
    if tokenizer is not None:
        _refuse_other_words(tokenizer_of(folder), tokenizer, folder)
    is_balancing = config.compute.weights in BALANCED
    model = load_model(
        folder, config.compute, max_context_tokens=config.max_context_tokens, beside=target,
        calibration=calibration_of(config.calibrate, lambda: tokenizer_of(folder)) if is_balancing else None,
    )  # fmt: skip
    if model.spec.n_with_states:
        raise ConfigError(
            f"the draft model {folder} keeps a state of each sequence in {model.spec.n_with_states} of its layers; what a "
            "guess left there cannot be taken back",
            hint="a draft model of attention alone, or --speculate lookup, which works with every model",
        )
    ours, theirs = target.spec.vocab_size, model.spec.vocab_size
    if ours != theirs and (tokenizer is None or tokenizer.vocab_size > min(ours, theirs)):  # padded rows have no words
        raise ConfigError(
            f"the draft model {folder} has a vocabulary of {theirs} tokens; the model's has {ours}",
            hint="a draft model is of the same family and has the same tokenizer",
        )
    return OpenDraftModel(model=model, config=config, vocab_size=ours)


def _open_eagle(config: EngineConfig, target: Model, folder: Path, directory: Path) -> OpenDrafter:
    raw, source = read_json(folder / "config.json"), HeadSource(folder)
    return eagle_of(config, target, raw, source, _shared(directory, config, target), path=str(folder / "config.json"))


def eagle_of(
    config: EngineConfig, target: Model, raw: dict[str, Any], source: HeadSource, shared: TargetTensors, *, path: str
) -> OpenDrafter:
    """The EAGLE head of this config.json and these tensors; path: of the config, for errors. Raises as `open_drafters`."""
    eagle, compute = read_eagle(raw, target.spec, path), _compute_of(config, target)
    blueprint = EagleBlueprint(spec=eagle.layer, hf_config=raw, source=source, eagle=eagle, target=shared)
    fusion = None
    if eagle.version == 3:
        fc = FusionBlueprint(spec=eagle.fusion, hf_config=raw, source=source, eagle=eagle)
        fusion = build(fc, compute, beside=target)
    return OpenEagle(
        model=build(blueprint, compute, beside=target), config=config, eagle=eagle, blueprint=blueprint, fusion=fusion,
        vocab_size=target.spec.vocab_size, norm_eps=target.spec.norm_eps,
    )  # fmt: skip


def _open_medusa(config: EngineConfig, target: Model, folder: Path, directory: Path) -> OpenDrafter:
    raw, source = read_json(folder / "config.json"), HeadSource(folder)
    n_blocks = raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1))
    has_own_head = source.has(f"0.{n_blocks}.weight") or source.has("lm_heads.0.weight")
    medusa = read_medusa(raw, target.spec, str(folder / "config.json"), has_own_head=has_own_head)
    tensors = _shared(directory, config, target)
    blueprint = MedusaBlueprint(spec=medusa.spec, hf_config=raw, source=source, medusa=medusa, target=tensors)
    return OpenMedusa(
        model=build(blueprint, _compute_of(config, target), beside=target), config=config, medusa=medusa,
        fuse=normed(tensors.norm(), target.spec.norm_eps), taps=(target.spec.n_layers - 1,),
    )  # fmt: skip


def _shared(directory: Path, config: EngineConfig, target: Model) -> TargetTensors:
    """What heads share with the model, out of its folder or GGUF file."""
    return TargetTensors(open_blueprint(directory, config.compute).blueprint.source, target.spec)


def _compute_of(config: EngineConfig, target: Model) -> ComputeConfig:
    """Heads are computed as their model is; not in 4 bits, as they are small and drafts are worth the bits."""
    small = "int8" if target.backend_name == "cpu" else "bf16"
    weights = target.weights_format if target.weights_format in ("fp32", "bf16") else small
    return replace(config.compute, backend=target.backend_name, weights=weights, kv=target.kv_format)


def _folder(config: EngineConfig, kind: str, directory: Path | None) -> Path:
    if config.draft_model is not None:
        return resolve_model(config.draft_model)
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


def draft_prices(drafters: Sequence[OpenDrafter], predict_s: Predict, *, has_profile: bool) -> DraftPrices:
    """What drafts cost: by the profile, or where there is none by what steps took alone."""
    prices = DraftPrices if has_profile else MeasuredDraftPrices
    return prices(predict_s, drafters=[one.cost for one in drafters])
