"""Which models the engine's kernels for a GPU compute, as far as the shape says; torch's own compute the rest of a model.

Here, where prices may ask, too: steps with kernels of torch are another machine's than the one that is calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from diptych.models.gates import Activation
from diptych.models.latent import IndexSpec, MlaSpec
from diptych.models.mlp import MoeSpec
from diptych.models.positions import Distances, Related
from diptych.models.spec import ModelSpec
from diptych.models.states import StateSpec

LARGEST_HEAD = 256  # beyond it a tile of keys and values does not fit beside another
LARGEST_RANK, LARGEST_TURNED = 512, 64  # beyond them a tile of latents does not fit beside the next
# what a kernel makes of its sums, by the number that it knows it by: of two matrices, and of one
GATES: Mapping[Activation, int] = MappingProxyType({Activation.SILU: 1, Activation.GELU_TANH: 2, Activation.CLAMPED: 3})
CURVES: Mapping[Activation, int] = MappingProxyType({Activation.SQUARED_RELU: 4})


class Attends(Protocol):
    """A layer's attention, as a model's shape or as the ops have it."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def value_dim(self) -> int:
        """Width of a value."""

    @property
    def window(self) -> int | None:
        """How many positions a query sees, None: all."""

    @property
    def softcap(self) -> float | None:
        """What holds scores within bounds."""

    @property
    def mla(self) -> MlaSpec | None:
        """Its latents."""

    @property
    def state(self) -> StateSpec | None:
        """Its state."""

    @property
    def index(self) -> IndexSpec | None:
        """What chooses among positions."""

    @property
    def has_sinks(self) -> bool:
        """Whether each head has a score of no position."""

    @property
    def slopes(self) -> tuple[float, ...]:
        """What each head's scores lose with the distance."""

    @property
    def distances(self) -> Distances | None:
        """What they gain by it."""

    @property
    def related(self) -> Related | None:
        """What they gain by it and contents."""


def missing_for(spec: Attends) -> str | None:
    """What of a layer's attention our kernels do not have; None where it attends by them."""
    if spec.state is not None:
        return "states"
    if spec.slopes:
        return "scores that fall with the distance"
    if spec.distances is not None:
        return "scores that are learned by distance"
    if spec.related is not None:
        return "scores that are made of contents and distances"
    if spec.mla is None:
        if spec.index is not None:
            return "an index of blocks"
        widest = max(spec.head_dim, spec.value_dim)
        return f"heads of {widest} (at most {LARGEST_HEAD})" if widest > LARGEST_HEAD else None
    if spec.mla.n_groups:
        return "rows that all heads meet as they are"
    if spec.has_sinks:
        return "latents beside sinks"
    if spec.mla.rope_dim == 0:
        return "latents without a part that turns"
    if spec.index is not None and spec.index.pool > 1:
        return "an index of pools"
    if spec.index is not None and spec.index.is_apart:
        return "an index apart from latents"
    if spec.window is not None or spec.softcap is not None:
        return "latents in a window or with capped scores"
    if spec.mla.kv_rank > LARGEST_RANK or spec.mla.rope_dim > LARGEST_TURNED:
        sizes = f"{spec.mla.kv_rank} and {spec.mla.rope_dim}"
        return f"latents of {sizes} (at most {LARGEST_RANK} and {LARGEST_TURNED})"
    return None


def kind_of_experts(spec: MoeSpec) -> int | None:
    """What the kernel makes of the sums of such experts; None: it has no such thing."""
    return (
        None
        if spec.limit is not None or spec.n_identities or spec.behind_eps is not None
        else (GATES if spec.is_gated else CURVES).get(spec.activation)
    )


def asks_the_host(spec: ModelSpec) -> str | None:
    """What has the walk ask the device something on its way, so that its steps cannot be recorded; None: nothing."""
    attentions = (layer.attention for layer in spec.layers if not layer.attention.is_absent)
    found = next((one for one in map(missing_for, attentions) if one is not None), None)
    if found is None and spec.moe is not None:
        mixtures = (layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec))
        if any(kind_of_experts(one) is None for one in mixtures):
            limited = (
                " within limits"
                if spec.moe.limit is not None
                else " beside identities"
                if spec.moe.n_identities
                else " that are normed"
                if spec.moe.behind_eps is not None
                else ""
            )
            return f"experts of {spec.moe.activation.value}{limited}"
    return found


def left_to_torch(spec: ModelSpec) -> str | None:
    """For what of a model torch's kernels compute its steps, or a part of each; None: ours compute them."""
    if spec.streams is not None:  # mixed by torch
        return "streams"
    if not spec.has_head:  # which may attend both ways
        return "want of an output projection"
    return asks_the_host(spec)
