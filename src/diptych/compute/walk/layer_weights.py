"""The weight handles of a model, as the walk in `decoder` takes them: of each layer, and of its ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diptych.compute.ops.contract import Experts, Heads, Linear, Table, Vector
from diptych.compute.walk.part_weights import (
    ApartNorms,
    AsideWeights,
    LatentExperts,
    LatentWeights,
    NormGate,
    SelectiveWeights,
    SharedExperts,
    StateWeights,
    UnitWeights,
    WeighedSums,
)
from diptych.compute.walk.stream_weights import (
    BranchWeights,
    Connection,
    GatedConnection,
    InputsWeights,
    MixingWeights,
    NgramWeights,
    OwnEmbedding,
)
from diptych.models.gates import GateForm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[Table, Vector, Linear, Heads, Experts]):
    """The handles of one layer: dense, experts, or neither; a norm that the family lacks is None, and so is all attention has.

    is_parallel: attention and MLP read the stream as it comes to the layer, by one norm or each by its own.
    is_shared: what it adds is added with what the next layer's attention gives, which reads the stream as it comes here.
    is_late: what its experts give, but not those that are shared, is added behind the next layer.
    norms_sums: the norms after attention and after the MLP are of the stream that they have added to, and become it.
    keeps_norms: what the norms before attention and before the MLP give becomes the stream, which is multiplied by
    before_attention and before_mlp when each has read it.
    gate: what the heads give is multiplied by, if anything, before o; input_gate, mlp_gate: what the norm before attention
    gives, and the one before the MLP. difference: of what the second half of the heads give, so much is taken from what the
    first half do. weighed: sums are weighed by channel. o_norm, down_norm: of what o and a dense MLP's down read, if they have
    one, with inner_eps; o's in o_norms equal parts, each by itself, gates_normed: before the gate. aside: what a layer has
    that only the next one reads. has_index: grouped queries choose what they attend to.
    """

    attention: Heads | None = None
    qkv: (
        Linear
        | LatentWeights[Vector, Linear]
        | StateWeights[Vector, Linear]
        | SelectiveWeights[Vector, Linear, Heads]
        | UnitWeights[Linear, Heads]
        | None
    ) = None
    o: Linear | None = None
    gate: Linear | None = None
    difference: float | None = None
    o_norm: Vector | None = None
    o_norms: int = 1
    gates_normed: bool = False
    down_norm: Vector | None = None
    inner_eps: float = 0.0
    has_index: bool = False
    input_norm: Vector | None
    post_attention_norm: Vector | None
    pre_mlp_norm: Vector | None
    post_mlp_norm: Vector | None
    input_gate: NormGate[Linear] | None = None
    mlp_gate: NormGate[Linear] | None = None
    dense: tuple[Linear, Linear] | None  # gate_up, down
    is_gated: bool = True  # of dense and of shared; else what comes first is up alone
    cutoff: float | None = None  # of the dense MLP's gate
    form: GateForm | None = None  # of gates of dense and of shared
    curve: tuple[float, ...] = ()  # numbers of the activation's own
    clip: float | None = None  # of q, k and v
    experts: Experts | None = None
    shared: SharedExperts[Linear] | None = None
    apart: ApartNorms[Vector] | None = None
    latent: LatentExperts[Vector, Linear] | None = None
    weighed: WeighedSums[Vector] | None = None
    is_parallel: bool = False
    is_shared: bool = False
    is_late: bool = False
    norms_sums: bool = False
    keeps_norms: bool = False
    before_attention: float = 1.0
    before_mlp: float = 1.0
    scale: float = 1.0  # of the stream behind the layer
    attention_scale: float = 1.0  # of what attention adds
    mlp_scale: float = 1.0  # of what the MLP adds
    branch: BranchWeights[Vector, Linear] | None = None
    mixing: MixingWeights[Vector, Linear] | None = None
    connections: tuple[Connection[Vector], Connection[Vector]] | None = None  # of attention, of the MLP
    gated: tuple[GatedConnection[Vector, Linear], GatedConnection[Vector, Linear]] | None = None  # likewise
    ngrams: NgramWeights[Table, Vector, Linear, Heads] | None = None
    embedding: OwnEmbedding[Vector, Linear] | None = None
    aside: AsideWeights[Linear] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights(Generic[Table, Vector, Linear, Heads, Experts]):
    """The handles of a model."""

    embedding: Table
    layers: tuple[LayerWeights[Table, Vector, Linear, Heads, Experts], ...]
    norm: Vector | None
    head: Linear | None  # None: it only gives states
    positions: Table | None = None
    types: Table | None = None
    inputs: InputsWeights[Table, Vector, Linear] | None = None
    begin: tuple[Linear, ...] = ()  # of each stream but the first
    end: tuple[Linear, ...] = ()
    connection: Connection[Vector] | None = None  # of the streams' end
    embedding_norm: Vector | None = None
    words: Linear | None = None  # what takes the embedding, normed, to the stream's width
    gated: GatedConnection[Vector, Linear] | None = None  # likewise
    transform: tuple[Linear, Vector] | None = None  # between norm and head, the latter of what the first has bent
    ids: Heads | None = None  # of tokens, moved on as states are
