"""Which fitted constants apply to a device: by the software asked for, or the usual software of such a device.

Single steps have constants fitted to single steps; running services, whose steps hold prompts and answers side by side and
whose host keeps up or does not, have those of published services where the software has any.

>>> from diptych.cost.tables import device_spec
>>> calibration_for(device_spec("m2-max-38")).name
'llama.cpp-metal'
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from diptych.cost.calibration import Calibration, Constants, Coverage, Residual
from diptych.cost.tables import CONSUMER, data_text, unknown_name
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.specs import HardwareSpec

_RECENT = ("hopper", "blackwell", "blackwell-ultra")
# stack to use when a stack has rows of the other phase only
_PARTNER = {("gpt-fast", Phase.PREFILL): "tensorrt-llm-2024", ("tensorrt-llm-2024", Phase.DECODE): "gpt-fast"}


STEPS, SERVICES = "calibrations.json", "service_calibrations.json"


def stack_names() -> tuple[str, ...]:
    """All software with fitted constants."""
    return tuple(dict.fromkeys(entry["stack"] for file in (STEPS, SERVICES) for entry in _entries(file)))


def default_stack(hardware: HardwareSpec) -> str:
    """The software whose published numbers suit such a device best."""
    if hardware.kind == "apple":
        return "llama.cpp-metal"
    if hardware.kind == "cpu":
        return "llama.cpp-cpu"
    if hardware.architecture in CONSUMER:
        return "llama.cpp-cuda"
    return "tensorrt-llm" if hardware.architecture in _RECENT else "gpt-fast"


def calibration_for(hardware: HardwareSpec, *, stack: str | None = None, of_services: bool = False) -> Calibration:
    """The calibration of `stack` (None: the default) on this device. Raises ConfigError for an unknown stack.

    of_services: what its published services ask for, where there are any; what single steps do otherwise. Software without
    published steps has that of its services either way.
    """
    stack = stack or default_stack(hardware)
    if stack not in stack_names():
        raise unknown_name("software", stack, stack_names())
    prefill, decode = (_phase(hardware, stack, phase, of_services=of_services) for phase in Phase)
    return Calibration(
        name=stack,
        prefill=prefill.constants,
        decode=decode.constants,
        prefill_residual=prefill.residual,
        decode_residual=decode.residual,
        source=f"prefill: {prefill.source}. decode: {decode.source}",
        prefill_coverage=prefill.coverage,
        decode_coverage=decode.coverage,
        request_s=prefill.request_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    constants: Constants
    residual: Residual
    source: str
    coverage: Coverage
    request_s: float


def _phase(hardware: HardwareSpec, stack: str, phase: Phase, *, of_services: bool) -> _Found:
    steps, services = [(STEPS, stack), (STEPS, _PARTNER.get((stack, phase), stack))], [(SERVICES, stack)]
    wanted, found = stack, []
    for file, wanted in [*services, *steps] if of_services else [*steps, *services]:
        found = [entry for entry in _entries(file) if entry["stack"] == wanted and entry["phase"] == phase.value]
        if found:
            break
    else:
        raise ConfigError(
            f"no published {phase.value} numbers of {stack} to predict with", hint="choose another --stack"
        )
    best = max(found, key=lambda entry: _closeness(entry, hardware))
    seen: dict[str, list[str]] = best["seen"]
    origin = "fitted on this device" if hardware.name in seen else f"carried over from {', '.join(seen)}"
    residual = Residual(**best["residual"])
    return _Found(
        constants=constants_of(best["constants"]),
        residual=residual,
        source=f"{wanted}, {'of services, ' if file == SERVICES else ''}{origin} ({residual.rows} rows)",
        coverage=Coverage(
            devices=tuple(seen),
            formats=tuple(sorted({each for formats in seen.values() for each in formats})),
            mixtures=tuple(best["mixtures"]),
            splits=tuple(best["splits"]),
            largest_batch=best["largest_batch"],
            longest_tokens=best["longest_tokens"],
            borrowed_from=None if wanted == stack else wanted,
            widths=MappingProxyType(best["widths"]),
        ),
        request_s=best.get("request_s", 0.0),
    )


def _closeness(entry: dict[str, Any], hardware: HardwareSpec) -> tuple[bool, bool]:
    return hardware.name in entry["seen"], hardware.architecture in entry["architectures"]


@lru_cache(maxsize=2)
def _entries(file: str) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(data_text(file))["calibrations"])


def constants_of(fields: dict[str, Any]) -> Constants:
    """From what a file of calibrations has of them."""
    tables = {name: MappingProxyType(dict(fields[name])) for name in ("eb", "ef", "expert_ef")}
    return Constants(**{**fields, **tables})
