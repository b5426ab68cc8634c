"""The door of the compute room: a checkpoint, or a named shape, becomes a Model on one backend.

    model = load_model("HuggingFaceTB/SmolLM2-135M", ComputeConfig())
    kv = model.make_kv(n_blocks=64, block_tokens=32)
    logits_RV = model.forward(batch, kv)

The backend is chosen once, here, and logged; nothing falls back later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diptych.compute.formats.coded import CodedCheckpoint
from diptych.compute.formats.gguf import GgufCheckpoint
from diptych.compute.formats.mlx import MlxCheckpoint
from diptych.compute.formats.random_codes import CodedRandomSource
from diptych.compute.loading.calibration import DIRECTIONS, Calibration, calibrated
from diptych.compute.loading.hub import resolve_model
from diptych.compute.loading.packed_cache import PackedCache
from diptych.compute.loading.quant import QuantisedCheckpoint, stored_weights
from diptych.compute.loading.random_weights import RandomSource
from diptych.compute.loading.weights import Checkpoint, Meanwhile, Progress, Source
from diptych.compute.model import Blueprint, Model, draw_blueprint
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.cpu.kernels import choose_instruction_set
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.compute.ops.cpu.model import build_cpu_model
from diptych.compute.ops.cpu.ranks import RankedModel
from diptych.compute.ops.linked import LinkedRanks
from diptych.compute.ops.ranks import Ranks, placement_head
from diptych.compute.ops.shares import copies_of_kv, ranks_that_attend
from diptych.compute.ops.torch.model import build_torch_model, refuse_block, torch_device
from diptych.ground.config import AS_STORED, BALANCED, ComputeConfig, packed_cache, profile_dir
from diptych.ground.errors import ConfigError, LoadError
from diptych.ground.formats import KeptFormat
from diptych.models.config import HfConfig, read_config_file
from diptych.models.gguf.checkpoint import read_config
from diptych.models.gguf.file import open_gguf
from diptych.models.quantised.fields import Quantisation
from diptych.models.quantised.method import MLX, packed_for_cpu, quantisation_of
from diptych.models.read import family_of, reads_mxfp4
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.compute")

# a checkpoint opened: its config.json and where that is from, its tensors, and the config that it settles
Opened = tuple[dict[str, Any], str, Checkpoint | GgufCheckpoint, ComputeConfig]

__all__ = ["Model", "load_model", "random_model"]


def load_model(
    path_or_name: str | Path,
    config: ComputeConfig,
    *,
    max_context_tokens: int | None = None,
    progress: Progress | None = None,
    check: Callable[[ModelSpec], None] = lambda spec: None,
    meanwhile: Meanwhile = lambda: None,
    beside: Model | None = None,
    calibration: Calibration | None = None,
) -> Model:
    """A checkpoint folder, a GGUF file or a hub name as a Model.

    beside: a model that never runs while this one does; its threads are used.
    max_context_tokens: the longest sequence the engine will run, which some rotary scalings depend on; None: the model's.
    progress: called with (bytes read, bytes in all). check: called before the weights are read, and may refuse.
    meanwhile: reads what else a start needs, while packed weights are read, which needs no interpreter, or before anything is
    packed. It may be called twice, and may refuse. calibration: what is read first where int8 or int4 are made, None: nothing.
    Raises LoadError, UnsupportedModel or ConfigError.
    """
    if config.tp > 1:
        meanwhile()
        return _load_over_ranks(
            path_or_name, config, max_context_tokens=max_context_tokens, progress=progress, check=check,
            calibration=calibration,
        )  # fmt: skip
    hf_config, path, checkpoint, config = _open(path_or_name, config)
    _refuse_late(calibration, checkpoint)

    def built(source: Checkpoint | GgufCheckpoint, on_packed: Callable[[CpuLoader], None] | None = None) -> Model:
        source.progress = progress
        blueprint = draw_blueprint(
            hf_config, source, path=path, max_context_tokens=max_context_tokens, longrope=config.longrope
        )
        check(blueprint.spec)
        return build(blueprint, config, beside=beside, on_packed=on_packed)

    def measured() -> Mapping[str, torch.Tensor]:
        return _measured(path_or_name, config, calibration, check, max_context_tokens)

    is_read = calibration is not None and calibration.windows is not None and _is_balancing(config, checkpoint)
    by = calibration.name if calibration is not None and is_read else None
    model = _built_once(built, checkpoint, hf_config, config, meanwhile, by, measured)
    if checkpoint.is_keeping:
        checkpoint.log_formats(model.formats)
    return model


def _open(path_or_name: str | Path, config: ComputeConfig) -> Opened:
    path = resolve_model(path_or_name)
    return _open_folder(path, config) if path.is_dir() else _open_gguf(path, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBlueprint:
    """A checkpoint's blueprint, and the config that its files settle."""

    blueprint: Blueprint
    config: ComputeConfig


