"""config.json as typed numbers: every field is checked when it is asked for, and a wrong one is a LoadError by name.

Knows the two layouts of rotary settings: transformers 5 writes `rope_parameters` (per layer type in Gemma 3), older
versions `rope_theta` beside `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.compute.ops.contract import Activation
from diptych.ground.errors import LoadError

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


class HfConfig:
    """A config.json, or a part of one. `path` is where its fields are named in messages."""

    def __init__(self, raw: Mapping[str, Any], *, path: str = "config.json") -> None:
        self.raw = raw
        self.path = path

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """A whole number of at least `low`; `default` where the field is absent or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise LoadError(f"{name} in {self.path} is {value!r}; it must be a whole number of at least {low}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A whole number of at least 1, or None where the field is absent or null."""
        return None if self.raw.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A number greater than 0."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
            raise LoadError(f"{name} in {self.path} is {value!r}; it must be a number greater than 0")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number greater than 0; null means None, absent means `default`."""
        if name not in self.raw:
            return default
        return None if self.raw[name] is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
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

    def activation(self, *names: str) -> Activation:
        """The activation of the MLP under the first of `names` that is there; SiLU where none is."""
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                if value not in ACTIVATIONS:
                    raise LoadError(f"{name} in {self.path} is {value!r}; supported: {', '.join(sorted(ACTIVATIONS))}")
                return ACTIVATIONS[value]
        return Activation.SILU

    def layer_types(self, n_layers: int) -> list[str] | None:
        """'full_attention' or 'sliding_attention' per layer, or None where the config does not say."""
        value = self.raw.get("layer_types")
        if value is None:
            return None
        known = ("full_attention", "sliding_attention")
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

    def merged(self, defaults: Mapping[str, Any]) -> HfConfig:
        """The same config with `defaults` where a field is absent."""
        return HfConfig({**defaults, **self.raw}, path=self.path)

    def refuse_quantised(self) -> None:
        """LoadError for a checkpoint whose weights are already packed by another program."""
        quantisation = self.raw.get("quantization_config")
        if quantisation:
            method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else quantisation
            raise LoadError(
                f"{self.path} says the weights are quantised with {method!r}; only fp32, bf16 and fp16 files are read",
                hint="use the unquantised checkpoint and choose the weight format with --weights",
            )
