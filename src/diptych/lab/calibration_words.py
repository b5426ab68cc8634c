"""What a calibration found, for a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.engine.model_profile import FASTER
from diptych.ground.bounds import counted


def calibration_words(profile: Mapping[str, Any]) -> list[str]:
    """Lines about a profile as it was written: ceilings, constants, and how well they say what was measured."""
    is_gpu = profile["kind"] == "gpu"
    how = ", each predicted without the steps of its model" if is_gpu else ""
    return [
        *(_of_gpu(profile) if is_gpu else _of_cpu(profile)),
        *(
            f"  {phase}: median error {residual['median_error']:.1%}, measured/predicted - 1 from {residual['low']:+.0%} "
            f"to {residual['high']:+.0%} over {counted(residual['rows'], 'step')}{how}"
            for phase, residual in profile["residuals"].items()
        ),
    ]


def _of_cpu(profile: Mapping[str, Any]) -> list[str]:
    rates = ", ".join(f"{name} {rate / 1e9:.0f} Gop/s" for name, rate in profile["flops_per_s"].items())
    lines = [f"{profile['device']}: {profile['memory_bytes_per_s'] / 1e9:.1f} GB/s read, {rates}"]
    elsewhere = profile.get("elsewhere", {})
    lines += [
        f"  {phase}: the {elsewhere['backend']} backend is {elsewhere[phase]:.1f} times as fast with bf16 weights"
        for phase in profile["residuals"]
        if elsewhere.get(phase, 0.0) > FASTER
    ]
    return lines


def _of_gpu(profile: Mapping[str, Any]) -> list[str]:
    rates = ", ".join(f"{name} {rate / 1e12:.4g} TFLOP/s" for name, rate in profile["flops_per_s"].items())
    copies = ", ".join(f"{int(mib):,} MiB {rate / 1e12:.2f}" for mib, rate in profile["copy"].items())
    cache, attention, experts, host = (profile.get(name, {}) for name in ("cache", "attention", "experts", "host"))
    lines = [
        f"{profile['device']}, {profile['memory_bytes'] / 2**30:.0f} GiB ({profile['kernels']}): "
        f"{profile['memory_bytes_per_s'] / 1e12:.2f} TB/s, {rates}, a launch {_us(profile['launch_s'])} of the host",
        f"  copies in TB/s: {copies}",
    ]
    if cache:
        lines.append(f"  a cache of {cache['bytes'] / 2**20:.0f} MiB at {cache['bytes_per_s'] / 1e12:.2f} TB/s")
    for weights, share in profile["eb"].items():
        lines += [
            f"  {weights} reaches {share:.0%} of the bandwidth in weights, {attention['kv_eb']:.0%} in keys and values;",
            f"    of the arithmetic {profile['ef'][weights]:.0%} in products, {experts['ef'][weights]:.0%} in those of experts,"
            f" {attention['prefill_ef']:.0%} in attention of prompts",
        ]
    if latents := profile.get("latents"):
        lines.append(
            f"  latent attention: {latents['kv_eb']:.0%} of the bandwidth, {latents['prefill_ef']:.0%} of the arithmetic in "
            f"prompts, {_us(latents['layer_s'])} more a layer"
        )
    return [
        *lines,
        f"  a step takes {_us(profile['t0_s'])}, each layer {_us(profile['layer_s'])}, one with experts "
        f"{_us(experts['layer_s'])} more, each sequence {_us(profile['sequence_s'])}",
        f"  around it the host {_us(host['step_s'])}, {_us(host['sequence_s'])} for a sequence and {_us(host['prompt_s'])} for "
        "a prompt",
    ]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
