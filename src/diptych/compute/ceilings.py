"""What the machine could do at most: bytes read per second and arithmetic per second, measured where the engine runs.

A rate means something only beside a ceiling measured just before and after it (memory changes speed within seconds on
shared machines), so these are quick, and benchmarks call them around every point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from diptych.compute.ops.cpu_kernels import is_available, measure_ops_per_s, measure_read_bytes_per_s
from diptych.compute.runner import Model
from diptych.ground.clock import MonotonicClock
from diptych.ground.formats import engine_weights

READ_BYTES = 256 * 2**20  # far beyond any last-level cache share
REPEATS = 5
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Best of several tries. flops_per_s is for the dtype in which the model's linear layers multiply, by the best instruction
    that the machine has for it, whichever the model uses.
    """

    read_bytes_per_s: float
    flops_per_s: float
    compute_dtype: str
    threads: int


def compute_dtype(weights_format: str) -> str:
    """The dtype of the multiplications behind a weight format: int4 weights meet int8 activations."""
    return engine_weights(weights_format)[1]


def is_measured_natively(model: Model) -> bool:
    """Whether the kernels' own loops can say what the device allows: on a CPU that they were built for, also for torch."""
    return model.device.type == "cpu" and is_available()[0]


def machine_ceilings(model: Model) -> Ceilings:
    """Both ceilings of the device the model runs on, with as many threads as it uses; takes some tenths of a second."""
    dtype = compute_dtype(model.weights_format)
    if is_measured_natively(model):
        return Ceilings(
            read_bytes_per_s=read_ceiling(model),
            flops_per_s=measure_ops_per_s(dtype, model.placement),
            compute_dtype=dtype,
            threads=model.threads,
        )
    return Ceilings(  # a GPU, or a CPU without the kernels: what torch reaches
        read_bytes_per_s=_torch_read_bytes_per_s(model.device),
        flops_per_s=_torch_flops_per_s(model.device, TORCH_DTYPES[dtype]),
        compute_dtype=dtype,
        threads=model.threads,
    )


def read_ceiling(model: Model) -> float:
    """Only the bandwidth, quickly: for use just before and after a measured point."""
    if is_measured_natively(model):
        return measure_read_bytes_per_s(READ_BYTES, model.placement, REPEATS)
    return _torch_read_bytes_per_s(model.device)


def _torch_read_bytes_per_s(device: torch.device) -> float:
    values = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    return READ_BYTES / _best_s(lambda: torch.dot(values, values), device)


def _torch_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    n = 4096 if device.type == "cuda" else 1024
    left, right = torch.randn(2, n, n, device=device).to(dtype)
    return 2 * n**3 / _best_s(lambda: left @ right, device)


def _best_s(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    clock = MonotonicClock()
    times_s = []
    for _ in range(REPEATS + 1):  # the first warms up
        begin_s = clock.now_s()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(clock.now_s() - begin_s)
    return min(times_s[1:])
