"""The measured profiles of a machine: the JSON that `diptych lab calibrate` writes and the planner and engine read.

One is of its processor, another of its GPU, as neither says anything of the other's times.

    {"schema": 1, "device": "...", "kind": "cpu", "backend": "cpu", "kernels": "avx512", "threads": 2, "date": "2026-01-31",
     "provenance": "diptych lab calibrate ...",
     "memory_bytes_per_s": 4.7e10, "memory_bytes": 1.6e10, "flops_per_s": {"fp32": ..., "bf16": ..., "int8": ..., "int4": ...},
     "t0_s": 1e-4, "layer_s": 2e-5, "sequence_s": 5e-6, "p": 3.0,
     "eb": {"bf16": 0.95, "int8": 0.9}, "ef": {"bf16": 0.9},
     "attention": {"kv_eb": 0.8, "prefill_ef": 0.5, "decode_ef": 0.3, "int8": {"prefill_ef": 0.5, "decode_ef": 0.2}},
     "adapters": {"layer_s": 1e-6, "prefill_ef": {"bf16": 0.3}, "decode_ef": {"bf16": 0.2}},
     "experts": {"layer_s": 3e-5, "ef": {"bf16": 0.4}},
     "latents": {"layer_s": 3e-5, "kv_eb": 0.6, "prefill_ef": 0.3, "decode_ef": 0.1},
     "groups": {"int8": 1.0, "bf16": 1.1},
     "activation_bytes_per_s": 4e10,
     "host": {"step_s": 1e-4, "sequence_s": 1e-5, "prompt_s": 2e-4, "prompt_token_s": 2e-7,
              "wake_s": 3e-4, "displaced_s": 1e-4},
     "cache": {"bytes": 3.2e7, "bytes_per_s": 1.5e11, "eb": {"bf16": 0.5}, "kv_eb": 0.4, "reach": 8.0},
     "elsewhere": {"backend": "torch", "weights": "bf16", "prefill": 0.7, "decode": 0.4},
     "residuals": {"prefill": {"low": -0.05, "high": 0.08, "median_error": 0.03, "rows": 12}, "decode": {...}}}

Rates in `flops_per_s` and `memory_bytes_per_s` are measured ceilings; eb and ef are the engine's share of them.
t0_s, layer_s and sequence_s are of the kernels, `host` of the scheduler and the sampler around them; a predicted step has
both. activation_bytes_per_s is of rows between the products: norms, rotations, other number formats. `attention` has entries
of KV formats other than the one measured with everything else. Another backend, kernel set or number of threads than
`backend`, `kernels` and `threads` takes no times from it. `elsewhere`: how many times as fast another backend took a step
of each phase. `experts`: what a layer with experts takes beside its products, and the share of the peak that these reach, where
kernels of their own do them. `latents`: what a layer takes more whose attention is latent, and what its kernels reach in place
of `attention`'s. `groups`: how many times as long as on a Zen 4 the end of a group of codes takes, by the dtype of the rows
that meet them (bf16: those of 15 bits). `groups`, `activation_bytes_per_s`, `adapters`, `experts`, `latents`, `host`, `cache`,
`threads` and `elsewhere` may be absent. What of larger weights is still found in the `cache` says `Cache.share_of`.
A GPU's (`kind` "gpu") has no `threads`; beside the above it says `launch_s`, what one launch takes the host, and `copy`, bytes
per second, read and written, by MiB that they lie in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diptych.cost.calibration import CACHE_REACH, Cache, Calibration, Constants, Host, Residual
from diptych.ground.bounds import real, shown
from diptych.ground.config import profile_dir
from diptych.ground.errors import ConfigError
from diptych.ground.specs import Flag, HardwareSpec, Provenance

SCHEMA = 1
FILE_NAMES = {"cpu": "hardware.json", "gpu": "hardware-gpu.json"}
# What plans call this machine, and of which of its profiles they speak; None: of the GPU's where there is one, as the engine
# takes a GPU where it finds one.
LOCAL: Mapping[str, str | None] = MappingProxyType({"local": None, "local-cpu": "cpu", "local-gpu": "gpu"})
COMMANDS = {"cpu": "diptych lab calibrate --device cpu", "gpu": "diptych lab calibrate --device cuda"}
_WORDS = {"cpu": "this machine", "gpu": "this machine's GPU"}
_HINT = "run `diptych lab calibrate` to measure this machine again"
OUR_COMPILER = ", triton "  # in the name of a GPU's kernels, with its version behind it: ours are compiled by it
_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each card


def profile_path(kind: str = "cpu") -> Path:
    """Where the profile of this machine's processor ("cpu") or of its GPU ("gpu") is kept. ConfigError without a place."""
    folder = profile_dir()
    if folder is None:
        raise ConfigError("this user has no home to keep a hardware profile in", hint="let DIPTYCH_HOME name a folder")
    return folder / FILE_NAMES[kind]


