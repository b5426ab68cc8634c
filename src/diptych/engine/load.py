"""From a model's name to an engine ready to step: checkpoint, tokenizer, template, KV pool (`pool_size`), scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from diptych.compute.loading.hub import resolve_model
from diptych.compute.pooler import Pooler
from diptych.compute.runner import Model, load_model
from diptych.compute.sampling.sampler import Sampler
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.control.loop import EngineCore
from diptych.control.scheduler import Predict
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.places import MAX_STEP_S, Places, beside_states, places
from diptych.cost.step_time import StepTimeModel
from diptych.engine.adapters import Adapters
from diptych.engine.calibration_text import calibration_of
from diptych.engine.drafters import draft_prices, open_drafters
from diptych.engine.drafting import join_drafters
from diptych.engine.encoder import Encoder, open_encoder
from diptych.engine.engine import Engine
from diptych.engine.executor import ModelExecutor
from diptych.engine.model_profile import local_predictor, profile_damage
from diptych.engine.pool_size import KV_MEMORY_SHARE, POOL_CONTEXTS, blocks_for, check_pool, size_pool
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.words import words_of
from diptych.ground.bounds import shown
from diptych.ground.clock import Clock, MonotonicClock
from diptych.ground.config import BALANCED, BY_TEXT, SETTINGS, BlockConfig, ComputeConfig, EngineConfig, engine_config
from diptych.ground.errors import ConfigError, LoadError
from diptych.ground.shape import StepShape
from diptych.models.files import no_model
from diptych.models.named import SHAPES
from diptych.stepper import Observe

logger = logging.getLogger("diptych.engine")

BUNDLED_MODEL = "diptych-10m"
# a full step of prefill that is predicted to take longer is worth a word: it holds every running stream
LONG_STEP_S = 1.0
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class LoadedModel:
    """A model with its words: what `LLM`, `AsyncLLM` and `TwoPhase` start from."""

    name: str
    directory: Path  # or the GGUF file
    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    checkpoint_s: float  # to read and pack the weights
    load_s: float  # until the first step can be run
    clock: Clock
    compute: ComputeConfig  # how it was asked to be loaded; a drafter is loaded alike
    calibrate: str = BY_TEXT  # likewise
    encoder: Encoder | None = None  # how it embeds or scores, where it does

    def must_write(self, why: str) -> None:
        """Raise ConfigError for a model that draws no tokens. why: what asks it to, the beginning of a sentence."""
        if not self.model.spec.has_head:
            raise ConfigError(
                f"{why} needs a model that writes, and {self.name} has no output projection: it embeds or scores texts",
                hint="name a model that writes",
            )


def bundled_dir(name: str = BUNDLED_MODEL) -> Path:
    """The folder of a model that ships with the package."""
    return Path(__file__).resolve().parent.parent / "bundled" / name


def model_dir(name: str) -> Path:
    """The folder of 'bundled', of a local path or of a hub name, or a GGUF file. LoadError says what the name is instead."""
    try:
        Path(name).expanduser().stat()
        is_name = bool(name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        is_name = True  # of the hub, or told below what is wrong with it
    except (OSError, RuntimeError, ValueError):  # too long, a home that nobody has, no Unicode text
        is_name = False
    if not is_name:
        raise LoadError(f"model is {shown(name)}; it must be 'bundled', the path of a model, or a name on the hub")
    if name == "bundled":
        return bundled_dir()
    try:
        path = resolve_model(name)
    except LoadError as error:
        if name not in SHAPES:
            raise
        hint = f"{name} is a shape: bench and lab take it, with random weights, as --shape {name}"
        raise LoadError(error.message, hint=hint) from error
    if path.is_dir() and not (path / "config.json").exists():
        raise no_model(path)
    return path


def load(
    name: str, config: EngineConfig, *, progress: Progress | None = None, clock: Clock | None = None
) -> LoadedModel:
    """Load `name`: 'bundled', a folder, a GGUF file, or a hub name. Raises LoadError, UnsupportedModel or ConfigError."""
    clock = clock or MonotonicClock()
    begin_s = clock.now_s()
    directory = model_dir(name)
    words = cache(lambda: words_of(directory))
    is_balancing = config.compute.weights in BALANCED
    model = load_model(
        directory,
        config.compute,
        max_context_tokens=config.max_context_tokens,
        progress=progress,
        check=lambda spec: check_pool(spec, config),
        meanwhile=words,
        calibration=calibration_of(config.calibrate, lambda: words()[0]) if is_balancing else None,
    )
    _refuse_unread_rows(config.compute.activations, model)
    tokenizer, template = words()
    encoder = open_encoder(directory, model.hf_config, tokenizer, template, task=config.task, spec=model.spec)
    served_name = BUNDLED_MODEL if name == "bundled" else name
    checkpoint_s = clock.now_s() - begin_s
    return LoadedModel(
        name=served_name,
        directory=directory,
        model=model,
        tokenizer=tokenizer,
        template=template,
        checkpoint_s=checkpoint_s,
        load_s=checkpoint_s,
        clock=clock,
        compute=config.compute,
        calibrate=config.calibrate,
        encoder=encoder,
    )


def _refuse_unread_rows(asked: str, model: Model) -> None:
    """ConfigError where no weights of the model meet rows of whole numbers, or only rows of 8 bits."""
    own = ("int8", "int4") if asked == "int8" else ()
    if asked == "auto" or any(name in own or name.startswith("group") for name in model.formats):
        return
    formats = ", ".join(model.formats)
    model.close()
    raise ConfigError(
        f"activations is {asked!r}, and the weights of this model are {formats}",
        hint="it is about weights in groups, as GGUF, AWQ and GPTQ files have them; leave it out",
    )


def opened(
    model: str | Path | LoadedModel,
    config: EngineConfig | None,
    settings: dict[str, Any],
    progress: Progress | None = None,
) -> tuple[LoadedModel, EngineConfig]:
    """What `LLM`, `AsyncLLM` and `TwoPhase` begin with: a model, loaded here unless it is already, and its config.

    Raises ConfigError for unknown or impossible settings, and for those that a loaded model can no longer follow.
    """
    config = engine_config(config, **settings)
    if not isinstance(model, str | Path | LoadedModel):
        raise ConfigError(f"model is {shown(model)}; it must be a name, a path or a loaded model")
    if not isinstance(model, LoadedModel):
        return load(str(model), config, progress=progress), config
    late = [name for name in settings if SETTINGS[name] == "compute" or name in ("task", "calibrate")]
    if late:
        raise ConfigError(
            f"{late[0]} is set, but the model is already loaded", hint="give the setting when it is loaded"
        )
    return model, config


def default_places(pool_tokens: int, context_tokens: int, calibrated: CalibratedModel | None) -> Places:
    """How many sequences run at one time, by the measured profile where there is one."""
    if calibrated is None:
        return places(pool_tokens, context_tokens, None)

    def predict_s(sequences: int, tokens: int) -> float:
        return calibrated.predict(StepShape.decode(batch=sequences, context_tokens=tokens)).total_s

    return places(pool_tokens, context_tokens, predict_s)


@dataclass(slots=True)
class Machinery:
    """Control and compute joined over one KV pool, without text: what a step needs."""

    core: EngineCore
    executor: ModelExecutor
    observe: Observe  # learns from every step how long it took


def make_machinery(
    model: Model,
    config: EngineConfig,
    *,
    clock: Clock,
    grammars: GrammarCompiler | None = None,
    loaded: LoadedModel | None = None,
) -> Machinery:
    """Allocate the KV pool and join scheduler, executor and sampler. loaded: where the model came with its words."""
    drafters = (
        open_drafters(config, model)
        if loaded is None
        else open_drafters(
            replace(config, compute=loaded.compute, calibrate=loaded.calibrate),
            model,
            directory=loaded.directory,
            tokenizer=loaded.tokenizer,
        )
    )
    scheduler = config.scheduler
    size = size_pool(model, config, drafters)
    context, n_blocks = size.context_tokens, size.n_blocks
    kv = model.make_kv(n_blocks, config.block_tokens, size.n_places)
    model.warm_up(kv)
    model.settle()
    step_time = StepTimeModel()
    damage = profile_damage(model)
    if damage is not None:
        logger.warning("no step is predicted by this machine's profile: %s", damage)
    calibrated = local_predictor(model)
    number = config.scheduler.max_running_sequences
    if number is None:
        found = default_places(n_blocks * config.block_tokens, context, calibrated)
        found = beside_states(found, size.n_places, is_caching=scheduler.enable_prefix_cache)
        number = found.number
        logger.info("places chosen max_running_sequences=%d reason=%s", number, found.reason)
    # the measured profile of this machine where there is one; until then the engine learns from its own steps
    predict_s = once_for_each(step_time.predict_s if calibrated is None else calibrated.predict_s)
    prices = draft_prices(drafters, predict_s, has_profile=calibrated is not None)

    def observe(shape: StepShape, measured_s: float) -> None:
        prices.observe(shape, measured_s)
        if calibrated is None:
            step_time.observe(shape, measured_s)

    core = EngineCore(
        replace(scheduler, max_context_tokens=context, max_running_sequences=number),
        BlockConfig(n_blocks=n_blocks, block_tokens=config.block_tokens, n_places=size.n_places),
        model_revision=model.revision,
        predict_s=predict_s,
        seed=config.seed,
        depths=prices,
        n_vocab=model.spec.vocab_size,
        executor_drafters=[one.kind for one in drafters],
    )
    _tell_defaults(model, config, context, n_blocks, calibrated)
    sampler = Sampler(model.spec.vocab_size, model.device, grammars=grammars, drawing=model)
    ready = [one.drafter(n_blocks, sampler, clock=clock) for one in drafters]
    drafting = join_drafters(ready, prices, vocab_size=model.spec.vocab_size, clock=clock) if ready else None
    encoder = None if loaded is None else loaded.encoder
    pooler = None if encoder is None else Pooler(encoder.tail)
    executor = ModelExecutor(model, kv, sampler, clock=clock, drafting=drafting, pooler=pooler)
    logger.info(
        "engine ready backend=%s weights=%s kv=%s context=%d blocks=%d block_tokens=%d",
        model.backend_name, model.weights_format, model.kv_format, context, n_blocks, config.block_tokens,
    )  # fmt: skip
    return Machinery(core=core, executor=executor, observe=observe)


def once_for_each(predict_s: Predict) -> Predict:
    """The same, and what is asked of one shape again is remembered: what a step is predicted to take, several want to know."""
    last: tuple[StepShape | None, float] = (None, 0.0)

    def predict(shape: StepShape) -> float:
        nonlocal last
        if shape is not last[0]:
            last = shape, predict_s(shape)
        return last[1]

    return predict


def _tell_defaults(
    model: Model, config: EngineConfig, context: int, n_blocks: int, calibrated: CalibratedModel | None
) -> None:
    """Say at start what was settled and why; docs/serving.md has the reasons at length."""
    if config.kv_memory_bytes is not None:
        why = "asked for"
    elif n_blocks == blocks_for(context, config.block_tokens) * POOL_CONTEXTS:
        why = f"{POOL_CONTEXTS} whole contexts"
    else:
        why = f"{KV_MEMORY_SHARE:.0%} of the free memory, or one context"
    logger.info("kv pool chosen bytes=%d reason=%s", n_blocks * model.kv_bytes_per_block(config.block_tokens), why)
    most, budget_s = config.scheduler.max_step_tokens, config.scheduler.stall_budget_s
    if calibrated is None:
        logger.info("step limits max_step_tokens=%d stall_budget_s=%s", most, budget_s)
        return
    full_s = calibrated.predict_s(StepShape.prefill(batch=1, new_tokens=min(most, context)))
    logger.info("step limits max_step_tokens=%d stall_budget_s=%s predicted_full_step_s=%.3g", most, budget_s, full_s)


def warn_of_long_steps(model: Model, config: EngineConfig, context: int) -> None:
    """Warn where a full step of prefill is predicted to hold running streams for long. For those who serve: a chat and a batch
    have no strangers' streams, nor the option.
    """
    calibrated, scheduler = local_predictor(model), config.scheduler
    if calibrated is None or scheduler.stall_budget_s is not None:
        return
    full_s = calibrated.predict_s(StepShape.prefill(batch=1, new_tokens=min(scheduler.max_step_tokens, context)))
    if full_s > LONG_STEP_S:
        logger.warning(
            "running streams may wait %.1f s for others' prompts; --stall-budget-ms %d keeps their steps short",
            full_s, MAX_STEP_S * 1e3,
        )  # fmt: skip


def make_engine(loaded: LoadedModel, config: EngineConfig) -> Engine:
    """An engine over a loaded model."""
    begin_s = loaded.clock.now_s()
    tokenizer, vocab_size = loaded.tokenizer, loaded.model.spec.vocab_size
    grammars = GrammarCompiler(tokenizer, vocab_size)
    adapters = Adapters(loaded.model, max_loras=config.max_loras, max_rank=config.max_lora_rank)
    for name, path in config.loras.items():  # before the pool is sized by what is free
        adapters.add(name, adapters.read(name, path, takes_hub_names=True))
    machinery = make_machinery(loaded.model, config, clock=loaded.clock, grammars=grammars, loaded=loaded)
    loaded.load_s = loaded.checkpoint_s + loaded.clock.now_s() - begin_s
    drafting = machinery.executor.drafting
    return Engine(
        machinery.core,
        machinery.executor,
        tokenizer,
        clock=loaded.clock,
        vocab_size=vocab_size,
        grammars=grammars,
        observe=machinery.observe,
        back_memory=machinery.executor.back_memory,
        adapters=adapters,
        writes=loaded.model.spec.has_head,
        encodes=loaded.encoder is not None,
        drafter_faults=lambda: 0 if drafting is None else drafting.failures,
    )
