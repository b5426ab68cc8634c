"""The door of the compute room: a checkpoint, or a named shape, becomes a Model on one backend.

    model = load_model("HuggingFaceTB/SmolLM2-135M", ComputeConfig())
    kv = model.make_kv(n_blocks=64, block_tokens=32)
    logits_RV = model.forward(batch, kv)

The backend is chosen once, here, and logged; nothing falls back later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.compute.model import Blueprint, Model, draw_blueprint
from diptych.compute.ops import cpu_kernels
from diptych.compute.ops.cpu_model import build_cpu_model
from diptych.compute.ops.torch_model import build_torch_model
from diptych.compute.quant import QuantisedCheckpoint, stored_weights
from diptych.compute.weights import Checkpoint, Progress, RandomSource, resolve_model_dir
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.models.config import HfConfig, read_json
from diptych.models.read import refuse_unrun

logger = logging.getLogger("diptych.compute")

__all__ = ["Model", "load_model", "random_model"]


def load_model(
    path_or_name: str | Path,
    config: ComputeConfig,
    *,
    max_context_tokens: int | None = None,
    progress: Progress | None = None,
    beside: Model | None = None,
) -> Model:
    """A checkpoint folder or hub name as a Model.

    beside: a model that never runs while this one does; its threads are used.
    max_context_tokens: the longest sequence the engine will run, which some rotary scalings depend on; None: the model's.
    progress: called with (bytes read, bytes in all). Raises LoadError, UnsupportedModel or ConfigError.
    """
    directory = resolve_model_dir(path_or_name)
    hf_config = read_json(directory / "config.json")
    parsed = HfConfig(hf_config, path=str(directory / "config.json"))
    refuse_unrun(parsed)
    stored = stored_weights(hf_config)
    if stored is None:
        parsed.refuse_quantised()
        checkpoint = Checkpoint(directory)
    else:
        config = settle_stored(config, stored)
        checkpoint = QuantisedCheckpoint(directory)
    checkpoint.progress = progress
    blueprint = draw_blueprint(
        hf_config, checkpoint, path=parsed.path, max_context_tokens=max_context_tokens, longrope=config.longrope
    )
    return build(blueprint, config, beside)


def random_model(hf_config: Mapping[str, Any], config: ComputeConfig, seed: int) -> Model:
    """A model of this config with random bf16 weights and no checkpoint; a pure function of config and seed."""
    return build(draw_blueprint(dict(hf_config), RandomSource(seed), longrope=config.longrope), config)


def settle_stored(config: ComputeConfig, stored: str) -> ComputeConfig:
    """The config for a checkpoint that `diptych quantize` packed as `stored`. ConfigError when it asks for something else."""
    if config.weights not in ("auto", stored):
        raise ConfigError(
            f"weights is {config.weights!r}; the checkpoint is packed as {stored}",
            hint="leave --weights out, or load the original checkpoint",
        )
    settled = replace(config, weights=stored)
    backend, reason = choose_backend(settled)
    if backend != "cpu":
        raise ConfigError(
            f"the checkpoint is packed for the cpu backend, and the backend is {backend} ({reason})",
            hint="load the original checkpoint",
        )
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


def build(blueprint: Blueprint, config: ComputeConfig, beside: Model | None = None) -> Model:
    """A blueprint as a Model on the backend that `config` asks for."""
    backend, reason = choose_backend(config)
    if reason == cpu_kernels.is_available()[1] and backend == "torch":
        logger.warning("the torch backend is used, which is several times slower on a CPU: %s", reason)
    logger.info("backend chosen name=%s reason=%s", backend, reason)
    if backend == "cpu":
        return build_cpu_model(blueprint, config, beside)
    return build_torch_model(blueprint, config)