def is_measured(kind: str) -> bool:
    """Whether there is a profile of the processor ("cpu") or of the GPU ("gpu"); none is where this user may not look."""
    return profile_dir() is not None and os.path.exists(profile_path(kind))


def local_kind(name: str = "local") -> str:
    """Whose profile a plan for LOCAL's `name` reads."""
    return LOCAL[name] or ("gpu" if is_measured("gpu") else "cpu")


def has_gpu() -> bool:
    """Whether NVIDIA's driver knows a card here; whether the engine can use it, torch says."""
    return _DRIVER.is_dir() and any(_DRIVER.iterdir())


def load_profile(path: Path | None = None, *, kind: str = "cpu") -> dict[str, Any]:
    """The profile as written. ConfigError when there is none; when it is no JSON, or an entry is missing or impossible, with
    the file and the first such entry.
    """
    path = path or profile_path(kind)
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        command = "diptych lab calibrate" if kind == "cpu" and not has_gpu() else COMMANDS[kind]
        raise ConfigError(
            f"{_WORDS[kind]} has not been measured: there is no {path}",
            hint=f"run `{command}` (a minute or two), or name a device: --hardware NAME",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the hardware profile {path}: {error}", hint=_HINT) from None
    if not isinstance(data, dict):
        raise ConfigError(f"the hardware profile {path} is not a JSON object", hint=_HINT)
    try:
        read_profile(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None
    return data


def read_profile(profile: Mapping[str, Any]) -> tuple[HardwareSpec, Calibration]:
    """The machine and its calibration. ConfigError names the first entry that is missing or impossible."""
    if profile.get("schema") != SCHEMA:
        raise ConfigError(
            f"hardware profile has schema {profile.get('schema')!r}; this version reads {SCHEMA}", hint=_HINT
        )
    source = f"{profile.get('provenance', 'diptych lab calibrate')}, {profile.get('date', 'date unknown')}"
    flops = _rates(profile, "flops_per_s")
    hardware = HardwareSpec(
        name="local",
        title=str(profile.get("device", "this machine")),
        kind=str(profile.get("kind", "cpu")),
        flops_per_s=MappingProxyType(flops),
        memory_bytes_per_s=_positive(profile, "memory_bytes_per_s"),
        memory_bytes=_positive(profile, "memory_bytes"),
        provenance=tuple(
            Provenance(field=name, flag=Flag.MEASURED, source=source)
            for name in ("memory_bytes_per_s", "memory_bytes", *(f"flops_{dtype}" for dtype in flops))
        ),
    )
    attention = profile.get("attention", {})
    if not isinstance(attention, Mapping):
        raise ConfigError("hardware profile: attention is not an object", hint=_HINT)
    host = _host(profile)
    calibration = Calibration(
        name="local",
        prefill=_constants(profile, attention, "prefill_ef", host),
        decode=_constants(profile, attention, "decode_ef", host),
        prefill_residual=_residual(profile, "prefill"),
        decode_residual=_residual(profile, "decode"),
        source=source,
        is_local=True,
        cache=_cache(profile),
        host=host,
        is_of_our_kernels=OUR_COMPILER in str(profile.get("kernels")),
        on_latents=_on_latents(profile, host),
    )
    return hardware, calibration


def _constants(profile: Mapping[str, Any], attention: Mapping[str, Any], attention_key: str, host: Host) -> Constants:
    adapters = profile.get("adapters", {})
    if not isinstance(adapters, Mapping):
        raise ConfigError("hardware profile: adapters is not an object", hint=_HINT)
    experts = profile.get("experts", {})
    if not isinstance(experts, Mapping):
        raise ConfigError("hardware profile: experts is not an object", hint=_HINT)
    return Constants(
        step_s=_at_least_zero(profile, "t0_s") + host.step_s,
        layer_s=_at_least_zero(profile, "layer_s"),
        moe_layer_s=_at_least_zero(experts, "layer_s"),
        sequence_s=_at_least_zero(profile, "sequence_s") + host.sequence_s,
        prompt_s=host.prompt_s,
        prompt_token_s=host.prompt_token_s,
        eb=MappingProxyType(_rates(profile, "eb")),
        ef=MappingProxyType(_rates(profile, "ef")),
        # on a CPU the engine's experts run on the kernels that were measured
        expert_ef=MappingProxyType(_rates(experts, "ef") if experts else _rates(profile, "ef")),
        p=_positive(profile, "p"),
        kv_eb=_positive(attention, "kv_eb"),
        attention_ef=_positive(attention, attention_key),
        attention_ef_of=MappingProxyType(
            {name: _positive(entry, attention_key) for name, entry in attention.items() if isinstance(entry, Mapping)}
        ),
        adapter_layer_s=_at_least_zero(adapters, "layer_s"),
        adapter_ef=MappingProxyType(_rates(adapters, attention_key) if adapters else {}),
        group_ends=MappingProxyType(_rates(profile, "groups") if "groups" in profile else {}),
        activation_bytes_per_s=_positive(profile, "activation_bytes_per_s")
        if "activation_bytes_per_s" in profile
        else None,
    )


def _on_latents(profile: Mapping[str, Any], host: Host) -> tuple[Constants, Constants] | None:
    latents = profile.get("latents")
    if latents is None:
        return None
    if not isinstance(latents, Mapping):
        raise ConfigError("hardware profile: latents is not an object", hint=_HINT)
    layer_s = _at_least_zero(latents, "layer_s")
    prefill, decode = (_constants(profile, latents, key, host) for key in ("prefill_ef", "decode_ef"))
    return replace(prefill, latent_layer_s=layer_s), replace(decode, latent_layer_s=layer_s)


def _host(profile: Mapping[str, Any]) -> Host:
    entry = profile.get("host", {})
    if not isinstance(entry, Mapping):
        raise ConfigError("hardware profile: host is not an object", hint=_HINT)
    return Host(
        **{
            name: _at_least_zero(entry, name)
            for name in ("step_s", "sequence_s", "prompt_s", "prompt_token_s", "wake_s", "displaced_s")
        }
    )


def _cache(profile: Mapping[str, Any]) -> Cache | None:
    entry = profile.get("cache")
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ConfigError("hardware profile: cache is not an object", hint=_HINT)
    return Cache(
        bytes=_positive(entry, "bytes"),
        bytes_per_s=_positive(entry, "bytes_per_s"),
        eb=MappingProxyType(_rates(entry, "eb")),
        kv_eb=_positive(entry, "kv_eb") if "kv_eb" in entry else None,
        reach=_positive(entry, "reach") if "reach" in entry else CACHE_REACH,
    )


def _residual(profile: Mapping[str, Any], phase: str) -> Residual:
    residuals = profile.get("residuals")
    entry = residuals.get(phase) if isinstance(residuals, Mapping) else None
    if not isinstance(entry, Mapping):
        raise ConfigError(f"hardware profile has no residuals for {phase}", hint=_HINT)
    low, high = _number(entry, "low"), _number(entry, "high")
    if not -1.0 < low <= high < float("inf"):
        raise ConfigError(f"hardware profile: residuals of {phase} run from {low} to {high}", hint=_HINT)
    rows = int(_at_least_zero(entry, "rows"))
    return Residual(low=low, high=high, median_error=_number(entry, "median_error"), rows=rows)


def _rates(profile: Mapping[str, Any], key: str) -> dict[str, float]:
    table = profile.get(key)
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"hardware profile has no {key}", hint=_HINT)
    return {str(name): _positive(table, name) for name in table}


def _number(table: Mapping[str, Any], key: str) -> float:
    value = real(table.get(key))
    if value is None:
        raise ConfigError(f"hardware profile: {key} is {shown(table.get(key))}; it must be a number", hint=_HINT)
    return value


def _positive(table: Mapping[str, Any], key: str) -> float:
    value = _number(table, key)
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"hardware profile: {key} is {value}; it must be greater than 0", hint=_HINT)
    return value


def _at_least_zero(table: Mapping[str, Any], key: str) -> float:
    value = _number(table, key) if key in table else 0.0
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"hardware profile: {key} is {value}; it must be 0 or more", hint=_HINT)
    return value
