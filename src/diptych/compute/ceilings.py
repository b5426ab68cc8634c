"""What the machine could do at most: bytes read per second and arithmetic per second, measured where the engine runs.

A rate means something only beside a ceiling measured just before and after it (memory changes speed within seconds on
shared machines), so these are quick, and benchmarks call them around every point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from diptych.compute.ops.cpu.kernels import (
    is_available,
    measure_ops_per_s,
    measure_read_bytes_per_s,
    measure_signal_s,
)
from diptych.compute.runner import Model
from diptych.ground.clock import MonotonicClock
from diptych.ground.formats import KV_FORMATS, engine_quant, engine_weights

READ_BYTES = 256 * 2**20  # far beyond any last-level cache share
CACHED = 1.15  # times the memory's rate from which on the place where the weights lie is a cache
REPEATS = 5
LAUNCHES = 4  # of a reading on a GPU: the first hides what the host takes to launch the rest
# why a phase may be faster than its ceiling, by the roof
ABOVE = {
    "memory": "the ceiling is the memory's, and caches, which are faster, gave part of what was read",
    "cache": "the ceiling is that of the cache that holds the weights, and a nearer one gave part of what was read",
    "arithmetic": "the processor is faster now than when its ceiling was measured",
}
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Best of several tries. flops_per_s is for the dtype in which the model's linear layers multiply, by the best instruction
    that the machine has for it, whichever the model uses; attention_flops_per_s for that of its products with the cache, where
    it is another. read_bytes_per_s: of the memory; cached_bytes_per_s: at which as
    many bytes are read as the weights have, where that is a cache's rate. signal_s: how long a thread waits for what another
    has just written. Some 40 ns where threads share a cache; 150 and more where they do not, and a virtual machine's host may
    move them from one to the other: then each has the memory's link of its own chip, and every meeting of threads costs more.
    """

    read_bytes_per_s: float
    flops_per_s: float
    compute_dtype: str
    threads: int
    attention_flops_per_s: float | None = None
    cached_bytes_per_s: float | None = None
    signal_s: float | None = None

    @property
    def roof(self) -> str:
        """What limits reading: "memory", or the "cache" that holds the weights."""
        return "memory" if self.cached_bytes_per_s is None else "cache"

    @property
    def roof_bytes_per_s(self) -> float:
        """The rate of that."""
        return self.cached_bytes_per_s or self.read_bytes_per_s

    def reading(self, bytes_per_s: float) -> Ceilings:
        """The same with the roof's rate as it was measured since."""
        return replace(self, read_bytes_per_s=bytes_per_s, cached_bytes_per_s=None)

    def words(self) -> str:
        """For a line of a report."""
        cached = (
            ""
            if self.cached_bytes_per_s is None
            else f" from memory, {self.cached_bytes_per_s / 1e9:.1f} from the cache that holds the weights"
        )
        attention = (
            "" if self.attention_flops_per_s is None else f" ({self.attention_flops_per_s / 1e9:.0f} in attention)"
        )
        apart = f", threads {self.signal_s * 1e9:.0f} ns apart" if self.signal_s else ""
        return f"{self.read_bytes_per_s / 1e9:.1f} GB/s{cached}, {self.flops_per_s / 1e9:.0f} Gop/s{attention}{apart}"


def compute_dtype(weights_format: str) -> str:
    """The dtype of the multiplications behind a weight format; of int4 weights, which meet int8 activations, int4."""
    return engine_weights(weights_format)[1]


def attention_dtype(model: Model) -> str:
    """The dtype of its products with the cache: one of int8 is met by whole numbers of 16 bits, as many at once as of bf16, or
    (int8x8) of 8.
    """
    in_bytes = KV_FORMATS[model.kv_format].compute
    return in_bytes or engine_quant(model.weights_format, model.head_format).attention_compute


def is_measured_natively(model: Model) -> bool:
    """Whether the kernels' own loops can say what the device allows: on a CPU that they were built for, also for torch."""
    return model.device.type == "cpu" and is_available()[0]


def machine_ceilings(model: Model) -> Ceilings:
    """Both ceilings of the device the model runs on, with as many threads as it uses; takes some tenths of a second."""
    memory, (flops_per_s, attention_flops_per_s) = memory_ceiling(model), arithmetic_ceilings(model)
    is_native = is_measured_natively(model)
    return Ceilings(
        read_bytes_per_s=memory,
        flops_per_s=flops_per_s,
        compute_dtype=compute_dtype(model.weights_format),
        threads=model.threads,
        attention_flops_per_s=attention_flops_per_s,
        cached_bytes_per_s=_cached_bytes_per_s(model, memory) if is_native else None,
        signal_s=measure_signal_s(model.placement) if is_native else None,
    )


def arithmetic_ceilings(model: Model) -> tuple[float, float | None]:
    """Of the linear layers and of the products with the cache, as `Ceilings` has them, and nothing of the memory."""
    dtype, of_attention = compute_dtype(model.weights_format), attention_dtype(model)
    if not is_measured_natively(model):  # a GPU, or a CPU without the kernels: what torch reaches
        return torch_flops_per_s(model.device, TORCH_DTYPES[dtype]), None
    own = measure_ops_per_s(dtype, model.placement)
    return own, None if of_attention == dtype else measure_ops_per_s(of_attention, model.placement)


def read_ceiling(model: Model) -> float:
    """Only the bandwidth of the roof, quickly: for use just before and after a measured point."""
    memory = memory_ceiling(model)
    return (_cached_bytes_per_s(model, memory) if is_measured_natively(model) else None) or memory


def memory_ceiling(model: Model) -> float:
    """Only the bandwidth of the memory, whatever the size of the model."""
    if is_measured_natively(model):
        return measure_read_bytes_per_s(2 * READ_BYTES, model.placement, REPEATS)  # one half is timed
    return torch_read_bytes_per_s(model.device)


def _cached_bytes_per_s(model: Model, memory_bytes_per_s: float) -> float | None:
    """How fast as many bytes are read as the weights have; None at the memory's pace."""
    if model.weight_bytes >= READ_BYTES:
        return None
    rate = measure_read_bytes_per_s(max(model.weight_bytes, 2**20), model.placement, REPEATS)
    return rate if rate > CACHED * memory_bytes_per_s else None


def torch_read_bytes_per_s(device: torch.device) -> float:
    """Of the memory, by torch: what is read and, on a GPU, written too."""
    values = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    read = READ_BYTES / _best_s(lambda: torch.dot(values, values), device)
    if device.type != "cuda":
        return read
    # a GPU's memory gives more to who also writes
    target = torch.empty_like(values)
    return max(read, 2 * READ_BYTES / _best_s(lambda: target.copy_(values), device))


def torch_flops_per_s(device: torch.device, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Of products of square matrices of random numbers, by torch: large ones, or of so many rows."""
    n = side or (8192 if device.type == "cuda" else 1024)
    left, right = torch.randn(2, n, n, device=device, dtype=dtype)
    return 2 * n**3 / _best_s(lambda: left @ right, device)


def _best_s(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        return min([_timed(work) for _ in range(REPEATS + 1)][1:])  # the first warms up
    with torch.cuda.device(device):
        return min([_timed_on_gpu(work) for _ in range(REPEATS + 1)][1:])


def _timed(work: Callable[[], torch.Tensor]) -> float:
    clock = MonotonicClock()
    begin_s = clock.now_s()
    work()
    return clock.now_s() - begin_s


def _timed_on_gpu(work: Callable[[], torch.Tensor]) -> float:
    """By the device's own clock, over several launches, so that none of them is waited for."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(LAUNCHES):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / LAUNCHES
