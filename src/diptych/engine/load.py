"""From a model's name to an engine ready to step: checkpoint, tokenizer, template, KV pool, scheduler.

Owns the sizing of the KV pool: how many blocks fit, and the refusal, with the largest context that would, when they do not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from diptych.compute.drafting.drafter import Drafter
from diptych.compute.loading.weights import resolve_model_dir
from diptych.compute.ops.cpu.kernels import faster_set
from diptych.compute.ops.torch.model import card_of
from diptych.compute.pooler import Pooler
from diptych.compute.runner import Model, load_model, memory_of_block
from diptych.compute.sampling.sampler import Sampler
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.control.loop import EngineCore
from diptych.control.scheduler import Predict
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.drafts.measured import MeasuredDraftPrices
from diptych.cost.drafts.prices import DraftPrices
from diptych.cost.kv_bytes import STATE_BYTES
from diptych.cost.places import MAX_STEP_S, STATE_MEMORY_SHARE, Places, beside_states, places, state_places
from diptych.cost.profile import COMMANDS, is_measured, load_profile
from diptych.cost.roofline import NoRate
from diptych.cost.step_time import StepTimeModel
from diptych.engine.adapters import Adapters
from diptych.engine.calibration_text import calibration_of
from diptych.engine.cost_view import CostView
from diptych.engine.drafters import OpenDrafter, open_drafters
from diptych.engine.drafting import Drafting, Draftings
from diptych.engine.encoder import Encoder, open_encoder
from diptych.engine.engine import Engine
from diptych.engine.executor import ModelExecutor
from diptych.engine.memory import Memory, memory_of
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.words import words_of
from diptych.ground.bounds import real, shown
from diptych.ground.clock import Clock, MonotonicClock
from diptych.ground.config import BALANCED, BY_TEXT, SETTINGS, BlockConfig, ComputeConfig, EngineConfig, engine_config
from diptych.ground.errors import CapacityError, ConfigError, LoadError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape
from diptych.models.files import no_model
from diptych.models.gguf.file import find_gguf
from diptych.models.gpu_kernels import left_to_torch
from diptych.models.named import SHAPES
from diptych.models.spec import ModelSpec
from diptych.stepper import Observe

logger = logging.getLogger("diptych.engine")

BUNDLED_MODEL = "diptych-10m"
SAME_MEMORY = 0.03  # by which the memory that two drivers find on one card may differ
FASTER = 1.05  # times as fast, from which on another backend is worth a word
# share of the memory that is free after loading which the KV pool may take when nobody says otherwise
KV_MEMORY_SHARE = 0.5
# sequences of the whole context that a pool has room for, where nobody says how many run and memory allows
POOL_CONTEXTS = 64
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
    gguf = find_gguf(Path(name).expanduser())
    if gguf is not None:
        return gguf
    try:
        folder = resolve_model_dir(name)
    except LoadError as error:
        if name not in SHAPES:
            raise
        hint = f"{name} is a shape: bench and lab take it, with random weights, as --shape {name}"
        raise LoadError(error.message, hint=hint) from error
    if not (folder / "config.json").exists():
        raise no_model(folder)
    return folder


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
        check=lambda spec: _check_pool(spec, config),
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


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Of a KV pool: the longest sequence, its blocks, and places for states, of models that have some."""

    context_tokens: int
    n_blocks: int
    n_places: int


def size_pool(model: Model, config: EngineConfig, drafters: Sequence[OpenDrafter] = ()) -> PoolSize:
    """The KV pool; each drafter's store has as many blocks, out of the same memory.

    Raises ConfigError when the asked context is longer than the model's, CapacityError when it does not fit in memory or
    when more memory is given than there is; the message names the largest context that fits.
    """
    block_bytes = model.kv_bytes_per_block(config.block_tokens) + sum(one.block_bytes for one in drafters)
    scratch_bytes = sum(one.scratch_bytes for one in drafters)
    memory = memory_of(model.device)
    size = _pool(model.spec.max_context_tokens, block_bytes, model.state_bytes, memory, config, scratch_bytes)
    asked = config.max_context_tokens or model.spec.max_context_tokens
    if size.context_tokens < asked:
        given = size.n_blocks * block_bytes
        logger.warning("context lowered from=%d to=%d reason=kv_memory bytes=%d", asked, size.context_tokens, given)
    return size


