"""The plain roofline: every component at the machine's peak. A bound that reality cannot beat, not a prediction.

Each component takes the longer of its arithmetic and its memory traffic; components depend on each other, so their
times add. Activations are left out: a fused kernel keeps them in caches.

>>> from diptych.cost.tables import device_spec
>>> round(balance(device_spec("a100-80gb-sxm"), "bf16"))
153
"""

from __future__ import annotations

from types import MappingProxyType

from diptych.cost.phase_cost import ATTENTION, PhaseCost
from diptych.ground.errors import ConfigError
from diptych.ground.formats import rows_dtype
from diptych.ground.specs import Bottleneck, HardwareSpec, KVSpec, QuantSpec, StepCost

# When a device lacks a dtype, weights are stored in it all the same but multiplied in the next wider one it has.
_WIDER = {"fp4": "fp8", "fp8": "bf16", "int4": "int8", "int8": "bf16", "bf16": "fp32"}


class NoRate(ConfigError):
    """A device multiplies in nothing that would do, or nobody measured how fast it is."""


def compute_dtype(hardware: HardwareSpec, wanted: str) -> str:
    """The dtype this device multiplies in when asked for `wanted`."""
    dtype: str | None = wanted
    while dtype is not None:
        if dtype in hardware.flops_per_s:
            return dtype
        dtype = _WIDER.get(dtype)
    raise NoRate(f"{hardware.name} has no peak rate for {wanted} or anything wider")


def multiplies_in(hardware: HardwareSpec, dtype: str) -> bool:
    """Whether it multiplies in just that; where nobody measured it apart, int4 is int8, whose rows it meets."""
    return compute_dtype(hardware, dtype) in (dtype, rows_dtype(dtype))


def peak_flops_per_s(hardware: HardwareSpec, wanted: str) -> float:
    """Dense peak of one device in the dtype it really uses for `wanted`."""
    return hardware.flops_per_s[compute_dtype(hardware, wanted)]


def attention_peak(hardware: HardwareSpec, quant: QuantSpec, kv: KVSpec) -> float:
    """Dense peak of one device in the dtype of attention's products with that cache."""
    return peak_flops_per_s(hardware, kv.compute or quant.attention_compute)


def balance(hardware: HardwareSpec, dtype: str) -> float:
    """FLOPs per byte at which the device turns from memory bound to compute bound."""
    return peak_flops_per_s(hardware, dtype) / hardware.memory_bytes_per_s


def link_rate(hardware: HardwareSpec, n_devices: int, *, what: str = "tensor parallel") -> float:
    """Bytes per second between devices; ConfigError when so many cannot be joined. what: makes them so many."""
    if n_devices > 1 and hardware.link_bytes_per_s is None:
        raise no_link(hardware, f"{what} {n_devices}")
    if n_devices > hardware.max_linked_devices:
        raise ConfigError(
            f"{what} is {n_devices}; at most {hardware.max_linked_devices} {hardware.name} are joined by a fast link"
        )
    return hardware.link_bytes_per_s or 1.0


def no_link(hardware: HardwareSpec, what: str) -> ConfigError:
    """The error for devices that nothing joins."""
    return ConfigError(f"{hardware.name} has no link to a second device; {what} is not possible")


def roofline(cost: PhaseCost, hardware: HardwareSpec, quant: QuantSpec, kv: KVSpec | None = None) -> StepCost:
    """The least time one step can take on `cost.tp` devices. kv: the cache it meets; None: one of bf16."""
    linear = peak_flops_per_s(hardware, quant.compute)
    peaks = dict.fromkeys(ATTENTION, attention_peak(hardware, quant, kv or KVSpec()))
    peaks["head"] = peak_flops_per_s(hardware, quant.head_compute or quant.compute)
    compute_s = memory_s = total_s = link_bytes = 0.0
    parts: dict[str, float] = {}
    for part in cost.components:
        part_compute_s = part.flops / peaks.get(part.name, linear)
        part_memory_s = part.bytes / hardware.memory_bytes_per_s
        compute_s += part_compute_s
        memory_s += part_memory_s
        parts[part.name] = max(part_compute_s, part_memory_s)
        total_s += parts[part.name]
        link_bytes += part.link_bytes
    link_s = link_bytes / link_rate(hardware, cost.tp)
    total_s += link_s
    return StepCost(
        compute_s=compute_s,
        memory_s=memory_s,
        link_s=link_s,
        host_s=0.0,
        total_s=total_s,
        low_s=total_s,
        high_s=total_s,
        bound=longest(compute_s=compute_s, memory_s=memory_s, link_s=link_s, host_s=0.0),
        is_bound=True,
        parts_s=MappingProxyType(parts),
    )


def longest(*, compute_s: float, memory_s: float, link_s: float, host_s: float) -> Bottleneck:
    """Which of the four a step waits for most."""
    if compute_s >= max(memory_s, link_s, host_s):
        return Bottleneck.COMPUTE
    if memory_s >= max(link_s, host_s):
        return Bottleneck.MEMORY
    return Bottleneck.LINK if link_s >= host_s else Bottleneck.LAUNCH