def open_blueprint(
    path_or_name: str | Path,
    config: ComputeConfig,
    *,
    max_context_tokens: int | None = None,
    progress: Progress | None = None,
) -> OpenedBlueprint:
    """The blueprint of a checkpoint, and nothing of its weights yet; raises as `load_model`."""
    hf_config, path, source, config = _open(path_or_name, config)
    source.progress = progress
    blueprint = draw_blueprint(
        hf_config, source, path=path, max_context_tokens=max_context_tokens, longrope=config.longrope
    )
    return OpenedBlueprint(blueprint=blueprint, config=config)


def _load_over_ranks(
    path_or_name: str | Path,
    config: ComputeConfig,
    *,
    max_context_tokens: int | None,
    progress: Progress | None,
    check: Callable[[ModelSpec], None],
    calibration: Calibration | None,
) -> Model:
    path = str(path_or_name)
    opened = open_blueprint(path, config, max_context_tokens=max_context_tokens, progress=progress)
    check(opened.blueprint.spec)
    checkpoint = opened.blueprint.source
    _refuse_late(calibration, checkpoint)
    if _is_balancing(opened.config, checkpoint):
        checkpoint.measured = _measured(path_or_name, opened.config, calibration, check, max_context_tokens)
    source = {"path": path, "max_context_tokens": max_context_tokens}
    model = build_over_ranks(opened.blueprint, opened.config, source)
    if isinstance(checkpoint, GgufCheckpoint | Checkpoint) and checkpoint.is_keeping:
        checkpoint.log_formats(model.formats)
    return model


def _is_balancing(config: ComputeConfig, source: Source) -> bool:
    """Whether channels are balanced when this is packed."""
    is_packing = choose_backend(config)[0] == "cpu" and cpu_kernels.is_available()[0]
    return is_packing and config.weights in BALANCED and source.is_balanceable


def _refuse_late(calibration: Calibration | None, source: Source) -> None:
    if calibration is not None and calibration.is_asked and isinstance(source, QuantisedCheckpoint):
        raise ConfigError(
            f"calibrate is {calibration.name!r}, and {source.origin} is packed already",
            hint="leave it out, or load the original checkpoint",
        )


def _measured(
    path_or_name: str | Path,
    config: ComputeConfig,
    calibration: Calibration | None,
    check: Callable[[ModelSpec], None],
    max_context_tokens: int | None,
) -> Mapping[str, torch.Tensor]:
    """What is measured over the text, nothing without one. Raises as `calibrated`, and what the model would be refused for."""
    if calibration is None or calibration.windows is None:
        return {}
    # another one, which is read and forgotten
    blueprint = open_blueprint(path_or_name, config, max_context_tokens=max_context_tokens).blueprint
    check(blueprint.spec)
    cpu_kernels.refuse_heads(blueprint.spec)
    n_directions = DIRECTIONS.get(config.weights, 0)
    return calibrated(blueprint, calibration, threads=config.threads, n_directions=n_directions)


def build_over_ranks(
    blueprint: Blueprint,
    config: ComputeConfig,
    source: Mapping[str, Any],
    start: Callable[[int, ComputeConfig], Ranks] | None = None,
) -> Model:
    """A blueprint as a model on `config.tp` ranks, which find it again by `source`. The cache of packed weights is not used."""
    backend, reason = choose_backend(config)
    if backend != "cpu":
        raise ConfigError(
            f"tp is {config.tp}, and the backend is {backend} ({reason}), which computes in one process",
            hint="use --backend cpu, or leave tp out",
        )
    if not cpu_kernels.is_available()[0]:
        raise ConfigError(cpu_kernels.is_available()[1], hint="leave tp out, which the cpu kernels are needed for")
    cpu_kernels.refuse_heads(blueprint.spec)
    # every rank computes with what rank 0 found here, whatever it would choose itself
    config = replace(config, backend="cpu", instruction_set=choose_instruction_set(config.instruction_set))
    cpu_kernels.warn_of_faster_set(config.instruction_set)
    ranks = (start or (Ranks if config.tp_address is None else LinkedRanks))(config.tp, config)
    placements = [placement_head(placement) for placement in ranks.placements]
    if isinstance(blueprint.source, Checkpoint | GgufCheckpoint):
        blueprint.source.progress = _noticing(ranks, blueprint.source.progress)
    try:
        return RankedModel(blueprint, config, ranks, {**source, "config": asdict(config), "placements": placements})
    except BaseException:
        ranks.end()
        raise


def _noticing(ranks: Ranks, progress: Progress | None) -> Progress:
    """Loading that ends when another rank does, which it would hear of at its end only."""

    def notice(done: int, total: int) -> None:
        ranks.check()
        if progress is not None:
            progress(done, total)

    return notice


