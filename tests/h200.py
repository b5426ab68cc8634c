"""A profile of an H200 by the writer's own hands, of steps that were measured there."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from diptych.compute.device_ceilings import DeviceCeilings
from diptych.cost.setup import own_quant
from diptych.cost.tables import kv_spec
from diptych.ground.shape import StepShape
from diptych.lab.fitted import TimedStep, fit
from diptych.lab.gpu_calibration import unfitted
from diptych.lab.rounds import Estimate
from diptych.models.config import HfConfig
from diptych.models.named import SHAPES
from diptych.models.read import read_model

CARD, KERNELS = "NVIDIA H200", "NVIDIA H200 sm_90, triton 3.6.0"
H200_BYTES = 150_754_820_096
DECODE = [StepShape.decode(batch=b, context_tokens=c) for b, c in ((1, 512), (1, 8192), (16, 512), (64, 512))]
PREFILL = [StepShape.prefill(batch=1, new_tokens=n, cached_tokens=c) for n, c in ((512, 0), (2048, 0), (2048, 8192))]
# ms of steps of an H200 (LAB.md, machine D): DECODE and PREFILL, each as it was measured there by benchmarks/gpu_steps.py
H200_STEPS: dict[str, tuple[int, list[StepShape], list[float]]] = {
    "qwen2.5-0.5b": (24, DECODE + PREFILL, [1.32, 1.57, 1.59, 1.87, 2.41, 5.32, 12.2]),
    "llama-3.1-8b": (32, DECODE + PREFILL, [4.80, 5.07, 5.14, 6.60, 15.3, 55.0, 79.5]),
    "qwen3-30b-a3b": (8, [DECODE[0], *DECODE[2:], *PREFILL[:2]], [1.26, 2.56, 3.86, 5.8, 14.7]),
}
H200 = DeviceCeilings(
    read_bytes_per_s=4.2e12,
    copy_bytes_per_s={16: 6e12, 2048: 4.2e12},
    flops_per_s={"bf16": 8e14, "fp32": 5.2e13},
    launch_s=3e-5,
)


def h200_samples() -> list[TimedStep]:
    """Those rows as a calibration has them."""
    found: list[TimedStep] = []
    for name, (n_layers, works, times_ms) in H200_STEPS.items():
        spec = read_model(HfConfig(SHAPES[name] | {"num_hidden_layers": n_layers}, path=name))
        view: Any = SimpleNamespace(spec=spec, quant=own_quant("bf16"), kv=kv_spec("bf16"))
        found += [
            TimedStep(view=view, work=work, measured=Estimate.of([ms / 1e3]), read_bytes_per_s=H200.read_bytes_per_s)
            for work, ms in zip(works, times_ms, strict=True)
        ]
    return found


def h200_profile() -> dict[str, Any]:
    """A profile of that card by the writer's own hands, but for its host, which nobody measured. The caller's own copy."""
    return deepcopy(_fitted())


@cache
def _fitted() -> dict[str, Any]:
    return fit(unfitted(H200, CARD, H200_BYTES, kernels=f"{KERNELS}, torch {torch.__version__}"), h200_samples())
