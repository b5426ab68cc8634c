"""What the description of a model family holds: names of architectures, keys of the config, how layers are made, tensor names.

`families` is the table of them. Plain data, no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diptych.models.spec import Norms, QkNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names inside a layer, without '.weight'. qkv and gate_up: separate projections, or one that is already stacked.

    mlp: where the MLP may be found, tried in order. expert: gate, up and down of one expert, where they are separate.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    mlp: tuple[str, ...] = ("mlp.",)
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. Where a field is `bool | str`, a string names the key of the config that decides.

    keys: every key read, with its class default; None: from the others. fixed: known keys and the values they may have.
    renamed: this class's name of a key -> the name used here. full_every: without layer_types, every so many-th layer
    attends to everything. local_theta: the key with the rotary base of windowed layers, which then have no scaling.
    longrope_names: rope types that mean longrope here. positions_offset: learned positions, and how many come first.
    prefixes: where tensors may begin, tried in order; ignored: parts of names of tensors that nobody needs.
    """

    name: str
    architectures: tuple[str, ...]
    keys: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    more_model_types: tuple[str, ...] = ()
    is_run: bool = True
    norms: Norms = Norms.BEFORE
    norm_offset: float = 0.0
    has_norm_bias: bool = False
    has_embedding_norm: bool = False
    has_scaled_embedding: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_key: str | None = None
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    is_gated: bool = True
    has_sinks: bool = False
    full_every: int | None = None
    local_theta: str | None = None
    longrope_names: tuple[str, ...] = ("su",)
    positions_offset: int | None = None
    renormalises: bool | str = "norm_topk_prob"
    has_router_bias: bool = False
    has_expert_bias: bool = False
    has_shared_gate: bool = False
    names: TensorNames = field(default_factory=TensorNames)
    prefixes: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @property
    def model_types(self) -> tuple[str, ...]:
        """What model_type may say."""
        return (self.name, *self.more_model_types)
