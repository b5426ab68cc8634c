"""GLM-5.3-Flash's configs: what layers are by several names, an object of what keeps a state, which mixtures there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig

STATE, INDEXED = "linear_attention", ("indexed_attention", "deepseek_sparse_attention", "full_attention")
DENSE_FIRST = 3  # layers, where a config does not say which are
# of linear_attn_config -> the keys beside it that say the same
OF_STATES = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "gate_lower_bound": "linear_lower_bound",
             "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
LEAST_DECAY = -5.0  # where a rule with a bound does not say which


def as_glm_next(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same config with layers of two kinds, and no object within it. LoadError where two keys say different things."""
    n = HfConfig({**defaults, **raw}, path=path).integer("num_hidden_layers")
    raw = {**raw, "layer_types": _kinds(raw, n, path), "mlp_layer_types": _mixtures(raw, n, path)}
    raw |= _of_states(raw, path)
    said = ("linear_attn_config", "first_k_dense_replace", "head_dim")
    return {key: value for key, value in raw.items() if key not in said}


def _kinds(raw: Mapping[str, Any], n: int, path: str) -> list[str]:
    kinds = raw.get("layer_types")
    if kinds is None:
        return [STATE if i % 4 != 3 else "full_attention" for i in range(n)]
    if not isinstance(kinds, list) or len(kinds) != n or any(kind not in (STATE, *INDEXED) for kind in kinds):
        raise LoadError(f"layer_types in {path} must name {n} layers, each {STATE} or {INDEXED[0]}")
    return [STATE if kind == STATE else "full_attention" for kind in kinds]


def _mixtures(raw: Mapping[str, Any], n: int, path: str) -> list[Any]:
    given, first = raw.get("mlp_layer_types"), raw.get("first_k_dense_replace")
    kinds = given if isinstance(given, list) else ["dense" if i < DENSE_FIRST else "sparse" for i in range(n)]
    if first is not None and kinds[:n] != ["dense" if i < first else "sparse" for i in range(n)]:
        raise LoadError(f"first_k_dense_replace in {path} is {first!r}; mlp_layer_types says otherwise")
    return kinds


def _of_states(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What linear_attn_config says, under the names beside it."""
    given = HfConfig(raw, path=path).section("linear_attn_config")
    found = {}
    for key, value in given.raw.items():
        if key in ("kda_layers", "full_attn_layers"):
            wanted = [i for i, kind in enumerate(raw["layer_types"]) if (kind == STATE) == (key == "kda_layers")]
            if value != wanted:
                raise LoadError(f"{key} in {given.path} is {value!r}; by layer_types it is {wanted}")
        elif key in OF_STATES:
            found[OF_STATES[key]] = value
        elif key != "safe_gate" and value:
            raise LoadError(f"{key} in {given.path} is {value!r}; no such thing is known of a rule that fades by key")
    least = found.get("linear_lower_bound", raw.get("linear_lower_bound", LEAST_DECAY))
    if given.raw and least is None and given.flag("safe_gate", True):
        found["linear_lower_bound"] = LEAST_DECAY
    return found