def _built_once(
    built: Callable[..., Model],
    checkpoint: Checkpoint | GgufCheckpoint,
    hf_config: Mapping[str, Any],
    config: ComputeConfig,
    meanwhile: Meanwhile,
    calibrated_by: str | None,
    measured: Callable[[], Mapping[str, torch.Tensor]],
) -> Model:
    """The model from packed weights that an earlier start kept, else from the checkpoint, whose packed weights are kept.

    calibrated_by: what is `measured` before anything is packed, None: nothing is.
    """
    kept = packed_cache()
    if profile_dir() is None:
        logger.info("packed weights not kept reason=this user has no home, and DIPTYCH_HOME names no folder")
    is_packing = choose_backend(config)[0] == "cpu" and cpu_kernels.is_available()[0]
    if is_packing and isinstance(checkpoint, QuantisedCheckpoint):
        checkpoint.meanwhile = meanwhile
        return built(checkpoint)
    if kept is None or not is_packing:
        meanwhile()
        checkpoint.measured = {} if calibrated_by is None else measured()
        return built(checkpoint)
    cache = PackedCache(folder=kept[0], limit_bytes=kept[1])
    weights = config.weights
    if weights in AS_STORED:
        weights = "auto" if checkpoint.is_keeping else "bf16"

    def key(*calibrated: str) -> str:
        decides = (weights, choose_instruction_set(config.instruction_set), *calibrated)
        return cache.key(checkpoint.paths, hf_config, *decides)

    own = key() if calibrated_by is None else key("calibrated", calibrated_by)
    model = _built_of_packed(built, cache, own, meanwhile)
    if model is None and calibrated_by is not None:
        checkpoint.measured = measured()
        if not checkpoint.measured:
            own = key()
            model = _built_of_packed(built, cache, own, lambda: None)
    if model is not None:
        return model
    return built(
        checkpoint, lambda loader: cache.store(own, loader, checkpoint, is_calibrated=bool(checkpoint.measured))
    )


def _built_of_packed(built: Callable[..., Model], cache: PackedCache, key: str, meanwhile: Meanwhile) -> Model | None:
    """The model from the packed weights of that name; None where there are none, or damaged ones. `meanwhile` was called."""
    packed = cache.find(key)
    if packed is None:
        meanwhile()
        return None
    packed.meanwhile = meanwhile
    try:
        model = built(packed)
    except LoadError as error:  # a checksum that does not hold; a fault of the checkpoint itself will be said again
        meanwhile()  # or a fault of its own, which costs no entry
        cache.drop(key, error.message)
        return None
    logger.info("packed weights of an earlier start used entry=%s", packed.directory)
    return model


def _open_folder(directory: Path, config: ComputeConfig) -> Opened:
    hf_config = read_config_file(directory / "config.json")
    parsed = HfConfig(hf_config, path=str(directory / "config.json"))
    family_of(parsed)  # refuses others, whatever else is wrong with them
    stored = stored_weights(parsed)
    if stored is not None:
        return hf_config, parsed.path, QuantisedCheckpoint(directory), settle_stored(config, stored)
    if reads_mxfp4(parsed):
        checkpoint = Checkpoint(directory)
        checkpoint.is_keeping = True
        return hf_config, parsed.path, checkpoint, config
    how, dtype = quantisation_of(parsed), _dequantised_dtype(config)
    if how is None:
        checkpoint = Checkpoint(directory)
        if not checkpoint.is_of_mlx:
            return hf_config, parsed.path, checkpoint, config
        how = Quantisation(method=MLX)
    if how.method == MLX:
        return hf_config, parsed.path, MlxCheckpoint(directory, how, dtype=dtype, family=family_of(parsed)), config
    return hf_config, parsed.path, CodedCheckpoint(directory, how, dtype=dtype), config


def _dequantised_dtype(config: ComputeConfig) -> torch.dtype:
    """Of values that are made of another program's codes: what is packed as int8 or int4 is rounded once, from fp32."""
    return torch.bfloat16 if config.weights in (*AS_STORED, "bf16") else torch.float32


def _open_gguf(path: Path, config: ComputeConfig) -> Opened:
    file = open_gguf(path)
    hf_config = read_config(file)
    family_of(HfConfig(hf_config, path=str(path)))
    # the embedding is kept as it is read, so it is bf16 unless fp32 is asked
    checkpoint = GgufCheckpoint(
        file,
        dtype=_dequantised_dtype(config),
        table_dtype=torch.float32 if config.weights == "fp32" else torch.bfloat16,
    )
    return hf_config, str(path), checkpoint, config


