"""The op vocabulary: what a model family may ask of a backend, and what each op promises.

Owns no code that computes. A family writes its forward once against `Ops`, with weights it got from `Loader`; every
activation and every weight in that code is an opaque handle (a torch.Tensor here, a buffer number there). The torch
backend runs the calls eagerly; the cpu backend records them once into a program. So a family never looks into a handle,
never calls torch, and never depends on the batch.

    x = ops.embed(weights.embedding, scale=1.0)
    h = ops.norm(x, layer.input_norm, eps=1e-6)
    x = ops.linear_add(h, layer.down, x)      # always use the returned handle; x may have been written in place

Legend: T packed tokens of the step, R logits rows, D model dim, F ffn dim, H query heads, K kv heads, d head dim,
V vocab, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from diptych.compute.ops.contract_parts import (
    EntryParts,
    IndexParts,
    LinearParts,
    MixtureParts,
    NormParts,
    RelatedParts,
    Role,
    RuleParts,
    WeightTensor,
)
from diptych.compute.ops.contract_states import Heads, StateOps
from diptych.compute.ops.contract_streams import Hidden, Linear, Stream, StreamOps, Table, Vector
from diptych.ground.errors import ExecutorError
from diptych.models.gates import Activation, GateForm
from diptych.models.latent import EntrySpec, IndexSpec, MlaSpec
from diptych.models.mlp import MoeSpec
from diptych.models.positions import Distances, QueryScale, Related
from diptych.models.spec import QkNorm
from diptych.models.states import StateSpec

# The kinds of handle, beside those of streams. Each backend names its own types for them, once, where it derives from `Loader`
# and `Ops`.
Experts = TypeVar("Experts")  # a mixture

Position = TypeVar("Position", int, torch.Tensor)  # one, or several


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: dimensions i and i + rotary_dim/2 of a head turn by position * inv_freq[i].

    inv_freq: rotary_dim / 2 fp32 values. attention_factor multiplies cos and sin (yarn, longrope).
    Dimensions from rotary_dim on pass through unturned. Equal specs may share tables.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn."""
        return 2 * len(self.inv_freq)

    def tables(self, n_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """(cos, sin), each [n_positions, rotary_dim / 2] fp32, attention_factor included."""
        # the angle is rounded to fp32 before cos and sin, as everywhere the models were trained
        angles = np.arange(n_positions, dtype=np.float32)[:, None] * np.array(self.inv_freq, dtype=np.float32)
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention. window: a query sees the last `window` positions up to and with its own; None: all. Where a
    sequence attends both ways (`ForwardBatch.both_ways_S`) it sees so many to either side.

    layer: its number in the model; place: which layer of the cache it attends to, None: that of its number. owns_kv: it
    writes its keys and values there; otherwise another layer does, and it has q alone. has_v_norm: each head's value is
    normed over d, without a weight. has_v: values are projected; otherwise they are the keys before norm and turn.
    is_chunked: it sees those from the last multiple of `window` on instead. softcap: scores become
    softcap * tanh(score / softcap), after scale. rope None: no positions in this layer. mla: then there is one kv head, of
    kv_rank + rope_dim, whose keys are the values too. state: then there are no keys and values, and `place` is that of its
    states among a sequence's. v_head_dim: how wide a value is, None: as a key. v_scale: values are multiplied by it. index:
    what chooses what is attended to; index_place: which layer of the cache has its keys, if not those of latents. has_sinks,
    slopes, distances, related, entries: as `AttentionLayer` has them. entry_places: which of the states are those of its
    entries, and of the keys of its index. is_whole: of a state, each rank has all of it.
    """

    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    is_chunked: bool = False
    softcap: float | None = None
    rope: RopeSpec | None = None
    query_scale: QueryScale | None = None
    qk_norm: QkNorm = QkNorm.NONE
    norm_eps: float = 1e-6
    mla: MlaSpec | None = None
    state: StateSpec | None = None
    place: int | None = None
    owns_kv: bool = True
    has_v_norm: bool = False
    has_v: bool = True
    v_head_dim: int | None = None
    v_scale: float = 1.0
    index: IndexSpec | None = None
    index_place: int | None = None
    has_sinks: bool = False
    slopes: tuple[float, ...] = ()
    distances: Distances | None = None
    related: Related | None = None
    entries: EntrySpec | None = None
    entry_places: tuple[int, ...] = ()
    is_whole: bool = False

    @property
    def own_index(self) -> IndexSpec:
        """Of a layer that chooses."""
        assert self.index is not None
        assert self.index.is_own
        return self.index

    @property
    def index_eps(self) -> float:
        """Of the norm of an index's keys: of blocks, that of the layer's norms."""
        return self.norm_eps if self.own_index.block > 1 else self.own_index.norm_eps

    @property
    def value_dim(self) -> int:
        """Width of a value, and of what a head gives."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def cache_layer(self) -> int:
        """Where in the cache its keys and values lie."""
        return self.layer if self.place is None else self.place

    def first_seen(self, position: Position) -> Position | int:
        """The first position that a query at `position` sees; below 0 it sees all before it."""
        if self.window is None:
            return 0
        return position - position % self.window if self.is_chunked else position - self.window + 1


class Loader(ABC, Generic[Table, Vector, Linear, Heads, Experts]):
    """Turns checkpoint tensors into a backend's weight handles, once: head and embedding, then the layers in order.

    is_balancing: the walk is to hand over the weights as `loading.balance` makes them, for a format that rows of int8 enter.
    """

    is_balancing: bool

    def finish(self) -> None:
        """All was asked for: what is to be read all at once is read now. LoadError where it is damaged."""

    @abstractmethod
    def table(self, tensor: WeightTensor, *, head: Linear | None) -> Table:
        """The embedding [V, D], for `embed`; `head` is the handle of the same tensor where the head is tied to it."""

    @abstractmethod
    def rows(self, tensor: WeightTensor) -> Table:
        """A table [V, W] of which a token has a row, for `layer_inputs`: it may be larger than all that is multiplied."""

    @abstractmethod
    def norm(self, parts: NormParts, *, offset: float = 0.0, is_read: bool = True) -> Vector:
        """A norm over [D], as fp32; `offset` is added to its weight (1 for Gemma's 1 + w). is_read: by a projection."""

    @abstractmethod
    def vector(self, tensor: WeightTensor) -> Vector:
        """Numbers in fp32 as they are: of `weigh`, and of what mixes streams."""

    @abstractmethod
    def linear(self, parts: LinearParts, *, role: Role | None = None) -> Linear:
        """A projection, for `linear` and `linear_add`."""

    @abstractmethod
    def gated(
        self, parts: LinearParts, activation: Activation, *, role: Role | None = None, is_apart: bool = False
    ) -> Linear:
        """gate and up stacked [2F, D], gate rows first, for `linear_gate`; is_apart: for `bent_gate` and `sparse_gate`."""

    @abstractmethod
    def numbers(self, tensor: WeightTensor) -> tuple[float, ...]:
        """The few values of a tensor."""

    @abstractmethod
    def gate(self, parts: LinearParts, activation: Activation, *, role: Role | None = None) -> Linear:
        """A projection [F, D] with its activation, for `gate_given` and `curve`."""

    @abstractmethod
    def attention(
        self,
        spec: AttentionSpec,
        *,
        q_norm: WeightTensor | None,
        k_norm: WeightTensor | None,
        norm_offset: float = 0.0,
        sinks: WeightTensor | None = None,
        distances: WeightTensor | None = None,
        index: IndexParts | None = None,
        related: RelatedParts | None = None,
    ) -> Heads:
        """What `rotate_and_cache`, `choose` and `attention` need of a layer; the norms are given unless spec.qk_norm is NONE.

        sinks [H]: the score of one more key of each head, which has no value: a term in the softmax's denominator.
        distances [H, 2 reach + 1]: what a score gains where the key lies reach behind the query, ..., reach before it.
        index, related: of a layer that has one. Where scores are related, sequences come whole.
        """

    @abstractmethod
    def latent_attention(
        self,
        spec: AttentionSpec,
        *,
        norm: NormParts | None,
        keys: tuple[LinearParts, ...],
        values: tuple[LinearParts, ...],
        sinks: WeightTensor | None = None,
        scales: WeightTensor | None = None,
        index: IndexParts | None = None,
        entries: EntryParts | None = None,
    ) -> Heads:
        """What `cache_latents`, `cache_entries`, `choose`, `absorb`, `attention` and `expand` need of a layer of latent
        attention.

        norm: over the latent, None: it attends to another layer's. keys: of each head [kv_rank, nope_dim], what takes a query
        to the latent; values: of each head [v_dim, kv_rank], what takes a latent to the head's output. sinks: as `attention`
        has them. scales [2 H]: of each head s, behind these b, as `AttentionLayer.scales_heads` has them. index: of a layer
        that has one itself. Where rows are met as they are (`MlaSpec.n_groups`) norm is over a row, there are no keys, and
        values are of each group [outputs, H / groups * row]. entries: of a layer that has some.
        """

    @abstractmethod
    def state_rule(self, spec: AttentionSpec, rule: RuleParts) -> Heads:
        """What `move_states` needs of a layer."""

    @abstractmethod
    def router(self, parts: LinearParts) -> Linear:
        """A small projection whose outputs decide about others, for `linear`: kept in the finest format."""

    @abstractmethod
    def rates(self, parts: LinearParts) -> Linear:
        """As `router`, of states; an adapter may change them."""

    @abstractmethod
    def by_head(self, parts: tuple[LinearParts, ...], *, layer: int, divides: bool = False) -> Linear:
        """Projections for `by_head`: of each head or key head of a layer's state, as `router`; or of q, k and v each, all of as
        many outputs, which ranks divide by heads, as `linear`.
        """

    @abstractmethod
    def experts(self, spec: MoeSpec, parts: MixtureParts, *, role: Role | None = None) -> Experts:
        """A mixture, for `experts`."""

    @abstractmethod
    def head(self, tensor: WeightTensor, *, bias: WeightTensor | None = None, role: Role | None = None) -> Linear:
        """The output projection [V, D] with its bias [V], if any, for `head`."""


@dataclass(slots=True, kw_only=True)
class Taps:
    """What a forward is to hand out beside its result: `numbers` of `Ops.tap`; then `states` [taps, T, width] fp32, on the CPU
    where the backend is, valid as long as nobody else writes them.
    """

    numbers: tuple[int, ...]
    states: torch.Tensor | None = None


def refuse_logits(n_rows: int) -> None:
    """ExecutorError where logits are wanted of a model that only gives states."""
    if n_rows:
        raise ExecutorError(
            f"{n_rows} rows of logits are wanted of a model without an output projection",
            hint="it embeds or scores texts, and writes none",
        )


class Ops(
    StreamOps[Stream, Hidden, Table, Vector, Linear],
    StateOps[Hidden, Linear, Heads],
    Generic[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
):
    """The forward vocabulary. Handles of the residual stream are called x, everything else h, y, q, a."""

    @abstractmethod
    def input(self, width: int) -> Stream:
        """x [T, width]: the rows that the caller gives with the step, anew at each call."""

    @abstractmethod
    def tap(self, x: Stream | Hidden, number: int) -> None:
        """Hand out x [T, D] as it stands here, in steps that ask for this number."""

    @abstractmethod
    def start(self, h: Stream | Hidden, weight: Linear) -> Stream:
        """x [T, N] = h W^T + b: a residual stream that begins with a projection."""

    @abstractmethod
    def linear_sum(self, h: Stream | Hidden, weight: Linear, y: Hidden) -> Hidden:
        """y + h W^T + b [T, N], y a projection, which may be written and is not used again by the caller."""

    @abstractmethod
    def embed(
        self,
        table: Table,
        *,
        scale: float,
        positions: Table | None = None,
        first_position: int = 0,
        types: Table | None = None,
    ) -> Stream:
        """x [T, D] = scale * rows of the step's token ids + rows of their types, if any, in a table [n, D] + rows of their
        positions, if any, in a table [P, D].

        first_position: its row of position 0. A step whose positions it does not hold is an error. Types: as
        `ForwardBatch.types_T`.
        """

    @abstractmethod
    def norm(self, x: Stream | Hidden, weight: Vector, *, eps: float, parts: int = 1) -> Hidden:
        """h [T, D] = x / sqrt(mean(x^2) + eps) * weight + bias in fp32, of x - mean(x) where the norm is centred.

        parts: equal parts of a row that have a mean each; then it has no bias and is not centred.
        """

    @abstractmethod
    def linear(self, h: Stream | Hidden, weight: Linear) -> Hidden:
        """y [T, N] = h W^T + b."""

    @abstractmethod
    def linear_gate(self, h: Stream | Hidden, weight: Linear) -> Hidden:
        """y [T, F] = act(h Wgate^T + bg) * (h Wup^T + bu); the activation was given at load."""

    @abstractmethod
    def linear_add(self, h: Stream | Hidden, weight: Linear, x: Stream) -> Stream:
        """x [T, D] + h W^T + b; x may be written and is not used again by the caller."""

    @abstractmethod
    def add(self, x: Stream, y: Stream | Hidden, *, scale: float = 1.0) -> Stream:
        """x + scale * y [T, D]; x may be written and is not used again by the caller."""

    @abstractmethod
    def add_gated(self, x: Stream, y: Hidden, gate: Hidden) -> Stream:
        """x + sigmoid(gate) * y [T, D], gate [T, 1]; x may be written and is not used again by the caller."""

    @abstractmethod
    def scale(self, x: Stream, factor: float) -> Stream:
        """factor * x [T, D]; x may be written and is not used again by the caller."""

    @abstractmethod
    def bent_gate(
        self, h: Stream | Hidden, weight: Linear, *, form: GateForm, added: tuple[Hidden, Linear] | None = None
    ) -> Hidden:
        """y [T, F] of gate and up as `GateForm` says, gate = h Wgate^T + bg and up = h Wup^T + bu.

        added: what more of them comes by another such weight of something else.
        """

    @abstractmethod
    def sparse_gate(self, h: Stream | Hidden, weight: Linear, *, cutoff: float) -> Hidden:
        """y [T, F] = act(max(g - (mean(g) + cutoff * deviation(g)), 0)) * u, g = h Wgate^T + bg and u = h Wup^T + bu.

        Mean and deviation (over all F, not F - 1) are of the token's row of g.
        """

    @abstractmethod
    def curve(self, h: Stream | Hidden, weight: Linear, *, numbers: tuple[float, ...] = ()) -> Hidden:
        """y [T, F] = act(h W^T + b); the activation was given at load, numbers are what it has of its own."""

    @abstractmethod
    def clip(self, y: Hidden, limit: float) -> Hidden:
        """y [T, N] within +-limit, y a projection, which may be written and is not used again by the caller."""

    @abstractmethod
    def gate_given(self, h: Stream | Hidden, weight: Linear, given: Hidden, first: int) -> Hidden:
        """y [T, F] = act(h W^T + b) * given[:, first : first + F]."""

    @abstractmethod
    def join(self, a: Hidden, b: Hidden) -> Hidden:
        """[T, N + M]: a norm [T, N], and behind it a projection [T, M], which stays as it is."""

    @abstractmethod
    def keep(self, x: Stream, weight: Vector) -> Stream:
        """x * weight [T, D]; x may be written."""

    @abstractmethod
    def weigh_hidden(self, h: Hidden, weight: Vector) -> Hidden:
        """h * weight [T, N]; h may be written, and nobody reads it again."""

    @abstractmethod
    def weigh(self, x: Stream, weight: Vector) -> Hidden:
        """h [T, D] = x * weight."""

    @abstractmethod
    def layer_inputs(
        self, x: Stream, projection: Linear, norm: Vector, table: Table, *, eps: float, table_scale: float, scale: float
    ) -> Hidden:
        """[T, L P] = scale * (norm(x W^T) + table_scale * rows of the token ids), each of L parts normed by itself.

        norm is over [P]. A token id beyond the table has its first row.
        """

    @abstractmethod
    def rotate_and_cache(self, qkv: Hidden, attention: Heads) -> Hidden:
        """q [T, H, d] from qkv [T, (H + 2K) d]: norms, rotary embedding, q's scale; writes the tokens' k and v.

        Where the layer owns none it is q [T, H d], and nothing is written; where values are the keys it is [T, (H + K) d], and
        where they have a width of their own [T, (H + K) d + K dv].
        """

    @abstractmethod
    def cache_latents(self, kv: Hidden, attention: Heads) -> None:
        """Writes the step's tokens from kv [T, kv_rank + rope_dim]: the latent normed, the rotary part of the key turned; a row
        that is met as it is normed whole.
        """

    @abstractmethod
    def cache_entries(self, h: Stream | Hidden, attention: Heads) -> None:
        """Writes the entries that the step's tokens complete, of h [T, D], the layer's input, and moves their sums on.

        What `EntryParts` projects of h are n series of d and their gates, t the token's place in its entry. An entry is the sum
        over its tokens of softmax(gate + offsets[t]) * series, number by number; of two series over those of the first for the
        tokens of the entry before, if there is one, and those of the second for its own.
        """

    @abstractmethod
    def choose(self, h: Stream | Hidden, low: Stream | Hidden, attention: Heads) -> None:
        """Writes the step's tokens' index keys, and chooses what `attention` sees from here on, until the next choice.

        Each token sees the positions up to its own, or the entries, that its index scores highest, as `IndexSpec` says; of
        equals the cpu backend takes the lower, torch any. h [T, D]: the layer's input; low [T, q_rank]: what queries are made
        of, or h itself.
        """

    @abstractmethod
    def absorb(self, q: Hidden, attention: Heads) -> Hidden:
        """q [T, H, kv_rank + rope_dim] from [T, H (nope_dim + rope_dim)]: first parts to the latent, the rest turned; normed by
        head where rows are met as they are.
        """

    @abstractmethod
    def expand(self, a: Hidden, attention: Heads) -> Hidden:
        """[T, H v_dim] from attention's a, of which each head's first kv_rank numbers count; where rows are met as they are
        all, their ends turned back. a may be written and is not used again by the caller.
        """

    @abstractmethod
    def attention(self, q: Hidden, attention: Heads) -> Hidden:
        """a [T, H dv]: each query against its sequence's cached keys up to its own position, or those that `choose` chose;
        beside those of a window against the entries that are whole by then.
        """

    @abstractmethod
    def gate_heads(self, h: Stream | Hidden, weight: Linear, a: Hidden) -> Hidden:
        """a * act(h W^T + b) [T, N], or where W has fewer outputs each of as many parts of a by one number.

        act is a sigmoid or softplus; where W has as many, any of gates.

        a may be written and is not used again by the caller.
        """

    @abstractmethod
    def sum(self, a: Hidden, b: Hidden, *, gate: Hidden | None = None) -> Hidden:
        """a + b [T, N], or a + sigmoid(gate) * b, gate [T, 1]; a may be written and is not used again by the caller."""

    @abstractmethod
    def experts(self, h: Stream | Hidden, experts: Experts, *, routed: Stream | Hidden | None = None) -> Hidden:
        """y [T, D] = sum over the chosen experts of weight * expert(h). routed: what the router reads, if not h.

        Each expert's score is a softmax over n_scored, a sigmoid or the root of a softplus, of logits that may be capped. The
        best experts_per_token are chosen by score (plus choice_bias) among the best groups; their scores are the weights,
        renormalised to 1 or not, times routed_scale and the expert's scale, if any. Where the spec weighs inputs it is
        expert(weight * h) instead. Experts behind n_experts give h. by_token: the experts of a token are those of its id in
        the table.
        """

    @abstractmethod
    def head(
        self,
        x: Stream,
        norm: Vector | None,
        weight: Linear | None,
        *,
        eps: float,
        softcap: float | None,
        scale: float = 1.0,
    ) -> Hidden:
        """Logits [R, V] fp32 of the step's logits rows: norm if any, y = scale * (h W^T) + b, softcap * tanh(y / softcap).

        weight None: of a model that only gives states, of which no logits may be wanted (R is 0).
        """
