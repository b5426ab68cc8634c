"""Measures a GPU in a few minutes: what `lab/calibrate.py` does for the processor, by the engine's own kernels there.

What is timed: the ceilings (`compute/device_ceilings.py`); steps of random models of several widths and depths, of mixtures
and of latent attention, each run until it is recorded where steps are; steps so small that only the starts of kernels are
left; what adapters add; and the engine itself, for the host's share.
What is fitted is the form of a CPU's profile, without its cache: what the L2 gives weights that fit in it is less than the
launches of such models. A step has a floor, each layer takes a time whatever its width (its kernels start one behind the
other), weights and keys are read at shares of the memory's rate, products and attention reach shares of the arithmetic's.
How well that holds is said of models that the fit did not see: each is predicted by a fit to all others.

Steps of forms that were not recorded yet are launched kernel by kernel and take longer than predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from diptych.compute.device_ceilings import COPY_MIB, DeviceCeilings, device_ceilings
from diptych.compute.ops.torch.model import device_name
from diptych.compute.runner import random_model
from diptych.cost.calibration import latent_layers
from diptych.cost.profile import SCHEMA
from diptych.engine.memory import memory_of
from diptych.engine.model_profile import measured_kernels
from diptych.ground.clock import wall_time_s
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError
from diptych.ground.shape import StepShape
from diptych.ground.version import VERSION
from diptych.lab.adapters import adapted_steps, constants_of
from diptych.lab.fitted import NO_RESIDUALS, TimedStep, fit_held_out
from diptych.lab.ladder import profile_host
from diptych.lab.rounds import Effort
from diptych.lab.timed import Progress, open_ladder, timed_steps
from diptych.models.named import SHAPES

WEIGHTS = "bf16"  # what our kernels compute in; fp32 goes by torch's, each launched, and is another machine
# A step with a prompt is recorded when its form comes the third time; the fourth is the first that only replays.
WARM_UPS = 4
CLIMBS = 5
VOCAB = {"vocab_size": 32768}  # a head that takes its part of a step, and no more
MIXTURE = SHAPES["qwen3-30b-a3b"] | VOCAB
NARROW = SHAPES["qwen2.5-0.5b"] | VOCAB
MODELS: Mapping[str, Mapping[str, Any]] = {
    "8 layers of 4,096": SHAPES["llama-3.1-8b"] | VOCAB | {"num_hidden_layers": 8},
    "16 layers of 2,048": SHAPES["llama-3.2-1b"] | VOCAB,
    "24 layers of 896": NARROW,
    "32 small experts": MIXTURE | {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4},
    "8 large experts": MIXTURE | {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
                                  "moe_intermediate_size": 4096},
    "latents of 16 heads": SHAPES["deepseek-v2-lite"] | VOCAB | {"num_hidden_layers": 12, "first_k_dense_replace": 12},
    "latents of 128 heads": SHAPES["deepseek-v3"] | VOCAB | {"num_hidden_layers": 4, "first_k_dense_replace": 4,
                                                             "hidden_size": 4096, "intermediate_size": 8192},
}  # fmt: skip
# Hardly any arithmetic and bytes: what is left of a step is its kernels' starts. Heads are NARROW's, whose kernels it shares.
LAUNCH_MODEL = NARROW | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "vocab_size": 512}
HOST_MODEL = NARROW | {"num_hidden_layers": 4}


def _decode(*sizes: tuple[int, int]) -> tuple[StepShape, ...]:
    return tuple(StepShape.decode(batch=batch, context_tokens=tokens) for batch, tokens in sizes)


def _prefill(*sizes: tuple[int, int]) -> tuple[StepShape, ...]:
    return tuple(StepShape.prefill(batch=1, new_tokens=new, cached_tokens=cached) for new, cached in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What is timed, of which models. The defaults are for a GPU; smaller ones show the same way where there is none."""

    models: Mapping[str, Mapping[str, Any]]
    launch_model: Mapping[str, Any]
    host_model: Mapping[str, Any]
    decode: Sequence[StepShape]
    prefill: Sequence[StepShape]
    launch: Sequence[StepShape]
    copy_mib: Sequence[int] = COPY_MIB
    side: int | None = None  # rows of the products that show the most arithmetic; those that a device needs for it
    climbs: int = CLIMBS


USUAL = Extent(
    models=MODELS,
    launch_model=LAUNCH_MODEL,
    host_model=HOST_MODEL,
    decode=_decode((1, 64), (1, 2048), (1, 12_000), (4, 512), (16, 512), (16, 4096), (64, 512), (64, 2048)),
    prefill=(
        *_prefill((24, 0), (90, 0), (180, 0), (512, 0), (1500, 0), (2048, 0), (128, 1792), (512, 6144), (2048, 8192)),
        StepShape.prefill(batch=4, new_tokens=128),
    ),
    launch=(*_decode((1, 16), (16, 16), (64, 16)), *_prefill((16, 0), (64, 0))),
)


