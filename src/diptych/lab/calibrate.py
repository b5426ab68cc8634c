"""Measures this machine in about a minute and writes its hardware profile (the JSON of `diptych.cost.profile`).

A GPU is another machine than the processor beside it, with a profile of its own (`lab/gpu_calibration.py`); what follows is of
the processor.
What is timed: the two ceilings; steps of random models in each weight format over rows (1 to 1024) and contexts, which hold
the GEMM, attention of both phases and the head, decode where the weights are many times what a cache holds; steps so small
that only launch is left; and where the last-level cache ends, with steps of a model that fits in it.
What is fitted: launch constants, achieved fractions of both ceilings, the sharpness of the roofline's knee.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import torch

from diptych import __version__
from diptych.compute.ceilings import READ_BYTES, Ceilings, machine_ceilings
from diptych.compute.ops.cpu.kernels import measure_ops_per_s, measure_read_bytes_per_s
from diptych.compute.ops.cpus import Placement
from diptych.compute.ops.torch.model import torch_device
from diptych.compute.runner import Model, choose_backend, random_model
from diptych.cost.calibration import CACHE_REACH
from diptych.cost.profile import SCHEMA, profile_path
from diptych.engine.cost_view import CostView
from diptych.ground.bounds import counted
from diptych.ground.clock import wall_time_s
from diptych.ground.config import ComputeConfig
from diptych.ground.formats import KV_IN_BYTES, KeptFormat, rows_dtype
from diptych.ground.shape import StepShape
from diptych.lab.adapters import AdaptedSteps, adapted_steps, constants_of
from diptych.lab.fingerprint import fingerprint
from diptych.lab.fitted import NO_RESIDUALS, TimedStep, fit
from diptych.lab.gpu_calibration import calibrate_gpu
from diptych.lab.ladder import profile_host
from diptych.lab.rounds import Effort
from diptych.lab.timed import Progress, open_ladder, timed_steps

# Layers as wide as a 0.5B model's, few of them, so that a step is quick and its launch cost still small beside it.
PROBE_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 6,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
# The same, of which decode reads more than any cache holds, in every format: of weights of three times a cache a fifth is still
# found there, and a share of the memory's rate fitted to such steps (int4, 77 MB) priced 1B parameters a fifth too short.
DEEP_MODEL: dict[str, Any] = PROBE_MODEL | {"num_hidden_layers": 32}
# Weights that fit a last-level cache in every format: what small models, the bundled one among them, are read from. Its rows
# are narrow, too: what happens to them between the products (norms, rotations, number formats) is a tenth of a prompt's time
# here, a quarter in int8, and hardly any of it in wide ones, so that prompts of both models tell the two apart.
SMALL_MODEL: dict[str, Any] = PROBE_MODEL | {
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
}
# As many weights as a last-level cache just holds: what small models are, the bundled one among them.
HOST_MODEL: dict[str, Any] = SMALL_MODEL | {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
# Hardly any weights beside heads and contexts: a step is attention, over keys and values that lie in the cache.
ATTENTION_MODEL: dict[str, Any] = PROBE_MODEL | {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 256}
# Hardly any arithmetic: what is left of a step is launch and bookkeeping.
EMPTY_MODEL: dict[str, Any] = PROBE_MODEL | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 24,
    "vocab_size": 256,
}


def _rows(n: int, start: int = 0) -> StepShape:
    return StepShape.prefill(batch=1, new_tokens=n, cached_tokens=start)


DECODE_STEPS = [StepShape.decode(batch=b, context_tokens=c) for b, c in
                ((1, 64), (1, 2048), (1, 8000), (4, 256), (8, 1024), (16, 256), (32, 256))]  # fmt: skip
_HALF_A_THOUSAND = _rows(512)
# Few are powers of two: what is left of a prompt seldom is, and such sizes take a tenth less for each row than those between.
PREFILL_STEPS = [*(_rows(n) for n in (8, 30, 50, 90, 150, 230)), _HALF_A_THOUSAND, _rows(1024),
                 _rows(256, 1792), _rows(512, 6144)]  # fmt: skip
USUAL_STEP = StepShape.decode(batch=4, context_tokens=64)  # what an engine does before and behind a prompt
EMPTY_STEPS = [StepShape.decode(batch=1, context_tokens=16), StepShape.decode(batch=16, context_tokens=16)]
SMALL_STEPS = [*(StepShape.decode(batch=b, context_tokens=c) for b, c in ((1, 64), (1, 512), (4, 64), (16, 64))),
               *(_rows(n) for n in (8, 40, 75, 120, 190, 256, 500)), _rows(40, 256), _rows(100, 600)]  # fmt: skip
ATTENTION_STEPS = [*(StepShape.decode(batch=b, context_tokens=c) for b, c in ((1, 2048), (8, 1024), (16, 256))),
                   _rows(256, 1792), _rows(512, 4096)]  # fmt: skip
CLIMBS = 5  # of the ladder that tells the host's time
CACHE_MIB = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)  # sizes whose read rate shows where the caches end
BEYOND_MIB = 2 * READ_BYTES // 2**20  # read from memory, of which one half is timed
CACHE_ROUNDS, CACHE_READS = 3, 8
CACHED = 1.3  # times the memory's rate from which on a size counts as held by a cache; a shared one is no faster
LEVEL = 1.25  # times another's rate within which two sizes count as read from one level
USUAL_EFFORT = Effort(rounds=4, budget_s=4.0)  # for each model, so that all of it takes less than a minute
FORMATS = {"cpu": ("bf16", "int8", "int4"), "torch": ("fp32", "bf16")}
# What GGUF and GPTQ files have most, met by rows of 8 bits and of 15: what ends a group is fitted to these, other sizes follow.
GROUPED = tuple(KeptFormat.named(name) for name in ("group4-g32-f16", "group8-g32-f16-wide"))
GROUPED_STEPS = [_rows(n) for n in (90, 230, 512, 1024)]
KV_FORMATS = ("int8", KV_IN_BYTES, "fp8")  # beside the one that the engine chooses


def calibrate(
    compute: ComputeConfig,
    *,
    progress: Progress,
    effort: Effort = USUAL_EFFORT,
    path: Path | None = None,
    takes_busy: bool = False,
) -> dict[str, Any]:
    """Measure, fit, write the profile and return it. `path` None: the place the engine and the planner read.

    effort: for each of the models timed. takes_busy: keep what was measured beside other programs; otherwise that is a
    ConfigError, and what was known of the machine stays. A GPU's times need one core, so there it makes no difference.
    """
    brief = replace(effort, budget_s=effort.budget_s / 2)
    samples: list[TimedStep] = []
    adapted: dict[str, tuple[str, AdaptedSteps]] = {}  # by compute dtype, with the weights beside them
    ceilings: dict[str, Ceilings] = {}
    paces: list[float] = []  # of the memory beside what reads it
    cache: dict[str, float] | None = None
    elsewhere: dict[str, float | str] = {}
    device = gpu_of(compute)
    if device is not None:
        profile = calibrate_gpu(compute, device, progress=progress, effort=effort)
        return _written(profile, path or profile_path("gpu"), device)
    backend = kernels = ""
    placement = Placement(threads=1)
    for weights in ("bf16", "int8", "int4", "fp32"):
        config = replace(compute, weights=weights)
        if backend and weights not in FORMATS[backend]:
            continue
        progress(f"measuring {weights}")
        model = random_model(PROBE_MODEL, config, seed=0)
        backend, kernels, placement = model.backend_name, model.instruction_set, model.placement
        ceilings[weights] = machine_ceilings(model)
        memory = ceilings[weights].read_bytes_per_s
        if backend == "cpu" and cache is None:
            cache = _cache(model.placement)
        samples += _timed(model, PREFILL_STEPS, brief, memory, takes_busy=takes_busy)
        dtype = rows_dtype(CostView(model).quant.compute)
        if dtype not in adapted:
            adapted[dtype] = weights, adapted_steps(model, brief)
        model.close()
        with closing(random_model(DEEP_MODEL, config, seed=0)) as deep:
            samples += _timed(deep, DECODE_STEPS, brief, takes_busy=takes_busy)
            paces.append(samples[-1].read_bytes_per_s)
        if backend == "cpu" and weights == "bf16":
            elsewhere = _elsewhere(samples, config, brief, takes_busy=takes_busy)
        if backend == "cpu":
            small = random_model(SMALL_MODEL, config, seed=0)
            samples += _timed(small, SMALL_STEPS, brief, memory, takes_busy=takes_busy)
            small.close()
        if weights == "bf16":
            empty = random_model(EMPTY_MODEL, config, seed=0)
            samples += _timed(empty, EMPTY_STEPS, brief, memory, takes_busy=takes_busy)
            empty.close()
    if backend == "cpu":
        for measure in (_attention, _grouped):
            samples += measure(compute, effort, progress, statistics.median(paces), takes_busy=takes_busy)
    progress("fitting")
    profile = _profile(ceilings, statistics.median(paces), backend, kernels=kernels, placement=placement)
    if cache is not None:
        profile["cache"] = cache | {"eb": dict.fromkeys(ceilings, 0.6), "kv_eb": 0.5}
    if backend == "cpu":  # the only one of which two widths are measured
        profile["activation_bytes_per_s"] = 1e10
        profile["groups"] = {rows_dtype(kept.compute): 1.0 for kept in GROUPED}
        attention = profile["attention"]
        attention |= {kv: {key: attention[key] for key in ("prefill_ef", "decode_ef")} for kv in KV_FORMATS}
    profile = fit(profile, samples)
    progress("measuring the host")
    profile["host"] = _host(replace(compute, weights="bf16"), profile)
    profile["adapters"] = constants_of(
        {dtype: steps for dtype, (_, steps) in adapted.items()},
        profile["flops_per_s"],
        {dtype: profile["memory_bytes_per_s"] * profile["eb"][weights] for dtype, (weights, _) in adapted.items()},
    )
    if elsewhere:
        profile["elsewhere"] = elsewhere
    return _written(profile, path or profile_path())


def gpu_of(compute: ComputeConfig) -> torch.device | None:
    """The GPU that an engine of this config would compute on; None where it takes the processor."""
    if choose_backend(replace(compute, weights="auto", kv="auto"))[0] == "cpu":
        return None
    device = torch_device(compute.device)
    return None if device.type == "cpu" else device


def _written(profile: dict[str, Any], path: Path, device: torch.device | None = None) -> dict[str, Any]:
    """The profile with what it was taken on, in its file: whole, or as it was before, as a damaged one ends every start."""
    profile["fingerprint"] = fingerprint(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(profile, indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return profile


def _timed(
    model: Model, steps: Sequence[StepShape], effort: Effort, read_bytes_per_s: float | None = None, *, takes_busy: bool
) -> list[TimedStep]:
    return timed_steps(
        model, steps, effort, read_bytes_per_s=read_bytes_per_s, behind=USUAL_STEP, takes_busy=takes_busy
    )


def _attention(
    compute: ComputeConfig, effort: Effort, progress: Progress, read_bytes_per_s: float, *, takes_busy: bool
) -> list[TimedStep]:
    """Steps that are hardly anything else, over every KV format."""
    brief, samples = replace(effort, budget_s=effort.budget_s / 4), []
    for kv in (compute.kv, *KV_FORMATS):
        progress(f"measuring attention, KV {kv}")
        with closing(random_model(ATTENTION_MODEL, replace(compute, weights="bf16", kv=kv), seed=0)) as model:
            samples += _timed(model, ATTENTION_STEPS, brief, read_bytes_per_s, takes_busy=takes_busy)
    return samples


def _grouped(
    compute: ComputeConfig, effort: Effort, progress: Progress, read_bytes_per_s: float, *, takes_busy: bool
) -> list[TimedStep]:
    """Prompts on weights in groups."""
    brief, samples = replace(effort, budget_s=effort.budget_s / 4), []
    for kept in GROUPED:
        progress(f"measuring {kept.name}")
        with closing(random_model(PROBE_MODEL, replace(compute, weights="auto"), seed=0, kept=kept)) as model:
            samples += _timed(model, GROUPED_STEPS, brief, read_bytes_per_s, takes_busy=takes_busy)
    return samples


def _elsewhere(
    own: Sequence[TimedStep], config: ComputeConfig, effort: Effort, *, takes_busy: bool
) -> dict[str, float | str]:
    """How many times as fast the torch backend goes through a step of each phase, with the same weights."""
    found: dict[str, float | str] = {}
    for shape, work in ((DEEP_MODEL, DECODE_STEPS[0]), (PROBE_MODEL, _HALF_A_THOUSAND)):
        with closing(random_model(shape, replace(config, backend="torch", device="cpu"), seed=0)) as model:
            (theirs,) = _timed(model, [work], effort, own[0].read_bytes_per_s, takes_busy=takes_busy)
            found |= {"backend": model.backend_name, "weights": model.weights_format}
        ours = next(sample for sample in own if sample.work is work)
        found[work.phase.value] = ours.measured.value / theirs.measured.value
    return found


def _host(config: ComputeConfig, profile: dict[str, Any]) -> dict[str, float]:
    """What the scheduler, the executor and the sampler add to a step where a profile is known.

    What a step reads of weights pushes out of the caches what the host reads: on a Zen 4 with 32 MiB a step of one sequence
    takes 45 us beside its kernels over 14 MB of weights, 70 over 22 and 200 over 240. So it is asked beside weights that a
    last-level cache just holds, and beside such as it does not.
    """
    with open_ladder(HOST_MODEL, config, profile) as (ladder, predictor):
        ladder.climb()
        host = profile_host(predictor, [ladder.climb() for _ in range(CLIMBS)])
        near_s = ladder.alone_s()
    with open_ladder(PROBE_MODEL, config, profile) as (ladder, predictor):
        far_s, share = ladder.alone_s(), predictor.cached_share
    return asdict(replace(host, displaced_s=max(0.0, far_s - near_s) / (1.0 - share) if share < 1.0 else 0.0))


def _cache(placement: Placement) -> dict[str, float] | None:
    """The cache behind which memory begins, as `cache_level` finds it. Sizes are read in turns with memory: a virtual machine's
    memory changes its rate between two looks, and in the faster state seems a cache to who knows the slower.
    """
    rates = [
        [measure_read_bytes_per_s(mib * 2**20, placement, CACHE_READS) for mib in (*CACHE_MIB, BEYOND_MIB)]
        for _ in range(CACHE_ROUNDS)
    ]
    *held, memory = (statistics.median(of_size) for of_size in zip(*rates, strict=True))
    return cache_level(dict(zip(CACHE_MIB, held, strict=True)), memory)


def cache_level(rates: Mapping[int, float], memory_bytes_per_s: float) -> dict[str, float] | None:
    """The outermost cache in a table of read rates by MiB: its bytes, and the rate of what fits in. None without any.

    It reaches to the outermost size that is read about as quickly as one of half the size; larger ones that are still quicker
    than memory lie in it in part, and say where it ends (`Cache.share_of`, solved for its bytes). Sizes behind the first that
    memory must serve are chance.
    """
    held = list(takewhile(lambda mib: rates[mib] >= CACHED * memory_bytes_per_s, sorted(rates)))
    if not held:
        return None
    level = [mib for mib in held if any(rates[less] <= LEVEL * rates[mib] for less in held if 2 * less <= mib)]
    last = level[-1] if level else held[-1]
    rate = statistics.median(rates[mib] for mib in held if mib <= last and rates[mib] <= LEVEL * rates[last])
    to_memory = rate / memory_bytes_per_s - 1.0  # seconds of a byte, in those of the level
    shares = {mib: 1.0 - (rate / rates[mib] - 1.0) / to_memory for mib in held if mib > last}
    ends = [mib * (1.0 + (CACHE_REACH - 1.0) * share) / CACHE_REACH for mib, share in shares.items() if share < 1.0]
    return {"bytes": max(last, statistics.median(ends) if ends else 0.0) * 2.0**20, "bytes_per_s": rate}


def _profile(
    ceilings: dict[str, Ceilings], read_bytes_per_s: float, backend: str, *, kernels: str, placement: Placement
) -> dict[str, Any]:
    """The profile before fitting: measured ceilings, and starting values for everything else."""
    rates = {one.compute_dtype: one.flops_per_s for one in ceilings.values()}
    if "fp32" not in rates:  # a peak that the engine never uses on this backend; the planner wants one
        rates["fp32"] = measure_ops_per_s("fp32", placement)
    info = fingerprint()
    return {
        "schema": SCHEMA,
        "device": info["cpu"],
        "kind": "cpu",
        "backend": backend,
        "kernels": kernels,
        "date": datetime.fromtimestamp(wall_time_s(), UTC).date().isoformat(),
        "threads": placement.threads,
        "provenance": f"diptych {__version__} lab calibrate, {backend} backend, {counted(placement.threads, 'thread')}",
        "memory_bytes_per_s": read_bytes_per_s,
        "memory_bytes": float(psutil.virtual_memory().total),
        "flops_per_s": rates,
        "t0_s": 5e-5,
        "layer_s": 5e-6,
        "sequence_s": 1e-6,
        "p": 3.0,
        "eb": dict.fromkeys(ceilings, 0.9),
        "ef": dict.fromkeys(rates, 0.8),
        "attention": {"kv_eb": 0.7, "prefill_ef": 0.4, "decode_ef": 0.3},
        "residuals": NO_RESIDUALS,
    }
