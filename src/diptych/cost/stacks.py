"""Which fitted constants apply to a device: by the software asked for, or the usual software of such a device.

>>> from diptych.cost.tables import device_spec
>>> calibration_for(device_spec("m2-max-38")).name
'llama.cpp-metal'
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from diptych.cost.calibration import Calibration, Constants, Coverage, Residual
from diptych.cost.tables import data_text, model_spec, unknown_name
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.specs import HardwareSpec

# An interval is never narrower than this: published rows of one model repeat less well than a residual suggests.
LEAST_SPREAD = 0.05
# Constants carried over to a device or phase they were not fitted on: the interval grows by half and to at least this.
CARRIED_SPREAD = 0.25

_RECENT = ("hopper", "blackwell", "blackwell-ultra")
_CONSUMER = ("ampere-consumer", "ada-consumer", "blackwell-consumer")
# stack to use when a stack has rows of the other phase only
_PARTNER = {
    ("gpt-fast", Phase.PREFILL): "tensorrt-llm-2024",
    ("tensorrt-llm-2024", Phase.DECODE): "gpt-fast",
}


def stack_names() -> tuple[str, ...]:
    """All software with fitted constants."""
    return tuple(dict.fromkeys(entry["stack"] for entry in _entries()))


def default_stack(hardware: HardwareSpec) -> str:
    """The software whose published numbers suit such a device best."""
    if hardware.kind == "apple":
        return "llama.cpp-metal"
    if hardware.kind == "cpu":
        return "llama.cpp-cpu"
    if hardware.architecture in _CONSUMER:
        return "llama.cpp-cuda"
    return "tensorrt-llm" if hardware.architecture in _RECENT else "gpt-fast"


def calibration_for(hardware: HardwareSpec, *, stack: str | None = None, weights: str | None = None) -> Calibration:
    """The calibration of `stack` (None: the default) on this device, for a weight format where it is known.

    The interval grows when the device or the format is not among the rows behind the constants.
    Raises ConfigError for an unknown stack.
    """
    stack = stack or default_stack(hardware)
    if stack not in stack_names():
        raise unknown_name("software", stack, stack_names())
    prefill = _phase(hardware, stack, Phase.PREFILL, weights)
    decode = _phase(hardware, stack, Phase.DECODE, weights)
    return Calibration(
        name=stack,
        prefill=prefill.constants,
        decode=decode.constants,
        prefill_residual=prefill.residual,
        decode_residual=decode.residual,
        source=f"prefill: {prefill.source}. decode: {decode.source}",
        prefill_coverage=prefill.coverage,
        decode_coverage=decode.coverage,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    constants: Constants
    residual: Residual
    source: str
    coverage: Coverage


def _phase(hardware: HardwareSpec, stack: str, phase: Phase, weights: str | None) -> _Found:
    wanted = stack
    found = [entry for entry in _entries() if entry["stack"] == stack and entry["phase"] == phase.value]
    if not found:
        wanted = _PARTNER.get((stack, phase), stack)
        found = [entry for entry in _entries() if entry["stack"] == wanted and entry["phase"] == phase.value]
    if not found:
        raise ConfigError(
            f"no published {phase.value} numbers of {stack} to predict with", hint="choose another --stack"
        )
    best = max(found, key=lambda entry: _closeness(entry, hardware))
    seen: dict[str, list[str]] = best["seen"]
    here = seen.get(hardware.name, [])
    formats = {each for entries in seen.values() for each in entries}
    is_own = bool(here) and (weights is None or weights in formats)
    residual = _widened(Residual(**best["residual"]), is_own=is_own)
    if is_own:
        origin = "fitted on this device"
    elif here:
        origin = f"carried over from {', '.join(here)} weights on this device"
    else:
        origin = f"carried over from {', '.join(seen)}"
    return _Found(
        constants=_constants(best["constants"]),
        residual=residual,
        source=f"{wanted}, {origin} ({residual.rows} rows)",
        coverage=Coverage(
            devices=tuple(seen),
            weights=tuple(here),
            largest_batch=best["largest_batch"],
            has_mixture=any(model_spec(name).moe is not None for name in best["models"]),
        ),
    )


def _closeness(entry: dict[str, Any], hardware: HardwareSpec) -> tuple[bool, bool]:
    return hardware.name in entry["seen"], hardware.architecture in entry["architectures"]


def _widened(residual: Residual, *, is_own: bool) -> Residual:
    if is_own:
        return replace(residual, low=min(residual.low, -LEAST_SPREAD), high=max(residual.high, LEAST_SPREAD))
    return replace(
        residual,
        low=max(min(1.5 * residual.low, -CARRIED_SPREAD), -0.9),
        high=max(1.5 * residual.high, CARRIED_SPREAD),
    )


@lru_cache(maxsize=1)
def _entries() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(data_text("calibrations.json"))["calibrations"])


def _constants(fields: dict[str, Any]) -> Constants:
    tables = {name: MappingProxyType(dict(fields[name])) for name in ("eb", "ef")}
    return Constants(**{**fields, **tables})
