"""Layers with a state in place of keys and values, as a config gives them: which they are, and their heads."""

from __future__ import annotations

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.family import Family
from diptych.models.spec import AttentionLayer, DeltaSpec

LINEAR = "linear_attention"


def delta_layers(config: HfConfig, family: Family, n_layers: int) -> list[bool]:
    """Which layers have a state: by layer_types, or all but every so many-th."""
    if not family.has_delta:
        return [False] * n_layers
    types = config.layer_types(n_layers, LINEAR)
    if types is not None:
        return [kind == LINEAR for kind in types]
    interval = config.integer("full_attention_interval", family.full_every)
    return [(i + 1) % interval != 0 for i in range(n_layers)]


def delta_attention(config: HfConfig) -> AttentionLayer:
    """The attention of such a layer."""
    delta = DeltaSpec(
        n_key_heads=config.integer("linear_num_key_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        n_value_heads=config.integer("linear_num_value_heads"),
        value_dim=config.integer("linear_value_head_dim"),
        n_taps=config.integer("linear_conv_kernel_dim"),
    )
    if delta.n_value_heads % delta.n_key_heads:
        raise LoadError(
            f"{delta.n_value_heads} value heads cannot share {delta.n_key_heads} key heads evenly ({config.path})"
        )
    return AttentionLayer(
        n_heads=delta.n_value_heads,
        n_kv_heads=delta.n_key_heads,
        head_dim=delta.value_dim,
        scale=delta.key_dim**-0.5,
        delta=delta,
    )