def random_model(
    hf_config: Mapping[str, Any],
    config: ComputeConfig,
    seed: int,
    *,
    beside: Model | None = None,
    kept: KeptFormat | None = None,
) -> Model:
    """A model of this config with random bf16 weights and no checkpoint; a pure function of config and seed.

    beside: a model that it takes turns with, on the same threads. kept: what its layers have in place of bf16, as a file that
    another program quantised; `config.weights` is `auto` or `file` then.
    """
    if kept is not None:
        return build(draw_blueprint(dict(hf_config), CodedRandomSource(seed, kept)), config, beside=beside)
    blueprint = random_blueprint(hf_config, config, seed)
    if config.tp > 1:
        return build_over_ranks(blueprint, config, {"path": None, "hf_config": dict(hf_config), "seed": seed})
    return build(blueprint, config, beside=beside)


def random_blueprint(hf_config: Mapping[str, Any], config: ComputeConfig, seed: int) -> Blueprint:
    """The blueprint of such a model."""
    return draw_blueprint(dict(hf_config), RandomSource(seed), longrope=config.longrope)


def memory_of_block(spec: ModelSpec, config: ComputeConfig, block_tokens: int) -> tuple[torch.device, int]:
    """Where the KV cache of a model will lie that is not loaded yet, and the bytes of a block of it. ConfigError for blocks of
    a size that the backend has not.

    Where fp32 follows from the files alone (torch backend, nothing asked for), bf16 is taken.
    """
    backend, _ = choose_backend(config)
    if backend == "cpu" and cpu_kernels.is_available()[0]:
        cpu_kernels.refuse_block(block_tokens)
        kv_format = "bf16" if config.kv == "auto" else config.kv
        # as many heads as all ranks keep
        kept: list[tuple[int, ...]] = []
        for attention, cache in (
            (spec.layers[i].attention, cache) for i, cache in zip(spec.kv_layers, spec.caches, strict=False)
        ):
            n = copies_of_kv(attention.n_heads, cache.n_heads, config.tp, together=attention.heads_together)
            kept.append((n, *cache.sizes[1:], *cache.order))
        indices = zip(spec.index_layers, spec.caches[len(spec.kv_layers) :], strict=True)
        for attention, cache in ((spec.layers[i].attention, cache) for i, cache in indices):
            n = ranks_that_attend(attention.n_heads, attention.n_kv_heads, config.tp)
            kept.append((n, cache.head_dim, cache.value_dim))
        return torch.device("cpu"), cpu_kernels.kv_bytes_per_block(spec, kv_format, block_tokens, heads=kept)
    refuse_block(spec, block_tokens)
    bits = 32 if "fp32" in (config.kv, config.weights) and config.kv != "bf16" else 16
    block_bytes = sum(cache.elements for cache in spec.caches) * block_tokens * bits // 8
    return torch_device(config.device if backend == "torch" else "cpu"), block_bytes


def settle_stored(config: ComputeConfig, stored: str) -> ComputeConfig:
    """The config for a checkpoint that `diptych quantize` packed as `stored`. ConfigError when it asks for something else."""
    if config.weights not in (*AS_STORED, stored):
        raise ConfigError(
            f"weights is {config.weights!r}; the checkpoint is packed as {stored}",
            hint="leave --weights out, or load the original checkpoint",
        )
    settled = replace(config, weights=stored)
    backend, reason = choose_backend(settled)
    if backend != "cpu":
        raise packed_for_cpu(backend, reason, hint="load the original checkpoint")
    return settled


def choose_backend(config: ComputeConfig) -> tuple[str, str]:
    """(backend, why). 'auto': torch where a GPU or fp32 is wanted or the kernels are missing, else cpu."""
    if config.backend != "auto":
        return config.backend, "asked for"
    if config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available()):
        return "torch", "a CUDA device is used"
    if "fp32" in (config.weights, config.kv):
        return "torch", "fp32 was asked for"
    available, detail = cpu_kernels.is_available()
    return ("cpu" if available else "torch"), detail


def build(
    blueprint: Blueprint,
    config: ComputeConfig,
    *,
    beside: Model | None = None,
    on_packed: Callable[[CpuLoader], None] | None = None,
) -> Model:
    """A blueprint as a Model on the backend that `config` asks for."""
    backend, reason = choose_backend(config)
    if reason == cpu_kernels.is_available()[1] and backend == "torch":
        logger.warning("the torch backend is used, which is several times slower on a CPU: %s", reason)
    logger.info("backend chosen name=%s reason=%s", backend, reason)
    if backend == "cpu":
        if beside is None:
            cpu_kernels.warn_of_faster_set(config.instruction_set)
        cpu_kernels.refuse_heads(blueprint.spec)
        return build_cpu_model(blueprint, config, beside=beside, on_packed=on_packed)
    return build_torch_model(blueprint, config)
