"""The named devices, models and number formats, read from `data/*.json`.

>>> device_spec("a100-80gb-sxm").memory_bytes_per_s
2039000000000.0
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from diptych.ground.errors import ConfigError
from diptych.ground.specs import Flag, HardwareSpec, KVSpec, Provenance, QuantSpec
from diptych.models.named import ALIASES, ROWS, named_model
from diptych.models.spec import ModelSpec

# Bytes per parameter include scales. q8_0/q4_0: blocks of 32 with one fp16 scale, head in q8_0/q6_k as llama.cpp does.
QUANTS: dict[str, QuantSpec] = {
    quant.name: quant
    for quant in (
        QuantSpec(name="fp32", weight_bytes=4.0, compute="fp32", attention_compute="fp32", activation_bytes=4.0),
        QuantSpec(name="bf16", weight_bytes=2.0),
        QuantSpec(name="fp8", weight_bytes=1.0, compute="fp8"),
        QuantSpec(name="int8", weight_bytes=1.0),
        QuantSpec(name="w8a8", weight_bytes=1.0, compute="int8"),
        QuantSpec(name="int4", weight_bytes=0.625),
        QuantSpec(name="fp4", weight_bytes=0.5625, head_weight_bytes=2.0, compute="fp4"),
        QuantSpec(name="mxfp4", weight_bytes=2.0, expert_weight_bytes=0.53125),
        QuantSpec(name="mxfp4-gguf", weight_bytes=1.0625, expert_weight_bytes=0.53125, compute="int8"),
        QuantSpec(name="q8_0", weight_bytes=1.0625, compute="int8"),
        QuantSpec(name="q4_0", weight_bytes=0.5625, head_weight_bytes=0.8203125, compute="int8"),
    )
}
QUANT_ALIASES = {"fp16": "bf16", "f16": "bf16", "float16": "bf16", "bfloat16": "bf16", "int4g32": "int4", "q4": "q4_0"}

KV_FORMATS: dict[str, KVSpec] = {
    kv.name: kv
    for kv in (
        KVSpec(name="fp32", bytes_per_element=4.0),
        KVSpec(name="bf16", bytes_per_element=2.0),
        KVSpec(name="fp8", bytes_per_element=1.0),
        KVSpec(name="int8", bytes_per_element=1.0),
        KVSpec(name="int4", bytes_per_element=0.5),
    )
}


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
        raise unknown_name("weight format", name, (*QUANTS, *QUANT_ALIASES))
    return found


def kv_spec(name: str, *, block_tokens: int = 16) -> KVSpec:
    """The KV format of that name."""
    found = KV_FORMATS.get(QUANT_ALIASES.get(name, name))
    if found is None:
        raise unknown_name("kv format", name, tuple(KV_FORMATS))
    return KVSpec(name=found.name, bytes_per_element=found.bytes_per_element, block_tokens=block_tokens)


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
