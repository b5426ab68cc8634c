"""config.json as typed numbers: every field is checked when it is asked for, and a wrong one is a LoadError by name.

Sizes have upper bounds far above every published model, so that an absurd one is an error before anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.gates import Activation

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
    "relu2": Activation.SQUARED_RELU,
    "xielu": Activation.XIELU,
}
MAX_JSON_BYTES = 64 * 2**20  # an index of a thousand shards has a few
MAX_JSON_DEPTH = 64
# the most that a size may be; far above any published model, far below what overflows a product of three in 64 bits
SIZE_LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**21,
    "moe_intermediate_size": 2**21,
    "shared_expert_intermediate_size": 2**21,
    "num_hidden_layers": 2048,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "num_experts": 16_384,
    "num_experts_per_tok": 16_384,
    "n_shared_experts": 1024,
    "kv_lora_rank": 2**16,
    "q_lora_rank": 2**16,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "num_layers": 1024,  # of LongCat-Flash, each of which is two here
    "zero_expert_num": 16_384,
    "mamba_d_ssm": 2**21,
    "mamba_expand": 1024,
    "mamba_d_state": 2**16,
    "mamba_d_conv": 4096,
    "mamba_dt_rank": 2**17,
    "lru_width": 2**21,
    "conv1d_width": 4096,
}
MODELOPT_FILE = "hf_quant_config.json"
QUANTO_MAP = "quanto_qmap.json"
# what AutoGPTQ and AutoAWQ wrote beside a config before transformers read of either there -> the method
FILES_OF_METHODS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
SIZE_LIMIT = 2**31 - 1
TEXT_SECTIONS = ("text_config", "llm_config")  # where wrappers have their decoder; the second in InternVL's own files
WRITING_SECTION = "thinker_config"  # of a model that speaks, too: the wrapper around what writes
NUMBER_LIMIT = 1e30  # its powers and products are numbers still


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; LoadError when there is none, or it is larger or deeper than any config."""
    if path.exists() and not path.is_file():
        raise LoadError(f"{path} is no regular file")  # a pipe or a device: to open or read it may take for ever
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise LoadError(f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}", hint="download the file again") from error
    except RecursionError:
        raise LoadError(f"{path} is nested deeper than {MAX_JSON_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise LoadError(f"{path} is nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def read_config_file(path: Path) -> dict[str, Any]:
    """A config.json, with what older folders of NVIDIA's, AutoGPTQ's and AutoAWQ's and quanto's say of their weights in a file
    beside it, and what some wrappers say in the config of their decoder (Kimi K2.5).

    LoadError as `read_json`.
    """
    raw = read_json(path)
    decoder = HfConfig(raw, path=str(path)).decoder
    of_decoder = None if decoder is None else decoder.raw.get("quantization_config")
    if of_decoder and not raw.get("quantization_config"):
        return {**raw, "quantization_config": of_decoder}
    if path.name != "config.json" or raw.get("quantization_config"):
        return raw
    quanto = path.with_name(QUANTO_MAP)
    if quanto.is_file():
        return {**raw, "quantization_config": {"quant_method": "quanto", QUANTO_MAP: read_json(quanto)}}
    beside = path.with_name(MODELOPT_FILE)
    if beside.is_file():
        section = HfConfig(read_json(beside), path=str(beside)).section("quantization")
        return {**raw, "quantization_config": {**section.raw, "quant_method": "modelopt"}}
    for name, method in FILES_OF_METHODS.items():
        if path.with_name(name).is_file():
            return {**raw, "quantization_config": {"quant_method": method, **read_json(path.with_name(name))}}
    return raw


class HfConfig:
    """A config.json, or a part of one. `path` is where its fields are named in messages."""

    def __init__(self, raw: Mapping[str, Any], *, path: str = "config.json") -> None:
        self.raw = raw
        self.path = path

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number from `low` to the name's limit; `default` where the field is absent or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise LoadError(f"{name} in {self.path} is {value!r}; it must be a whole number of at least {low}")
        limit = SIZE_LIMITS.get(name, SIZE_LIMIT)
        if value > limit:
            raise LoadError(f"{name} in {self.path} is {value}; it must be at most {limit}")
        return value

    def optional_integer(self, name: str, *, low: int = 1) -> int | None:
        """A whole number of at least `low`, or None where the field is absent or null."""
        return None if self.raw.get(name) is None else self.integer(name, low=low)

    def number(self, name: str, default: float | None = None) -> float:
        """A number greater than 0."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= NUMBER_LIMIT:
            raise LoadError(
                f"{name} in {self.path} is {value!r}; it must be a number greater than 0 and at most {NUMBER_LIMIT:g}"
            )
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number greater than 0; None where the field is absent or null."""
        return None if self.raw.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; `default` where the field is absent or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise LoadError(f"{name} in {self.path} is {value!r}; it must be true or false")
        return value

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where the field is absent or null."""
        value = self.raw.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, int) for item in value)):
            raise LoadError(f"{name} in {self.path} is {value!r}; it must be a list of whole numbers")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """`count` numbers greater than 0."""
        value = self.raw.get(name)
        found = len(value) if isinstance(value, list) else 0
        if not isinstance(value, list) or found != count:
            raise LoadError(f"{name} in {self.path} has {found} numbers; {count} are needed")
        return tuple(HfConfig({name: item}, path=self.path).number(name) for item in value)

    def activation(self, *names: str) -> Activation:
        """The activation of the MLP under the first of `names` that is there."""
        name = next((name for name in names if self.raw.get(name) is not None), names[-1])
        value = self.raw.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise LoadError(f"{name} in {self.path} is {value!r}; supported: {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[value]

    def layer_types(self, n_layers: int, limited: str = "sliding_attention") -> list[str] | None:
        """'full_attention' or `limited` per layer, or None where the config does not say."""
        value = self.raw.get("layer_types")
        if value is None:
            return None
        known = ("full_attention", limited)
        if not isinstance(value, list) or any(item not in known for item in value):
            raise LoadError(f"layer_types in {self.path} may hold {' and '.join(known)} only")
        if len(value) != n_layers:
            raise LoadError(f"layer_types in {self.path} has {len(value)} entries; the model has {n_layers} layers")
        return value

    def section(self, name: str) -> HfConfig:
        """A nested object, empty where it is absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise LoadError(f"{name} in {self.path} is a {type(value).__name__}; it must be an object")
        return HfConfig(value, path=f"{name} of {self.path}")

    def at_most(self, name: str, value: int, limit: int) -> None:
        """LoadError when value is above limit."""
        if value > limit:
            raise LoadError(f"{name} in {self.path} is {value}; at most {limit} are there")

    @property
    def is_mxfp4(self) -> bool:
        """Whether the experts lie in blocks of MXFP4."""
        return self.section("quantization_config").raw.get("quant_method") == "mxfp4"

    @property
    def wrapper(self) -> HfConfig:
        """Of a model that speaks, too, the part that writes, which is a wrapper itself; this config where it has none."""
        return self.section(WRITING_SECTION) if self.raw.get(WRITING_SECTION) is not None else self

    @property
    def decoder(self) -> HfConfig | None:
        """Where a wrapper has the config of its decoder; None for a decoder's own."""
        wrapper = self.wrapper
        name = next((name for name in TEXT_SECTIONS if wrapper.raw.get(name) is not None), None)
        return None if name is None else wrapper.section(name)