def calibrate_gpu(
    compute: ComputeConfig, device: torch.device, *, progress: Progress, effort: Effort, extent: Extent = USUAL
) -> dict[str, Any]:
    """The device's profile, but for its fingerprint. effort: for each of the models timed. CapacityError where what is free of
    the card's memory does not hold them.
    """
    try:
        return _measured(compute, device, progress, effort, extent)
    except torch.OutOfMemoryError as error:
        free, total = (n / 2**30 for n in (memory_of(device).available_bytes, memory_of(device).total_bytes))
        raise CapacityError(
            f"{device_name(device)} has {free:.1f} of {total:.1f} GiB free, too few for the models that are timed",
            hint="they take 12 GiB; stop what else uses the card",
        ) from error


def _measured(
    compute: ComputeConfig, device: torch.device, progress: Progress, effort: Effort, extent: Extent
) -> dict[str, Any]:
    config = replace(compute, backend="torch", device=str(device), weights=WEIGHTS, kv="auto")
    brief = replace(effort, budget_s=effort.budget_s / 2)
    progress(f"measuring what {device_name(device)} can do at most")
    ceilings = device_ceilings(device, copy_mib=extent.copy_mib, side=extent.side)
    samples: list[TimedStep] = []
    shapes = {"launches": extent.launch_model} | dict(extent.models)
    adapted, profile = None, dict[str, Any]()
    for number, (name, shape) in enumerate(shapes.items()):
        progress(f"timing steps, model {number + 1} of {len(shapes)}: {name}")
        works = extent.launch if shape is extent.launch_model else (*extent.decode, *extent.prefill)
        with closing(random_model(shape, config, seed=0)) as model:
            samples += timed_steps(
                model,
                works,
                brief,
                read_bytes_per_s=ceilings.read_bytes_per_s,
                warm_ups=WARM_UPS,
                takes_busy=True,
            )
            if adapted is None and shape is not extent.launch_model:
                adapted = adapted_steps(model, brief)
            profile = profile or unfitted(
                ceilings, device_name(device), memory_of(device).total_bytes, kernels=measured_kernels(model)
            )
    if any(latent_layers(sample.view.spec) for sample in samples):
        profile["latents"] = latents_unfitted()
    progress("fitting")
    profile = fit_held_out(profile, samples, kept=[samples[0].view])
    if ceilings.cache is not None:  # the roof of what fits in it; kernels reach as much of it as of the memory
        kv_eb = profile["attention"]["kv_eb"]
        profile["cache"] = ceilings.cache | {"eb": dict(profile["eb"]), "kv_eb": kv_eb, "reach": 1.0}
    progress("measuring the host")
    profile["host"] = _host(extent, config, profile)
    if adapted is not None:
        rate = profile["memory_bytes_per_s"] * profile["eb"][WEIGHTS]
        profile["adapters"] = constants_of({WEIGHTS: adapted}, profile["flops_per_s"], {WEIGHTS: rate})
    return profile


def unfitted(ceilings: DeviceCeilings, name: str, memory_bytes: float, *, kernels: str) -> dict[str, Any]:
    """The profile before fitting: measured ceilings, and starting values for everything else."""
    return {
        "schema": SCHEMA,
        "device": name,
        "kind": "gpu",
        "backend": "torch",
        "kernels": kernels,
        "date": datetime.fromtimestamp(wall_time_s(), UTC).date().isoformat(),
        "provenance": f"diptych {VERSION} lab calibrate, torch backend, {name}",
        "memory_bytes_per_s": ceilings.read_bytes_per_s,
        "memory_bytes": float(memory_bytes),
        "flops_per_s": dict(ceilings.flops_per_s),
        "launch_s": ceilings.launch_s,
        "copy": {str(mib): rate for mib, rate in ceilings.copy_bytes_per_s.items()},
        "t0_s": 5e-5,
        "layer_s": 2e-5,
        "sequence_s": 1e-6,
        "p": 3.0,
        "eb": {WEIGHTS: 0.8},
        "ef": {WEIGHTS: 0.7},
        "attention": {"kv_eb": 0.6, "prefill_ef": 0.3, "decode_ef": 0.1},
        "experts": {"layer_s": 2e-5, "ef": {WEIGHTS: 0.3}},
        "activation_bytes_per_s": ceilings.read_bytes_per_s / 2.0,
        "residuals": NO_RESIDUALS,
    }


def latents_unfitted() -> dict[str, float]:
    """Of a profile what stands in place of `attention` where that is latent, before fitting."""
    return {"layer_s": 2e-5, "kv_eb": 0.6, "prefill_ef": 0.3, "decode_ef": 0.1}


def _host(extent: Extent, config: ComputeConfig, profile: Mapping[str, Any]) -> dict[str, float]:
    """What the scheduler, the executor and the sampler add to a step. The device's caches are not the host's."""
    with open_ladder(extent.host_model, config, profile) as (ladder, predictor):
        for _ in range(WARM_UPS):  # every form of its prompts is recorded
            ladder.climb()
        return asdict(profile_host(predictor, [ladder.climb() for _ in range(extent.climbs)]))
