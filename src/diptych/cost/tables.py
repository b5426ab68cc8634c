"""The named devices, read from `data/devices.json`, and the look-up of models and number formats by name.

>>> device_spec("a100-80gb-sxm").memory_bytes_per_s / 1e9
2039.0
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from diptych.ground.errors import ConfigError
from diptych.ground.formats import KV_FORMATS, QUANT_ALIASES, QUANTS, engine_quant, head_format
from diptych.ground.specs import Flag, HardwareSpec, KVSpec, Provenance, QuantSpec
from diptych.models.named import ALIASES, ROWS, named_model
from diptych.models.spec import ModelSpec

CONSUMER = ("ampere-consumer", "ada-consumer", "blackwell-consumer")  # architectures of cards for people's own machines


def model_names() -> tuple[str, ...]:
    """Names of all models in the table, in its order."""
    return tuple(ROWS)


def device_names() -> tuple[str, ...]:
    """Names of all devices in the table, in its order."""
    return tuple(row["name"] for row in _json("devices.json")["devices"])


def model_spec(name: str) -> ModelSpec:
    """The model of that name. ConfigError with the nearest names when there is none."""
    name = ALIASES.get(name, name)
    if name in ROWS:
        return named_model(name)
    raise unknown_name("model", name, (*ROWS, *ALIASES), hint="a path to a Hugging Face config.json also works")


@lru_cache(maxsize=256)
def device_spec(name: str) -> HardwareSpec:
    """The device of that name. ConfigError with the nearest names when there is none."""
    table = _json("devices.json")
    name = table["aliases"].get(name, name)
    for row in table["devices"]:
        if row["name"] == name:
            return _device(row)
    known = (*device_names(), *table["aliases"], "local")
    raise unknown_name("device", name, known, hint="`local` is this machine, once measured")


def quant_spec(name: str) -> QuantSpec:
    """The weight format of that name."""
    found = QUANTS.get(QUANT_ALIASES.get(name, name))
    if found is None:
        try:
            return engine_quant(name, head_format(name))
        except ValueError:
            pass
    if found is None:
        raise unknown_name("weight format", name, (*QUANTS, *QUANT_ALIASES))
    return found


def kv_spec(name: str, *, block_tokens: int = 16) -> KVSpec:
    """The KV format of that name."""
    found = KV_FORMATS.get(QUANT_ALIASES.get(name, name))
    if found is None:
        raise unknown_name("kv format", name, tuple(KV_FORMATS))
    return replace(found, block_tokens=block_tokens)


def unknown_name(what: str, name: str, known: Iterable[str], *, hint: str | None = None) -> ConfigError:
    """The error for a name that is in no table, with the nearest names that are."""
    near = get_close_matches(name.lower(), list(known), n=4, cutoff=0.45)
    text = f"unknown {what} {name!r}"
    if near:
        text += f"; the nearest names are {', '.join(near)}"
    listing = "`diptych plan --list` shows all names"
    return ConfigError(text, hint=f"{listing}; {hint}" if hint else listing)


@lru_cache(maxsize=8)
def _json(file_name: str) -> Any:
    return json.loads(files("diptych.cost").joinpath("data", file_name).read_text("utf-8"))


def data_text(file_name: str) -> str:
    """The text of one file of the package's data folder."""
    return files("diptych.cost").joinpath("data", file_name).read_text("utf-8")


def provenance_of(rows: Iterable[dict[str, str]]) -> tuple[Provenance, ...]:
    """Provenance entries from their JSON form."""
    return tuple(Provenance(field=row["field"], flag=Flag(row["flag"]), source=row["source"]) for row in rows)


def _device(row: dict[str, Any]) -> HardwareSpec:
    numbers: dict[str, Any] = row["numbers"]
    peaks = {key.removeprefix("flops_"): fact["value"] for key, fact in numbers.items() if key.startswith("flops_")}
    link = numbers.get("link_bytes_per_s")
    price = numbers.get("usd_per_hour")
    return HardwareSpec(
        name=row["name"],
        title=row["title"],
        kind=row["kind"],
        architecture=row.get("architecture", ""),
        flops_per_s=MappingProxyType(peaks),
        memory_bytes_per_s=numbers["memory_bytes_per_s"]["value"],
        memory_bytes=numbers["memory_bytes"]["value"],
        link_bytes_per_s=link["value"] if link else None,
        link_name=row.get("link_name"),
        max_linked_devices=row.get("max_linked_devices", 1),
        usd_per_hour=price["value"] if price else None,
        provenance=provenance_of({"field": key, **fact} for key, fact in numbers.items()),
    )
