"""The handles of what attention and mixtures are made of, as the walk in `decoder` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diptych.compute.ops.contract import Heads, Linear, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts(Generic[Linear]):
    """The handles of what every token meets beside a mixture: an MLP, and the projection [1, D] that gates it, if any."""

    gate_up: Linear
    down: Linear
    gate: Linear | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentExperts(Generic[Vector, Linear]):
    """What takes the stream to a mixture's experts, by way of a norm, if any, and what they give back to it."""

    down: Linear
    up: Linear
    norm: Vector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedSums(Generic[Vector]):
    """By what the channels of the stream are kept when attention adds to it, and the MLP; what the MLP gives is multiplied by
    before it is normed.
    """

    by_attention: Vector
    by_mlp: Vector
    mlp_given: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class ApartNorms(Generic[Vector]):
    """Norms of a mixture and shared experts that each have their own: before router and mixture, behind both."""

    router: Vector
    mixture: Vector
    behind_shared: Vector
    behind_mixture: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights(Generic[Vector, Linear]):
    """The projections of latent attention: queries directly (q alone) or over a rank of their own, and the latents.

    kv None: another layer's latents are attended to. has_index: the layer chooses what it attends to, by what index_norm makes
    of its input, if not by what queries are made of. has_entries: it makes entries of its tokens. gate: of what the heads give,
    where it and queries read both what is behind the rank's norm and what is before it.
    """

    q_down: Linear | None
    q_norm: Vector | None
    q: Linear
    kv: Linear | None
    has_index: bool = False
    index_norm: Vector | None = None
    has_entries: bool = False
    norm_eps: float = 1e-6  # of q_norm
    gate: Linear | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWeights(Generic[Vector, Linear]):
    """The projections of a state: q, k and v together, its rates, if any, and decays by key, in steps; the norm of what its
    gated heads give, or of what is gated behind it (norms_first). first_gate: what `LayerWeights.gate` reads.
    """

    qkv: Linear
    rates: Linear | None
    decays: tuple[Linear, ...] = ()
    first_gate: Linear | None = None
    norm: Vector | None
    n_norms: int  # equal parts of what they give, each normed by itself
    norm_eps: float
    norms_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveWeights(Generic[Vector, Linear, Heads]):
    """The projections of a selective state: what its taps see, which `taps` moves on; of what these give the channels' steps,
    in two projections with a norm between them, if any, and keys and queries beside each other, normed apart, if at all.
    is_by_head: all three are of each key head by itself.
    """

    values: Linear
    taps: Heads
    first_steps: Linear
    steps_norm: Vector | None
    steps: Linear
    keys: Linear
    keys_norm: Vector | None
    norm_eps: float
    is_by_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWeights(Generic[Linear, Heads]):
    """The projections of recurrent units: what their taps see, which `taps` moves on; of what these give the units' gates, by
    head.
    """

    values: Linear
    taps: Heads
    gates: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class AsideWeights(Generic[Linear]):
    """Of a layer that stands aside: q, k and v, which layers may share, and of its own what adds to these, if anything, and to
    gate and up, each a projection to few values and one from them; and the projection behind all.
    """

    qkv: Linear
    heads: tuple[Linear, Linear] | None
    inner: tuple[Linear, Linear] | None
    behind: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGate(Generic[Linear]):
    """What a norm gives is multiplied by: a sigmoid of two projections of it, with an activation between them."""

    down: Linear
    up: Linear