def _check_pool(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse before the weights are read what `size_pool` would refuse after, when less memory is free."""
    device, block_bytes = memory_of_block(spec, config.compute, config.block_tokens)
    _pool(spec.max_context_tokens, block_bytes, spec.state_elements * STATE_BYTES, memory_of(device), config)


def _pool(
    model_context: int,
    block_bytes: int,
    state_bytes: int,
    memory: Memory,
    config: EngineConfig,
    scratch_bytes: int = 0,
) -> PoolSize:
    asked, block_tokens = config.max_context_tokens, config.block_tokens
    if asked is not None and asked > model_context:
        raise ConfigError(
            f"max_context_tokens is {asked}; {model_context} is the most this model has positions for",
            hint=f"ask for at most {model_context}",
        )
    context = asked or model_context
    memory_bytes = config.kv_memory_bytes
    if memory_bytes is None:
        memory_bytes = int(memory.available_bytes * KV_MEMORY_SHARE)
    elif memory_bytes > memory.available_bytes:
        largest = memory.available_bytes // block_bytes * block_tokens if block_bytes else 0
        raise CapacityError(
            f"kv_memory_bytes is {memory_bytes}; of the {memory.total_bytes} bytes of memory here {memory.available_bytes} "
            "are free" + (f", which hold at most {largest} tokens" if block_bytes else ""),
            hint=f"leave kv_memory_bytes out to use {KV_MEMORY_SHARE:.0%} of what is free"
            + (f", and ask for a context of at most {min(largest, model_context)}" if largest else ""),
        )
    n_places = _places(state_bytes, memory_bytes, config)
    needed_blocks = _blocks(context, block_tokens)
    if not block_bytes:  # no layer attends: blocks number tokens, and take no memory
        return PoolSize(context, needed_blocks * (config.scheduler.max_running_sequences or POOL_CONTEXTS), n_places)
    fitting_blocks = max(0, memory_bytes - scratch_bytes - n_places * state_bytes) // block_bytes
    if needed_blocks > fitting_blocks:
        largest = fitting_blocks * block_tokens
        if asked is not None or config.kv_memory_bytes is not None or largest < 2:
            smaller = f"ask for max_context_tokens of at most {largest}, or " if largest >= 2 else ""
            raise CapacityError(
                f"a context of {context} tokens needs {needed_blocks * block_bytes} bytes of KV cache"
                + _beside(n_places * state_bytes, scratch_bytes)
                + f"; {memory_bytes} bytes are allowed, which hold at most {largest} tokens ({fitting_blocks} blocks)",
                hint=f"{smaller}raise kv_memory_bytes (a block of {block_tokens} tokens has {block_bytes} bytes)",
            )
        context, needed_blocks = largest, fitting_blocks
    wanted_blocks = needed_blocks * (config.scheduler.max_running_sequences or POOL_CONTEXTS)
    return PoolSize(context, max(needed_blocks, min(wanted_blocks, fitting_blocks)), n_places)


def _beside(states_bytes: int, scratch_bytes: int) -> str:
    """What of a pool's memory is for no block, as a message ends with it."""
    parts = ((states_bytes, "states of sequences"), (scratch_bytes, "the rows of drafters"))
    said = " and ".join(f"{n} for {what}" for n, what in parts if n)
    return f", beside {said}" if said else ""


def _places(state_bytes: int, memory_bytes: int, config: EngineConfig) -> int:
    scheduler = config.scheduler
    running = scheduler.max_running_sequences
    found = state_places(state_bytes, memory_bytes, running=running, is_caching=scheduler.enable_prefix_cache)
    least = running or 1
    if state_bytes and found < least:
        raise CapacityError(
            f"{least} sequences need {least * state_bytes} bytes for their states; {memory_bytes} bytes are allowed for those "
            f"and the KV cache, {STATE_MEMORY_SHARE:.0%} of them for states",
            hint="raise kv_memory_bytes" + ("" if running is None else f", or ask for at most {found} sequences"),
        )
    return found


def _blocks(n_tokens: int, block_tokens: int) -> int:
    return -(-n_tokens // block_tokens)


def profile_kind(model: Model) -> str:
    """Which of the machine's profiles speaks of this model's steps."""
    return "cpu" if model.device.type == "cpu" else "gpu"


def calibration_command(model: Model) -> str:
    """What measures what this model runs on."""
    is_only = model.device.type == "cpu" and not torch.cuda.is_available()
    return "diptych lab calibrate" if is_only else COMMANDS[profile_kind(model)]


def measured_kernels(model: Model) -> str:
    """What a profile's times hold for: the kernel set; on a GPU the card with the versions of what made its kernels, without
    ours where torch's own have the model.
    """
    if model.device.type == "cpu":
        return model.instruction_set
    return f"{model.instruction_set if model.keeps_bits else card_of(model.device)}, torch {torch.__version__}"


def profile_gap(model: Model) -> str | None:
    """Why this machine's measured profile says nothing of the model's step times, with the command that changes it where one
    does; None where it says it.
    """
    untimed = _never_timed_on_gpu(model)
    if untimed is not None:
        return untimed
    kind, command = profile_kind(model), calibration_command(model)
    if not is_measured(kind):
        own, other = ("machine", "GPU") if kind == "cpu" else ("GPU", "processor")
        beside = is_measured("gpu" if kind == "cpu" else "cpu")
        others = f", only its {other} was" if kind == "cpu" else f", only the {other} beside it was"
        return f"this {own} was never measured{others if beside else ''} ({command})"
    profile = load_profile(kind=kind)
    differing = _unlike_cpu(profile, model) if kind == "cpu" else _unlike_gpu(profile, model)
    if differing is not None:
        return f"this {'machine' if kind == 'cpu' else 'GPU'} was measured {differing} ({command})"
    if kind == "gpu":
        try:
            _predictor(profile, model)
        except NoRate as error:
            return f"{model.weights_format} weights are not timed on a GPU: {error.message}"
    return None


def _never_timed_on_gpu(model: Model) -> str | None:
    """Why no calibration of the GPU would have its times: torch's kernels compute it where ours run, and ours are timed."""
    is_by_torch = model.device.type != "cpu" and not model.keeps_bits
    if not is_by_torch or model.instruction_set == card_of(model.device):  # where ours do not run, torch's are timed
        return None
    found = left_to_torch(model.spec)
    why = f"for {model.weights_format} weights" if found is None else f"for its {found}"
    return f"torch's kernels compute this model on a GPU, {why}; only ours are timed"


def _unlike_cpu(profile: dict[str, Any], model: Model) -> str | None:
    measured, own = profile.get("backend", model.backend_name), model.backend_name
    if measured == own:
        measured, own = profile.get("kernels", model.instruction_set), model.instruction_set
    if measured == own:
        measured, own = (f"{n} thread{'s' * (n != 1)}" for n in (profile.get("threads", model.threads), model.threads))
    return None if measured == own else f"with {measured}, not with {own}"


def _unlike_gpu(profile: dict[str, Any], model: Model) -> str | None:
    measured, own = profile.get("kernels"), measured_kernels(model)
    if measured != own:
        return f"with {measured}, not with {own}"
    then, now = (n / 2**30 for n in (real(profile.get("memory_bytes")) or 0.0, memory_of(model.device).total_bytes))
    if abs(then / now - 1.0) > SAME_MEMORY:  # a part of the card, or another of its name
        return f"with {then:.0f} GiB of memory, not with {now:.0f}"
    return None


def _predictor(profile: dict[str, Any], model: Model) -> CalibratedModel:
    view = CostView(model)
    return CalibratedModel.from_profile(profile, view.spec, view.quant, kv=view.kv)


def faster_kernels(model: Model) -> str | None:
    """The kernel set that this processor has and the model, told to use another, does not use; None where there is none."""
    return faster_set(model.instruction_set) if model.backend_name == "cpu" else None


def faster_backends(model: Model) -> dict[str, str]:
    """Phases in which another backend was measured to be faster on this machine with the same weights, and how much.

    The profile compares two backends, that which it is of and another; the model may run on either of them.
    """
    profile = load_profile() if profile_kind(model) == "cpu" and is_measured("cpu") else {}
    other = profile.get("elsewhere")
    if not isinstance(other, dict) or other.get("weights") != model.weights_format:
        return {}
    if profile_gap(model) is None:
        name, power = other.get("backend"), 1
    elif model.backend_name == other.get("backend"):
        name, power = profile.get("backend"), -1
    else:
        return {}
    times = {phase.value: other.get(phase.value) for phase in Phase}
    gains = {phase: value**power for phase, value in times.items() if isinstance(value, float) and value > 0.0}
    return {
        phase: f"the {name} backend is {gain:.1f} times as fast here with {model.weights_format} weights"
        for phase, gain in gains.items()
        if gain > FASTER
    }


def local_predictor(model: Model) -> CalibratedModel | None:
    """Step times predicted from this machine's measured profile; None where `profile_gap` says why not."""
    if profile_gap(model) is not None:
        return None
    return _predictor(load_profile(kind=profile_kind(model)), model)


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


def draft_prices(drafters: Sequence[OpenDrafter], predict_s: Predict, *, has_profile: bool) -> DraftPrices:
    """What drafts cost: by the profile, or where there is none by what steps took alone."""
    prices = DraftPrices if has_profile else MeasuredDraftPrices
    return prices(predict_s, drafters=[one.cost for one in drafters])


def join_drafters(ready: Sequence[Drafter], prices: DraftPrices, *, vocab_size: int, clock: Clock) -> Draftings:
    """Drafters by number, kept from doing harm, whose time the prices learn."""
    return Draftings(
        [
            Drafting(
                drafter,
                vocab_size=vocab_size,
                observe=partial(prices.observe_drafting, drafter=number),
                number=number,
                clock=clock,
            )
            for number, drafter in enumerate(ready)
        ]
    )


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
    elif n_blocks == _blocks(context, config.block_tokens) * POOL_CONTEXTS:
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
    if budget_s is None and full_s > LONG_STEP_S:
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
